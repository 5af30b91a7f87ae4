"""A few of the problems of `benchmarks/certificate.py`, and that it would notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from certificate import Priced, beside_plans, small, wrong_with_plans, wrong_with_search
from drawn_problems import Case, draw, draw_plans

from autoplan.search.study import search
from search_cases import LARGE, PLAIN, make


@pytest.fixture(scope="module")
def case() -> Case:
    """A small problem in which plans of several degrees fit."""
    rng = np.random.default_rng(3)
    while True:
        found = draw(rng, is_large=False)
        if found is None or not 300 < found.space.size(found.space.cells()) < 2000:
            continue
        if len(search(found.problem, found.space).ranked) > 1:
            return found


def test_certificates_are_those_of_full_enumeration() -> None:
    tally = small(np.random.default_rng(11), 3)
    assert tally.wrong == []
    assert tally.enumerated > 20


def test_random_plans_do_not_beat_what_is_proven() -> None:
    forbid = tuple(set(PLAIN) - {"sharding=zero2", "uneven_stages"})
    problem, space = make(LARGE, "h100-sxm:32x8", batches=(512,), forbid=forbid)
    space_flags: dict[str, list[str]] = {"fix": [], "at_most": [], "forbid": []}
    asked = Case(command="large", batch="512", space_flags=space_flags, problem=problem, space=space)
    checked = beside_plans(asked, np.random.default_rng(3), 1000)
    assert checked is not None
    assert checked.wrong == ()
    assert checked.result.certificate.proven
    assert checked.result.certificate.plans > 30_000
    assert checked.drawn > 500
    assert checked.fitting > 20
    assert checked.nearest >= 1


def test_what_is_wrong_with_a_certificate_is_noticed(case: Case) -> None:
    result, batch = search(case.problem, case.space), case.space.plans(case.space.cells())[0]
    priced = Priced.of(case.problem, batch)
    assert list(wrong_with_search(case, priced, result)) == []
    assert list(wrong_with_plans(priced, result)) == []
    worse = replace(result, ranked=result.ranked[1:])
    assert any("is best" in text for text in wrong_with_search(case, priced, worse))
    faster = replace(priced, pace=0.9 * priced.pace)
    assert any("is better than" in text for text in wrong_with_plans(faster, result))
    fewer = replace(result, certificate=replace(result.certificate, plans=result.certificate.plans - 1))
    assert any("represents" in text for text in wrong_with_search(case, priced, fewer))
    assert any("none was found" in text for text in wrong_with_search(case, priced, replace(result, ranked=())))


def test_plans_are_drawn_from_the_space(case: Case) -> None:
    batch, _ = case.space.plans(case.space.cells())
    everything = {batch.plan(at) for at in range(len(batch))}
    drawn = draw_plans(case.space, case.space.cells(), np.random.default_rng(0), 300)
    found = {drawn.plan(at) for at in range(len(drawn))}
    assert found <= everything
    assert len(found) > min(0.3 * len(everything), 100)
