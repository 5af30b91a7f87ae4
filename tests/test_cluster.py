"""Does every name of a cluster lead to the machine that it means, or to one line that says why not?"""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.files import read_table, shipped
from autoplan.readers.cluster import cluster_schema, load_cluster, preset_clusters
from autoplan.readers.device import preset_devices
from autoplan.topology.cluster import MAX_DEVICES, ClusterSpec, DeviceSpec, HostSpec, LinkLevel, NetworkSpec
from autoplan.topology.levels import compile_topology

TOML = """
name = "lab"
device = "h100-sxm"
num_nodes = 4
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
"""


def device_called(name: str, tmp_path: Path) -> DeviceSpec:
    path = tmp_path / "lab.toml"
    path.write_text(TOML.replace("h100-sxm", name))
    return load_cluster(str(path)).device


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        load_cluster(text)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_clusters())
def test_every_shipped_cluster_loads_with_its_sources(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.num_nodes == 1
    assert cluster.sources
    assert cluster.levels[-1].num_devices >= cluster.devices_per_node
    assert cluster.device.visible_memory_bytes <= cluster.device.memory_bytes


@pytest.mark.parametrize("name", preset_clusters())
def test_every_shipped_cluster_takes_a_size_and_compiles(name: str) -> None:
    node = load_cluster(name).devices_per_node
    cluster = load_cluster(f"{name}:3x{node}")
    assert cluster.num_devices == 3 * node
    assert compile_topology(cluster).levels[-1].num_devices == 3 * node


@pytest.mark.parametrize("name", preset_devices())
def test_every_shipped_device_loads_with_plausible_rates(name: str, tmp_path: Path) -> None:
    device = device_called(name, tmp_path)
    assert device.sources
    peak = device.peak_flops_per_s
    wide = peak.get("bf16", peak.get("fp16", 0.0))
    assert peak.get("fp8", wide) >= wide
    assert peak.get("fp32", wide) <= wide
    assert 1e9 < device.memory_bandwidth_bytes_per_s < 1e14
    assert device.host_link_bytes_per_s < device.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize("name", [name for name in preset_clusters() if load_cluster(name).levels[0].kind != "pcie"])
def test_inner_links_of_shipped_clusters_are_at_least_as_fast_as_outer_ones(name: str) -> None:
    # PCIe boxes without peer access are slower inside than between nodes.
    levels = compile_topology(load_cluster(f"{name}:500x{load_cluster(name).devices_per_node}")).levels
    rates = [level.bytes_per_s for level in levels]
    assert rates == sorted(rates, reverse=True)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_size_gives_nodes_and_devices_per_node() -> None:
    cluster = load_cluster("h100-sxm:16x8")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_devices) == (16, 8, 128)
    assert [level.num_devices for level in cluster.levels] == [8]


@pytest.mark.parametrize("devices", [1, 2, 4, 16])
def test_a_node_of_another_size_is_joined_by_the_link_of_the_node(devices: int) -> None:
    cluster = load_cluster(f"h100-sxm:4x{devices}")
    assert [level.num_devices for level in cluster.levels] == [devices]
    assert cluster.levels[0].bandwidth_bytes_per_s == load_cluster("h100-sxm").levels[0].bandwidth_bytes_per_s


@pytest.mark.parametrize("size", ["18x4", "9x8", "1x2", "36x2"])
def test_a_rack_wide_link_stays_as_wide_as_it_is(size: str) -> None:
    assert [level.num_devices for level in load_cluster(f"gb200-nvl72:{size}").levels] == [72]


@pytest.mark.parametrize("name", preset_clusters())
def test_every_shipped_cluster_takes_every_size_of_node(name: str) -> None:
    most = load_cluster(name).levels[-1].num_devices
    for devices in range(1, most + 1):
        cluster = load_cluster(f"{name}:6x{devices}")
        assert compile_topology(cluster).levels[-1].num_devices == 6 * devices


@pytest.mark.parametrize(("size", "sizes"), [("2x3", [3]), ("2x6", [2, 6]), ("2x2", [2]), ("2x8", [2, 8])])
def test_an_inner_link_stays_where_it_divides_the_node(size: str, sizes: list[int]) -> None:
    assert [level.num_devices for level in load_cluster(f"frontier:{size}").levels] == sizes


@pytest.mark.parametrize(("devices", "joined"), [(5, 70), (16, 64), (36, 72), (40, 40)])
def test_a_rack_wide_link_joins_whole_nodes(devices: int, joined: int) -> None:
    assert [level.num_devices for level in load_cluster(f"gb200-nvl72:2x{devices}").levels] == [joined]


def test_racks_are_the_nodes_that_they_are_built_of() -> None:
    assert load_cluster("gb200-nvl72:4x72") == load_cluster("gb200-nvl72:72x4")


