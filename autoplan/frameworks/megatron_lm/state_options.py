"""Options of the training states: their sharding, data types and location."""

from __future__ import annotations

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import Assumed, Constant, Fields, Option, Value, read_percent
from autoplan.frameworks.common.options import Options
from autoplan.frameworks.megatron_lm.rules import is_precision_aware
from autoplan.frameworks.megatron_lm.table import BRIDGE, DDP, DIST, OPTIMIZER, Line, Reading, Special, switches
from autoplan.spec.enums import GradType, MainWeights, MomentType, Offload, Precision, Sharding
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.plan_file import PlanFile

STRATEGIES = {
    "no_shard": Sharding.NONE,
    "optim": Sharding.ZERO1,
    "optim_grads": Sharding.ZERO2,
    "optim_grads_params": Sharding.ZERO3,
}


def uses_megatron_fsdp(plan: ParallelPlan) -> bool:
    """Return whether Megatron-FSDP shards more than the optimizer states."""
    return plan.sharding in (Sharding.ZERO2, Sharding.ZERO3)


def _write_sharding(file: PlanFile) -> dict[str, Value]:
    sharding = file.best.plan.sharding
    if sharding == "none":
        return {}
    words: dict[str, Value] = {"use_distributed_optimizer": True}
    if uses_megatron_fsdp(file.best.plan):
        strategy = next(word for word, kind in STRATEGIES.items() if kind == sharding)
        words |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    return words


def _read_sharding(reading: Reading) -> Fields:
    arguments = reading.arguments
    distributed = arguments.flag("use_distributed_optimizer")
    fsdp, torch_fsdp = arguments.flag("use_megatron_fsdp"), arguments.flag("use_torch_fsdp2")
    strategy = arguments.text("data_parallel_sharding_strategy", "no_shard") or ""
    if torch_fsdp:
        arguments.remark("use_torch_fsdp2", "priced as Megatron-FSDP")
        return {"sharding": Sharding.ZERO3}
    if not fsdp:
        return {"sharding": Sharding.ZERO1 if distributed else Sharding.NONE}
    if strategy not in STRATEGIES:
        option = arguments.name("data_parallel_sharding_strategy")
        raise InputError(f"{option} {strategy[:30]!r} is not one of {', '.join(STRATEGIES)}")
    return {"sharding": STRATEGIES[strategy]}


