"""Descriptions of plans in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoplan.base.units import counted
from autoplan.spec.axes import AXES, DEFAULT_RECOMPUTE_MODULES
from autoplan.spec.chunk_order import chunks_of_stages
from autoplan.spec.enums import Dispatcher, RankOrder, Schedule, Sharding

if TYPE_CHECKING:
    from autoplan.spec.plan import ParallelPlan

DEGREES = ("tp", "cp", "pp", "ep", "etp", "dp")  # in the order of a description
SCHEDULE_WORDS = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "1F1B interleaved with {vp} virtual stages",
    Schedule.ZB_H1: "ZB-H1",
    Schedule.ZB_V: "ZB-V",
    Schedule.DUALPIPE_V: "DualPipe-V",
}
_DISPATCHER_WORDS = {
    Dispatcher.DEEPEP: "DeepEP",
    Dispatcher.HYBRIDEP: "HybridEP",
    Dispatcher.ALL_GATHER: "all-gather of tokens",
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
_PHRASES_OF_FLAGS = tuple((axis.name, axis.phrases[True]) for axis in AXES if True in axis.phrases)
_PHRASES = tuple((axis.name, axis.phrases) for axis in AXES if axis.phrases and True not in axis.phrases)


def describe(plan: ParallelPlan) -> str:
    """Return a short description: 'tp 4 pp 2 vp 5 dp 16, micro-batch 1, ZeRO-1'."""
    schedule = "" if plan.schedule in ("1f1b", "interleaved") else SCHEDULE_WORDS[plan.schedule]
    return _joined(plan, schedule, _SHARDING_WORDS[plan.sharding], has_vp=plan.schedule == "interleaved")


def spell_out(plan: ParallelPlan) -> str:
    """Return a full description: 'tp 4 pp 2 dp 16, ..., 1F1B interleaved with 5 virtual stages, ...'."""
    schedule = SCHEDULE_WORDS[plan.schedule].format(vp=plan.vp) if plan.pp > 1 else ""
    return _joined(plan, schedule, _SHARDING_TERMS[plan.sharding], has_vp=False)


def _joined(plan: ParallelPlan, schedule: str, sharding: str, *, has_vp: bool) -> str:
    shown = ("tp", "cp", "pp", "vp", *DEGREES[DEGREES.index("pp") + 1 :]) if has_vp else DEGREES
    degrees = [f"{axis} {getattr(plan, axis)}" for axis in shown if getattr(plan, axis) > 1]
    words = [" ".join(degrees) or "one device", f"micro-batch {plan.micro_batch}"]
    if plan.cp > 1:
        inner = f"all-to-all attention over {plan.cp_kind.inner} and ring"
        words.append({"ring": "ring attention", "all_to_all": "all-to-all attention"}.get(plan.cp_kind, inner))
    if plan.tp > 1 and not plan.sp:
        words.append("no sequence parallelism")
    words += [phrase for name, phrase in _PHRASES_OF_FLAGS if getattr(plan, name)]
    if plan.ep > 1 and plan.dispatcher != Dispatcher.ALL_TO_ALL:
        words.append(_DISPATCHER_WORDS[plan.dispatcher])
    if plan.rank_order != RankOrder.DP_BEFORE_PP:
        words.append(f"ranks {plan.rank_order}")
    if schedule:
        words.append(schedule)
    if plan.layers_per_chunk and len(set(plan.layers_per_chunk)) > 1:
        stages = {sum(chunks) for chunks in chunks_of_stages(plan.layers_per_chunk, plan.pp, plan.schedule)}
        words.append("uneven stages" if len(stages) > 1 else "uneven virtual stages")
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
    words += [phrases[value] for name, phrases in _PHRASES if (value := getattr(plan, name)) in phrases]
    return ", ".join(words)


def _recompute_words(plan: ParallelPlan) -> str:
    if plan.recompute_num_layers is not None:
        where = "virtual stage" if plan.vp > 1 else "stage"
        return f"recompute {counted(plan.recompute_num_layers, 'layer')} a {where}"
    if plan.recompute_modules != DEFAULT_RECOMPUTE_MODULES:
        return f"recompute {'+'.join(plan.recompute_modules)}"
    return f"{plan.recompute} recompute"
