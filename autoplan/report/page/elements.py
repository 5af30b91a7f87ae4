"""Elements of sections: tables, bars, colour keys and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoplan.report.page.html import Child, Markup, joined, tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a bar: `colour` is a name in the style sheet, `share` is relative to the bar's full width."""

    name: str
    colour: str
    share: float
    text: str  # its value


def masthead(model: str, devices: str, training: str) -> Markup:
    """Return the head of the page: model, devices and training."""
    return tag(
        "div",
        tag("p", "autoplan report", class_="brand"),
        tag("h1", model, tag("span", " on ", class_="quiet"), devices),
        tag("p", training, class_="asked"),
        id="masthead",
    )


def section(name: str, title: str, summary: Child, *children: Child) -> Markup:
    """Return a section with a one-sentence summary."""
    head = tag("h2", title, id=f"{name}-title")
    return tag(
        "section",
        head,
        tag("p", summary, class_="says") if summary else None,
        *children,
        id=name,
        aria_labelledby=f"{name}-title",
    )


def table(caption: str, columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[Child]]) -> Markup:
    """Return a table that scrolls if it is too wide; columns are (header, whether cells are numbers).

    The first cell is the row header.  The caption is for screen readers.
    """
    styles = ["number" if is_number else None for _, is_number in columns]
    head = [tag("th", name, scope="col", class_=style) for (name, _), style in zip(columns, styles, strict=True)]
    body = []
    for cells in rows:
        header, *data = zip(cells, styles, strict=True)
        row = [tag("th", header[0], scope="row", class_=header[1])]
        body.append(tag("tr", *row, *(tag("td", cell, class_=style) for cell, style in data)))
    return scrolling(caption, _table(caption, head, body))


def _table(caption: str, head: Iterable[Markup], body: Iterable[Markup], style: str | None = None) -> Markup:
    return tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        class_=style,
    )


def scrolling(label: str, *children: Child) -> Markup:
    """Wrap content that may be wider than the page, so that it can also be scrolled by keyboard."""
    return tag("div", *children, class_="scrolling", role="region", aria_label=label, tabindex="0")


def folded(summary: str, *children: Child) -> Markup:
    """Collapse content for interested readers."""
    return tag("details", tag("summary", summary), *children)


def bar(
    segments: Iterable[Segment], *, mark: float | None = None, start: float = 0.0, spoken: str | None = None
) -> Markup:
    """Return segments from `start`, and a line at `mark`, all as shares; `spoken` is for screen readers."""
    segments = [segment for segment in segments if segment.share > 0]
    if spoken is None:
        spoken = ", ".join(f"{segment.name} {segment.text}" for segment in segments)
    pieces = [
        tag(
            "span",
            class_=f"piece {segment.colour}",
            style=f"width:{100 * segment.share:.3f}%",
            data_tip=f"{segment.name}: {segment.text}",
        )
        for segment in segments
    ]
    if start:
        pieces.insert(0, tag("span", class_="offset", style=f"width:{100 * start:.3f}%"))
    if mark is not None:
        pieces.append(tag("span", class_="mark", style=f"left:{100 * mark:.3f}%"))
    return tag("div", *pieces, class_="bar", role="img", aria_label=spoken or "nothing")


def bars(caption: str, heads: Sequence[str], rows: Iterable[Sequence[Child]], style: str = "") -> Markup:
    """Return a chart as a table: every row has a name, a bar and values."""
    name, drawn, *values = heads
    head = [tag("th", name, scope="col"), tag("th", drawn, scope="col", class_="drawn")]
    head += [tag("th", value, scope="col", class_="number") for value in values]
    body = []
    for label, shape, *numbers in rows:
        cells = [tag("th", label, scope="row"), tag("td", shape, class_="drawn")]
        body.append(tag("tr", *cells, *(tag("td", number, class_="number") for number in numbers)))
    return _table(caption, head, body, f"bars {style}".strip())


def key(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return a colour key of (colour, name)."""
    items = (tag("li", tag("span", class_=f"swatch {colour}"), name) for colour, name in entries)
    return tag("ul", *items, class_="key")


def note(*children: Child) -> Markup:
    """Return a remark below a chart."""
    return tag("p", *children, class_="note")


def pairs(entries: Iterable[tuple[str, Child]]) -> Markup:
    """Return a list of labels and texts."""
    return tag("dl", *(joined([tag("dt", label), tag("dd", text)]) for label, text in entries), class_="pairs")


def chart(name: str, label: str, colours: Markup, content: Markup) -> Markup:
    """Return a chart drawn by a script from `content`, with a colour key and navigation buttons."""
    buttons = (
        tag("button", sign, type="button", data_zoom=action, aria_label=f"{hint_text}: {label}", title=hint_text)
        for sign, action, hint_text in (("+", "in", "Zoom in"), ("−", "out", "Zoom out"), ("↺", "all", "Show all"))
    )
    hint = "Arrow keys move, plus and minus zoom, 0 shows all; the numbers are in the table below"
    drawn = tag(
        "div", class_="canvas", tabindex="0", role="group", aria_label=f"{label}. {hint}.", aria_roledescription="chart"
    )
    return tag(
        "figure",
        colours,
        tag("div", *buttons, class_="zoom"),
        drawn,
        tag("noscript", note("This chart needs scripts: its numbers are in the table.")),
        content,
        class_=f"chart {name}",
    )
