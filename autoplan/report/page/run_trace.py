"""Page of traces of a run: predicted and measured steps on one axis, and their terms side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autoplan.base.units import format_seconds
from autoplan.report.page.elements import Segment, bar, bars, key, note, section, table
from autoplan.report.page.html import Child, Markup, tag
from autoplan.report.page.page import page_text

COLUMNS = (("term", False), ("predicted", True), ("measured", True), ("of step", True))
# Activities of a rank, with their style-sheet colours and names.
COLOURS: dict[str | None, tuple[str, str]] = {
    "gemm": ("forward", "matrix products"),
    "attention": ("backward", "attention"),
    "kernels": ("second", "other kernels"),
    "optimizer": ("end", "optimizer"),
    "collectives": ("traffic", "exposed communication, waits"),
    "messages": ("traffic", "exposed communication, waits"),
    "copies": ("weight-gradient", "copies"),
    None: ("offset", "nothing"),
}


class TracedStep(NamedTuple):
    """A step of one rank, filled by pieces of (activity, start, end) in seconds."""

    name: str
    pieces: Sequence[tuple[str | None, float, float]]


def trace_page(
    predicted: Sequence[TracedStep],
    measured: Sequence[TracedStep],
    terms: Sequence[tuple[str, float, float]],
    remarks: Sequence[str],
) -> str:
    """Return the page as the text of a file."""
    longest_s = max(step.pieces[-1][2] for step in (*predicted, *measured))
    rows = [*_rows("predicted", predicted, longest_s), *_rows("measured", measured, longest_s)]
    entries = dict.fromkeys(entry for activity, entry in COLOURS.items() if activity is not None)
    shown = {
        "steps": (
            "steps",
            section(
                "steps",
                "The step, predicted and measured",
                "The last traced step below the predicted one, on the same axis.",
                key(entries),
                bars("Steps of the ranks", ("rank", "step", "length"), rows),
                note("Each pixel shows what takes most of its time.  Predicted passes show their terms in sequence."),
                *map(note, remarks),
            ),
        )
    }
    if terms:
        step_s = sum(term[1] for term in terms)
        cells = (
            (term, format_seconds(before), format_seconds(after), f"{100 * (after - before) / step_s:+.1f} %")
            for term, before, after in terms
        )
        summary = "Mean over ranks and traced steps."
        shown["terms"] = ("terms", section("terms", "Term by term", summary, table("Terms", COLUMNS, cells)))
    head = tag("div", tag("p", "autoplan traces", class_="brand"), tag("h1", "A measured step"))
    return page_text("autoplan: a measured step", head, dict(shown), start="the steps")


def _rows(kind: str, steps: Sequence[TracedStep], longest_s: float) -> Iterator[Sequence[Child]]:
    for step in steps:
        yield (f"{kind}, {step.name}", _strip(step, longest_s), format_seconds(step.pieces[-1][2]))


def _strip(step: TracedStep, longest_s: float) -> Markup:
    pieces = (
        Segment(
            name=COLOURS[activity][1],
            colour=COLOURS[activity][0],
            share=(end_s - start_s) / longest_s,
            text=f"{format_seconds(start_s)} to {format_seconds(end_s)}",
        )
        for activity, start_s, end_s in step.pieces
    )
    return bar(pieces, spoken=f"{step.name}: {format_seconds(step.pieces[-1][2])}")
