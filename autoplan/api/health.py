"""Health of this machine or allocation: rates of devices and links against each other and against the cluster file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from autoplan.api.outputs import CheckedHealth, CheckedRate, SlowPart
from autoplan.api.problem import load_cluster
from autoplan.base.errors import InputError
from autoplan.base.files import check_target, write_text
from autoplan.base.user import user_name
from autoplan.base.values import parse_duration
from autoplan.cost.network.algorithms import ProcessGroup, collective_s
from autoplan.profiler.allocation import Allocation
from autoplan.profiler.crew import Crew, place_with
from autoplan.profiler.discover.write import cluster_toml
from autoplan.profiler.health import Health, check, faults, records, unmeasured, usual
from autoplan.profiler.protocol import Job
from autoplan.profiler.store import open_store
from autoplan.spec.operations import Operation
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.levels import compile_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthOptions:
    """Options of a check, times as texts: "10m"."""

    db: str | None = None  # path or URL of the timing database; None: AUTOPLAN_DB, else the user's own
    budget: str = "10m"
    cluster: str | None = None  # whose nodes these are
    ranks: int = 0  # to start here; 0: one for each device
    allowance: str = "3s"  # for one measurement to settle
    limit: str = "2m"  # after which a rank counts as hung
    out: Path | None = None  # file to write the cluster to, with what is slow as its faults
    force: bool = False  # replace that file


def check_health(
    options: HealthOptions, advance: Callable[[Health], None] = lambda health: None
) -> CheckedHealth | None:
    """Measure every device, groups and all pairs, store the results, and return what is slow (None on ranks but 0).

    Runs on one node, or under torchrun, srun or mpirun with one rank per device.  `advance` is called after every round
    of messages.
    """
    place, num_ranks = place_with(options.ranks)
    if options.out is not None and options.cluster is None:
        raise InputError("--out writes the cluster with its slow parts: give it with --cluster")
    if options.out is not None:
        check_target(options.out, force=options.force)
    cluster = load_cluster(options.cluster) if options.cluster else None
    budget_s = parse_duration(options.budget)
    job = Job(
        allowance_s=parse_duration(options.allowance),
        limit_s=parse_duration(options.limit),
        compares_devices=False,
        devices_per_domain=cluster.levels[-1].num_devices if cluster else 0,
    )
    with Crew(job, place, num_ranks) as crew:
        if not crew.leads:
            crew.start()
            crew.follow()
            return None
        with open_store(options.db) as store:
            hello = crew.start()
            assert hello is not None
            allocation = Allocation(hello=hello, cluster=cluster)
            if options.out is not None and not allocation.nodes:
                assert cluster is not None
                raise InputError(
                    f"cluster {cluster.name!r} has {cluster.num_nodes} nodes and does not say which {hello.num_nodes} "
                    "these are: list them under [[nodes]]"
                )
            health = unmeasured(allocation)
            try:
                check(crew, health, budget_s=budget_s, advance=advance)
            finally:  # what was measured before an interrupt is kept
                store.add(records(health, user_name()))
    if options.out is not None:
        write_text(options.out, _with_faults(health), force=options.force)
    return summary(health)


def summary(health: Health) -> CheckedHealth:
    """Return the rates of a check and what is slow."""
    allocation, hello = health.allocation, health.allocation.hello
    return CheckedHealth(
        device=hello.fingerprint.device,
        ranks=len(hello.hosts),
        nodes=hello.num_nodes,
        elapsed_s=health.elapsed_s,
        rates=tuple(_rates(health)),
        slow=tuple(
            SlowPart(
                part=slow.part,
                hosts=tuple(hello.hosts[rank] for rank in slow.ranks),
                devices=tuple(allocation.place(rank)[1] for rank in slow.ranks),
                rate_share=slow.rate_share,
            )
            for slow in health.slow_parts()
        ),
        disturbance=health.disturbance,
        rounds=health.num_rounds,
        rounds_left=health.num_left,
    )


def _rates(health: Health) -> list[CheckedRate]:
    """Return a row for products, one for each way of messages and one for each group."""
    allocation, hello = health.allocation, health.allocation.hello
    cluster, per_domain = allocation.cluster, hello.ranks_per_domain
    products_s = [min(times) for times in zip(*health.products_s, strict=True)]
    flops = 2.0 * float(np.prod(np.array(health.product.shape, dtype=np.float64)))
    rows = [_rate("matrix products", flops, products_s, _described_flops_per_s(cluster, health.product.dtype))]
    message_bytes = health.message.shape[3]
    for title, is_inside, stride in (
        ("messages in nodes", True, 1),
        ("messages between nodes", False, per_domain),
    ):
        times = [min(seconds) for pair, seconds in health.messages_s.items() if allocation.is_inside(pair) == is_inside]
        if times:
            described_s = _described_s(cluster, "send_recv", stride, 2, message_bytes)
            rows.append(_rate(title, message_bytes, times, described_s and message_bytes / described_s))
    for task, outcome in health.groups:
        members, inside, *_ = task.shape
        stride = 1 if inside > 1 else per_domain
        moved = 2 * (1 - 1 / members) * message_bytes  # over the link of each device in a ring
        described_s = _described_s(cluster, task.operation, stride, members, message_bytes)
        where = "in a node" if members == inside else "over nodes" if inside == 1 else "of all devices"
        seconds = [usual(outcome.samples_s)]
        rows.append(_rate(f"all-reduce {where}", moved, seconds, described_s and moved / described_s))
    return rows


def _rate(what: str, work: float, seconds: list[float], described: float | None) -> CheckedRate:
    return CheckedRate(
        what=what, number=len(seconds), usual=work / usual(seconds), least=work / max(seconds), described=described
    )


def _described_flops_per_s(cluster: ClusterSpec | None, dtype: str) -> float | None:
    """Return the rate of large products in a data type, from the cluster file."""
    peak = None if cluster is None else cluster.device.peaks.get(dtype)
    return None if cluster is None or peak is None else peak * cluster.device.gemm_efficiency


def _described_s(
    cluster: ClusterSpec | None, operation: Operation, stride: int, size: int, buffer_bytes: int
) -> float | None:
    """Return the time of a collective on the cluster as its file describes it, without faults."""
    if cluster is None:
        return None
    group = ProcessGroup(np.array([stride]), np.array([size]))
    topology = compile_topology(replace(cluster, faults=()))
    return float(collective_s(topology, operation, group, np.array([float(buffer_bytes)]))[0])


def _with_faults(health: Health) -> str:
    """Return the cluster file with the slow parts that were found, which replace earlier faults of the same nodes."""
    cluster, nodes = health.allocation.cluster, health.allocation.nodes
    assert cluster is not None
    other_faults = tuple(fault for fault in cluster.faults if fault.node not in nodes)
    new_faults = tuple(faults(health))
    remark = f"autoplan profile --health, {datetime.now(UTC):%Y-%m-%d}"
    remarks = {f"faults[{at}]": remark for at in range(len(other_faults), len(other_faults) + len(new_faults))}
    return cluster_toml(replace(cluster, faults=other_faults + new_faults), remarks)
