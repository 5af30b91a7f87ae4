"""Plots of points over two axes, as data for a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from autoplan.report.page.elements import chart, key
from autoplan.report.page.html import Markup, data


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Axis of a plot; on a logarithmic one ticks are powers of `base`."""

    label: str
    scale: Literal["linear", "log"] = "linear"
    base: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points (x, y, text), connected according to `kind`, in a colour of the style sheet."""

    name: str
    kind: Literal["point", "line", "steps", "dashes"]
    colour: str
    points: Sequence[tuple[float, float, str]]


def plot(label: str, x: Axis, y: Axis, series: Sequence[Series], limit: tuple[float, str] | None = None) -> Markup:
    """Return series over two axes; `limit` is a named value of x."""
    series = [line for line in series if line.points]
    content = {"x": asdict(x), "y": asdict(y), "series": [asdict(line) for line in series], "limit": limit}
    return chart("plot", label, key((line.colour, line.name) for line in series), data("content", content))
