"""Option table of DeepSpeed 0.19.8: the sections of its configuration, for writing and reading."""

from __future__ import annotations

from typing import Any

from autoplan.frameworks.common.option_table import Assumed, Constant, Option, Row, count, switch, word
from autoplan.spec.enums import GradType, MainWeights, MomentType, Offload, Precision, ReduceType, Sharding
from autoplan.spec.plan_file import PlanFile

BUCKET_ELEMENTS = 500_000_000  # bucket_gib of the presets, and DeepSpeed's default
PREFETCH_ELEMENTS = 50_000_000  # DeepSpeed's default; with 0 a layer waits for its weights


def _prefetch(file: PlanFile) -> int | None:
    waits = file.best.plan.sharding == Sharding.ZERO3 and not file.best.plan.param_gather_overlap
    return 0 if waits else None


_ON_HOST = {"device": "cpu", "pin_memory": True}


def _offload_optimizer(file: PlanFile) -> dict[str, Any] | None:
    plan = file.best.plan
    ratio = {"ratio": plan.offload_percent / 100} if plan.offload_percent < 100 else {}
    return None if plan.offload == Offload.NONE else _ON_HOST | ratio


def _priced(key: str, value: float, **extra: Any) -> Assumed:
    """Return an option that is priced with DeepSpeed's default."""
    return Assumed(key, (value,), f"{value:g} is priced" if value else "priced without it", **extra)


# Top level.  AutoTP counts the ranks of a tensor group as replicas in the total (runtime/config.py:471).
TOTAL = count("train_batch_size", "global_batch", when=lambda file: file.best.plan.tp == 1)
MICRO_BATCH = count("train_micro_batch_size_per_gpu", "micro_batch")
ACCUMULATION = count("gradient_accumulation_steps", "num_microbatches")
# By default gradients are communicated in 16 bits (runtime/engine.py).
REDUCTION = word(
    "communication_data_type",
    "reduce_dtype",
    ReduceType.USUAL,
    {"fp32": ReduceType.FP32, "fp16": ReduceType.USUAL, "bf16": ReduceType.USUAL, "bfp16": ReduceType.USUAL},
    when=lambda file: file.best.plan.reduce_dtype != ReduceType.USUAL,
)
CP = count("sequence_parallel_size", "cp", 1)
# Section `tensor_parallel`; 0, which means 1, is never written.
TP = count("autotp_size", "tp", 0)
TP_OVERLAP = switch("tp_overlap_comm", "tp_overlap")
# Section `expert_parallel`.
EP = count("autoep_size", "ep", 1)
ETP = count("expert_tensor_parallel_size", "etp", 1)
# Section `bf16`.
STATES: tuple[Row, ...] = (
    switch(
        "bf16_master_weights_and_grads", "main_weights", MainWeights.FP32, on=MainWeights.BF16, off=MainWeights.FP32
    ),
    switch("bf16_optimizer_states", "moment_dtype", MomentType.FP32, on=MomentType.BF16, off=MomentType.FP32),
)
# Section `data_types`; by default gradients are added up in the type of the model (runtime/engine.py).
ACCUMULATOR = word(
    "grad_accum_dtype",
    "grad_dtype",
    GradType.BF16,
    dict.fromkeys(("fp32", "float32", "float", "torch.float32"), GradType.FP32)
    | dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "fp16", "float16", "half", "torch.float16"), GradType.BF16),
    when=lambda file: file.best.plan.grad_dtype == GradType.FP32 and file.best.plan.precision == Precision.BF16,
)
# Section `zero_optimization`.
SHARDING = word(
    "stage", "sharding", Sharding.NONE, {0: Sharding.NONE, 1: Sharding.ZERO1, 2: Sharding.ZERO2, 3: Sharding.ZERO3}
)
OVERLAP = switch("overlap_comm", "grad_reduce_overlap")
ZERO_PLUS_PLUS: tuple[Row, ...] = (
    switch("zero_quantized_weights", "quantized_gathers", when=lambda file: file.best.plan.quantized_gathers),
    switch("zero_quantized_gradients", "quantized_reductions", when=lambda file: file.best.plan.quantized_reductions),
    count("zero_hpz_partition_size", "secondary_shard", 1, when=lambda file: file.best.plan.secondary_shard > 1),
)
ZERO: tuple[Option, ...] = (
    SHARDING,
    OVERLAP,
    _priced("contiguous_gradients", True, write=True),
    _priced("reduce_bucket_size", BUCKET_ELEMENTS, write=BUCKET_ELEMENTS),
    _priced("allgather_bucket_size", BUCKET_ELEMENTS, write=BUCKET_ELEMENTS),
    Constant("offload_optimizer", _offload_optimizer),
    Constant("offload_param", lambda file: dict(_ON_HOST) if file.best.plan.offload == Offload.PARAMETERS else None),
    Assumed("stage3_prefetch_bucket_size", (0, PREFETCH_ELEMENTS), f"{PREFETCH_ELEMENTS:g} is priced", _prefetch),
    count(
        "mics_shard_size",
        "dp_shard",
        when=lambda file: file.best.plan.sharding == Sharding.ZERO3 and file.best.plan.dp_replicate > 1,
    ),
    _priced("allgather_partitions", True),
    _priced("mics_hierarchical_params_gather", False),
    _priced("reduce_scatter", True),
    _priced("stage3_allgather_sequential", False),
    _priced("stage3_max_live_parameters", 1e9),
    _priced("stage3_max_reuse_distance", 1e9),
    _priced("stage3_module_granularity_threshold", 0),
    _priced("stage3_param_persistence_threshold", 1e5),
    _priced("stage3_use_all_reduce_for_fetch_params", False),
    Assumed("sub_group_size", (1e9, 1e10, 1e11, 1e12, 1e13, 1e14), "one update of all that a rank holds is priced"),
    _priced("zero_quantized_nontrainable_weights", False),
    *ZERO_PLUS_PLUS,
)
