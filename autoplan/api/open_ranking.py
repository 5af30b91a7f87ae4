"""Candidate plans of a search, and the measurements that could make another one win."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from autoplan.api.plan_files import load_plan_file, problem_of
from autoplan.api.timings import FoundTimings, usable_timings, with_measurements
from autoplan.base.errors import InputError, NoStoreError
from autoplan.cost.estimate import estimate
from autoplan.cost.lookups import looked_up_shapes
from autoplan.profiler.lookup_tasks import Lookups, lookup_tasks
from autoplan.profiler.protocol import BESIDE, Hello, Task
from autoplan.profiler.record import Mode
from autoplan.profiler.tasks import MeasurementScope, RankedTask, TaskKey, reference_s
from autoplan.search.measurement_value import (
    MeasurementAdvice,
    OperationGroup,
    advise_measurements,
    family_of,
    spread_of_price,
)
from autoplan.search.ranking import ranked
from autoplan.spec.measurement import Measurement, Measurements
from autoplan.spec.operations import COLLECTIVES, Operation
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.timing import PROVENANCES


class OpenRanking:
    """Plans of a search that may be the fastest, by the times that the database at `url` holds."""

    def __init__(self, path: Path, url: str | None, modes: tuple[Mode, ...]) -> None:
        self.file: PlanFile = load_plan_file(path)
        if not self.file.alternatives:
            raise InputError(f"{path} contains one plan and no alternatives: pass the output of autoplan search")
        self._url, self._modes = url, modes

    @property
    def _plans(self) -> list[ParallelPlan]:
        return [ranked_plan.plan for ranked_plan in (self.file.best, *self.file.alternatives)]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Return the types in which the price looks kernels up, the narrow ones first."""
        precision = self.file.training.precision
        wide = precision if precision in ("fp16", "fp32") else "bf16"
        return tuple(dict.fromkeys((str(precision), wide)))

    @property
    def scope(self) -> MeasurementScope:
        """Return the model, framework and sequence length that measurements are wanted for."""
        file = self.file
        return MeasurementScope(model=file.model, framework=file.framework, seq_len=file.training.seq_len)

    @cached_property
    def lookups(self) -> dict[str, Lookups]:
        """Return what the price of the plans looks up, by their settings: what plans have in common at the first."""
        has_experts = self.file.model.moe is not None
        shapes_by_kernel: dict[str, dict[tuple[Operation, str], set[tuple[int, ...]]]] = {}
        earlier: set[tuple[Operation, str, tuple[int, ...]]] = set()
        for plan in self._plans:
            words = f"tp {plan.tp}, micro-batch {plan.micro_batch}" + (f", ep {plan.ep}" if has_experts else "")
            new = shapes_by_kernel.setdefault(words, defaultdict(set))
            batch = PlanBatch.of([plan], self.file.model.num_layers)
            for (operation, dtype), shapes in looked_up_shapes(self._problem, batch).items():
                new[operation, dtype] |= {shape for shape in shapes if (operation, dtype, shape) not in earlier}
                earlier |= {(operation, dtype, shape) for shape in shapes}
        return dict(shapes_by_kernel)

    def planned(self, hello: Hello, measured: Collection[TaskKey]) -> tuple[MeasurementAdvice, list[RankedTask]]:
        """Return what measuring on the ranks of `hello` could settle, and the tasks in the order in which they pay."""
        self._check(hello)
        tasks: dict[OperationGroup, list[RankedTask]] = dict(self._groups(hello, measured))
        problem = self._timed(())
        advice = advise_measurements(problem, self._ranked(problem), list(tasks), self._timed)
        return advice, [task for value in advice.groups for task in tasks[value.group]]

    def tasks(self, hello: Hello) -> list[Task]:
        """Return all that the ranks of `hello` can measure for these plans, were it to change their order or not."""
        return [ranked_task.task for _, tasks in self._groups(hello, ()) for ranked_task in tasks]

    def ranking(self) -> list[RankedPlan]:
        """Return the plans by the times that the database holds now, best first."""
        return self._ranked(self._timed(()))

    def _check(self, hello: Hello) -> None:
        device = self.file.cluster.device.name
        if hello.fingerprint.device != device:
            raise InputError(
                f"the plan is for {device}, this is {hello.fingerprint.device}: profile on the cluster of the plan"
            )

    def _groups(self, hello: Hello, measured: Collection[TaskKey]) -> list[tuple[OperationGroup, list[RankedTask]]]:
        """Return what can be measured and is not known; what settings have in common belongs to the first of them."""
        usable = self.file.framework.timed_operations
        device = self.file.cluster.device
        parts: dict[tuple[str, str], list[RankedTask]] = defaultdict(list)
        assigned = set()
        for setting, lookups in self.lookups.items():
            usable_lookups = {key: shapes for key, shapes in lookups.items() if key[0] in usable}
            for ranked_task in lookup_tasks(usable_lookups, hello, self._modes, device, measured):
                task = ranked_task.task
                if task in assigned:
                    continue
                assigned.add(task)
                if task.operation in COLLECTIVES:
                    size, on_node, count, _ = task.shape
                    nodes = f"{size} devices, {on_node} a node" if size > on_node else f"{size} devices of a node"
                    setting_of = f"{nodes}, {count} at once" if count > 1 else nodes
                else:
                    setting_of = setting
                parts[family_of(task.operation), setting_of].append(ranked_task)
        problem = self._timed(())
        return [(_group(problem, *names, tasks), tasks) for names, tasks in parts.items()]

    @cached_property
    def _stored(self) -> FoundTimings:
        try:
            return usable_timings(self._problem, self._url)
        except NoStoreError:
            return FoundTimings(measurements=Measurements.of([]))

    @cached_property
    def _problem(self) -> Problem:
        return problem_of(replace(self.file, timings="", pinned=None))

    def _timed(self, more: Sequence[Measurement]) -> Problem:
        """Return the problem with the times of the database and `more`."""
        times = [*self._stored.measurements, *more]
        timings = replace(self._stored, measurements=Measurements.of(times))
        return with_measurements(self._problem, timings) if times else self._problem

    def reload(self) -> None:
        """Look again at what the database holds."""
        del self._stored

    def _ranked(self, problem: Problem) -> list[RankedPlan]:
        costs = estimate(problem, problem.batch(self._plans))
        return sorted(ranked(problem, costs, range(len(self._plans))), key=lambda plan: plan.s_per_sequence)


def _group(problem: Problem, family: str, setting: str, tasks: list[RankedTask]) -> OperationGroup:
    device = problem.cluster.device
    alone = [item for item in tasks if not item.task.kernel.endswith(BESIDE)] or tasks
    spreads = [spread_of_price(problem, item.task.operation, item.task.dtype, item.task.shape) for item in alone]
    weights = [item.effect_s for item in alone]
    variance = sum(weight * spread**2 for weight, (spread, _) in zip(weights, spreads, strict=True)) / sum(weights)
    return OperationGroup(
        family=family,  # type: ignore[arg-type]
        setting=setting,
        times_s=tuple(
            Measurement(
                operation=item.task.operation,
                shape=item.task.shape,
                dtype=item.task.dtype,
                device=device.name,
                seconds=reference_s(item.task, device),
            )
            for item in alone
        ),
        seconds=sum(item.expected_s for item in tasks),
        spread=variance**0.5,
        provenance=max((provenance for _, provenance in spreads), key=PROVENANCES.index),
    )
