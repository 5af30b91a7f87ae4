"""Limits of the axes of a plan: defaults from model and cluster, changed by the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autoplan.base.errors import InputError
from autoplan.base.names import close_names, suggestion
from autoplan.cost.memory.recompute import stores_scores
from autoplan.frameworks.common.rules import Rulebook
from autoplan.frameworks.megatron_lm.rules import missing_modules
from autoplan.frameworks.registry import book_of
from autoplan.search.axes import parts_of
from autoplan.spec.axes import AXES, AXIS, SEARCHED, Axis, Kind, Value, shown
from autoplan.spec.enums import CudaGraphs, Dispatcher, Precision, Recompute, RecomputeModule
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import parse_recompute
from autoplan.spec.problem import Problem

# Minimum tokens per rank with context parallelism: with fewer tokens GEMMs shrink and attention no longer hides the
# ring, while tp and pp divide the same memory at a lower cost.  Meta trained Llama 3 405B at 8,192 tokens without it
# and at 131,072 with cp = 16, 8,192 tokens per rank (arXiv:2407.21783, table 4).
MIN_TOKENS_PER_CP_RANK = 4096
MAX_MICRO_BATCH = 16
MAX_BATCHES = 24
MAX_FEWER_AT_ENDS = 4  # no published model's head costs more layers than this

COUNTS = tuple(axis.name for axis in AXES if axis.can_be_bounded)
# Extents: how far layers, recomputation and sharding may go beyond the plain choices of their axes.
EXTENTS = ("partial_recompute", "uneven_stages", "partial_sharding")
# Counts for which --forbid accepts any value; the parts of replicas that share states are an extent.
FORBIDDEN_COUNTS = tuple(name for name in COUNTS if name not in ("dp_replicate", "dp_shard"))
# Arguments of --forbid: an extent, an axis that then keeps its plain value, or one value of an axis with others.
FORBIDDEN = (
    *EXTENTS,
    *FORBIDDEN_COUNTS,
    *(axis.name for axis in SEARCHED),
    *(f"{axis.name}={shown(value)}" for axis in SEARCHED for value in axis.searched),
    *("recompute", *(f"recompute={word}" for word in Recompute)),
    *("sp", "sp=off", "sp=on"),
)
# Arguments of --allow: an axis whose values change the numerics of training, or one of these values.
ALLOWED = tuple(
    choice
    for axis in SEARCHED
    if axis.exact is not None
    for choice in (axis.name, *(f"{axis.name}={shown(value)}" for value in axis.searched))
)
# Names that a user may try to fix that are not axes of a search, and where they are set instead.
ELSEWHERE = {axis.name: axis.elsewhere for axis in AXES if axis.elsewhere} | {
    "attention": "use --attention",
    "framework": "use --framework",
    "seq_len": "use --seq-len",
    "optimizer": "use --optimizer",
    "nodes": "use --nodes, or the size in --cluster",
}
# Common names of axes, and what to write instead.
CALLED_OTHERWISE = {
    **dict.fromkeys(("tensor", "tensor_parallel", "tensor_model_parallel_size"), "write tp"),
    **dict.fromkeys(("pipeline", "pipeline_parallel", "pipeline_model_parallel_size"), "write pp"),
    **dict.fromkeys(("context_parallel", "context_parallel_size"), "write cp"),
    **dict.fromkeys(("expert_parallel", "expert_model_parallel_size"), "write ep"),
    **dict.fromkeys(("vpp", "interleaving", "virtual_pipeline"), "write vp"),
    **dict.fromkeys(("fsdp", "zero", "zero_stage"), "write sharding=zero3, zero2, zero1 or none"),
    **dict.fromkeys(("mb", "mbs", "micro_batch_size", "batch_size"), "write micro_batch"),
    **dict.fromkeys(
        ("gas", "grad_accum", "gradient_accumulation_steps"), "it follows from the batch: use --fix micro_batch"
    ),
    **dict.fromkeys(("ac", "activation_checkpointing", "gradient_checkpointing", "checkpointing"), "write recompute"),
    **dict.fromkeys(("ulysses", "ring"), "write cp with cp_kind=all_to_all or cp_kind=ring"),
    **dict.fromkeys(("gpus", "devices", "world_size"), "use --cluster"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Choices varied by a search.

    `fixed`, `upper_bounds` and `forbidden` are (axis, value) pairs over `COUNTS`.  `values` are pairs of an axis of
    `SEARCHED` and its values, the plain one first.  `shard_domains` are the sizes of the link domains within which
    optimizer states may be sharded, besides sharding over all replicas.
    """

    global_batches: tuple[int, ...]
    precision: Precision = Precision.BF16
    fixed: tuple[tuple[str, int], ...] = ()
    upper_bounds: tuple[tuple[str, int], ...] = ()
    forbidden: tuple[tuple[str, int], ...] = ()
    values: tuple[tuple[str, tuple[Value, ...]], ...] = tuple((axis.name, axis.searched[:1]) for axis in SEARCHED)
    shard_domains: tuple[int, ...] = ()
    sequence_parallel: bool = True
    recomputes: tuple[str, ...] = ("none", "full")  # as `parse_recompute` reads them
    fewer_at_ends: int = 1  # how many layers fewer than others the first and the last chunk may have
    shards_any_part: bool = False  # whether states may be sharded over any part of the replicas
    # The framework's only way to split the model into stages; None: several are tried.
    split: Callable[[ModelSpec, int], tuple[int, ...]] | None = None
    split_schedules_overlap: bool = True  # whether state reductions overlap with a split backward pass

    def of(self, axis: str) -> tuple[Value, ...]:
        """Return the values of an axis."""
        return next(values for name, values in self.values if name == axis)

    def where(self, **values: Iterable[Value | str]) -> Limits:
        """Return the limits with other `values` of some axes, given as values or their names."""
        changed = {name: tuple(AXIS[name].word(value) for value in words) for name, words in values.items()}
        return replace(self, values=tuple((name, changed.get(name, old)) for name, old in self.values))

    def admits(self, axis: str, value: int) -> bool:
        """Return whether a count satisfies the fixed, bounded and forbidden values."""
        return (
            (axis, value) not in self.forbidden
            and all(value == fixed for name, fixed in self.fixed if name == axis)
            and all(value <= bound for name, bound in self.upper_bounds if name == axis)
        )

    def fixes(self, *axes: str) -> bool:
        """Return whether one of `axes` has only one value."""
        return any(name in axes for name, _ in self.fixed)

    @property
    def repeat_numbers(self) -> tuple[int, ...]:
        """Numbers of recomputed layers per chunk to search, ascending."""
        return tuple(sorted(int(choice[5:]) for choice in self.recomputes if choice.startswith("full:")))

    def describe(self, model: ModelSpec) -> tuple[str, ...]:
        """Describe the limits for the certificate, without options for parts that the model lacks."""
        parts = [f"{axis} = {value}" for axis, value in self.fixed]
        parts += [f"{axis} <= {value}" for axis, value in self.upper_bounds]
        parts += [f"{axis} not {value}" for axis, value in self.forbidden]
        parts += ["sharding " + "|".join(map(shown, self.of("sharding")))]
        parts += ["recompute " + "|".join(_in_short(self.recomputes))]
        for axis in SEARCHED:
            means_something = axis.name != "sharding" and axis.needs.can_be_met(**parts_of(model))
            if means_something and self.of(axis.name) != axis.searched:
                parts.append(f"{axis.name} " + "|".join(map(shown, self.of(axis.name))))
        return tuple(parts)


