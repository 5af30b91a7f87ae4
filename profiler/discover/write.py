"""Writer of a cluster as TOML in human units, with comments, so that the user can read and correct it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from autoplan.base.hostlist import compress_hosts
from autoplan.base.units import cleaned, file_units
from autoplan.readers.device import load_device
from autoplan.topology.cluster import ClusterSpec, DeviceSpec

WIDTH = 120


def cluster_toml(cluster: ClusterSpec, remarks: Mapping[str, str], heading: tuple[str, ...] = ()) -> str:
    """Return the text of a cluster file that decodes to `cluster`.

    `remarks` are comments by the place of a field, such as `levels[0].bandwidth_bytes_per_s`; `heading` has the
    comments at the top.  Default values are left out unless there is a remark on them.
    """
    lines = [f"# {cleaned(line)}" for line in heading]
    lines += _table(cluster, "", "", remarks)
    return "\n".join(lines) + "\n"


def _table(value: Any, key: str, place: str, remarks: Mapping[str, str]) -> Iterator[str]:
    """The lines of a table: its own keys first, then the tables in it."""
    tables: list[tuple[str, str, Any]] = []
    for field in fields(value):
        item, where = getattr(value, field.name), f"{place}.{field.name}".lstrip(".")
        if isinstance(item, DeviceSpec) and item == load_device(item.name):
            item = item.name
        has_remark = any(remarked.startswith(where) for remarked in remarks)
        if item is None or (item == _default(field) and not has_remark):
            continue
        if field.name == "names":  # of the nodes of an allocation
            item = (compress_hosts(item),)
        if isinstance(item, dict) or is_dataclass(item[0] if item and isinstance(item, tuple) else item):
            tables.append((field.name, where, item))
        else:
            name, text = _scalar(field.name, item)
            yield from _remarked(f"{name} = {text}", remarks.get(where, ""))
    for name, where, item in tables:
        inner = f"{key}.{name}".lstrip(".")
        if isinstance(item, dict):
            yield from _dict(inner, item, remarks.get(where, ""))
            continue
        parts = [(where, item)] if is_dataclass(item) else [(f"{where}[{at}]", part) for at, part in enumerate(item)]
        for at, part in parts:
            yield ""
            yield from _remarked(f"[{inner}]" if is_dataclass(item) else f"[[{inner}]]", remarks.get(at, ""))
            yield from _table(part, inner, at, remarks)


def _dict(key: str, values: Mapping[str, float], remark: str) -> Iterator[str]:
    """A table of numbers, whose unit its name tells."""
    path, _, name = key.rpartition(".")
    human, factor = _unit(name, max(values.values(), default=1.0))
    yield ""
    yield from _remarked(f"[{path}.{human}]", remark)
    for key_in_table, value in values.items():
        yield f"{key_in_table} = {_number(value, factor)}"


def _scalar(name: str, value: Any) -> tuple[str, str]:
    """Return (key, value) as they stand in a file."""
    if isinstance(value, float):
        human, factor = _unit(name, value)
        return human, _number(value, factor)
    if isinstance(value, bool | int | str):
        return name, _plain(value)
    texts = [_plain(element) for element in value]
    line = f"[{', '.join(texts)}]"
    if len(line) > WIDTH - 20:
        line = "[\n" + "".join(f"    {text},\n" for text in texts) + "]"
    return name, line


def _plain(value: bool | int | str) -> str:
    if isinstance(value, str):
        return json.dumps(cleaned(value), ensure_ascii=False)  # which escapes as TOML does
    return str(value).lower()


def _unit(name: str, value: float) -> tuple[str, float]:
    """Return (key, factor) in the largest human unit in which `value` is at least a half."""
    choices = [(name[: -len(inside)] + human, factor) for human, inside, factor in file_units(name)]
    choices.sort(key=lambda choice: -choice[1])
    return next((choice for choice in choices if value >= choice[1] / 2), choices[-1] if choices else (name, 1.0))


def _number(value: float, factor: float) -> str:
    """Write `value` in units of `factor`: as few digits as give the same number back."""
    for digits in range(6, 18):
        text = f"{value / factor:.{digits}g}"
        if float(text) * factor == value:
            return repr(float(text))
    return repr(value / factor)


def _remarked(line: str, remark: str) -> Iterator[str]:
    """The line with a comment behind it, or above it where both are long."""
    remark = cleaned(remark)
    if not remark:
        yield line
    elif "\n" in line or len(line) + len(remark) + 4 > WIDTH:
        yield from (f"# {remark}", line)
    else:
        yield f"{line}  # {remark}"


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