def test_a_node_wider_than_its_rack_wide_link_is_refused() -> None:
    assert "72" in refusal("gb200-nvl72:1x100")


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_node_of_paired_dies_takes_every_smaller_size(devices: int) -> None:
    cluster = load_cluster(f"frontier:2x{devices}")
    assert cluster.levels[-1].num_devices == devices


@pytest.mark.parametrize(
    "text",
    ["h100-sxm:0x8", "h100-sxm:8x0", "h100-sxm:-1x8", "h100-sxm:1x-8", "h100-sxm:9999999x8", "h100-sxm:2x2000"],
)
def test_a_size_out_of_range_is_refused_with_what_was_typed(text: str) -> None:
    assert text in refusal(text)


def test_more_devices_than_the_limit_are_refused() -> None:
    assert str(MAX_DEVICES) in refusal("h100-sxm:500000x8")


@pytest.mark.parametrize("text", ["h100-sxm:16x", "h100-sxm:x8", "h100-sxm:1.5x8", "h100-sxm:2x4x2", ""])
def test_a_malformed_size_is_refused_with_an_example(text: str) -> None:
    assert "h100-sxm:16x8" in refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 300,
        "h100-sxm:" + "9" * 5000 + "x8",
        "h100-sxm:" + "9" * 100 + "x8",
    ],
    ids=["name", "many digits", "digits"],
)
def test_a_name_of_absurd_length_is_refused(text: str) -> None:
    refusal(text)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"(h100-sxm|frontier|local):-?\d{1,8}x-?\d{1,8}", fullmatch=True))
def test_any_text_is_a_cluster_or_one_line(text: str) -> None:
    said = ""
    try:
        assert load_cluster(text).num_devices >= 1
    except InputError as error:
        said = str(error)
    assert "\n" not in said


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_name_may_have_blanks() -> None:
    assert load_cluster("RTX 4090:1x8") == load_cluster("rtx-4090:1x8")


def test_an_unknown_cluster_is_refused_with_the_nearest_names() -> None:
    assert refusal("gaudi9:1x8").endswith("autoplan new cluster writes a template for your own")
    assert "did you mean h100-sxm, h100-nvl, h100-pcie?" in refusal("h100-sxn:2x8")


def test_an_unknown_device_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown device 'h100-sxm5'.*h100-sxm"):
        device_called("h100-sxm5", tmp_path)


