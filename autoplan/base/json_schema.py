"""JSON Schemas of the files that `files.decode` reads."""

from __future__ import annotations

from typing import Any

from autoplan.base.units import bare_key, file_keys, file_units


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


def _or_text(form: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value whose numbers may be text such as "80GB" or "8k"."""
    parts = form.get("anyOf", [form])
    if any(part.get("type") in ("number", "integer") for part in parts):
        numbers = [{key: value for key, value in part.items() if key != "default"} for part in parts]
        kept = {key: value for key, value in form.items() if key == "default"}
        return {**kept, "anyOf": [*numbers, {"type": "string"}]}
    if isinstance(form.get("additionalProperties"), dict):
        return {**form, "additionalProperties": _or_text(form["additionalProperties"])}
    return form


def _only_text(form: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a quantity whose key has no unit: text with the unit, or a table of such."""
    if form.get("type") == "object":
        return {"type": "object", "additionalProperties": {"type": "string"}}
    return {"type": "string"}


def _offer_human_keys(definition: dict[str, Any]) -> None:
    """Add keys in human units in addition to SI; a required quantity needs one of them."""
    properties: dict[str, Any] = {}
    required, alternatives = [], []
    for field, in_si in definition["properties"].items():
        described, keys = _or_text(in_si), file_keys(field)
        for human, inside, factor in file_units(field):
            scaled = {"default": _unscaled(described["default"], factor)} if "default" in described else {}
            properties[field[: -len(inside)] + human] = {**described, **scaled}
        if key := bare_key(field):
            properties[key] = _only_text(in_si)
        properties[field] = described
        if field in definition.get("required", []):
            if len(keys) == 1:
                required.append(field)
            else:
                alternatives.append({"oneOf": [{"required": [key]} for key in keys]})
    definition["properties"], definition["required"] = properties, required
    if alternatives:
        definition["allOf"] = alternatives
