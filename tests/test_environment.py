from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import node, write

torch = pytest.importorskip("torch")

from autoplan.base.units import GIB  # noqa: E402
from autoplan.profiler.machine import device_names, environment, hardware  # noqa: E402
from autoplan.profiler.machine.environment import canonical_hash, fingerprint  # noqa: E402
from autoplan.profiler.machine.hardware import Gpu, GpuLink, Links, Nic, amd_gpus, device_id, nics  # noqa: E402
from autoplan.readers.device import load_device, preset_devices  # noqa: E402


# Names as drivers report them, with the memory that torch shows: pytorch/test-infra #7631, NVIDIA/cosmos-framework
# #114, and the out-of-memory messages that the presets cite.
@pytest.mark.parametrize(
    ("name", "memory_gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.11, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.11, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.1, "h100-nvl"),
        ("NVIDIA H200", 139.81, "h200-sxm"),
        ("NVIDIA H200 NVL", 139.8, "h200-nvl"),
        ("NVIDIA H800", 79.11, "h800"),
        ("NVIDIA H20", 95.0, "h20"),
        ("NVIDIA A100-SXM4-80GB", 79.15, "a100-sxm"),
        ("A100-SXM4-40GB", 39.39, "a100-sxm-40"),
        ("NVIDIA A100-SXM-64GB", 63.42, "a100-sxm-64"),
        ("NVIDIA A100 80GB PCIe", 79.15, "a100-pcie"),
        ("NVIDIA A800-SXM4-80GB", 79.15, "a800-sxm"),
        ("NVIDIA L40S", 44.40, "l40s"),
        ("NVIDIA L40", 44.40, "l40"),
        ("NVIDIA B200", 178.35, "b200"),
        ("NVIDIA B300 SXM6 AC", 267.69, "b300"),
        ("NVIDIA GB200", 184.31, "gb200"),
        ("NVIDIA GB300", 276.50, "gb300"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("Tesla V100-SXM2-32GB", 31.73, "v100"),
        ("Tesla V100-PCIE-32GB", 31.73, "v100-pcie"),
        ("AMD Instinct MI210", 63.98, "mi210"),
        ("AMD Instinct MI250X", 63.98, "mi250x-gcd"),
        ("AMD Instinct MI300A", 125.7, "mi300a"),  # vllm-project/vllm #17875, apptainer/apptainer #3261
        ("AMD Instinct MI300X", 191.69, "mi300x"),
        ("AMD Instinct MI300X VF", 191.98, "mi300x"),
        ("AMD Instinct MI325X", 255.98, "mi325x"),
        ("AMD Instinct MI350X", 287.98, "mi350x"),
        ("AMD Instinct MI355X", 287.98, "mi355x"),
    ],
)
def test_a_shipped_device_is_known_by_its_drivers_name(name: str, memory_gib: float, expected: str) -> None:
    assert device_id(name, round(memory_gib * GIB)) == expected


@pytest.mark.parametrize(
    ("name", "memory_gib"),
    [
        ("NVIDIA H20-3e", 139.8),
        ("NVIDIA A100-PCIE-40GB", 39.39),
        ("NVIDIA GH200 144G HBM3e", 142.0),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5),
        ("NVIDIA H100 80GB HBM3", 39.5),  # a part of one, under its whole name
        ("Tesla V100-SXM2-16GB", 15.77),
        ("Tesla V100-PCIE-16GB", 15.77),
        ("NVIDIA GeForce RTX 4080", 15.6),
        ("AMD Instinct MI308X", 191.98),
    ],
)
def test_any_other_device_keeps_its_own_name(name: str, memory_gib: float) -> None:
    assert device_id(name, round(memory_gib * GIB)) == name


def test_a_device_without_a_name_is_known_by_architecture_memory_and_units() -> None:
    def named(architecture: str, memory_gib: float, units: int) -> str:
        return device_id("AMD Radeon Graphics", round(memory_gib * GIB), architecture=architecture, compute_units=units)

    assert named("gfx942:sramecc+:xnack-", 191.69, 304) == "mi300x"
    assert named("gfx942:sramecc+:xnack-", 255.98, 304) == "mi325x"
    assert [named("gfx90a:sramecc+:xnack-", 63.98, units) for units in (104, 110)] == ["mi210", "mi250x-gcd"]
    assert named("gfx942:sramecc+:xnack-", 191.69, 80) == "AMD Radeon Graphics"  # an MI308X
    assert named("gfx1100", 191.69, 304) == "AMD Radeon Graphics"


