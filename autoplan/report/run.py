"""How does the answer for a run read: what it takes in time, money and energy, and on how many nodes?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.markup import escape

from autoplan.report.terminal import labelled, print_part, print_table
from autoplan.result import RunFigures, RunPlan, RunReport, SizeOutcome
from autoplan.units import format_bytes, format_days, format_percent, format_seconds, format_tokens

JOULES_PER_KWH = 3.6e6

# Columns that are shown where they have a value: header, how a cell reads.
FIGURES: tuple[tuple[str, Callable[[RunFigures], str | None]], ...] = (
    ("goodput", lambda one: format_percent(one.goodput)),
    ("cost/M tokens", lambda one: _shown(one.cost_per_token, lambda value: f"{1e6 * value:,.4g}")),
    ("J/token", lambda one: _shown(one.energy_per_token_j, lambda value: f"{value:,.3g}")),
    ("run", lambda one: _shown(one.run_s, format_days)),
    ("device hours", lambda one: _shown(one.device_hours, lambda value: f"{value:,.0f}")),
    ("tokens in budget", lambda one: _shown(one.tokens_in_budget, format_tokens)),
    ("lasts", lambda one: _shown(one.budget_s, format_days)),
)


def _shown(value: float | None, shown: Callable[[float], str]) -> str | None:
    return None if value is None else shown(value)


def print_run(console: Console, report: RunReport) -> None:
    """What the run takes, then the front where there are several objectives, then all sizes where there are several."""
    console.print()
    grid = labelled()
    for label, text in _lines(report.best.figures):
        grid.add_row(label, escape(text))
    print_part(console, grid)
    if len(report.front) > 1:
        console.print(f"\nno plan is better in all of {', '.join(report.objectives)} than one of these")
        print_runs(console, [("", one, None, "") for one in report.front])
    if len(report.sizes) > 1:
        console.print("\nnumbers of nodes; of those left out what no plan beats")
        print_runs(console, [_size_row(one) for one in report.sizes])


def _size_row(one: SizeOutcome) -> tuple[str, RunPlan | None, RunFigures | None, str]:
    return str(one.num_nodes), one.best, one.least, one.why


def _lines(figures: RunFigures) -> Iterable[tuple[str, str]]:
    yield (
        "goodput",
        f"{format_percent(figures.goodput)}: a failure every {format_days(figures.mtbf_s)}, a checkpoint every "
        f"{format_days(figures.checkpoint_interval_s)}",
    )
    if figures.cost_per_token is not None:
        total = "" if figures.cost is None else f", {figures.cost:,.0f} in all"
        yield "cost", f"{1e6 * figures.cost_per_token:,.4g} per million tokens{total}, failures included"
    if figures.energy_per_token_j is not None:
        total = "" if figures.energy_j is None else f", {figures.energy_j / JOULES_PER_KWH / 1e3:,.4g} MWh in all"
        yield "energy", f"{figures.energy_per_token_j:,.3g} J per token{total}, failures included"
    if figures.run_s is not None and figures.device_hours is not None:
        yield "run", f"{format_days(figures.run_s)}, {figures.device_hours:,.0f} device hours, failures included"
    if figures.tokens_in_budget is not None and figures.budget_s is not None:
        lasts = format_days(figures.budget_s)
        yield "budget", f"{format_tokens(figures.tokens_in_budget)} tokens in {lasts}, failures included"


def print_runs(console: Console, rows: Sequence[tuple[str, RunPlan | None, RunFigures | None, str]]) -> None:
    """A table of (label, best plan, bound where there is none, why there is none)."""
    known = [best.figures if best else least for _, best, least, _ in rows]
    shown = [(head, text) for head, text in FIGURES if any(one and text(one) for one in known)]
    has_labels = any(label for label, *_ in rows)
    columns = [("nodes", True)] if has_labels else []
    columns += [("devices", True), ("plan", False), ("step", True), ("MFU", True), ("free", True)]
    cells = []
    for (label, best, _, why), figures in zip(rows, known, strict=True):
        row = [label] if has_labels else []
        row.append(f"{figures.num_devices:,}" if figures else "")
        if best:
            row += [
                escape(best.plan.plan.describe() + (f" ({why})" if why else "")),
                format_seconds(best.plan.step_s),
                format_percent(best.plan.mfu),
                format_bytes(best.plan.memory_headroom_bytes),
            ]
        else:
            row += [escape(why), "", "", ""]
        row += [(text(figures) or "") if figures else "" for _, text in shown]
        cells.append(row)
    print_table(console, [*columns, *((head, True) for head, _ in shown)], cells, keep=4)
