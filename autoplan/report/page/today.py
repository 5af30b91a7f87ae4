"""Section of today's launch file: the changes from its plan to the best one, and the options that change."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.report.launch_file import (
    CHANGE_COLUMNS,
    OPTIONS_TITLE,
    change_rows,
    compares_rates,
    gap_line,
    not_alone,
    option_rows,
)
from autoplan.report.page.content import PlanContent
from autoplan.report.page.elements import note, pairs, section, table
from autoplan.report.page.html import Child, Markup, tag
from autoplan.spec.axes import LABELS
from autoplan.spec.explanation import CurrentPlan


def today(content: PlanContent) -> Markup | None:
    """Return the changes with their gains, differing options of the file, and its unread options."""
    current = content.file.today
    if current is None:
        return None
    return section("today", f"From {current.path} to this plan", _summary(current), *_parts(current))


def _summary(current: CurrentPlan) -> str | None:
    if not (current.gap and current.priced):
        return None
    gap = gap_line(current)
    return f"Its plan is {gap}." if gap[0].isdigit() else f"{gap[0].upper()}{gap[1:]}."


def _parts(current: CurrentPlan) -> Iterator[Child]:
    for fault in current.broken:
        yield tag("p", f"Rejected by the framework: {fault}.", class_="warning")
    if current.changes:
        yield table("Changes of the plan", CHANGE_COLUMNS, change_rows(current, LABELS))
        unit = " Times are tokens/s per device." if compares_rates(current) else ""
        yield note(f"Alone: today's plan with only that change.{unit}")
        for reason in not_alone(current, LABELS):
            yield note(reason)
    if current.options:
        yield tag("h3", f"{OPTIONS_TITLE[0].upper()}{OPTIONS_TITLE[1:]}")
        yield table("Options that change", (("option", False), ("change", False)), option_rows(current.options))
    elif current.no_options:
        yield note(f"Options are not compared: {current.no_options}")
    if current.unread:
        yield tag("h3", "Not read from the file, and may matter")
        yield pairs(current.unread.items())
