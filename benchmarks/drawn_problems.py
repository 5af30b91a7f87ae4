"""Random problems of the presets, and random plans of their spaces, for the benchmarks that check answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from autoplan.api.problem import make_problem, make_space
from autoplan.api.training_run import resized
from autoplan.base.arrays import Ints
from autoplan.base.errors import AutoplanError
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.frameworks.common.rules import legal
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.model import load_model, preset_models
from autoplan.search.cells import Cell
from autoplan.search.flags import EXTENTS, FORBIDDEN
from autoplan.search.limits import COUNTS
from autoplan.search.space import Space
from autoplan.spec.axes import SEARCHED, shown
from autoplan.spec.axis import Kind
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem

STATE_BYTES = 18  # of a parameter: with less memory in all hardly a plan fits
KEPT_SCHEDULES = 0.1  # share of the further schedules of a framework that a search keeps
FEW = 0.1  # of the problems that have no plan, or hardly one that fits, are taken
SMALL_NODES, SMALL_DEVICES = (1, 2, 3, 4, 6, 8), (1, 2, 4, 6, 8, 16)
LARGE_NODES = (32, 48, 64, 96, 128, 192, 256, 512, 768, 1024, 2048)
LARGE_DEVICES = 16_384
DRAWN_CELLS = 512  # at once
MAX_DRAWS = 20  # of this many cells, until a space is taken to hold too few legal plans

Rng = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A problem with its space, as the command line makes them, and the command."""

    command: str
    batch: str
    space_flags: dict[str, Any]
    problem: Problem
    space: Space

    def on(self, num_nodes: int) -> tuple[Problem, Space]:
        """Return the problem on this many nodes."""
        problem = resized(self.problem, num_nodes)
        return problem, make_space(problem, self.batch, **self.space_flags)


@cache
def _models() -> dict[str, list[str]]:
    """The presets of every kind of model."""
    found: dict[str, list[str]] = {}
    for name in preset_models():
        found.setdefault(kind_of(load_model(name)), []).append(name)
    return found


@cache
def _frameworks() -> dict[str, list[str]]:
    """The presets that keep to every book of rules."""
    found: dict[str, list[str]] = {}
    for name in preset_frameworks():
        found.setdefault(load_framework(name).rules, []).append(name)
    found.pop("unknown")
    return found


def _one_of(kinds: dict[str, list[str]], rng: Rng) -> str:
    """Kinds are as likely as one another, however many there are of each."""
    return str(rng.choice(kinds[str(rng.choice(list(kinds)))]))


def draw_model(rng: Rng) -> str:
    """Return a random preset of a model; kinds of models are equally likely."""
    return _one_of(_models(), rng)


def kind_of(model: ModelSpec) -> str:
    """Kind of its layers."""
    return "hybrid" if model.layer_pattern else "MLA" if model.mla else "MoE" if model.moe else "dense"


