"""Recorded /sys trees for the tests of what a machine is."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def gpu_place(sys: Path, bus: str) -> Path:
    """Place of a GPU: root port, upstream and downstream port of a switch."""
    return sys / "/".join((f"devices/pci0000:{bus}", *(f"0000:{bus}:{at:02}.0" for at in range(4))))


def node(sys: Path, *, buses: tuple[str, str], nic: str = "mlx5_0", state: str = "4: ACTIVE") -> Path:
    """A /sys with two GPUs, an InfiniBand NIC below the first one's switch, its netdev, an Ethernet port, and lo."""
    gpus = [gpu_place(sys, bus) for bus in buses]
    for at, gpu in enumerate(gpus):
        write(gpu / "numa_node", str(at))
        link(sys / f"bus/pci/devices/{gpu.name}", gpu)
    infiniband = gpus[0].parents[1] / f"0000:{buses[0]}:05.0/0000:{buses[0]}:04.0"
    port = infiniband / f"infiniband/{nic}/ports/1"
    for name, text in (("state", state), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
        write(port / name, text)
    link(infiniband / f"infiniband/{nic}/device", infiniband)
    link(sys / f"class/infiniband/{nic}", infiniband / f"infiniband/{nic}")
    write(infiniband / "net/ib0/operstate", "up")
    link(infiniband / "net/ib0/device", infiniband)
    link(sys / "class/net/ib0", infiniband / "net/ib0")
    ethernet = sys / "devices/pci0000:00/0000:00:19.0"
    for name, text in (("net/eth0/operstate", "up"), ("net/eth0/speed", "25000"), ("numa_node", "0")):
        write(ethernet / name, text)
    link(ethernet / "net/eth0/device", ethernet)
    link(sys / "class/net/eth0", ethernet / "net/eth0")
    write(sys / "devices/virtual/net/lo/operstate", "unknown")
    link(sys / "class/net/lo", sys / "devices/virtual/net/lo")
    for at in (0, 1):
        write(sys / f"devices/system/node/node{at}/distance", "10 21" if at == 0 else "21 10")
    return sys
