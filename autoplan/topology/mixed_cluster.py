"""Mixed cluster: several homogeneous clusters and the links between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoplan.base.errors import InputError
from autoplan.base.units import check_count, check_name, check_positive
from autoplan.topology.cluster import ClusterSpec

MAX_PARTS = 4  # a search tries every way to group them


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenSpec:
    """Link between any two parts, one direction; omitted values are those of the slower of their two networks.

    `device_bytes_per_s` is the sustained limit per device; `bandwidth_bytes_per_s` is a link out of each part shared by
    all its devices, over at most `num_flows` connections with `window_bytes` per round trip.
    """

    device_bytes_per_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None  # one way
    num_flows: int = 64
    window_bytes: float = 16 * 2**20
    cross_vendor_collectives: bool = True  # whether a collective may span devices of two vendors

    def __post_init__(self) -> None:
        for name in ("device_bytes_per_s", "bandwidth_bytes_per_s", "latency_s"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_count("num_flows", self.num_flows, at_most=10**6)
        check_positive("window_bytes", self.window_bytes)

    def shared_bytes_per_s(self, latency_s: float) -> float | None:
        """Rate out of a part over a shared link: of the link, or of flows that wait one round trip per window."""
        if self.bandwidth_bytes_per_s is None:
            return None
        return min(self.bandwidth_bytes_per_s, self.num_flows * self.window_bytes / (2 * latency_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCluster:
    """Several homogeneous clusters that train together."""

    name: str
    parts: tuple[ClusterSpec, ...]
    between: BetweenSpec = BetweenSpec()

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_count("parts", len(self.parts), at_most=MAX_PARTS)
        for part in self.parts:
            if part.wan is not None:
                raise InputError(f"part {part.name!r} spans several sites: make every site a part")
            if part.faults:
                raise InputError(f"part {part.name!r} has faulty links, which a mixed cluster is not priced with")

    @property
    def num_devices(self) -> int:
        """Number of devices of all parts."""
        return sum(part.num_devices for part in self.parts)

    @property
    def sizes(self) -> str:
        """The parts in words: '8 x 8 h100-sxm + 16 x 8 a100-sxm'."""
        return " + ".join(f"{part.num_nodes} x {part.devices_per_node} {part.device.name}" for part in self.parts)

    @property
    def price_per_device_hour(self) -> float | None:
        """Mean price of a device; None if that of any part is unknown."""
        prices = [part.price_per_device_hour for part in self.parts for _ in range(part.num_devices)]
        known = [price for price in prices if price is not None]
        return sum(known) / len(known) if len(known) == len(prices) else None

    @property
    def as_equal(self) -> ClusterSpec:
        """The cluster if all nodes were of the first part's kind; InputError where their numbers of devices differ."""
        first = self.parts[0]
        if any(part.devices_per_node != first.devices_per_node for part in self.parts):
            raise InputError(f"{self.name} has nodes with unlike numbers of devices, which a launch file does not tell")
        return replace(first, num_nodes=self.num_nodes, nodes=())

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all parts."""
        return sum(part.num_nodes for part in self.parts)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts; duplicates are numbered."""
        names = [part.name for part in self.parts]
        return tuple(f"{name}#{at}" if names.count(name) > 1 else name for at, name in enumerate(names))

    @property
    def vendors(self) -> tuple[str, ...]:
        """Vendor of every part."""
        return tuple(part.device.vendor for part in self.parts)


def joined(parts: Iterable[ClusterSpec], between: BetweenSpec, name: str) -> ClusterSpec | MixedCluster:
    """Join parts to a cluster; equal parts on one network are merged, and a single part is a plain cluster."""
    counts: list[tuple[ClusterSpec, int]] = []
    is_one_network = between == BetweenSpec(cross_vendor_collectives=between.cross_vendor_collectives)
    for part in parts:
        alike = (at for at, (earlier, _) in enumerate(counts) if replace(earlier, num_nodes=part.num_nodes) == part)
        at = next(alike, None) if is_one_network else None
        if at is None:
            counts.append((part, part.num_nodes))
        else:
            counts[at] = (counts[at][0], counts[at][1] + part.num_nodes)
    merged = tuple(replace(part, num_nodes=nodes) for part, nodes in counts)
    return merged[0] if len(merged) == 1 else MixedCluster(name=name, parts=merged, between=between)
