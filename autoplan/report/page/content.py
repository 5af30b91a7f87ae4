"""Content of a page: the plan file, and what was computed again for it."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.base.arrays import Floats
from autoplan.cost.collectives.traffic import StepTraffic
from autoplan.cost.timeline import Timeline
from autoplan.spec.estimate import PlacedStage
from autoplan.spec.needed_times import StepSources
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.run_report import SizeOutcome
from autoplan.spec.search_result import RankedPlan, Sensitivity
from autoplan.spec.timing import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something to type next."""

    purpose: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A value of the plan that may be changed on the page; empty where it follows from others."""

    name: str
    label: str
    value: str
    choices: tuple[str, ...] = ()  # none: any text
    help: str
    is_option: bool = False  # which few people change


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Content of any page; a part that could not be had is empty, and `missing` says why, by the part's name."""

    file: PlanFile | MixedPlanFile
    stages: tuple[PlacedStage, ...]
    schedule: Timeline | None = None
    steps: tuple[Step, ...] = ()
    missing: dict[str, str]

    def why_not(self, part: str) -> str:
        """Sentence on why a part is not shown."""
        return f"Not shown: {self.missing[part]}."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContent(Content):
    """The page of a plan of equal nodes."""

    file: PlanFile
    traffic: StepTraffic
    rests_on: dict[str, dict[Provenance, Floats]]  # shares of every term of the step, a batch of one plan
    front: tuple[RankedPlan, ...] = ()  # that no plan beats in both step time and memory, the fastest first
    sizes: tuple[SizeOutcome, ...] = ()  # the best plans on fewer and on more nodes
    sensitivity: Sensitivity | None = None
    controls: tuple[Control, ...] = ()  # of a page that is served
    pinned: tuple[PlanFile, ...] = ()  # to be compared with `file`
    was_searched: bool = True  # and what is searched again is here, or missing; else it is no part of the page
    records: StepSources | None = None  # behind the times; None where the plan was priced without measured ones


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedContent(Content):
    """The page of a plan of a mixed cluster."""

    file: MixedPlanFile
