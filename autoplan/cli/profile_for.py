"""`autoplan profile --for PLAN`: which measurements could make another plan win?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.base.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autoplan.profiler.protocol import Hello
    from autoplan.profiler.record import Mode
    from autoplan.profiler.tasks import MeasurementScope, RankedTask, TaskKey
    from autoplan.search.measurement_value import MeasurementAdvice, OperationGroup
    from autoplan.spec.plan_file import PlanFile
    from autoplan.spec.problem import Problem
    from autoplan.spec.search_result import RankedPlan
    from autoplan.spec.timing import Measurement


class Deciding:
    """The plans of a search that may be the fastest, by the times that the database at `url` holds."""

    def __init__(self, path: Path, url: str | None, modes: tuple[Mode, ...]) -> None:
        from autoplan.base.files import decode, read_table
        from autoplan.spec.plan_file import PlanFile

        table = read_table(path)
        if "schema_version" not in table:
            raise InputError(f"{path} is no plan file of a cluster of equal nodes: give what search wrote")
        self.file: PlanFile = decode(PlanFile, table, str(path))
        if not self.file.alternatives:
            raise InputError(f"{path} holds one plan, and nothing that could win instead: give what search wrote")
        self._url, self._modes = url, modes

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types in which the price looks kernels up."""
        precision = self.file.training.precision
        narrow = ("fp8",) if precision in ("fp8", "mxfp8") else ()
        return (*narrow, precision if precision in ("fp16", "fp32") else "bf16")

    @cached_property
    def scopes(self) -> dict[str, MeasurementScope]:
        """What to know of every setting that a plan has, in words: its degrees and micro-batch decide the shapes."""
        from autoplan.profiler.tasks import MeasurementScope

        file = self.file
        found = {}
        for one in (file.best, *file.alternatives):
            plan = one.plan
            words = f"tp {plan.tp}, micro-batch {plan.micro_batch}" + (f", ep {plan.ep}" if file.model.moe else "")
            found[words] = MeasurementScope(
                model=file.model,
                framework=file.framework,
                seq_len=file.training.seq_len,
                tps=(plan.tp,),
                micro_batches=(plan.micro_batch,),
                eps=(plan.ep,),
                modes=self._modes,
            )
        return found

    def planned(self, hello: Hello, known: Collection[TaskKey]) -> tuple[MeasurementAdvice, list[RankedTask]]:
        """What measuring could settle on the ranks of `hello`, and the measurements in the order in which they pay."""
        from autoplan.search.measurement_value import advise_measurements

        self._check(hello)
        tasks: dict[OperationGroup, list[RankedTask]] = dict(self._groups(hello, known))
        problem = self._timed(())
        found = advise_measurements(problem, self._ranked(problem), list(tasks), self._timed)
        return found, [task for value in found.groups for task in tasks[value.group]]

    def ranking(self) -> list[RankedPlan]:
        """The plans by the times that the database holds now, best first."""
        return self._ranked(self._timed(()))

    def _check(self, hello: Hello) -> None:
        device = self.file.cluster.device.name
        if hello.fingerprint.device != device:
            raise InputError(
                f"the plan is for {device}, this is {hello.fingerprint.device}: profile on the cluster of the plan"
            )

    def _groups(self, hello: Hello, known: Collection[TaskKey]) -> list[tuple[OperationGroup, list[RankedTask]]]:
        """What can be measured here and is not known; what settings have in common is of the first of them."""
        from autoplan.api.timings import usable_operations
        from autoplan.profiler.protocol import BESIDE, COLLECTIVES
        from autoplan.profiler.tasks import ranked_tasks
        from autoplan.search.measurement_value import family_of

        usable = usable_operations(self.file.framework)
        parts: dict[tuple[str, str], list[RankedTask]] = defaultdict(list)
        seen = set()
        for setting, scope in self.scopes.items():
            for one in ranked_tasks(scope, hello, known):
                task = one.task
                if task in seen or task.operation not in usable or task.kernel.endswith(BESIDE):
                    continue
                seen.add(task)
                if task.operation in COLLECTIVES:
                    size, here, count, _ = task.shape
                    nodes = f"{size} devices, {here} a node" if size > here else f"{size} devices of a node"
                    setting_of = f"{nodes}, {count} at once" if count > 1 else nodes
                else:
                    setting_of = setting
                parts[family_of(task.operation), setting_of].append(one)
        problem = self._timed(())
        return [(_group(problem, *names, ones), ones) for names, ones in parts.items()]

    @cached_property
    def _held(self) -> list[Measurement]:
        return self._stored()

    def _stored(self) -> list[Measurement]:
        from autoplan.api.timings import usable_timings

        return usable_timings(self._problem, self._url)

    @cached_property
    def _problem(self) -> Problem:
        from autoplan.api.plan_files import problem_of

        return problem_of(replace(self.file, timings=""))

    def _timed(self, more: Sequence[Measurement]) -> Problem:
        """The problem with the times of the database and some more."""
        from autoplan.api.timings import with_measurements

        held = self._held
        return with_measurements(self._problem, [*held, *more]) if held or more else self._problem

    def measured(self) -> None:
        """Look again at what the database holds."""
        self._held = self._stored()

    def _ranked(self, problem: Problem) -> list[RankedPlan]:
        from autoplan.cost.estimate import estimate
        from autoplan.search.choice import pace
        from autoplan.search.ranking import ranked
        from autoplan.spec.plan import PlanBatch

        plans = [one.plan for one in (self.file.best, *self.file.alternatives)]
        costs = estimate(problem, PlanBatch.of(plans, problem.model.num_layers))
        return sorted(ranked(problem, costs, range(len(plans))), key=pace)


