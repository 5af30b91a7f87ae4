"""JSON Schemas of the files that `files.decode` reads."""

from __future__ import annotations

from typing import Any

from autoplan.base.units import file_keys, file_units


def schema(kind: type, *, human_units: bool) -> dict[str, Any]:
    """Return the JSON Schema of the file for `decode(kind, ...)`; with `human_units` also with keys in human units."""
    import msgspec

    result: dict[str, Any] = msgspec.json.schema(kind)
    for definition in result.get("$defs", {}).values():
        if "properties" not in definition:
            continue
        definition["additionalProperties"] = False
        if human_units:
            _offer_human_keys(definition)
    return result


def _unscaled(value: Any, factor: float) -> Any:
    """Return a default in the unit of a key, without rounding noise: 14 us, not 13.999999999999998."""
    return value if value is None else float(f"{value / factor:.12g}")


def _offer_human_keys(definition: dict[str, Any]) -> None:
    """Add keys in human units in addition to SI; a required quantity needs one of them."""
    properties: dict[str, Any] = {}
    required, alternatives = [], []
    for field, described in definition["properties"].items():
        keys = file_keys(field)
        for human, inside, factor in file_units(field):
            scaled = {"default": _unscaled(described["default"], factor)} if "default" in described else {}
            properties[field[: -len(inside)] + human] = {**described, **scaled}
        properties[field] = described
        if field in definition.get("required", []):
            if len(keys) == 1:
                required.append(field)
            else:
                alternatives.append({"oneOf": [{"required": [key]} for key in keys]})
    definition["properties"], definition["required"] = properties, required
    if alternatives:
        definition["allOf"] = alternatives
