"""Work and memory of the stages of a mixed plan, term by term and moment by moment.

Uses the functions for plans with equal stages; every stage is laid out on its own part (`part_layouts`).
"""

from __future__ import annotations

import numpy as np

from autoplan.cost.estimate import stage_cost
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.mixed.part_layouts import Member, lay_out_kinds
from autoplan.cost.pipeline.order import PipelineShape
from autoplan.cost.timeline import check_length, pipeline_of, step_timeline
from autoplan.spec.estimate import PlacedStage, StagePlace
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem
from autoplan.spec.timeline import Timeline


def _places(problem: MixedProblem, plan: MixedPlan, kind_at: int) -> tuple[StagePlace, ...]:
    kind, names = plan.kinds[kind_at], problem.cluster.part_names
    return tuple(
        StagePlace(
            kind=plan.letters[kind_at],
            stage=at,
            part=names[stage.part],
            num_microbatches=kind.num_microbatches,
            capacity_bytes=problem.alone(stage.part).capacity_bytes,
        )
        for at, stage in enumerate(kind.stages)
    )


def mixed_stages(problem: MixedProblem, plan: MixedPlan) -> tuple[PlacedStage, ...]:
    """Stages of every kind of replica, in the order of the plan."""
    placed = []
    for kind_at, kind in enumerate(plan.kinds):
        costs = {}
        for layout in lay_out_kinds(problem, problem.nodes_of(plan), [Member(plan, kind)]).layouts:
            assert layout.on_part is not None
            for row, stage in zip(*np.nonzero(layout.on_part), strict=True):
                costs[int(stage)] = stage_cost(layout.problem, layout.laid, row, int(stage))
        places = _places(problem, plan, kind_at)
        placed += [PlacedStage(place=place, cost=costs[place.stage]) for place in places]
    return tuple(placed)


def mixed_timeline(problem: MixedProblem, plan: MixedPlan) -> Timeline:
    """Timeline of the step priced by `estimate_mixed`, event by event; ranks are numbered part by part."""
    for kind in plan.kinds:
        check_length(PipelineShape(plan.schedule_of(kind), len(kind.stages), kind.vp, kind.num_microbatches))
    (cost,) = estimate_mixed(problem, [plan])
    pipelines = [
        pipeline_of(
            lay_out_kinds(problem, problem.nodes_of(plan), [Member(plan, kind)]),
            _places(problem, plan, kind_at),
            ranks,
            plan.num_devices,
        )
        for kind_at, (kind, ranks) in enumerate(zip(plan.kinds, _ranks(problem, plan), strict=True))
    ]
    return step_timeline(pipelines, cost.terms_s)


def _ranks(problem: MixedProblem, plan: MixedPlan) -> list[list[tuple[int, ...]]]:
    """Return the global ranks of every stage of every kind, numbered part by part.

    Within its part the ranks of a stage are consecutive over all replicas of its kind, as in the estimate.
    """
    sizes = [part.num_devices for part in problem.cluster.parts]
    free = np.cumsum([0, *sizes[:-1]]).tolist()
    ranks = []
    for kind in plan.kinds:
        of_stages = []
        for stage in kind.stages:
            first, count = free[stage.part], kind.count * plan.common.cp * stage.tp
            of_stages.append(tuple(range(first, first + count)))
            free[stage.part] += count
        ranks.append(of_stages)
    return ranks
