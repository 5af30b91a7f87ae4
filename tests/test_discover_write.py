from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.profiler.discover.write import cluster_toml
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.topology.cluster import ClusterSpec, NodeGroup, SwitchTier, WanSpec


def back(cluster: ClusterSpec, folder: Path, remarks: dict[str, str] | None = None) -> ClusterSpec:
    path = folder / "cluster.toml"
    path.write_text(cluster_toml(cluster, remarks or {}))
    return load_cluster(str(path))


@pytest.mark.parametrize("name", preset_clusters())
def test_every_shipped_cluster_is_the_same_when_written_and_read(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    assert back(cluster, tmp_path) == cluster


def test_a_device_of_ones_own_is_written_whole(tmp_path: Path) -> None:
    cluster = load_cluster("h100-sxm:2x8")
    own = replace(cluster, device=replace(cluster.device, name='H100 "NVL"', memory_bytes=94e9))
    assert back(own, tmp_path) == own


def test_an_allocation_is_written_as_host_lists(tmp_path: Path) -> None:
    cluster = load_cluster("h100-sxm:6x8")
    leaf, pod = SwitchTier(num_nodes=4, oversubscription=2.0), SwitchTier(name="pod", num_nodes=8)
    groups = (
        NodeGroup(names=tuple(f"gpu{at:03d}" for at in range(8, 12)), switches=("s1", "p1"), site="north"),
        NodeGroup(names=("gpu017", "gpu019"), switches=("s2", "p1"), site="north"),
    )
    spread = replace(
        cluster,
        network=replace(cluster.network, tiers=(leaf, pod)),
        nodes=groups,
        wan=WanSpec(nodes_per_site=8, bandwidth_bytes_per_s=12.5e9, latency_s=0.01),
    )
    assert back(spread, tmp_path) == spread
    text = cluster_toml(spread, {})
    assert 'names = ["gpu[008-011]"]' in text
    assert 'names = ["gpu[017,019]"]' in text


def test_remarks_stand_beside_what_they_are_about_and_break_no_line(tmp_path: Path) -> None:
    remarks = {
        "levels[0]": "NVSwitch",
        "levels[0].bandwidth_bytes_per_s": "18 links\nof 25 GB/s",
        "network.rail_optimised": "x" * 130,
        "wan": "not there",
    }
    cluster = load_cluster("h100-sxm")
    assert back(cluster, tmp_path, remarks) == cluster
    lines = cluster_toml(cluster, remarks, ("found\x1b[31m here",)).splitlines()
    assert lines[0] == "# found[31m here"
    assert "[[levels]]  # NVSwitch" in lines
    assert "bandwidth_gb_per_s = 450.0  # 18 linksof 25 GB/s" in lines
    assert lines[lines.index("rail_optimised = true") - 1] == "# " + "x" * 130
    assert tomllib.loads("\n".join(lines))["network"]["rail_optimised"] is True