def _group(problem: Problem, family: str, setting: str, ones: list[RankedTask]) -> OperationGroup:
    from autoplan.profiler.tasks import reference_s
    from autoplan.search.measurement_value import OperationGroup, spread_of_price
    from autoplan.spec.timing import PROVENANCES, Measurement

    device = problem.cluster.device
    found = [spread_of_price(problem, one.task.operation, one.task.dtype, one.task.shape) for one in ones]
    weights = [one.effect_s for one in ones]
    variance = sum(weight * spread**2 for weight, (spread, _) in zip(weights, found, strict=True)) / sum(weights)
    return OperationGroup(
        family=family,  # type: ignore[arg-type]
        setting=setting,
        times_s=tuple(
            Measurement(
                operation=one.task.operation,
                shape=one.task.shape,
                dtype=one.task.dtype,
                device=problem.cluster.device.name,
                seconds=reference_s(one.task, device),
            )
            for one in ones
        ),
        seconds=sum(one.expected_s for one in ones),
        spread=variance**0.5,
        rests_on=max((provenance for _, provenance in found), key=PROVENANCES.index),
    )


# -- what is said -----------------------------------------------------------------------------------------------------


def print_settling(console: Console, found: MeasurementAdvice, planned: Sequence[RankedTask]) -> None:
    """What is open, and what each group of measurements is expected to bring."""
    from rich.table import Table

    from autoplan.base.units import format_percent, format_seconds

    if found.rival is None:
        console.print(f"{found.best.plan.describe()} has no rival of another kind: nothing is to be settled")
        return
    seconds = sum(one.expected_s for one in planned)
    console.print(f"A  {found.best.plan.describe()}: {format_seconds(found.best.step_s)}")
    console.print(f"B  {found.rival.plan.describe()}: {format_seconds(found.rival.step_s)}")
    if not found.groups:
        console.print(
            f"now {_sure(found.probability)} sure that A is the faster; no measurement here could swap any two plans"
        )
        return
    console.print(
        f"now {_sure(found.probability)} sure that A is the faster; expected after {len(planned)} measurements "
        f"of about {format_seconds(seconds)}: {_sure(found.expected_probability)} sure of one of them\n"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("operations", "of", "rests on"):
        table.add_column(name)
    for name in ("off by", "share A", "share B", "takes", "then sure"):
        table.add_column(name, justify="right", no_wrap=True)
    for value in found.groups:
        group = value.group
        table.add_row(
            group.family,
            group.setting,
            group.rests_on,
            format_percent(group.spread),
            format_percent(value.share),
            format_percent(value.rival_share),
            format_seconds(group.seconds),
            _sure(value.probability),
        )
    console.print(table)


def print_ranking(
    console: Console, before: MeasurementAdvice, after: MeasurementAdvice, ranking: Sequence[RankedPlan]
) -> None:
    """What the order is after measuring, and how sure it is then."""
    from autoplan.base.units import format_seconds
    from autoplan.search.choice import pace

    best = ranking[0]
    is_same = best.plan == before.best.plan
    console.print(
        f"\nfastest {'still' if is_same else 'now'}, {_sure(after.probability)} sure against its nearest rival: "
        f"{best.plan.describe()}: {format_seconds(best.step_s)} a step"
    )
    for one in ranking[1:4]:
        console.print(f"  {100 * (pace(one) / pace(best) - 1):+.1f} %  {one.plan.describe()}")
    if not is_same:
        console.print("search again with --timings db: it ranks all plans by what was measured")


def _sure(probability: float) -> str:
    return f"{100 * probability:.0f} %"
