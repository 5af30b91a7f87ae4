"""Reader of the matrix of `nvidia-smi topo -m`: the connections of GPUs and NICs in a node.

The output of drivers since 2015 is supported: NICs by name, or as NIC0 with a legend; with and without affinity
columns; underlined headers; tables wrapped between words by a terminal or a paste.  The words in a cell are explained
in its legend (https://docs.nvidia.com/deploy/nvidia-smi/).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from autoplan.base.errors import InputError
from autoplan.profiler.discover.observed import (
    MAX_DEVICES,
    ObservedDevice,
    ObservedLink,
    ObservedNic,
    ObservedNode,
    Path,
    nic_kind,
)
from autoplan.profiler.discover.text import plain_lines, shown

SOURCE = "nvidia-smi topo -m"

_PATHS: dict[str, Path] = {
    "PIX": "switch",
    "PXB": "switches",
    "PHB": "host",
    "NODE": "node",
    "SYS": "system",
    "SOC": "system",  # until driver 384
}
_WORD = re.compile(r"\S+")
_CELL = re.compile(r"X|NV([1-9]\d?)|" + "|".join(_PATHS))
_AFFINITY = {"CPU", "NUMA", "GPU", "Affinity", "ID"}  # words of the headers of the last columns
_NAME = re.compile(r"[\w.:+-]{1,64}")
_GPU = re.compile(r"GPU(\d{1,4})")
_ALIAS = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    text: str
    line: int  # from 1
    column: int  # from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    cells: Sequence[_Word]
    numa: int | None


def parse(text: str) -> ObservedNode:
    """Return the node of the first matrix in `text`, which may contain other output."""
    plain = plain_lines(text)
    lines = _from_header(plain)
    names, first, has_numa = _header(lines)
    rows = _rows(chain([first], lines), names, has_numa=has_numa)
    # The rows of NICs only repeat those of the GPUs, and are often omitted.
    missing = [name for name in names if _GPU.fullmatch(name) and name not in rows]
    if missing:
        raise InputError(f"line {len(plain)}: the table ends before the row of {missing[0]}: give the whole output")
    _check_symmetry(rows, names)
    aliases = {m[1]: m[2] for line in plain if (m := _ALIAS.fullmatch(line))}
    return _node(rows, names, aliases)


def _from_header(lines: Sequence[str]) -> Iterator[list[_Word]]:
    """Yield the words of the lines from the header on; empty without a header."""
    start = next((at for at, line in enumerate(lines) if line.split(maxsplit=1)[:1] == ["GPU0"]), len(lines))
    for number, line in enumerate(lines[start:], start=start + 1):
        yield [_Word(text=m[0], line=number, column=m.start() + 1) for m in _WORD.finditer(line)]


def _is_cell(word: _Word) -> bool:
    return _CELL.fullmatch(word.text) is not None


def _header(lines: Iterator[list[_Word]]) -> tuple[list[str], list[_Word], bool]:
    """Return (names of the columns, the first row, whether there is a column of NUMA nodes)."""
    names: list[str] = []
    has_numa = False
    for line in lines:
        if not line or any(_is_cell(word) for word in line):
            return names, line, has_numa
        has_numa |= any(word.text == "NUMA" for word in line)
        names += _columns(line, names)
    if names:
        return names, [], has_numa
    raise InputError("holds no table of `nvidia-smi topo -m`: no line begins with GPU0 and the other columns")


def _columns(line: Sequence[_Word], before: Sequence[str]) -> list[str]:
    """Return the devices and NICs in a header."""
    if len(before) + len(line) > MAX_DEVICES:
        raise InputError(f"line {line[0].line}: more than {MAX_DEVICES:,} columns")
    names: list[str] = []
    for word in line:
        if word.text in _AFFINITY:
            continue
        if word.text in (*before, *names):
            raise InputError(f"line {word.line}, column {word.column}: {shown(word.text)} heads two columns")
        if not _NAME.fullmatch(word.text):
            raise InputError(f"line {word.line}, column {word.column}: {shown(word.text)} is no name of a device")
        names.append(word.text)
    return names


def _rows(lines: Iterable[list[_Word]], names: Sequence[str], *, has_numa: bool) -> dict[str, _Row]:
    """Return the rows by name; a row ends at the next one or at the end of the table."""
    row_names = set(names)
    rows: dict[str, _Row] = {}
    pending: list[_Word] = []
    for line in lines:
        begins = bool(line) and line[0].text in row_names and (len(line) == 1 or ":" not in line[1].text)
        if pending and (begins or not line):
            _add_row(rows, pending, names, has_numa=has_numa)
            pending = []
        if len(rows) == len(names):
            break
        if line and line[0].text.rstrip(":") == "Legend":
            break
        if begins:
            pending = line
        elif pending:
            pending += line  # wrapped
            if len(pending) > 2 * MAX_DEVICES:
                raise InputError(f"line {line[0].line}: the row of {pending[0].text} does not end")
        elif line:
            place = f"line {line[0].line}, column {line[0].column}"
            raise InputError(f"{place}: a row must begin with one of the columns, got {shown(line[0].text)}")
    if pending:
        _add_row(rows, pending, names, has_numa=has_numa)
    return rows


def _add_row(rows: dict[str, _Row], words: Sequence[_Word], names: Sequence[str], *, has_numa: bool) -> None:
    head, cells, affinities = words[0], words[1 : len(names) + 1], words[len(names) + 1 :]
    if head.text in rows:
        raise InputError(f"line {head.line}, column {head.column}: a second row of {head.text}")
    for at, cell in enumerate(cells):
        place = f"line {cell.line}, column {cell.column}"
        if not _is_cell(cell):
            raise InputError(f"{place}: {head.text} to {names[at]} is {shown(cell.text)}, no word of the legend")
        if (cell.text == "X") != (names[at] == head.text):
            raise InputError(f"{place}: {head.text} to {names[at]} is {cell.text}: the row lacks or repeats a cell")
    if len(cells) < len(names):
        raise InputError(f"line {words[-1].line}: {head.text} has {len(cells)} cells under {len(names)} columns")
    if affinities and _is_cell(affinities[0]):
        raise InputError(
            f"line {affinities[0].line}, column {affinities[0].column}: "
            f"more cells than the {len(names)} columns: {affinities[0].text}"
        )
    rows[head.text] = _Row(cells=cells, numa=_numa(affinities) if has_numa else None)


def _numa(affinities: Sequence[_Word]) -> int | None:
    """Return the (first) NUMA node in "CPU Affinity, NUMA Affinity, GPU NUMA ID"; None if one of them is blank."""
    words = [word.text for word in affinities]
    if len(words) < 2 or not re.fullmatch(r"\d{1,4}([-,]\d{1,4})*", words[1]):
        return None
    return int(re.split("[-,]", words[1])[0])


def _check_symmetry(rows: Mapping[str, _Row], names: Sequence[str]) -> None:
    for at, name in enumerate(names):
        for peer_at, peer in enumerate(names[:at]):
            if name not in rows or peer not in rows:
                continue
            forth, back = rows[name].cells[peer_at], rows[peer].cells[at]
            if forth.text != back.text:
                raise InputError(
                    f"line {forth.line}, column {forth.column}: {name} to {peer} is {forth.text}, "
                    f"{peer} to {name} is {back.text}: they must agree"
                )


def _node(rows: Mapping[str, _Row], names: Sequence[str], aliases: Mapping[str, str]) -> ObservedNode:
    indices = {name: int(m[1]) for name in names if (m := _GPU.fullmatch(name))}
    nics = {name: aliases.get(name, name) for name in names if name not in indices}
    if len(set(nics.values())) < len(nics):
        raise InputError("the legend of the NICs gives one name to two of them")
    links = []
    for at, name in enumerate(names):
        for earlier in names[:at]:
            if earlier not in indices:
                continue
            cell = rows[earlier].cells[at].text
            fabric = _CELL.fullmatch(cell)
            num_links = int(fabric[1]) if fabric and fabric[1] else 0
            links.append(
                ObservedLink(
                    a=indices[earlier],
                    b=indices.get(name),
                    nic=nics.get(name, ""),
                    path="fabric" if num_links else _PATHS[cell],
                    num_links=num_links or 1,
                )
            )
    return ObservedNode(
        source=SOURCE,
        devices=tuple(ObservedDevice(index=index, numa=rows[name].numa) for name, index in indices.items()),
        nics=tuple(ObservedNic(name=name, kind=nic_kind(name)) for name in nics.values()),
        links=tuple(links),
    )