def test_a_cluster_file_may_name_a_shipped_device(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(TOML)
    cluster = load_cluster(str(path))
    assert cluster.device == load_cluster("h100-sxm").device
    assert cluster.num_devices == 32


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"h100-sxm"', '"h100-sxm5"', "unknown device"),
        ('"h100-sxm"', "5", "device"),
        ("num_nodes = 4", "num_nodes = 4.5", "num_nodes"),
        ("num_devices = 8", "num_devices = 4", "joins 4 devices, a node has 8"),
        ("num_devices = 8", "num_devices = 12", "joins 12 devices, a node has 8"),
        ('name = "lab"', 'name = ""', "name must be printable"),
        ('name = "lab"', 'name = "a\\nb"', "name must be printable"),
        ('name = "nvlink"', 'name = " "', "name must be printable"),
        ("gb_per_s = 450.0", "gb_per_s = -300", "bandwidth_gb_per_s must be a positive finite number, got -300 in"),
        ("latency_us = 1.0", "latency_us = 0", "latency_us must be a positive finite number, got 0"),
        ("latency_us = 1.0", "latency_s = -1e-6", "latency_s must be a positive finite number, got -1e-06"),
        ("nic_gb_per_s = 50.0", "nic_gb_per_s = -1", "nic_gb_per_s must be a positive finite number, got -1"),
        ("[network]", "[[network.tiers]]\nnum_nodes = 4\noversubscription = 0.5\n[network]", "oversubscription"),
        ("[network]", "[network]\nnics = 4", "nics"),
    ],
)
def test_a_wrong_cluster_file_is_refused_with_its_path(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(TOML.replace(old, new))
    message = refusal(str(path))
    assert str(path) in message
    assert says in message


# -- the dataclasses --------------------------------------------------------------------------------------------------


def lab(**changes: Any) -> ClusterSpec:
    return dataclasses.replace(load_cluster("frontier"), **changes)


def link(num_devices: int) -> LinkLevel:
    return LinkLevel(name="l", kind="xgmi", num_devices=num_devices, bandwidth_bytes_per_s=1e9, latency_s=1e-6)


@pytest.mark.parametrize("sizes", [(), (8, 2), (8, 8), (4,), (2, 4)])
def test_levels_must_grow_until_they_join_the_node(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="level"):
        lab(levels=tuple(link(size) for size in sizes))


@pytest.mark.parametrize(
    ("sizes", "devices"), [((12,), 8), ((8,), 3), ((2, 3), 3), ((3, 8), 8), ((3, 72), 4), ((4, 6, 12), 12)]
)
def test_a_level_that_cuts_a_node_or_an_inner_level_is_refused(sizes: tuple[int, ...], devices: int) -> None:
    with pytest.raises(InputError, match="level"):
        lab(levels=tuple(link(size) for size in sizes), devices_per_node=devices)


@pytest.mark.parametrize(("sizes", "devices"), [((8,), 8), ((72,), 4), ((2, 8), 8), ((2, 4, 72), 4), ((2, 8), 2)])
def test_levels_that_nest_are_accepted(sizes: tuple[int, ...], devices: int) -> None:
    assert len(lab(levels=tuple(link(size) for size in sizes), devices_per_node=devices).levels) == len(sizes)


def test_a_price_must_be_positive() -> None:
    assert lab(price_per_device_hour=2.5).price_per_device_hour == 2.5
    with pytest.raises(InputError, match="price_per_device_hour"):
        lab(price_per_device_hour=0.0)


def test_a_network_without_a_rate_is_refused() -> None:
    with pytest.raises(InputError, match="nic_bytes_per_s"):
        NetworkSpec(kind="ethernet", nic_bytes_per_s=0.0)


def test_a_host_needs_memory() -> None:
    with pytest.raises(InputError, match="memory_bytes"):
        HostSpec(memory_bytes=-1.0)


def test_a_cluster_file_without_num_nodes_is_one_node(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(TOML.replace("num_nodes = 4\n", ""))
    assert load_cluster(str(path)).num_nodes == 1
    assert "num_nodes" not in cluster_schema()["$defs"]["ClusterSpec"]["required"]


def test_the_schema_of_a_cluster_lets_it_name_a_shipped_device() -> None:
    device = cluster_schema()["$defs"]["ClusterSpec"]["properties"]["device"]
    assert "h100-sxm" in device["anyOf"][0]["enum"]


@pytest.mark.parametrize("key", ["num_sockets", "num_pcie_switches", "socket_gb_per_s"])
def test_a_host_has_no_negative_parts(tmp_path: Path, key: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML + f"\n[host]\n{key} = -1\n")
    with pytest.raises(InputError, match=key):
        load_cluster(str(path))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        *((word, "h100-sxm") for word in ("h100", "H100", "h100-80gb", "H100-SXM5-80GB", "dgx_h100")),
        ("h100-pcie", "h100-pcie"),
        ("a100-40gb", "a100-sxm-40"),
        ("RTX4090", "rtx-4090"),
        ("p5.48xlarge", "aws-p5"),
        ("gb200", "gb200-nvl72"),
    ],
)
def test_a_cluster_goes_by_its_common_names(word: str, name: str) -> None:
    assert load_cluster(f"{word}:4x8") == load_cluster(f"{name}:4x8")


def test_a_common_name_is_of_one_shipped_cluster() -> None:
    names = read_table(shipped()["cluster_names"])
    assert names.keys() <= set(preset_clusters())
    listed = [name for others in names.values() for name in others]
    assert len({*listed, *preset_clusters()}) == len(listed) + len(preset_clusters())


@pytest.mark.parametrize(
    ("word", "size"),
    [
        ("8xH100", "h100-sxm:1x8"),
        ("4x5090", "rtx-5090:1x4"),
        ("2x8x4090", "rtx-4090:2x8"),
        ("4090x2", "rtx-4090:1x2"),
        ("2x8xa100", "a100-sxm:2x8"),
        ("16x H100", "h100-sxm:2x8"),
        ("h100:8", "h100-sxm:1x8"),
        ("h100x32", "h100-sxm:4x8"),
        ("RTX 4090:2", "rtx-4090:1x2"),
    ],
)
def test_sizes_of_other_forms_are_told_as_they_are_written(word: str, size: str) -> None:
    with pytest.raises(InputError, match=f"write {size}"):
        load_cluster(word)


def test_a_device_has_a_number_of_nics_that_a_graph_can_hold() -> None:
    """Found by benchmarks/fuzz.py: the graph of a node has one vertex for every NIC."""
    network = load_cluster("h100-sxm").network
    with pytest.raises(InputError, match="nics_per_device must be at most 64"):
        replace(network, nics_per_device=4294967296.0)


def test_a_file_with_a_device_of_its_own_is_told_all_wrong_keys_at_once(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    device = '{name = "card", memory_gb = 24, bandwidth = 1008, peak_tflops = {bf16 = 165}}'
    path.write_text(f'name = "box"\ngpus_per_node = 8\ndevice = {device}\nhost = {{memory = 512}}\n')
    message = refusal(str(path))
    for wrong in (
        "'gpus_per_node' and missing devices_per_node",
        "memory needs a unit: write memory_gib = 512 in host",
        "'memory_gb' (memory_gib?), 'bandwidth'",
    ):
        assert wrong in message
    assert message.endswith(" and missing memory_gib, memory_bandwidth_gb_per_s in device")
