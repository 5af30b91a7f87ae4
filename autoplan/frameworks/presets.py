"""Frameworks from shipped facts (by name) or from a TOML file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import decode, read_table
from autoplan.base.json_schema import schema
from autoplan.base.names import suggestion
from autoplan.frameworks.registry import BOOKS, TARGETS, check_rules, facts_files, names_of, versions_of
from autoplan.spec.framework import GROUPS, Framework


@lru_cache(maxsize=64)
def _table(name: str) -> dict[str, Any]:
    return read_table(facts_files()[name])


def _extendable() -> tuple[str, ...]:
    return tuple(name for name in facts_files() if "extends" not in _table(name))


@lru_cache(maxsize=64)
def _preset(name: str) -> Framework:
    return _decoded(_table(name), f"framework {name}")


def _decoded(table: dict[str, Any], where: str) -> Framework:
    """Return the framework in `table`; missing values, calibrations and fits come from the preset that it `extends`."""
    if "extends" in table:
        table = dict(table)
        name = table.pop("extends")
        if name not in (names := _extendable()):  # may have any type
            raise InputError(f"{where}: extends {name!r}, which must be one of {', '.join(names)}")
        table = _extended(_table(name), table)
        table = {"calibrated_as": name, **table}
    framework = decode(Framework, table, where)
    try:
        check_rules(framework)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return framework


def _extended(base: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `table`, group by group; an updated value is only "fitted" if `table` says so."""
    groups = {group: traits for group in GROUPS if isinstance(traits := table.get(group), dict)}
    restated = {trait for traits in groups.values() for trait in traits}
    inherited = [trait for trait in base.get("fitted", []) if trait not in restated]
    fitted = inherited + [trait for trait in table.get("fitted", []) if trait not in inherited]
    merged = {group: {**base.get(group, {}), **traits} for group, traits in groups.items()}
    stated = {text.partition("=")[0]: text for text in (*base.get("usual", ()), *table.get("usual", ()))}
    return {**base, **table, **merged, "usual": list(stated.values()), "fitted": fitted}


def preset_frameworks() -> tuple[str, ...]:
    """Return the ids of the shipped frameworks."""
    return tuple(facts_files())


def load_framework(text: str) -> Framework:
    """Return the framework for NAME (of facts or a target), NAME@VERSION, or a TOML file."""
    path = Path(text)
    if path.suffix == ".toml":
        return _decoded(read_table(path), str(path))
    name, at, version = text.partition("@")
    by_name = {name: facts for facts in facts_files() for name in names_of(facts)}
    if name not in by_name:
        listed = "autoplan list frameworks shows all, or give a TOML file"
        raise InputError(f"unknown framework {text[:80]!r}: {suggestion(name, by_name, listed)}")
    facts = by_name[name]
    if not at:
        return _preset(facts)
    if version not in (versions := versions_of(facts)):
        hint = f"known are {', '.join(versions)}, and the present one" if versions else "only the present one is known"
        if version and name in TARGETS and version in TARGETS[name].versions:
            hint += f", and plans for that version are searched with --to {text}"
        raise InputError(f"no version {version[:40]!r} of {name}: {hint}, which {name} alone names")
    return _preset(versions[version])


def framework_schema() -> dict[str, Any]:
    """Return the JSON Schema of a framework file, which may extend a shipped framework."""
    described = schema(Framework, human_units=True)
    properties = described["$defs"]["Framework"]["properties"]
    properties["extends"] = {"enum": list(_extendable())}
    properties["rules"] |= {"enum": list(BOOKS)}
    return described
