"""Explanation of a plan of a mixed cluster: its stages, and the step after single changes of the plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoplan.base.errors import AutoplanError
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.mixed.stages import mixed_stages
from autoplan.frameworks.registry import book_of
from autoplan.search.ranking import TIE
from autoplan.search.structures import lawful
from autoplan.spec.axes import DEFAULT_RECOMPUTE_MODULES
from autoplan.spec.enums import Recompute, Schedule, Sharding
from autoplan.spec.explanation import MixedExplanation, MixedNeighbour
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, MixedStage, ReplicaKind, check_mixed
from autoplan.spec.plan import even_chunks
from autoplan.spec.plan_file import MixedPlanFile

MAX_ALTERNATIVES = 3
_OTHER_CHUNKS = (1, 2, 4)  # virtual stages

Change = tuple[str, str, str]


def explain_mixed(problem: MixedProblem, file: MixedPlanFile) -> MixedExplanation:
    """Explain the best plan of `file`: time and memory of its stages, and the step of neighbouring plans."""
    changed = _neighbours(problem, file.best.plan)
    best, *changed_costs = estimate_mixed(problem, [file.best.plan, *changed])
    neighbours = [
        MixedNeighbour(change=change, plan=changed_cost, ratio=best.sequences_per_s / changed_cost.sequences_per_s)
        for change, changed_cost in zip(changed.values(), changed_costs, strict=True)
    ]
    return MixedExplanation(
        command=file.command,
        plan=best,
        stages=mixed_stages(problem, file.best.plan),
        changes=_worth_showing(neighbours),
        alternatives=file.alternatives[:MAX_ALTERNATIVES],
        certificate=file.certificate,
    )


def _worth_showing(neighbours: Iterable[MixedNeighbour]) -> tuple[MixedNeighbour, ...]:
    """Return, per kind of change with an effect, the fastest neighbour and the fastest one that fits."""
    fastest: dict[tuple[str, bool], MixedNeighbour] = {}
    for near in sorted((near for near in neighbours if abs(near.ratio - 1) > TIE), key=lambda near: near.ratio):
        fits = near.plan.verdict == "fits"
        if fits or (near.change[0], True) not in fastest:
            fastest.setdefault((near.change[0], fits), near)
    return tuple(fastest.values())


def _neighbours(problem: MixedProblem, plan: MixedPlan) -> dict[MixedPlan, Change]:
    """Return the plans with one change that the framework runs and that can be priced."""
    changed: dict[MixedPlan, Change] = {}
    for change, fields in _changes(plan):
        try:
            changed_plan = replace(plan, **fields)  # type: ignore[arg-type]
            check_mixed(problem, changed_plan)
        except AutoplanError:
            continue
        if changed_plan != plan:
            changed[changed_plan] = change
    runs = lawful(problem, book_of(problem.framework).rules, list(changed))
    return dict(itertools.compress(changed.items(), runs))


def _changes(plan: MixedPlan) -> Iterator[tuple[Change, dict[str, object]]]:
    """Yield changes, with the plan fields that each sets."""
    common = plan.common
    for recompute in Recompute:
        modules = DEFAULT_RECOMPUTE_MODULES
        again = replace(common, recompute=recompute, recompute_modules=modules, recompute_num_layers=None)
        yield ("recomputation", common.recompute, recompute), {"common": again}
    for sharding in Sharding:
        unshared = tuple(replace(kind, state_share=None) for kind in plan.kinds)
        kinds = unshared if sharding == "none" else plan.kinds
        yield ("sharding", common.sharding, sharding), {"common": replace(common, sharding=sharding), "kinds": kinds}
    for schedule, vp in itertools.product(Schedule, _OTHER_CHUNKS):
        if all(min(stage.layers for stage in kind.stages) >= vp for kind in plan.kinds):
            kinds = tuple(_in_chunks(kind, vp) for kind in plan.kinds)
            in_schedule = replace(plan, kinds=kinds, schedule=schedule)
            yield ("schedule", _schedule(plan), _schedule(in_schedule)), {"kinds": kinds, "schedule": schedule}
    for at, kind in enumerate(plan.kinds):
        letter = plan.letters[at]
        of = f" of {letter}" if letter else ""
        for axis, before, after, changed_kind in (*_other_micro_batches(kind), *_other_layers(kind)):
            yield (f"{axis}{of}", before, after), {"kinds": (*plan.kinds[:at], changed_kind, *plan.kinds[at + 1 :])}
    for giver, taker in itertools.permutations(range(len(plan.kinds)), 2):
        yield from _shifted(plan, giver, taker)


def _in_chunks(kind: ReplicaKind, vp: int) -> ReplicaKind:
    """Return the replicas with this many virtual stages, if they have several stages."""
    if len(kind.stages) == 1:
        return kind
    stages = (replace(stage, chunks=even_chunks(stage.layers, vp) if vp > 1 else ()) for stage in kind.stages)
    return replace(kind, stages=tuple(stages))


def _schedule(plan: MixedPlan) -> str:
    """Return the schedule of the deepest pipelines, with its virtual stages."""
    deepest = max(plan.kinds, key=lambda kind: len(kind.stages))
    schedule, vp = plan.schedule_of(deepest), deepest.vp
    return f"{schedule} {vp}" if schedule == Schedule.INTERLEAVED else schedule


def _other_micro_batches(kind: ReplicaKind) -> Iterator[tuple[str, str, str, ReplicaKind]]:
    """Yield micro-batches of half and twice the size, for the same number of sequences."""
    sequences = kind.micro_batch * kind.num_microbatches
    for size in (kind.micro_batch // 2, 2 * kind.micro_batch):
        if size and sequences % size == 0:
            changed_kind = replace(kind, micro_batch=size, num_microbatches=sequences // size)
            yield "micro-batch", str(kind.micro_batch), str(size), changed_kind


def _other_layers(kind: ReplicaKind) -> Iterator[tuple[str, str, str, ReplicaKind]]:
    """Yield pipelines with one layer of a stage moved to the next or previous stage."""
    for at, by in itertools.product(range(len(kind.stages) - 1), (-1, 1)):
        stage, following = kind.stages[at : at + 2]
        if min(stage.layers + by, following.layers - by) < 1:
            continue
        moved = (stage.with_layers(stage.layers + by), following.with_layers(following.layers - by))
        changed_kind = replace(kind, stages=(*kind.stages[:at], *moved, *kind.stages[at + 2 :]))
        yield "layers", _layers(kind.stages), _layers(changed_kind.stages), changed_kind


def _layers(stages: tuple[MixedStage, ...]) -> str:
    return ", ".join(str(stage.layers) for stage in stages)


def _shifted(plan: MixedPlan, giver: int, taker: int) -> Iterator[tuple[Change, dict[str, object]]]:
    """Yield the plan with the fewest possible sequences moved from replicas of one kind to those of another."""
    kinds = list(plan.kinds)
    rounds = [kinds[at].count * kinds[at].micro_batch for at in (giver, taker)]
    moved = math.lcm(*rounds)
    counts = (kinds[giver].num_microbatches - moved // rounds[0], kinds[taker].num_microbatches + moved // rounds[1])
    if counts[0] < 1:
        return
    for at, count in zip((giver, taker), counts, strict=True):
        kinds[at] = replace(kinds[at], num_microbatches=count)
    pair = sorted((giver, taker))
    before, after = (", ".join(str(of[at].num_microbatches) for at in pair) for of in (plan.kinds, kinds))
    axis = f"micro-batches of {', '.join(plan.letters[at] for at in pair)}"
    yield (axis, before, after), {"kinds": tuple(kinds)}
