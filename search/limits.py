"""How far may the axes of a plan go?  Defaults from model and cluster, narrowed and widened by the user."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from autoplan.base.errors import InputError
from autoplan.cost.memory.recompute import stores_scores
from autoplan.frameworks.common.rules import Rulebook
from autoplan.frameworks.megatron_lm.rules import missing_modules
from autoplan.frameworks.rulebooks import book_of
from autoplan.spec.enums import (
    CodedEnum,
    ContextParallelKind,
    Offload,
    Precision,
    RankOrder,
    RecomputeModule,
    Schedule,
    Sharding,
)
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import parse_recompute
from autoplan.spec.problem import Problem

# Context parallelism splits a sequence; below this many tokens a rank its GEMMs shrink and the ring no longer hides
# behind attention, while tp and pp divide the same memory more cheaply.  Meta trained Llama 3 405B at 8,192 tokens
# without it and at 131,072 with cp = 16, 8,192 tokens a rank (arXiv:2407.21783, table 4).
MIN_TOKENS_PER_CP_RANK = 4096
MAX_MICRO_BATCH = 16
MAX_BATCHES = 24
MOST_FEWER_AT_ENDS = 4  # more than that, no head of a published model is worth in layers

COUNTS = ("tp", "cp", "pp", "vp", "ep", "etp", "dp", "dp_replicate", "dp_shard", "micro_batch")
WORDS: dict[str, tuple[CodedEnum, ...]] = {
    "sharding": tuple(Sharding),
    "schedule": tuple(Schedule),
    "cp_kind": tuple(ContextParallelKind),
    "offload": tuple(Offload),
    "rank_order": tuple(RankOrder),
}
FLAGS = ("sp", "tp_overlap")
USUAL_SCHEDULES = ("1f1b", "interleaved")
# Off unless asked for.
ALLOWED = (
    "zero2",
    "zero3",
    "offload",
    "partial_recompute",
    "uneven_stages",
    "partial_sharding",
    "tp_overlap",
    *(f"schedule={name}" for name in Schedule if name not in USUAL_SCHEDULES),
)
ELSEWHERE = {  # what a person may try to fix, and where it is said
    "precision": "use --precision",
    "attention": "use --attention",
    "framework": "use --framework",
    "global_batch": "use --global-batch",
    "seq_len": "use --seq-len",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a search may vary.  `fixed` and `most` are (axis, value) pairs over `COUNTS`; `most` bounds from above.

    `shard_domains` are the sizes of the link domains within which optimizer states may be sharded, beside sharding
    over all replicas.  The first element of every tuple of words is the plain choice.
    """

    global_batches: tuple[int, ...]
    precision: Precision = Precision.BF16
    fixed: tuple[tuple[str, int], ...] = ()
    most: tuple[tuple[str, int], ...] = ()
    shard_domains: tuple[int, ...] = ()
    sequence_parallel: bool = True
    shardings: tuple[str, ...] = ("none", "zero1")
    schedules: tuple[str, ...] = USUAL_SCHEDULES
    recomputes: tuple[str, ...] = ("none", "full")  # as `parse_recompute` reads them
    partial_recomputes: tuple[str, ...] = ()  # what a user may add to them
    cp_kinds: tuple[str, ...] = tuple(ContextParallelKind)
    offloads: tuple[str, ...] = ("none",)
    tp_overlaps: tuple[bool, ...] = (False,)
    fewer_at_ends: int = 1  # layers that the first and the last chunk may have less than others
    shards_any_part: bool = False  # whether states may be sharded over any part of the replicas
    rank_orders: tuple[RankOrder, ...] = (RankOrder.DP_BEFORE_PP,)
    # The one way in which the framework cuts the model into so many stages; None: several are tried.
    split: Callable[[ModelSpec, int], tuple[int, ...]] | None = None
    split_schedules_overlap: bool = True  # whether states are reduced beside a backward pass in two parts

    def admits(self, axis: str, value: int) -> bool:
        """Whether a count obeys what is fixed and bounded."""
        return all(value == fixed for name, fixed in self.fixed if name == axis) and all(
            value <= most for name, most in self.most if name == axis
        )

    def fixes(self, *axes: str) -> bool:
        """Whether one of `axes` has one value only."""
        return any(name in axes for name, _ in self.fixed)

    @property
    def repeat_numbers(self) -> tuple[int, ...]:
        """How many layers of a chunk plans may recompute where they say a number, ascending."""
        return tuple(sorted(int(choice[5:]) for choice in self.recomputes if choice.startswith("full:")))

    def describe(self) -> tuple[str, ...]:
        """The limits in words, for the certificate."""
        parts = [f"{axis} = {value}" for axis, value in self.fixed]
        parts += [f"{axis} <= {value}" for axis, value in self.most]
        parts += ["sharding " + "|".join(self.shardings), "recompute " + "|".join(_in_short(self.recomputes))]
        if any(self.tp_overlaps):
            parts.append("tp_overlap " + "|".join("on" if value else "off" for value in self.tp_overlaps))
        if self.schedules != USUAL_SCHEDULES:
            parts.append("schedule " + "|".join(self.schedules))
        if self.cp_kinds != tuple(ContextParallelKind):
            parts.append("cp_kind " + "|".join(self.cp_kinds))
        if self.offloads != ("none",):
            parts.append("offload " + "|".join(self.offloads))
        if self.rank_orders != (RankOrder.DP_BEFORE_PP,):
            parts.append("rank_order " + "|".join(self.rank_orders))
        return tuple(parts)


