"""Price of a step whose replicas and stages are on different devices.

Pipelines are assembled as on a plain cluster (`cost.step`); this module combines the replicas of a step.  On a single
part the result equals that of `estimate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.cost.estimate import interval, oom_z
from autoplan.cost.input_rate import with_samples
from autoplan.cost.memory.stage_memory import host_bytes
from autoplan.cost.mixed.part_layouts import Member, lay_out_kinds, sharded_bytes
from autoplan.cost.spreads import Familiarity
from autoplan.cost.step import LaidOutPipelines, PartLayout, over_stages, step_terms, with_stragglers
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, Nodes, ReplicaKind, check_mixed
from autoplan.spec.mixed_result import MixedCost, MixedKindCost, MixedStageCost
from autoplan.spec.terms import END_TERMS, PIPELINE_TERMS, STEP_TERMS


def estimate_mixed(problem: MixedProblem, plans: Sequence[MixedPlan]) -> tuple[MixedCost, ...]:
    """Step time and memory of every plan; a plan that does not fit is priced like any other.

    Raises InputError for a plan that does not match the problem, UnpricedError for one that cannot be priced.
    """
    if not plans:
        return ()
    members: list[Member] = []
    alike: dict[tuple[Nodes, int], list[int]] = defaultdict(list)
    nodes = list(map(problem.nodes_of, plans))
    for plan, of_plan in zip(plans, nodes, strict=True):
        check_mixed(problem, plan)
        for kind in plan.kinds:
            alike[of_plan, len(kind.stages)].append(len(members))
            members.append(Member(plan, kind))
    plan_of = np.repeat(np.arange(len(plans)), [len(plan.kinds) for plan in plans])
    terms = {name: np.zeros(len(members)) for name in STEP_TERMS}
    stages: dict[int, tuple[MixedStageCost, ...]] = {}
    kinds_z, familiarity = np.zeros(len(members)), Familiarity.full(len(plans))
    for (used, _), at in alike.items():
        pipelines = lay_out_kinds(problem, used, [members[member] for member in at])
        for name, value in step_terms(pipelines).items():
            terms[name][at] = value
        stages.update(zip(at, _stage_costs(problem, [members[member].kind for member in at], pipelines), strict=True))
        kinds_z[at] = pipelines.largest([_oom_z(layout) for layout in pipelines.layouts])
        for layout in pipelines.layouts:
            own = plan_of[np.array(at)[layout.pipeline]]
            familiarity.lessen(own, Familiarity.of(layout.problem, layout.laid.batch))
    pipeline_s = add_up(terms[name] for name in PIPELINE_TERMS)
    of_plans = with_stragglers(_of_plans(terms, pipeline_s, plan_of), np.array([plan.num_devices for plan in plans]))
    step_s = add_up(of_plans.values())
    low_s, high_s = interval(of_plans, step_s, familiarity)
    kinds = [MixedKindCost(stages=stages[at], pipeline_s=float(pipeline_s[at])) for at in range(len(members))]
    starts = np.flatnonzero(np.diff(plan_of, prepend=-1))
    plans_z = np.maximum.reduceat(kinds_z, starts)
    costs = (
        MixedCost(
            plan=plan,
            step_s=float(step_s[at]),
            low_s=float(low_s[at]),
            high_s=float(high_s[at]),
            terms_s={name: float(value[at]) for name, value in of_plans.items()},
            kinds=tuple(kinds[starts[at] : starts[at] + len(plan.kinds)]),
            oom_z=float(plans_z[at]),
        )
        for at, plan in enumerate(plans)
    )
    return tuple(with_samples(problem.training, sum(used), cost) for used, cost in zip(nodes, costs, strict=True))


def _of_plans(terms_s: Mapping[str, Floats], pipeline_s: Floats, plan_of: Ints) -> dict[str, Floats]:
    """Terms of steps whose replicas wait for the last pipeline, and then for the slowest of every end-of-step term."""
    first = np.flatnonzero(np.diff(plan_of, prepend=-1))
    last = np.lexsort((-pipeline_s, plan_of))[first]
    ends = {name: np.maximum.reduceat(terms_s[name], first) for name in END_TERMS}
    return {name: terms_s[name][last] for name in PIPELINE_TERMS} | ends


def _oom_z(layout: PartLayout) -> Floats:
    """Return `oom_z` of every row's stages on the part, for device or host memory."""
    own, laid = layout.problem, layout.laid
    parameters = laid.parameters if layout.on_part is None else laid.parameters.of(layout.on_part)
    reserved, offloaded = map(layout.only_on_part, (laid.memory.reserved_bytes, laid.memory.offloaded_bytes))
    return oom_z(own, reserved.max(axis=1), host_bytes(own, laid.batch, parameters, offloaded))


def _layer_s(layout: PartLayout) -> Floats:
    """Both passes of one layer of each kind: shape (rows, kinds of layers)."""
    repeats = layout.laid.batch.recompute_num_layers > 0
    of_block = {
        block: cost.total_forward_s + cost.total_backward_s + np.where(repeats, cost.total_repeat_s, 0.0)
        for block, cost in layout.laid.costs.blocks.items()
    }
    layers = layout.problem.model.layer_kinds
    return layout.overall * np.stack([add_up(of_block[block] for block in layer) for layer in layers], axis=1)


def _stage_costs(
    problem: MixedProblem, kinds: Sequence[ReplicaKind], pipelines: LaidOutPipelines
) -> list[tuple[MixedStageCost, ...]]:
    layouts, shape = pipelines.layouts, pipelines.forward_s.shape
    layer_s = [_layer_s(layout) for layout in layouts]
    of_layers = [
        over_stages(layouts, [np.repeat(value[:, [sort]], shape[1], axis=1) for value in layer_s], shape[0])
        for sort in range(layer_s[0].shape[1])
    ]
    memory = [layout.laid.memory.reserved_bytes for layout in layouts]
    scores = [oom_z(layout.problem, of_part, np.zeros(1)) for layout, of_part in zip(layouts, memory, strict=True)]
    values = {
        "forward_s": pipelines.forward_s,
        "backward_s": pipelines.backward_s,
        "send_s": pipelines.hop_s,
        "memory_bytes": over_stages(layouts, memory, shape[0]),
        "sharded_bytes": sharded_bytes(pipelines),
        "oom_z": over_stages(layouts, scores, shape[0]),
    }
    return [
        tuple(
            MixedStageCost(
                part=stage.part,
                tp=stage.tp,
                layers=stage.layers,
                layer_s=tuple(float(value[at, place]) for value in of_layers),
                capacity_bytes=problem.alone(stage.part).capacity_bytes,
                **{name: float(value[at, place]) for name, value in values.items()},
            )
            for place, stage in enumerate(kind.stages)
        )
        for at, kind in enumerate(kinds)
    ]