def _in_short(recomputes: tuple[str, ...]) -> tuple[str, ...]:
    """Describe choices of recomputation, with numbers of layers as a range."""
    numbers = [int(choice[5:]) for choice in recomputes if choice.startswith("full:")]
    if len(numbers) < 3:
        return recomputes
    return (
        *(choice for choice in recomputes if not choice.startswith("full:")),
        f"full:{min(numbers)}..{max(numbers)}",
    )


def default_limits(problem: Problem, global_batches: Iterable[int]) -> Limits:
    """Return the choices that the framework offers and that do not change the numerics of training.

    tp stays inside the fastest link domain, as its collectives are exposed in every layer.  Choices that the cost model
    never prefers are excluded: recomputing attention with a flash kernel, which stores no scores, and switching off an
    overlap of the gradient reduction or the parameter gather.
    """
    cluster, training, book = problem.cluster, problem.training, book_of(problem.framework)
    even = (level for level in problem.topology.levels if level.seats is None or level.seats.is_even)
    domains = sorted({level.num_devices for level in even if level.num_devices > 1})
    orders = problem.framework.rank_orders
    limits = Limits(
        global_batches=tuple(sorted(set(global_batches))),
        precision=training.precision,
        upper_bounds=(
            ("tp", min(cluster.levels[-1].num_devices, cluster.num_devices)),
            ("cp", max(training.seq_len // MIN_TOKENS_PER_CP_RANK, 1)),
            ("micro_batch", MAX_MICRO_BATCH),
        ),
        shard_domains=tuple(domains[:-1]) if book.shards_over_part else (),  # the last domain is the whole cluster
        sequence_parallel=problem.framework.network.sequence_parallel,
        recomputes=(
            *_recomputes(problem, book),
            *(_parts(problem.model) if book.repeats_parts else ()),
            *(_numbers(problem.model) if book.repeats_some_layers else ()),
        ),
        fewer_at_ends=MAX_FEWER_AT_ENDS,
        shards_any_part=book.shards_over_part,
        split=book.split,
        split_schedules_overlap=book.split_schedules_overlap,
    )
    offered = {axis.name: _unasked(axis, problem.framework, book) for axis in SEARCHED}
    if problem.framework.overlap.tp_overlap_share == 0:
        offered["tp_overlap"] = [False]
    means_nothing = (axis for axis in SEARCHED if not axis.can_matter(training.precision, **parts_of(problem.model)))
    offered |= {axis.name: [axis.searched[0]] for axis in means_nothing}
    if offered["narrow_params"] == [True]:  # nothing is gathered without sharding
        offered["narrow_params"] = [False, True]
    offered["cuda_graphs"] = [word for word in offered["cuda_graphs"] if _has_graphs(word, problem)]
    offered["dispatcher"] = [word for word in offered["dispatcher"] if _runs(word, problem)]
    # If all links are equal, it does not matter which groups have the nearer ranks.
    return limits.where(**offered | {"rank_order": orders if len(problem.topology.levels) > 1 else orders[:1]})


def _unasked(axis: Axis, framework: Framework, book: Rulebook) -> list[Value]:
    """Values searched by default: all offered ones, or those with the framework's default numerics."""
    if axis.exact is None:
        return [value for value in axis.searched if book.offers(axis, value)]
    default = framework.choice(axis.name)
    return [value for value in axis.usual(default) if value == default or book.offers(axis, value)]


def _runs(dispatcher: Value, problem: Problem) -> bool:
    """Return whether a dispatcher runs on the problem's cluster.

    Dispatchers that send a token once require NVIDIA devices with NVLink from Hopper on, DeepEP also nodes of at most 8
    (deepseek-ai/DeepEP README; Megatron-Bridge training/flex_dispatcher_backend.py).
    """
    if dispatcher == Dispatcher.ALL_TO_ALL:
        return True
    domain = problem.cluster.levels[-1]
    is_known = problem.device.generation in ("hopper", "blackwell") and domain.kind == "nvlink"
    return is_known and (dispatcher == Dispatcher.HYBRIDEP or domain.num_devices <= 8)


def _has_graphs(graphs: Value, problem: Problem) -> bool:
    """Return whether these graphs are searched for all plans: with experts, attention graphs, which shorten host waits.

    A single graph supports experts in mxfp8 only.  Other graphs are tried on the best plan (`excluded_options`).
    """
    if problem.model.moe is None:
        return graphs != CudaGraphs.ATTENTION
    is_whole = graphs == CudaGraphs.FULL_ITERATION
    return problem.training.precision == Precision.MXFP8 if is_whole else graphs != CudaGraphs.LAYER


def _recomputes(problem: Problem, book: Rulebook) -> tuple[str, ...]:
    """Choices of recomputation; selective ones only help if scores are stored or more than attention is covered."""
    gives_back = stores_scores(problem) or problem.framework.kernels.selective_recompute_share > 0
    return tuple(name for name in book.words("recompute") if gives_back or name != "selective")


def _parts(model: ModelSpec) -> tuple[str, ...]:
    """Return the recomputable parts of the model's layers, each alone and the cheap ones together."""
    missing = missing_modules(model) | {"core_attn"}
    parts = [module for module in RecomputeModule if module not in missing]
    cheap = [module for module in ("layernorm", "mla_up_proj", "moe_act") if module in parts]
    together = ["+".join(cheap[:count]) for count in range(2, len(cheap) + 1)]
    return (*parts, *together)


def _numbers(model: ModelSpec) -> tuple[str, ...]:
    return tuple(f"full:{number}" for number in range(1, model.num_layers))


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of `number`, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def batch_grid(low: int, high: int, num_devices: int) -> tuple[int, ...]:
    """Return global batches to try between `low` and `high`, one with many divisors in every part of the range.

    Parts are a quarter of an octave, or longer to limit them to about `MAX_BATCHES`.  Data-parallel degrees divide the
    number of devices, so the multiple of its largest possible divisor in a part is divisible by most of them.
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


def _pairs(typed: Iterable[str], option: str) -> tuple[tuple[str, str], ...]:
    """Parse (axis, value) of every AXIS=VALUE, each axis once."""
    pairs: dict[str, str] = {}
    for text in typed:
        axis, sign, value = text.partition("=")
        axis = axis.strip().lower().replace("-", "_")
        if not sign or not axis or not value.strip():
            raise InputError(f"{option} {text!r}: write AXIS=VALUE, such as {option} tp=8")
        if axis in pairs:
            raise InputError(f"{option} {axis} is given twice: leave one of them out")
        pairs[axis] = value.strip().lower()
    return tuple(pairs.items())


def _not_an_axis(name: str, names: tuple[str, ...]) -> str:
    if name in ELSEWHERE:
        return f"not an axis of the search: {ELSEWHERE[name]}"
    if name in CALLED_OTHERWISE:
        return f"unknown axis: {CALLED_OTHERWISE[name]}"
    return f"unknown axis; {suggestion(name, names)}"


def _fixed(limits: Limits, name: str, text: str) -> Limits:
    """Return `limits` with one axis fixed."""
    if name not in AXIS or name in ELSEWHERE:
        names = tuple(axis.name for axis in AXES if not axis.elsewhere)
        raise InputError(f"--fix {name}: {_not_an_axis(name, names)}")
    if name == "recompute":
        parse_recompute(text)
        return replace(limits, recomputes=(text,))
    value = AXIS[name].parse(text, "--fix")
    if name == "sp":
        return replace(limits, sequence_parallel=bool(value))
    if AXIS[name].kind is not Kind.COUNT:
        return limits.where(**{name: (value,)})  # type: ignore[arg-type]
    # A fixed value replaces the default bound.
    upper_bounds = tuple((axis, bound) for axis, bound in limits.upper_bounds if axis != name)
    return replace(limits, fixed=(*limits.fixed, (name, int(value))), upper_bounds=upper_bounds)


def _closest(typed: str, choices: Sequence[str]) -> str:
    """Return suggestions: choices with a similar spelling, or those of the named axis."""
    axis = typed.partition("=")[0].replace("-", "_")
    of_axis = [choice for choice in choices if choice.startswith(f"{axis}=")]
    if of_axis:
        values = [choice.partition("=")[2] for choice in of_axis]
        close = close_names(typed.partition("=")[2], values, most=1)
        return f"did you mean {axis}={close[0]}?" if close else f"of {axis} there are {', '.join(of_axis)}"
    names = ", ".join(choice for choice in choices if "=" not in choice)
    return suggestion(typed, choices, f"known: {names}, or a value of one of these")


def plain_of(axis: Axis, values: tuple[Value, ...]) -> Value:
    """Return the value that remains if an axis is forbidden."""
    return next((value for value in values if value == axis.default), values[0])


def _forbidding(limits: Limits, typed: str) -> Limits:
    """Return `limits` without a choice."""
    name, sign, value = typed.strip().lower().partition("=")
    name = name.replace("-", "_")
    if name in FORBIDDEN_COUNTS:
        return _without_count(limits, typed, name, value if sign else None)
    if sign and name in AXIS and AXIS[name].kind is Kind.FLAG:
        value = shown(AXIS[name].parse(value, "--forbid"))
    name += f"={value}" if sign else ""
    choice = next((word for word in FORBIDDEN if word.replace("_", "-") == name.replace("_", "-")), None)
    if choice is None:
        axis, why = name.partition("=")[0], f"unknown; {_closest(name, FORBIDDEN)}"
        raise InputError(f"--forbid {typed}: {_not_an_axis(axis, ()) if axis in ELSEWHERE else why}")
    if choice == "uneven_stages":
        return replace(limits, fewer_at_ends=1)
    if choice == "partial_sharding":
        return replace(limits, shards_any_part=False)
    if choice == "partial_recompute":
        return _recomputing(limits, typed, [text for text in limits.recomputes if text in tuple(Recompute)])
    axis, _, word = choice.partition("=")
    if axis == "recompute":
        kinds = set(Recompute) - {word} if word else {Recompute.NONE}
        of_kinds = (text for text in limits.recomputes if parse_recompute(text)["recompute"] in kinds)
        return _recomputing(limits, typed, of_kinds)
    if axis == "sp":
        return replace(limits, sequence_parallel=word == "off")
    values = limits.of(axis)
    plain = AXIS[axis].default if len(values) == 1 else plain_of(AXIS[axis], values)
    allowed = [value for value in values if (shown(value) != word if word else value == plain)]
    if not allowed:
        raise InputError(f"--forbid {typed}: no other value of {axis} is left: leave it out")
    return limits.where(**{axis: allowed})


def _without_count(limits: Limits, typed: str, axis: str, text: str | None) -> Limits:
    """Return `limits` without one value of a count, or with the count limited to 1."""
    value = None if text is None else int(AXIS[axis].parse(text, "--forbid"))
    fixed = next((fixed for name, fixed in limits.fixed if name == axis), None)
    bound = next((bound for name, bound in limits.upper_bounds if name == axis), None)
    is_empty = fixed not in (None, 1) if value is None else value == fixed or value == bound == 1
    if is_empty:
        raise InputError(f"--forbid {typed}: no other value of {axis} is left: leave it out")
    if value is not None:
        return replace(limits, forbidden=(*limits.forbidden, (axis, value)))
    return replace(
        limits, upper_bounds=(*((name, bound) for name, bound in limits.upper_bounds if name != axis), (axis, 1))
    )


def _recomputing(limits: Limits, typed: str, recomputes: Iterable[str]) -> Limits:
    allowed = tuple(recomputes)
    if not allowed:
        raise InputError(f"--forbid {typed}: no other value of recompute is left: leave it out")
    return replace(limits, recomputes=allowed)


def _allowing(limits: Limits, typed: str, offered: Callable[[Axis, Value], bool]) -> Limits:
    """Return `limits` extended by values of an axis that change the numerics of training."""
    name, sign, value = typed.strip().lower().replace("-", "_").partition("=")
    axis = AXIS.get(name)
    if axis is None or axis.exact is None or f"{name}{sign}{value}" not in ALLOWED:
        raise InputError(f"--allow {typed}: unknown; {_closest(typed, ALLOWED)}")
    added = [axis.parse(value, "--allow")] if value else [word for word in axis.searched if offered(axis, word)]
    values_before = limits.of(name)
    values = [word for word in axis.searched if word in values_before or word in added]
    # The plain value comes first, unless the values are ordered by need.
    return limits.where(
        **{name: values if axis.is_monotone else sorted(values, key=lambda word: word != values_before[0])}
    )


def _is_other_value(allowed: str, axis: str, limits: Limits) -> bool:
    """Return whether an allowed choice is an axis value outside of the limits."""
    name, _, value = allowed.strip().lower().replace("-", "_").partition("=")
    return name == axis and bool(value) and AXIS[name].parse(value, "--allow") not in limits.of(name)


def with_flags(
    limits: Limits,
    *,
    fix: Iterable[str],
    at_most: Iterable[str],
    forbid: Iterable[str],
    allow: Iterable[str] = (),
    offered: Callable[[Axis, Value], bool] = lambda axis, value: True,
) -> Limits:
    """`limits` with the user's flags; `offered` says whether the framework has a value of an axis."""
    allowed = tuple(allow)
    for text in allowed:
        limits = _allowing(limits, text, offered)
    bounds: dict[str, int] = {}
    for axis, text in _pairs(at_most, "--max"):
        if axis not in COUNTS:
            raise InputError(f"--max {axis}: {_not_an_axis(axis, COUNTS)}")
        bounds[axis] = int(AXIS[axis].parse(text, "--max"))
    unchanged = tuple((name, bound) for name, bound in limits.upper_bounds if name not in bounds)
    limits = replace(limits, upper_bounds=(*unchanged, *bounds.items()))
    fixes = _pairs(fix, "--fix")
    for axis, text in fixes:
        limits = _fixed(limits, axis, text)
        if strange := [choice for choice in allowed if _is_other_value(choice, axis, limits)]:
            raise InputError(f"--allow {strange[0]} and --fix {axis}={text}: leave one of them out")
    for axis, count in limits.fixed:
        if count > bounds.get(axis, count):
            raise InputError(f"--fix {axis}={count} is above --max {axis}={bounds[axis]}: leave one of them out")
    says_sp = any(axis == "sp" for axis, _ in fixes)
    for text in forbid:
        before, limits = limits, _forbidding(limits, text)
        if says_sp and limits.sequence_parallel != before.sequence_parallel:
            raise InputError(f"--forbid {text}: no other value of sp is left: leave it out")
        says_sp = says_sp or text.strip().lower().partition("=")[0] == "sp"
    return limits


def check_words(name: str, book: Rulebook, limits: Limits, unasked: Limits) -> None:
    """Raise InputError for limits with a choice that the framework `name` lacks, beyond the `unasked` defaults.

    The placeholder value of an option without effect, such as fp8 scales in bf16, is not checked.
    """
    for axis, values in limits.values:
        row = AXIS[axis]
        words = [word for word in book.words(axis) if row.exact is None or book.offers(row, row.word(word))]
        accepted = words if row.kind is Kind.WORD else values
        for value in values:
            if value not in accepted and value not in unasked.of(axis):
                raise InputError(f"{name} has no {axis} {value}: it has {', '.join(map(shown, accepted))}")
