"""From what tools and the kernel say of nodes to a cluster that can be planned for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.api.discovery import local_cluster
from autoplan.api.timings import stored_timings
from autoplan.base.errors import InputError
from autoplan.base.files import decode, read_table
from autoplan.base.processes import RankPlace
from autoplan.base.units import GIB, MIB
from autoplan.cli import main
from autoplan.profiler.discover import local, nvidia_smi, report
from autoplan.profiler.discover.allocation import describe_all, gather, job_hosts, merge_all, switches_above
from autoplan.profiler.discover.describe import Description, describe, training_nics
from autoplan.profiler.discover.links import with_measured
from autoplan.profiler.discover.merge import merge
from autoplan.profiler.discover.observed import NicKind, ObservedDevice, ObservedLink, ObservedNic, ObservedNode
from autoplan.profiler.discover.report import Report, ReportFile, read_source
from autoplan.profiler.discover.slurm import parse as parse_switches
from autoplan.profiler.discover.write import cluster_toml
from autoplan.profiler.machine.hardware import Gpu, GpuLink
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import open_store
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.device import preset_devices
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation
from autoplan.spec.plan_file import PlanFile
from autoplan.topology.cluster import Fault, MachineSpec, NodeGroup
from autoplan.topology.levels import compile_topology
from machines import gpu_place, node, write
from model_specs import SMALL_TOML


def hgx(
    host: str = "",
    *,
    name: str = "NVIDIA H100 80GB HBM3",
    size: int = 8,
    num_links: int = 18,
    nics: int = 8,
    gbit_per_s: float = 400,
    kind: NicKind = "infiniband",
    source: str = "nvidia-smi topo -m",
) -> ObservedNode:
    """A node whose devices are all joined, each with a NIC below its switch, and a port for logins."""
    near = [
        ObservedLink(a=at, nic=f"mlx5_{nic}", path="switch" if at == nic else "system")
        for at in range(size)
        for nic in range(nics)
    ]
    fabric = [ObservedLink(a=a, b=b, path="fabric", num_links=num_links) for a, b in combinations(range(size), 2)]
    return ObservedNode(
        source=source,
        host=host,
        devices=tuple(ObservedDevice(index=at, name=name, pci=f"0000:{at:02x}:00.0") for at in range(size)),
        nics=(
            *(ObservedNic(name=f"mlx5_{at}", kind=kind, bytes_per_s=gbit_per_s / 8 * 1e9) for at in range(nics)),
            ObservedNic(name="eth0", kind="ethernet", bytes_per_s=1.25e9),
        ),
        links=(*(fabric if num_links else ()), *near),
    )


def written(description: Description, folder: Path) -> None:
    """The file of the description reads back as its cluster, and compiles."""
    path = folder / "cluster.toml"
    path.write_text(cluster_toml(description.cluster, description.remarks))
    assert load_cluster(str(path)) == description.cluster
    assert compile_topology(description.cluster).levels


def described(node: ObservedNode) -> Description:
    """A node of which nothing else is known."""
    return describe_all(merge_all([Report(seen=(node,))]))


# Nodes of a shipped kind


def test_a_node_of_a_shipped_kind_has_its_calibrated_curves(tmp_path: Path) -> None:
    found = describe(hgx(), num_nodes=16)
    shipped = load_cluster("h100-sxm:16x8")
    assert found.cluster.levels == shipped.levels
    assert found.cluster.network == shipped.network
    assert found.cluster.device == shipped.device
    assert "built-in value for h100-sxm" in found.cluster.sources[1]
    assert found.remarks["levels[0].bandwidth_bytes_per_s"] == "nominal: 18 links for each device (nvidia-smi topo -m)"
    assert found.warnings == ()
    written(found, tmp_path)


def test_sockets_that_were_seen_are_written(tmp_path: Path) -> None:
    found = describe(replace(hgx(), num_sockets=4))
    assert found.cluster.host.num_sockets == 4
    assert "num_sockets = 4  # nvidia-smi topo -m" in cluster_toml(found.cluster, found.remarks)
    written(found, tmp_path)


@pytest.mark.parametrize("name", preset_clusters())
def test_every_shipped_kind_of_node_is_itself_when_nothing_else_is_known_of_it(name: str, tmp_path: Path) -> None:
    shipped = load_cluster(name)
    network, size = shipped.network, shipped.devices_per_node
    count = round(network.nics_per_device * size)
    seen = ObservedNode(
        source="list",
        devices=tuple(ObservedDevice(index=at, name=shipped.device.name) for at in range(size)),
        nics=tuple(
            ObservedNic(name=f"nic{at}", kind=network.kind, bytes_per_s=network.nic_bytes_per_s) for at in range(count)
        ),
    )
    found = describe(seen, name=name)
    assert (found.cluster.levels, found.cluster.network) == (shipped.levels, network)
    written(found, tmp_path)


def test_every_shipped_device_is_in_a_shipped_cluster() -> None:
    assert {load_cluster(name).device.name for name in preset_clusters()} == set(preset_devices())


# NVLinks of a device, and what they give in one direction: data sheets of V100, A100, A800, H100 and B200.
@pytest.mark.parametrize(
    ("name", "size", "num_links", "gb_per_s", "is_mesh"),
    [
        ("NVIDIA A100-SXM4-80GB", 8, 12, 300, False),
        ("NVIDIA A100-SXM4-80GB", 4, 4, 300, True),  # four to each of the three others
        ("NVIDIA A800-SXM4-80GB", 8, 8, 200, False),
        ("NVIDIA H100 80GB HBM3", 8, 18, 450, False),
        ("NVIDIA H100 80GB HBM3", 4, 6, 450, True),
        ("NVIDIA H100 80GB HBM3", 2, 18, 450, False),  # two of the eight on a switch
        ("NVIDIA B200", 8, 18, 900, False),
    ],
)
def test_links_and_their_number_give_the_rate_of_a_device(
    name: str, size: int, num_links: int, gb_per_s: float, is_mesh: bool
) -> None:
    device = {"NVIDIA A100-SXM4-80GB": "a100-sxm"}.get(name, "")
    (level,) = describe(hgx(name=name, size=size, num_links=num_links), device=device).cluster.levels
    assert (level.num_devices, level.bandwidth_bytes_per_s / 1e9, level.is_mesh) == (size, gb_per_s, is_mesh)


def test_fewer_links_than_shipped_are_said_and_priced(tmp_path: Path) -> None:
    found = describe(hgx(num_links=12))
    assert found.cluster.levels[0].bandwidth_bytes_per_s == 300e9
    assert "300 GB/s for each device where the built-in h100-sxm has 450 GB/s" in found.warnings[0]
    written(found, tmp_path)


def test_a_device_that_lost_its_links_is_named() -> None:
    whole = hgx()
    lost = replace(whole, links=tuple(link for link in whole.links if link.b is None or 3 not in (link.a, link.b)))
    found = described(lost)
    assert found.cluster.levels[0].num_devices == 8
    assert found.warnings == ("device 3 not joined to the others by nvlink: are links down?",)


def test_a_device_with_fewer_links_is_a_fault(tmp_path: Path) -> None:
    whole = hgx()
    links = tuple(replace(link, num_links=16) if 3 in (link.a, link.b) and link.b else link for link in whole.links)
    found = described(replace(whole, links=links))
    assert found.cluster.levels == load_cluster("h100-sxm").levels
    assert found.cluster.faults == (Fault(part="link", rate_share=16 / 18, node=0, index=3),)
    assert found.warnings == ("device 3 has 16 links where others have 18: are links down?",)
    written(found, tmp_path)


def test_bridges_between_pairs_are_a_level_below_pcie(tmp_path: Path) -> None:
    bridged = hgx(name="NVIDIA A100 80GB PCIe", num_links=0, size=4)
    pairs = (ObservedLink(a=0, b=1, path="fabric", num_links=12), ObservedLink(a=2, b=3, path="fabric", num_links=12))
    found = describe(replace(bridged, links=(*pairs, *bridged.links)))
    assert [(level.kind, level.num_devices) for level in found.cluster.levels] == [("nvlink", 2), ("pcie", 4)]
    assert [level.bandwidth_bytes_per_s for level in found.cluster.levels] == [300e9, 32e9]
    assert found.cluster.levels[0].collectives is None
    written(found, tmp_path)


def test_what_cannot_show_a_fabric_does_not_deny_it() -> None:
    assert describe(hgx(num_links=0)).cluster.levels[0].kind == "pcie"
    found = describe(hgx(num_links=0, source="hwloc XML"))
    assert found.cluster.levels == load_cluster("h100-sxm").levels
    assert "hwloc XML shows no nvlink: it is assumed" in found.warnings[0]


def test_reports_in_which_no_source_speaks_are_refused() -> None:
    with pytest.raises(InputError, match="no source tells of a node"):
        describe_all(merge_all([Report(host="n1", seen=())]))


def test_links_of_devices_that_no_source_tells_of_are_none() -> None:
    odd = ObservedNode(source="a file", links=(ObservedLink(a=0, b=1, path="fabric"),))
    assert describe(odd, device="h100-sxm").cluster.levels == load_cluster("h100-sxm").levels


def test_a_fabric_wider_than_the_node_is_as_wide_as_seen(tmp_path: Path) -> None:
    tray = hgx(name="NVIDIA GB200", size=4, nics=4)
    assert describe(tray, num_nodes=18).cluster.levels == load_cluster("gb200-nvl72:18x4").levels
    half = describe(replace(tray, devices_per_domain=36), num_nodes=18)
    assert half.cluster.levels[0].num_devices == 36
    written(half, tmp_path)


# NICs


def test_nics_for_storage_and_logins_are_not_those_of_training() -> None:
    seen = hgx()
    storage = ObservedNic(name="mlx5_8", kind="infiniband", bytes_per_s=50e9)
    far = tuple(ObservedLink(a=at, nic="mlx5_8", path="system") for at in range(8))
    assert len(training_nics(replace(seen, nics=(*seen.nics, storage), links=(*seen.links, *far)))) == 8
    ethernet_only = replace(seen, nics=seen.nics[-1:])
    assert [nic.name for nic in training_nics(ethernet_only)] == ["eth0"]


def test_the_network_is_what_was_seen_over_the_shipped_kind(tmp_path: Path) -> None:
    assert describe(hgx(kind="efa", nics=8)).cluster.sources[1].endswith("aws-p5")
    roce = describe(hgx(kind="roce", nics=4, gbit_per_s=200))
    network = roce.cluster.network
    assert (network.kind, network.nics_per_device, network.nic_bytes_per_s) == ("roce", 0.5, 25e9)
    assert network.efficiency == load_cluster("mi300x").network.efficiency
    assert network.tiers == load_cluster("h100-sxm").network.tiers
    assert roce.remarks["network.nic_bytes_per_s"].startswith("nominal")
    written(roce, tmp_path)


def test_a_slow_and_a_dead_nic_are_named(tmp_path: Path) -> None:
    seen = hgx()
    slow, dead = replace(seen.nics[2], bytes_per_s=25e9), replace(seen.nics[5], bytes_per_s=0.0)
    found = described(replace(seen, nics=(*seen.nics[:2], slow, *seen.nics[3:5], dead, *seen.nics[6:])))
    assert found.warnings[0] == "mlx5_2 has 200 Gb/s where others have 400"
    assert found.warnings[1].startswith("mlx5_5 is down")
    assert found.cluster.network.nics_per_device == 7 / 8
    assert found.cluster.faults == (Fault(part="nic", rate_share=0.5, node=0, index=2),)
    written(found, tmp_path)


# Devices


def test_a_device_that_is_not_shipped_is_a_table_with_a_stand_in(tmp_path: Path) -> None:
    seen = hgx(name="NVIDIA H100 CNX")
    devices = tuple(replace(device, memory_bytes=round(95 * GIB), host_bytes_per_s=63e9) for device in seen.devices)
    found = describe(replace(seen, devices=devices))
    device = found.cluster.device
    assert (device.name, device.generation) == ("NVIDIA H100 CNX", "hopper")
    assert (device.visible_memory_bytes, device.host_link_bytes_per_s) == (95 * GIB, 63e9)
    assert "figures of h100-96g-500w are used, correct [device]" in found.warnings[0]
    text = cluster_toml(found.cluster, found.remarks)
    assert "tdp_w = 500.0  # of h100-96g-500w: correct it" in text
    assert "visible_memory_gib = 95.0\n" in text
    written(found, tmp_path)
    assert "figures of h100-sxm are used" in describe(hgx(name="NVIDIA H100 CNX")).warnings[0]
    assert "figures of h20 are used" in describe(hgx(name="NVIDIA H20-3e")).warnings[0]
    card = hgx(name="NVIDIA H100 CNX", num_links=0)
    devices = tuple(replace(device, memory_bytes=round(79.1 * GIB)) for device in card.devices)
    assert "figures of h100-pcie are used" in describe(replace(card, devices=devices)).warnings[0]
    # Nothing says how much memory it has.
    for name, alike in (
        ("H100 CNX", "h100-pcie"),
        ("GH100 [H100 PCIe]", "h100-pcie"),
        ("GH100 [H100 NVL]", "h100-nvl"),
    ):
        assert f"figures of {alike} are used" in describe(hgx(name=name, num_links=0)).warnings[0]


@pytest.mark.parametrize(
    ("name", "device", "says"),
    [
        ("", "", "does not say which devices these are: pass --device"),
        ("NVIDIA A100-SXM", "", "may be a100-sxm or a100-sxm-40: pass --device"),
        ("Gaudi3", "", "nothing is known about 'Gaudi3': pass --device"),
        ("", "h101", "--device 'h101' is not built in: known: a10, a100-pcie"),
    ],
)
def test_a_device_that_cannot_be_told_is_one_line(name: str, device: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        describe(hgx(name=name), device=device)
    assert says in str(caught.value)


# Several sources


def test_the_first_source_is_believed_and_the_next_fill_in() -> None:
    first = replace(hgx(source="nvidia-smi topo -m", num_links=18), nics=())
    named = ObservedNic(name="mlx5_0", kind="infiniband", bytes_per_s=50e9)
    second = ObservedNode(
        source="NCCL topology XML",
        devices=(ObservedDevice(index=5, architecture="sm_90", pci="0000:00:00.0", numa=1),),
        nics=(named,),
        links=(ObservedLink(a=5, nic="mlx5_0", path="switch"),),
        num_sockets=2,
    )
    node, says = merge([first, second])
    assert says == ["NCCL topology XML says 1 devices, not 8: nvidia-smi topo -m is used"]
    assert node.devices[0].architecture == "sm_90"  # by its PCI address, though counted otherwise
    assert (node.devices[0].numa, node.num_sockets, node.nics) == (1, 2, (named,))
    assert len(node.devices) == 8


def test_contradictions_of_links_and_nics_are_reported() -> None:
    first, second = hgx(source="NVML"), hgx(source="nvidia-smi topo -m", num_links=17, gbit_per_s=200)
    node, says = merge([first, second])
    assert node.links == first.links
    assert len(says) == 1
    assert says[0].startswith("nvidia-smi topo -m says ")
    assert says[0].endswith("more: NVML is used")


@settings(max_examples=25)
@given(st.permutations(range(4)))
def test_a_node_is_the_same_however_a_second_source_counts_its_devices(order: list[int]) -> None:
    node = hgx(size=4, nics=4)
    moved = replace(
        node,
        source="other",
        devices=tuple(replace(device, index=order[device.index]) for device in node.devices),
        links=tuple(replace(link, a=order[link.a], b=None if link.b is None else order[link.b]) for link in node.links),
    )
    merged, says = merge([node, moved])
    assert says == []
    assert replace(merged, source=node.source) == node


# This machine


def gpus(sys: Path) -> ObservedNode:
    """Two GPUs of a recorded tree, joined to switches by 18 links each."""
    for at, bus in enumerate(("17", "a3")):
        place = gpu_place(sys, bus)
        write(place / "max_link_speed", "32.0 GT/s PCIe")
        write(place / "current_link_width", "16" if at == 0 else "8")
        write(sys / f"devices/system/cpu/cpu{at}/topology/physical_package_id", str(at))
    found = [Gpu(pci=f"0000:{bus}:03.0", name="NVIDIA H100 80GB HBM3", memory_bytes=85e9) for bus in ("17", "a3")]
    links = {(at, at): GpuLink(kind="nvlink", num_links=18) for at in (0, 1)}
    return local.observe(sys, found, links, "NVML and sysfs")


def test_a_node_with_gpus_is_read_from_its_kernel(tmp_path: Path) -> None:
    seen = gpus(node(tmp_path, buses=("17", "a3")))
    assert [device.name for device in seen.devices] == ["h100-sxm", "h100-sxm"]
    assert [device.numa for device in seen.devices] == [0, 1]
    assert [round((device.host_bytes_per_s or 0) / 1e9, 1) for device in seen.devices] == [63.0, 31.5]
    assert {nic.name: nic.bytes_per_s for nic in seen.nics} == {"mlx5_0": 50e9, "eth0": 3.125e9}
    paths = {(link.a, link.b, link.nic): (link.path, link.num_links) for link in seen.links}
    assert paths[0, 1, ""] == ("fabric", 18)
    assert paths[0, None, "mlx5_0"][0] == "switch"
    assert paths[1, None, "mlx5_0"][0] == "system"
    assert seen.num_sockets == 2
    found = describe(seen)
    assert found.cluster.network.nics_per_device == 0.5
    assert found.cluster.levels[0].num_devices == 2


def test_a_nic_whose_link_is_down_is_seen_as_such(tmp_path: Path) -> None:
    seen = gpus(node(tmp_path, buses=("17", "a3"), state="1: DOWN"))
    assert seen.nics[0].bytes_per_s == 0
    found = described(seen)
    assert found.warnings[0].partition(": ")[2].startswith("mlx5_0 is down")
    assert found.cluster.network.kind == "ethernet"


def test_tools_that_fail_or_say_nonsense_are_left_out(tmp_path: Path) -> None:
    def parse(text: str) -> ObservedNode:
        raise InputError(f"line 1: {text.strip()}")

    tools = {
        ("no-such-tool-of-autoplan",): parse,
        (sys.executable, "-c", "print('what?')"): parse,
        (sys.executable, "-c", "import sys; sys.exit('no device')"): parse,
    }
    seen, troubles = local.see(tmp_path, tools)
    assert len(seen) == 1
    assert troubles[0].endswith("is left out: line 1: what?")
    assert troubles[1].endswith("is left out: it ended with status 1 no device")


def test_cores_are_no_devices_where_gpus_are_seen_that_nothing_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node where nvidia-ml-py is not installed."""
    monkeypatch.setattr(local, "nvidia_gpus", lambda: ([], {}))
    tools = {(sys.executable, "-c", f"print({matrix(8, 'NV18')!r})"): nvidia_smi.parse}
    seen, troubles = local.see(tmp_path, tools)
    assert troubles == ["NVML was not asked, which names the devices: pip install nvidia-ml-py"]
    found = merge_all([Report(host="gpu1", seen=tuple(seen), troubles=tuple(troubles))])
    with pytest.raises(InputError, match="does not say which devices these are: pass --device"):
        describe_all(found)
    described = describe_all(found, device="h100-sxm")
    assert (described.cluster.device.name, described.cluster.num_devices) == ("h100-sxm", 8)
    assert f"gpu1: {troubles[0]}" in described.warnings


