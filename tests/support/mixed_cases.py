"""Mixed clusters and plans for tests, written shortly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.frameworks.presets import load_framework
from autoplan.readers.calibration import built_in_calibration
from autoplan.readers.cluster import load_cluster
from autoplan.spec.enums import Precision
from autoplan.spec.framework import Framework
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, MixedStage, ReplicaKind
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import BetweenSpec, MixedCluster

SMALL = ModelSpec(
    name="small", num_layers=12, hidden_size=2048, vocab_size=32000, num_heads=16, num_kv_heads=8, ffn_size=5632
)
MEGATRON = load_framework("megatron-core")


def problem_of(
    *parts: ClusterSpec,
    model: ModelSpec = SMALL,
    between: BetweenSpec | None = None,
    seq_len: int = 2048,
    precision: Precision = "bf16",
    framework: Framework = MEGATRON,
) -> MixedProblem:
    return MixedProblem(
        model=model,
        training=TrainingSpec(seq_len=seq_len, precision=precision),
        cluster=MixedCluster(name="mixed", parts=parts, between=between or BetweenSpec()),
        framework=framework,
        calibrations=tuple(built_in_calibration(framework, part.device) for part in parts),
    )


def plan_of(kinds: Sequence[ReplicaKind], **common: object) -> MixedPlan:
    """A plan whose replicas share these axes."""
    return MixedPlan(kinds=tuple(kinds), common=common_of(**common))


def common_of(**axes: object) -> ParallelPlan:
    return ParallelPlan(global_batch=1, sp=True, **axes)  # type: ignore[arg-type]


def whole(problem: MixedProblem, cluster: ClusterSpec) -> Problem:
    """The problem on a plain cluster."""
    return Problem(
        model=problem.model,
        training=problem.training,
        cluster=cluster,
        framework=problem.framework,
        calibration=built_in_calibration(problem.framework, cluster.device),
    )


def scaled(
    text: str, name: str, *, speed: float = 1.0, memory_gb: float | None = None, vendor: str = ""
) -> ClusterSpec:
    """A shipped cluster whose device computes and streams `speed` times as fast."""
    cluster = load_cluster(text)
    device = cluster.device
    device = replace(
        device,
        name=name,
        vendor=vendor or device.vendor,  # type: ignore[arg-type]
        peak_flops_per_s={precision: speed * rate for precision, rate in device.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=speed * device.memory_bandwidth_bytes_per_s,
        memory_bytes=memory_gb * 1e9 if memory_gb else device.memory_bytes,
        visible_memory_bytes=memory_gb * 1e9 if memory_gb else device.visible_memory_bytes,
    )
    return replace(cluster, name=name, device=device)


def stages(*places: tuple[int, int, int]) -> tuple[MixedStage, ...]:
    """Stages of (part, tp, layers)."""
    return tuple(MixedStage(part=part, tp=tp, layers=layers) for part, tp, layers in places)


def replicas(count: int, num_microbatches: int, *places: tuple[int, int, int], micro_batch: int = 1) -> ReplicaKind:
    return ReplicaKind(count=count, num_microbatches=num_microbatches, micro_batch=micro_batch, stages=stages(*places))


def as_mixed(problem: Problem) -> MixedProblem:
    """The problem on a mixed cluster of one part."""
    return MixedProblem(
        model=problem.model,
        training=problem.training,
        cluster=MixedCluster(name="mixed", parts=(problem.cluster,)),
        framework=problem.framework,
        calibrations=(problem.calibration,),
        timings=(problem.timings,),
        reserve_bytes=problem.reserve_bytes,
    )
