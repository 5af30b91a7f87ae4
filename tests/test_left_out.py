"""Options that spaces leave out, tried on the best plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.search.choice import pace
from autoplan.search.left_out import with_left_out
from autoplan.search.study import search
from autoplan.search.walk import prices
from search_cases import LARGE, make


def test_the_best_plan_takes_whatever_of_them_is_faster() -> None:
    problem, space = make(LARGE, "a100-sxm:4x8", batches=(64,), fix=("pp=2", "tp=4"))
    found = search(problem, space)
    fastest = found.rivals[0]
    # Begins with the slower order and without sequence parallelism, as a space that leaves these out may.
    poor = prices(problem, [replace(fastest.plan, sp=False, rank_order="tp-cp-ep-pp-dp")])[0]
    assert pace(poor) > pace(fastest)
    result = with_left_out(problem, space, replace(found, rivals=(poor,), ranked=(poor,)), ())
    best = result.rivals[0]
    assert pace(best) <= pace(fastest) * (1 + 1e-9)
    assert result.certificate.best_step_s == best.step_s
    assert result.rivals[1] == poor
    assert result.ranked[0] == best


@pytest.mark.parametrize("fixed", [("sp", "rank_order", "schedule")])
def test_what_is_fixed_stays(fixed: tuple[str, ...]) -> None:
    problem, space = make(LARGE, "a100-sxm:4x8", batches=(64,), fix=("pp=2", "tp=4"))
    found = search(problem, space)
    poor = prices(problem, [replace(found.rivals[0].plan, sp=False, tp_overlap=False)])[0]
    given = replace(found, rivals=(poor,), ranked=(poor,))
    assert with_left_out(problem, space, given, fixed) == given


def test_a_best_plan_that_they_do_not_help_stays() -> None:
    problem, space = make(LARGE, "h100-sxm:2x8", batches=(64,), fix=("pp=1",))
    found = search(problem, space)
    assert with_left_out(problem, space, found, ()) == found
