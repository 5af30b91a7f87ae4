"""Time to build the graph of a cluster, folded and with every component a vertex."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from expanded import expand
from reports import make_parser, write_report

from autoplan.base.units import format_seconds
from autoplan.readers.cluster import load_cluster
from autoplan.report.cluster_drawing import draw
from autoplan.topology.cluster import ClusterSpec, NodeGroup
from autoplan.topology.graph import bisection_bytes_per_s, quotient

MAX_EXPANDED = 4096  # devices of a graph that holds every part
CLUSTERS = ("h100-sxm:16x8", "h100-sxm:2048x8", "gb200-nvl72:4096x4", "frontier:9408x8", "h100-sxm:12500x8")
REPEATS = 5


def _best_s(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _fragmented(cluster: ClusterSpec) -> ClusterSpec:
    """The nodes handed out by a scheduler, from 1 to 32 on a leaf switch."""
    groups: list[NodeGroup] = []
    given = 0
    while given < cluster.num_nodes:
        count = min(len(groups) * 7 % 32 + 1, cluster.num_nodes - given)
        names = tuple(f"n{given + at}" for at in range(count))
        groups.append(NodeGroup(names=names, switches=(f"leaf{len(groups)}",)))
        given += count
    return replace(cluster, nodes=tuple(groups))


def _row(name: str, cluster: ClusterSpec) -> str:
    found = quotient(cluster)
    full = format_seconds(_best_s(lambda: expand(cluster))) if cluster.num_devices <= MAX_EXPANDED else "-"
    cells = (
        name,
        f"{cluster.num_devices:,}",
        f"{len(found.graph)} / {found.graph.number_of_edges()}",
        format_seconds(_best_s(lambda: quotient(cluster))),
        format_seconds(_best_s(lambda: bisection_bytes_per_s(cluster, cluster.num_nodes // 2))),
        format_seconds(_best_s(lambda: draw(cluster, found))),
        full,
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table, and write it where `--report` says."""
    report = make_parser(__doc__).parse_args().report
    rows = [_row(name, load_cluster(name)) for name in CLUSTERS]
    rows.append(_row("h100-sxm:2048x8, fragmented", _fragmented(load_cluster("h100-sxm:2048x8"))))
    head = (
        "| cluster | devices | classes / edges | fold | cut in halves | draw | every part |",
        "|---|---|---|---|---|---|---|",
    )
    table = "\n".join([*head, *rows])
    print(table)
    if report:
        load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores ({platform.machine()})"
        write_report(report, "The graph of a cluster", f"best of {REPEATS}, {load}", table)


if __name__ == "__main__":
    main()
