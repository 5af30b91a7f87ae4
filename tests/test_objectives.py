from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.base.files import decode
from autoplan.cost.energy import device_power_w, step_energy_j, waiting_power_w
from autoplan.cost.estimate import estimate
from autoplan.cost.goodput import Reliability
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.search.objectives import (
    OBJECTIVES,
    Run,
    costs_of,
    default_objective,
    figures,
    figures_at,
    find_objectives,
    least_figures,
    measures_of,
)
from autoplan.search.ranking import ranked
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.run_report import RunFigures
from autoplan.spec.terms import STEP_TERMS
from autoplan.topology.cluster import ClusterSpec
from problems import problem_for

DENSE = ModelSpec(
    name="dense", num_layers=8, hidden_size=2048, vocab_size=32000, num_heads=16, num_kv_heads=8, ffn_size=5504
)
RELIABLE = Reliability(device_mtbf_s=1e15, checkpoint_s=1e-3)
RUN = Run(tokens=1e12, device_hours=1e5)


def problem_on(cluster: str | ClusterSpec, price: float | None = 2.0) -> Problem:
    spec = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return problem_for(DENSE, replace(spec, price_per_device_hour=price))


def of(problem: Problem, run: Run, seconds: float, joules: float | None = 1e5) -> RunFigures:
    return figures_at(problem, run, seconds_per_sequence=seconds, joules_per_sequence=joules, memory_bytes=4e10)


def test_a_million_gpu_hours_of_bloom() -> None:
    """1,161,261 A100 hours at 150 TFLOP/s for 176e9 parameters, 8 FLOPs each with recomputation: 445B tokens."""
    problem = problem_on("a100-sxm:48x8")
    tokens_per_s = 384 * 150e12 / (8 * 176e9)
    found = of(problem, Run(reliability=RELIABLE, device_hours=1_161_261), 4096 / tokens_per_s)
    assert found.tokens_in_budget == pytest.approx(1_161_261 * 3600 * 150e12 / (8 * 176e9), rel=1e-4)
    assert found.tokens_in_budget == pytest.approx(445e9, rel=2e-3)
    assert found.budget_s == pytest.approx(126.0 * 86400, rel=1e-3)


def test_figures_by_hand() -> None:
    """16 devices, a sequence of 4,096 tokens in 0.5 s: 8,192 tokens/s; 2 a device hour."""
    run = Run(reliability=RELIABLE, tokens=8192 * 3600.0, power_usage_effectiveness=1.2)
    found = of(problem_on("h100-sxm:2x8"), run, 0.5, joules=4096 * 3.0)
    assert found.tokens_per_s == 8192
    assert found.run_s == pytest.approx(3600, rel=1e-4)
    assert found.device_hours == pytest.approx(16, rel=1e-4)
    assert found.cost == pytest.approx(32, rel=1e-4)
    assert found.cost_per_token == pytest.approx(32 / (8192 * 3600), rel=1e-4)
    assert found.energy_per_token_j == pytest.approx(3.6, rel=1e-4)
    assert found.energy_j == pytest.approx(3.6 * 8192 * 3600, rel=1e-4)
    assert found.tokens_in_budget is None
    # Goodput lengthens the run, and what is paid by time with it.
    often = replace(run, reliability=Reliability(device_mtbf_s=16 * 11160.0))
    slower = of(problem_on("h100-sxm:2x8"), often, 0.5)
    assert slower.goodput == pytest.approx(0.8527, abs=1e-4)
    assert slower.run_s == pytest.approx(3600 / slower.goodput)
    assert slower.cost == pytest.approx(32 / slower.goodput)


def test_power_of_a_node_of_eight_h100() -> None:
    """70 W idle, 605.5 W computing, 432.25 W waiting: between what was measured, 7.8 kW, and 8.4 kW at most."""
    assert device_power_w(700, 0.0) == pytest.approx(70)
    assert device_power_w(700, 0.85) == pytest.approx(605.5)
    node = load_cluster("h100-sxm:1x8")
    assert waiting_power_w(node) == pytest.approx(2500 + 8 * 432.25)
    terms = {name: np.zeros(1) for name in STEP_TERMS} | {"gemm": np.array([6.0]), "optimizer": np.array([1.0])}
    energy = step_energy_j(node, terms, np.array([10.0]))
    assert energy == pytest.approx([10 * (2500 + 8 * 432.25) + 7 * 8 * (605.5 - 432.25)])
    assert 0.9 < (2500 + 8 * 605.5) / 7750 < 1.0


