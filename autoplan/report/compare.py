"""Comparison of clusters and sizes: a table, the best of each column, and a plot of rates by size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from rich.console import Console

from autoplan.base.units import counted, format_days
from autoplan.report.run_report import Row, print_runs
from autoplan.report.terminal import print_lines
from autoplan.spec.run_report import RunFigures, SizeOutcome

WIDTH, HEIGHT, MARGIN = 860, 480, 70
RIGHT = 190  # margin for the names of the clusters
COLOURS = ("#2b62ad", "#2f7d3b", "#ad4a2b", "#7440a3", "#946a08", "#5b5b66")
TEXT_COLOUR, GRID_COLOUR = "#22222a", "#d9d9e2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The fastest plan on a cluster of one size."""

    cluster: str
    outcome: SizeOutcome


def _of_the_run(figures: RunFigures) -> str:
    """Return the cost of all tokens, where their number is known."""
    return "" if figures.cost is None else f", {figures.cost:,.0f} for the run"


BEST: tuple[tuple[str, Callable[[RunFigures], float | None], Callable[[RunFigures], str]], ...] = (
    ("fastest", lambda figures: 1 / figures.tokens_per_s, lambda figures: f"{figures.tokens_per_s:,.0f} tokens/s"),
    (
        "fastest a device",
        lambda figures: figures.num_devices / figures.tokens_per_s,
        lambda figures: f"{figures.tokens_per_s / figures.num_devices:,.0f} tokens/s",
    ),
    (
        "cheapest",
        lambda figures: figures.cost_per_token,
        lambda figures: f"{1e6 * (figures.cost_per_token or 0):,.4g} per M tokens{_of_the_run(figures)}",
    ),
    (
        "least energy",
        lambda figures: figures.energy_per_token_j,
        lambda figures: f"{figures.energy_per_token_j:,.3g} J per token",
    ),
    ("done first", lambda figures: figures.run_s, lambda figures: format_days(figures.run_s or 0)),
)


def print_compared(console: Console, compared: Sequence[Compared]) -> None:
    """Print the table of all clusters and sizes, and the best of each column."""
    rows = [
        Row(
            places=(entry.cluster, str(entry.outcome.num_nodes)),
            best=entry.outcome.best,
            least=entry.outcome.least,
            why=entry.outcome.why,
        )
        for entry in compared
    ]
    print_runs(console, ("cluster", "nodes"), rows)
    console.print()
    lines = []
    planned = [entry for entry in compared if entry.outcome.best]
    safe = [entry for entry in planned if entry.outcome.best and entry.outcome.best.plan.verdict == "fits"]
    for label, cost, shown in BEST:
        costs = [
            (value, entry)
            for entry in safe or planned
            if entry.outcome.best and (value := cost(entry.outcome.best.figures)) is not None
        ]
        if costs:
            _, best = min(costs, key=lambda pair: pair[0])
            assert best.outcome.best is not None
            nodes = counted(best.outcome.num_nodes, "node")
            lines.append((label, f"{best.cluster}, {nodes}: {shown(best.outcome.best.figures)}"))
    print_lines(console, lines)


def draw_rates(compared: Sequence[Compared]) -> str:
    """SVG of tokens per second by devices, on logarithmic axes; dashed: perfect scaling from the smallest size."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for entry in compared:
        if (best := entry.outcome.best) is not None:
            lines.setdefault(entry.cluster, []).append((best.figures.num_devices, best.figures.tokens_per_s))
    lines = {name: sorted(points) for name, points in lines.items()}
    ideals = {
        name: [(devices, points[0][1] * devices / points[0][0]) for devices, _ in (points[0], points[-1])]
        for name, points in lines.items()
    }
    everything = [point for points in (*lines.values(), *ideals.values()) for point in points]
    x = _Axis.over([devices for devices, _ in everything], MARGIN, WIDTH - RIGHT)
    y = _Axis.over([rate for _, rate in everything], HEIGHT - MARGIN, MARGIN)
    shapes = [*_grid(x, y)]
    for at, (name, points) in enumerate(lines.items()):
        colour = COLOURS[at % len(COLOURS)]
        shapes.append(_path(ideals[name], x, y, colour, 'stroke-dasharray="4 5" opacity="0.6"'))
        shapes.append(_path(points, x, y, colour, 'stroke-width="2"'))
        shapes += [f'<circle cx="{x(d):.1f}" cy="{y(rate):.1f}" r="3.5" fill="{colour}"/>' for d, rate in points]
        top = MARGIN + 22 * at
        shapes.append(_text(WIDTH - RIGHT + 20, top, name, "start", colour))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
            f'height="{HEIGHT}" font-family="sans-serif" font-size="13">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
            *shapes,
            "</svg>\n",
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """A logarithmic scale between two positions on the drawing."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> _Axis:
        low, high = min(values), max(values)
        # A single value is centred.
        return cls(low=low / 1.1, high=high * 1.1, start=start, end=end)

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return powers of two for few octaves, else powers of ten; at least one value."""
        base = 2.0 if self.high / self.low < 2**7 else 10.0
        first = math.ceil(math.log(self.low, base))
        return [base**power for power in range(first, math.floor(math.log(self.high, base)) + 1)] or [self.low]


def _grid(x: _Axis, y: _Axis) -> list[str]:
    shapes = []
    for tick in x.ticks():
        shapes.append(_line(x(tick), y.start, x(tick), y.end))
        shapes.append(_text(x(tick), y.start + 20, f"{tick:,.0f}", "middle"))
    for tick in y.ticks():
        shapes.append(_line(x.start, y(tick), x.end, y(tick)))
        shapes.append(_text(x.start - 8, y(tick) + 4, f"{tick:,.0f}", "end"))
    shapes.append(_text((x.start + x.end) / 2, y.start + 46, "devices", "middle"))
    shapes.append(_text(x.start - 8, y.end - 20, "tokens/s; broken: perfect scaling", "start"))
    return shapes


def _path(points: Sequence[tuple[float, float]], x: _Axis, y: _Axis, colour: str, style: str) -> str:
    parts = [f"M{x(a[0]):.1f} {y(a[1]):.1f}L{x(b[0]):.1f} {y(b[1]):.1f}" for a, b in pairwise(points)]
    return f'<path d="{"".join(parts)}" stroke="{colour}" fill="none" {style}/>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{GRID_COLOUR}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = TEXT_COLOUR) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
