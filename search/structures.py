"""Pipelines that the parts of a mixed cluster can form, alone and together."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common.rules import Rule, legal_on_own_devices
from autoplan.frameworks.registry import book_of
from autoplan.search.limits import COUNTS, Limits, divisors
from autoplan.spec.axes import USUAL_SCHEDULES
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, as_parallel
from autoplan.spec.plan import ParallelPlan, PlanBatch, even_chunks

MAX_STAGES = 32  # deeper pipelines over different parts are mostly bubble
MIN_USED = 0.9  # share of the devices of its parts that a structure must use

_IN_STEP = (Sharding.ZERO2, Sharding.ZERO3)  # replicas communicate in every micro-batch

StageKind = tuple[int, int]  # part and tensor-parallel degree of a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Equal:
    """Properties that a framework needs to be equal in a plan."""

    tp: bool = False  # the tensor-parallel degree of all stages
    replicas: bool = False  # the layers and virtual stages of all replicas
    batches: bool = False  # their sizes and numbers of micro-batches too


NOTHING_EQUAL = Equal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """`count` replicas with their stages, before layers and micro-batches are shared out."""

    count: int
    places: tuple[StageKind, ...]
    vp: int = 1
    schedule: Schedule = Schedule.ONE_F_ONE_B

    @property
    def round(self) -> int:
        """Number of micro-batches per round: interleaved pipelines need a multiple of their stages."""
        return len(self.places) if self.schedule == Schedule.INTERLEAVED else 1

    def tp_on(self, part: int) -> int:
        """Devices of a part in one of the pipelines, of each context-parallel rank."""
        return sum(tp for at, tp in self.places if at == part)

    @property
    def has_one_tp(self) -> bool:
        """Return whether all stages have the same tensor-parallel degree."""
        return len({tp for _, tp in self.places}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Replicas of one or more kinds, and their common axes (`MixedPlan.common`)."""

    kinds: tuple[Pipelines, ...]
    micro_batches: tuple[int, ...]  # of every kind
    common: ParallelPlan

    @property
    def schedule(self) -> Schedule:
        """Schedule of all pipelines (`MixedPlan.schedule`)."""
        return common_schedule(kind.schedule for kind in self.kinds)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sequences in a round of micro-batches of one replica of every kind."""
        return tuple(size * kind.round for size, kind in zip(self.micro_batches, self.kinds, strict=True))

    def is_in_step(self, equal: Equal) -> bool:
        """Return whether all replicas have equal numbers of micro-batches."""
        return self.common.sharding in _IN_STEP or (equal.batches and len(self.kinds) > 1)

    def rounds_in_step(self, global_batch: int) -> tuple[int, ...] | None:
        """Return the rounds of every kind over all its replicas, equal in each; None if they do not make the batch."""
        counts = [kind.count for kind in self.kinds]
        rounds, remainder = divmod(global_batch, sum(map(operator.mul, counts, self.sizes)))
        return tuple(rounds * count for count in counts) if rounds and not remainder else None


class Layout(NamedTuple):
    """A structure with the layers of every stage, and the rounds of micro-batches of every kind over its replicas."""

    structure: Structure
    layers: tuple[int, ...]
    rounds: tuple[int, ...]


def common_schedule(schedules: Iterable[Schedule]) -> Schedule:
    """Return the schedule of pipelines, some of which may be plain and others interleaved 1F1B."""
    return next((schedule for schedule in schedules if schedule not in USUAL_SCHEDULES), Schedule.ONE_F_ONE_B)


def lawful(
    problem: MixedProblem, rules: tuple[Rule, ...], plans: Sequence[MixedPlan], limits: Sequence[Limits] = ()
) -> Bools:
    """Return which plans obey a framework's rules, and the limits of every part if given, stage by stage."""
    result = np.ones(len(plans), dtype=np.bool_)
    stages = [
        (at, stage.part, as_parallel(problem, plan, kind, stage.tp))
        for at, plan in enumerate(plans)
        for kind in plan.kinds
        for stage in {(stage.part, stage.tp): stage for stage in kind.stages}.values()
    ]
    if not stages:
        return result
    owner, _, parallel = zip(*stages, strict=True)
    batch = PlanBatch.of(parallel, problem.model.num_layers)
    np.logical_and.at(result, np.array(owner), legal_on_own_devices(rules, problem.alone(0).workload, batch))
    for at, part, plan in stages if limits else ():
        result[at] &= all(limits[part].admits(axis, getattr(plan, axis)) for axis in COUNTS)
    return result


def first_layers(problem: MixedProblem, chunks: int) -> tuple[int, ...]:
    """Return the layers of every chunk before they are shared out; a framework may have no others."""
    split, model = book_of(problem.framework).split, problem.model
    return split(model, chunks) if split else even_chunks(model.num_layers, chunks)


def orders(problem: MixedProblem, parts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield orders of parts in a pipeline: most memory first, as early stages store more; of two also the reverse."""
    memory = {part: problem.cluster.parts[part].device.visible_memory_bytes for part in parts}
    order = tuple(sorted(parts, key=lambda part: (-memory[part], part)))
    yield order
    if len(order) == 2:
        yield order[::-1]


def pipelines(
    problem: MixedProblem, parts: Sequence[int], most_replicas: int, degrees: Mapping[int, Sequence[int]], cp: int = 1
) -> tuple[Pipelines, ...]:
    """Return ways to form equal pipelines from nearly all devices of `parts`, with tp `degrees` and one `cp`."""
    size = {part: problem.cluster.parts[part].num_devices for part in parts}
    deepest = min(problem.model.num_layers, MAX_STAGES)
    kinds = []
    for order in orders(problem, parts):
        for tps in itertools.product(*(degrees[part] for part in order)):
            if len(order) > 2 and any(
                tp != min(max(tps), max(degrees[part])) for part, tp in zip(order, tps, strict=True)
            ):
                continue
            groups = [size[part] // (tp * cp) for part, tp in zip(order, tps, strict=True)]
            for count in sorted({divisor for group in groups if group for divisor in divisors(group)}):
                depths = [group // count for group in groups]
                used = cp * sum(count * depth * tp for depth, tp in zip(depths, tps, strict=True))
                if 0 in depths or sum(depths) > deepest or count > most_replicas:
                    continue
                if used >= MIN_USED * sum(size.values()):
                    stages = [[(part, tp)] * depth for part, tp, depth in zip(order, tps, depths, strict=True)]
                    kinds.append(Pipelines(count=count, places=tuple(itertools.chain(*stages))))
    return tuple(dict.fromkeys(kinds))


def groupings(parts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield ways to divide parts into groups: each group forms its own pipelines, the remaining parts are idle."""
    if not parts:
        yield ()
        return
    first, later = parts[0], parts[1:]
    for grouping in groupings(later):
        yield grouping  # the first group is idle
        yield ((first,), *grouping)
        for at, group in enumerate(grouping):
            yield (*grouping[:at], (first, *group), *grouping[at + 1 :])
