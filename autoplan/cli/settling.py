"""Printed answer of `autoplan profile --for PLAN`: which measurements could make another plan win."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from autoplan.base.units import format_percent, format_seconds
from autoplan.profiler.tasks import RankedTask
from autoplan.search.choice import pace
from autoplan.search.worth import Settling
from autoplan.spec.search_result import RankedPlan


def print_settling(console: Console, found: Settling, planned: Sequence[RankedTask]) -> None:
    """Print what is open, and what each group of measurements is expected to bring."""
    if found.rival is None:
        console.print(f"{found.best.plan.describe()} has no rival of another kind: nothing is to be settled")
        return
    seconds = sum(task.expected_s for task in planned)
    console.print(f"A  {found.best.plan.describe()}: {format_seconds(found.best.step_s)}")
    console.print(f"B  {found.rival.plan.describe()}: {format_seconds(found.rival.step_s)}")
    if not found.worth:
        console.print(
            f"now {_sure(found.sure)} sure that A is the faster; no measurement here could swap any two plans"
        )
        return
    console.print(
        f"now {_sure(found.sure)} sure that A is the faster; expected after {len(planned)} measurements of about "
        f"{format_seconds(seconds)}: {_sure(found.expected_sure)} sure of one of them\n"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("operations", "of", "rests on"):
        table.add_column(name)
    for name in ("off by", "share A", "share B", "takes", "then sure"):
        table.add_column(name, justify="right", no_wrap=True)
    for worth in found.worth:
        group = worth.group
        table.add_row(
            group.family,
            group.setting,
            group.rests_on,
            format_percent(group.spread),
            format_percent(worth.share),
            format_percent(worth.rival_share),
            format_seconds(group.seconds),
            _sure(worth.sure),
        )
    console.print(table)


def print_ranking(console: Console, before: Settling, after: Settling, ranking: Sequence[RankedPlan]) -> None:
    """Print the order after measuring, and how sure it is then."""
    best = ranking[0]
    is_same = best.plan == before.best.plan
    console.print(
        f"\nfastest {'still' if is_same else 'now'}, {_sure(after.sure)} sure against its nearest rival: "
        f"{best.plan.describe()}: {format_seconds(best.step_s)} a step"
    )
    for ranked in ranking[1:4]:
        console.print(f"  {100 * (pace(ranked) / pace(best) - 1):+.1f} %  {ranked.plan.describe()}")
    if not is_same:
        console.print("search again with --timings db: it ranks all plans by what was measured")


def _sure(probability: float) -> str:
    return f"{100 * probability:.0f} %"
