"""Lists of built-in models, clusters, devices, frameworks and export targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from autoplan.api.results import Table
from autoplan.base.errors import InputError
from autoplan.base.files import read_text, shipped
from autoplan.base.units import GIB, format_tokens
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import TARGETS, facts_files, names_of, versions_of
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.device import load_device, preset_devices
from autoplan.readers.model import load_model, preset_models


def known(kind: str) -> Table:
    """Return the table of "models", "clusters", "devices", "frameworks" or "targets"; InputError for other kinds."""
    if kind not in KINDS:
        raise InputError(f"unknown kind {kind!r}: known are {', '.join(KINDS)}")
    return Table.of(KINDS[kind]())


def template(kind: str) -> str:
    """Return a commented template for a "cluster", "device" or "model" that loads as it is; InputError for others."""
    templates = shipped("templates")
    if kind not in templates:
        raise InputError(f"no template for {kind!r}: known are {', '.join(templates)}")
    return read_text(templates[kind])


def _models() -> Iterator[dict[str, Any]]:
    for name in preset_models():
        model = load_model(name)
        experts = f"{model.moe.num_experts} x {model.moe.expert_ffn_size}" if model.moe else ""
        yield {
            "model": name,
            "parameters": format_tokens(count_parameters(model)),
            "layers": model.num_layers,
            "hidden size": model.hidden_size,
            "experts": experts,
        }


def _clusters() -> Iterator[dict[str, Any]]:
    for name in preset_clusters():
        cluster = load_cluster(name)
        levels = ", ".join(f"{level.kind} of {level.num_devices}" for level in cluster.levels)
        yield {
            "cluster": name,
            "devices a node": cluster.devices_per_node,
            "device": cluster.device.name,
            "links": levels,
        }


def _devices() -> Iterator[dict[str, Any]]:
    for name in preset_devices():
        device = load_device(name)
        assert device is not None
        peak = device.peak_flops_per_s.get("bf16", device.peak_flops_per_s.get("fp16", 0.0))
        yield {
            "device": name,
            "memory GiB": f"{device.memory_bytes / GIB:g}",
            "GB/s": f"{device.memory_bandwidth_bytes_per_s / 1e9:,.0f}",
            "TFLOP/s": f"{peak / 1e12:,.4g}",
            "generation": "announced" if device.is_announced else device.generation,
        }


def _frameworks() -> Iterator[dict[str, Any]]:
    """Yield a row for each framework: those with rules first, then those known from published runs alone."""
    versions = {facts for name in facts_files() for facts in versions_of(name).values()}
    for facts in sorted(facts_files(), key=lambda facts: load_framework(facts).rules == "unknown"):
        rules = load_framework(facts).rules
        targets = [target.name for target in TARGETS.values() if rules in target.rules and rules != "unknown"]
        if facts not in versions:
            yield {
                "framework": facts,
                "also called": ", ".join(names_of(facts)[1:]),
                "@version": ", ".join(versions_of(facts)),
                "exported to": ", ".join(targets),
            }


def _targets() -> Iterator[dict[str, Any]]:
    for name, target in TARGETS.items():
        rules = ("frameworks without rules" if rules == "unknown" else rules for rules in sorted(target.rules))
        yield {"target": name, "@version": ", ".join(target.versions), "plans of": ", ".join(rules)}


NUMBERS = ("parameters", "layers", "hidden size", "devices a node", "memory GiB", "GB/s", "TFLOP/s")  # columns
KINDS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "models": _models,
    "clusters": _clusters,
    "devices": _devices,
    "frameworks": _frameworks,
    "targets": _targets,
}
