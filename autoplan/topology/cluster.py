"""Cluster as written in files: devices, the links inside a node or rack, and the network between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from autoplan.base.curves import AttentionCurve, CollectiveCurve, GemmCurve
from autoplan.base.errors import InputError, OutOfRangeError
from autoplan.base.units import check_count, check_fraction, check_name, check_positive

MAX_DEVICES = 10**6
MAX_NICS_PER_DEVICE = 64


def _check_spread(rate_spread: float) -> None:
    if not 0 <= rate_spread <= 5:
        raise OutOfRangeError("rate_spread", rate_spread, "must be between 0 and 5")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Accelerator.  Rates are per second; `peak_flops_per_s` has the dense datasheet rates by precision."""

    name: str
    vendor: Literal["nvidia", "amd", "intel", "cpu"]
    generation: Literal[
        "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3", "cdna4", "gaudi", "cpu"
    ]
    memory_bytes: float  # nominal
    visible_memory_bytes: float  # memory available to a framework on an idle device
    memory_bandwidth_bytes_per_s: float
    compute_units: int
    tdp_w: float
    host_link_bytes_per_s: float
    gemm_efficiency: float  # sustained rate of large bf16 GEMMs as a share of the peak
    # The same for 8-bit GEMMs relative to their peak, if measured; None: by the generation of the device.
    narrow_gemm_efficiency: float | None = None
    memory_efficiency: float  # sustained share of the memory bandwidth for long streams
    peak_flops_per_s: dict[Literal["bf16", "fp16", "fp8", "nvfp4", "tf32", "fp32"], float]
    gemm: GemmCurve = field(default_factory=GemmCurve)
    attention: AttentionCurve = field(default_factory=AttentionCurve)
    rate_spread: float = 0.0  # if it represents different products: standard deviation of the logarithm of their rates
    is_announced: bool = False  # nobody has measured it: the figures are those that its maker announced
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("name", self.name)
        for name in (
            "memory_bytes",
            "visible_memory_bytes",
            "memory_bandwidth_bytes_per_s",
            "tdp_w",
            "host_link_bytes_per_s",
        ):
            check_positive(name, getattr(self, name))
        check_count("compute_units", self.compute_units, at_most=10**6)
        check_fraction("gemm_efficiency", self.gemm_efficiency)
        if self.narrow_gemm_efficiency is not None:
            check_fraction("narrow_gemm_efficiency", self.narrow_gemm_efficiency)
        check_fraction("memory_efficiency", self.memory_efficiency)
        _check_spread(self.rate_spread)
        for precision, rate in self.peaks.items():
            check_positive(f"peak_flops_per_s.{precision}", rate)
        if "bf16" not in self.peak_flops_per_s and "fp16" not in self.peak_flops_per_s:
            raise InputError("peak_tflops must give bf16 or fp16")

    @property
    def peaks(self) -> dict[str, float]:
        """`peak_flops_per_s`, which any name of a data type may be looked up in."""
        return {str(precision): rate for precision, rate in self.peak_flops_per_s.items()}

    def slowed(self, rate_share: float) -> DeviceSpec:
        """Return the device with compute and memory rates multiplied by `rate_share`."""
        return replace(
            self,
            memory_bandwidth_bytes_per_s=rate_share * self.memory_bandwidth_bytes_per_s,
            peak_flops_per_s={precision: rate_share * rate for precision, rate in self.peak_flops_per_s.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """A scale-up fabric that joins `num_devices` at full rate: NVLink, xGMI, PCIe, shared memory."""

    name: str
    kind: Literal["nvlink", "xgmi", "ethernet", "pcie", "shared_memory"]
    num_devices: int
    bandwidth_bytes_per_s: float  # per device, one direction, nominal
    latency_s: float  # per hop of a ring
    is_mesh: bool = False  # direct links between all devices: a group uses only those between its members
    # For a mesh with unequal links: the share of a device's links usable among 2, 3, ... devices.
    mesh_shares: tuple[float, ...] = ()
    efficiency: float = 0.8  # plateau of the measured bus bandwidth relative to the nominal one
    half_rate_bytes: float = 1.5 * 2**20  # one device's part of the buffer at which half of the plateau is reached
    # Without peer-to-peer access all devices send through host memory: rate of their shared bridge to it.
    host_bridge_bytes_per_s: float | None = None
    rate_spread: float = 0.0  # if machines with such links differ: standard deviation of the logarithm of their rates
    collectives: CollectiveCurve | None = None  # if measured; otherwise latency and half_rate_bytes apply

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_count("num_devices", self.num_devices, at_most=MAX_DEVICES)
        for name in ("bandwidth_bytes_per_s", "latency_s", "half_rate_bytes"):
            check_positive(name, getattr(self, name))
        check_fraction("efficiency", self.efficiency)
        if self.mesh_shares and not (self.is_mesh and len(self.mesh_shares) == self.num_devices - 1):
            raise InputError(
                f"mesh_shares must give a mesh {self.num_devices - 1} shares, for 2 to {self.num_devices} devices, "
                f"got {len(self.mesh_shares)}"
            )
        for share in self.mesh_shares:
            check_fraction("mesh_shares", share)
        if self.host_bridge_bytes_per_s is not None:
            check_positive("host_bridge_bytes_per_s", self.host_bridge_bytes_per_s)
        _check_spread(self.rate_spread)

    @property
    def rate_bytes_per_s(self) -> float:
        """Rate of one device while all devices send: its own links, or its share of the common bridge."""
        bridge = math.inf if self.host_bridge_bytes_per_s is None else self.host_bridge_bytes_per_s
        return min(self.bandwidth_bytes_per_s, bridge / self.num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTier:
    """Switches of one tier of the network: a leaf, a pod, a dragonfly group."""

    name: str = "leaf"
    num_nodes: int  # below one switch, or below one set of leaves for all rails
    oversubscription: float = 1.0  # rate of all links from below relative to the links out

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_count("num_nodes", self.num_nodes, at_most=MAX_DEVICES)
        if not 1 <= self.oversubscription <= 1000:
            raise InputError(f"oversubscription must be between 1 and 1000, got {self.oversubscription:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WanSpec:
    """Link between sites of `nodes_per_site` nodes, shared by all devices of a site."""

    nodes_per_site: int
    bandwidth_bytes_per_s: float  # out of one site, one direction
    latency_s: float  # one way
    num_flows: int = 64  # TCP connections that a job opens between two sites
    window_bytes: float = 16 * 2**20  # per flow, its maximum per round trip

    def __post_init__(self) -> None:
        check_count("nodes_per_site", self.nodes_per_site, at_most=MAX_DEVICES)
        check_count("num_flows", self.num_flows, at_most=10**6)
        for name in ("bandwidth_bytes_per_s", "latency_s", "window_bytes"):
            check_positive(name, getattr(self, name))

    @property
    def rate_bytes_per_s(self) -> float:
        """Rate out of a site: limited by its links, or by flows that wait one round trip per window (`modelling` F)."""
        return min(self.bandwidth_bytes_per_s, self.num_flows * self.window_bytes / (2 * self.latency_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of an allocation that share the same switches."""

    names: tuple[str, ...]
    switches: tuple[str, ...] = ()  # one of each tier, innermost first
    site: str = ""

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("nodes must name at least one node, or be left out")
        for name in (*self.names, *self.switches):
            check_name("nodes", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A component that runs below its rate.

    `node` is the name of a node, or its number from 0 if nodes have no names; `index` counts devices or NICs in it.
    `switch` is the name of a switch, or 'leaf 0' for the first one of the tier of that name.  A link connects a device
    to the others in its node, an uplink is everything from a switch to the next tier.
    """

    part: Literal["device", "nic", "link", "uplink"]
    rate_share: float  # remaining share of the rate
    node: str | int | None = None
    index: int = 0
    switch: str | None = None

    def __post_init__(self) -> None:
        is_uplink = self.part == "uplink"
        kind, place = ("switch", self.switch) if is_uplink else ("node", self.node)
        if place is None or (self.node if is_uplink else self.switch) is not None:
            raise InputError(f"a fault of a part {self.part!r} must name its {kind} and nothing else")
        if isinstance(place, str):
            check_name(kind, place)
        if self.rate_share == 0:
            nodes = "the nodes below it" if is_uplink else f"node {place!r}"
            raise InputError(f"{self.part} of {kind} {place!r} has failed (rate_share 0): leave {nodes} out")
        check_fraction("rate_share", self.rate_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """The scale-out network.  `nics_per_device` is 0.5 if four NICs serve eight devices."""

    kind: Literal["infiniband", "roce", "efa", "slingshot", "ethernet"]
    nic_bytes_per_s: float  # one direction
    nics_per_device: float = 1.0
    efficiency: float = 0.9
    latency_s: float = 14e-6
    half_rate_bytes: float = 1 * 2**20  # as above
    rail_optimised: bool = True
    sharp: bool = False  # switches perform in-network reduction (SHARP)
    tiers: tuple[SwitchTier, ...] = (SwitchTier(num_nodes=32),)  # innermost first; one switch joins all of the last

    def __post_init__(self) -> None:
        for name in ("nic_bytes_per_s", "nics_per_device", "latency_s", "half_rate_bytes"):
            check_positive(name, getattr(self, name))
        if self.nics_per_device > MAX_NICS_PER_DEVICE:
            raise OutOfRangeError("nics_per_device", self.nics_per_device, f"must be at most {MAX_NICS_PER_DEVICE}")
        check_fraction("efficiency", self.efficiency)
        sizes = [tier.num_nodes for tier in self.tiers]
        for inner, outer in pairwise(sizes):
            if outer <= inner or outer % inner:
                raise InputError(f"each tier must contain several whole tiers of the one before, got num_nodes {sizes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """The host of one node, to which devices and NICs connect in order, spread evenly."""

    memory_bytes: float = 1024 * 2**30
    power_w: float | None = None  # without the devices
    num_sockets: int = 2
    num_pcie_switches: int = 0  # none: devices and NICs connect to the sockets
    device_link: Literal["pcie", "nvlink-c2c", "xgmi"] = "pcie"  # from a device to its switch or socket
    nics_on_devices: bool = False  # rather than on the switches or sockets
    socket_bytes_per_s: float = 22e9  # between two sockets, one direction: NCCL's value for Sapphire Rapids (topo.h)

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "socket_bytes_per_s"):
            check_positive(name, getattr(self, name))
        if self.power_w is not None:
            check_positive("power_w", self.power_w)
        check_count("num_sockets", self.num_sockets, at_most=64)
        check_count("num_pcie_switches", self.num_pcie_switches, at_least=0, at_most=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """Fingerprint of the nodes in the timing database, in addition to their device.  Blank means unknown."""

    runtime: str = ""  # cuda 13.0, rocm 7.1, cpu
    torch: str = ""
    collectives: str = ""  # nccl 2.28.3
    topology: str = ""  # hash of the links between devices, sockets and NICs of a node
    power_cap_w: int = 0  # in force; 0: the datasheet's


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """`num_nodes` equal nodes of `devices_per_node` devices.  `levels` are innermost first."""

    name: str
    device: DeviceSpec
    num_nodes: int = 1
    devices_per_node: int
    levels: tuple[LinkLevel, ...]
    network: NetworkSpec
    wan: WanSpec | None = None
    nodes: tuple[NodeGroup, ...] = ()  # allocation of the scheduler; empty: nodes fill the switches in order
    faults: tuple[Fault, ...] = ()
    host: HostSpec = HostSpec()
    machine: MachineSpec | None = None
    price_per_device_hour: float | None = None
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_count("num_nodes", self.num_nodes, at_most=MAX_DEVICES)
        check_count("devices_per_node", self.devices_per_node, at_most=1024)
        check_count("num_nodes x devices_per_node", self.num_devices, at_most=MAX_DEVICES)
        if not self.levels:
            raise InputError("levels must name at least one link between the devices of a node")
        sizes = [level.num_devices for level in self.levels]
        if sizes != sorted(set(sizes)):
            raise InputError(f"levels must grow from the innermost to the outermost, got num_devices {sizes}")
        if sizes[-1] < self.devices_per_node:
            raise InputError(
                f"the outermost level joins {sizes[-1]} devices, a node has {self.devices_per_node}: "
                "give the level that joins the whole node"
            )
        for inner, outer in pairwise(sizes):
            if outer % inner:
                raise InputError(
                    f"a level of {outer} devices cannot contain whole levels of {inner}: make it a multiple"
                )
        node = self.devices_per_node
        for level in self.levels:
            size = level.num_devices
            if size % node and node % size:
                raise InputError(
                    f"level {level.name!r} joins {size} devices, a node has {node}: "
                    "it must divide the node or join whole nodes"
                )
        self._check_nodes()
        self._check_faults()
        if self.price_per_device_hour is not None:
            check_positive("price_per_device_hour", self.price_per_device_hour)

    def _check_nodes(self) -> None:
        if not self.nodes:
            return
        names = [name for group in self.nodes for name in group.names]
        if len(names) != self.num_nodes:
            raise InputError(f"nodes name {len(names)} nodes, num_nodes is {self.num_nodes}: make them agree")
        if len(set(names)) < len(names):
            raise InputError(f"nodes name {next(name for name in names if names.count(name) > 1)!r} twice")
        for group in self.nodes:
            if len(group.switches) != len(self.network.tiers):
                raise InputError(
                    f"node {group.names[0]!r} must name {len(self.network.tiers)} switches, one of each tier and the "
                    f"innermost first, got {list(group.switches)}: name them, or leave [[nodes]] out"
                )
            if self.wan is not None and not group.site:
                raise InputError(f"node {group.names[0]!r} must name its site, as there is a wan")

    def _check_faults(self) -> None:
        names = {name for group in self.nodes for name in group.names}
        per_node = self.devices_per_node
        for fault in self.faults:
            if fault.switch is not None:
                self.tier_of(fault.switch)
                continue
            if fault.node not in (names or range(self.num_nodes)):
                known_nodes = "one of nodes" if names else f"a number from 0 to {self.num_nodes - 1}"
                raise InputError(f"a fault is on node {fault.node!r}, which must be {known_nodes}")
            count = math.ceil(per_node * self.network.nics_per_device) if fault.part == "nic" else per_node
            if not 0 <= fault.index < count:
                raise InputError(f"a fault is on {fault.part} {fault.index} of node {fault.node!r}, which has {count}")

    def tier_of(self, switch: str) -> int:
        """Return the index of the tier of a switch, given by name or as 'leaf 0'."""
        for at, tier in enumerate(self.network.tiers):
            names = {group.switches[at] for group in self.nodes}
            if not self.nodes:
                names = {f"{tier.name} {number}" for number in range(-(-self.num_nodes // tier.num_nodes))}
            if switch in names:
                return at
        raise InputError(f"a fault is on switch {switch!r}, which has no node below it: name a switch with nodes")

    def slowest_share(self, part: str, tier: int | None = None) -> float:
        """Remaining rate share under the worst fault of such parts, or of a tier's uplinks; 1 without faults."""
        return min(
            (
                fault.rate_share
                for fault in self.faults
                if fault.part == part and (tier is None or self.tier_of(fault.switch or "") == tier)
            ),
            default=1.0,
        )

    @property
    def parts(self) -> tuple[ClusterSpec, ...]:
        """The cluster itself, as the only part of a mixed cluster."""
        return (self,)

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return self.num_nodes * self.devices_per_node
