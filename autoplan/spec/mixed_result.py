"""Predicted cost of plans of a mixed cluster, and what a search on it found."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.spec.estimate import OOM_Z, RISKY_Z, VERDICTS, Verdict
from autoplan.spec.mixed_problem import MixedPlan
from autoplan.spec.run_report import RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStageCost:
    """Stage of a kind of replica: times of a micro-batch, memory of a device of its part."""

    part: int
    tp: int
    layers: int
    forward_s: float
    backward_s: float
    layer_s: tuple[float, ...]  # both passes of one layer of each kind, in the order of `layer_kinds`
    send_s: float  # one message to the next stage; 0 behind the last
    memory_bytes: float
    sharded_bytes: float  # of it, states that other replicas may take
    capacity_bytes: float
    oom_z: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedKindCost:
    """Replicas of one kind: their stages, and when their last backward pass is over."""

    stages: tuple[MixedStageCost, ...]
    pipeline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCost:
    """Predicted cost of one plan of a mixed cluster; `terms_s` add up to `step_s`, `kinds` are in the plan's order."""

    plan: MixedPlan
    step_s: float
    low_s: float
    high_s: float
    terms_s: dict[str, float]
    kinds: tuple[MixedKindCost, ...]
    oom_z: float  # of the device or host that is nearest to its capacity

    @property
    def sequences_per_s(self) -> float:
        """The rate of the whole cluster."""
        return self.plan.global_batch / self.step_s

    @property
    def s_per_sequence(self) -> float:
        """The time of a sequence on the whole cluster."""
        return self.step_s / self.plan.global_batch

    @property
    def memory_bytes(self) -> float:
        """Memory of the stage that needs most."""
        return max(stage.memory_bytes for kind in self.kinds for stage in kind.stages)

    @property
    def verdict(self) -> Verdict:
        """Verdict by the same bounds as `CostEstimate.verdict`."""
        return VERDICTS[(self.oom_z > RISKY_Z) + (self.oom_z > OOM_Z)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCertificate:
    """Extent of a search on a mixed cluster, and how far its answer is from what its bounds leave open."""

    structures: int  # ways to form pipelines that were bounded, each with its axes
    plans: int  # priced
    rates_alone: tuple[float, ...]  # best plan of each part alone, sequences per second
    gap: float  # share by which another plan may be faster at most; 0 where the best one is proven
    limits: tuple[str, ...]
    best_in: str = "step-time"  # the objective of which the gap is


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedResult:
    """Plans of a mixed cluster, best first; where none fits, `closest` is the one that is least too large."""

    ranked: tuple[MixedCost, ...]
    closest: MixedCost | None
    certificate: MixedCertificate

    @property
    def is_empty(self) -> bool:
        """Return whether it is known that no plan is legal and fits; without plans and not empty, none was found."""
        return not self.ranked and self.certificate.gap == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsOutcome:
    """A run on a set of parts of a mixed cluster: the figures with the best plan, or why there is none."""

    parts: str  # in words
    step_s: float | None
    figures: RunFigures | None
    why: str = ""  # there is no plan that serves the run


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRun:
    """Result of a search for objectives of a run: the best parts in the first objective, and all sets of parts."""

    objectives: tuple[str, ...]
    best: PartsOutcome
    outcomes: tuple[PartsOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedToday:
    """The plan of a launch file on the parts of a mixed cluster, in their order; `why` it has no price."""

    path: str
    cost: MixedCost | None
    why: str = ""
