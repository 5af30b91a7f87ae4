"""Content of a page: the plan file, and further results computed for it."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.base.arrays import Floats
from autoplan.cost.collectives.traffic import StepTraffic
from autoplan.spec.estimate import PlacedStage
from autoplan.spec.needed_times import StepSources
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.run_report import SizeOutcome
from autoplan.spec.search_result import RankedPlan, Sensitivity
from autoplan.spec.timeline import Timeline
from autoplan.spec.timing import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command to type next."""

    purpose: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A plan value that can be changed on the page; empty if it follows from others."""

    name: str
    label: str
    value: str
    choices: tuple[str, ...] = ()  # empty: any text
    help: str
    is_option: bool = False  # rarely changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Content of any page; an unavailable part is empty, and `missing` has the reason by the part's name."""

    file: PlanFile | MixedPlanFile
    stages: tuple[PlacedStage, ...]
    schedule: Timeline | None = None
    steps: tuple[Step, ...] = ()
    missing: dict[str, str]

    def why_not(self, part: str) -> str:
        """Return a sentence on why a part is not shown."""
        return f"Not shown: {self.missing[part]}."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContent(Content):
    """Page of a plan on equal nodes."""

    file: PlanFile
    traffic: StepTraffic
    rests_on: dict[str, dict[Provenance, Floats]]  # source shares of every step term, for one plan
    front: tuple[RankedPlan, ...] = ()  # Pareto front of step time and memory, the fastest first
    sizes: tuple[SizeOutcome, ...] = ()  # best plans on fewer and on more nodes
    sensitivity: Sensitivity[ParallelPlan] | None = None
    controls: tuple[Control, ...] = ()  # of a served page
    pinned: tuple[PlanFile, ...] = ()  # for comparison with `file`
    was_searched: bool = True  # parts from further searches are here or missing; otherwise they are not on the page
    records: StepSources | None = None  # behind the times; None without measured times


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedContent(Content):
    """Page of a plan on a mixed cluster."""

    file: MixedPlanFile
