"""Does `autoplan topo` show a cluster as it is, on a terminal, as JSON and as a drawing?"""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.report.cluster import print_topology, rates_text, topology_json
from autoplan.report.cluster_drawing import MAX_DRAWN, WIDTH, draw
from autoplan.topology.cluster import ClusterSpec, Fault, SwitchTier, WanSpec
from autoplan.topology.components import Link
from autoplan.topology.graph import quotient
from commands import run

SVG = "{http://www.w3.org/2000/svg}"


def shown(cluster: ClusterSpec) -> list[str]:
    stream = io.StringIO()
    print_topology(Console(file=stream, width=100, highlight=False), cluster, quotient(cluster))
    return stream.getvalue().splitlines()


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def two_sites() -> ClusterSpec:
    base = load_cluster("h100-sxm:40x8")
    tiers = (SwitchTier(num_nodes=8, oversubscription=1.0), SwitchTier(name="pod", num_nodes=16, oversubscription=4.0))
    wan = WanSpec(nodes_per_site=32, bandwidth_bytes_per_s=12.5e9, latency_s=15e-3)
    return replace(base, network=replace(base.network, tiers=tiers), wan=wan)


def test_a_cluster_reads_as_a_tree_of_its_places() -> None:
    lines = shown(load_cluster("h100-sxm:64x8"))
    assert lines[:2] == ["h100-sxm: 64 x 8 h100-sxm = 512 devices", "12.0 TB/s between its halves, one direction"]
    tree = [line.lstrip("│├└─ \xa0") for line in lines[3:14]]
    assert tree == [
        "cluster of 64 nodes",
        "1 core",
        "2 x leaf of 32 nodes",
        "8 leaf switches: InfiniBand 1.50 of 1.60 TB/s up",
        "32 x node",
        "8 NICs: InfiniBand 47.0 of 50.0 GB/s, 14.0 us from node to node",
        "2 CPUs: between sockets 22.0 GB/s",
        "8 PCIe switches: PCIe 64.0 GB/s to the CPU",
        "8 h100-sxm",
        "nvlink: NVLink 360 of 450 GB/s, 8 joined, 1.1 us",
        "PCIe 64.0 GB/s to the PCIe switch",
    ]
    assert lines[-1].split() == ["infiniband", "512", "47.0", "GB/s", "14.0", "us"]


def test_sites_tiers_and_what_they_hold_back_are_told() -> None:
    text = "\n".join(shown(two_sites()))
    assert "1 core: WAN 12.5 GB/s up, 30.0 ms from site to site" not in text  # one way, not there and back
    assert "1 core: WAN 12.5 GB/s up, 15.0 ms from site to site" in text
    assert "1 pod switch: InfiniBand 1.50 of 1.60 TB/s up, 4:1 oversubscribed" in text
    assert "site of 8 nodes" in text
    assert text.count("8 x node") == 2
    assert "8 x node, as above" in text


@pytest.mark.parametrize("name", preset_clusters())
def test_every_preset_fits_on_a_screen_and_can_be_drawn(name: str) -> None:
    cluster = replace(load_cluster(name), num_nodes=64)
    assert len(shown(cluster)) <= 45
    svg = draw(cluster, quotient(cluster))
    assert any("64" in text for text in texts(svg))
    for box in ET.fromstring(svg).iter(f"{SVG}rect"):
        if not (box.get("width") or "").endswith("%"):
            assert float(box.get("x", 0)) >= 0
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= WIDTH


def test_faults_are_told_where_they_are() -> None:
    faults = (
        Fault(part="nic", node=3, index=2, rate_share=0.5),
        Fault(part="device", node=33, index=1, rate_share=0.9),
        Fault(part="uplink", switch="leaf 1", rate_share=0.75),
    )
    base = load_cluster("h100-sxm:64x8")
    cluster = replace(base, faults=faults, network=replace(base.network, sharp=True))
    lines = [line.lstrip("│├└─ \xa0") for line in shown(cluster)]
    assert "1 NIC: InfiniBand 23.5 of 50.0 GB/s, 14.0 us from node to node; 50 % because of a fault" in lines
    assert "1 h100-sxm; 90 % because of a fault" in lines
    assert "8 leaf switches: InfiniBand 1.50 of 1.60 TB/s up, reduces on the way (SHARP)" in lines
    assert any(line.startswith("8 leaf switches: InfiniBand 1.13 of 1.60 TB/s up") for line in lines)
    assert lines.count("31 x node, as above") + lines.count("31 x node") == 2
    assert "besides: 1 x node with faults" in texts(draw(cluster, quotient(cluster)))


