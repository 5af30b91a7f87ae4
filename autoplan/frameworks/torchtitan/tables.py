"""Tables of torchtitan's options: changes by a command line, and options that versions before 0.2 have elsewhere."""

from __future__ import annotations

import re
from typing import Any

from autoplan.frameworks.common.options import Options

# Keys that [training] and [experimental] have before 0.2.
_RENAMED = {"batch_size": "training.local_batch_size", "compile": "compile.enable"}
_SWITCH = "enable_float8_linear"  # of [float8]
_OF_PARALLELISM = re.compile(r"(data|tensor|context|pipeline|expert)_parallel_\w+|enable_async_tensor_parallel")


def changed(table: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the table updated with command-line options, by their dotted names."""
    for dotted, value in options.items():
        *sections, key = dotted.split(".")
        inside: Any = table
        for section in sections:
            inside = inside.setdefault(section, {}) if isinstance(inside, dict) else None
        if isinstance(inside, dict):
            inside[key] = value
    return table


def moved(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table with the options of versions before 0.2 where 0.2 has them."""
    result, places = dict(table), dict[str, Any]()
    for name in ("training", "experimental"):
        section = Options.of_table(table).inside(name).arguments
        for key, item in section.items():
            place = f"parallelism.{key}" if _OF_PARALLELISM.fullmatch(key) else _RENAMED.get(key, f"{name}.{key}")
            places[place] = item.value
        result[name] = {}
    # Products in 8 bits had a section and a switch of their own.
    scaling = Options.of_table({"float8": result.pop("float8", {})}).inside("float8").arguments
    places |= {f"quantize.linear.float8.{key}": item.value for key, item in scaling.items() if key != _SWITCH}
    if _SWITCH in scaling and scaling[_SWITCH].value is True:
        places["model.converters"] = ["float8"]
    return changed(result, places)