def draw(rng: Rng, *, is_large: bool, is_narrowed: bool = True) -> Case | None:
    """A random problem, its space narrowed at random or whole; None where what was drawn does not go together."""
    name, nodes = str(rng.choice(preset_clusters())), int(rng.choice(LARGE_NODES if is_large else SMALL_NODES))
    devices = load_cluster(name).devices_per_node if is_large else int(rng.choice(SMALL_DEVICES))
    if not (256 <= nodes * devices <= LARGE_DEVICES if is_large else nodes * devices <= 64):
        return None
    parts: dict[str, Any] = {
        "model": _one_of(_models(), rng),
        "cluster": f"{name}:{nodes}x{devices}",
        "precision": str(rng.choice(["bf16", "bf16", "fp16", "fp8"])),
        "framework": _one_of(_frameworks(), rng),
    }
    seq_len = int(rng.choice((1024, 2048, 4096, 8192, 32768)))
    usual = nodes * devices * int(rng.choice((1, 2, 3, 4, 8)))
    batch = f"{usual}:{usual * 3 // 2}" if rng.random() < 0.25 else str(usual if rng.random() < 0.9 else usual // 2 + 1)
    space_flags: dict[str, Any] = {"fix": [], "at_most": [], "forbid": []}
    try:
        problem = make_problem(**parts, seq_len=seq_len)
        # Sometimes with so little memory that only few plans fit.
        if rng.random() < 0.3:
            problem = replace(problem, reserve_bytes=float(rng.uniform(0.3, 0.95)) * problem.capacity_bytes)
        states = STATE_BYTES * count_parameters(problem.model)
        if states > problem.capacity_bytes * problem.cluster.num_devices and rng.random() >= FEW:
            return None
        if is_narrowed:
            space_flags["forbid"] = _forbidden(rng, problem, batch, 0.3 if is_large else 0.8)
        space = make_space(problem, batch, **space_flags)
        if is_narrowed and rng.random() < (0.2 if is_large else 0.6):
            space_flags |= _narrowing(rng, space)
            space = make_space(problem, batch, **space_flags)
    except AutoplanError:
        return None
    words = [parts.pop("model"), *(f"--{key} {value}" for key, value in parts.items())]
    words += [f"--global-batch {batch}", f"--seq-len {seq_len}"]
    words += [
        f"--{key} {value}"
        for key, flag in zip(("fix", "max", "forbid"), space_flags, strict=True)
        for value in space_flags[flag]
    ]
    if problem.reserve_bytes:
        words.append(f"--reserve-memory {problem.reserve_bytes / 2**30:.3f}GiB")
    return Case(command=" ".join(words), batch=batch, space_flags=space_flags, problem=problem, space=space)


def _forbidden(rng: Rng, problem: Problem, batch: str, share: float) -> list[str]:
    """Random share of the choices that this framework offers beside the plain ones."""
    plain = {f"{axis.name}={shown(axis.default)}" for axis in SEARCHED} | {"recompute=none"}
    choices = {choice for choice in FORBIDDEN if "=" in choice or choice in EXTENTS}
    found: list[str] = []
    for choice in sorted(choices - plain):
        # Zero-bubble pipelines are priced pass by pass, which takes long where there are many micro-batches.
        if rng.random() >= (1.0 - KEPT_SCHEDULES if choice.startswith("schedule=") else share):
            continue
        try:
            make_space(problem, batch, fix=[], at_most=[], forbid=[*found, choice])
        except AutoplanError:
            continue
        found.append(choice)
    return found


def _narrowing(rng: Rng, space: Space) -> dict[str, list[str]]:
    """An axis that is fixed to its value in some plan, or bounded by it."""
    plans = draw_plans(space, space.cells(), rng, 1)
    if not len(plans):
        return {}
    plan = plans.plan(0)
    if rng.random() < 0.5:
        axis = str(rng.choice((*COUNTS, *(axis.name for axis in SEARCHED if axis.kind is Kind.WORD))))
        return {"fix": [f"{axis}={getattr(plan, axis)}"]}
    axis = str(rng.choice(COUNTS))
    return {"at_most": [f"{axis}={getattr(plan, axis)}"]}


def draw_plans(space: Space, cells: Sequence[Cell], rng: Rng, count: int) -> PlanBatch:
    """Draw legal plans, fewer where they are rare: of a random cell a random group, kind and plan of the kind."""
    parts: list[PlanBatch] = []
    for _ in range(MAX_DRAWS if cells else 0):
        drawn_cells = [cells[at] for at in rng.integers(len(cells), size=min(DRAWN_CELLS, 2 * count))]
        groups, owner = space.groups(drawn_cells)
        rows = _one_each(owner, rng)
        groups, owner = groups.take(rows), owner[rows]
        kinds, of_group = space.kinds(drawn_cells, groups, owner)
        kinds, of_kind = space.shared(kinds.take(_one_each(of_group, rng)))
        kinds = kinds.take(_one_each(of_kind, rng))
        for inside, kind in space.alike(kinds):
            if len(inside):
                plans = space.plans_of(kinds, inside, kind, rng.integers(len(inside), size=len(kind)))
                parts.append(plans.take(legal(space.rules, space.workload, plans)))
        if sum(map(len, parts)) >= count:
            break
    if not parts:
        return space.candidates([])
    return PlanBatch.concatenate(parts).take(np.arange(min(count, sum(map(len, parts)))))


def _one_each(owner: Ints, rng: Rng) -> Ints:
    """A random row of each owner."""
    order = rng.permutation(len(owner))
    return order[np.unique(owner[order], return_index=True)[1]]
