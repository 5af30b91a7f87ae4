"""Reader of `rocm-smi --showtopo`, with or without `--shownodesbw`: the connections of devices in a node.

Hops are 1 over xGMI, even between devices connected through a third one, 2 over one CPU and 3 over two; a weight is 15
per xGMI link on the path, so the smallest weight identifies directly connected devices (documentation of amd-smi, and
issue 5763 of ROCm/rocm-systems).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal

from autoplan.base.errors import InputError
from autoplan.profiler.discover.observed import MAX_DEVICES, ObservedDevice, ObservedLink, ObservedNode
from autoplan.profiler.discover.text import plain_lines, shown, whole_number

SOURCE = "rocm-smi --showtopo"

_Table = Literal["weight", "hops", "type", "bandwidth"]
_TITLES: dict[str, _Table] = {
    "Weight between two GPUs": "weight",
    "Hops between two GPUs": "hops",
    "Link Type between two GPUs": "type",
    "Bandwidth between two GPUs": "bandwidth",
}
_TITLE = re.compile(r"=+ *(.*?) *=+")
_NUMA = re.compile(r"GPU ?\[?(\d+)\]?\s*: \(Topology\) Numa (Node|Affinity): (-?\d+)")
_CELLS: dict[_Table, re.Pattern[str]] = {
    "weight": re.compile(r"\d{1,9}"),
    "hops": re.compile(r"\d{1,3}"),
    "type": re.compile(r"0|XGMI|PCIE"),
    "bandwidth": re.compile(r"N/A|\d{1,9}-(\d{1,9})"),
}

_Matrix = Mapping[tuple[int, int], str]


def parse(text: str) -> ObservedNode:
    """Return the node of the tables in `text`, which must include weights, hops and types."""
    tables, numa = _tables(plain_lines(text))
    for table in ("weight", "hops", "type"):
        if table not in tables:
            raise InputError(f"holds no table of {table} between two GPUs: give the whole of `rocm-smi --showtopo`")
    sizes = {table: len(matrix) for table, matrix in tables.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the tables hold {sizes} cells: they must be of the same devices")
    indices = sorted({a for a, _ in tables["type"]})
    return ObservedNode(
        source=SOURCE,
        devices=tuple(ObservedDevice(index=index, numa=numa.get(index)) for index in indices),
        links=tuple(_links(indices, tables)),
    )


def _tables(lines: Sequence[str]) -> tuple[dict[_Table, _Matrix], dict[int, int]]:
    tables: dict[_Table, _Matrix] = {}
    numa: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        if (match := _NUMA.search(line)) and match[2] == "Node" and match[3] != "-1":
            device = whole_number(match[1], f"line {number}: the number of the GPU", at_most=MAX_DEVICES)
            numa[device] = whole_number(match[3], f"line {number}: the NUMA node", at_most=MAX_DEVICES)
        elif (title := _TITLE.fullmatch(line.strip())) and (table := _TITLES.get(title[1])):
            tables[table] = _matrix(lines, number, table)
    return tables, numa


def _matrix(lines: Sequence[str], start: int, table: _Table) -> _Matrix:
    """Return the cells of the table whose title is in line `start`, counted from 1."""
    at = start
    while at < len(lines) and not lines[at].strip():
        at += 1
    columns = [_device(word, at + 1) for word in lines[at].split()] if at < len(lines) else []
    if not 0 < len(columns) <= MAX_DEVICES or len(set(columns)) < len(columns):
        raise InputError(f"line {at + 1}: the table of {table} must begin with a line of GPU0 and the other columns")
    cells: dict[tuple[int, int], str] = {}
    for number, row in enumerate(columns, start=at + 2):
        words = lines[number - 1].split() if number <= len(lines) else []
        if not words or _device(words[0], number) != row:
            raise InputError(f"line {number}: the row of GPU{row} is missing: give the whole table of {table}")
        if len(words) != len(columns) + 1:
            raise InputError(f"line {number}: GPU{row} has {len(words) - 1} cells under {len(columns)} columns")
        for column, word in zip(columns, words[1:], strict=True):
            if not _CELLS[table].fullmatch(word):
                raise InputError(f"line {number}: {table} of GPU{row} to GPU{column} cannot be {shown(word)}")
            cells[row, column] = word
    return cells


def _device(word: str, number: int) -> int:
    if not word.startswith("GPU"):
        raise InputError(f"line {number}: a row or column must be called GPU0 or alike, got {shown(word)}")
    return whole_number(word.removeprefix("GPU"), f"line {number}: the number of the GPU", at_most=MAX_DEVICES)


def _links(indices: Sequence[int], tables: Mapping[_Table, _Matrix]) -> list[ObservedLink]:
    kinds, bandwidths = tables["type"], tables.get("bandwidth", {})
    weights = {pair: int(weight) for pair, weight in tables["weight"].items()}
    direct = min((weights[pair] for pair, kind in kinds.items() if kind == "XGMI"), default=0)
    links = []
    for a, b in combinations(indices, 2):
        kind = kinds[a, b]
        if kind == "0":
            raise InputError(f"GPU{a} to GPU{b} has no type of link: the driver does not know how they are joined")
        if kind == "PCIE":
            links.append(ObservedLink(a=a, b=b, path="system" if int(tables["hops"][a, b]) > 2 else "host"))
            continue
        rate = _CELLS["bandwidth"].fullmatch(bandwidths.get((a, b), "N/A"))
        megabytes_per_s = int(rate[1]) if rate and rate[1] else 0
        is_direct = weights[a, b] == direct
        links.append(
            ObservedLink(
                a=a,
                b=b,
                path="fabric",
                num_links=1 if is_direct else 0,
                bytes_per_s=megabytes_per_s * 1e6 if is_direct and megabytes_per_s else None,
            )
        )
    return links
