"""Spread of a step: that of similar runs, and how hard the problem is to predict."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autoplan.api.problem import make_problem
from autoplan.cost.estimate import estimate
from autoplan.cost.spreads import (
    FACTORS,
    MOST_HALVINGS,
    NORMAL_90,
    UNEXPOSED,
    Familiarity,
    exposed_shares,
    general_spreads,
    kinds_of,
    spread_kinds,
    spread_range,
)
from autoplan.frameworks.presets import load_framework
from autoplan.readers.calibration import ANOTHER_FRAMEWORK, calibration_among, shipped_calibrations
from autoplan.readers.cluster import load_cluster
from autoplan.readers.finetuning import load_finetuning
from autoplan.spec.calibration import TIME_SPREADS, Calibration
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.measurement import Measurement
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import TimingTable
from problems import problem_for

SPREAD = ParallelPlan(global_batch=32, tp=4, pp=2, dp_shard=2)
OWN = Calibration(time_spread=0.06, blocks=("dense",), precisions=("bf16",), most_devices=16, exposed_share=1.0)


def problem_of(model: str = "llama3-8b", calibration: Calibration = OWN) -> Problem:
    return problem_for(model, "h100-sxm:2x8", calibration=calibration)


def price(problem: Problem, plan: ParallelPlan) -> CostEstimate:
    return estimate(problem, PlanBatch.of([plan], problem.model.num_layers))


def spread_of(cost: CostEstimate) -> float:
    return float(np.log(cost.high_s / cost.step_s)[0]) / NORMAL_90


def spread_under(calibration: Calibration, problem: Problem | None = None, plan: ParallelPlan = SPREAD) -> float:
    return spread_of(price(replace(problem or problem_of(), calibration=calibration), plan))


@pytest.mark.parametrize(
    ("model", "framework", "kinds"),
    [
        ("llama3-70b", "megatron-core", {}),
        ("llama3-405b", "megatron-core", {}),
        ("llama3-8b", "megatron-core", {"other": 1, "halving": 1}),
        ("llama3-70b", "torchtitan", {"other": 1, "own_layers": 1}),
        ("mixtral-8x7b", "megatron-core", {"other": 1, "halving": 1, "mixture": 1}),
    ],
)
def test_problems_are_the_harder_the_further_they_are_from_wide_dense_models_under_megatrons_layers(
    model: str, framework: str, kinds: dict[str, float]
) -> None:
    problem = replace(problem_of(model, Calibration()), framework=load_framework(framework))
    assert kinds_of(problem).tolist() == [kinds.get(name, 0) for name in FACTORS]
    cost, general = price(problem, SPREAD), general_spreads()
    faster, slower = np.log([cost.step_s[0] / cost.low_s[0], cost.high_s[0] / cost.step_s[0]]) / NORMAL_90
    both = {name: power for name, power in kinds.items() if name in ("other", "halving")}
    below, above = (
        general.plain * math.prod(getattr(general, name) ** power for name, power in of.items()) for of in (both, kinds)
    )
    assert (faster, slower) == pytest.approx((below, above))
    assert spread_range(problem) == pytest.approx((above, above))


def test_tiny_models_are_as_hard_as_the_smallest_that_was_measured() -> None:
    problem = problem_of(calibration=Calibration())
    tiny = replace(problem, model=replace(problem.model, hidden_size=64, num_heads=4, num_kv_heads=4))
    assert kinds_of(tiny)[FACTORS.index("halving")] == MOST_HALVINGS


def test_measured_kernels_leave_only_experts_hard_to_predict() -> None:
    gemm = Measurement(operation="gemm", shape=(64, 64, 64), dtype="bf16", device="h100-sxm", seconds=1e-5)
    for model, expected in (("llama3-8b", []), ("mixtral-8x7b", ["mixture"])):
        problem = replace(problem_of(model, Calibration()), framework=load_framework("torchtitan"))
        measured = replace(problem, timings=TimingTable.of([gemm]))
        assert [name for name, power in zip(FACTORS, kinds_of(measured), strict=True) if power] == expected


def test_runs_like_a_plan_have_their_spread() -> None:
    assert spread_under(OWN) == pytest.approx(0.06)


def test_a_slow_link_takes_more_of_a_step_than_a_fast_one_spares() -> None:
    cost = price(problem_of(calibration=Calibration()), SPREAD)
    known = replace(Familiarity.full(1), links=np.array([0.7**2]))
    share = 0.4
    terms = {name: np.zeros(1) for name in cost.terms_s} | {
        "gemm": np.array([1 - share]),
        "fsdp_communication": np.array([share]),
    }
    below, above = known.equipment(terms, np.ones(1))
    factor = math.exp(NORMAL_90 * 0.7)  # of the rate of links, to either side
    assert math.exp(NORMAL_90 * math.sqrt(above[0])) == pytest.approx(1 - share + share * factor)
    assert math.exp(-NORMAL_90 * math.sqrt(below[0])) == pytest.approx(1 - share + share / factor)


def test_what_a_plan_exposes_beyond_the_runs_takes_it_out_of_them() -> None:
    cost = price(problem_of(calibration=OWN), SPREAD)
    share = exposed_shares(cost.terms_s, cost.step_s)[0]
    exposed = sum(value[0] for name, value in cost.terms_s.items() if name not in UNEXPOSED)
    assert share == pytest.approx(exposed / cost.step_s[0])
    assert spread_under(replace(OWN, exposed_share=share + 0.01)) == pytest.approx(0.06)
    assert spread_under(replace(OWN, exposed_share=share - 0.01)) == pytest.approx(spread_under(Calibration()))


@pytest.mark.parametrize("change", [{"precisions": ("fp8",)}, {"most_devices": 8}])
def test_runs_say_nothing_of_a_plan_with_something_new(change: dict[str, object]) -> None:
    assert spread_under(replace(OWN, **change)) == pytest.approx(spread_under(Calibration()))  # type: ignore[arg-type]


def test_runs_of_dense_models_say_nothing_of_a_model_with_experts() -> None:
    problem = problem_of("mixtral-8x7b")
    assert spread_under(OWN, problem) == pytest.approx(spread_under(Calibration(), problem))
    known = replace(OWN, blocks=("dense", "experts"), experts_time_spread=0.3)
    assert spread_under(known, problem) == pytest.approx(0.3)


def test_runs_that_trained_all_weights_say_nothing_of_adapters() -> None:
    whole = problem_of()
    adapters = replace(whole, training=replace(whole.training, finetuning=load_finetuning("lora:r=16")))
    known = replace(adapters, calibration=replace(OWN, blocks=("adapters", "dense")))
    batch = PlanBatch.of([SPREAD], whole.model.num_layers)
    weights = [Familiarity.of(problem, batch).weight[0] for problem in (whole, adapters, known)]
    assert weights == [1.0, 0.0, 1.0]


def test_measurements_that_a_plan_does_not_rest_on_make_it_no_surer() -> None:
    """Records of other shapes had made the interval of a machine that nobody else knew a third as wide."""
    problem = problem_of(calibration=Calibration())
    model, plan = problem.model, ParallelPlan(global_batch=32, tp=4, dp_shard=4)
    unused = Measurement(
        operation="latent_attention", shape=(1, 64, 4, 192, 128), dtype="bf16", device="h100-sxm", seconds=1
    )
    tokens, hidden, ffn = problem.training.seq_len, model.hidden_size, model.ffn_size
    shapes = [(tokens, hidden // 4 * 3 // 2, hidden), (tokens, hidden, hidden // 4), (tokens, hidden, ffn // 4)]
    shapes += [(tokens, ffn // 2, hidden), (tokens, model.vocab_size // 4, hidden)]
    products = [
        Measurement(operation=operation, shape=shape, dtype="bf16", device="h100-sxm", seconds=1e-2)
        for shape in shapes
        for operation in ("gemm", "dgrad", "wgrad")
    ]
    plain, other, own = (
        spread_of(price(replace(problem, timings=TimingTable.of(of)), plan)) for of in ([], [unused], products)
    )
    assert other == plain
    assert own == pytest.approx(general_spreads().plain)


def test_links_that_differ_widen_a_step_by_the_share_in_which_they_are_waited_for() -> None:
    cluster, plan = load_cluster("rtx-4090:1x8"), ParallelPlan(global_batch=64, tp=4, dp_shard=2)
    problem = replace(problem_of(calibration=Calibration()), cluster=cluster)
    alike = replace(cluster, levels=tuple(replace(level, rate_spread=0.0) for level in cluster.levels))
    wide, narrow = (price(on, plan) for on in (problem, replace(problem, cluster=alike)))
    terms = ("tp_communication", "data_parallel_reduce", "parameter_gather")
    share = sum(wide.terms_s[term][0] for term in terms) / wide.step_s[0]
    assert share > 0.3
    slower = math.log1p(share * math.expm1(0.7 * NORMAL_90)) / NORMAL_90
    assert spread_of(wide) ** 2 - spread_of(narrow) ** 2 == pytest.approx(slower**2)
    assert spread_range(problem)[1] > spread_range(replace(problem, cluster=alike))[1]


def test_links_whose_collectives_were_measured_do_not_differ() -> None:
    problem = replace(problem_of(calibration=Calibration()), cluster=load_cluster("rtx-4090:1x8"))
    reduced = Measurement(
        operation="all_reduce", shape=(8, 8, 1, 1 << 20), dtype="bf16", device="rtx-4090", seconds=1e-3
    )
    assert problem.link_spread == 0.7
    assert replace(problem, timings=TimingTable.of([reduced])).link_spread == 0.0
    assert replace(problem, calibration=OWN).link_spread == 0.0


def test_published_runs_on_the_generation_say_nothing_of_the_links_of_a_server() -> None:
    problem = make_problem("llama3-8b", cluster="h100-pcie:1x8", seq_len=4096)
    assert problem.calibration.sources
    assert problem.link_spread == 0.3


def test_no_plan_has_less_than_its_least_spread_or_than_that_of_the_problem() -> None:
    for calibration in (Calibration(), OWN, replace(OWN, exposed_share=0.1)):
        problem = problem_of(calibration=calibration)
        plans = [ParallelPlan(global_batch=16, dp_shard=16), ParallelPlan(global_batch=16, tp=8, pp=2), SPREAD]
        batch = PlanBatch.of(plans, problem.model.num_layers)
        cost = estimate(problem, batch)
        spread = np.log(cost.high_s / cost.step_s) / NORMAL_90
        least = Familiarity.of(problem, batch).least
        assert (spread >= least - 1e-12).all()
        assert (least >= spread_range(problem)[0] - 1e-12).all()


def test_parts_of_a_mixed_cluster_are_known_as_the_least_known_of_them() -> None:
    problem = problem_of(calibration=OWN)
    batch = PlanBatch.of([SPREAD], problem.model.num_layers)
    parts = [OWN, replace(OWN, time_spread=0.3), replace(OWN, precisions=("fp8",))]
    known = [Familiarity.of(replace(problem, calibration=part), batch) for part in parts]
    both = Familiarity.full(1)
    for part in known:
        both.lessen(np.zeros(1, dtype=np.int64), part)
    assert both.kind_variance[0] == pytest.approx(0.3**2)
    assert both.weight[0] == 0.0


def test_fine_tuning_by_other_code_than_megatrons_is_less_sure_than_its_pretraining() -> None:
    problem = problem_of(calibration=Calibration())
    tuned = replace(problem, training=replace(problem.training, finetuning=load_finetuning("full")))
    megatron, other = (replace(tuned, framework=load_framework(name)) for name in ("megatron-core", "torchtitan"))
    untuned = replace(problem, framework=other.framework)
    at = FACTORS.index("own_tuning")
    assert [kinds_of(asked)[at] for asked in (megatron, other, untuned)] == [0.0, 1.0, 0.0]
    assert spread_range(other)[0] == pytest.approx(spread_range(untuned)[0] * general_spreads().own_tuning)


def test_experts_are_a_kind_of_their_own() -> None:
    dense, experts = (
        spread_kinds(problem, PlanBatch.of([SPREAD], problem.model.num_layers))[0]
        for problem in (problem_of(), problem_of("mixtral-8x7b"))
    )
    assert TIME_SPREADS[experts] == "experts_time_spread" != TIME_SPREADS[dense]


# -- which calibration holds ------------------------------------------------------------------------------------------


def test_a_framework_without_runs_on_a_generation_has_those_that_it_has_elsewhere() -> None:
    known = {
        "own-hopper": replace(OWN, name="own on hopper"),
        "other-volta": replace(OWN, name="other on volta", blocks=("dense", "experts"), most_devices=64),
    }
    assert calibration_among(known, "own", "hopper") == known["own-hopper"]
    elsewhere = calibration_among(known, "own", "volta")
    assert (elsewhere.blocks, elsewhere.most_devices, elsewhere.time_spread) == (("dense",), 16, None)
    assert calibration_among(known, "third", "volta").most_devices == 64
    kin = calibration_among(known, "own", "hopper", is_similar=True)
    assert (kin.name, kin.time_spread) == (ANOTHER_FRAMEWORK, None)


def test_every_general_spread_says_what_it_rests_on() -> None:
    assert set(general_spreads().evidence) == {"plain", *FACTORS}
    assert all(own.time_spread is None for own in shipped_calibrations().values())
