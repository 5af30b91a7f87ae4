"""Traces of a measured step on a terminal: activity of the ranks, next to the prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console

from autoplan.base.units import format_percent, format_seconds
from autoplan.report.terminal import print_part, print_table

TITLES = {
    "gemm": "matrix products",
    "attention": "attention",
    "optimizer": "optimizer",
    "kernels": "other kernels",
    "collectives": "collectives, exposed",
    "messages": "messages and all-to-all, exposed",
    "copies": "copies, exposed",
    "idle": "nothing runs",
}
Row = tuple[str, Sequence[float]]  # activity, and its seconds on every rank


def print_ranks(console: Console, headline: str, rows: Sequence[Row], steps_s: Sequence[float]) -> None:
    """Print the activity of the ranks in a step, in seconds that add up to the step."""
    print_part(console, headline)
    console.print()
    step_s = float(np.mean(steps_s))
    cells = [
        (
            TITLES.get(name, name),
            format_seconds(float(np.mean(seconds))),
            format_percent(float(np.mean(seconds)) / step_s),
            format_seconds(min(seconds)),
            format_seconds(max(seconds)),
        )
        for name, seconds in (*rows, ("step", steps_s))
        if max(seconds) > 0
    ]
    columns = [("what runs", False), *((name, True) for name in ("mean", "share", "least", "most"))]
    print_table(console, columns, cells, keep=3)


def print_timers(console: Console, headline: str, timers_s: Mapping[str, Mapping[str, float]], step_s: float) -> None:
    """Print the timers of a log by rank, in seconds and as shares of a step; timers may be nested."""
    print_part(console, headline)
    if not timers_s:
        return
    console.print()
    cells = []
    for name, times_s in timers_s.items():
        slowest, most_s = max(times_s.items(), key=lambda item: item[1])
        least = format_seconds(min(times_s.values())) if len(times_s) > 1 else ""
        is_rank = slowest.startswith("rank")
        cells.append((name, least, format_seconds(most_s), format_percent(most_s / step_s), slowest * is_rank))
    titles = [("timer", False), ("least", True), ("most", True), ("of step", True), ("slowest", False)]
    print_table(console, titles, cells, keep=4)


def print_compared(
    console: Console, terms: Sequence[tuple[str, float, float]], predicted_s: float, measured_s: float
) -> None:
    """Print (activity, predicted, measured) in seconds, and the difference as a share of the step."""
    cells = [
        (
            term,
            format_seconds(predicted),
            format_seconds(measured),
            f"{100 * (measured - predicted) / predicted_s:+.1f} %",
        )
        for term, predicted, measured in (*terms, ("step", predicted_s, measured_s))
    ]
    console.print()
    print_table(console, [("term", False), ("predicted", True), ("measured", True), ("of step", True)], cells, keep=4)
