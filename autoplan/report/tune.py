"""Trials of `autoplan tune` on a terminal."""

from __future__ import annotations

from rich.console import Console

from autoplan.base.units import counted, format_percent, format_seconds, format_two_figures
from autoplan.report.terminal import print_lines, print_part, print_table, signed
from autoplan.spec.tune_report import TriedPlan, TuneReport


def print_tuned(console: Console, report: TuneReport) -> None:
    """Print the best plan, all trials sorted by measured step, and the reason for stopping."""
    if report.best is not None and report.best_s is not None:
        plan = report.best.plan
        runs = [str(trial.number) for trial in report.trials if trial.plan == plan and trial.measured_s is not None]
        trials = f"trial {runs[0]}" if len(runs) == 1 else f"trials {', '.join(runs)}"
        best = f"{plan.describe()}: {format_seconds(report.best_s)} per step"
        print_part(console, f"{best}, measured in {trials} of {len(report.trials)}")
        console.print()
    columns = (("trial", True), ("plan", False), ("predicted", True), ("measured", True), ("off", True), ("end", False))
    rows = [_row(trial) for trial in sorted(report.trials, key=_order)]
    print_table(console, columns, rows)
    console.print()
    lines = [(f"trial {trial.number}", trial.reason) for trial in report.trials if trial.reason]
    lines.append(("ended", report.ended))
    if report.best is not None:
        lines.append(("model", f"steps take {report.ratio:.2f} times as long as predicted (median of the trials)"))
        lines.append(("left", f"{report.left} of {report.candidates} plans may still be faster and were not run"))
    spent = f"{counted(len(report.trials), 'trial')}, {format_two_figures(report.gpu_hours)} device-hours"
    print_lines(console, [*lines, ("spent", spent)])


def _order(trial: TriedPlan) -> tuple[bool, float, int]:
    """Sort key: measured trials first, the fastest of them first."""
    is_timed = trial.measured_s is not None
    pace = trial.measured_s / trial.plan.global_batch if trial.measured_s is not None else 0.0
    return not is_timed, pace, trial.number


def _row(trial: TriedPlan) -> tuple[str, ...]:
    measured = off = "-"
    if trial.measured_s is not None:
        measured = format_seconds(trial.measured_s)
        off = signed(trial.predicted_s / trial.measured_s - 1, format_percent)
    return str(trial.number), trial.plan.describe(), format_seconds(trial.predicted_s), measured, off, trial.end
