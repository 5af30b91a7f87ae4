"""SVG drawing of a cluster: nested places, with the first of each kind expanded, down to the links inside a node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from autoplan.base.units import format_rate, format_seconds, format_volume
from autoplan.report.cluster import (
    KIND_NAMES,
    cluster_line,
    component_text,
    fault_text,
    halves_bytes_per_s,
    nodes_text,
    place_name,
    rates_text,
)
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.components import (
    Component,
    ComponentKind,
    Graph,
    Link,
    fabric_link,
    nic_link,
    node_graph,
    wide_levels,
)
from autoplan.topology.graph import ClusterGraph, PlaceGroup, links_up

if TYPE_CHECKING:  # the cost model is not needed for a cluster alone
    from autoplan.cost.collectives.traffic import StepTraffic

MAX_DRAWN = 16  # devices of the expanded node; in a larger one each class of components is drawn once
WIDTH, MARGIN = 1080, 24
MAX_OTHERS = 3  # kinds of places next to the expanded one
GUTTER = 270  # on the left, for the names of rows and links
INSET = 14  # of a place in the enclosing one
ROW, GAP = 26, 46  # heights of a row of components and of the links between two
LINE = 15  # height of a line of text
CHARACTER = 6.4  # approximate width

FILLS: dict[ComponentKind, tuple[str, str]] = {
    "device": ("#d8f0dc", "#2f7d3b"),
    "nic": ("#d6e6fb", "#2b62ad"),
    "pcie_switch": ("#fdf0cf", "#946a08"),
    "socket": ("#e6e6ea", "#5b5b66"),
    "fabric": ("#ecdff7", "#7440a3"),
    "switch": ("#d6e6fb", "#2b62ad"),
    "core": ("#d6e6fb", "#2b62ad"),
    "wan": ("#fbe0d8", "#ad4a2b"),
}
LINK_COLOURS = dict.fromkeys(("nvlink", "xgmi", "ethernet", "shared_memory"), "#7440a3") | {
    "pcie": "#946a08",
    "wan": "#ad4a2b",
}
LINK_COLOURS |= dict.fromkeys(("socket", "nvlink-c2c"), "#5b5b66")
FAULT_COLOUR = "#d11f1f"
NETWORK_COLOUR, TEXT_COLOUR, FRAME_COLOUR = "#2b62ad", "#22222a", "#b9b9c6"
HALO = 'stroke="#fbfbfd" stroke-width="5" paint-order="stroke"'  # keeps a name readable over a link
BOX_WIDTHS: dict[ComponentKind, float] = {"nic": 60, "pcie_switch": 86, "socket": 72, "device": 78}

Span = tuple[float, float]  # left and right edge


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Component or class of components, by its centre."""

    kind: ComponentKind
    text: str
    x: float
    y: float
    width: float

    def end(self, target: _Box) -> float:
        """Return the end of a line to a box above or below: vertical below the other's centre, or at its own centre."""
        is_under = self.width > target.width and abs(self.x - target.x) <= self.width / 2
        return target.x if is_under else self.x


