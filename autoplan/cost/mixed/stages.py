"""Work and memory of the stages of a mixed plan, term by term and moment by moment.

The functions are those of plans whose stages are alike; every stage is laid out on its own part (`part_layouts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.estimate import stage_cost
from autoplan.cost.memory.activations import chunk_activation_bytes
from autoplan.cost.mixed.estimate import StageTimes, estimate_mixed, pipeline_s
from autoplan.cost.mixed.part_layouts import Member, PartLayout, lay_out_kinds, memory_terms, stage_cells
from autoplan.cost.pipeline.order import PipelineShape
from autoplan.cost.timeline import HIDING, Pipeline, Timeline, check_length, memory_levels, pass_terms, step_timeline
from autoplan.spec.enums import Schedule
from autoplan.spec.estimate import PlacedStage, StageCost, StagePlace, probability_above
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, ReplicaKind
from autoplan.spec.mixed_result import MixedCost, MixedKindCost


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The stages of a replica as if all of them sat on one part and had one degree; `stages` are those that do."""

    layout: PartLayout
    at: int  # in the layout
    stages: tuple[int, ...]
    cells: dict[str, Floats]  # of `part_layouts.CELLS`, by stage
    memory: dict[str, Floats]  # terms, by stage

    def cost(self, stage: int) -> StageCost:
        """Cost of a micro-batch on a stage, and the memory that the stage holds."""
        return replace(
            stage_cost(self.layout.problem, self.layout.laid, self.at, stage),
            memory_bytes=float(self.cells["memory_bytes"][stage]),
            memory_terms_bytes={name: float(value[stage]) for name, value in self.memory.items()},
            oom_probability=probability_above(float(self.cells["oom_z"][stage])),
        )

    def levels(self) -> dict[str, Floats]:
        """`memory_levels`, with the replica's share of states."""
        laid = self.layout.laid
        levels = memory_levels(self.layout.problem, laid.memory, self.at)
        more = self.cells["memory_bytes"] - laid.memory.reserved_bytes[self.at]
        return {name: level + (name != "activations") * more for name, level in levels.items()}


def _rows(problem: MixedProblem, plan: MixedPlan, kind_at: int) -> Iterator[_Row]:
    kind = plan.kinds[kind_at]
    members = [Member(plan_at=0, kind_at=kind_at, plan=plan, kind=kind)]
    for layout in lay_out_kinds(problem, plan.parts, len(kind.stages), members):
        cells = stage_cells(problem, plan.parts, layout, members)
        for at, on_part in enumerate(layout.on_part):
            yield _Row(
                layout=layout,
                at=at,
                stages=tuple(np.flatnonzero(on_part).tolist()),
                cells={name: value[at] for name, value in cells.items()},
                memory=memory_terms(layout, members, at),
            )


def _places(problem: MixedProblem, plan: MixedPlan, kind_at: int) -> tuple[StagePlace, ...]:
    kind, names = plan.kinds[kind_at], problem.cluster.part_names
    return tuple(
        StagePlace(
            kind=plan.letters[kind_at],
            stage=at,
            part=names[stage.part],
            num_microbatches=kind.num_microbatches,
            capacity_bytes=problem.as_if(stage.part, frozenset((stage.part,))).capacity_bytes,
        )
        for at, stage in enumerate(kind.stages)
    )


def mixed_stages(problem: MixedProblem, plan: MixedPlan) -> tuple[PlacedStage, ...]:
    """Every stage of every kind of replica, in the order of the plan."""
    placed = []
    for kind_at in range(len(plan.kinds)):
        costs = {stage: row.cost(stage) for row in _rows(problem, plan, kind_at) for stage in row.stages}
        places = _places(problem, plan, kind_at)
        placed += [PlacedStage(place=place, cost=costs[place.stage]) for place in places]
    return tuple(placed)


# -- moment by moment -------------------------------------------------------------------------------------------------


def mixed_timeline(problem: MixedProblem, plan: MixedPlan) -> Timeline:
    """Timeline of the step that `estimate_mixed` prices, event by event; ranks are counted part by part."""
    for kind in plan.kinds:
        check_length(PipelineShape(_schedule(kind), len(kind.stages), kind.vp, kind.num_microbatches))
    (cost,) = estimate_mixed(problem, [plan])
    ranks = _ranks(problem, plan)
    pipelines = [_pipeline(problem, cost, at, ranks[at]) for at in range(len(plan.kinds))]
    return step_timeline(pipelines, cost.terms_s)


def _pipeline(problem: MixedProblem, cost: MixedCost, kind_at: int, ranks: Sequence[tuple[int, ...]]) -> Pipeline:
    plan, price, kind = cost.plan, cost.kinds[kind_at], cost.plan.kinds[kind_at]
    stages, num_devices = len(kind.stages), plan.num_devices
    # As of a plain cluster (`timeline`).
    has_room = kind.vp == 1 or (not problem.framework.overlap.p2p_overlap and kind.num_microbatches >= stages)
    passes: dict[tuple[str, int], dict[str, float]] = {}
    alive = np.zeros(stages * kind.vp)
    levels: dict[str, Floats] = {}
    end = {name: np.zeros(stages) for name in HIDING}
    for row in _rows(problem, plan, kind_at):
        stages_here, own = list(row.stages), row.layout.problem
        passes |= {
            key: terms
            for key, terms in pass_terms(own, row.layout.laid, row.at).items()
            if key[1] % stages in row.stages
        }
        chunks = np.flatnonzero(np.isin(np.arange(stages * kind.vp) % stages, stages_here))
        alive[chunks] = chunk_activation_bytes(own, row.layout.laid.batch)[row.at, chunks]
        for name, value in row.levels().items():
            levels.setdefault(name, np.zeros(stages))[stages_here] = value[stages_here]
        if num_devices > 1:
            for name, cell in zip(HIDING, ("reduce_s", "gather_s"), strict=True):
                end[name][stages_here] = row.cells[cell][stages_here]
    return Pipeline(
        schedule=_schedule(kind),
        vp=kind.vp,
        places=_places(problem, plan, kind_at),
        ranks=ranks,
        pass_terms_s=passes,
        hop_s=np.array([stage.send_s for stage in price.stages] * kind.vp)[:-1],
        blocking=stages > 1 and has_room,
        pipeline_s=price.pipeline_s,
        send_s=_exposed_send_s(problem, kind, price),
        alive_bytes=alive,
        levels=levels,
        end_s=end,
    )


def _exposed_send_s(problem: MixedProblem, kind: ReplicaKind, price: MixedKindCost) -> float:
    """Time that messages add to the pipeline."""
    counts = np.array([kind.num_microbatches]), np.array([kind.vp])
    return float(pipeline_s(StageTimes.of(price), *counts, overlaps=problem.framework.overlap.p2p_overlap).send_s[0])


def _schedule(kind: ReplicaKind) -> Schedule:
    return Schedule.INTERLEAVED if kind.vp > 1 else Schedule.ONE_F_ONE_B


def _ranks(problem: MixedProblem, plan: MixedPlan) -> list[list[tuple[int, ...]]]:
    """The devices of every stage of every kind: those of a part one after another, and before them all earlier parts.

    On its part a stage has neighbouring ones in all replicas of its kind, as the estimate takes them.
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
