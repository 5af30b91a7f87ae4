"""Output of `autoplan profile --for PLAN`: measurements that could make another plan win."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from autoplan.base.units import format_percent, format_seconds
from autoplan.profiler.tasks import RankedTask
from autoplan.report.terminal import print_table
from autoplan.search.measurement_value import MeasurementAdvice
from autoplan.spec.search_result import RankedPlan


def print_advice(console: Console, advice: MeasurementAdvice, planned: Sequence[RankedTask]) -> None:
    """Print the open choice, and the expected value of each group of measurements."""
    if advice.rival is None:
        console.print(f"{advice.best.plan.describe()} has no close rival: there is nothing to settle")
        return
    seconds = sum(task.expected_s for task in planned)
    console.print(f"A  {advice.best.plan.describe()}: {format_seconds(advice.best.step_s)}")
    console.print(f"B  {advice.rival.plan.describe()}: {format_seconds(advice.rival.step_s)}")
    if not advice.groups:
        console.print(
            f"now {_sure(advice.probability)} certain that A is faster; no measurement here could swap two plans"
        )
        return
    console.print(
        f"now {_sure(advice.probability)} certain that A is faster; expected after {len(planned)} measurements "
        f"(about {format_seconds(seconds)}): {_sure(advice.expected_probability)} certain of one of them\n"
    )
    columns = [(name, False) for name in ("operations", "of", "based on")]
    columns += [(name, True) for name in ("off by", "share A", "share B", "takes", "certainty")]
    rows = [
        (
            *(value.group.family, value.group.setting, value.group.provenance),
            *(format_percent(share) for share in (value.group.spread, value.share, value.rival_share)),
            format_seconds(value.group.seconds),
            _sure(value.probability),
        )
        for value in advice.groups
    ]
    print_table(console, columns, rows, keep=len(columns))


def print_ranking(
    console: Console, before: MeasurementAdvice, after: MeasurementAdvice, ranking: Sequence[RankedPlan]
) -> None:
    """Print the order after measuring, and its certainty."""
    best = ranking[0]
    is_same = best.plan == before.best.plan
    console.print(
        f"\nfastest {'still' if is_same else 'now'}, {_sure(after.probability)} certain against its closest rival: "
        f"{best.plan.describe()}: {format_seconds(best.step_s)} per step"
    )
    for ranked in ranking[1:4]:
        console.print(f"  {100 * (ranked.s_per_sequence / best.s_per_sequence - 1):+.1f} %  {ranked.plan.describe()}")
    if not is_same:
        console.print("search again with --timings db to rank all plans by the measurements")


def _sure(probability: float) -> str:
    return f"{100 * probability:.0f} %"
