"""Topology of a cluster: its links, their rates, and the traffic of a plan on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoplan.api.plan_files import load_plan_file, problem_of
from autoplan.api.problem import load_cluster
from autoplan.base.errors import InputError
from autoplan.cost.collectives.traffic import StepTraffic, step_traffic
from autoplan.report.cluster import topology_json
from autoplan.report.cluster_drawing import draw
from autoplan.report.traffic import traffic_json
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.graph import ClusterGraph, quotient


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster of equal nodes as a graph of its parts, with the traffic of a plan where one was given."""

    cluster: ClusterSpec
    graph: ClusterGraph
    traffic: StepTraffic | None

    def to_table(self) -> dict[str, Any]:
        """Return the graph and its places, and the traffic, as plain values in SI units."""
        table = topology_json(self.cluster, self.graph)
        return table | ({"traffic": traffic_json(self.traffic)} if self.traffic else {})

    def draw(self) -> str:
        """Return an SVG of the cluster."""
        return draw(self.cluster, self.graph, self.traffic)


def topology(cluster: str | Path | ClusterSpec, plan: str | Path | None = None) -> Topology:
    """Return the topology of a cluster, optionally with the traffic of a plan; InputError if their sizes differ."""
    spec = load_cluster(cluster)
    return Topology(cluster=spec, graph=quotient(spec), traffic=_traffic(Path(plan), spec) if plan else None)


def _traffic(path: Path, cluster: ClusterSpec) -> StepTraffic:
    file = replace(load_plan_file(path), timings="")  # bytes rest on none
    problem, plan = problem_of(file), file.best.plan
    if plan.num_devices != cluster.num_devices:
        raise InputError(
            f"{path}: the plan is for {plan.num_devices} devices, {cluster.name} has {cluster.num_devices}: "
            "give the cluster that it was made for, or one of its size"
        )
    return step_traffic(replace(problem, cluster=cluster), plan)
