"""Are the parts of a mixed cluster chosen that serve a run best?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import autoplan
from autoplan.api.problem import make_problem, make_space
from autoplan.api.training_run import priced_parts, search_run
from autoplan.base.errors import InputError, NoPlanError
from autoplan.cost.energy import step_energy_j
from autoplan.search.mixed_run import PartsResult, search_parts
from autoplan.search.mixed_search import search_mixed
from autoplan.search.objectives import Run, figures, find_objectives
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.mixed_result import MixedResult
from mixed_cases import as_mixed, problem_of, scaled

BATCH = 16


_FOUND: dict[tuple[str, ...], MixedResult] = {}


def find(problem: MixedProblem) -> MixedResult:
    """The search of a model on some parts, made once: what they cost changes no step."""
    key = (problem.model.name, *(part.name for part in problem.cluster.parts))
    if key not in _FOUND:
        _FOUND[key] = search_mixed(problem, BATCH, partial(make_space, global_batch=BATCH))
    return _FOUND[key]


def best_parts(problem: MixedProblem, objective: str, run: Run | None = None) -> PartsResult:
    result = search_parts(problem, find, find_objectives([objective]), run or Run())
    assert isinstance(result, PartsResult)
    return result


def priced(fast: float, slow: float) -> MixedProblem:
    """Two devices beside two of half the speed, at these prices."""
    parts = scaled("a100-sxm:1x2", "fast"), scaled("a100-sxm:1x2", "slow", speed=0.5)
    costs = zip(parts, (fast, slow), strict=True)
    return problem_of(*(replace(part, price_per_device_hour=price) for part, price in costs))


@pytest.mark.parametrize(("prices", "chosen"), [((2.0, 0.1), ["slow"]), ((1.0, 4.0), ["fast"]), ((1.0, 0.4), ["slow"])])
def test_parts_that_cost_more_than_they_bring_are_left_out(prices: tuple[float, float], chosen: list[str]) -> None:
    problem = priced(*prices)
    best = best_parts(problem, "cost-per-token")
    assert [part.name for part in best.problem.cluster.parts] == chosen
    costs = {}
    for used in ((0,), (1,), (0, 1)):
        own = problem.only(used)
        cost = find(own).ranked[0]
        price = sum(part.num_devices * (part.price_per_device_hour or 0.0) for part in own.cluster.parts)
        goodput = Run().reliability.goodput(own.cluster.num_devices)
        costs[own.cluster.sizes] = price * cost.s_per_sequence / 3600 / problem.training.seq_len / goodput
    shown = {row.parts: row.figures.cost_per_token for row in best.report.outcomes if row.figures}
    assert shown == pytest.approx(costs)
    assert best.report.best.figures
    assert best.report.best.figures.cost_per_token == pytest.approx(min(costs.values()))
    assert best.result.certificate.best_in == "cost-per-token"


def test_the_fastest_parts_are_those_of_the_search_without_objectives() -> None:
    problem = priced(1.0, 1.0)
    best, fastest = best_parts(problem, "step-time"), find(problem)
    assert best.result.ranked[0].step_s == fastest.ranked[0].step_s
    assert best.result.certificate.gap == pytest.approx(fastest.certificate.gap)


def test_the_energy_of_a_step_is_that_of_all_parts() -> None:
    problem = priced(1.0, 1.0)
    best = best_parts(problem, "energy-per-token")
    per_token = []
    for row in best.report.outcomes:
        assert row.figures
        assert row.figures.energy_per_token_j is not None
        per_token.append(row.figures.energy_per_token_j)
    assert best.report.best.figures
    assert best.report.best.figures.energy_per_token_j == min(per_token)
    assert 0 < best.result.certificate.gap < 0.4  # a bound knows no more than that devices wait
    both = find(problem).ranked[0]
    joules = sum(step_energy_j(part, both.terms_s, both.step_s) for part in problem.cluster.parts)  # type: ignore[arg-type, misc]
    assert figures(problem, Run(), both).energy_per_token_j == pytest.approx(
        joules / BATCH / problem.training.seq_len / Run().reliability.goodput(4)
    )


def test_the_fewest_devices_that_meet_a_deadline_are_chosen() -> None:
    problem = priced(1.0, 1.0)
    runs = {row.parts: row.figures.run_s for row in best_parts(problem, "step-time", Run(tokens=1e9)).report.outcomes}  # type: ignore[union-attr]
    slow_s, fast_s, both_s = sorted(runs.values(), reverse=True)  # type: ignore[type-var]
    assert all((slow_s, fast_s, both_s))
    for deadline_s, chosen in ((1.01 * slow_s, {2}), (1.01 * fast_s, {2}), (1.01 * both_s, {4})):
        best = best_parts(problem, "devices", Run(tokens=1e9, deadline_s=deadline_s))
        assert {best.problem.cluster.num_devices} == chosen
    for run, says in (
        (
            Run(tokens=1e9, deadline_s=0.5 * both_s),
            r"fastest set of parts \(.* \+ .*\) takes .*: give a part more nodes",
        ),
        (
            Run(tokens=1e9, device_hours=1e-3),
            r"set of parts that needs least \(.*\) takes .*: give more device hours or",
        ),
    ):
        with pytest.raises(NoPlanError, match=says) as caught:
            best_parts(problem, "devices", run)
        assert "\n" not in str(caught.value)


def test_a_cluster_of_one_part_has_the_figures_of_the_plain_search() -> None:
    problem = make_problem("llama3.2-1b", cluster="h100-sxm:1x4", seq_len=2048)
    problem = replace(problem, cluster=replace(problem.cluster, price_per_device_hour=2.0))
    plain = search_run(
        problem, {"objectives": ["cost-per-token"]}, partial(make_space, global_batch=BATCH), is_simple=False
    )
    shown = best_parts(as_mixed(problem), "cost-per-token").report.best.figures
    assert shown
    for name in ("num_devices", "seconds_per_sequence", "goodput", "tokens_per_s", "cost_per_token"):
        assert getattr(shown, name) == pytest.approx(getattr(plain.report.best.figures, name), rel=1e-9)


def test_what_no_mixed_run_has_is_refused_with_the_way_out() -> None:
    place = {"cluster": "h100-sxm:1x2+a100-sxm:1x2", "global_batch": BATCH, "seq_len": 1024}
    for options, says in (
        ({"nodes": "1,2"}, "write how many there are of each part"),
        ({"objectives": ["memory-headroom"]}, "parts have unlike memory"),
        ({"objectives": ["cost-per-token"]}, "needs price_per_device_hour"),
        ({"objectives": ["cost-per-token"], "price": "v100=1"}, "'v100' is not a part: they are h100-sxm, a100-sxm"),
        ({"tokens": "1B", "robust": 0.9, "prefer": "robust"}, "without --from, --robust and --why"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            autoplan.search_mixed("llama3.2-1b", **place, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    words = {"objectives": ["cost-per-token"], "price": "h100-sxm=3,a100-sxm=1", "tokens": "1B"}
    found = autoplan.search_mixed("llama3.2-1b", **place, **words)  # type: ignore[arg-type]
    assert found.file.run
    assert [row.parts for row in found.file.run.outcomes][2] == "1 x 2 h100-sxm + 1 x 2 a100-sxm"


def test_prices_name_each_part_once() -> None:
    problem = priced(1.0, 1.0)
    first, second = problem.cluster.part_names
    parts = priced_parts(problem, f"{first}=3,{second}=1.5").cluster.parts
    assert [part.price_per_device_hour for part in parts] == [3.0, 1.5]
    assert {part.price_per_device_hour for part in priced_parts(problem, "2").cluster.parts} == {2.0}
    with pytest.raises(InputError, match=r"every part has two prices: write PART=PRICE for each part$"):
        priced_parts(problem, "3,4")
    with pytest.raises(InputError, match=f"{first} has two prices"):
        priced_parts(problem, f"{first}=3,{first}=4")
