from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.energy import step_energy_j
from autoplan.cost.estimate import estimate
from autoplan.search.findings import Front
from autoplan.search.objectives import Measure
from autoplan.search.ranking import TIE, seconds_per_sequence
from autoplan.search.space import Space
from autoplan.search.study import search
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from test_bounds import problems
from test_study import DENSE, MOE, make

MEASURES: tuple[Measure, ...] = ("time", "energy", "memory")


def measures_of(problem: Problem, batch: PlanBatch) -> tuple[Floats, Ints]:
    """(all three measures of every plan, its verdict)."""
    costs = estimate(problem, batch)
    energy = step_energy_j(problem.cluster, costs.terms_s, costs.step_s) / batch.global_batch
    return np.stack([seconds_per_sequence(costs), energy, costs.memory_bytes], axis=-1), costs.verdict


def keys(values: Floats) -> Ints:
    return np.round(np.log(values) / TIE).astype(np.int64)


def best_of(values: Floats) -> set[tuple[int, ...]]:
    """Return the front: in lexical order, whatever beats a finding comes before it, and so does a part of the front."""
    findings = np.unique(keys(values), axis=0)
    front = findings[:0]
    for finding in findings:
        if not (front <= finding).all(axis=1).any():
            front = np.vstack([front, finding])
    return set(map(tuple, front.tolist()))


def keys_of(problem: Problem, plans: tuple[RankedPlan, ...], columns: list[int]) -> list[tuple[int, ...]]:
    batch = PlanBatch.of([plan.plan for plan in plans], problem.model.num_layers)
    return [tuple(row) for row in keys(measures_of(problem, batch)[0][:, columns]).tolist()]


def close(chosen: set[tuple[int, ...]], others: set[tuple[int, ...]]) -> bool:
    """Return whether fronts are the same, except for rounding of batches of other sizes."""
    a, b = np.array(sorted(chosen)), np.array(sorted(others))
    return a.shape == b.shape and bool((abs(a - b) <= 1).all())


@pytest.fixture(scope="module", params=[DENSE, MOE], ids=["dense", "moe"])
def enumerated(request: pytest.FixtureRequest) -> tuple[Problem, Space, Floats, Ints]:
    """A problem, its space, and the measures and verdicts of all plans."""
    problem, space = make(request.param, "h100-sxm:1x8", batches=(24,))
    return problem, space, *measures_of(problem, space.plans(space.cells())[0])


@pytest.mark.parametrize(
    ("measures"),
    [("energy",), ("memory",), ("time", "memory"), ("energy", "memory"), ("time", "energy", "memory")],
)
def test_the_front_is_that_of_full_enumeration(
    enumerated: tuple[Problem, Space, Floats, Ints], measures: tuple[Measure, ...]
) -> None:
    problem, space, values, verdict = enumerated
    columns = [MEASURES.index(name) for name in measures]
    found = search(problem, space, measures=measures)
    own = keys_of(problem, found.ranked, columns)
    assert close(set(own), best_of(values[verdict == 0][:, columns]))
    assert len(set(own)) == len(own)
    assert own == sorted(own)
    assert {ranked_plan.verdict for ranked_plan in found.ranked} == {"fits"}
    certificate = found.certificate
    assert certificate.proven
    assert certificate.best_in == measures
    assert certificate.priced < len(values) <= certificate.plans == len(space.candidates(space.cells()))


@settings(max_examples=4, deadline=None)
@given(problems, st.sampled_from((0.0, 0.5, 0.9)))
def test_fronts_of_other_problems_are_those_of_full_enumeration(made: tuple[Problem, Space], reserved: float) -> None:
    problem, space = made
    assume(space.size(space.cells()) <= 40_000)
    batch, _ = space.plans(space.cells())
    assume(0 < len(batch) < 4_000)
    problem = replace(problem, reserve_bytes=reserved * problem.capacity_bytes)
    values, verdict = measures_of(problem, batch)
    found = search(problem, space, measures=MEASURES)
    if verdict.min() == 2:
        assert not found.ranked
        assert found.closest is not None
        return
    assert close(set(keys_of(problem, found.ranked, [0, 1, 2])), best_of(values[verdict == verdict.min()]))


def test_a_front_repeats_itself() -> None:
    problem, space = make(DENSE, "h100-sxm:1x8")
    assert search(problem, space, measures=MEASURES) == search(problem, space, measures=MEASURES)


points = st.lists(st.tuples(*[st.integers(1, 6)] * 3), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(points, points)
def test_a_front_keeps_what_no_other_beats_however_they_come(
    first: list[tuple[int, ...]], more: list[tuple[int, ...]]
) -> None:
    _, space = make(DENSE, batches=(16,))
    batch, _ = space.plans(space.cells()[:4])
    front = Front(3)
    for part in (first, more):
        front.offer(np.array(part, dtype=float), batch.take(np.arange(len(part)) % len(batch)))
    everything = np.array(first + more, dtype=float)
    assert len(front) == len(best_of(everything))
    # What the front holds, or what it beats, is not looked at again once it is clearly worse.
    assert front.rules_out(everything * (1 + 10 * TIE)).all()
    assert not front.rules_out(np.array([[0.5, 9.0, 9.0], [9.0, 0.5, 9.0], [9.0, 9.0, 0.5]])).any()
