"""Rules on the plans that Megatron-LM's pretrain_gpt.py accepts.

Places are files and lines of Megatron-LM d98e8a6 (core 0.20), below megatron/; places in Transformer Engine, which
Megatron-LM calls for attention under context parallelism, are function names.  Only rules that a plan can break are
listed.  Rules for all frameworks come first, from `universal`; models that Megatron-LM does not support are refused by
the exporter.  There is no rule on the layers per chunk: --pipeline-model-parallel-layout accepts any counts, including
empty chunks, and places multi-token prediction layers next to the loss
(docs/user-guide/features/pipeline_parallel_layout.md).
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools, Ints
from autoplan.frameworks.common import shared_rules as shared
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords, all_true
from autoplan.frameworks.common.widths import has_dense_mlp, kv_groups
from autoplan.frameworks.megatron_lm import context_rules, part_rules
from autoplan.spec.axes import offered
from autoplan.spec.enums import (
    NARROW_PRECISIONS,
    AttentionKernel,
    Dispatcher,
    GradType,
    MainWeights,
    MomentType,
    Offload,
    Precision,
    RankOrder,
    RecomputeModule,
    Schedule,
    Sharding,
)
from autoplan.spec.plan import FULL, PP_BEFORE_DP, ParallelPlan, PlanBatch
from autoplan.spec.workload import Workload

_ARGUMENTS = "training/arguments.py"
_CONFIG = "core/transformer/transformer_config.py"
_STATE = "core/parallel_state.py"
_FSDP = "core/distributed/fsdp/mcore_fsdp_adapter.py"

INTERLEAVED = Schedule.INTERLEAVED.code
ZERO1 = Sharding.ZERO1.code
ZERO2 = Sharding.ZERO2.code
ZERO3 = Sharding.ZERO3.code
_NARROW = [precision.code for precision in NARROW_PRECISIONS]


def _sharded_experts(workload: Workload, batch: PlanBatch) -> Ints:
    """Return the ranks that hold one copy of a stage's routed experts; dense models use tp instead."""
    return batch.ep * batch.etp if workload.model.moe else batch.tp


# -- the grid of ranks ------------------------------------------------------------------------------------------------


def _instances(workload: Workload, batch: PlanBatch) -> Bools:
    expert_dp = batch.num_devices // (_sharded_experts(workload, batch) * batch.pp)
    return (batch.sharding < ZERO1) | (expert_dp % batch.dp_replicate == 0)