def test_without_the_management_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hardware.nvml.cache_clear()
    assert hardware.nvml() is None
    hardware.nvml.cache_clear()


def test_every_rule_leads_to_a_shipped_device() -> None:
    ids = {known for _, ids in device_names._NAMES for known in ids}
    ids |= {known for ids in hardware._ARCHITECTURES.values() for known in ids}
    assert ids <= set(preset_devices())
    # What no name tells: no product, a variant that its driver calls by the plain product's name, what is not read, and
    # what no driver names yet.
    announced = {name for name in preset_devices() if (device := load_device(name)) and device.is_announced}
    assert set(preset_devices()) - ids == {"cpu", "h100-96g-500w", "gaudi3"} | announced
    assert load_device("no-such-device") is None


@given(st.data(), st.lists(st.sampled_from(["gpu", "nic"]), min_size=1, max_size=7))
def test_a_topology_is_the_same_in_whatever_order_devices_are_counted(data: st.DataObject, labels: list[str]) -> None:
    size = range(len(labels))
    kinds = st.sampled_from(["nvlink x4", "pcie"])
    links = {(device, other): data.draw(kinds) for device in size for other in size if device <= other}
    order = data.draw(st.permutations(list(size)))
    place = {old: new for new, old in enumerate(order)}
    moved = {tuple(sorted((place[device], place[other]))): link for (device, other), link in links.items()}
    assert canonical_hash([labels[old] for old in order], moved) == canonical_hash(labels, links)


def test_topologies_that_differ_in_one_link_differ() -> None:
    pairs = {(0, 1): "nvlink x4", (2, 3): "nvlink x4", (0, 2): "pcie", (1, 3): "pcie"}
    labels = ["gpu"] * 4
    assert canonical_hash(labels, pairs) != canonical_hash(labels, pairs | {(0, 1): "nvlink x2"})
    assert canonical_hash(labels, pairs) != canonical_hash(labels, {**pairs, (1, 2): "pcie"})
    assert canonical_hash(labels, {}) != canonical_hash(["gpu"] * 3, {})


def ports(sys: Path) -> list[Nic]:
    return [nic for nic in nics(sys) if nic.is_up]


def nvlinks(first: int, second: int) -> Links:
    """Links of two GPUs to switches."""
    return {(at, at): GpuLink(kind="nvlink", num_links=number) for at, number in enumerate((first, second))}


def topology(sys: Path, buses: tuple[str, str], links: Links) -> str:
    return environment._node_topology(sys, [Gpu(pci=f"0000:{bus}:03.0") for bus in buses], links, ports(sys))


def test_nics_are_told_by_kind_and_rate_and_virtual_ones_are_not(tmp_path: Path) -> None:
    names = [str(nic) for nic in nics(node(tmp_path, buses=("17", "a3")))]
    assert sorted(names) == ["ethernet 25 Gb/s", "infiniband 400 Gb/s"]


def test_a_nic_knows_whether_its_link_is_down(tmp_path: Path) -> None:
    found = nics(node(tmp_path, buses=("17", "a3"), state="1: DOWN"))
    assert [(nic.name, nic.is_up) for nic in found] == [("mlx5_0", False), ("eth0", True)]


def test_a_node_stays_itself_when_buses_and_nics_are_counted_anew(tmp_path: Path) -> None:
    links = nvlinks(18, 18)
    before = topology(node(tmp_path / "before", buses=("17", "a3")), ("17", "a3"), links)
    after = topology(node(tmp_path / "after", buses=("c1", "05"), nic="mlx5_3"), ("c1", "05"), links)
    swapped = topology(tmp_path / "before", ("a3", "17"), links)
    assert before == after == swapped


def test_a_node_with_fewer_links_or_nics_is_another_one(tmp_path: Path) -> None:
    whole = node(tmp_path / "whole", buses=("17", "a3"))
    links = nvlinks(18, 18)
    cut = node(tmp_path / "cut", buses=("17", "a3"), state="1: DOWN")
    assert topology(whole, ("17", "a3"), links) != topology(whole, ("17", "a3"), nvlinks(18, 17))
    assert topology(whole, ("17", "a3"), links) != topology(cut, ("17", "a3"), links)