def test_every_part_of_a_node_is_drawn_and_equal_nodes_once() -> None:
    svg = draw(two_sites(), quotient(two_sites()))
    words = texts(svg)
    assert words.count("7") == 3  # NIC, PCIe switch and device
    for text in ("site of 32 nodes", "2 x pod of 16 nodes", "2 x leaf of 8 nodes", "8 x node", "1 WAN", "nvlink"):
        assert text in words
    assert "besides: 1 x site of 8 nodes" in words
    assert "InfiniBand 1.50 of 1.60 TB/s each, 4:1" in words


def test_a_large_node_is_drawn_by_classes() -> None:
    cluster = load_cluster("h100-sxm:2x32")
    assert cluster.devices_per_node > MAX_DRAWN
    words = texts(draw(cluster, quotient(cluster)))
    assert words.count("x 32") == 2  # devices and NICs
    assert "31" not in words


def test_names_cannot_break_the_drawing() -> None:
    cluster = replace(load_cluster("h100-sxm:4x8"), name='</svg> & "lab" <script>')
    words = texts(draw(cluster, quotient(cluster)))
    assert words[0].startswith('</svg> & "lab" <script>: 4 x 8')


def test_labels_of_links_keep_apart() -> None:
    for name in ("frontier", "h100-sxm", "gb200-nvl72"):
        cluster = load_cluster(f"{name}:40x8" if name != "gb200-nvl72" else f"{name}:40x4")
        svg = ET.fromstring(draw(cluster, quotient(cluster)))
        places = sorted(float(element.get("y", 0)) for element in svg.iter(f"{SVG}text") if element.get("x") == "24.0")
        assert all(b - a >= 15 for a, b in pairwise(places))


def test_the_json_holds_the_graph() -> None:
    cluster = two_sites()
    table = topology_json(cluster, quotient(cluster))
    kinds = {vertex["kind"] for vertex in table["vertices"]}
    assert kinds == {"device", "nic", "pcie_switch", "socket", "fabric", "switch", "core", "wan"}
    assert sum(vertex["count"] for vertex in table["vertices"] if vertex["kind"] == "device") == 320
    ids = {vertex["id"] for vertex in table["vertices"]}
    assert all(set(edge["between"]) <= ids for edge in table["edges"])
    assert {edge["oversubscription"] for edge in table["edges"]} == {1.0, 4.0}


@pytest.mark.parametrize(
    ("nominal", "sustained", "text"),
    [
        (450e9, 360e9, "NVLink 360 of 450 GB/s"),
        (1.6e12, 0.9e12, "NVLink 900 GB/s of 1.60 TB/s"),
        (64e9, 64e9, "NVLink 64.0 GB/s"),
    ],
)
def test_a_link_reads_as_sustained_of_nominal(nominal: float, sustained: float, text: str) -> None:
    assert rates_text(Link(kind="nvlink", bytes_per_s=nominal, sustained_bytes_per_s=sustained)) == text


def test_the_command_prints_draws_and_keeps_what_exists(tmp_path: Path) -> None:
    drawn = run(tmp_path, "topo", "h100-sxm:2x8", "--svg", "cluster.svg", "--json")
    assert drawn.returncode == 0
    assert json.loads(drawn.stdout)["num_devices"] == 16
    assert ET.parse(tmp_path / "cluster.svg").getroot().tag == f"{SVG}svg"
    again = run(tmp_path, "topo", "h100-sxm:2x8", "--svg", "cluster.svg")
    assert again.returncode == 1
    assert again.stderr == "autoplan: cluster.svg exists: choose another name or pass --force\n"
    assert again.stdout == ""
    assert run(tmp_path, "topo", "h100-sxm:2x8", "--svg", "cluster.svg", "--force").returncode == 0


def test_unlike_parts_are_shown_one_after_another_with_what_joins_them(tmp_path: Path) -> None:
    both = run(tmp_path, "topo", "h100-sxm:2x8+a100-sxm:4x8")
    assert both.stdout.index("h100-sxm: 2 x 8") < both.stdout.index("a100-sxm: 4 x 8")
    assert both.stdout.endswith("between parts: the slower of their networks\n")
    parts = '[[parts]]\ncluster = "h100-sxm:2x8"\n' * 2 + "[between]\nbandwidth_gb_per_s = 1.25\nlatency_ms = 10\n"
    (tmp_path / "two.toml").write_text(parts)
    table = json.loads(run(tmp_path, "topo", "two.toml", "--json").stdout)
    assert [part["num_devices"] for part in table["parts"]] == [16, 16]
    assert table["between"]["bandwidth_bytes_per_s"] == 1.25e9
    assert "1.25 GB/s that all devices of a part share, 10.0 ms" in run(tmp_path, "topo", "two.toml").stdout
    drawn = run(tmp_path, "topo", "two.toml", "--svg", "two.svg")
    assert (drawn.returncode, drawn.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "two.svg").exists()
