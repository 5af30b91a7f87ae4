"""Plans: a single parallel configuration, and many of them as a struct of arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.base.arrays import Bools, Ints, Rows, distinct_rows
from autoplan.base.errors import InputError, UnpricedError
from autoplan.base.units import check_count
from autoplan.spec import plan_words
from autoplan.spec.axes import COLUMNS, DEFAULT_RECOMPUTE_MODULES, V_SHAPED
from autoplan.spec.axis import Axis, Kind
from autoplan.spec.derived_values import derived_values
from autoplan.spec.enums import (
    AttentionKernel,
    ChunkedLoss,
    ContextParallelKind,
    CrossEntropyFusion,
    CudaGraphs,
    Dispatcher,
    Fp8Scaling,
    GradType,
    MainWeights,
    MomentType,
    Offload,
    OffloadLayers,
    OffloadModules,
    Precision,
    RankOrder,
    Recompute,
    RecomputeModule,
    ReduceType,
    Schedule,
    Sharding,
    enum_value,
    members,
)

# Schedules that put off the weight gradients; they have no closed form.
SPLIT_SCHEDULES = tuple(name.code for name in (Schedule.ZB_H1, Schedule.ZB_V, Schedule.DUALPIPE_V))
_IS_SPLIT = np.array([name.code in SPLIT_SCHEDULES for name in Schedule])
MAX_OPERATIONS = 2**19  # of a pipeline that is followed pass by pass; more would take seconds to prepare

SELECTIVE, FULL = Recompute.SELECTIVE.code, Recompute.FULL.code
DEFAULT_MODULE_BITS = 1 << RecomputeModule.CORE_ATTN.code
ALL_LAYERS = 10**6  # more than any chunk has
PP_BEFORE_DP = RankOrder.PP_BEFORE_DP.code

_WORDS = tuple((axis.name, axis.enum) for axis in COLUMNS if axis.enum)
_COUNTS = tuple((axis.name, axis.most) for axis in COLUMNS if axis.kind is Kind.COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Configuration of a job.  Degrees are counts of ranks; `micro_batch` and `global_batch` are counts of sequences.

    The ranks are tp x cp x pp x dp_replicate x dp_shard; expert parallelism re-uses those of one pipeline stage.
    States are sharded over `dp_shard` (times cp) according to `sharding`.  `layers_per_chunk` gives the layers of
    each of the pp x vp chunks in model order (chunk i is on rank i mod pp); None spreads them evenly.
    """

    global_batch: int
    micro_batch: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    cp_kind: ContextParallelKind = ContextParallelKind.RING
    dynamic_cp: bool = False
    pp: int = 1
    vp: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B
    layers_per_chunk: tuple[int, ...] | None = None
    ep: int = 1
    etp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    sharding: Sharding = Sharding.ZERO1
    recompute: Recompute = Recompute.NONE
    recompute_modules: tuple[RecomputeModule, ...] = DEFAULT_RECOMPUTE_MODULES  # what selective recomputation repeats
    # Of every chunk, how many of its first layers full recomputation repeats; None: all.
    recompute_num_layers: int | None = None
    precision: Precision = Precision.BF16
    offload: Offload = Offload.NONE
    offload_percent: int = 100  # of the optimizer, where it is what is offloaded
    offload_modules: OffloadModules = OffloadModules.NONE
    offload_layers: OffloadLayers = OffloadLayers.NONE
    tp_overlap: bool = False
    grad_reduce_overlap: bool = True
    param_gather_overlap: bool = True
    ep_overlap: bool = False
    shared_expert_overlap: bool = False
    dispatcher: Dispatcher = Dispatcher.ALL_TO_ALL
    cuda_graphs: CudaGraphs = CudaGraphs.NONE
    grad_dtype: GradType = GradType.FP32
    reduce_dtype: ReduceType = ReduceType.USUAL
    fp8_scaling: Fp8Scaling = Fp8Scaling.TENSORWISE
    narrow_params: bool = False
    attention: AttentionKernel = AttentionKernel.FLASH
    fp8_attention: bool = False
    fp8_activation_input: bool = False
    token_dropping: bool = False
    dropout: bool = False
    router_fusion: bool = False
    rope_fusion: bool = False
    gradient_accumulation_fusion: bool = True
    delay_wgrad: bool = False
    cross_entropy_fusion: CrossEntropyFusion = CrossEntropyFusion.UNFUSED
    chunked_loss: ChunkedLoss = ChunkedLoss.NONE
    main_weights: MainWeights = MainWeights.FP32
    moment_dtype: MomentType = MomentType.FP32
    quantized_gathers: bool = False
    quantized_reductions: bool = False
    secondary_shard: int = 1
    wide_adapters: bool = False
    rank_order: RankOrder = RankOrder.DP_BEFORE_PP
    placement: tuple[str, ...] | None = None  # names of the nodes in the order of the ranks; None: as they come

    def __post_init__(self) -> None:
        for name, enum in _WORDS:
            object.__setattr__(self, name, enum_value(name, enum, getattr(self, name)))
        for name, at_most in _COUNTS:
            check_count(name, getattr(self, name), at_most=at_most)
        if self.layers_per_chunk is not None:
            if len(self.layers_per_chunk) != self.pp * self.vp:
                raise InputError(
                    f"layers_per_chunk has {len(self.layers_per_chunk)} entries, pp x vp is {self.pp * self.vp}"
                )
            for layers in self.layers_per_chunk:
                check_count("layers_per_chunk", layers, at_least=0)
        if self.recompute_num_layers is not None:
            check_count("recompute_num_layers", self.recompute_num_layers, at_most=ALL_LAYERS - 1)
            if self.recompute != "full":
                raise InputError(f"recompute_num_layers needs recompute = 'full', got {self.recompute!r}")
        if len(set(self.recompute_modules)) != len(self.recompute_modules) or not self.recompute_modules:
            raise InputError("recompute_modules must name at least one part of a layer, each once")
        # One order, so that equal plans are equal.
        modules = (enum_value("recompute_modules", RecomputeModule, module) for module in self.recompute_modules)
        object.__setattr__(self, "recompute_modules", tuple(sorted(modules, key=lambda module: module.code)))
        if self.recompute != "selective" and self.recompute_modules != DEFAULT_RECOMPUTE_MODULES:
            raise InputError(f"recompute_modules need recompute = 'selective', got {self.recompute!r}")
        if self.vp > 1 and self.schedule == "1f1b":
            raise InputError(f"vp = {self.vp} needs schedule = 'interleaved'")
        if self.schedule in V_SHAPED and self.vp != 2:
            raise InputError(
                f"schedule {self.schedule!r} needs vp 2, vp is {self.vp}: its chunks form a V on the ranks"
            )
        if self.schedule == "dualpipe-v" and self.num_microbatches < 2 * self.pp:
            raise InputError(
                f"schedule 'dualpipe-v' needs 2 pp = {2 * self.pp} micro-batches, there are {self.num_microbatches}: "
                "use zb-v or a smaller pp"
            )

    @classmethod
    def derived(cls, **values: Any) -> ParallelPlan:
        """Return the plan of `values` and of what `derived_values` adds to them."""
        return cls(**derived_values(**values))

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_devices(self) -> int:
        """Number of ranks that the plan needs."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one data-parallel replica in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    def describe(self) -> str:
        """Short description: 'tp 4 pp 2 vp 5 dp 16, micro-batch 1, ZeRO-1'."""
        return plan_words.describe(self)

    def spell_out(self) -> str:
        """Full description: 'tp 4 pp 2 dp 16, ..., 1F1B interleaved with 5 virtual stages, ...'."""
        return plan_words.spell_out(self)


def check_priced(plan: ParallelPlan) -> None:
    """Reject a value that the cost model does not cover yet; no value is silently ignored."""
    if plan.schedule == "gpipe" and plan.vp > 1:
        raise UnpricedError("schedule 'gpipe' with vp > 1 is not priced yet: use interleaved")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanBatch(Rows):
    """Many plans as arrays with one element per plan.  Words are stored as codes.

    `layout` indexes `layouts`: the layers of every chunk in model order, always spelled out.  All share a `placement`.
    """

    global_batch: Ints
    micro_batch: Ints
    tp: Ints
    cp: Ints
    pp: Ints
    vp: Ints
    ep: Ints
    etp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    sp: Bools
    tp_overlap: Bools
    grad_reduce_overlap: Bools
    param_gather_overlap: Bools
    ep_overlap: Bools
    shared_expert_overlap: Bools
    cp_kind: Ints
    dynamic_cp: Bools
    dispatcher: Ints
    schedule: Ints
    sharding: Ints
    recompute: Ints
    recompute_modules: Ints  # bit i stands for tuple(RecomputeModule)[i]; 0 unless recompute is selective
    recompute_num_layers: Ints  # of a chunk; 0 unless recompute is full, ALL_LAYERS where a plan names no number
    precision: Ints
    offload: Ints
    offload_percent: Ints
    offload_modules: Ints
    offload_layers: Ints
    cuda_graphs: Ints
    grad_dtype: Ints
    reduce_dtype: Ints
    fp8_scaling: Ints
    narrow_params: Bools
    attention: Ints
    fp8_attention: Bools
    fp8_activation_input: Bools
    token_dropping: Bools
    dropout: Bools
    router_fusion: Bools
    rope_fusion: Bools
    gradient_accumulation_fusion: Bools
    delay_wgrad: Bools
    cross_entropy_fusion: Ints
    chunked_loss: Ints
    main_weights: Ints
    moment_dtype: Ints
    quantized_gathers: Bools
    quantized_reductions: Bools
    secondary_shard: Ints
    wide_adapters: Bools
    rank_order: Ints
    layout: Ints
    layouts: tuple[tuple[int, ...], ...]
    placement: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> Ints:
        """Data-parallel degree of every plan."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_devices(self) -> Ints:
        """Ranks that every plan needs."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def num_microbatches(self) -> Ints:
        """Micro-batches of one replica in a step; rules make the division exact."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def cp_inner(self) -> Ints:
        """Context-parallel ranks among which an all-to-all exchanges heads; a ring connects groups of them."""
        sizes = np.array([kind.inner for kind in members(ContextParallelKind)])[self.cp_kind]
        return np.where(sizes == 0, self.cp, np.minimum(sizes, self.cp))

    @property
    def splits_backward(self) -> Bools:
        """Whether weight gradients are put off."""
        return _IS_SPLIT[self.schedule]

    def repeats(self, module: RecomputeModule) -> Bools:
        """Return which plans recompute this part of a layer by name."""
        return (self.recompute_modules >> RecomputeModule(module).code) & 1 == 1

    def offloads(self, part: str) -> Bools:
        """Return which plans offload the inputs of this part of a layer by name."""
        return np.array([part in word.parts for word in OffloadModules])[self.offload_modules]

    @classmethod
    def of(cls, plans: Sequence[ParallelPlan], num_layers: int) -> PlanBatch:
        """The batch of `plans` for a model of `num_layers`; unpriced values are refused."""
        layouts: dict[tuple[int, ...], int] = {}
        index = []
        placements = {plan.placement for plan in plans} or {None}
        if len(placements) > 1:
            raise InputError("plans of one batch must have the same placement")
        for plan in plans:
            check_priced(plan)
            index.append(layouts.setdefault(chunk_layers(plan, num_layers), len(layouts)))
        arrays = {axis.name: _column(axis, plans) for axis in COLUMNS}
        arrays["recompute_modules"] = np.array([module_bits(plan) for plan in plans], dtype=np.int64)
        arrays["recompute_num_layers"] = np.array([repeated_layers(plan) for plan in plans], dtype=np.int64)
        layout = np.array(index, dtype=np.int64)
        return cls(**arrays, layout=layout, layouts=tuple(layouts), placement=placements.pop())

    def distinct(self, *names: str) -> tuple[Ints, Ints]:
        """Return (indices of plans with distinct values of these axes, for every plan the index of its equal)."""
        return distinct_rows(*(getattr(self, name) for name in names))

    def plan(self, at: int) -> ParallelPlan:
        """The plan at an index, as one object."""
        values: dict[str, object] = {axis.name: axis.value(getattr(self, axis.name)[at]) for axis in COLUMNS}
        if bits := int(self.recompute_modules[at]):
            values["recompute_modules"] = tuple(name for i, name in enumerate(RecomputeModule) if bits >> i & 1)
        if 0 < (repeated := int(self.recompute_num_layers[at])) < ALL_LAYERS:
            values["recompute_num_layers"] = repeated
        layers = self.layouts[self.layout[at]]
        uneven = len(set(layers)) > 1
        values["layers_per_chunk"] = layers if uneven else None
        return ParallelPlan(**values, placement=self.placement)  # type: ignore[arg-type]

    def unquantised(self) -> PlanBatch:
        """Return the plans in 16 bits, or in fp32 where they are: what narrow ones compute all but matrices in."""
        fp32, bf16 = Precision.FP32.code, Precision.BF16.code
        return replace(self, precision=np.where(self.precision == fp32, fp32, bf16))

    @staticmethod
    def concatenate(batches: Iterable[PlanBatch]) -> PlanBatch:
        """Join batches into one, in order."""
        parts = list(batches)
        layouts: dict[tuple[int, ...], int] = {}
        moved = []
        for part in parts:
            table = np.array([layouts.setdefault(layout, len(layouts)) for layout in part.layouts], dtype=np.int64)
            moved.append(table[part.layout])
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in batch_arrays()}
        arrays["layout"] = np.concatenate(moved)
        placements = {part.placement for part in parts if len(part)} or {None}
        if len(placements) > 1:
            raise InputError("plans of one batch must have the same placement")
        return PlanBatch(**arrays, layouts=tuple(layouts), placement=placements.pop())


