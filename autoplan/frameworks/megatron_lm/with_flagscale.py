"""Reader of experiments of FlagScale: YAML whose keys are the options of Megatron-LM, in nested tables.

The names of the tables mean nothing, and a switch that is off is left out (FlagScale da4935e, `flatten_dict_to_args` of
flagscale/runner/utils.py).  An experiment names the file of its settings in `defaults`, below its own folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.beside import read_beside
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.common.options import parse_yaml, show

_SETTINGS = ("system", "model", "data")
_PROGRAM = re.compile(r"^\s*entrypoint:.*flagscale/train/(megatron/)?train_gpt\.py", re.MULTILINE)
_COSTLESS = ("no_shared_fs",)
MAX_DEPTH = 20


def is_of_flagscale(name: str, text: str) -> bool:
    """Return whether a file is an experiment of FlagScale that trains a decoder, or the settings of one."""
    if not name.endswith((".yaml", ".yml")):
        return False
    has_settings = all(re.search(rf"^{key}:", text, re.MULTILINE) for key in _SETTINGS)
    return _PROGRAM.search(text) is not None or (has_settings and "num_layers:" in text)


def settings_of(text: str, context: LaunchContext) -> tuple[tuple[str, ...], int | None, dict[str, str]]:
    """Return (the options of Megatron-LM, the number of devices if the file says it, the environment)."""
    table = parse_yaml(text, "the file")
    experiment = table.get("experiment")
    runner = experiment.get("runner") if isinstance(experiment, dict) else None
    sizes = [runner.get(key) if isinstance(runner, dict) else None for key in ("nnodes", "nproc_per_node")]
    known = [size for size in sizes if isinstance(size, int) and 0 < size < 10**6]
    devices = prod(known) if len(known) == len(sizes) else None
    variables = experiment.get("envs") if isinstance(experiment, dict) else None
    environment = {str(name): str(value) for name, value in variables.items()} if isinstance(variables, dict) else {}
    if "model" not in table:
        defaults = table.get("defaults")
        names = [item["train"] for item in defaults or () if isinstance(item, dict) and "train" in item]
        if len(names) != 1:
            raise InputError("the experiment of FlagScale names no file of settings: its `defaults` need one `train`")
        found = read_beside(f"train/{names[0]}.yaml", context.folder)
        if found is None:
            raise InputError(f"the settings are in train/{show(names[0])}.yaml, which is not at hand: put it there")
        table = parse_yaml(found[0], f"train/{names[0]}.yaml")
    return tuple(_words({key: table.get(key) or {} for key in _SETTINGS})), devices, environment


def _words(table: dict[str, Any], depth: int = 0) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise InputError(f"a table is nested more than {MAX_DEPTH} deep")
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _words(value, depth + 1)
        elif value is not None and value is not False and key not in _COSTLESS:
            yield f"--{str(key).replace('_', '-')}"
            if value is not True:
                yield from map(str, value if isinstance(value, list) else [value])
