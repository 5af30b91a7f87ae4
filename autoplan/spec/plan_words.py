"""Descriptions of plans in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.base.units import counted
from autoplan.spec.axes import AXES, DEFAULT_RECOMPUTE_MODULES
from autoplan.spec.enums import (
    CrossEntropyFusion,
    CudaGraphs,
    Dispatcher,
    Fp8Scaling,
    GradType,
    MainWeights,
    MomentType,
    OffloadLayers,
    OffloadModules,
    RankOrder,
    ReduceType,
    Schedule,
    Sharding,
)

if TYPE_CHECKING:
    from autoplan.spec.plan import ParallelPlan

DEGREES = ("tp", "cp", "pp", "ep", "etp", "dp")  # in the order of a description
_SCHEDULE_WORDS = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "1F1B interleaved with {vp} virtual stages",
    Schedule.ZB_H1: "ZB-H1",
    Schedule.ZB_V: "ZB-V",
    Schedule.DUALPIPE_V: "DualPipe-V",
}
_SHARDING_WORDS = {
    Sharding.NONE: "unsharded",
    Sharding.ZERO1: "ZeRO-1",
    Sharding.ZERO2: "ZeRO-2",
    Sharding.ZERO3: "ZeRO-3",
}
_SHARDING_TERMS = {
    **_SHARDING_WORDS,
    Sharding.ZERO1: "distributed optimizer (ZeRO-1)",
    Sharding.ZERO3: "fully sharded (ZeRO-3)",
}
_OPTION_WORDS: dict[str, dict[Any, str]] = {
    "offload_modules": {word: f"inputs of {word} on the CPU" for word in OffloadModules if word.code},
    "offload_layers": {word: f"activations of {word} of the layers on the CPU" for word in OffloadLayers if word.code},
    "cuda_graphs": {
        CudaGraphs.ROUTER: "CUDA graphs of routers",
        CudaGraphs.ATTENTION: "CUDA graphs of attention",
        CudaGraphs.LAYER: "CUDA graphs of layers",
        CudaGraphs.FULL_ITERATION: "one CUDA graph",
    },
    "grad_dtype": {GradType.BF16: "16-bit gradients", GradType.BF16_MAIN: "16-bit main gradients"},
    "reduce_dtype": {ReduceType.FP32: "gradients reduced in fp32", ReduceType.HALF: "gradients reduced in 16 bits"},
    "fp8_scaling": {
        Fp8Scaling.ROWWISE: "scales of rows",
        Fp8Scaling.DELAYED: "scales of past steps",
        Fp8Scaling.BLOCKWISE: "scales of blocks",
    },
    "gradient_accumulation_fusion": {False: "unfused accumulation"},
    "cross_entropy_fusion": {word: f"{word} cross entropy" for word in CrossEntropyFusion if word.code},
    "main_weights": {
        MainWeights.REMAINDERS: "main weights as remainders",
        MainWeights.FP16: "fp16 main weights",
        MainWeights.BF16: "bf16 main weights",
    },
    "moment_dtype": {MomentType.BF16: "bf16 moments", MomentType.FP8: "fp8 moments"},
}
_PHRASES = tuple((axis.name, axis.phrase) for axis in AXES if axis.phrase)


def describe(plan: ParallelPlan) -> str:
    """Return a short description: 'tp 4 pp 2 vp 5 dp 16, micro-batch 1, ZeRO-1'."""
    schedule = "" if plan.schedule in ("1f1b", "interleaved") else _SCHEDULE_WORDS[plan.schedule]
    return _joined(plan, schedule, _SHARDING_WORDS[plan.sharding], has_vp=plan.schedule == "interleaved")


def spell_out(plan: ParallelPlan) -> str:
    """Return a full description: 'tp 4 pp 2 dp 16, ..., 1F1B interleaved with 5 virtual stages, ...'."""
    schedule = _SCHEDULE_WORDS[plan.schedule].format(vp=plan.vp) if plan.pp > 1 else ""
    return _joined(plan, schedule, _SHARDING_TERMS[plan.sharding], has_vp=False)


def _joined(plan: ParallelPlan, schedule: str, sharding: str, *, has_vp: bool) -> str:
    shown = ("tp", "cp", "pp", "vp", *DEGREES[DEGREES.index("pp") + 1 :]) if has_vp else DEGREES
    degrees = [f"{axis} {getattr(plan, axis)}" for axis in shown if getattr(plan, axis) > 1]
    words = [" ".join(degrees) or "one device", f"micro-batch {plan.micro_batch}"]
    if plan.cp > 1:
        words.append({"ring": "ring attention", "all_to_all": "all-to-all attention"}[plan.cp_kind])
    if plan.tp > 1 and not plan.sp:
        words.append("no sequence parallelism")
    words += [phrase for name, phrase in _PHRASES if getattr(plan, name)]
    if plan.ep > 1 and plan.dispatcher != Dispatcher.ALL_TO_ALL:
        words.append({"deepep": "DeepEP", "hybridep": "HybridEP"}[plan.dispatcher])
    if plan.rank_order != RankOrder.DP_BEFORE_PP:
        words.append(f"ranks {plan.rank_order}")
    if schedule:
        words.append(schedule)
    if plan.layers_per_chunk and len(set(plan.layers_per_chunk)) > 1:
        ranks = {sum(plan.layers_per_chunk[rank :: plan.pp]) for rank in range(plan.pp)}
        words.append("uneven stages" if len(ranks) > 1 else "uneven virtual stages")
    if plan.dp * plan.cp > 1:
        over = f" over {plan.dp_shard * plan.cp}" if plan.dp_replicate > 1 and plan.sharding != "none" else ""
        words.append(f"{sharding}{over}")
    if plan.secondary_shard > 1:
        words.append(f"second copy over {plan.secondary_shard}")
    if plan.recompute != "none":
        words.append(_recompute_words(plan))
    if plan.offload != "none":
        offloaded = {"parameters": "parameters and optimizer"}.get(plan.offload, plan.offload)
        if plan.offload_percent < 100:
            offloaded = f"{plan.offload_percent} % of the {offloaded}"
        words.append(f"{offloaded} on the CPU")
    words += [text for name, texts in _OPTION_WORDS.items() if (text := texts.get(getattr(plan, name)))]
    return ", ".join(words)


def _recompute_words(plan: ParallelPlan) -> str:
    if plan.recompute_num_layers is not None:
        where = "virtual stage" if plan.vp > 1 else "stage"
        return f"recompute {counted(plan.recompute_num_layers, 'layer')} a {where}"
    if plan.recompute_modules != DEFAULT_RECOMPUTE_MODULES:
        return f"recompute {'+'.join(plan.recompute_modules)}"
    return f"{plan.recompute} recompute"