def _write_copies(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    is_split = plan.sharding != "none" and plan.dp_replicate > 1
    return {"num_distributed_optimizer_instances": plan.dp_replicate} if is_split else {}


def _read_copies(reading: Reading) -> Fields:
    """Read the number of copies of the sharded states among the model replicas."""
    arguments, key = reading.arguments, "num_distributed_optimizer_instances"
    dp = reading.fields.pop("dp")
    copies = dp if reading.fields["sharding"] == Sharding.NONE else arguments.count(key, 1)
    if copies < 1 or dp % copies:
        raise InputError(f"{arguments.name(key)} {copies} does not divide dp {dp}")
    return {"dp_replicate": copies, "dp_shard": dp // copies}


def _write_offload(file: PlanFile) -> dict[str, Value]:
    keys = ("optimizer_cpu_offload", "use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d")
    # Without a fraction nothing is offloaded but in Megatron-LM's own scripts (core/optimizer/optimizer_config.py).
    fraction: dict[str, Value] = {"optimizer_offload_fraction": file.best.plan.offload_percent / 100}
    return dict.fromkeys(keys, True) | fraction if file.best.plan.offload == Offload.OPTIMIZER else {}


def _write_narrow_params(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    if not plan.narrow_params:
        return {}
    if plan.precision == Precision.NVFP4:
        return {"fp4_param_gather": True}
    # Block scales are computed after the gather, whose result is stored in the gradient buffer.
    reuse = {"reuse_grad_buf_for_mxfp8_param_ag": True} if plan.precision == Precision.MXFP8 else {}
    return {"fp8_param_gather": True, **reuse}


def _read_narrow_params(reading: Reading) -> Fields:
    arguments = reading.arguments
    is_fp4 = reading.fields["precision"] == Precision.NVFP4
    gathers = [arguments.flag("fp8_param_gather"), arguments.flag("fp4_param_gather")]
    arguments.flag("reuse_grad_buf_for_mxfp8_param_ag")
    return {"narrow_params": gathers[is_fp4]}


def _write_states(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    types: dict[str, Value] = {}
    if plan.grad_dtype == GradType.FP32 and plan.precision == Precision.FP16:
        types["accumulate_allreduce_grads_in_fp32"] = True
    if plan.grad_dtype != GradType.FP32 and plan.precision != Precision.FP16:
        types["grad_reduce_in_bf16"] = True
    if plan.grad_dtype == GradType.BF16_MAIN:
        types["main_grads_dtype"] = "bf16"
    if plan.main_weights == MainWeights.FP16:
        types["main_params_dtype"] = "fp16"
    if plan.moment_dtype != MomentType.FP32:
        types |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), str(plan.moment_dtype))
    is_aware = is_precision_aware(PlanBatch.of([plan], file.model.num_layers))[0]
    return ({"use_precision_aware_optimizer": True} if is_aware else {}) | types


_MOMENTS: dict[str, MomentType] = {"fp32": MomentType.FP32, "bf16": MomentType.BF16, "fp8": MomentType.FP8}
_MOMENTS["fp16"] = MomentType.BF16  # as many bytes
_TORCH_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


def _dtype(arguments: Options, key: str, *allowed: str) -> str:
    """Return the data type set by an option, in Megatron-LM's or torch's name; the default is fp32."""
    name = str(arguments.text(key) or "fp32").removeprefix("torch.")
    name = _TORCH_TYPES.get(name, name)
    if name not in allowed:
        raise InputError(f"{arguments.name(key)} {name[:30]!r} is not one of {', '.join(allowed)}")
    return name


def _read_states(reading: Reading) -> Fields:
    """Read the data types of gradients, main weights and moments, used only by the precision-aware optimizer."""
    arguments, fields = reading.arguments, reading.fields
    is_half = fields["precision"] == Precision.FP16
    accumulates = arguments.flag("accumulate_allreduce_grads_in_fp32", not is_half)
    halves = arguments.flag("grad_reduce_in_bf16", is_half and not accumulates)
    grads = _dtype(arguments, "main_grads_dtype", "fp32", "bf16")
    weights = _dtype(arguments, "main_params_dtype", "fp32", "fp16")
    moment_types = [_dtype(arguments, key, *_MOMENTS) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    is_aware = arguments.flag("use_precision_aware_optimizer") and fields.get("offload") != Offload.OPTIMIZER
    keeps_remainders = arguments.flag("store_param_remainders", True)
    states: Fields = {"grad_dtype": GradType.BF16 if halves else GradType.FP32}
    if not is_aware:
        return states
    if grads == "bf16":
        states["grad_dtype"] = GradType.BF16_MAIN
    if weights == "fp16":
        states["main_weights"] = MainWeights.FP16
    elif fields["precision"] == Precision.BF16:
        states["main_weights"] = MainWeights.REMAINDERS
        if not keeps_remainders:
            arguments.remark("store_param_remainders", "main weights are priced as remainders")
    if moment_types[0] != moment_types[1]:
        arguments.remark("exp_avg_sq_dtype", f"both moments are priced as {moment_types[0]}", default="fp32")
    return states | {"moment_dtype": _MOMENTS[moment_types[0]]}


def _read_offload(reading: Reading) -> Fields:
    arguments = reading.arguments
    if not arguments.flag("optimizer_cpu_offload"):
        return {}
    percent = read_percent(arguments, "optimizer_offload_fraction")
    overlaps = arguments.flag("overlap_cpu_optimizer_d2h_h2d")
    if not percent:
        return {}
    if not overlaps:
        arguments.remark("overlap_cpu_optimizer_d2h_h2d", "copies to the host are priced as overlapped", default="off")
    return {"offload": Offload.OPTIMIZER, "offload_percent": percent}


# fmt: off
SHARDING: tuple[Line, ...] = (
    (
        Special("use_distributed_optimizer", _write_sharding, _read_sharding, names=DDP, is_switch=True,
                companions=(Option("use_megatron_fsdp", names=DDP, is_switch=True),
                        Option("use_torch_fsdp2", names=DIST, is_switch=True),
                        Option("data_parallel_sharding_strategy", names=DDP))),
    ),
    (
        Constant("ckpt_format", lambda file: "fsdp_dtensor" if uses_megatron_fsdp(file.best.plan) else None,
                 names={BRIDGE: "checkpoint."}),
    ),
    # So that the model need not fit on one device.
    (Assumed("init_model_with_meta_device", write=lambda file: file.best.plan.sharding == "zero3", is_switch=True),),
    (Special("num_distributed_optimizer_instances", _write_copies, _read_copies, names=DDP),),
)
NARROW_PARAMS: Line = (
    Special("fp8_param_gather", _write_narrow_params, _read_narrow_params, is_switch=True,
            names={BRIDGE: "mixed_precision."},
            companions=(Option("fp4_param_gather", names={BRIDGE: "mixed_precision."}, is_switch=True),
                    Option("reuse_grad_buf_for_mxfp8_param_ag", names={BRIDGE: "mixed_precision."},
                           is_switch=True))),
)
OFFLOAD: Line = (
    Special("optimizer_cpu_offload", _write_offload, _read_offload, names=OPTIMIZER, is_switch=True,
            companions=(Option("overlap_cpu_optimizer_d2h_h2d", names=OPTIMIZER, is_switch=True),
                    Option("optimizer_offload_fraction", names=OPTIMIZER))),
)
STATES: Line = (
    Special("use_precision_aware_optimizer", _write_states, _read_states, names=OPTIMIZER, is_switch=True,
            companions=(*(Option(key, names=OPTIMIZER) for key in (
                        "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
                    )),
                    Option("store_param_remainders", names=OPTIMIZER, is_switch=True),
                    *switches("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"))),
)
# fmt: on