def _column(axis: Axis, plans: Sequence[ParallelPlan]) -> NDArray[Any]:
    values: list[Any] = [getattr(plan, axis.name) for plan in plans]
    return np.array([word.code for word in values] if axis.enum else values, dtype=column_type(axis))


def column_type(axis: Axis) -> type[np.bool_ | np.int64]:
    """Return the type of the numbers of a batch's column."""
    return np.bool_ if axis.kind is Kind.FLAG else np.int64


@cache
def batch_arrays() -> tuple[str, ...]:
    """The fields of a batch that have one element a plan."""
    return tuple(field.name for field in fields(PlanBatch) if field.name not in ("layouts", "placement"))


def parse_recompute(text: str) -> dict[str, object]:
    """The fields of a plan that say what 'none', 'selective', 'full', 'full:4' or 'moe_act+layernorm' recomputes."""
    kind, sign, count = text.partition(":")
    if kind == "full" and sign and count.isascii() and count.isdigit() and 0 < int(count[:7]) < ALL_LAYERS:
        return {"recompute": "full", "recompute_num_layers": int(count)}
    if text in tuple(Recompute):
        return {"recompute": text}
    modules = tuple(text.split("+"))
    if len(set(modules)) < len(modules) or not set(modules) <= set(RecomputeModule):
        raise InputError(
            f"recompute {text[:60]!r}: write none, selective, full, full:N (the first N layers of a chunk), or "
            f"parts of a layer joined by + ({', '.join(RecomputeModule)})"
        )
    return {"recompute": "selective", "recompute_modules": modules}


