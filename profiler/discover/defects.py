"""Defects of a node, compared with a usual node of its type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autoplan.profiler.discover.fabric import Fabric
from autoplan.profiler.discover.observed import ObservedNic, ObservedNode
from autoplan.topology.cluster import NetworkSpec

SAME_RATE = 0.02  # tolerance for rounded rates of different tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A problem that the user should look at; with the part and its remaining rate if it can be priced."""

    text: str
    part: Literal["nic", "link"] | None = None
    index: int = 0  # index of the NIC or device in its node
    rate_share: float = 1.0


def defects_of(
    node: ObservedNode, usual: ObservedNode, fabric: Fabric | None, nics: Sequence[ObservedNic], network: NetworkSpec
) -> Iterator[Defect]:
    """Yield the defects of `node` with `fabric`; `usual` is a normal node, with the training adapters `nics`."""
    if len(node.devices) != len(usual.devices):
        yield Defect(text=f"{len(node.devices)} devices where others have {len(usual.devices)}: leave the node out")
    elif {device.name for device in node.devices} != {device.name for device in usual.devices}:
        names = " and ".join(sorted({device.name for device in node.devices}))
        yield Defect(text=f"other devices ({names}): describe such nodes as a separate cluster")
    if fabric is not None:
        yield from _links(fabric)
    rate_of = {nic.name: nic.bytes_per_s for nic in node.nics}
    expected = {nic.name: at for at, nic in enumerate(nics)}
    for name, at in expected.items():
        rate = rate_of.get(name, 0.0)
        if rate is not None and 0 < rate < (1 - SAME_RATE) * network.nic_bytes_per_s:
            share = rate / network.nic_bytes_per_s
            text = f"{name} has {rate * 8 / 1e9:g} Gb/s where others have {network.nic_bytes_per_s * 8 / 1e9:g}"
            yield Defect(text=text, part="nic", index=at, rate_share=share)
        elif name not in rate_of:
            yield Defect(text=f"{name} is missing: repair the node or leave it out")
    for nic in node.nics:
        if nic.bytes_per_s == 0 and (nic.kind != "ethernet" or nic.name in expected):
            yield Defect(text=f"{nic.name} is down: repair the node or leave it out, if that adapter is for training")


def _links(fabric: Fabric) -> Iterator[Defect]:
    for part in fabric.apart:
        devices = f"device{'s' * (len(part) > 1)} {', '.join(map(str, part))}"
        yield Defect(text=f"{devices} not joined to the others by {fabric.kind}: are links down?")
    for index, number in fabric.fewer_links.items():
        text = f"device {index} has {number} links where others have {fabric.num_links}: are links down?"
        yield Defect(text=text, part="link", index=index, rate_share=number / fabric.num_links)