def _pipelines_first(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans have the same pipelines in dense and expert parts: unequal data-parallel groups shift them."""
    expert_dp = batch.num_devices // (_sharded_experts(workload, batch) * batch.pp)
    return (batch.rank_order != PP_BEFORE_DP) | (batch.pp == 1) | (expert_dp == batch.dp)


# -- widths -----------------------------------------------------------------------------------------------------------


def _kv_heads(workload: Workload, batch: PlanBatch) -> Bools:
    groups = kv_groups(workload.model)
    return (groups % batch.tp == 0) | (batch.tp % groups == 0)


def _mlp_width(workload: Workload, batch: PlanBatch) -> Bools:
    model = workload.model
    holds = all_true(batch)
    if has_dense_mlp(model):
        holds &= model.ffn_size % batch.tp == 0
    if model.moe:
        holds &= model.moe.shared_expert_ffn_size % batch.tp == 0
    return holds


def _expert_width(workload: Workload, batch: PlanBatch) -> Bools:
    moe = workload.model.moe
    return moe.expert_ffn_size % batch.etp == 0 if moe else all_true(batch)


# -- experts ----------------------------------------------------------------------------------------------------------


def _ep_overlap(workload: Workload, batch: PlanBatch) -> Bools:
    repeats = (batch.recompute == FULL) | batch.repeats(RecomputeModule.MOE)
    layers = (workload.model.num_mtp_layers <= 1) & (workload.model.mamba is None)
    exchanges = (batch.ep > 1) & (batch.dispatcher != Dispatcher.ALL_GATHER.code)
    return ~batch.ep_overlap | (layers & exchanges & ((batch.pp == 1) | (batch.vp > 1)) & ~repeats)


def _shared_overlap(workload: Workload, batch: PlanBatch) -> Bools:
    moe = workload.model.moe
    if moe is None or not moe.shared_expert_ffn_size or moe.latent_size:
        return ~batch.shared_expert_overlap
    plain = (batch.ep > 1) & (batch.dispatcher == Dispatcher.ALL_TO_ALL.code) & ~batch.ep_overlap
    return ~batch.shared_expert_overlap | (plain & ~batch.repeats(RecomputeModule.SHARED_EXPERTS))


# -- pipeline ---------------------------------------------------------------------------------------------------------


def _interleaved_microbatches(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans have a multiple of pp micro-batches: the default group is pp, and a shorter one is refused."""
    count = batch.num_microbatches
    return (batch.vp == 1) | ((count >= batch.pp) & (count % batch.pp == 0))


# -- sharding and overlap ---------------------------------------------------------------------------------------------


def _fsdp_overlap(workload: Workload, batch: PlanBatch) -> Bools:
    gathers = (batch.sharding != ZERO3) | batch.param_gather_overlap
    return ((batch.sharding < ZERO2) | batch.grad_reduce_overlap) & gathers


# -- what each rule says ----------------------------------------------------------------------------------------------


def _experts_per_stage(workload: Workload, plan: ParallelPlan) -> str:
    if workload.model.moe:
        return f"etp {plan.etp} x ep {plan.ep} x pp {plan.pp}"
    return f"tp {plan.tp} x pp {plan.pp}"


MAIN_WEIGHTS = SupportedWords(
    axis="main_weights", words=("fp32", "remainders", "fp16"), source=f"{_ARGUMENTS} --main-params-dtype"
)
OFFLOADS = SupportedWords(axis="offload", words=("none", "optimizer"), source=f"{_ARGUMENTS} --optimizer-cpu-offload")
FP8_SCALINGS = SupportedWords(
    axis="fp8_scaling", words=("tensorwise", "delayed", "blockwise"), source=f"{_ARGUMENTS} --fp8-recipe"
)
SUPPORTED = (
    MAIN_WEIGHTS,
    OFFLOADS,
    FP8_SCALINGS,
    SupportedWords(axis="schedule", words=("1f1b", "interleaved"), source="core/pipeline_parallel/schedules.py:53"),
)


def is_precision_aware(batch: PlanBatch) -> Bools:
    """Return which plans need the precision-aware optimizer for the data types of their states."""
    is_main = batch.grad_dtype == GradType.BF16_MAIN.code
    return is_main | (batch.main_weights != MainWeights.FP32.code) | (batch.moment_dtype != MomentType.FP32.code)


def _remainders(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans have valid main weights: bf16 in the precision-aware optimizer has remainders, not fp32."""
    is_bf16 = batch.precision == Precision.BF16.code
    return np.where(
        is_bf16,
        ~is_precision_aware(batch) | (batch.main_weights != MainWeights.FP32.code),
        batch.main_weights != MainWeights.REMAINDERS.code,
    )


# For every schedule; Primus runs additional schedules on the same code (`primus`).
COMMON: tuple[Rule, ...] = (
    *universal.RULES,
    *universal.options_of_others(*offered("megatron-lm")),
    universal.KNOWN_SAMPLES,
    universal.NO_FP32,
    Rule(
        source=f"{_STATE}:1448",
        holds=_instances,
        text=lambda s, p: (
            f"the {p.num_devices // p.pp} devices of a stage over {_experts_per_stage(s, p)} must be divisible by "
            f"dp_replicate {p.dp_replicate}: lower it"
        ),
    ),
    Rule(
        source=f"{_STATE}:899",
        holds=_pipelines_first,
        text=lambda s, p: (
            f"rank_order {p.rank_order} needs "
            + (f"etp {p.etp} x ep {p.ep} to be tp {p.tp} x cp {p.cp}" if s.model.moe else f"cp 1, cp is {p.cp}")
            + f": use {RankOrder.DP_BEFORE_PP}"
        ),
    ),
    Rule(
        source=f"{_CONFIG}:1461",
        holds=_kv_heads,
        text=lambda s, p: f"num_kv_heads {kv_groups(s.model)} must be a multiple or a divisor of tp {p.tp}: change tp",
    ),
    Rule(
        source="core/utils.py:592",
        holds=_mlp_width,
        text=lambda s, p: (
            f"ffn_size {s.model.ffn_size} and shared_expert_ffn_size "
            f"{s.model.moe.shared_expert_ffn_size if s.model.moe else 0} must be divisible by tp {p.tp}: lower tp"
        ),
    ),
    Rule(
        source="core/utils.py:592",
        holds=_expert_width,
        text=lambda s, p: (
            f"expert_ffn_size {s.model.moe.expert_ffn_size if s.model.moe else 0} must be divisible by etp {p.etp}: "
            "lower etp"
        ),
    ),
    *context_rules.RULES,
    shared.sp_needs_tp("core/model_parallel_config.py:502"),
    Rule(
        source="core/tensor_parallel/mappings.py:178",
        holds=lambda s, b: ~b.sp | (s.training.seq_len // b.cp % b.tp == 0),
        text=lambda s, p: (
            f"with sp, the {s.training.seq_len // p.cp} tokens of a rank must be divisible by tp {p.tp}: lower tp"
        ),
    ),
    Rule(
        source=f"{_ARGUMENTS}:1441",
        holds=lambda s, b: ~b.tp_overlap | b.sp,
        text=lambda s, p: "tp_overlap needs sp: add sp or leave tp_overlap out",
    ),
    Rule(
        source=f"{_CONFIG}:3002",
        holds=_ep_overlap,
        text=lambda s, p: (
            f"ep_overlap needs ep > 1 and another dispatcher than allgather, vp > 1 in a pipeline, no recompute of the "
            f"experts and no Mamba layers, got ep {p.ep}, {p.dispatcher}, pp {p.pp}, vp {p.vp} and recompute "
            f"{p.recompute!r}: leave ep_overlap out"
        ),
    ),
    Rule(
        source=f"{_ARGUMENTS} --moe-shared-expert-overlap",
        holds=_shared_overlap,
        text=lambda s, p: (
            f"shared_expert_overlap needs shared experts, ep > 1, dispatcher alltoall and no ep_overlap, and shared "
            f"experts that are kept, got ep {p.ep}, {p.dispatcher} and recompute {p.recompute!r}: leave it out"
        ),
    ),
    Rule(
        source=f"{_ARGUMENTS}:1000",
        holds=lambda s, b: (b.vp == 1) | (b.pp > 1),
        text=lambda s, p: f"vp {p.vp} needs pp > 1: set vp 1",
    ),
    Rule(
        source="core/transformer/moe/moe_layer.py:636",
        holds=lambda s, b: (b.tp == 1) | b.sp if s.model.moe else all_true(b),
        text=lambda s, p: f"experts with tp {p.tp} need sp: add sp",
    ),
    Rule(
        source=f"{_CONFIG}:2613",
        holds=lambda s, b: b.etp == 1 if s.model.moe and s.model.mlp_bias else all_true(b),
        text=lambda s, p: f"experts with a bias need etp 1, etp is {p.etp}: set etp 1",
    ),
    Rule(
        source=f"{_FSDP}:826",
        # The device mesh of Megatron-FSDP consists of all ranks as dp-cp x ep x tp, without a pp axis.
        holds=lambda s, b: (b.sharding < ZERO2) | (b.pp == 1),
        text=lambda s, p: f"{p.sharding} (Megatron-FSDP) needs pp 1, pp is {p.pp}: use zero1",
    ),
    Rule(
        source=f"{_FSDP}:380",
        # Replicated shard groups of experts are marked as never tested.
        holds=lambda s, b: (b.sharding < ZERO2) | (b.dp_replicate == 1) if s.model.moe else all_true(b),
        text=lambda s, p: (
            f"{p.sharding} (Megatron-FSDP) with experts needs dp_replicate 1, it is {p.dp_replicate}: shard over all"
        ),
    ),
    Rule(
        source="core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py:334",
        holds=_fsdp_overlap,
        text=lambda s, p: f"{p.sharding} (Megatron-FSDP) always overlaps its collectives: turn the overlap options on",
    ),
    Rule(
        source=f"{_ARGUMENTS}:1028",
        # Plain data parallelism gathers no parameters, so the switch has no effect and is accepted.
        holds=lambda s, b: ~b.param_gather_overlap | b.grad_reduce_overlap | (b.sharding < ZERO1),
        text=lambda s, p: "param_gather_overlap needs grad_reduce_overlap: turn both on or both off",
    ),
    Rule(
        source="core/fp8_utils.py:779",
        holds=lambda s, b: (
            ~b.fp8_attention | (np.isin(b.precision, _NARROW) & (b.attention == AttentionKernel.FLASH.code))
        ),
        text=lambda s, p: (
            f"fp8_attention needs low-precision GEMMs and attention flash, got precision {p.precision} and attention "
            f"{p.attention}: leave fp8_attention out"
        ),
    ),
    Rule(
        source=f"{_CONFIG}:2467",
        holds=lambda s, b: ~b.fp8_activation_input | (s.model.gated_mlp & (not s.model.clamped_activation)),
        text=lambda s, p: f"fp8_activation_input needs SwiGLU, which {s.model.name} does not have: leave it out",
    ),
    Rule(
        source=f"{_CONFIG}:917",
        holds=lambda s, b: ~(b.token_dropping | b.router_fusion) | (s.model.moe is not None),
        text=lambda s, p: (
            f"{'token_dropping' if p.token_dropping else 'router_fusion'} needs a model with experts: leave it out"
        ),
    ),
    Rule(
        source=f"{_CONFIG}:513",
        holds=lambda s, b: ~b.rope_fusion | (s.model.mla is not None),
        text=lambda s, p: "rope_fusion is an option of latent attention, other models always fuse RoPE: leave it out",
    ),
    Rule(
        source="core/transformer/moe/token_dispatcher.py:1038",
        holds=lambda s, b: ~b.token_dropping | (b.ep == 1) | (b.dispatcher == Dispatcher.ALL_TO_ALL.code),
        text=lambda s, p: f"token_dropping with dispatcher {p.dispatcher} is not priced: use alltoall",
    ),
    Rule(
        source="core/optimizer/__init__.py:1057",
        holds=lambda s, b: (b.offload != Offload.OPTIMIZER.code) | (b.sharding == ZERO1),
        text=lambda s, p: f"offload 'optimizer' needs sharding zero1, it is {p.sharding}",
    ),
    Rule(
        source=f"{_ARGUMENTS} --optimizer-offload-fraction",
        holds=lambda s, b: (b.offload_percent == 100) | (b.offload == Offload.OPTIMIZER.code),
        text=lambda s, p: (
            f"offload_percent {p.offload_percent} needs offload optimizer, it is {p.offload}: leave it out"
        ),
    ),
    *part_rules.RULES,
    Rule(
        source=f"{_ARGUMENTS}:1095",
        holds=lambda s, b: ~b.narrow_params | ((b.sharding >= ZERO1) & np.isin(b.precision, _NARROW)),
        text=lambda s, p: (
            f"narrow_params needs low-precision GEMMs and sharded states, got precision {p.precision} and sharding "
            f"{p.sharding}: leave narrow_params out"
        ),
    ),
    Rule(
        source="core/distributed/fsdp/src/megatron_fsdp/mixed_precision.py:223",
        # Its buffers have one element per weight; packed 4-bit buffers have one per two weights.
        holds=lambda s, b: ~b.narrow_params | (b.sharding < ZERO2) | (b.precision != Precision.NVFP4.code),
        text=lambda s, p: (
            f"narrow_params of nvfp4 with {p.sharding}: Megatron-FSDP holds no weights in 4 bits, use zero1 or leave "
            "narrow_params out"
        ),
    ),
    Rule(
        source="core/optimizer/__init__.py:1057",
        holds=lambda s, b: ~is_precision_aware(b) | ((b.sharding == ZERO1) & (b.offload == Offload.NONE.code)),
        text=lambda s, p: (
            f"main_weights {p.main_weights}, moment_dtype {p.moment_dtype} and grad_dtype {p.grad_dtype} need the "
            f"precision-aware optimizer, which needs sharding zero1 and no offload, not {p.sharding} and "
            f"offload {p.offload}: use fp32"
        ),
    ),
    Rule(
        source="core/optimizer/optimizer_config.py:407",
        holds=_remainders,
        text=lambda s, p: (
            f"main_weights {p.main_weights} with precision {p.precision}: the precision-aware optimizer keeps "
            f"{'remainders or fp16: use remainders' if p.precision == 'bf16' else 'no remainders: use fp32'}"
        ),
    ),
    shared.SCALING_NEEDS_FP8,
    *shared.aligned("core/fp8_utils.py:356"),
)

INTERLEAVED_MICROBATCHES = Rule(
    source="core/pipeline_parallel/schedules.py:1160",
    holds=_interleaved_microbatches,
    text=lambda s, p: (
        f"interleaving needs micro-batches in multiples of pp {p.pp}, there are {p.num_microbatches}: "
        "change global_batch, micro_batch or vp"
    ),
)

RULES: tuple[Rule, ...] = (
    *COMMON,
    *(words.rule() for words in SUPPORTED),
    Rule(
        source=f"{_ARGUMENTS}:978",
        holds=lambda s, b: (b.schedule == INTERLEAVED) == (b.vp > 1),
        text=lambda s, p: f"schedule {p.schedule!r} with vp {p.vp}: vp > 1 is interleaved, vp 1 is 1f1b",
    ),
    INTERLEAVED_MICROBATCHES,
)

# Options missing from its command line that a program with its own TransformerConfig can set.
KERNELS = {  # by the words of --attention-backend (core/transformer/enums.py, AttnBackend)
    "auto": AttentionKernel.FLASH,
    "flash": AttentionKernel.FLASH2,
    "fused": AttentionKernel.CUDNN,
    "unfused": AttentionKernel.UNFUSED,
}
TAKES_KERNEL = shared.only(
    "attention", *KERNELS.values(), why="use one of flash, flash2, cudnn and unfused", source=_ARGUMENTS
)
LIMITS: tuple[Rule, ...] = (
    TAKES_KERNEL,
    *(
        shared.only(axis, False, why="export for megatron-bridge, or plan without it", source=f"{_ARGUMENTS}:{line}")
        for axis, line in (("fp8_attention", 2333), ("fp8_activation_input", 2329))
    ),
)

BOOK = Rulebook(
    rules=RULES, supported=SUPPORTED, extras=offered("megatron-lm"), repeats_parts=True, repeats_some_layers=True
)
