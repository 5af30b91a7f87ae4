"""What can a target start in place of a plan that it cannot express?  For `autoplan export --nearest`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from autoplan.base.errors import AutoplanError, InputError

if TYPE_CHECKING:
    from autoplan.search.nearest import Near
    from autoplan.spec.plan_file import PlanFile
    from autoplan.spec.search_result import RankedPlan


def startable(file: PlanFile, to: str, version: str | None, *, or_nearest: bool) -> PlanFile:
    """`file`, or with `or_nearest` the nearest plan that the target `to` can express in its place, with a warning.

    Without it the refusal says what single change would do.
    """
    from autoplan.frameworks.registry import TARGETS
    from autoplan.launch.targets import job_of

    target = TARGETS.get(to)
    if target is None or file.framework.rules not in target.rules or version not in (None, *target.versions):
        return file  # no other plan would do
    try:
        job_of(file, to, version)
    except InputError as error:
        try:
            near = _nearest(file, to, version, most_changes=2 if or_nearest else 1)
        except AutoplanError:  # such as timings that cannot be read here
            near = None
        if near is None:
            tried = "; no legal plan that fits and is near to it was found that it can" if or_nearest else ""
            raise InputError(f"{error}{tried}") from None
        if not or_nearest:
            raise InputError(f"{error}; or pass --nearest: {_difference(file.best, near)}") from None
        print(
            f"autoplan: warning: {' '.join(str(error).split())}; the nearest plan that it can start is written: "
            f"{_difference(file.best, near)}",
            file=sys.stderr,
        )
        return replace(file, best=near.plan)
    return file


def _nearest(file: PlanFile, to: str, version: str | None, *, most_changes: int) -> Near | None:
    from autoplan.api.plan_files import problem_of
    from autoplan.launch.targets import job_of
    from autoplan.search.nearest import nearest

    def accepts(plan: RankedPlan) -> bool:
        try:
            job_of(replace(file, best=plan), to, version)
        except InputError:
            return False
        return True

    others = [one.plan for one in file.alternatives] if most_changes > 1 else []
    return nearest(problem_of(file), file.best.plan, accepts, others, most_changes=most_changes)


def _difference(best: RankedPlan, near: Near) -> str:
    """What changes, and what that costs."""
    from autoplan.base.units import format_percent, format_seconds
    from autoplan.spec.axes import LABELS

    changes = ", ".join(f"{LABELS.get(axis, axis)} {value} instead of {old}" for axis, value, old in near.changes)
    ratio = near.plan.step_s / best.step_s - 1.0
    step = f"{format_seconds(near.plan.step_s)} a step instead of {format_seconds(best.step_s)}"
    return f"{changes}; {step}, {format_percent(abs(ratio))} {'slower' if ratio >= 0 else 'faster'}"
