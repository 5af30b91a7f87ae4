"""Shapes that pricing looks up in the table of measured times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoplan.cost.estimate import estimate
from autoplan.spec.operations import Operation
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import TimingTable


def looked_up_shapes(problem: Problem, batch: PlanBatch) -> Mapping[tuple[Operation, str], set[tuple[int, ...]]]:
    """Return, by operation and type, the shapes whose measured times pricing of these plans would use."""
    return {
        kind: {tuple(round(size) for size in shape) for shape in shapes}
        for kind, shapes in lookups(problem, batch).items()
    }


def lookups(problem: Problem, batch: PlanBatch) -> Mapping[tuple[Operation, str], set[tuple[float, ...]]]:
    """Return the looked-up shapes; for each operation the preferred type comes first."""
    table = TimingTable.noting(is_own=problem.framework.is_trainer)
    estimate(replace(problem, timings=table), batch)
    assert table.lookups is not None
    return dict(table.lookups)