def _in_short(recomputes: tuple[str, ...]) -> tuple[str, ...]:
    """Choices of recomputation, numbers of layers as a range."""
    numbers = [int(choice[5:]) for choice in recomputes if choice.startswith("full:")]
    if len(numbers) < 3:
        return recomputes
    return (*(one for one in recomputes if not one.startswith("full:")), f"full:{min(numbers)}..{max(numbers)}")


def default_limits(problem: Problem, global_batches: Iterable[int]) -> Limits:
    """The space that a person would look at first.

    tp stays inside the fastest domain that joins devices: its collectives are exposed in every layer.  Choices that
    the cost model never prefers are left out: recomputing attention under a flash kernel, which keeps nothing
    there, and switching off an overlap.  Shardings, schedules and kinds of context parallelism are those that the
    framework has and that its users would try first.
    """
    cluster, training, book = problem.cluster, problem.training, book_of(problem.framework)
    even = (level for level in problem.topology.levels if level.seats is None or level.seats.is_even)
    domains = sorted({level.num_devices for level in even if level.num_devices > 1})
    return Limits(
        global_batches=tuple(sorted(set(global_batches))),
        precision=training.precision,
        most=(
            ("tp", min(cluster.levels[-1].num_devices, cluster.num_devices)),
            ("cp", max(training.seq_len // MIN_TOKENS_PER_CP_RANK, 1)),
            ("micro_batch", MAX_MICRO_BATCH),
        ),
        shard_domains=tuple(domains[:-1]) if book.shards_over_part else (),  # the last domain is the whole cluster
        sequence_parallel=problem.framework.network.sequence_parallel,
        shardings=book.usual_shardings,
        schedules=tuple(name for name in USUAL_SCHEDULES if name in book.words("schedule")),
        recomputes=_recomputes(problem, book),
        partial_recomputes=(
            *(_parts(problem.model) if book.repeats_parts else ()),
            *(_numbers(problem.model) if book.repeats_some_layers else ()),
        ),
        cp_kinds=book.words("cp_kind"),
        rank_orders=problem.framework.rank_orders if _order_matters(problem) else problem.framework.rank_orders[:1],
        split=book.split,
        split_schedules_overlap=book.split_schedules_overlap,
    )


def _order_matters(problem: Problem) -> bool:
    """Whether it matters much which groups have the nearer ranks: where links beyond a node differ."""
    return len(problem.topology.levels) > len(problem.cluster.levels) + 1


def _recomputes(problem: Problem, book: Rulebook) -> tuple[str, ...]:
    """Selective recomputation gives memory back where scores are stored or more than attention is repeated."""
    gives_back = stores_scores(problem) or problem.framework.kernels.selective_recompute_share > 0
    return tuple(name for name in book.words("recompute") if gives_back or name != "selective")


def _parts(model: ModelSpec) -> tuple[str, ...]:
    """Parts of a layer that the model has, alone and the cheap ones together."""
    missing = missing_modules(model) | {"core_attn"}
    parts = [module for module in RecomputeModule if module not in missing]
    cheap = [module for module in ("layernorm", "mla_up_proj", "moe_act") if module in parts]
    together = ["+".join(cheap[:count]) for count in range(2, len(cheap) + 1)]
    return (*parts, *together)


def _numbers(model: ModelSpec) -> tuple[str, ...]:
    """Numbers of layers of a chunk."""
    return tuple(f"full:{number}" for number in range(1, model.num_layers))


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number`, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def batch_grid(low: int, high: int, num_devices: int) -> tuple[int, ...]:
    """Global batches to try between `low` and `high`, one that divides well in every part of the range.

    Parts are a quarter of an octave, or longer so that there are about `MAX_BATCHES`.  Data-parallel degrees divide
    the number of devices, so that the multiple of its largest divisor in a part is divided by most of them.
    """
    degrees = divisors(num_devices)[::-1]
    step = max(2**0.25, (high / low) ** (1 / MAX_BATCHES))
    grid = set()
    start = low
    while start <= high:
        end = min(max(math.floor(start * step), start), high)
        grid.add(next(end // degree * degree for degree in degrees if end // degree * degree >= start))
        start = end + 1
    return tuple(sorted(grid))


def _pairs(wishes: Iterable[str], option: str) -> tuple[tuple[str, str], ...]:
    """(axis, value) of every AXIS=VALUE, each axis once."""
    pairs: dict[str, str] = {}
    for wish in wishes:
        axis, sign, value = wish.partition("=")
        axis = axis.strip().lower().replace("-", "_")
        if not sign or not axis or not value.strip():
            raise InputError(f"{option} {wish!r}: write AXIS=VALUE, such as {option} tp=8")
        if axis in pairs:
            raise InputError(f"{option} {axis} is given twice: leave one of them out")
        pairs[axis] = value.strip().lower()
    return tuple(pairs.items())


def _count(axis: str, value: str, option: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= len(value) <= 7 or int(value) < 1:
        raise InputError(f"{option} {axis}={value}: must be a whole number from 1 to 9999999")
    return int(value)


def _flag(axis: str, value: str) -> bool:
    if value not in ("true", "false", "on", "off"):
        raise InputError(f"--fix {axis}={value}: must be on or off")
    return value in ("true", "on")


def _not_an_axis(name: str, known: tuple[str, ...]) -> str:
    if name in ELSEWHERE:
        return f"not an axis of the search: {ELSEWHERE[name]}"
    if close := difflib.get_close_matches(name, known):
        return f"unknown axis: did you mean {' or '.join(close)}?"
    return f"unknown axis; known: {', '.join(known)}"


def _fix(limits: Limits, axis: str, value: str) -> Limits:
    if axis in COUNTS:
        count = _count(axis, value, "--fix")
        # A value that is fixed replaces the bound that is there by default.
        most = tuple((name, bound) for name, bound in limits.most if name != axis)
        return replace(limits, fixed=(*limits.fixed, (axis, count)), most=most)
    if axis == "recompute":
        parse_recompute(value)
        return replace(limits, recomputes=(value,))
    if axis in WORDS:
        if value not in WORDS[axis]:
            raise InputError(f"--fix {axis}={value}: must be one of {', '.join(WORDS[axis])}")
        return replace(limits, **{axis + "s": (value,)})  # type: ignore[arg-type]
    if axis == "tp_overlap":
        return replace(limits, tp_overlaps=(_flag(axis, value),))
    if axis == "sp":
        return replace(limits, sequence_parallel=_flag(axis, value))
    raise InputError(f"--fix {axis}: {_not_an_axis(axis, (*COUNTS, *WORDS, 'recompute', *FLAGS))}")


def with_wishes(limits: Limits, *, fix: Iterable[str], at_most: Iterable[str], allow: Iterable[str]) -> Limits:
    """`limits` with the user's AXIS=VALUE wishes: fixed values, bounds, and choices that are off by default."""
    for wish in allow:
        name = wish.strip().lower()
        axis, sign, value = name.partition("=")
        name = f"{axis}={value.replace('_', '-')}" if sign else name.replace("-", "_")
        if name not in ALLOWED:
            close = difflib.get_close_matches(name, ALLOWED, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(ALLOWED)}"
            raise InputError(f"--allow {wish}: unknown; {hint}")
        if name in ("zero2", "zero3"):
            limits = replace(limits, shardings=tuple(dict.fromkeys((*limits.shardings, name))))
        elif axis == "schedule":
            schedule = name.removeprefix("schedule=")
            limits = replace(limits, schedules=tuple(dict.fromkeys((*limits.schedules, schedule))))
        elif name == "partial_recompute":
            if not limits.partial_recomputes:
                raise InputError("--allow partial_recompute: the framework recomputes all layers or none, leave it out")
            recomputes = tuple(dict.fromkeys((*limits.recomputes, *limits.partial_recomputes)))
            limits = replace(limits, recomputes=recomputes)
        elif name == "offload":
            limits = replace(limits, offloads=("none", "optimizer"))
        elif name == "uneven_stages":
            limits = replace(limits, fewer_at_ends=MOST_FEWER_AT_ENDS)
        elif name == "partial_sharding":
            limits = replace(limits, shards_any_part=True)
        else:
            limits = replace(limits, tp_overlaps=(False, True))
    asked = {}
    for axis, value in _pairs(at_most, "--max"):
        if axis not in COUNTS:
            raise InputError(f"--max {axis}: {_not_an_axis(axis, COUNTS)}")
        asked[axis] = _count(axis, value, "--max")
    kept = tuple((name, most) for name, most in limits.most if name not in asked)
    limits = replace(limits, most=(*kept, *asked.items()))
    for axis, value in _pairs(fix, "--fix"):
        limits = _fix(limits, axis, value)
    for axis, count in limits.fixed:
        if count > asked.get(axis, count):
            raise InputError(f"--fix {axis}={count} is above --max {axis}={asked[axis]}: leave one of them out")
    return limits


def check_words(name: str, book: Rulebook, limits: Limits) -> None:
    """Refuse limits that ask the framework `name` for a choice that it does not have."""
    for axis in WORDS:
        known = book.words(axis)
        for word in getattr(limits, axis + "s"):
            if word not in known:
                raise InputError(f"{name} has no {axis} {word}: it has {' and '.join(known)}")