class TwoGpus:
    """NVML of a node with two GPUs: two links between them and one of each to a switch."""

    NVMLError = RuntimeError
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 4, 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, at: int) -> int:  # noqa: N802
        return at

    def nvmlDeviceGetPciInfo(self, at: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=b"00000000:17:00.0" if at == 0 else b"00000000:A3:00.0")

    def nvmlDeviceGetName(self, at: int) -> str:  # noqa: N802
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, at: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=150_000_000_000)

    def nvmlDeviceGetNvLinkState(self, at: int, link: int) -> int:  # noqa: N802
        if link == 3:
            raise self.NVMLError("not supported")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, at: int, link: int) -> int:  # noqa: N802
        return 2 if link == 2 else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, at: int, link: int) -> SimpleNamespace:  # noqa: N802
        return self.nvmlDeviceGetPciInfo(1 - at)


def test_nvidia_gpus_and_their_links_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "nvml", TwoGpus)
    gpus, links = hardware.nvidia_gpus()
    assert [gpu.pci for gpu in gpus] == ["0000:17:00.0", "0000:a3:00.0"]
    assert device_id(gpus[0].name, gpus[0].memory_bytes) == "h200-sxm"
    assert {pair: str(link) for pair, link in links.items()} == {
        (0, 1): "nvlink x2",
        (0, 0): "nvlink x1",
        (1, 1): "nvlink x1",
    }


def test_a_gpu_that_fell_off_the_bus_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneLost(TwoGpus):
        def nvmlDeviceGetHandleByIndex(self, at: int) -> int:  # noqa: N802
            if at == 0:
                raise self.NVMLError("GPU is lost")
            return at

    monkeypatch.setattr(hardware, "nvml", OneLost)
    gpus, links = hardware.nvidia_gpus()
    assert [gpu.pci for gpu in gpus] == ["0000:a3:00.0"]
    assert {pair: str(link) for pair, link in links.items()} == {(0, 0): "nvlink x3"}
    assert hardware.num_lost_gpus() == 1


def test_amd_gpus_and_links_are_read_from_the_kernel(tmp_path: Path) -> None:
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 96\nsimd_count 0")
    for at, place in ((1, 0x0500), (2, 0x2600)):
        about = f"simd_count 1216\nsimd_per_cu 4\nlocation_id {place}\ndomain 0\ngfx_target_version 90402"
        write(nodes / f"{at}/properties", about)
        write(nodes / f"{at}/io_links/0/properties", "type 2\nnode_to 0\nweight 20")
        write(nodes / f"{at}/io_links/1/properties", f"type 11\nnode_to {3 - at}\nweight 15\nmax_bandwidth 64000")
    write(tmp_path / "bus/pci/devices/0000:05:00.0/mem_info_vram_total", "206141652992")
    gpus, links = amd_gpus(tmp_path)
    assert [gpu.pci for gpu in gpus] == ["0000:05:00.0", "0000:26:00.0"]
    assert gpus[0] == Gpu(pci="0000:05:00.0", memory_bytes=206141652992, architecture="gfx942", compute_units=304)
    assert {pair: str(link) for pair, link in links.items()} == {(0, 1): "xgmi 15"}
    assert links[0, 1].bytes_per_s == 64e9


def test_a_machine_without_devices_is_known_by_its_cpu() -> None:
    here = fingerprint(torch.device("cpu"))
    assert here == fingerprint(torch.device("cpu"))
    assert (here.device, here.runtime, here.collectives) == ("cpu", "cpu", "gloo")
    assert here.cpu
    assert here.memory_bytes % GIB == 0
    assert here.torch == torch.__version__
    assert fingerprint(torch.device("cpu"), num_hosts=2).num_hosts == 2


@pytest.mark.gpu
def test_a_gpu_is_known_by_more_than_its_name() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    here = fingerprint(torch.device("cuda", 0))
    assert here == fingerprint(torch.device("cuda", 0))
    assert here.device != "cpu"
    assert here.memory_bytes > GIB
    assert here.runtime.split()[0] in ("cuda", "rocm")
    assert here.collectives.split()[0] in ("nccl", "rccl")
    assert here.clock_mhz > 100
    if hardware.nvml() is not None or torch.version.hip:
        assert here.driver
        assert here.topology
        assert here.power_cap_w > 0
