"""Results: plans with their costs, as objects with tables, JSON and notebook display."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from autoplan.base.files import encode, write_text
from autoplan.base.units import format_bytes, format_percent, format_seconds
from autoplan.spec.estimate import PlacedStage
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of values with named columns, which include the SI unit.  Iterating yields the rows as dicts."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Table:
        """Return the table of rows with the same keys."""
        listed = list(rows)
        columns = tuple(listed[0]) if listed else ()
        return cls(columns=columns, rows=tuple(tuple(row[name] for name in columns) for row in listed))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def to_csv(self) -> str:
        """Return the table as CSV, its columns in the first line."""
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows((self.columns, *self.rows))
        return stream.getvalue()

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape("" if value is None else str(value))


class Result(ABC):
    """Result of a function of the API: a table, JSON, and a headline."""

    __slots__ = ()

    @property
    @abstractmethod
    def headline(self) -> str:
        """The answer in one line."""

    @abstractmethod
    def table(self) -> Table:
        """Return the answer as rows."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the answer as JSON, as the command prints it with --json; `autoplan schema` has its schema."""

    def __str__(self) -> str:
        return self.headline

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.headline)}</p>{self.table()._repr_html_()}"


Progress = Callable[[int, int | None], None]  # (done, all of them where that is known)

File = TypeVar("File", PlanFile, MixedPlanFile)


class FileResult(Result, Generic[File]):
    """Plans of one problem, best first, as in a plan file."""

    __slots__ = ()
    file: File

    def to_json(self) -> str:
        """Return the content of the plan file."""
        return encode(self.file)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the plan file; InputError if it exists without `force`, or cannot be written."""
        write_text(Path(path), self.to_json(), force=force)

    def with_command(self, command: str) -> Self:
        """Return the result with another command line recorded in the plan file."""
        return replace(self, file=replace(self.file, command=command))  # type: ignore[type-var]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlans(FileResult[PlanFile]):
    """Plans for one problem on equal nodes, best first, with their costs; `PlanResult` adds methods.

    `file` is the content of plan.json: the plan, its costs by term and by pipeline stage, and why it is the best.
    `warnings` lists what to know before running the plan.
    """

    file: PlanFile
    problem: Problem = field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> RankedPlan:
        """The best plan, with its step time in seconds, its memory in bytes and whether it fits."""
        return self.file.best

    @property
    def plan(self) -> ParallelPlan:
        """The degrees and options of the best plan."""
        return self.file.best.plan

    @property
    def plans(self) -> tuple[RankedPlan, ...]:
        """The best plan and the alternatives to it, best first."""
        return (self.file.best, *self.file.alternatives)

    @property
    def headline(self) -> str:
        """The best plan and its costs in one line."""
        best = self.best
        return (
            f"{best.plan.describe()}: {format_seconds(best.step_s)} per step "
            f"({format_seconds(best.low_s)} to {format_seconds(best.high_s)}), {format_percent(best.mfu)} MFU, "
            f"{format_bytes(best.memory_bytes)} of memory, {best.verdict}"
        )

    def table(self) -> Table:
        """Return one row for each plan, best first: times in seconds, memory of a device in bytes."""
        return Table.of(
            {
                "plan": ranked.plan.describe(),
                "step_s": ranked.step_s,
                "low_s": ranked.low_s,
                "high_s": ranked.high_s,
                "tokens_per_s_per_device": ranked.tokens_per_s_per_device,
                "mfu": ranked.mfu,
                "memory_bytes": ranked.memory_bytes,
                "oom_probability": ranked.oom_probability,
                "verdict": ranked.verdict,
            }
            for ranked in self.plans
        )

    def trace(self) -> str:
        """Return one step of the best plan as a Chrome trace, for ui.perfetto.dev."""
        from autoplan.cost.timeline import timeline  # neither is needed to hold a result
        from autoplan.report.trace import trace_json

        return trace_json(timeline(self.problem, self.plan), self.plan.describe())


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlanResult(FileResult[MixedPlanFile]):
    """Plans for one problem on a mixed cluster, best first, like `PricedPlans`."""

    file: MixedPlanFile
    problem: MixedProblem = field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> MixedCost:
        """The best plan, with its step time in seconds, and the memory of its stages in bytes."""
        return self.file.best

    @property
    def plans(self) -> Sequence[MixedCost]:
        """The best plan and the alternatives to it, best first."""
        return (self.file.best, *self.file.alternatives)

    @property
    def headline(self) -> str:
        """The best plan and its costs in one line."""
        best = self.best
        return f"{self.described(best)}: {format_seconds(best.step_s)} per step, {best.verdict}"

    def described(self, cost: MixedCost) -> str:
        """Return a plan in words."""
        from autoplan.report.mixed_search import describe  # brings rich

        return describe(cost.plan, self.file.cluster.part_names)

    def table(self) -> Table:
        """Return one row for each plan, best first: times in seconds."""
        return Table.of(
            {
                "plan": self.described(cost),
                "step_s": cost.step_s,
                "low_s": cost.low_s,
                "high_s": cost.high_s,
                "sequences_per_s": cost.sequences_per_s,
                "verdict": cost.verdict,
            }
            for cost in self.plans
        )

    def stages(self) -> tuple[PlacedStage, ...]:
        """Return time and memory of the stages of the best plan, kind after kind of replica."""
        from autoplan.cost.mixed.stages import mixed_stages  # not needed to hold a result

        return mixed_stages(self.problem, self.best.plan)

    def trace(self) -> str:
        """Return one step of the best plan as a Chrome trace, for ui.perfetto.dev."""
        from autoplan.cost.mixed.stages import mixed_timeline  # neither is needed to hold a result
        from autoplan.report.trace import trace_json

        return trace_json(mixed_timeline(self.problem, self.best.plan), self.described(self.best))


def unmeasured_text(problem: Problem) -> str:
    """Say that no run on the device of a problem was measured, and how wide that makes the interval; else nothing."""
    device = problem.cluster.device
    if not device.rate_spread or device.vendor == "cpu" or problem.timings.has_kernels:
        return ""
    why = f"no run on {device.name} was measured"
    if device.is_announced:
        why = f"{device.name} has the figures that its maker announced, and no run on it was measured"
    allowance = f"the interval allows for {100 * device.rate_spread:.0f} % in its rates"
    return f"{why}, so {allowance}; autoplan profile measures them"
