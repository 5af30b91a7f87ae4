"""A plan compared with its neighbours, with another plan, and with the plan of a launch file."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.spec.estimate import PlacedStage, StageCost
from autoplan.spec.mixed_result import MixedCertificate, MixedCost
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.search_result import Certificate, Contender, RankedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """An option in a launch file and in the exported file of the best plan; None if it is absent."""

    option: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChange:
    """Axis in which the best plan differs from a launch file, and the gain of changing it alone."""

    axis: str
    before: str
    after: str
    alone: RankedPlan | None  # the file's plan with this change
    why_not: str  # why the framework does not support that plan; empty if it does
    options: tuple[OptionChange, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkStep:
    """Intermediate plan on the path from a launch file to the best plan, with the changes so far."""

    axes: tuple[str, ...]  # axes changed in this step
    plan: RankedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentPlan:
    """Plan of a launch file compared with the best one, and the changes that lead from one to the other.

    The path starts at the file's plan and ends at the best one; all steps are legal and as safe as the best.  It is
    empty if the file's plan cannot be priced.
    """

    path: str
    target: str
    plan: ParallelPlan
    broken: tuple[str, ...]  # why the framework refuses it
    priced: RankedPlan | None
    gap: Contender | None  # gap between the file's plan and the best
    num_faster: int  # minimum number of cells of the search space with a faster plan
    changes: tuple[AxisChange, ...]
    walk: tuple[WalkStep, ...]
    options: tuple[OptionChange, ...]  # changes from the file to the best plan's file
    no_options: str  # why the changes of options are unknown; empty if they are known
    unread: dict[str, str]  # options of the file that were not understood and may matter, with the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A neighbouring plan that differs in a few axes: its cost, the next usable global batch, and what it lacks."""

    changes: tuple[tuple[str, str, str], ...]  # axis, value there, value here
    plan: RankedPlan
    ratio: float  # time per sequence relative to the other plan
    stage: int  # the stage with the highest memory need
    needed_bytes: float  # need for the scarcest memory, of that stage or of a host
    capacity_bytes: float
    is_host: bool
    broken: tuple[str, ...]  # rules of the framework, in words

    @property
    def is_possible(self) -> bool:
        """Return whether the plan could be started."""
        return self.plan.verdict == "fits" and not self.broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """Comparison with another plan, and the gain of each single change on the way to it."""

    name: str  # as requested
    plan: RankedPlan
    stages: tuple[StageCost, ...]
    gap: Contender
    broken: tuple[str, ...]
    changes: tuple[AxisChange, ...]  # empty if the plans belong to different problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of a plan's step time, and why no other plan was chosen."""

    command: str
    plan: RankedPlan
    stages: tuple[StageCost, ...]
    capacity_bytes: float
    binds: tuple[str, ...]  # constraints that exclude faster plans, in words
    changes: tuple[Neighbour, ...]  # the best plan with another value of each axis, fastest first
    better: tuple[Neighbour, ...]  # faster plans with one or two changes, the least infeasible first
    alternatives: tuple[RankedPlan, ...]  # other plans of the search, best first
    certificate: Certificate | None
    versus: Versus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedNeighbour:
    """A plan of a mixed cluster with one change from another one, kinds of replicas by their letters there."""

    change: tuple[str, str, str]  # what, as there, as here
    plan: MixedCost
    ratio: float  # time per sequence relative to the other plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedExplanation:
    """Reasons why a plan of a mixed cluster takes as long as it does, and why no other one was taken."""

    command: str
    plan: MixedCost
    stages: tuple[PlacedStage, ...]  # kind after kind of replica
    changes: tuple[MixedNeighbour, ...]  # of every thing that can be changed the fastest, and the fastest that fits
    alternatives: tuple[MixedCost, ...]  # of the search, best first
    certificate: MixedCertificate | None
