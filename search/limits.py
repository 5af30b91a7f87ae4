"""Limits of the axes of a plan: defaults from model and cluster, changed by the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from autoplan.frameworks.common.rules import Rulebook
from autoplan.frameworks.megatron_lm.part_rules import missing_modules
from autoplan.frameworks.registry import book_of
from autoplan.search.axes import parts_of
from autoplan.spec.axes import AXES, AXIS, SEARCHED, shown
from autoplan.spec.axis import Axis, Value
from autoplan.spec.enums import AttentionKernel, CudaGraphs, Dispatcher, Precision, RecomputeModule
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

# Minimum tokens per rank with context parallelism: with fewer tokens GEMMs shrink and attention no longer hides the
# ring, while tp and pp divide the same memory at a lower cost.  Meta trained Llama 3 405B at 8,192 tokens without it
# and at 131,072 with cp = 16, 8,192 tokens per rank (arXiv:2407.21783, table 4).
MIN_TOKENS_PER_CP_RANK = 4096
MIN_TOKENS_PER_DYNAMIC_CP_RANK = 1024  # if short samples are on fewer ranks
MAX_MICRO_BATCH = 16
MAX_BATCHES = 24
# Shares of the optimizer on the host: searched in all plans, and tried on the best one (`excluded_options`).
OFFLOAD_PERCENTS, FURTHER_PERCENTS = (100, 50), (75, 25)
MAX_FEWER_AT_ENDS = 4  # no published model's head costs more layers than this

COUNTS = tuple(axis.name for axis in AXES if axis.can_be_bounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Choices varied by a search.

    `fixed`, `upper_bounds` and `forbidden` are (axis, value) pairs over `COUNTS`.  `values` are pairs of an axis of
    `SEARCHED` and its values, the plain one first.  `shard_domains` are the sizes of the link domains within which
    optimizer states may be sharded, besides sharding over all replicas.
    """

    global_batches: tuple[int, ...]
    precision: Precision = Precision.BF16
    attention: AttentionKernel = AttentionKernel.FLASH
    fixed: tuple[tuple[str, int], ...] = ()
    upper_bounds: tuple[tuple[str, int], ...] = ()
    forbidden: tuple[tuple[str, int], ...] = ()
    values: tuple[tuple[str, tuple[Value, ...]], ...] = tuple((axis.name, axis.searched[:1]) for axis in SEARCHED)
    shard_domains: tuple[int, ...] = ()
    recomputes: tuple[str, ...] = ("none", "full")  # as `parse_recompute` reads them
    fewer_at_ends: int = 1  # how many layers fewer than others the first and the last chunk may have
    shards_any_part: bool = False  # whether states may be sharded over any part of the replicas
    offload_percents: tuple[int, ...] = (100,)  # of the optimizer, where it is offloaded: all of it first
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

    def without_overlap(self, plans: PlanBatch) -> PlanBatch:
        """Return the plans without overlaps that their schedules exclude."""
        if self.split_schedules_overlap:
            return plans
        overlaps = ~plans.splits_backward
        reduces, gathers = plans.grad_reduce_overlap & overlaps, plans.param_gather_overlap & overlaps
        return replace(plans, grad_reduce_overlap=reduces, param_gather_overlap=gathers)

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
            if means_something and set(self.of(axis.name)) != set(axis.searched):
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
    chooses_degrees = training.separates_samples and "dynamic_cp" in book.extras
    tokens_per_cp_rank = MIN_TOKENS_PER_DYNAMIC_CP_RANK if chooses_degrees else MIN_TOKENS_PER_CP_RANK
    limits = Limits(
        global_batches=tuple(sorted(set(global_batches))),
        precision=training.precision,
        attention=problem.framework.attention,
        upper_bounds=(
            ("tp", min(cluster.levels[-1].num_devices, cluster.num_devices)),
            ("cp", max(training.seq_len // tokens_per_cp_rank, 1)),
            ("micro_batch", MAX_MICRO_BATCH),
        ),
        shard_domains=tuple(domains[:-1]) if book.shards_over_part else (),  # the last domain is the whole cluster
        recomputes=(
            *_recomputes(problem, book),
            *(_parts(problem.model) if book.repeats_parts else ()),
            *(_numbers(problem.model) if book.repeats_some_layers else ()),
        ),
        fewer_at_ends=MAX_FEWER_AT_ENDS,
        shards_any_part=book.shards_over_part,
        offload_percents=OFFLOAD_PERCENTS if "offload_percent" in book.extras else (100,),
        split=book.split,
        split_schedules_overlap=book.split_schedules_overlap,
    )
    offered = {axis.name: _unasked(axis, problem.framework, book) for axis in SEARCHED}
    if problem.framework.overlap.tp_overlap_share == 0:
        offered["tp_overlap"] = [False]
    if not chooses_degrees:
        offered["dynamic_cp"] = [False]
    means_nothing = (axis for axis in SEARCHED if not axis.can_matter(training.precision, **parts_of(problem.model)))
    offered |= {axis.name: [axis.searched[0]] for axis in means_nothing}
    offered["sp"].sort(key=lambda value: value != problem.framework.network.sequence_parallel)
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
    if dispatcher in (Dispatcher.ALL_TO_ALL, Dispatcher.ALL_GATHER):
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
    is_full_iteration = graphs == CudaGraphs.FULL_ITERATION
    return problem.training.precision == Precision.MXFP8 if is_full_iteration else graphs != CudaGraphs.LAYER


def _recomputes(problem: Problem, book: Rulebook) -> tuple[str, ...]:
    """Choices of recomputation; selective ones only help if scores are stored or more than attention is covered."""
    gives_back = (
        problem.stores_scores(problem.framework.attention) or problem.framework.kernels.selective_recompute_share > 0
    )
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
