"""Rules on the plans that a framework supports: vectorised predicates, each with its place in the source."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType, MethodType

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.base.errors import InputError
from autoplan.base.units import first_faults
from autoplan.spec.axes import AXIS, words_of
from autoplan.spec.axis import Axis, Kind, Needs, Value
from autoplan.spec.enums import Precision
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload

ANY_FRAMEWORK = "any framework"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Condition on plans: `holds` tells for every plan of a batch, `text` is the rule with the values of one plan."""

    holds: Callable[[Workload, PlanBatch], Bools]
    text: Callable[[Workload, ParallelPlan], str]
    source: str = ANY_FRAMEWORK  # file and line in the framework, at the commit that the module names


@dataclass(frozen=True, slots=True, kw_only=True)
class SupportedWords:
    """Values of an axis that a framework supports, the default first."""

    axis: str
    words: tuple[str, ...]
    source: str = ANY_FRAMEWORK

    def rule(self) -> Rule:
        """Return the rule that a plan uses one of them."""
        row = AXIS[self.axis]
        is_supported = np.array([word in self.words for word in words_of(self.axis)])
        is_idle = np.array([precision not in row.precisions for precision in Precision])

        def is_one_of(workload: Workload, batch: PlanBatch) -> Bools:
            result = is_supported[getattr(batch, self.axis)]
            if is_idle.any():
                result |= is_idle[batch.precision]
            return result | (batch.cp == 1) if row.needs is Needs.CONTEXT_RANKS else result

        return Rule(
            source=self.source,
            holds=is_one_of,
            text=lambda s, p: (
                f"{self.axis} {getattr(p, self.axis)!r} does not exist: use {' or '.join(map(repr, self.words))}"
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rulebook:
    """Rules of a framework, and where searches begin; axes that `supported`, part of `rules`, lacks take any word."""

    rules: tuple[Rule, ...]
    supported: tuple[SupportedWords, ...] = ()
    shards_over_part: bool = True  # whether states may be sharded over a part of the replicas
    repeats_parts: bool = False  # whether recomputation may name parts of a layer
    repeats_some_layers: bool = False  # whether it may take some layers of a chunk
    split_schedules_overlap: bool = True  # whether states are reduced beside a backward pass in two parts
    # The one way in which it cuts a model into so many stages; None: as the plan says.
    split: Callable[[ModelSpec, int], tuple[int, ...]] | None = None

    extras: tuple[str, ...] = ()  # axes that it offers of those that few frameworks have

    def words(self, axis: str) -> tuple[str, ...]:
        """The words of an axis that it knows."""
        return next((supported.words for supported in self.supported if supported.axis == axis), words_of(axis))

    def offers(self, axis: Axis, value: Value) -> bool:
        """Return whether the framework has the option with this value."""
        if axis.offered_by and value != axis.default and axis.name not in self.extras:
            return False
        return axis.kind is Kind.FLAG or value in self.words(axis.name)


def all_true(batch: PlanBatch) -> Bools:
    """Result of a rule that does not apply to a model: true for every plan."""
    return np.ones(len(batch), dtype=np.bool_)


def legal(rules: tuple[Rule, ...], workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans obey every rule."""
    result = all_true(batch)
    for rule in rules:
        result &= rule.holds(workload, batch)
    return result


def legal_on_own_devices(rules: tuple[Rule, ...], workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans obey every rule on as many devices as they need, whatever number the workload has."""
    result = all_true(batch)
    for num_devices in np.unique(batch.num_devices).tolist():
        rows = np.flatnonzero(batch.num_devices == num_devices)
        result[rows] = legal(rules, replace(workload, num_devices=num_devices), batch.take(rows))
    return result


def legal_so_far(rules: tuple[Rule, ...], workload: Workload, batch: PlanBatch, columns: frozenset[str]) -> Bools:
    """Return plans that obey the rules that look at these columns alone; others end at the first other column."""
    result, known = all_true(batch), _Known(batch, columns)
    for rule in rules:
        with suppress(_UnknownColumnError):
            result &= rule.holds(workload, known)  # type: ignore[arg-type]
    return result


class _UnknownColumnError(Exception):
    """A rule looks at a column that is not known yet."""


class _Known:
    """A batch some of whose columns are not known yet."""

    def __init__(self, batch: PlanBatch, columns: frozenset[str]) -> None:
        self._batch = batch
        self._columns = columns

    def __len__(self) -> int:
        return len(self._batch)

    def __getattr__(self, name: str) -> object:
        derived = getattr(PlanBatch, name)
        if isinstance(derived, property):
            return derived.__get__(self)
        if isinstance(derived, FunctionType):
            return MethodType(derived, self)
        if name not in self._columns:
            raise _UnknownColumnError(name)
        return getattr(self._batch, name)


def broken(rules: tuple[Rule, ...], workload: Workload, plan: ParallelPlan) -> tuple[str, ...]:
    """Return the rules that a plan breaks, one line each; empty where it is legal."""
    batch = PlanBatch.of([plan], workload.model.num_layers)
    return tuple(
        f"{rule.text(workload, plan)} ({rule.source})" for rule in rules if not bool(rule.holds(workload, batch)[0])
    )


def check_limits(
    limits: tuple[Rule, ...], model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, beginning: str
) -> None:
    """Raise an error for the first part of a plan that a target cannot express; the message starts with `beginning`."""
    workload = Workload(model=model, training=training, num_devices=plan.num_devices)
    batch = PlanBatch.of([plan], model.num_layers)
    for limit in limits:
        if not bool(limit.holds(workload, batch)[0]):
            raise InputError(f"{beginning} {limit.text(workload, plan)}")


def check_legal(
    rules: tuple[Rule, ...], model: ModelSpec, training: TrainingSpec, plan: ParallelPlan, beginning: str
) -> None:
    """Raise an error if a plan breaks a rule on the devices that it needs; the message starts with `beginning`."""
    workload = Workload(model=model, training=training, num_devices=plan.num_devices)
    if problems := broken(rules, workload, plan):
        raise InputError(f"{beginning}: {first_faults(problems)}")
