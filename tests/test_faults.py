"""What does a part that runs below its rate do to the step, and is one that has failed kept out of it?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.links import Links
from autoplan.readers.cluster import load_cluster
from autoplan.spec.measurement import Measurement
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.timing import TimingTable
from autoplan.topology.cluster import ClusterSpec, Fault, NodeGroup, SwitchTier
from autoplan.topology.levels import compile_topology
from test_estimate import price, problem_of, terms_of

PLAN = ParallelPlan(global_batch=32, tp=8, pp=2, dp_shard=2)


def lab(*faults: Fault, **changes: Any) -> ClusterSpec:
    """Four nodes of eight H100 below two leaves, twice oversubscribed."""
    base = load_cluster("h100-sxm:4x8")
    tiers = (SwitchTier(num_nodes=2, oversubscription=2.0),)
    return dataclasses.replace(base, network=dataclasses.replace(base.network, tiers=tiers), faults=faults, **changes)


def rates(cluster: ClusterSpec) -> list[float]:
    """Rates of the links inside nodes, of the NICs, and of what leads out of leaves, over those of sound ones."""
    sound = compile_topology(lab())
    levels = compile_topology(cluster).levels
    return [level.bytes_per_s / other.bytes_per_s for level, other in zip(levels, sound.levels, strict=True)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(part="link", node=3, index=7, rate_share=0.5), [0.5, 1.0, 1.0]),
        (Fault(part="nic", node=0, index=2, rate_share=0.25), [1.0, 0.25, 1.0]),
        (Fault(part="uplink", switch="leaf 1", rate_share=0.5), [1.0, 1.0, 0.5]),
        (Fault(part="device", node=1, index=0, rate_share=0.8), [1.0, 1.0, 1.0]),
    ],
)
def test_a_fault_slows_the_links_that_it_is_in(fault: Fault, expected: list[float]) -> None:
    assert rates(lab(fault)) == pytest.approx(expected)


def test_the_worst_of_several_faults_counts() -> None:
    faults = [Fault(part="nic", node=at, rate_share=share) for at, share in enumerate((0.9, 0.5, 0.7))]
    assert rates(lab(*faults)) == pytest.approx([1.0, 0.5, 1.0])


def test_an_uplink_that_lost_links_makes_a_full_tier_an_oversubscribed_one() -> None:
    base = load_cluster("h100-sxm:4x8")
    tiers = (SwitchTier(num_nodes=2),)
    network = dataclasses.replace(base.network, tiers=tiers)
    faults = (Fault(part="uplink", switch="leaf 0", rate_share=0.25),)
    sound, faulty = (dataclasses.replace(base, network=network, faults=broken) for broken in ((), faults))
    assert len(compile_topology(sound).levels) == 2
    nic, uplink = compile_topology(faulty).levels[1:]
    assert uplink.bytes_per_s == pytest.approx(nic.bytes_per_s / 4)


def test_nodes_and_switches_are_known_by_their_names() -> None:
    groups = tuple(
        NodeGroup(names=(f"rack{at}-a", f"rack{at}-b"), switches=(f"leaf-{letter}",)) for at, letter in enumerate("xy")
    )
    assert rates(lab(Fault(part="nic", node="rack1-b", rate_share=0.5), nodes=groups))[1] == 0.5
    assert rates(lab(Fault(part="uplink", switch="leaf-y", rate_share=0.5), nodes=groups))[2] == 0.5
    for fault in (Fault(part="nic", node=1, rate_share=0.5), Fault(part="uplink", switch="leaf 0", rate_share=0.5)):
        with pytest.raises(InputError, match=r"one of nodes|no node below"):
            lab(fault, nodes=groups)


@settings(max_examples=8)
@given(st.integers(0, 3), st.integers(0, 7), st.sampled_from(["device", "nic", "link"]), st.floats(0.05, 1.0))
def test_it_does_not_matter_which_of_equal_parts_is_slow(node: int, index: int, part: str, share: float) -> None:
    here, first = (
        lab(Fault(part=part, node=at, index=device, rate_share=share))  # type: ignore[arg-type]
        for at, device in ((node, index), (0, 0))
    )
    sound, slow, other = (price(problem_of(cluster=cluster), PLAN).step_s[0] for cluster in (lab(), here, first))
    assert slow == other
    assert slow >= sound
    assert slow > sound or share > 0.99 or part != "device"


def test_a_slow_device_slows_the_kernels_of_all_measured_or_not() -> None:
    shape, dtype = (2048, 2048, 1024), "bf16"
    known = TimingTable.of([Measurement(operation="gemm", shape=shape, dtype=dtype, device="lab", seconds=1e-3)])
    slow = lab(Fault(part="device", node=0, rate_share=0.5))
    plan = ParallelPlan(global_batch=4)
    for changes in ({}, {"timings": known}):
        before, after = (terms_of(problem_of(cluster=cluster, **changes), plan) for cluster in (lab(), slow))
        assert after["gemm"] == pytest.approx(2 * before["gemm"], rel=0.1)  # kernels start as fast
        assert after["memory_bound"] > 1.2 * before["memory_bound"]


def test_what_was_measured_on_sound_links_does_not_stand_for_slow_ones() -> None:
    shape = (8, 8, 1, 2**20)
    known = TimingTable.of([Measurement(operation="all_reduce", shape=shape, dtype="bf16", device="lab", seconds=1.0)])
    times = []
    for faults in ((), (Fault(part="link", node=0, rate_share=0.9),)):
        links = Links.of(problem_of(cluster=lab(*faults), timings=known))
        times.append(links.seconds("all_reduce", ProcessGroup(np.array([1]), np.array([8])), np.array([2.0**20]))[0])
    assert times[0] == pytest.approx(1.0)
    assert times[1] < 1e-3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"part": "nic", "node": 2, "rate_share": 0.0}, r"nic of node 2 has failed \(rate_share 0\): leave node 2 out"),
        ({"part": "uplink", "switch": "leaf 0", "rate_share": 0}, "leave the nodes below it out"),
        ({"part": "nic", "node": 4, "rate_share": 0.5}, "node 4, which must be a number from 0 to 3"),
        ({"part": "nic", "node": "n1", "rate_share": 0.5}, "node 'n1', which must be a number from 0 to 3"),
        ({"part": "nic", "node": 0, "index": 8, "rate_share": 0.5}, "nic 8 of node 0, which has 8"),
        ({"part": "device", "node": 0, "index": -1, "rate_share": 0.5}, "device -1 of node 0, which has 8"),
        ({"part": "link", "rate_share": 0.5}, "part 'link' must name its node"),
        ({"part": "uplink", "node": 0, "rate_share": 0.5}, "part 'uplink' must name its switch"),
        ({"part": "uplink", "switch": "leaf 2", "rate_share": 0.5}, "switch 'leaf 2', which has no node below it"),
        ({"part": "device", "node": 0, "rate_share": 1.5}, "rate_share must be above 0 and at most 1"),
        ({"part": "device", "node": 0, "rate_share": float("nan")}, "rate_share"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_in_one_line(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        lab(Fault(**fault))
    assert "\n" not in str(caught.value)


def test_faults_are_read_from_a_cluster_file(tmp_path: Path) -> None:
    text = """
name = "lab"
device = "h100-sxm"
num_nodes = 2
devices_per_node = 8
[[levels]]
name = "nvlink"
kind = "nvlink"
num_devices = 8
bandwidth_gb_per_s = 450.0
latency_us = 1.0
[network]
kind = "infiniband"
nic_gb_per_s = 50.0
sharp = true
[[faults]]
node = 1
part = "nic"
index = 3
rate_share = 0.5
"""
    path = tmp_path / "lab.toml"
    path.write_text(text)
    cluster = load_cluster(str(path))
    assert cluster.faults == (Fault(part="nic", node=1, index=3, rate_share=0.5),)
    assert cluster.network.sharp
    path.write_text(text.replace("rate_share = 0.5", "rate_share = 0"))
    with pytest.raises(InputError, match="nic of node 1 has failed"):
        load_cluster(str(path))
