"""Training run on a terminal: time, cost and energy, by number of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console

from autoplan.base.units import format_bytes, format_days, format_percent, format_seconds, format_tokens
from autoplan.report.terminal import print_lines, print_table
from autoplan.spec.mixed_result import MixedCost, PartsOutcome
from autoplan.spec.run_report import RunFigures, RunPlan, RunReport, SizeOutcome
from autoplan.spec.search_result import RankedPlan

JOULES_PER_MWH = 3.6e9
SHOWN_FRONT = 40

# Columns, the most important ones first: header, and the text of a cell, None if the figure is unknown.
FIGURES: tuple[tuple[str, Callable[[RunFigures], str | None]], ...] = (
    ("devices", lambda figures: f"{figures.num_devices:,}"),
    ("tokens/s", lambda figures: f"{figures.tokens_per_s:,.0f}"),
    ("cost/M tokens", lambda figures: _shown(figures.cost_per_token, lambda value: f"{1e6 * value:,.4g}")),
    ("run", lambda figures: _shown(figures.run_s, format_days)),
    ("J/token", lambda figures: _shown(figures.energy_per_token_j, lambda value: f"{value:,.3g}")),
    ("goodput", lambda figures: format_percent(figures.goodput)),
    ("device hours", lambda figures: _shown(figures.device_hours, lambda value: f"{value:,.0f}")),
    ("tokens in budget", lambda figures: _shown(figures.tokens_in_budget, format_tokens)),
    ("lasts", lambda figures: _shown(figures.budget_s, format_days)),
)


def _shown(value: float | None, shown: Callable[[float], str]) -> str | None:
    return None if value is None else shown(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of a table of runs: places, and the best plan, or the bound on plans and why there is none."""

    places: tuple[str, ...] = ()  # one cell per column of places
    best: RunPlan | None
    least: RunFigures | None = None
    why: str = ""

    @property
    def figures(self) -> RunFigures | None:
        """Figures of the best plan, or else the bound."""
        return self.best.figures if self.best else self.least


def print_run(console: Console, report: RunReport) -> None:
    """Print the figures of the run, then the front of several objectives, then all sizes if there are several."""
    console.print()
    print_lines(console, run_lines(report.best.figures, report.best.plan))
    if len(report.front) > 1:
        console.print(f"\nPareto front of {', '.join(report.objectives)}")
        print_runs(console, (), [Row(best=run) for run in report.front[:SHOWN_FRONT]])
        if len(report.front) > SHOWN_FRONT:
            console.print(f"({len(report.front) - SHOWN_FRONT} more: see --json)")
    if len(report.sizes) > 1:
        console.print(
            f"\n{len(report.sizes)} node counts; rows without a plan show bounds that no plan of that size beats"
        )
        print_runs(console, ("nodes",), [_size_row(size) for size in report.sizes])


def _size_row(size: SizeOutcome) -> Row:
    return Row(places=(str(size.num_nodes),), best=size.best, least=size.least, why=size.why)


def run_lines(figures: RunFigures, plan: RankedPlan | MixedCost) -> Iterable[tuple[str, str]]:
    """Yield (label, text) for the figures of a run with a plan."""
    yield (
        "goodput",
        f"{format_percent(figures.goodput)}: a failure every {format_days(figures.mtbf_s)}, a checkpoint every "
        f"{format_days(figures.checkpoint_interval_s)}",
    )
    if figures.cost_per_token is not None:
        total = "" if figures.cost is None else f", {figures.cost:,.0f} in all"
        yield "cost", f"{1e6 * figures.cost_per_token:,.4g} per million tokens{total}, failures included"
    if figures.energy_per_token_j is not None:
        total = "" if figures.energy_j is None else f", {figures.energy_j / JOULES_PER_MWH:,.4g} MWh in all"
        yield "energy", f"{figures.energy_per_token_j:,.3g} J per token{total}, failures included"
    if figures.run_s is not None and figures.device_hours is not None:
        low, high = (format_days(figures.run_s * bound / plan.step_s) for bound in (plan.low_s, plan.high_s))
        yield (
            "run",
            f"{format_days(figures.run_s)} (90 % interval {low} to {high}), {figures.device_hours:,.0f} device hours, "
            "failures included",
        )
    if figures.tokens_in_budget is not None and figures.budget_s is not None:
        lasts = format_days(figures.budget_s)
        yield "budget", f"{format_tokens(figures.tokens_in_budget)} tokens in {lasts}, failures included"


def print_runs(console: Console, places: Sequence[str], rows: Sequence[Row]) -> None:
    """Print a table of runs, without columns that are equal in all of several rows, then the plan of each."""
    shown = _shown_figures([row.figures for row in rows])
    cells = [
        [
            str(at),
            *row.places,
            format_seconds(row.best.plan.step_s) if row.best else "",
            *((text(row.figures) or "") if row.figures else "" for _, text in shown),
            format_percent(row.best.plan.mfu) if row.best else "",
            format_bytes(row.best.plan.memory_headroom_bytes) if row.best else "",
        ]
        for at, row in enumerate(rows, 1)
    ]
    figures_shown = [(head, True) for head in ("step", *(head for head, _ in shown), "MFU", "free memory")]
    print_table(
        console,
        [("#", True), *((head, False) for head in places), *figures_shown],
        cells,
        keep=len(places) + 2,
        least_header=8,
    )
    console.print()
    print_table(
        console,
        (("#", True), ("90 % interval", False), ("plan", False)),
        [(str(at), _interval(row), _plan(row)) for at, row in enumerate(rows, 1)],
    )


def _shown_figures(of_rows: Sequence[RunFigures | None]) -> list[tuple[str, Callable[[RunFigures], str | None]]]:
    """Return the columns that are known, and not equal in all of several rows."""
    texts = {head: {text(figures) for figures in of_rows if figures} for head, text in FIGURES}
    return [
        (head, text) for head, text in FIGURES if texts[head] != {None} and (len(texts[head]) > 1 or len(of_rows) == 1)
    ]


def print_sets(console: Console, rows: Sequence[PartsOutcome]) -> None:
    """Print the run on every set of parts."""
    shown, has_reasons = _shown_figures([row.figures for row in rows]), any(row.why for row in rows)
    cells = [
        [
            row.parts,
            format_seconds(row.step_s) if row.step_s is not None else "",
            *((text(row.figures) or "") if row.figures else "" for _, text in shown),
            *([row.why] if has_reasons else []),
        ]
        for row in rows
    ]
    columns = [("parts", False), ("step", True), *((head, True) for head, _ in shown)]
    columns += [("why not", False)] if has_reasons else []
    print_table(console, columns, cells, keep=2, least_header=8)


def _interval(row: Row) -> str:
    """Return the interval of the step time."""
    return f"{format_seconds(row.best.plan.low_s)} to {format_seconds(row.best.plan.high_s)}" if row.best else ""


def _plan(row: Row) -> str:
    if row.best is None:
        return row.why
    risk = "" if row.best.plan.verdict == "fits" else "may run out of memory"
    bound = "input-bound" if row.best.plan.terms_s.get("input") else ""
    remarks = "; ".join(remark for remark in (risk, bound, row.why) if remark)
    return row.best.plan.plan.describe() + (f" ({remarks})" if remarks else "")