@dataclass(slots=True)
class _Canvas:
    """Shapes in layers, the lowest first; labels do not overlap."""

    frames: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)  # their positions

    def text(self, x: float, y: float, text: str, *, colour: str = TEXT_COLOUR, style: str = "") -> None:
        self.boxes.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" {style}>{escape(text)}</text>')

    def box(self, box: _Box) -> None:
        fill, edge = FILLS[box.kind]
        x, y = box.x - box.width / 2, box.y - ROW / 2
        self.boxes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{box.width:.1f}" height="{ROW}" rx="4" fill="{fill}" '
            f'stroke="{edge}"/>'
        )
        if CHARACTER * len(box.text) < box.width:
            self.text(box.x, box.y + 4, box.text, colour=edge, style='text-anchor="middle"')

    def link(self, a: _Box, b: _Box, link: Link) -> None:
        """Draw a line between two boxes, vertical if one is above the other, wider for faster links."""
        width = min(max(math.log2(link.bytes_per_s / 4e9), 0.7), 7)
        x_a, x_b = a.end(b), b.end(a)
        self.links.append(
            f'<line x1="{x_a:.1f}" y1="{a.y:.1f}" x2="{x_b:.1f}" y2="{b.y:.1f}" '
            f'stroke="{_colour(link)}" stroke-width="{width:.1f}" stroke-opacity="0.65"/>'
        )

    def label(self, y: float, text: str, *, colour: str = TEXT_COLOUR, style: str = "") -> None:
        """Write a line of text in the gutter, at `y` or at the next free position below."""
        while any(abs(y - used_y) < LINE for used_y in self.labels):
            y += 1
        self.labels.append(y)
        self.text(MARGIN, y + 4, text, colour=colour, style=style)

    def link_label(self, y: float, link: Link, text: str, sent: str) -> None:
        for line in (rates_text(link) + text, sent, fault_text(link.share)):
            if line:
                self.label(y, line, colour=_colour(link), style='font-size="11"')

    def frame(self, across: Span, down: Span, *, is_stacked: bool) -> None:
        """Draw the frame of a place, with identical places stacked behind it."""
        for offset in (0, 4, 8) if is_stacked else (0,):
            self.frames.append(
                f'<rect x="{across[0] + offset:.1f}" y="{down[0] - offset:.1f}" width="{across[1] - across[0]:.1f}" '
                f'height="{down[1] - down[0]:.1f}" rx="8" fill="#fbfbfd" stroke="{FRAME_COLOUR}"/>'
            )


def _colour(link: Link) -> str:
    return FAULT_COLOUR if link.share < 1 else LINK_COLOURS.get(link.kind, NETWORK_COLOUR)


def draw(cluster: ClusterSpec, cluster_graph: ClusterGraph, step: StepTraffic | None = None) -> str:
    """Return the cluster as the text of an SVG file, with the traffic of a plan's step on its links."""
    moved = _moved(cluster, step) if step else {}
    canvas = _Canvas()
    rate = halves_bytes_per_s(cluster)
    halves = "" if rate is None else f"; {format_rate(rate)} between its halves"
    canvas.text(MARGIN, 34, cluster_line(cluster) + halves, style='font-size="16" font-weight="bold"')
    note = "Rates are for one direction, sustained of nominal.  Identical parts are drawn once."
    note += "  Traffic is per device and step; on shared links, the share of a device." if step else ""
    canvas.text(MARGIN, 54, note, style='font-size="11"')
    places = list(_opened(cluster_graph.root))
    y, total = 80.0, 1
    above: _Box | None = None
    tops = []
    for depth, group in enumerate(places):
        total *= group.count
        tops.append(y)
        y += 32
        if group.inside and group.vertices:
            above = _draw_switches(canvas, cluster_graph, group, total, _span(depth), above, y + ROW / 2, moved)
            y += ROW + 10
    bottom = _draw_node(canvas, cluster, cluster_graph, places[-1], total, _span(len(places) - 1), above, y + 10, moved)
    for depth, group in reversed(list(enumerate(places))):
        (x0, x1), besides = _span(depth), _besides(group)
        bottom += 12 + LINE * bool(besides)
        canvas.text(x0 + 10, bottom - 7, besides, style='font-size="11" font-style="italic"')
        canvas.text(x0 + 10, tops[depth] + 18, place_name(group), style=f'font-weight="bold" {HALO}')
        canvas.frame((x0, x1), (tops[depth], bottom), is_stacked=group.count > 1)
    height = bottom + MARGIN
    body = "\n".join([*reversed(canvas.frames), *canvas.links, *canvas.boxes])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _moved(cluster: ClusterSpec, step: StepTraffic) -> dict[str, str]:
    """Bytes of a step as text, by name of a fabric or kind of its links, by tier for uplinks, "nic", or "wan"."""
    words = [f"{format_volume(moved)} per step" for moved in step.level_bytes]
    words_by_link: dict[str, str] = {}
    for at, level in enumerate(step.levels):
        if not level.is_network:
            words_by_link |= {level.name: words[at]} | ({cluster.levels[at].kind: words[at]} if level.is_mesh else {})
            continue
        below = step.levels[at - 1] if at else None
        if level.name == "wan":
            words_by_link["wan"] = words[at]
        elif below is None or not below.is_network:
            words_by_link["nic"] = words[at]
        else:
            words_by_link[below.name.removeprefix(f"{cluster.network.kind} ")] = words[at]
    return words_by_link


