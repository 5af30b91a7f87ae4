"""Start of a job under any launcher: its nodes in the order of the ranks, and the header of its files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoplan.base.errors import InputError
from autoplan.frameworks.common.header import comment
from autoplan.frameworks.common.header import header as plan_header
from autoplan.frameworks.common.job import EnvironmentVariable, File, Job
from autoplan.launch.names import Launcher
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.ranks import host_order
from autoplan.topology.cluster import ClusterSpec

SIZED_PER_NODE: tuple[Launcher, ...] = ("torchrun", "mpirun")  # start as many ranks on a node as it has devices
IN_CONTAINERS: tuple[Launcher, ...] = ("trainjob", "jobset", "pytorchjob", "skypilot")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRange:
    """Nodes of one cluster part from rank `first`, the memory need per device, and the plan for that part alone."""

    part: str
    first: int
    num_nodes: int
    num_devices: int  # per node
    memory_bytes: float
    plan_file: PlanFile
    hosts: tuple[str, ...] = ()  # their names, if the cluster lists them


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A job on the parts of a cluster, in the order of ranks; equal nodes are one part."""

    name: str  # name in the scheduler
    plan_file: PlanFile
    job: Job
    launcher: Launcher
    image: str | None  # container image
    node_ranges: tuple[NodeRange, ...]

    @classmethod
    def of(
        cls,
        plan_file: PlanFile,
        job: Job,
        launcher: Launcher,
        image: str | None = None,
        name: str | None = None,
        unlike_nodes: tuple[NodeRange, ...] = (),
    ) -> Start:
        """Return the start of a plan, on equal nodes unless `unlike_nodes` are given; InputError for a bad `image`."""
        start = cls(
            name=name or plan_file.model.name,
            plan_file=plan_file,
            job=job,
            launcher=launcher,
            image=image,
            node_ranges=unlike_nodes or (_equal_nodes(plan_file),),
        )
        if launcher not in SIZED_PER_NODE and not start.has_equal_nodes:
            raise InputError(
                f"{launcher} starts as many ranks on every node, the plan's nodes have unlike numbers of devices: use "
                f"--launcher {' or '.join(SIZED_PER_NODE)}"
            )
        if image is not None and launcher not in IN_CONTAINERS:
            raise InputError(
                f"{launcher} starts no container, so --image has no effect: leave it out, or use "
                f"--launcher {', '.join(IN_CONTAINERS[:-1])} or {IN_CONTAINERS[-1]}"
            )
        if image is not None and not re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", image, re.ASCII):
            raise InputError(f"{image!r} is not an image name: give one such as nvcr.io/nvidia/pytorch:25.06-py3")
        for host in start.hosts:
            _check_host(host)
        return start

    @property
    def num_nodes(self) -> int:
        """Return the number of all nodes."""
        return sum(nodes.num_nodes for nodes in self.node_ranges)

    @property
    def num_devices(self) -> int:
        """Return the devices of a node, or of the largest where they differ."""
        return max(nodes.num_devices for nodes in self.node_ranges)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the names of the nodes by rank, if all are listed."""
        if not all(nodes.hosts for nodes in self.node_ranges):
            return ()
        return tuple(host for nodes in self.node_ranges for host in nodes.hosts)

    @property
    def has_equal_nodes(self) -> bool:
        """Return whether all nodes have as many devices."""
        return all(nodes.num_devices == self.num_devices for nodes in self.node_ranges)

    @property
    def environment(self) -> tuple[EnvironmentVariable, ...]:
        """Variables that the job needs, including those for priced features that NCCL does not enable by default."""
        settings = self.job.environment
        if self.num_nodes > 1 and self.plan_file.cluster.network.sharp:
            note = "sums in the switches, as priced; needs NCCL's plugin for SHARP"
            settings += (EnvironmentVariable(name="NCCL_COLLNET_ENABLE", value="1", note=note),)
        return settings


def _equal_nodes(plan_file: PlanFile) -> NodeRange:
    """Return the nodes that a plan needs of a cluster of equal ones."""
    num_nodes, num_devices = node_shape(plan_file.cluster, plan_file.num_devices)
    return NodeRange(
        part=plan_file.cluster.name,
        first=0,
        num_nodes=num_nodes,
        num_devices=num_devices,
        memory_bytes=plan_file.best.memory_bytes,
        plan_file=plan_file,
        hosts=host_order(plan_file.cluster, plan_file.best.plan)[:num_nodes],
    )


def node_shape(cluster: ClusterSpec, num_devices: int) -> tuple[int, int]:
    """Return (nodes, devices per node) for `num_devices`; part of a node is used only if one node is enough."""
    per_node = cluster.devices_per_node
    if num_devices <= per_node:
        return 1, num_devices
    nodes, remainder = divmod(num_devices, per_node)
    if remainder:
        raise InputError(f"the plan's {num_devices} devices do not fill nodes of {per_node}: plan for whole nodes")
    if nodes > cluster.num_nodes:
        raise InputError(f"the plan needs {nodes} nodes, cluster {cluster.name!r} has {cluster.num_nodes}")
    return nodes, per_node


def header(start: Start, how: str) -> list[str]:
    """Return the comment at the top of each file; `how` says how to use the file."""
    lines = [*plan_header(start.plan_file, start.job.framework), comment(f"Start: {how}")]
    if len(start.node_ranges) > 1:
        nodes = ", ".join(f"{_ranks(nodes)} {nodes.part}" for nodes in start.node_ranges)
        lines.append(
            comment(f"Nodes by NODE_RANK, as every stage of the pipeline is laid out for its devices: {nodes}")
        )
    return lines


def on_nodes(nodes: NodeRange) -> str:
    """Return the condition of a shell that holds on these nodes."""
    return f"((NODE_RANK >= {nodes.first} && NODE_RANK <= {nodes.first + nodes.num_nodes - 1}))"


def _ranks(nodes: NodeRange) -> str:
    last = nodes.first + nodes.num_nodes - 1
    return f"{nodes.first} to {last}" if last > nodes.first else str(last)


def dns_name(text: str) -> str:
    """Return `text` shortened to a DNS label (RFC 1035), with room for suffixes that controllers append."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"plan-{name}")[:40].strip("-")


def script(name: str, lines: list[str]) -> File:
    """Return an executable file with these lines."""
    return File(name=name, text="\n".join(lines) + "\n", executable=True)


def _check_host(name: str) -> None:
    """Raise InputError if a shell or Slurm would not read the name of a node as a plain name."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise InputError(f"node {name!r} is not a host name: correct [[nodes]] in the cluster file")
