"""Plots of points over two axes, as data that a script draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from autoplan.report.page.elements import chart, key
from autoplan.report.page.html import Markup, data


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Axis of a plot; on a logarithmic one powers of `base` are round."""

    label: str
    scale: Literal["linear", "log"] = "linear"
    base: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points (x, y, what is said of it) that are joined in some way, in a colour of the style sheet."""

    name: str
    kind: Literal["point", "line", "steps", "dashes"]
    colour: str
    points: Sequence[tuple[float, float, str]]


def plot(label: str, x: Axis, y: Axis, series: Sequence[Series], limit: tuple[float, str] | None = None) -> Markup:
    """Series over two axes; `limit` is a value of x with its name."""
    series = [line for line in series if line.points]
    content = {"x": asdict(x), "y": asdict(y), "series": [asdict(line) for line in series], "limit": limit}
    return chart("plot", label, key((line.colour, line.name) for line in series), data("content", content))