def _span(depth: int) -> Span:
    return MARGIN + GUTTER + INSET * depth, WIDTH - MARGIN - INSET * depth


def _opened(group: PlaceGroup) -> Iterator[PlaceGroup]:
    """Yield a place and the first one inside it, down to a node."""
    yield group
    if group.inside:
        yield from _opened(group.inside[0])


def _besides(group: PlaceGroup) -> str:
    """Describe the places inside `group` that are not expanded."""
    counts: Counter[str] = Counter()
    for place in group.inside[1:]:
        counts[place_name(replace(place, count=1))] += place.count
    kinds = [f"{count:,} x {name}" for name, count in counts.items()]
    more = f" and {len(kinds) - MAX_OTHERS} more kinds" if len(kinds) > MAX_OTHERS else ""
    return f"besides: {', '.join(kinds[:MAX_OTHERS])}{more}" if kinds else ""


def _draw_switches(
    canvas: _Canvas,
    cluster_graph: ClusterGraph,
    group: PlaceGroup,
    total: int,
    span: Span,
    above: _Box | None,
    y: float,
    moved: dict[str, str],
) -> _Box:
    """Draw the switches of a place as one bar, and their links to the tier above."""
    component: Component = cluster_graph.graph.nodes[group.vertices[0]]["component"]
    text = component_text(
        component, sum(cluster_graph.graph.nodes[vertex]["count"] for vertex in group.vertices) // total
    )
    box = _Box(kind=component.kind, text=text, x=sum(span) / 2, y=y, width=span[1] - span[0] - 2 * INSET)
    canvas.box(box)
    if above:
        for link in {link: None for vertex in group.vertices for link in links_up(cluster_graph.graph, vertex)}:
            canvas.link(above, box, link)
            over = f", {link.oversubscription:g}:1" if link.oversubscription > 1 else ""
            far = f", {format_seconds(2 * link.latency_s)}" if link.latency_s else ""
            sent = moved.get("wan" if link.kind == "wan" else component.name, "")
            canvas.link_label((above.y + y) / 2, link, f" each{over}{far}", sent)
    return box


