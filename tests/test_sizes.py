from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from autoplan.base.errors import NoPlanError
from autoplan.base.units import GIB
from autoplan.cost.estimate import estimate
from autoplan.cost.goodput import Reliability
from autoplan.search.advice import needed_text
from autoplan.search.objectives import OBJECTIVES, Run, costs_of, figures, find_objectives
from autoplan.search.ranking import ranked
from autoplan.search.sizes import NO_PROGRESS, TOO_SLOW, SizeSearchResult, search_sizes, size_grid
from autoplan.search.space import Space
from autoplan.search.study import search
from autoplan.spec.problem import Problem
from autoplan.spec.run_report import RunFigures
from test_study import DENSE, make

SIZES = (1, 2, 3, 4, 6)
RUN = Run(tokens=1e12, device_hours=4e4, reliability=Reliability(device_mtbf_s=3e6))


@lru_cache(maxsize=16)
def made(num_nodes: int) -> tuple[Problem, Space]:
    problem, space = make(replace(DENSE, num_layers=12), f"h100-sxm:{num_nodes}x4", batches=(48,))
    return replace(problem, cluster=replace(problem.cluster, price_per_device_hour=2.0)), space


def chosen(*names: str, run: Run = RUN, make: Callable[[int], tuple[Problem, Space]] = made) -> SizeSearchResult:
    return search_sizes(SIZES, make, find_objectives(names), run)


@lru_cache(maxsize=1)
def fastest() -> dict[int, RunFigures]:
    """Figures of the fastest plan of every size."""
    return {size: figures(made(size)[0], RUN, search(*made(size)).ranked[0]) for size in SIZES}


def test_sizes_of_a_range_divide_well() -> None:
    assert size_grid(8, 64) == (8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
    assert size_grid(1, 8) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert size_grid(9, 11) == (9, 10, 11)
    assert size_grid(5, 5) == (5,)


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if objective.measure == "time"])
def test_the_size_is_the_one_that_searching_all_of_them_gives(name: str) -> None:
    found = chosen(name)
    costs = {size: costs_of([OBJECTIVES[name]], size_figures)[0] for size, size_figures in fastest().items()}
    best = min(costs, key=lambda size: costs[size])
    assert found.report.best.num_nodes == best
    assert found.problem.cluster.num_nodes == best
    assert costs_of([OBJECTIVES[name]], found.report.best.figures)[0] == pytest.approx(costs[best], rel=1e-12)
    assert found.plans[0] == found.report.best.plan == search(*made(best)).ranked[0]
    assert [size.num_nodes for size in found.report.sizes] == list(SIZES)
    for size in found.report.sizes:
        assert size.least is not None
        assert costs_of([OBJECTIVES[name]], size.least)[0] <= costs[size.num_nodes] * (1 + 1e-9)
        if size.best is None:
            assert costs_of([OBJECTIVES[name]], size.least)[0] >= costs[best] * (1 - 1e-9)


def test_objectives_differ_in_the_size_that_they_choose() -> None:
    nodes = {name: chosen(name).report.best.num_nodes for name in ("devices", "step-time", "cost-per-token", "tokens")}
    assert nodes["devices"] == 1
    assert nodes["step-time"] == 6
    assert nodes["cost-per-token"] == nodes["tokens"] < 6


def test_fewest_devices_for_a_deadline() -> None:
    times = {size: size_figures.run_s or 0.0 for size, size_figures in fastest().items()}
    for size in SIZES:
        run = replace(RUN, device_hours=None, deadline_s=times[size] * 1.0001)
        enough = min(nodes for nodes in SIZES if times[nodes] <= run.deadline_s)
        assert chosen("devices", run=run).report.best.num_nodes == enough
    report = chosen("devices", run=replace(RUN, device_hours=None, deadline_s=times[3] * 1.0001)).report
    assert [size.why for size in report.sizes if size.num_nodes < 3] == [TOO_SLOW] * 2


def test_the_fastest_size_within_a_budget() -> None:
    hours = {size: size_figures.device_hours or 0.0 for size, size_figures in fastest().items()}
    times = {size: size_figures.run_s or 0.0 for size, size_figures in fastest().items()}
    for size in SIZES:
        run = replace(RUN, device_hours=hours[size] * 1.0001)
        within = [nodes for nodes in SIZES if hours[nodes] <= run.device_hours]
        best = chosen("time-to-tokens", run=run).report.best
        assert best.num_nodes == min(within, key=lambda nodes: times[nodes])
        assert best.figures.device_hours is not None
        assert best.figures.device_hours <= hours[size] * 1.0001


