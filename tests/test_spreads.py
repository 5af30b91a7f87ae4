"""Spread of a step: the runs of a calibration, what is new beside them, and how the parts add up."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autoplan.api.problem import make_problem
from autoplan.cost.estimate import estimate
from autoplan.cost.spreads import (
    GENERAL_PARTS,
    HARD,
    KINDS,
    NORMAL_90,
    NOVELTIES,
    UNEXPOSED,
    Familiarity,
    component_shares,
    exposed_shares,
    faster_squares,
    general_spreads,
    kinds_of,
    spread_kinds,
    spread_range,
)
from autoplan.frameworks.presets import load_framework
from autoplan.readers.calibration import calibration_among, shipped_calibrations
from autoplan.readers.cluster import load_cluster
from autoplan.readers.finetuning import load_finetuning
from autoplan.spec.calibration import TIME_SPREADS, Calibration
from autoplan.spec.enums import Precision
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


def test_a_plan_without_any_run_has_the_parts_of_its_components() -> None:
    cost = price(problem_of(calibration=Calibration()), SPREAD)
    general, shares = general_spreads(), component_shares(cost.terms_s)[0]
    expected = general.any_step**2 + general.narrow**2
    expected += sum((getattr(general, name) * share) ** 2 for name, share in zip(HARD, shares[1:], strict=True))
    assert spread_of(cost) == pytest.approx(math.sqrt(expected))


def test_runs_like_a_plan_have_their_spread() -> None:
    assert spread_under(OWN) == pytest.approx(0.06)


def test_what_is_hard_to_predict_makes_runs_slower_rather_than_faster() -> None:
    of_others, own = (price(problem_of(calibration=calibration), SPREAD) for calibration in (Calibration(), OWN))
    general = general_spreads()
    symmetric = math.hypot(general.any_step, general.narrow)
    for cost, every, below in ((of_others, symmetric, general.below), (own, 0.0, 1.0)):
        faster, slower = np.log([cost.step_s[0] / cost.low_s[0], cost.high_s[0] / cost.step_s[0]]) / NORMAL_90
        assert faster**2 - every**2 == pytest.approx(below**2 * (slower**2 - every**2))
    assert general.below < 1.0


@pytest.mark.parametrize(("scale", "halvings"), [(1.0, 0.0), (2.0, 1.0), (8.0, 3.0)])
def test_steps_below_a_second_are_less_sure_with_every_halving(scale: float, halvings: float) -> None:
    cost = price(problem_of(calibration=Calibration()), SPREAD)
    size = float(cost.step_s[0]) * scale  # to a step of 1 s, of a half, of an eighth
    terms = {name: value / size for name, value in cost.terms_s.items()}
    known = Familiarity.of(problem_of(calibration=Calibration()), cost.batch)
    second, shorter = (
        known.sides({name: value * times for name, value in terms.items()}, cost.step_s / size * times).above[0]
        for times in (scale, 1.0)
    )
    assert shorter**2 - second**2 == pytest.approx(halvings * general_spreads().short ** 2)


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


@pytest.mark.parametrize(
    ("novelty", "change", "times"),
    [
        ("framework", {"unseen": ("framework",)}, 1.0),
        ("generation", {"unseen": ("generation",)}, 1.0),
        ("device", {"unseen": ("device",)}, 1.0),
        ("precision", {"precisions": ("fp8",)}, 1.0),
        ("size", {"most_devices": 2}, math.sqrt(3)),  # 16 devices are three doublings beyond
    ],
)
def test_every_novelty_adds_its_spread_in_quadrature(novelty: str, change: dict[str, object], times: float) -> None:
    plain = spread_under(Calibration())
    found = spread_under(replace(OWN, **change))  # type: ignore[arg-type]
    assert found**2 - plain**2 == pytest.approx((times * getattr(general_spreads(), novelty)) ** 2)


def test_a_model_with_experts_is_new_beside_dense_ones() -> None:
    problem = problem_of("mixtral-8x7b")
    plain, found = (spread_under(calibration, problem) for calibration in (Calibration(), OWN))
    assert found**2 - plain**2 == pytest.approx(general_spreads().model ** 2)
    known = replace(OWN, blocks=("dense", "experts"), experts_time_spread=0.3)
    assert spread_under(known, problem) == pytest.approx(0.3)


def test_adapters_are_new_beside_runs_that_trained_all_weights() -> None:
    whole = problem_of()
    adapters = replace(whole, training=replace(whole.training, finetuning=load_finetuning("lora:r=16")))
    batch = PlanBatch.of([SPREAD], whole.model.num_layers)
    at = NOVELTIES.index("model")
    assert [Familiarity.of(problem, batch).novelty[0, at] for problem in (whole, adapters)] == [0.0, 1.0]
    known = replace(adapters, calibration=replace(OWN, blocks=("adapters", "dense")))
    assert Familiarity.of(known, batch).novelty[0, at] == 0.0


def test_a_generation_whose_kernels_were_measured_is_not_new() -> None:
    unseen = Calibration(unseen=("generation",))
    gemm = Measurement(operation="gemm", shape=(64, 64, 64), dtype="bf16", device="h100-sxm", seconds=1e-5)
    problem = problem_of(calibration=unseen)
    measured = replace(problem, timings=TimingTable.of([gemm]))
    batch = PlanBatch.of([SPREAD], problem.model.num_layers)
    at = NOVELTIES.index("generation")
    assert [Familiarity.of(asked, batch).novelty[0, at] for asked in (problem, measured)] == [1.0, 0.0]


def test_measurements_that_a_plan_does_not_rest_on_make_it_no_surer() -> None:
    """Records of other shapes had made the interval of a machine that nobody else knew a third as wide."""
    problem = problem_of(calibration=Calibration(unseen=("generation",)))
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
    seen = replace(problem, calibration=Calibration(), timings=TimingTable.of(products))
    assert own == spread_of(price(seen, plan))


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
    parts = [OWN, replace(OWN, time_spread=0.3), replace(OWN, unseen=("framework",))]
    known = [Familiarity.of(replace(problem, calibration=part), batch) for part in parts]
    both = Familiarity.full(1)
    for part in known:
        both.lessen(np.zeros(1, dtype=np.int64), part)
    assert both.kind_variance[0] == pytest.approx(0.3**2)
    assert both.weight[0] == 0.0
    assert both.novelty[0, NOVELTIES.index("framework")] == 1.0


def test_mixtures_of_experts_have_a_part_of_their_own_whether_they_are_new_or_not() -> None:
    seen = Calibration(blocks=("dense", "experts"))
    for model, expected in (("llama3-8b", 0.0), ("mixtral-8x7b", 1.0)):
        problem = problem_of(model, calibration=seen)
        cost = price(problem, SPREAD)
        _, parts = Familiarity.of(problem, cost.batch).own_parts(cost.terms_s, cost.step_s)
        found = parts[0, [GENERAL_PARTS.index("mixture"), GENERAL_PARTS.index("model")]]
        assert found.tolist() == [expected, 0.0]


def test_layers_of_other_code_than_megatrons_are_less_sure_until_they_are_measured() -> None:
    problem = problem_of(calibration=Calibration())
    plain, other = (replace(problem, framework=load_framework(name)) for name in ("megatron-core", "torchtitan"))
    gemm = Measurement(operation="gemm", shape=(64, 64, 64), dtype="bf16", device="h100-sxm", seconds=1e-5)
    batch, at = PlanBatch.of([SPREAD], problem.model.num_layers), KINDS.index("own_layers")
    measured = replace(other, timings=TimingTable.of([gemm]))
    assert [Familiarity.of(asked, batch).kinds[0, at] for asked in (plain, other, measured)] == [0.0, 1.0, 0.0]
    general, added = general_spreads(), spread_range(other)[0] ** 2 - spread_range(plain)[0] ** 2
    assert added == pytest.approx(general.own_layers**2 - general.narrow**2)
    cost = price(other, SPREAD)
    assert spread_of(cost) >= Familiarity.of(other, cost.batch).least[0] >= spread_range(other)[0]
    with_runs = replace(other, calibration=OWN)
    assert spread_of(price(with_runs, SPREAD)) == pytest.approx(0.06)


def test_narrow_models_under_megatrons_layers_are_less_sure_on_both_sides_until_they_are_measured() -> None:
    narrow, wide = (problem_of(model, calibration=Calibration()) for model in ("llama3-8b", "llama3-70b"))
    gemm = Measurement(operation="gemm", shape=(64, 64, 64), dtype="bf16", device="h100-sxm", seconds=1e-5)
    measured = replace(narrow, timings=TimingTable.of([gemm]))
    other = replace(narrow, framework=load_framework("torchtitan"))
    at = KINDS.index("narrow")
    assert [kinds_of(problem)[at] for problem in (narrow, wide, measured, other)] == [1.0, 0.0, 0.0, 0.0]
    squares = np.ones(len(GENERAL_PARTS))
    one_sided = faster_squares(squares, 0.5)[[GENERAL_PARTS.index(name) for name in ("narrow", "mixture")]]
    assert one_sided.tolist() == [1.0, 0.25]


@pytest.mark.parametrize(
    ("cluster", "precision", "expected"),
    [("b200-sxm:1x8", "bf16", 1.0), ("b200-sxm:1x8", "fp8", 0.0), ("h100-sxm:1x8", "bf16", 0.0)],
)
def test_16_bit_products_on_blackwell_are_less_sure(cluster: str, precision: Precision, expected: float) -> None:
    problem = problem_of(calibration=Calibration())
    training = replace(problem.training, precision=precision)
    problem = replace(problem, cluster=load_cluster(cluster), training=training)
    assert kinds_of(problem)[KINDS.index("power")] == expected


def test_fine_tuning_by_other_code_than_megatrons_is_less_sure_than_its_pretraining() -> None:
    problem = problem_of(calibration=Calibration())
    tuned = replace(problem, training=replace(problem.training, finetuning=load_finetuning("full")))
    batch, at = PlanBatch.of([SPREAD], problem.model.num_layers), KINDS.index("own_tuning")
    megatron, other = (replace(tuned, framework=load_framework(name)) for name in ("megatron-core", "torchtitan"))
    untuned = replace(problem, framework=other.framework)
    assert [Familiarity.of(asked, batch).kinds[0, at] for asked in (megatron, other, untuned)] == [0.0, 1.0, 0.0]
    added = spread_range(other)[0] ** 2 - spread_range(untuned)[0] ** 2
    assert added == pytest.approx(general_spreads().own_tuning ** 2)


def test_experts_are_a_kind_of_their_own() -> None:
    dense, experts = (
        spread_kinds(problem, PlanBatch.of([SPREAD], problem.model.num_layers))[0]
        for problem in (problem_of(), problem_of("mixtral-8x7b"))
    )
    assert TIME_SPREADS[experts] == "experts_time_spread" != TIME_SPREADS[dense]


# -- which calibration holds ------------------------------------------------------------------------------------------


def test_calibrations_of_a_framework_elsewhere_leave_the_generation_unseen() -> None:
    known = {
        "own-hopper": replace(OWN, name="own on hopper"),
        "other-volta": replace(OWN, name="other on volta", blocks=("dense", "experts"), most_devices=64),
    }
    assert calibration_among(known, "own", "hopper") == known["own-hopper"]
    elsewhere = calibration_among(known, "own", "volta")
    assert (elsewhere.unseen, elsewhere.time_spread) == (("generation",), None)
    assert (elsewhere.blocks, elsewhere.most_devices) == (("dense",), 16)
    never = calibration_among(known, "third", "volta")
    assert (never.unseen, never.most_devices) == ((), 64)
    assert calibration_among(known, "third", "cdna3").unseen == ("generation", "device")
    kin = calibration_among(known, "own", "hopper", is_similar=True)
    assert (kin.unseen, kin.time_spread) == (("framework",), None)
    assert calibration_among({}, "own", "hopper").unseen == ("generation", "device")


def test_every_general_spread_says_what_it_rests_on() -> None:
    general = general_spreads()
    assert set(general.evidence) == {*GENERAL_PARTS, "below"}
    assert all(own.time_spread is None for own in shipped_calibrations().values())