# Allocations


def test_the_switches_of_a_node_are_those_that_slurm_names() -> None:
    # As a step of a job saw it on Belenos of Meteo-France.
    address = {
        "SLURM_TOPOLOGY_ADDR": "root_switch.CELL1.iswi1r4s0c1l1.belenos386",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.switch.node",
    }
    assert switches_above(address) == ("iswi1r4s0c1l1", "CELL1")
    flat = {"SLURM_TOPOLOGY_ADDR": "GPU71E4", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    assert switches_above(flat) == switches_above({}) == ()
    assert job_hosts({"SLURM_JOB_NODELIST": "gpu[1-2],x"}) == ("gpu1", "gpu2", "x")


SCONTROL = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[001-004]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu[005-007]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=gpu[008-009]
SwitchName=pod1 Level=1 LinkSpeed=1 Nodes=gpu[001-007] Switches=leaf[1-2]
SwitchName=pod2 Level=1 LinkSpeed=1 Nodes=gpu[008-009] Switches=leaf3
SwitchName=core Level=2 LinkSpeed=1 Nodes=gpu[001-009] Switches=pod[1-2]
"""


def test_an_allocation_is_put_on_the_switches_of_slurm(tmp_path: Path) -> None:
    hosts = ("gpu003", "gpu004", "gpu006", "gpu008")
    tree = parse_switches(SCONTROL)
    found = describe_all(merge_all([Report(host=host, seen=(hgx(host),)) for host in hosts]), tree=tree)
    assert found.cluster.num_nodes == 4
    assert found.cluster.nodes == (
        NodeGroup(names=("gpu003", "gpu004"), switches=("leaf1", "pod1")),
        NodeGroup(names=("gpu006",), switches=("leaf2", "pod1")),
        NodeGroup(names=("gpu008",), switches=("leaf3", "pod2")),
    )
    assert [tier.num_nodes for tier in found.cluster.network.tiers] == [4, 8]
    assert found.remarks["network.tiers[0].oversubscription"].startswith("assumed")
    written(found, tmp_path)


def test_a_job_reads_the_file_beside_slurms_own(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text("SwitchName=s1 Nodes=n[1-2]\nSwitchName=s2 Nodes=n[3-4]\n")
    job = {"SLURM_JOB_ID": "7", "SLURM_CONF": str(tmp_path / "slurm.conf")}
    tree = local.switch_tree(job)
    assert tree is not None
    assert tree.of(["n3"]) == (NodeGroup(names=("n3",), switches=("s2",)),)
    assert local.switch_tree({"SLURM_CONF": job["SLURM_CONF"]}) is None


def test_switches_come_from_the_steps_where_nothing_else_tells(tmp_path: Path) -> None:
    reports = [
        Report(host=host, switches=(leaf, "pod"), seen=(hgx(host),))
        for host, leaf in (("a1", "leaf1"), ("a2", "leaf1"), ("b1", "leaf2"))
    ]
    found = describe_all(merge_all(reports))
    assert [group.switches for group in found.cluster.nodes] == [("leaf1", "pod"), ("leaf2", "pod")]
    assert [tier.num_nodes for tier in found.cluster.network.tiers] == [2, 4]
    written(found, tmp_path)


def test_a_batch_script_knows_its_nodes_and_sees_one() -> None:
    found = describe_all(merge_all([Report(host="n1", seen=(hgx("n1"),))]), hosts=("n1", "n2", "n3"))
    assert found.cluster.nodes == (NodeGroup(names=("n1", "n2", "n3")),)
    assert found.warnings == ("1 of 3 nodes were seen; the others are assumed to be identical",)
    alone = describe_all(merge_all([Report(host="n1", seen=(hgx("n1"),))]), num_nodes=3)
    assert (alone.cluster.num_nodes, alone.cluster.nodes) == (3, ())


def test_nodes_unlike_the_others_are_named(tmp_path: Path) -> None:
    whole = hgx("n1")
    short = hgx("n2", size=7, nics=8)
    slow = replace(hgx("n3"), nics=(replace(whole.nics[0], bytes_per_s=25e9), *whole.nics[1:]))
    dead = replace(hgx("n4"), nics=(replace(whole.nics[0], bytes_per_s=0.0), *whole.nics[2:]))
    reports = [Report(host=node.host, seen=(node,)) for node in (short, slow, dead, whole, hgx("n5"))]
    found = describe_all(merge_all(reports))
    assert found.cluster.devices_per_node == 8
    assert found.warnings == (
        "n2: 7 devices where others have 8: leave the node out",
        "n3: mlx5_0 has 200 Gb/s where others have 400",
        "n4: mlx5_1 is missing: repair the node or leave it out",
        "n4: mlx5_0 is down: repair the node or leave it out, if that adapter is for training",
    )
    assert found.cluster.faults == (Fault(part="nic", rate_share=0.5, node="n3", index=0),)
    written(found, tmp_path)


def test_what_has_no_host_tells_of_every_node() -> None:
    rates = ObservedNode(source="ibstat", nics=(ObservedNic(name="mlx5_9", kind="infiniband", bytes_per_s=50e9),))
    found = merge_all([Report(host=name, seen=(hgx(name),)) for name in "ab"] + [Report(seen=(rates,))])
    assert [sum(nic.name == "mlx5_9" for nic in node.nics) for node in found.nodes.values()] == [1, 1]


# Measured links


def timing(operation: Operation, members: int, inside: int, groups: int, size: float, seconds: float) -> Measurement:
    shape = (members, inside, groups, round(size))
    return Measurement(operation=operation, shape=shape, dtype="bf16", device="h100-sxm", seconds=seconds)


def test_measured_links_count_before_nominal_ones(tmp_path: Path) -> None:
    cluster = load_cluster("h100-sxm:2x8")
    # An all-reduce of 8 moves 7/4 of the buffer over each device's links: 1 GiB at 360 GB/s, 8 bytes in 28 us.
    inside = [
        timing("all_reduce", 8, 8, 1, GIB, 1.75 * GIB / 360e9),
        timing("all_reduce", 8, 8, 1, 8, 28e-6),
        timing("all_reduce", 4, 4, 2, GIB, 1.0),  # of fewer devices: not the level's
    ]
    # An all-gather between 2 nodes moves half of the buffer: 64 MiB at 40 GB/s.
    between = [
        timing("all_gather", 2, 1, 8, 64 * MIB, 32 * MIB / 40e9),
        timing("all_gather", 2, 1, 8, 1024, 30e-6),
    ]
    measured, remarks = with_measured(cluster, [*inside, *between])
    level, network = measured.levels[0], measured.network
    assert level.efficiency == pytest.approx(360 / 450)
    assert level.latency_s == pytest.approx(2e-6)
    assert level.bandwidth_bytes_per_s == 450e9
    assert level.collectives is None
    assert network.nic_bytes_per_s * network.nics_per_device * network.efficiency == pytest.approx(40e9)
    assert network.latency_s == pytest.approx(30e-6)
    assert remarks["levels[0].efficiency"] == "measured: all_reduce of 8 devices, up to 1,024 MiB"
    written(Description(cluster=measured, remarks=remarks), tmp_path)


def test_links_that_were_not_measured_stay_nominal() -> None:
    cluster = load_cluster("h100-sxm:2x8")
    small = [timing("all_reduce", 8, 8, 1, size, 1e-4) for size in (8, MIB)]
    assert with_measured(cluster, small) == (cluster, {})
    assert with_measured(cluster, []) == (cluster, {})


def test_a_link_faster_than_its_nominal_rate_has_the_measured_one() -> None:
    cluster = load_cluster("h100-sxm:2x8")
    fast = [
        timing("all_gather", 8, 8, 1, GIB, 7 / 8 * GIB / 500e9),
        timing("all_gather", 8, 8, 1, 8, 7e-6),
    ]
    level = with_measured(cluster, fast)[0].levels[0]
    assert level.bandwidth_bytes_per_s * level.efficiency == pytest.approx(500e9)


# Files


def matrix(size: int, cell: str) -> str:
    """As `nvidia-smi topo -m` prints it."""
    rows = ["\t" + "\t".join(f"GPU{at}" for at in range(size))]
    rows += [f"GPU{a}\t" + "\t".join(" X " if a == b else cell for b in range(size)) for a in range(size)]
    return "\n".join(rows) + "\n"


def test_formats_are_recognised_by_their_content(tmp_path: Path) -> None:
    texts = {
        "nvidia-smi": matrix(2, "NV18"),
        "nccl-xml": '<system version="1">\n',
        "hwloc": '<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0">\n',
        "rocm-smi": "=== ROCm System Management Interface ===\n=== Weight between two GPUs ===\n       GPU0   GPU1\n",
        "adapters": "CA 'mlx5_0'\n\tCA type: MT4129\n",
        "slurm": SCONTROL,
        "autoplan": report.encode(ReportFile(nodes=(Report(host="a", seen=(hgx("a"),)),))),
        "": "hello\n",
    }
    assert {name: report.recognise(text) for name, text in texts.items()} == {name: name for name in texts}


def test_a_report_reads_back_as_it_was(tmp_path: Path) -> None:
    reports = ReportFile(nodes=(Report(host="a", switches=("leaf1",), seen=(hgx("a"),), troubles=("no tool",)),))
    path = tmp_path / "seen.json"
    path.write_text(report.encode(reports))
    assert read_source(path) == ("autoplan", reports)
    path.write_text(report.encode(reports).replace("no tool", "\\u001b[31m"))
    with pytest.raises(InputError, match=r"seen.json: is no report of autoplan discover: it holds control characters"):
        read_source(path)


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `autoplan` as typed in a folder: exit status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["autoplan", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    return run


def test_saved_files_of_another_machine_become_a_cluster(
    tmp_path: Path, typed: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "topo.txt").write_text(matrix(8, "NV18"))
    flags = ("discover", "--from", "topo.txt", "--device", "h100-sxm", "--out", "c.toml")
    status, out, err = typed(*flags, "--nodes", "4", "--name", "lab")
    assert (status, out) == (0, "")
    assert "8 x h100-sxm" in err
    cluster = load_cluster(str(tmp_path / "c.toml"))
    assert (cluster.name, cluster.num_nodes, cluster.levels) == ("lab", 4, load_cluster("h100-sxm:4x8").levels)
    status, _, err = typed(*flags)
    assert status == 1
    assert "c.toml exists" in err


def test_nodes_without_a_name_are_all_those_of_the_switches_or_fill_them_in_order() -> None:
    tree = parse_switches("SwitchName=a Level=0 Nodes=n[1-4]\nSwitchName=b Level=0 Nodes=n[5-8]\n")
    seen = merge_all([Report(seen=(hgx(),))])
    every = describe_all(seen, tree=tree).cluster
    assert every.num_nodes == 8
    assert [(len(group.names), group.switches) for group in every.nodes] == [(4, ("a",)), (4, ("b",))]
    partial = describe_all(seen, tree=tree, num_nodes=6)
    assert (partial.cluster.num_nodes, partial.cluster.nodes) == (6, ())
    assert [tier.num_nodes for tier in partial.cluster.network.tiers] == [4]
    assert "it is unknown which of the 8 nodes in Slurm's topology are meant" in partial.warnings[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--from", "none.txt"), "none.txt: cannot be read"),
        (("--from", "hello.txt"), "hello.txt: of no format that is known: pass --format with one of autoplan, nccl"),
        (("--from", "bad.txt"), "bad.txt: line 3"),
        (("--from", "bad.txt", "--format", "png"), "--format 'png' is unknown"),
        (("--from", "slurm.txt"), "--from: no file tells of a node"),
        (("--from", "good.txt"), "does not say which devices these are: pass --device"),
        (("--from", "good.txt", "--device", "h100-sxm", "--name", " "), "name must be printable text and not empty"),
        (("--nodes", "-1"), "--nodes must be at least 1, got -1"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, typed: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "hello.txt").write_text("hello\n")
    (tmp_path / "good.txt").write_text(matrix(2, "NV18"))
    (tmp_path / "bad.txt").write_text(matrix(2, "NV18").replace("NV18", "NVX", 2).replace("NVX", "NV18", 1))
    (tmp_path / "slurm.txt").write_text(SCONTROL)
    status, out, err = typed("discover", *arguments)
    assert (status, out) == (1, "")
    assert says in err
    assert err.count("\n") == 1


def test_this_machine_becomes_a_cluster_that_a_search_accepts(
    tmp_path: Path, typed: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "small.toml").write_text(SMALL_TOML)
    assert typed("discover", "--json", "--out", "seen.json")[0] == 0
    assert typed("discover", "--from", "seen.json", "--out", "c.toml")[0] == 0
    place = ("--cluster", "c.toml", "--global-batch", "4", "--seq-len", "32")
    assert typed("search", "small.toml", *place, "--quiet")[0] == 0
    assert (tmp_path / "plan.json").exists()


@pytest.fixture
def fresh() -> Iterator[None]:
    """This machine is looked at again."""
    local_cluster.cache_clear()
    yield
    local_cluster.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_cluster_local_is_what_is_discovered_here(tmp_path: Path, typed: Callable[..., tuple[int, str, str]]) -> None:
    (tmp_path / "small.toml").write_text(SMALL_TOML)
    assert typed("discover", "--out", "c.toml")[0] == 0
    flags = ("search", "small.toml", "--cluster", "local", "--global-batch", "4", "--seq-len", "32")
    status, _, err = typed(*flags)
    assert status == 0, err
    file = decode(PlanFile, read_table(tmp_path / "plan.json"), "plan.json")
    assert file.cluster == load_cluster("c.toml")
    assert (file.cluster.device.vendor == "cpu") == ("cluster local uses CPU cores as devices" in err)
    local_cluster.cache_clear()
    assert typed(*flags, "--quiet", "--force")[2] == ""
    status, out, _ = typed("topo", "local")
    assert (status, out.partition(":")[0]) == (0, file.cluster.name)


@pytest.mark.usefixtures("fresh")
def test_cluster_local_says_what_to_do_where_it_cannot_be_told(
    typed: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    nameless = Report(seen=(nvidia_smi.parse(matrix(8, "NV18")),))
    with monkeypatch.context() as patch:
        patch.setattr("autoplan.api.discovery.observed_here", lambda: ([nameless], None))
        status, _, err = typed("topo", "local")
    assert (status, err.count("\n")) == (1, 1)
    assert "pass --device, such as" in err
    assert err.endswith("to autoplan discover --out FILE, and give that file\n")
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    status, _, err = typed("topo", "local")
    assert status == 1
    assert "torchrun has started 2 ranks: let them run autoplan discover --out cluster.toml" in err


def test_the_database_is_asked_for_the_machine_of_the_file(
    tmp_path: Path, typed: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "topo.txt").write_text(matrix(8, "NV18"))
    machines = [Fingerprint(device="h100-sxm", torch="2.13.0", topology=topology) for topology in ("mine", "another")]
    with open_store(str(tmp_path / "lab.db")) as store:
        for machine, gb_per_s in zip(machines, (360, 300), strict=True):  # the other one is measured last
            shapes = (((8, 8, 1, GIB), 1.75 * GIB / gb_per_s / 1e9), ((8, 8, 1, 1024), 28e-6))
            tests = [
                Record(fingerprint=machine, operation="all_reduce", shape=shape, dtype="bf16", samples_s=(seconds,))
                for shape, seconds in shapes
            ]
            assert store.add(tests).quarantined == 0
    flags = ("discover", "--from", "topo.txt", "--device", "h100-sxm", "--db", "lab.db", "--out", "c.toml")
    status, _, err = typed(*flags)
    assert status == 0
    assert "measured: all_reduce of 8 devices" in err
    last = load_cluster(str(tmp_path / "c.toml"))
    assert last.levels[0].efficiency == pytest.approx(300 / 450)
    mine = replace(last, machine=MachineSpec(torch="2.13.0", topology="mine"))
    (tmp_path / "mine.toml").write_text(cluster_toml(mine, {}))
    mine = load_cluster(str(tmp_path / "mine.toml"))
    taken = stored_timings(mine, str(tmp_path / "lab.db"), ["all_reduce"])
    assert max(measured.seconds for measured in taken.measurements) == pytest.approx(1.75 * GIB / 360e9)


def test_the_ranks_of_a_job_meet_and_rank_0_hears_of_every_node() -> None:
    pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting_point = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    places = [RankPlace(rank=rank, num_ranks=3, meeting_point=meeting_point, launcher="torchrun") for rank in range(3)]
    here, _ = local.see(tools={})
    reports = [Report(host=host, seen=(replace(here[0], host=host),)) for host in ("gpu1", "gpu2")]
    with ThreadPoolExecutor() as pool:  # the second rank of the first node has nothing to say
        heard = list(pool.map(gather, places, (reports[0], None, reports[1])))
    assert heard == [reports, None, None]
    assert describe_all(merge_all(reports)).cluster.nodes == (NodeGroup(names=("gpu1", "gpu2")),)


def test_discovery_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_text(matrix(8, "NV18"))
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['psutil'] = None\n"
        "from autoplan.cli import main\n"
        "sys.argv = ['autoplan', 'discover', '--from', 'topo.txt', '--device', 'h100-sxm']\n"
        "main()\n"
        "from autoplan.profiler.discover.local import see\n"
        "see()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