def test_several_objectives_over_sizes_give_the_front_of_all_plans_of_all_sizes() -> None:
    names = ("cost-per-token", "time-to-tokens", "memory-headroom")
    objectives = find_objectives(names)
    rows = []
    for size in SIZES[:3]:
        problem, space = made(size)
        batch, _ = space.plans(space.cells())
        costs = estimate(problem, batch)
        plans = ranked(problem, costs, np.flatnonzero(costs.verdict == 0))
        rows += [costs_of(objectives, figures(problem, RUN, plan)) for plan in plans]
    table = np.unique(np.round(np.log(rows), 8), axis=0)
    front = table[:0]
    for row in table:  # in lexical order: what beats a row comes before it
        if not (front <= row).all(axis=1).any():
            front = np.vstack([front, row])
    left_out = ("sp", "schedule", "cuda_graphs", "micro_batch", "tp", "cp")  # the table is of the spaces alone
    report = search_sizes(SIZES[:3], made, objectives, RUN, barred=left_out).report
    found = [np.round(np.log(costs_of(objectives, point.figures)), 8).tolist() for point in report.front]
    np.testing.assert_allclose(sorted(found), front, atol=2e-8)
    assert found[0] == min(found)
    assert len({point.num_nodes for point in report.front}) > 1


def test_a_deadline_holds_for_objectives_that_are_not_of_time() -> None:
    free = chosen("memory-headroom", run=Run(tokens=1e12)).report.best
    assert free.figures.run_s is not None
    run = Run(tokens=1e12, deadline_s=free.figures.run_s / 2)
    best = chosen("memory-headroom", run=run).report.best
    assert best.figures.run_s is not None
    assert best.figures.run_s <= run.deadline_s
    assert best.plan.memory_bytes >= free.plan.memory_bytes


def test_a_size_that_fails_too_often_is_left_out_and_the_others_are_searched() -> None:
    # By e^(720) fails a restart of 24 devices, which no float holds; that of 16 by e^(480).
    run = Run(reliability=Reliability(device_mtbf_s=2.0, checkpoint_s=0.1, restart_s=60.0))
    report = chosen("step-time", run=run).report
    left_out = [size for size in report.sizes if size.why == NO_PROGRESS]
    assert [size.num_nodes for size in left_out] == [6]
    assert left_out[0].best is left_out[0].least is None
    assert report.best.num_nodes == 4
    with pytest.raises(NoPlanError, match=r"4 devices fail every 0.025 s, .* makes no progress: give fewer nodes"):
        chosen("step-time", run=Run(reliability=Reliability(device_mtbf_s=0.1)))


def test_what_cannot_be_done_is_said_with_the_nearest() -> None:
    with pytest.raises(
        NoPlanError, match=r"deadline is 1.00 d, the fastest size \(6 nodes\) takes .* d or more: give more nodes"
    ):
        chosen("devices", run=Run(tokens=1e12, deadline_s=86400.0))
    with pytest.raises(NoPlanError, match=r"10 device hours, the size that needs least .* takes .* or more"):
        chosen("step-time", run=Run(tokens=1e12, device_hours=10.0))
    with pytest.raises(NoPlanError, match=r"last 1.74 d on 6 nodes, the deadline is 1.00 h"):
        chosen("tokens", run=Run(device_hours=1000.0, deadline_s=3600.0))

    def large(size: int) -> tuple[Problem, Space]:
        return make(replace(DENSE, num_layers=96, hidden_size=12288, num_heads=96), f"h100-sxm:{size}x1", (16,))

    with pytest.raises(NoPlanError, match="no plan fits"):
        search_sizes((1, 2), large, find_objectives(["energy-per-token"]), Run())


def test_a_plan_that_may_not_fit_says_its_risk() -> None:
    assert needed_text(90 * GIB, 79 * GIB, 0.99) == "90.0 GiB of 79.0 GiB"
    risky = needed_text(76 * GIB, 79 * GIB, 0.291, " on h100-sxm")
    assert risky == "76.0 GiB of 79.0 GiB on h100-sxm, with an OOM risk of 29.1 %"
