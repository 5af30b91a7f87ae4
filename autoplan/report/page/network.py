"""Section of the network: traffic of the plan by level and by communicator, and the cluster as a drawing."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.base.units import format_percent, format_seconds, format_volume
from autoplan.cost.collectives.traffic import StepTraffic
from autoplan.report.cluster_drawing import draw
from autoplan.report.page.content import PlanContent
from autoplan.report.page.elements import Segment, bar, bars, folded, note, scrolling, section, table
from autoplan.report.page.html import Markup, tag
from autoplan.report.traffic import OPERATION_NAMES
from autoplan.topology.graph import quotient


def network(content: PlanContent) -> Markup:
    """Return the traffic per device of the busiest stage, and the cluster with the traffic on its links."""
    step, cluster = content.traffic, content.file.cluster
    drawing = Markup(draw(cluster, quotient(cluster), step))
    return section(
        "network",
        "Traffic over the links",
        _summary(step),
        bars(
            "Traffic of a device over each level of links",
            ("links", f"sent by a device of stage {step.stage} in a step", "volume"),
            _levels(step),
        ),
        note("One direction, exposed or not; on shared links, the share of one device."),
        folded("Every communicator", _communicators(step)),
        tag("h3", "The cluster"),
        scrolling("Drawing of the cluster with the traffic of a step", tag("div", drawing, class_="drawing")),
        note(f"The same from the command line: autoplan topo CLUSTER --plan PLAN. {_places(content)}"),
    )


def _summary(step: StepTraffic) -> str:
    if not step.rows:
        return "There is one device, so nothing is sent."
    row = max(step.rows, key=lambda row: row.time_s)
    seconds, share = sum(row.time_s for row in step.rows), format_percent(step.share(row))
    return (
        f"The links of stage {step.stage} are busy for {format_seconds(seconds)} of a step, shown or hidden behind "
        f"work: {share} of that is the {OPERATION_NAMES[row.operation]} of {row.communicator} over "
        f"{row.num_ranks:,} ranks."
    )


def _levels(step: StepTraffic) -> Iterator[tuple[str, Markup, str]]:
    max_bytes = max(step.level_bytes, default=0.0) or 1.0
    for level, moved in zip(step.levels, step.level_bytes, strict=True):
        text = format_volume(moved)
        yield level.name, bar([Segment(name=level.name, colour="traffic", share=moved / max_bytes, text=text)]), text


def _communicators(step: StepTraffic) -> Markup:
    columns = [("communicator", False), ("ranks", True), ("times", True), ("time", True), ("share", True)]
    columns += [(level.name, True) for level in step.levels]
    rows = (
        (
            f"{row.communicator} {OPERATION_NAMES[row.operation]}",
            f"{row.num_ranks:,}",
            f"{row.times:,.6g}",
            format_seconds(row.time_s),
            format_percent(step.share(row)),
            *(format_volume(moved) if moved else "" for moved in row.level_bytes),
        )
        for row in step.rows
    )
    return table("Traffic of a step by communicator", columns, rows)


def _places(content: PlanContent) -> str:
    file = content.file
    if file.listed_step_s is None:
        return ""
    gain = format_percent(file.listed_step_s / file.best.step_s - 1)
    return f"Ordering the nodes makes the step {gain} faster than their listed order."