def module_bits(plan: ParallelPlan) -> int:
    """The parts of a layer that `plan` recomputes by name, as a batch holds them."""
    if plan.recompute != "selective":
        return 0
    return sum(1 << RecomputeModule(module).code for module in plan.recompute_modules)


def repeated_layers(plan: ParallelPlan) -> int:
    """Number of layers of a chunk that `plan` recomputes as a whole, as a batch holds it."""
    if plan.recompute != "full":
        return 0
    return ALL_LAYERS if plan.recompute_num_layers is None else plan.recompute_num_layers


@lru_cache(maxsize=4096)
def even_chunks(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk when they are spread as evenly as possible, the remainder on the middle chunks.

    The first and last chunk also hold embedding and head, so that they are the last to get one layer more, the last
    chunk after the first.
    """
    base, remainder = divmod(num_layers, num_chunks)
    first = (num_chunks - remainder) // 2
    return tuple(base + (first <= chunk < first + remainder) for chunk in range(num_chunks))


def chunk_layers(plan: ParallelPlan, num_layers: int) -> tuple[int, ...]:
    """Layers of every chunk of `plan`, in model order; refused where they do not add up to the model's."""
    if plan.layers_per_chunk is None:
        return even_chunks(num_layers, plan.pp * plan.vp)
    if sum(plan.layers_per_chunk) != num_layers:
        raise InputError(f"layers_per_chunk add up to {sum(plan.layers_per_chunk)}, the model has {num_layers} layers")
    return plan.layers_per_chunk
