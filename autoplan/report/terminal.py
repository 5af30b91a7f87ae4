"""Shared parts of terminal output: consoles, tables, and the names of times and memory.

Strings are printed as they are, brackets too; only a `Text` has a style.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoplan.base.units import format_percent, format_seconds
from autoplan.spec.estimate import PlacedStage, StageCost
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.terms import LAST_WAITS, TERMS, UPDATE_TERMS

Cell = str | Text

MIN_GAP = 5e-4  # relative difference of two steps below which they are level; less would show as 0.0 %
MIN_TEXT = 16  # minimum width of text cells; columns of numbers are omitted first
MIN_SHOWN_S = 5e-8  # less would show as 0.0 us
END_OF_STEP = (*UPDATE_TERMS, "overhead")
WAITS = ("pipeline_bubble", "pipeline_send", *LAST_WAITS)
MAX_MEMORY_COLUMNS = 8
MEMORY_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "head and loss",
    "transients": "backward transients",
    "wgrad_buffers": "weight-gradient buffers",
    "graphs": "buffers of CUDA graphs",
    "gathered": "gathered parameters, buckets",
    "update": "more for the optimizer's step",
    "fragmentation": "fragmentation",
    "cached": "cached blocks",
    "communicators": "communication buffers",
    "context": "context and workspaces",
}
MEMORY_SUMS: dict[str, tuple[str, ...]] = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "logits": ("logits",),
    "buffers": ("transients", "wgrad_buffers", "graphs", "gathered", "update"),
    "outside": ("fragmentation", "cached", "communicators", "context"),
}
TERM_NAMES = {term.name: term.title for term in TERMS} | {
    # sums
    "work": "work of the busiest stage",
    "end_of_step": "time after the last backward pass",
}


def make_console(stream: TextIO | None = None) -> Console:
    """Return a console that is plain if `stream` (stdout) is not a terminal, and obeys NO_COLOR and COLUMNS."""
    return Console(file=stream or sys.stdout, highlight=False, soft_wrap=False, emoji=False)


def bold(text: str) -> Text:
    """Return a cell in bold type."""
    return Text(text, style="bold")


def print_part(console: Console, part: Table | str) -> None:
    """Print a part; without trailing blanks into a file or pipe."""
    if console.is_terminal:
        console.print(part, markup=False)
        return
    with console.capture() as captured:
        console.print(part, markup=False)
    lines = (line.rstrip() for line in captured.get().splitlines())
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def signed(difference: float, text: Callable[[float], str]) -> str:
    """Return a difference as text with its sign; `text` formats its size."""
    return ("+" if difference >= 0 else "-") + text(abs(difference))


def term_name(name: str) -> str:
    """Return the display name of a term of an estimate."""
    return TERM_NAMES.get(name, name.replace("_", " "))


def print_table(
    console: Console,
    columns: Sequence[tuple[str, bool]],
    rows: Iterable[Sequence[Cell]],
    *,
    keep: int = 2,
    least_header: int | None = None,
) -> None:
    """Print a borderless table; each column is (header, whether its cells are numbers).

    A narrow terminal folds words but never a number: columns after the first `keep` are omitted from the right, and a
    line names them.  With `least_header` headers of numbers first fold to that width.
    """
    texts = [[_as_text(cell) for cell in row] for row in rows]
    cells = [max((cell_len(row[at].plain) for row in texts if at < len(row)), default=0) for at in range(len(columns))]
    full_widths = [max(cell, len(header)) for cell, (header, _) in zip(cells, columns, strict=True)]
    folds = least_header is not None and _room(full_widths) > console.width
    widths = []
    for cell, (header, is_number) in zip(cells, columns, strict=True):
        longest_word = max(map(len, header.split()), default=0)
        least = min(longest_word, least_header) if folds and least_header is not None else len(header)
        widths.append(max(cell, least) if is_number else min(max(cell, len(header)), MIN_TEXT))
    shown = len(columns)
    while shown > keep and _room(widths[:shown]) > console.width:
        shown -= 1
    has_room = _room(widths[:shown]) <= console.width
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for (header, is_number), width in zip(columns[:shown], widths, strict=False):
        table.add_column(
            header,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number and not folds,
            min_width=width if is_number or has_room else None,
            max_width=width if folds and has_room else None,
        )
    for row in texts:
        table.add_row(*row[:shown])
    print_part(console, table)
    if left_out := [header for header, _ in columns[shown:]]:
        print_part(console, f"(too narrow for {', '.join(left_out)}: widen the terminal or use --json)")


def _room(widths: Sequence[int]) -> int:
    """Terminal width of columns with these widths, including gaps."""
    return sum(widths) + 2 * (len(widths) - 1)


def _as_text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def print_lines(console: Console, lines: Iterable[Sequence[Cell]]) -> None:
    """Print texts, the last of each line, behind their labels."""
    rows = [[_as_text(cell) for cell in line] for line in lines]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(len(rows[0]) - 1 if rows else 1):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    print_part(console, grid)


def number_ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers with consecutive ones joined: '0-3+6'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def print_next_steps(console: Console, *steps: tuple[str, str]) -> None:
    """Print next steps by label: commands on one line for copying, text folded."""
    console.print()
    width = max(len(label) for label, _ in steps) + 3
    for label, text in steps:
        line = f"{f'{label}:':{width}}{text}"
        if not text.startswith("autoplan "):
            line = textwrap.fill(line, console.width, subsequent_indent=" " * width, break_on_hyphens=False)
        console.print(line, markup=False, soft_wrap=True)


def print_terms(console: Console, best: RankedPlan | MixedCost, *, has_sum: bool = False) -> None:
    """Print the time of a step, one row per term, optionally with the sum."""
    rows: list[tuple[Cell, ...]] = [
        (term_name(name), format_seconds(value), format_percent(value / best.step_s))
        for name, value in best.terms_s.items()
        if value >= MIN_SHOWN_S
    ]
    if has_sum:
        rows.append((bold("all"), bold(format_seconds(best.step_s)), format_percent(1.0)))
    print_table(console, (("time of a step", False), ("", True), ("share", True)), rows)


def equal_stages(
    stages: Iterable[PlacedStage], values: Callable[[StageCost], Iterable[float]]
) -> list[list[PlacedStage]]:
    """Group stages on the same devices with equal `values`, such as share a column."""
    groups: dict[tuple[float | str, ...], list[PlacedStage]] = {}
    for stage in stages:
        groups.setdefault((stage.place.kind, stage.place.part, *values(stage.cost)), []).append(stage)
    return [*groups.values()]


def summed_memory(stage: StageCost, names: tuple[str, ...]) -> float:
    """Bytes of the memory terms in one sum of `MEMORY_SUMS`."""
    return sum(stage.memory_terms_bytes.get(name, 0.0) for name in names)
