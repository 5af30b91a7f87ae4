"""Presets of Primus (fd1eeab), from the files below primus/configs in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import is_file, read_text
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.common.options import parse_yaml

_CONFIGS = Path("primus") / "configs"
MAX_BYTES = 2**18
MAX_DEPTH = 20


def configs_folder(context: LaunchContext) -> Path | None:
    """Return the folder of Primus' presets, in the checkout of PRIMUS_DIR or the one that contains the file."""
    root = dict(context.variables).get("PRIMUS_DIR")
    places = [Path(root)] if root else [context.folder, *context.folder.absolute().parents] if context.folder else []
    return next((place / _CONFIGS for place in places if (place / _CONFIGS / "models").is_dir()), None)


def preset(folder: Path, kind: str, name: str, depth: int = 0) -> dict[str, Any] | None:
    """Return the arguments of a preset merged over those that it extends; None if there is no such file."""
    path = (folder / kind / "megatron" / name).resolve()
    if depth > MAX_DEPTH:
        raise InputError(f"{path}: presets extend one another without an end")
    if not path.is_relative_to(folder.resolve()) or not is_file(path):
        return None
    table = parse_yaml(read_text(path, most_bytes=MAX_BYTES) or "{}", str(path))
    merged: dict[str, Any] = {}
    for base_name in [*_names(table.pop("bases", None)), *_names(table.pop("extends", None))]:
        merged |= preset(folder, kind, base_name, depth + 1) or {}
    merged |= table
    for included in _names(merged.pop("includes", None)):
        merged |= preset(folder, kind, included, depth + 1) or {}
    return merged


def _names(value: Any) -> list[str]:
    """Return the names of the presets that a preset extends: `bases` in the releases of 2025, later `extends`."""
    return [str(name) for name in (value if isinstance(value, list) else [value] if value else [])]
