"""Mixed clusters, from clusters joined by + or from a file of parts and the links between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import decode, is_file, read_table
from autoplan.base.json_schema import schema
from autoplan.readers.cluster import cluster_from_table, cluster_schema, load_cluster
from autoplan.topology.cluster import ClusterSpec
from autoplan.topology.mixed_cluster import BetweenSpec, MixedCluster, joined


def load_parts(text: str) -> ClusterSpec | MixedCluster:
    """Return the cluster for names joined by +, or for a TOML file of parts; equal parts on one network are merged."""
    path = Path(text)
    if path.suffix == ".toml" or is_file(path):
        table = read_table(path)
        return _from_table(table, str(path)) if "parts" in table else cluster_from_table(table, str(path))
    names = text.split("+")
    if "," in text:
        raise InputError(f"cluster {text!r}: clusters are joined by +, as in {text.replace(',', '+')}")
    if len(names) == 1:
        return load_cluster(text)
    return joined([load_cluster(name) for name in names], BetweenSpec(), text)


def _from_table(table: dict[str, Any], where: str) -> ClusterSpec | MixedCluster:
    if unknown := sorted(table.keys() - {"name", "parts", "between"}):
        raise InputError(f"{where}: unknown key {unknown[0]!r}; known: between, name, parts")
    parts, between, name = table["parts"], table.get("between", {}), table.get("name", Path(where).stem)
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise InputError(f"{where}: parts must be tables, each begun by [[parts]]")
    if not isinstance(between, dict) or not isinstance(name, str):
        raise InputError(f"{where}: between must be a table and name a text")
    loaded = [_part(part, f"{where}: parts[{at}]") for at, part in enumerate(parts)]
    return joined(loaded, decode(BetweenSpec, between, f"{where}: between"), name)


def _part(table: dict[str, Any], where: str) -> ClusterSpec:
    """Return a part: `cluster` is a name as on the command line, or the table describes the cluster."""
    if "cluster" not in table:
        return cluster_from_table(table, where)
    if len(table) > 1 or not isinstance(table["cluster"], str):
        raise InputError(f"{where}: write cluster = 'NAME:NODESxDEVICES' alone, or describe the cluster without it")
    try:
        return load_cluster(table["cluster"])
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def mixed_schema() -> dict[str, Any]:
    """Return the JSON Schema of a file of parts, each of them a cluster or its name."""
    described, cluster = schema(MixedCluster, human_units=True), cluster_schema()
    described["$defs"] |= cluster["$defs"]
    by_name = {"type": "object", "properties": {"cluster": {"type": "string"}}, "required": ["cluster"]}
    parts = described["$defs"]["MixedCluster"]["properties"]["parts"]
    parts["items"] = {"anyOf": [by_name | {"additionalProperties": False}, parts["items"]]}
    described["$defs"]["MixedCluster"]["required"] = ["parts"]
    return described
