"""Reader of Slurm's `topology.conf`, `topology.yaml` and `scontrol show topology`: the switches above each node.

Source of the formats for trees and blocks: topology.conf(5), topology.yaml(5).  A switch shared by all nodes is left
out, because the outermost tier is always connected by one set of switches; a node attached at a higher tier than others
repeats its outermost switch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import yaml

from autoplan.base.errors import InputError
from autoplan.base.files import decode
from autoplan.base.hostlist import MAX_HOSTS, expand_hosts
from autoplan.profiler.discover.text import plain, shown, whole_number
from autoplan.topology.cluster import NodeGroup

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C version is ten times faster, but not in every build
_MAX_YAML_CHARACTERS = 2**20
_MAX_YAML_DEPTH = 20
_MAX_TIERS = 8
_PAIR = re.compile(r"(?P<key>\w+)\s*=\s*(?P<value>\S+)")
_IGNORED = re.compile(r"(?i)\s*\b(Level|BlockIndex|BlockSize)=\S*")
_NODES = re.compile(r"(?i)\s*\bNodes=\S*")
_KEYS = {"switchname", "switches", "nodes", "linkspeed", "blockname", "blocksizes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTree:
    """Nodes of a file and their switches."""

    groups: tuple[NodeGroup, ...]
    tier_nodes: tuple[int, ...]  # maximum nodes below one switch of each tier, innermost first

    def of(self, names: Sequence[str]) -> tuple[NodeGroup, ...]:
        """Return the groups of an allocation, in its order; InputError for a node that is not in the file."""
        switches = {name: group.switches for group in self.groups for name in group.names}
        for name in names:
            if name not in switches:
                raise InputError(f"node {shown(name)} is not in the topology of Slurm: give the file of this cluster")
        return tuple(
            NodeGroup(names=tuple(together), switches=path)
            for path, together in groupby(names, key=lambda name: switches[name])
        )


def parse(text: str) -> SwitchTree:
    """Return the tree of a topology.conf, a topology.yaml (the cluster's default) or `scontrol show topology`."""
    lines = [_as_in_file(line.partition("#")[0].strip()) for line in plain(text).split("\n")]
    return _from_conf(lines) if any(_PAIR.match(line) for line in lines) else _from_yaml(text)


def _as_in_file(line: str) -> str:
    """Convert a line of scontrol, with a level and indirect nodes, to the format of a file."""
    if re.match(r"(?i)\s*AggregatedBlock=", line):
        return ""  # consists of blocks on other lines
    statement = _IGNORED.sub("", line)
    return _NODES.sub("", statement) if statement != line and re.search(r"(?i)\bSwitches=\S", line) else statement


# topology.conf


def _from_conf(lines: Sequence[str]) -> SwitchTree:
    switches: list[_Entry] = []
    blocks: list[_Entry] = []
    sizes: list[int] = []
    for number, line in _continued(lines):
        where = f"line {number}"
        pairs = _pairs(line, where)
        entry = _Entry(where=where, nodes=pairs.get("nodes", ""), children=pairs.get("switches", ""))
        if "switchname" in pairs:
            switches.append(replace(entry, name=pairs["switchname"]))
        elif "blockname" in pairs:
            blocks.append(replace(entry, name=pairs["blockname"]))
        if "blocksizes" in pairs:
            words = pairs["blocksizes"].split(",")
            sizes = [whole_number(word, f"{where}: a size of BlockSizes", at_most=MAX_HOSTS) for word in words]
    if blocks and switches:
        raise InputError("has switches and blocks: Slurm reads one or the other")
    return _block(blocks, sizes) if blocks else _tree(switches)


def _continued(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield lines with the number of their last physical line; a backslash at the end continues a line."""
    before = ""
    for number, line in enumerate(lines, start=1):
        if line.endswith("\\"):
            before += line[:-1] + " "
        else:
            yield number, before + line
            before = ""
    if before:
        yield len(lines), before


def _pairs(line: str, where: str) -> dict[str, str]:
    pairs = {match["key"].lower(): match["value"] for match in _PAIR.finditer(line)}
    unparsed = _PAIR.sub("", line).strip()
    if unparsed:
        raise InputError(f"{where}: must be pairs such as SwitchName=leaf1 Nodes=node[1-8], got {shown(unparsed)}")
    if unknown := sorted(set(pairs) - _KEYS):
        raise InputError(f"{where}: {shown(unknown[0])} is no key of topology/tree or topology/block")
    return pairs


# topology.yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class _YamlSwitch:
    switch: str
    children: str = ""
    nodes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _YamlTree:
    switches: tuple[_YamlSwitch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _YamlBlock:
    block: str
    nodes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _YamlBlocks:
    blocks: tuple[_YamlBlock, ...]
    block_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _YamlTopology:
    topology: str
    cluster_default: bool = False
    tree: _YamlTree | None = None
    block: _YamlBlocks | None = None


def _from_yaml(text: str) -> SwitchTree:
    entries = _yaml(text)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InputError("must be lines of a topology.conf, or the list of topologies of a topology.yaml")
    usable = [entry for entry in entries if "tree" in entry or "block" in entry]
    chosen = usable
    if len(usable) > 1:
        chosen = [entry for entry in usable if entry.get("cluster_default") is True][:1]
    if len(chosen) != 1:
        names = ", ".join(shown(str(entry.get("topology"))) for entry in usable) or "none"
        raise InputError(f"name the topology that the nodes are in; trees and blocks here: {names}")
    place = "topology " + shown(str(chosen[0].get("topology")))
    topology = decode(_YamlTopology, chosen[0], place)
    if topology.block is not None:
        blocks = [_Entry(where=place, name=block.block, nodes=block.nodes) for block in topology.block.blocks]
        return _block(blocks, topology.block.block_sizes)
    switches = topology.tree.switches if topology.tree else ()
    return _tree(
        [_Entry(where=place, name=switch.switch, nodes=switch.nodes, children=switch.children) for switch in switches]
    )


def _yaml(text: str) -> object:
    if len(text) > _MAX_YAML_CHARACTERS:
        raise InputError(f"a topology.yaml of more than {_MAX_YAML_CHARACTERS:,} characters")
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent):
                raise InputError(f"line {event.start_mark.line + 1}: an alias, which no topology.yaml needs")
            if depth > _MAX_YAML_DEPTH:
                raise InputError(f"line {event.start_mark.line + 1}: nested more than {_MAX_YAML_DEPTH} deep")
        return yaml.load(text, Loader=_LOADER)
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise InputError(f"not valid YAML: {error.problem}{place}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: for example the date 2026-99-99
        raise InputError(f"not valid YAML: {shown(str(error))}") from None


# Both


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A switch or block in the file; its nodes and children are host lists."""

    where: str
    name: str = ""
    nodes: str = ""
    children: str = ""


def _tree(switches: Sequence[_Entry]) -> SwitchTree:
    leaf = _owners(switches, "nodes")
    parent = _owners(switches, "children")
    names = {switch.name for switch in switches}
    if unknown := next((child for child in parent if child not in names), None):
        raise InputError(f"switch {shown(parent[unknown])} is above {shown(unknown)}, which is not described")
    return _switch_tree({node: _path(switch, parent) for node, switch in leaf.items()})


def _path(switch: str, parent: Mapping[str, str]) -> tuple[str, ...]:
    path = [switch]
    while path[-1] in parent:
        path.append(parent[path[-1]])
        if len(path) > _MAX_TIERS:
            raise InputError(f"more than {_MAX_TIERS} switches above each other from {shown(switch)}, or a loop")
    return tuple(path)


def _block(blocks: Sequence[_Entry], sizes: Sequence[int]) -> SwitchTree:
    """Return blocks, and the larger ones that BlockSizes forms from neighbours."""
    if sizes and (sizes[0] < 1 or any(size < 1 or size % sizes[0] for size in sizes)):
        raise InputError(f"block sizes must be multiples of the first, got {list(sizes)}")
    paths = {}
    for at, block in enumerate(blocks):
        larger = [f"{size}-node block {at // (size // sizes[0]) + 1}" for size in sizes[1:]]
        paths[block.name] = (block.name, *larger)
    return _switch_tree({node: paths[block] for node, block in _owners(blocks, "nodes").items()})


def _owners(entries: Sequence[_Entry], key: Literal["nodes", "children"]) -> dict[str, str]:
    """Map each node, or switch, to the one entry that lists it."""
    owners: dict[str, str] = {}
    described: set[str] = set()
    for entry in entries:
        if entry.name in described:
            raise InputError(f"{entry.where}: {shown(entry.name)} is described twice")
        described.add(entry.name)
        hosts: str = getattr(entry, key)
        for name in _expand(hosts, entry.where) if hosts else ():
            if name in owners:
                raise InputError(f"{entry.where}: {shown(name)} is below {shown(owners[name])} and {shown(entry.name)}")
            owners[name] = entry.name
        if len(owners) > MAX_HOSTS:
            raise InputError(f"{entry.where}: more than {MAX_HOSTS:,} names")
    return owners


def _expand(hosts: str, where: str) -> list[str]:
    try:
        return expand_hosts(hosts)
    except InputError as error:
        raise InputError(f"{where}: {shown(hosts)}: {error}") from None


def _switch_tree(paths: Mapping[str, tuple[str, ...]]) -> SwitchTree:
    if not paths:
        raise InputError("holds no node: give the file with the lines SwitchName= or BlockName=")
    outermost = {path[-1] for path in paths.values()}
    if len(outermost) == 1 and all(len(path) > 1 for path in paths.values()):
        paths = {name: path[:-1] for name, path in paths.items()}
    depth = max(len(path) for path in paths.values())
    padded = {name: (*path, *[path[-1]] * (depth - len(path))) for name, path in paths.items()}
    below: dict[tuple[str, ...], list[str]] = {}
    for name, path in padded.items():
        below.setdefault(path, []).append(name)
    sizes = [max(Counter(path[tier] for path in padded.values()).values()) for tier in range(depth)]
    return SwitchTree(
        groups=tuple(NodeGroup(names=tuple(names), switches=path) for path, names in below.items()),
        tier_nodes=tuple(sizes),
    )