def test_energy_of_a_plan_lies_between_waiting_and_computing_all_the_time() -> None:
    problem = problem_on("h100-sxm:1x8")
    plan = ParallelPlan(global_batch=16, tp=2, sp=True, pp=2, dp_shard=2)
    (ranked_plan,) = ranked(problem, estimate(problem, PlanBatch.of([plan], DENSE.num_layers)), [0])
    found = figures(problem, Run(reliability=RELIABLE), ranked_plan)
    least = least_figures(
        problem,
        Run(reliability=RELIABLE),
        seconds_per_sequence=ranked_plan.step_s / 16,
        memory_bytes=ranked_plan.memory_bytes,
    )
    assert least.energy_per_token_j is not None
    assert found.energy_per_token_j is not None
    assert least.energy_per_token_j < found.energy_per_token_j < least.energy_per_token_j * 605.5 / 432.25
    assert found.tokens_per_s == pytest.approx(8 * ranked_plan.tokens_per_s_per_device)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-3, 10), st.floats(1.001, 5), st.floats(1, 1e6), st.integers(1, 64))
def test_every_objective_grows_with_its_measure(seconds: float, times: float, joules: float, nodes: int) -> None:
    """So that the least measure of a size gives the least objective, and a bound of one a bound of the other."""
    problem = problem_on("h100-sxm:4x8")
    problem = replace(problem, cluster=replace(problem.cluster, num_nodes=nodes))
    fast, slow = of(problem, RUN, seconds, joules), of(problem, RUN, seconds * times, joules)
    heavy = of(problem, RUN, seconds, joules * times)
    large = replace(fast, memory_bytes=times * fast.memory_bytes)
    for objective in OBJECTIVES.values():
        changed = {"time": slow, "energy": heavy, "memory": large}[objective.measure]
        before, after = costs_of([objective], fast)[0], costs_of([objective], changed)[0]
        assert before > 0
        assert after == (before if objective.name == "devices" else pytest.approx(times * before))


def test_what_is_missing_is_named() -> None:
    plain = Run()
    problem = problem_on("h100-sxm:2x8", price=None)
    for name, key in (
        ("cost-per-token", "price_per_device_hour"),
        ("time-to-tokens", "--tokens"),
        ("tokens", "--gpu-hours"),
    ):
        with pytest.raises(InputError, match=key):
            costs_of(find_objectives([name]), of(problem, plain, 1.0))
    powerless = replace(problem.cluster, host=replace(problem.cluster.host, power_w=None))
    with pytest.raises(InputError, match="power_w"):
        waiting_power_w(powerless)
    with pytest.raises(InputError, match=r"power_w.*\[host\]"):
        costs_of(
            find_objectives(["energy_per_token"]),
            least_figures(problem_on(powerless), plain, seconds_per_sequence=1.0, memory_bytes=1.0),
        )
    with pytest.raises(InputError, match="did you mean step-time"):
        find_objectives(["steptime"])
    with pytest.raises(InputError, match="deadline"):
        Run(deadline_s=1.0)


def test_a_device_without_its_power_and_a_price_of_nothing_are_refused_by_name() -> None:
    table = dict(msgspec.to_builtins(load_cluster("h100-sxm:2x8")))
    assert decode(ClusterSpec, {**table, "price_per_device_hour": 2.5}, "lab").price_per_device_hour == 2.5
    with pytest.raises(InputError, match="price_per_device_hour"):
        decode(ClusterSpec, {**table, "price_per_device_hour": 0}, "lab")
    device = {key: value for key, value in table["device"].items() if key != "tdp_w"}
    with pytest.raises(InputError, match="tdp_w"):
        decode(ClusterSpec, {**table, "device": device}, "lab")


def test_no_price_ships_and_every_preset_has_its_power() -> None:
    for name in preset_clusters():
        cluster = load_cluster(name)
        assert cluster.price_per_device_hour is None
        assert waiting_power_w(cluster) > 0


def test_what_a_run_is_for_decides_the_objective_and_what_it_admits() -> None:
    assert default_objective(Run()) == "step-time"
    assert default_objective(Run(tokens=1e12)) == "time-to-tokens"
    assert default_objective(Run(tokens=1e12, deadline_s=1e6)) == "devices"
    assert default_objective(Run(device_hours=1e6)) == "tokens"
    assert default_objective(Run(device_hours=1e6, tokens=1e12)) == "time-to-tokens"
    both = find_objectives(["memory-headroom", "cost-per-token", "step-time"])
    assert measures_of(both, Run()) == ("memory", "time")
    assert measures_of(both[:1], Run(tokens=1e9, deadline_s=1.0)) == ("memory", "time")
    assert measures_of(both[:1], Run(device_hours=1e9)) == ("memory",)
    problem = problem_on("h100-sxm:2x8")
    asked = Run(reliability=RELIABLE, tokens=8192 * 3600.0, deadline_s=3700.0, device_hours=16.1)
    assert asked.admits(of(problem, asked, 0.5))
    assert not asked.admits(of(problem, asked, 0.51))  # 16.3 device hours
    assert not replace(asked, device_hours=None).admits(of(problem, asked, 0.52))  # 3,744 s
    lasting = Run(device_hours=160.0, deadline_s=11 * 3600.0)
    assert lasting.admits(of(problem, lasting, 0.5))  # 10 hours on 16 devices
    assert not replace(lasting, deadline_s=9 * 3600.0).admits(of(problem, lasting, 0.5))
