"""Reader of the output of network adapter tools: the adapters of a node, their kinds and rates.

Supported are `ibstat`, `ibstatus`, `ibv_devinfo`, `cxi_stat` of Slingshot and `fi_info -p efa` of libfabric;
`ibv_devinfo` and `fi_info` only print rates with -v.  Ports that are down are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autoplan.base.errors import InputError
from autoplan.profiler.discover.observed import MAX_DEVICES, NicKind, ObservedNic, ObservedNode, nic_kind
from autoplan.profiler.discover.text import pci_address, plain_lines, shown, whole_number

# Start of a device in the output, by tool.
_BEGINS = {
    "ibstat": re.compile(r"CA '(?P<name>[^']{1,64})'"),
    "ibstatus": re.compile(r"Infiniband device '(?P<name>[^']{1,64})' port (?P<port>\d+) status:"),
    "ibv_devinfo": re.compile(r"hca_id:\s*(?P<name>\S{1,64})"),
    "cxi_stat": re.compile(r"Device:\s*(?P<name>cxi\d{1,4})"),
    "fi_info": re.compile(r"provider:\s*(efa|cxi)(;\S+)?"),  # the domain is the name
    "fi_info -v": re.compile(r"fi_device_attr:"),  # the name is in the following lines
}
_PORT = re.compile(r"Port (\d+):|port:\s*(\d+)")
_FIELD = re.compile(r"(?P<key>[A-Za-z][\w /]{0,40}?)\s*:\s*(?P<value>.*)")
_DOMAIN = re.compile(r"(?P<name>\S+?)(-rdm|-dgrm)?")
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(?:\s*Gb/sec\b.*)?")
_LANES = re.compile(r"(\d{1,2})X\b.*")
_LANE_SPEED = re.compile(r"(?:(?P<gbps>\d{1,4}(?:\.\d{1,3})?) Gbps|invalid speed)(?: \((?P<code>\d{1,4})\))?")
# Rate of one lane in Gb/s, for tools older than the adapter.  Source: enum ib_port_speed in the kernel.
_LANE_GBPS = {"64": 50.0, "128": 100.0, "256": 200.0}
_SLINGSHOT_SPEED = re.compile(r"[A-Z]{2}_(\d{1,4})G")  # BS_200G, CK_400G
_UP = re.compile(r"(\d: *)?(PORT_)?(ACTIVE|up|FI_LINK_UP)\b.*", re.IGNORECASE)
_MAX_BITS_PER_S = 10**14
_LAYERS: dict[str, NicKind] = {"infiniband": "infiniband", "ethernet": "roce"}
_AMAZON = "0x1d0f"


@dataclass(slots=True, kw_only=True)
class _Port:
    line: int  # 0 for a folder
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"line {self.line}: " if self.line else ""


@dataclass(slots=True, kw_only=True)
class _Adapter:
    name: str
    line: int
    fields: dict[str, str] = field(default_factory=dict)
    ports: list[_Port] = field(default_factory=list)


def parse(text: str) -> ObservedNode:
    """Return the adapters in the output of one of the tools."""
    lines = [line.strip() for line in plain_lines(text)]
    tool = next((tool for line in lines for tool, begins in _BEGINS.items() if begins.fullmatch(line)), None)
    if tool is None:
        raise InputError(
            "holds no output of ibstat, ibstatus, ibv_devinfo, cxi_stat or fi_info: no line names a device"
        )
    adapters = _adapters(lines, _BEGINS[tool])
    return ObservedNode(source=tool, nics=tuple(_merged(nic for adapter in adapters if (nic := _nic(adapter)))))


def _adapters(lines: Sequence[str], begins: re.Pattern[str]) -> list[_Adapter]:
    adapters: list[_Adapter] = []
    for number, line in enumerate(lines, start=1):
        if match := begins.fullmatch(line):
            fields = match.groupdict()
            if not adapters or not fields.get("port") or adapters[-1].name != fields["name"]:
                adapters.append(_Adapter(name=fields.get("name", ""), line=number))
            if fields.get("port"):
                adapters[-1].ports.append(_Port(line=number))
            if len(adapters) > MAX_DEVICES:
                raise InputError(f"line {number}: more than {MAX_DEVICES:,} devices")
        elif not adapters:
            continue
        elif _PORT.fullmatch(line):
            adapters[-1].ports.append(_Port(line=number))
        elif match := _FIELD.fullmatch(line):
            holder = adapters[-1].ports[-1] if adapters[-1].ports else adapters[-1]
            holder.fields.setdefault(match["key"].lower().replace(" ", "_"), match["value"].strip())
    for adapter in adapters:
        adapter.ports = adapter.ports or [_Port(line=adapter.line, fields=adapter.fields)]
        adapter.name = adapter.name or adapter.fields.get("name", "")
        if not adapter.name and (match := _DOMAIN.fullmatch(adapter.fields.get("domain", ""))):
            adapter.name = match["name"]
        if not adapter.name:
            raise InputError(f"line {adapter.line}: a device without a name or domain: the output is cut")
    return adapters


def _nic(adapter: _Adapter) -> ObservedNic | None:
    """Return the adapter with its active ports; None if no port is active."""
    up = [port for port in adapter.ports if _is_up(port, adapter)]
    if not up:
        return None
    rates = [rate for port in up if (rate := _bytes_per_s(port)) is not None]
    layer = _LAYERS.get(up[0].fields.get("link_layer", "").lower(), "")
    kind: NicKind = nic_kind(adapter.name) or layer
    if adapter.fields.get("vendor_id", "").lower() == _AMAZON:
        kind = "efa"
    return ObservedNic(
        name=adapter.name,
        kind=kind,
        bytes_per_s=sum(rates) if rates else None,
        pci=pci_address(adapter.fields.get("pcie_slot", "")),
    )


def _is_up(port: _Port, adapter: _Adapter) -> bool:
    state = port.fields.get("state") or port.fields.get("link_state")
    if state is None:
        if "domain" in adapter.fields:  # fi_info lists only what can be used
            return True
        raise InputError(f"{port.place}{shown(adapter.name)} has a port without a state: the output is cut")
    return _UP.fullmatch(state) is not None


def _bytes_per_s(port: _Port) -> float | None:
    fields = port.fields
    where = f"{port.place}the rate"
    if rate := fields.get("rate"):
        if match := _RATE.fullmatch(rate):
            return float(match[1]) * 1e9 / 8
        raise InputError(f"{where} must be in Gb/s, such as 400 Gb/sec (4X NDR), got {shown(rate)}")
    if speed := fields.get("link_speed"):
        if match := _SLINGSHOT_SPEED.fullmatch(speed):
            return float(match[1]) * 1e9 / 8
        raise InputError(f"{where} must be like BS_200G, got {shown(speed)}")
    if speed := fields.get("active_speed"):
        lanes, lane = _LANES.fullmatch(fields.get("active_width", "")), _LANE_SPEED.fullmatch(speed)
        gbps = lane and float(lane["gbps"] or _LANE_GBPS.get(lane["code"] or "", 0))
        if lanes and gbps:
            return int(lanes[1]) * gbps * 1e9 / 8
        raise InputError(f"{where} must be a width and Gbps of a lane, got {shown(speed)}")
    if speed := fields.get("speed"):  # from libfabric, in bits per second
        return whole_number(speed, where, at_most=_MAX_BITS_PER_S) / 8 or None
    return None


def _merged(nics: Iterator[ObservedNic]) -> list[ObservedNic]:
    """Merge entries of the same adapter: libfabric lists it several times, not always with its rate."""
    adapters: dict[str, ObservedNic] = {}
    for nic in nics:
        if nic.name not in adapters or adapters[nic.name].bytes_per_s is None:
            adapters[nic.name] = nic
    return list(adapters.values())