def _draw_node(
    canvas: _Canvas,
    cluster: ClusterSpec,
    cluster_graph: ClusterGraph,
    node: PlaceGroup,
    total: int,
    span: Span,
    above: _Box | None,
    y: float,
    moved: dict[str, str],
) -> float:
    """Draw a node in rows, from the network down to the fabrics, with links; return its lower edge."""
    graph: Graph = cluster_graph.graph.subgraph(node.vertices)
    if cluster.devices_per_node <= MAX_DRAWN:
        graph, total = node_graph(cluster), 1
    boxes: dict[Any, _Box] = {}
    inner = (span[0] + INSET, span[1] - INSET)
    for vertices in _rows(graph):
        _draw_row(canvas, graph, vertices, total, inner, y, boxes)
        y += ROW + GAP
    labels: dict[tuple[Link, float], str] = {}
    for a, b, link in graph.edges(data="link"):
        if a != b and boxes[a].kind != boxes[b].kind:
            canvas.link(boxes[a], boxes[b], link)
            if "nic" not in (boxes[a].kind, boxes[b].kind):  # the link of a NIC is as fast as the NIC
                sent = moved.get(_level_of(cluster, graph.nodes[a]["component"], graph.nodes[b]["component"]), "")
                labels[link, (boxes[a].y + boxes[b].y) / 2] = sent
        elif boxes[a].kind == "socket":
            canvas.link(boxes[a], boxes[b], link)
            labels[link, boxes[a].y] = ""
    direct = _direct_links(graph)
    on_device = [box for box in boxes.values() if box.kind == "device"]
    for name, text, link in _fabrics_between_all(cluster, direct):
        bar = _Box(kind="fabric", text=text, x=sum(inner) / 2, y=y + ROW / 2, width=inner[1] - inner[0])
        canvas.box(bar)
        for box in on_device:
            canvas.link(box, bar, link)
        labels[link, bar.y - GAP / 2 - ROW / 2] = moved.get(name, "")
        y += ROW + GAP
    if above:
        link = nic_link(cluster)
        for box in (nic for nic in boxes.values() if nic.kind == "nic"):
            canvas.link(above, box, link)
        labels[link, above.y + ROW] = moved.get("nic", "")
    for (link, at), sent in labels.items():
        hops = 1 if link in direct else 2  # the way to a switch has half of the latency
        latency = f", {format_seconds(hops * link.latency_s)}" if link.latency_s else ""
        canvas.link_label(at, link, latency, sent)
    return y - GAP


def _level_of(cluster: ClusterSpec, *ends: Component) -> str:
    """Return the level of the links between two components of a node: a fabric, or devices and their host."""
    fabric = next((component.name for component in ends if component.kind == "fabric"), "")
    has_device = any(component.kind == "device" for component in ends)
    return fabric or next((level.name for level in cluster.levels if has_device and level.kind == "pcie"), "")


def _rows(graph: Graph) -> list[list[Any]]:
    """Return the vertices of a node by kind, from the network down to the fabrics."""
    rows: dict[str, list[Any]] = {kind: [] for kind in ("nic", "socket", "pcie_switch", "device")}
    for vertex, component in graph.nodes(data="component"):
        rows.setdefault(component.name if component.kind == "fabric" else component.kind, []).append(vertex)
    return [row for row in rows.values() if row]


def _draw_row(
    canvas: _Canvas, graph: Graph, vertices: list[Any], total: int, span: Span, y: float, boxes: dict[Any, _Box]
) -> None:
    """Draw equal components side by side, in a large node their classes."""
    component: Component = graph.nodes[vertices[0]]["component"]
    counts = [graph.nodes[vertex]["count"] // total for vertex in vertices]
    column = (span[1] - span[0]) / len(vertices)
    width = min(BOX_WIDTHS.get(component.kind, math.inf), column - 6)
    for at, (vertex, count) in enumerate(zip(vertices, counts, strict=True)):
        name = component.name if component.kind == "fabric" else str(at) if count == 1 else ""
        text = f"{name} x {count}".strip() if count > 1 else name
        x = span[0] + (at + 0.5) * column
        boxes[vertex] = _Box(kind=component.kind, text=text, x=x, y=y + ROW / 2, width=width)
        canvas.box(boxes[vertex])
    canvas.label(y + ROW / 2, component_text(component, sum(counts)), style='font-weight="bold"')


def _direct_links(graph: Graph) -> list[Link]:
    components = graph.nodes(data="component")
    between = (link for a, b, link in graph.edges(data="link") if components[a].kind == components[b].kind == "device")
    return list(dict.fromkeys(between))


def _fabrics_between_all(cluster: ClusterSpec, direct: list[Link]) -> Iterator[tuple[str, str, Link]]:
    """Yield fabrics without a vertex in a node, by name: direct links between all devices, and rack fabrics."""
    for link in direct:
        yield link.kind, f"{KIND_NAMES.get(link.kind, link.kind)}: a link between every two", link
    for level, num_nodes in wide_levels(cluster):
        joined = num_nodes * cluster.devices_per_node
        yield level.name, f"{level.name}: {joined:,} devices of {nodes_text(num_nodes)}", fabric_link(level)
