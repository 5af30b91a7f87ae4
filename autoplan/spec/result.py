"""What comes out: the cost of plans, and what a search found."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.base.errors import InputError
from autoplan.base.units import check_not_negative, check_positive
from autoplan.spec.enums import Precision
from autoplan.spec.framework import Framework
from autoplan.spec.mixed_problem import MixedPlan
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.ranks import HostRanks
from autoplan.spec.timing import Calibration, Provenance
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec, DeviceSpec
from autoplan.topology.mixed_cluster import MixedCluster

Verdict = Literal["fits", "risky", "oom"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
RISKY_ABOVE, OOM_ABOVE = 0.05, 0.50  # probabilities of running out of memory
RISKY_Z, OOM_Z = -1.6448536269514722, 0.0  # the same as quantiles of the normal distribution


def probability_above(z: float) -> float:
    """Of a normal variable whose mean lies `z` standard deviations above the bound."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """Predicted cost of every plan of a batch; arrays have one element per plan.

    `terms_s` add up to `step_s` exactly.  `memory_bytes` is what the allocator reserves on the worst pipeline stage,
    context and communication buffers included; `memory_terms_bytes` describe that stage before fragmentation.
    """

    batch: PlanBatch
    step_s: Floats
    low_s: Floats
    high_s: Floats
    terms_s: dict[str, Floats]
    memory_bytes: Floats
    logged_memory_bytes: Floats  # the peak that the framework's own log would show
    memory_terms_bytes: dict[str, Floats]
    worst_stage: Ints
    capacity_bytes: float
    host_memory_bytes: Floats  # of a node
    oom_z: Floats  # distance to the capacity of device or host in standard deviations of log memory

    def __len__(self) -> int:
        return len(self.step_s)

    @property
    def verdict(self) -> Ints:
        """Index into VERDICTS: fits below 5 % probability of running out of memory, oom above 50 %."""
        return (self.oom_z > RISKY_Z).astype(np.int64) + (self.oom_z > OOM_Z)

    def oom_probability(self, at: int) -> float:
        """Probability that the plan at an index runs out of memory."""
        return probability_above(float(self.oom_z[at]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One pipeline rank: its layers, its time per micro-batch and its memory, by term."""

    stage: int
    layers: int
    forward_s: float
    backward_s: float
    terms_s: dict[str, float]
    memory_bytes: float
    memory_terms_bytes: dict[str, float]
    oom_probability: float

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "memory_bytes"):
            check_not_negative(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a pipeline stage sits, in every replica of its kind."""

    kind: str = ""  # of replica: a letter where they are unlike
    stage: int
    part: str = ""  # of a mixed cluster, by name
    num_microbatches: int  # that pass through it in a step
    capacity_bytes: float  # of one of its devices, that a plan may use

    @property
    def name(self) -> str:
        """What the stage is called."""
        return f"{self.kind}{self.stage}"

    @property
    def words(self) -> str:
        """The stage and where it is."""
        return f"stage {self.name} on {self.part}" if self.part else f"stage {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """A stage with its place."""

    place: Place
    cost: StageCost

    @property
    def fill(self) -> float:
        """Its memory over the capacity of its own devices."""
        return self.cost.memory_bytes / self.place.capacity_bytes

    @property
    def busy_s(self) -> float:
        """Its work in a step."""
        return self.place.num_microbatches * sum(self.cost.terms_s.values())


def placed(stages: Iterable[StageCost], num_microbatches: int, capacity_bytes: float) -> tuple[PlacedStage, ...]:
    """Stages of a plan whose devices are alike."""
    return tuple(
        PlacedStage(
            place=Place(stage=stage.stage, num_microbatches=num_microbatches, capacity_bytes=capacity_bytes), cost=stage
        )
        for stage in stages
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Why no plan of the space is better: what was neither priced nor too large has a bound that is no better.

    A bound is a time that a plan cannot beat (`search.bounds`).
    """

    cells: int
    expanded: int  # cells of which plans were bounded one by one
    plans: int  # in all cells, before the rules of the framework
    bounded: int
    priced: int
    fitting: int  # of those priced
    risky: int
    best_step_s: float | None
    least_left: float | None  # least bound of what was not priced, over the best; None: all was priced or is too large
    proven: bool
    limits: tuple[str, ...]  # what the space left out, in words
    quantile: float | None = None  # of the step time that the best plan makes least, where not the predicted one
    margin: float | None = None  # plans so much slower than the fastest were looked at for that
    best_in: tuple[str, ...] = ()  # what no plan of the space beats the ones found in, where that is not the time alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A plan and the figures by which it is ranked."""

    plan: ParallelPlan
    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_device: float
    mfu: float
    memory_bytes: float
    memory_headroom_bytes: float
    host_memory_bytes: float  # of a node
    oom_probability: float
    verdict: Verdict
    terms_s: dict[str, float]

    def __post_init__(self) -> None:
        for name in (
            "step_s",
            "low_s",
            "high_s",
            "tokens_per_s_per_device",
            "mfu",
            "memory_bytes",
            "host_memory_bytes",
        ):
            check_positive(name, getattr(self, name))
        if not self.low_s <= self.step_s <= self.high_s:
            raise InputError(
                f"step_s {self.step_s:g} must lie in its interval from low_s {self.low_s:g} to high_s {self.high_s:g}"
            )
        if not 0 <= self.oom_probability <= 1:
            raise InputError(f"oom_probability must lie in [0, 1], got {self.oom_probability:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryKnob:
    """One change of a plan that frees device memory on the rank that needs most."""

    change: str  # in words
    freed_bytes: float
    plan: RankedPlan  # as changed

    def __post_init__(self) -> None:
        check_positive("freed_bytes", self.freed_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Plans, best first, and the certificate; `closest` is the least too large plan where none fits.

    `ranked` holds the best of all plans, many of which differ in details only; `rivals` the best of every cell, plans
    with other degrees.  Both begin with the winner.
    """

    ranked: tuple[RankedPlan, ...]
    rivals: tuple[RankedPlan, ...]
    closest: RankedPlan | None
    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A plan that may be as fast as the best: the ratio of their times per sequence, and its 90 % interval."""

    plan: ParallelPlan
    ratio: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.ratio <= self.high:
            raise InputError(f"ratio {self.ratio:g} must lie in its interval from {self.low:g} to {self.high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A number that would have to be other than assumed, alone, for another plan to win: the first such plan."""

    quantity: str  # in words, such as 'NVLink bandwidth'
    factor: float  # at which the winners change, on the number
    plan: ParallelPlan
    is_proven: bool  # no plan that the search left out can win before that
    measure: tuple[str, ...] = ()  # operations of `autoplan profile` that tell the number

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obvious:
    """The best plan of a family that a person would think of first: how it compares with the answer."""

    family: str
    plan: RankedPlan  # the least too large one, where none fits
    ratio: float  # of the times per sequence
    excess_bytes: float  # memory beyond what is there; 0 where it fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What the answer hangs on: relative growth of the step with each number, and the numbers that would change it."""

    elasticities: dict[str, float]  # by quantity; -0.4: 1 % more of it makes the step 0.4 % shorter
    flips: tuple[Flip, ...]  # nearest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How sure the choice is.  Contenders are plans in the interval of their ratio to the best, fastest first."""

    runner_up: RankedPlan | None  # the best plan that differs in more than details
    ratio: float | None  # of its time per sequence to that of the best
    width: float | None  # factor to either end of the ratio's 90 % interval
    num_contenders: int
    contenders: tuple[Contender, ...]
    sensitivity: Sensitivity | None = None
    obvious: tuple[Obvious, ...] = ()

    @property
    def is_close(self) -> bool:
        """Whether the runner-up is a contender."""
        return self.ratio is not None and self.width is not None and self.ratio <= self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What training with a plan takes beside its step; None where that needs something that was not given."""

    num_devices: int
    seconds_per_sequence: float
    memory_bytes: float
    goodput: float  # the share of a run's time that its steps take
    mtbf_s: float  # of the whole job
    checkpoint_interval_s: float
    tokens_per_s: float  # of all devices, while they run
    cost_per_token: float | None  # in the currency of price_per_device_hour, like all costs; goodput counts
    energy_per_token_j: float | None  # goodput counts
    run_s: float | None  # until all tokens are trained, failures included
    device_hours: float | None  # of that run
    cost: float | None
    energy_j: float | None
    tokens_in_budget: float | None  # trained in the device hours that there are
    budget_s: float | None  # for which these last


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A plan on some number of nodes, and what a run with it takes."""

    num_nodes: int
    plan: RankedPlan
    figures: RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOutcome:
    """What is known of a number of nodes: its best plan, or a bound that shows why none was looked for."""

    num_nodes: int
    best: RunPlan | None  # in the first objective
    least: RunFigures | None  # what no plan on so many nodes beats
    why: str = ""  # there is no best plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The answer to a search for something else than the fastest step of one cluster."""

    objectives: tuple[str, ...]
    best: RunPlan
    front: tuple[RunPlan, ...]  # all that no plan beats in every objective, the best of the first objective first
    sizes: tuple[SizeOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """An option of a launch file as written there and as the best plan's is written; None: it does not stand there."""

    option: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChange:
    """One axis in which the best plan differs from the one of a launch file, and what it brings without the others."""

    axis: str
    before: str
    after: str
    alone: RankedPlan | None  # the file's plan with this change
    why_not: str  # the framework does not admit that plan; empty where it does
    options: tuple[OptionChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkStep:
    """A plan between that of a launch file and the best one: the file's with the changes up to here."""

    axes: tuple[str, ...]  # that change in this step
    plan: RankedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Today:
    """How good the plan of a launch file is beside the best one, and what leads from one to the other.

    The first step of the walk changes the file's plan, the last one ends at the best; all of them are legal and as safe
    as the best.  There is none where the file's plan cannot be priced.
    """

    path: str
    target: str
    plan: ParallelPlan
    broken: tuple[str, ...]  # why the framework refuses it
    priced: RankedPlan | None
    gap: Contender | None  # of the file's plan to the best
    num_faster: int  # cells of the space, at least, that hold a faster plan
    changes: tuple[AxisChange, ...]
    walk: tuple[WalkStep, ...]
    options: tuple[OptionChange, ...]  # between the file and the one of the best plan
    no_options: str  # why these are not known; empty where they are
    unread: dict[str, str]  # options of the file that were not understood and may matter, with the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A plan that differs in few axes from another one: what it would take, and what it lacks.

    Where it does not divide the global batch it is priced with the next one that it divides.
    """

    changes: tuple[tuple[str, str, str], ...]  # axis, value there, value here
    plan: RankedPlan
    ratio: float  # of the times per sequence, to that of the other
    stage: int  # that needs most memory
    broken: tuple[str, ...]  # rules of the framework, in words

    @property
    def is_possible(self) -> bool:
        """Whether it could be started."""
        return self.plan.verdict == "fits" and not self.broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """Another plan beside the one that is explained, and what each change on the way to it brings alone."""

    name: str  # as it was asked for
    plan: RankedPlan
    stages: tuple[StageCost, ...]
    gap: Contender
    broken: tuple[str, ...]
    changes: tuple[AxisChange, ...]  # none where the plans are of different problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a plan takes as long as it does, and why no other one was taken."""

    command: str
    plan: RankedPlan
    stages: tuple[StageCost, ...]
    capacity_bytes: float
    binds: tuple[str, ...]  # what stops faster plans, in words
    changes: tuple[Neighbour, ...]  # the best plan of every axis with that one changed, fastest first
    better: tuple[Neighbour, ...]  # faster ones with one or two changes, those that lack least first
    alternatives: tuple[RankedPlan, ...]  # of the search, best first
    certificate: Certificate | None
    versus: Versus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedNeighbour:
    """A plan of a mixed cluster with one change from another one, kinds of replicas by their letters there."""

    change: tuple[str, str, str]  # what, as there, as here
    plan: MixedCost
    ratio: float  # of the times per sequence, to that of the other


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedExplanation:
    """Why a plan of a mixed cluster takes as long as it does, and why no other one was taken."""

    command: str
    plan: MixedCost
    stages: tuple[PlacedStage, ...]  # kind after kind of replica
    changes: tuple[MixedNeighbour, ...]  # of every thing that can be changed the fastest, and the fastest that fits
    alternatives: tuple[MixedCost, ...]  # of the search, best first
    certificate: MixedCertificate | None


def datasheet_peak(device: DeviceSpec, precision: Precision) -> tuple[str, float]:
    """(name, operations per second) of the datasheet figure that an MFU in `precision` refers to.

    MXFP8 runs at the rate of fp8; a precision that the device lacks is counted against its 16-bit rate.
    """
    peak = {str(name): rate for name, rate in device.peak_flops_per_s.items()}
    for name in ("fp8" if precision == "mxfp8" else precision, "bf16"):
        if name in peak:
            return name, peak[name]
    return "fp16", peak["fp16"]


Said = Literal["fits", "risky", "oom", "invalid", "unpriced"]  # of a run: a verdict, or why there is none
Status = Literal["ok", "oom", "failed", "invalid", "?"]  # how a measured run ended; "?" where the table does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One line of a prediction table; no figures where the run could not be priced."""

    id: str
    verdict: Said
    note: str
    step_time_s: float | None = None
    step_time_low_s: float | None = None
    step_time_high_s: float | None = None
    peak_memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one run ended; `decision` and `plan` are its cells in the columns above."""

    id: str
    source: str  # the id without its number
    status: Status
    step_s: float | None
    peak_gib: float | None
    decision: tuple[str, ...]
    plan: tuple[str, ...]

    @property
    def is_finished(self) -> bool:
        """Whether the run ended well and its step was timed."""
        return self.status == "ok" and self.step_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFlags:
    """Which plans were searched, as typed: from it and the problem the same space is made again."""

    global_batch: str
    fix: tuple[str, ...] = ()
    at_most: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    @property
    def narrows(self) -> bool:
        """Whether plans were left out that are usually looked at."""
        return bool(self.fix or self.at_most)


PLAN_FILE_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The content of `plan.json`: what was asked, the plan, what it costs and why, and what else would do."""

    schema_version: int
    versions: dict[str, str]  # autoplan and the libraries that the numbers rest on
    command: str
    model: ModelSpec
    training: TrainingSpec
    cluster: ClusterSpec
    framework: Framework
    calibration: Calibration
    reserve_bytes: float
    best: RankedPlan
    stages: tuple[StageCost, ...]
    alternatives: tuple[RankedPlan, ...]  # of other degrees, best first
    certificate: Certificate | None  # None where one plan was priced, not searched
    memory_knobs: tuple[MemoryKnob, ...] = ()  # most freed first, where they were asked for
    timings: str = ""  # whose measured times were taken before the reference curves
    rests_on: dict[Provenance, float] = field(default_factory=dict)  # share of the best plan's step
    hosts: tuple[HostRanks, ...] = ()  # of the best plan, in the order of its ranks, where the cluster lists its nodes
    listed_step_s: float | None = None  # of the best plan on the nodes as listed, where it has a placement
    choice: Choice | None = None  # where plans were searched
    run: RunReport | None = None  # where objectives, numbers of nodes or a run were given
    today: Today | None = None  # where the search began with a launch file
    space: SpaceFlags | None = None  # where plans were searched

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device that a plan may use."""
        return self.cluster.device.visible_memory_bytes - self.reserve_bytes

    def __post_init__(self) -> None:
        if self.schema_version != PLAN_FILE_VERSION:
            raise InputError(
                f"schema_version is {self.schema_version}, this autoplan reads {PLAN_FILE_VERSION}: "
                "make the file again with this version"
            )
        for name, one in (
            ("best", self.best),
            *((f"alternatives[{at}]", one) for at, one in enumerate(self.alternatives)),
        ):
            if one.plan.precision != self.training.precision:
                raise InputError(
                    f"{name}.plan.precision is {one.plan.precision}, training.precision {self.training.precision}: "
                    "make them the same"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStageCost:
    """One stage of one kind of replica: times of a micro-batch, memory of a device of its part."""

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
    """All replicas of one kind: their stages, and when their last backward pass is over."""

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
    def verdict(self) -> Verdict:
        """As `CostEstimate.verdict` has it."""
        return VERDICTS[(self.oom_z > RISKY_Z) + (self.oom_z > OOM_Z)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCertificate:
    """What a search on a mixed cluster did, and how far its answer is from what its parts reach alone."""

    structures: int  # ways to form pipelines that were looked at
    plans: int  # priced
    rates_alone: tuple[float, ...]  # best plan of each part alone, sequences per second
    gap: float  # share by which the best plan stays below their sum; negative where parts alone lack memory
    limits: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedResult:
    """Plans of a mixed cluster, best first; where none fits, `closest` is the one that is least too large."""

    ranked: tuple[MixedCost, ...]
    closest: MixedCost | None
    alone: tuple[RankedPlan | None, ...]  # of the parts: the best plan with the other parts idle, of all schedules
    certificate: MixedCertificate


MIXED_FILE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlanFile:
    """The content of the plan file of a mixed cluster."""

    mixed_schema_version: int
    versions: dict[str, str]
    command: str
    model: ModelSpec
    training: TrainingSpec
    cluster: MixedCluster
    framework: Framework
    calibrations: tuple[Calibration, ...]
    reserve_bytes: float
    best: MixedCost
    alternatives: tuple[MixedCost, ...]
    certificate: MixedCertificate | None

    def __post_init__(self) -> None:
        if self.mixed_schema_version != MIXED_FILE_VERSION:
            raise InputError(
                f"mixed_schema_version is {self.mixed_schema_version}, this autoplan reads {MIXED_FILE_VERSION}: "
                "make the file again with this version"
            )


# How a trial ended: its step was measured; its first steps were too slow to go on; memory ran out; it failed; it took
# too long; nobody can say what became of its job; it was ended because the tuning was.
TrialEnd = Literal["measured", "slower", "oom", "failed", "timeout", "lost", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPlan:
    """A plan that was run: what was predicted of its step, what was measured, and how the run ended."""

    number: int
    plan: ParallelPlan
    predicted_s: float
    measured_s: float | None  # of the steps that were timed, also of a run that was ended after the first of them
    spread: float | None  # standard deviation of that time's logarithm
    end: TrialEnd
    reason: str
    seconds: float  # that it ran


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """What trials came to."""

    ended: str  # why there were no more of them, in words
    is_separated: bool  # no plan is left that is likely to be faster
    best: TriedPlan | None  # the last run of the fastest plan
    best_s: float | None  # of a step of that plan: the geometric mean of its runs
    trials: tuple[TriedPlan, ...]
    candidates: int
    left: int  # of them, plans that were not run and may still be faster
    ratio: float | None  # of measured to predicted steps, the median of the trials
    gpu_hours: float
