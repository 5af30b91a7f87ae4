"""Does the search on mixed clusters find what published systems find, and never lose by having more?"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import autoplan
from autoplan.api.problem import load_any_cluster, make_mixed_problem, make_problem, make_space
from autoplan.base.errors import InputError
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import book_of
from autoplan.readers.model import load_model
from autoplan.search.balance import spread_layers
from autoplan.search.mixed_bounds import Candidate, MixedSpace
from autoplan.search.mixed_candidates import candidates_of, sharper
from autoplan.search.mixed_layouts import open_layouts
from autoplan.search.mixed_refinement import Refiner
from autoplan.search.mixed_search import best_of
from autoplan.search.mixed_search import search_mixed as search_space
from autoplan.search.structures import Equal, Layout, Pipelines, Structure, groupings, pipelines
from autoplan.search.study import search as plain_search
from autoplan.spec.enums import Offload, Schedule
from autoplan.spec.estimate import OOM_Z, RISKY_Z
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, ReplicaKind, as_parallel
from autoplan.spec.mixed_result import MixedCertificate, MixedCost, MixedResult
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import even_chunks
from autoplan.spec.started_plan import started_plan
from autoplan.topology.mixed_cluster import BetweenSpec
from mixed_cases import SMALL, as_mixed, common_of, plan_of, problem_of, replicas, scaled


def search_mixed(problem: MixedProblem, global_batch: int, **flags: list[str]) -> MixedResult:
    """The search in all plans that the framework admits."""
    return search_space(problem, global_batch, partial(make_space, global_batch=global_batch, **flags))


def check(problem: MixedProblem, result: MixedResult, global_batch: int) -> MixedCost:
    """The best plan of a result, all of whose plans keep the laws of mixed plans."""
    for cost in result.ranked:
        plan = cost.plan
        assert plan.global_batch == global_batch
        for kind, price in zip(plan.kinds, cost.kinds, strict=True):
            assert sum(stage.layers for stage in kind.stages) == problem.model.num_layers
            assert all(stage.memory_bytes < stage.capacity_bytes for stage in price.stages)
        shares = [kind.count * kind.state_share for kind in plan.kinds if kind.state_share is not None]
        assert not shares or sum(shares) == pytest.approx(1, abs=1e-9)
    rates = [cost.sequences_per_s for cost in result.ranked]
    assert rates == sorted(rates, reverse=True)
    return result.ranked[0]


def test_a_mixed_pair_of_nodes_beats_the_symmetric_plan() -> None:
    """S45: 8 A100-80 beside 8 V100-32, Llama-13B: 1.4 times the best symmetric plan, at most 3496 / 2000 of it."""
    a100, v100 = scaled("a100-sxm:1x8", "a100"), scaled("v100:1x8", "v100")
    problem = problem_of(a100, v100, model=load_model("llama-13b"), precision="fp16")
    result = search_mixed(problem, 256)
    best = check(problem, result, 256)
    assert best.plan.parts == {0, 1}
    on = {part: [s.layers for k in best.plan.kinds for s in k.stages if s.part == part] for part in (0, 1)}
    assert min(on[0]) > max(on[1])

    symmetric = []
    for tp, pp, size in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)):
        layers, deep = even_chunks(40, pp), pp * tp
        if pp > 1 and deep <= 16:
            places = [(int(at >= pp // 2), tp, num_layers) for at, num_layers in enumerate(layers)]
            symmetric.append((replicas(16 // deep, 16 * deep // size, *places, micro_batch=size),))
        if deep <= 8:
            halves = ([(part, tp, layer) for layer in layers] for part in (0, 1))
            symmetric.append(tuple(replicas(8 // deep, 16 * deep // size, *half, micro_batch=size) for half in halves))
    assert all(
        sum(kind.count * kind.micro_batch * kind.num_microbatches for kind in kinds) == 256 for kinds in symmetric
    )
    costs = [
        cost
        for recompute in ("none", "full")
        for cost in estimate_mixed(
            problem,
            [plan_of(kinds=kinds, recompute=recompute, precision="fp16") for kinds in symmetric],  # type: ignore[arg-type]
        )
    ]
    paced = max(cost.sequences_per_s for cost in costs if cost.oom_z <= RISKY_Z)
    # A V100 paces every symmetric plan, to twice what the V100s reach alone at most.
    roomy = problem_of(scaled("v100:1x8", "v100", memory_gb=320), model=problem.model, precision="fp16")
    most = 2 * search_mixed(roomy, 256).certificate.rates_alone[0]
    assert paced <= most
    assert 1.4 * paced <= 1.4 * most <= best.sequences_per_s <= 1.75 * most


def test_replicas_of_half_the_speed_take_half_the_batch() -> None:
    """S46 (a), (c): speeds 1, 1, .5, .5: at least 2.9 of the ideal 3.0, where an equal split has 2.0."""
    fast, slow = scaled("a100-sxm:1x2", "fast"), scaled("a100-sxm:1x2", "slow", speed=0.5)
    problem = problem_of(fast, slow)
    structure = Structure(
        kinds=(Pipelines(count=2, places=((0, 1),)), Pipelines(count=2, places=((1, 1),))),
        micro_batches=(1, 1),
        common=common_of(),
    )
    (found,) = Refiner(problem, 481).refine([structure])
    cost = found.cost
    many = {kind.stages[0].part: kind.count * kind.num_microbatches for kind in cost.plan.kinds}
    assert sum(kind.count * kind.num_microbatches for kind in cost.plan.kinds) == 481
    ideal = sum(
        kind.num_microbatches * kind.count / price.pipeline_s
        for kind, price in zip(cost.plan.kinds, cost.kinds, strict=True)
    )
    assert 481 / max(price.pipeline_s for price in cost.kinds) >= 2.9 / 3 * ideal
    equal = plan_of(kinds=(replicas(2, 120, (0, 1, 12)), replicas(2, 120, (1, 1, 12))))
    (paced,) = estimate_mixed(problem, [equal])
    assert 480 / max(price.pipeline_s for price in paced.kinds) <= 2.1 / 3 * ideal
    assert len(many) <= len(cost.plan.kinds) <= 4
    # The built-in trainer starts it: a rank per replica, each with its own number of micro-batches.
    started = started_plan(problem, cost.plan, unequal_batches=True)
    assert started.node_parts == (0, 1)
    assert sum(size * number for size, number in started.micro_batches) == 481


def test_slower_devices_add_what_they_have() -> None:
    """S57: two devices of .4 of the speed beside two: 30 to 42 % more than these alone, of which 40 % are ideal."""
    problem = problem_of(scaled("a100-sxm:1x2", "v100"), scaled("a100-sxm:1x2", "p100", speed=0.4))
    alone, beside = (Pipelines(count=2, places=((part, 1),)) for part in (0, 1))
    (both,), (fast,) = (
        Refiner(problem, 2048).refine(
            [Structure(kinds=kinds, micro_batches=(1,) * len(kinds), common=common_of(sharding="zero1"))]
        )
        for kinds in ((alone, beside), (alone,))
    )
    assert 1.30 <= fast.cost.step_s / both.cost.step_s <= 1.42
    started = started_plan(problem, both.cost.plan, unequal_batches=True)  # by the built-in trainer
    assert sum(size * number for size, number in started.micro_batches) == 2048


def test_states_go_where_memory_is() -> None:
    """S54: decoupled shares fit where shares by speed do not, 1.2 times the throughput of equal ones."""
    model = replace(SMALL, num_layers=48, hidden_size=4096, num_heads=32, num_kv_heads=32, ffn_size=11008)
    fast = scaled("a100-sxm:1x4", "fast", memory_gb=21)  # where rounding put the states just above what is safe
    slow = scaled("a100-sxm:1x4", "slow", speed=0.5, memory_gb=48)
    problem = problem_of(fast, slow, model=model, seq_len=2048, framework=load_framework("torch"))
    structure = Structure(
        kinds=(Pipelines(count=4, places=((0, 1),)), Pipelines(count=4, places=((1, 1),))),
        micro_batches=(2, 1),
        common=common_of(sharding="zero3", recompute="full"),
    )
    (found,) = Refiner(problem, 96).refine([structure])
    cost = found.cost
    assert cost.verdict == "fits"
    shares = [kind.state_share or 0.0 for kind in cost.plan.kinds]
    assert 4 * sum(shares) == pytest.approx(1, abs=1e-9)
    assert shares[0] < 0.08 < 0.17 < shares[1]
    # Twice the sequences in as many micro-batches, for which all ranks gather the weights.
    assert [(kind.micro_batch, kind.num_microbatches) for kind in cost.plan.kinds] == [(2, 8), (1, 8)]
    assert Refiner(problem, 97).refine([structure]) == []
    even = plan_of(kinds=(replicas(4, 12, (0, 1, 48)), replicas(4, 12, (1, 1, 48))), sharding="zero3", recompute="full")
    (equal,) = estimate_mixed(problem, [even])
    assert equal.step_s / cost.step_s >= 1.2
    with pytest.raises(InputError, match="its replicas hold different shares of the optimizer states"):
        started_plan(problem, cost.plan, unequal_batches=True, unequal_tp=True)


def test_a_tensor_group_that_lost_a_device_trains_on_with_fewer() -> None:
    """S37: tp 32 with a device lost goes on as tp 28 with at most 28/32 of the batch, and loses less than the group."""
    wide = replace(SMALL, hidden_size=14336, num_heads=224, num_kv_heads=224, ffn_size=57344, vocab_size=28672)
    whole, hurt = (
        replace(scaled(f"h100-sxm:{text}", name), name=name) for text, name in (("3x32", "a"), ("1x28", "b"))
    )
    problem = problem_of(whole, hurt, model=wide)
    left, kept = Pipelines(count=3, places=((0, 32),)), Pipelines(count=1, places=((1, 28),))

    def fastest(*kinds: Pipelines) -> MixedCost:
        structure = Structure(kinds=kinds, micro_batches=(1,) * len(kinds), common=common_of(sharding="zero1"))
        return Refiner(problem, 384).refine([structure])[0].cost

    unequal, dropped = fastest(left, kept), fastest(left)
    of_whole, of_hurt = (
        max(kind.num_microbatches for kind in unequal.plan.kinds if kind.stages[0].part == part) for part in (0, 1)
    )
    assert 0.8 * of_whole < of_hurt <= 28 / 32 * of_whole
    # All four groups would take three quarters of the time of three.
    all_s = dropped.step_s * 3 / 4
    assert all_s < unequal.step_s < all_s + (dropped.step_s - all_s) / 4
    with pytest.raises(InputError, match="its stages have the tensor-parallel degrees 28 and 32"):
        started_plan(problem, unequal.plan, unequal_batches=True, unequal_tp=True)


# Of 140 B parameters, for 128 accelerators of X beside 640 of Y, 0.7 times as fast (S49).
LLAMA_140B = ModelSpec(
    name="llama-140b",
    num_layers=96,
    hidden_size=10752,
    vocab_size=32000,
    num_heads=96,
    num_kv_heads=8,
    ffn_size=28672,
)


def hethub(between: BetweenSpec, seq_len: int, global_batch: int) -> tuple[float, float | None]:
    """Shares of the sum of both types alone: pipelines across types, and replicas apart; t = 8 inside a type."""
    x = scaled("a100-sxm:16x8", "x")
    y = replace(scaled("a100-sxm:80x8", "y", speed=0.7), name="y")
    y = replace(y, device=replace(y.device, vendor="amd"))
    problem = problem_of(x, y, model=LLAMA_140B, between=between, seq_len=seq_len)
    refiner = Refiner(problem, global_batch)

    def best(structures: list[tuple[Pipelines, ...]]) -> MixedCost | None:
        found = refiner.refine(
            Structure(kinds=kinds, micro_batches=(1,) * len(kinds), common=common_of()) for kinds in structures
        )
        return found[0].cost if found and found[0].cost.verdict == "fits" else None

    def alone(part: int, groups: int) -> list[Pipelines]:
        return [Pipelines(count=groups // pp, places=((part, 8),) * pp) for pp in (2, 4, 8)]

    of_x, of_y = alone(0, 16), alone(1, 80)
    rates = [best([(way,) for way in ways]) for ways in (of_x, of_y)]
    total = sum(cost.sequences_per_s for cost in rates if cost)
    across = best(
        [
            (Pipelines(count=16, places=((0, 8), *((1, 8),) * 5)),),
            (Pipelines(count=16, places=(*((1, 8),) * 5, (0, 8))),),
        ]
    )
    apart = best(list(itertools.product(of_x[1:], of_y[1:])))
    assert across is not None
    return across.sequences_per_s / total, apart.sequences_per_s / total if apart else None


def test_pipelines_across_types_reach_what_both_reach_alone() -> None:
    """S49, S59: 95 % of the sum; where no collective may mix vendors a pipeline's boundary is all that crosses."""
    across, apart = hethub(BetweenSpec(device_bytes_per_s=10e9, cross_vendor_collectives=False), 4096, 3072)
    assert across >= 0.95
    assert apart is None


def test_replicas_across_types_lose_more_over_a_slow_link() -> None:
    """S49: below 90 % of the sum, where pipelines across types stay above."""
    across, apart = hethub(BetweenSpec(device_bytes_per_s=1e9), 2048, 1536)
    assert apart is not None
    assert apart < 0.90 < across


def test_one_boundary_crosses_between_two_regions() -> None:
    """S56: 2 x 8 devices, 30 ms, 1 Gb/s, 7 B parameters that one region cannot hold."""
    region = scaled("a100-sxm:1x8", "east", speed=0.4, memory_gb=17)
    parts = (region, replace(region, name="west"))
    model = load_model("llama2-7b")
    plans = []
    for bandwidth in (1.25e8, 1.25e7):
        problem = problem_of(*parts, model=model, between=BetweenSpec(bandwidth_bytes_per_s=bandwidth, latency_s=0.03))
        best = check(problem, search_mixed(problem, 64, forbid=["offload"]), 64)
        (kind,) = best.plan.kinds  # no reduction crosses: all replicas are alike, with every stage on one part
        assert sum(stage.part != following.part for stage, following in itertools.pairwise(kind.stages)) == 1
        assert started_plan(problem, best.plan, unequal_tp=True).node_parts in ((0, 1), (1, 0))
        plans.append(best)
        if bandwidth == 1.25e8:
            blind = [(at % 2, 4, layers) for at, layers in enumerate(even_chunks(32, 4))]
            (turns,) = estimate_mixed(problem, [plan_of(kinds=(replicas(1, 64, *blind),))])
            assert turns.step_s / best.step_s >= 1.3
    assert plans[0].plan != plans[1].plan


def test_a_slow_part_or_a_far_one_is_left_idle() -> None:
    near, far = scaled("a100-sxm:1x4", "near"), scaled("a100-sxm:1x4", "far")
    problem = problem_of(near, far, between=BetweenSpec(bandwidth_bytes_per_s=1e6, latency_s=0.1))
    found = search_mixed(problem, 32)
    assert len(check(problem, found, 32).plan.parts) == 1
    assert found.certificate.gap == 0  # gradients alone take longer over the line


def test_bounds_know_what_a_line_between_sites_takes_and_what_vendors_cannot_reduce() -> None:
    sites = scaled("a100-sxm:1x4", "near"), scaled("a100-sxm:1x4", "far")
    line = BetweenSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-3)
    problem = problem_of(*sites, between=line)
    space = MixedSpace(
        problem=problem,
        spaces=tuple(make_space(problem.alone(part), 32) for part in (0, 1)),
        global_batch=32,
        equal=Equal(),
        most_z=RISKY_Z,
    )
    apart = candidates_of(space)[frozenset({0, 1}), True]
    # 16-bit gradients and weights of all parameters, half of each over the line.
    assert apart[0].least_s >= 2 * count_parameters(SMALL) / 1e9
    assert check_bounds(space, apart[:10], random.Random(1)) >= 8
    other = (sites[0], scaled("a100-sxm:1x4", "far", vendor="amd"))
    apart_vendors = problem_of(*other, between=replace(line, cross_vendor_collectives=False))
    assert (frozenset({0, 1}), True) not in candidates_of(replace(space, problem=apart_vendors))


@pytest.mark.parametrize("speed", [0.02, 1.0])
def test_one_more_part_never_makes_the_best_plan_slower(speed: float) -> None:
    few, more = scaled("a100-sxm:1x2", "one"), scaled("a100-sxm:1x2", "more", speed=speed)
    both = search_mixed(problem_of(few, more), 16)
    assert both.ranked[0].step_s <= search_mixed(problem_of(few), 16).ranked[0].step_s * (1 + 1e-9)
    assert 0 <= both.certificate.gap < 0.3


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.sampled_from(("torchtitan", "deepspeed", "fsdp2", "megatron-lm")),
    st.permutations(("h100-sxm", "a100-sxm", "rtx-4090")),
    st.integers(1, 4),
    st.sampled_from((12, 20, 36, 60)),
)
@example("deepspeed", ["a100-sxm", "rtx-4090", "h100-sxm"], 4, 36)  # three of five nodes have the best plan
@example("autoplan", ["h100-sxm", "a100-sxm", "rtx-4090"], 3, 12)  # two nodes divide the batch
def test_one_more_node_never_makes_the_best_plan_slower(to: str, devices: list[str], nodes: int, batch: int) -> None:
    words: dict[str, Any] = {"global_batch": batch, "seq_len": 4096, "to": to, "prefer": "fastest"}
    before, after = (
        autoplan.search_mixed("qwen2.5-1.5b", cluster=f"{devices[0]}:{number}x4+{devices[1]}:2x2", **words).best
        for number in (nodes, nodes + 1)
    )
    assert after.step_s <= before.step_s * (1 + 1e-9)


def test_a_node_that_does_not_divide_the_batch_is_left_idle() -> None:
    words = {"global_batch": 100, "seq_len": 2048, "to": "torchtitan"}
    three, four = (
        autoplan.search_mixed("qwen2.5-0.5b", cluster=f"a100-sxm:{nodes}x8+mi300x:2x8", **words).best
        for nodes in (3, 4)
    )
    assert four.plan == three.plan
    assert four.plan.num_devices_on(0) == 24
    assert four.step_s == three.step_s


def test_a_part_that_does_not_divide_the_batch_is_searched_with_fewer_nodes() -> None:
    """All of 48 devices have a plan that is half as fast as 24 of 32 of one kind, which share out 24 sequences."""
    words = {"global_batch": 24, "seq_len": 4096, "framework": "deepspeed-zero"}
    best = autoplan.search_mixed("qwen2.5-0.5b", cluster="a100-sxm:2x4+h200-sxm:1x8+mi300x:4x8", **words).best
    assert best.plan.num_devices_on(2) == best.plan.num_devices == 24


def test_a_node_more_is_left_idle_where_it_makes_plans_slower() -> None:
    """Bounds leave 19 % open on all nodes, where no plan is as fast as on one node less."""
    fixed = ["tp=1", "micro_batch=1", "recompute=none", "sharding=zero1"]
    words = {"global_batch": 32, "seq_len": 1024, "framework": "torch", "fix": fixed, "forbid": ["offload"]}
    on_one, on_two = (
        autoplan.search_mixed("llama2-7b", cluster=f"a100-sxm:{nodes}x4+h100-sxm:3x4", prefer="fastest", **words).best
        for nodes in (1, 2)
    )
    assert on_two.step_s <= on_one.step_s * (1 + 1e-9)
    assert on_two.plan.num_devices == on_one.plan.num_devices == 16


def test_a_node_of_each_part_is_left_idle_where_neither_alone_helps() -> None:
    """100 sequences are shared out by none of 36, 32 and 28 devices as well as by 20."""
    words = {"global_batch": 100, "seq_len": 1024, "to": "torchtitan", "prefer": "fastest"}
    on_two, on_three = (
        autoplan.search_mixed("qwen2.5-0.5b", cluster=f"mi300x:{nodes}x8+a100-sxm:3x4", **words).best
        for nodes in (2, 3)
    )
    assert on_three.step_s <= on_two.step_s * (1 + 1e-9)
    assert on_three.plan.num_devices == 20


def test_a_node_less_of_each_part_is_tried_where_no_part_alone_has_a_plan() -> None:
    """Stages of 4 x 4 devices fill neither 24 nor 40: 2 and 4 nodes have the best plan, not 3 and 4."""
    fixed = ["tp=4", "pp=4", "cp=1", "micro_batch=1", "schedule=1f1b", "recompute=none", "sharding=zero1"]
    words = {"global_batch": 64, "seq_len": 4096, "to": "megatron-lm", "fix": fixed}
    all_nodes, fewer = (
        autoplan.search_mixed("llama3-8b", cluster=f"h100-sxm:{first}x8+a100-sxm:{second}x8", **words).best
        for first, second in ((3, 5), (2, 4))
    )
    assert all_nodes.sequences_per_s >= fewer.sequences_per_s * (1 - 1e-9)


def test_joined_searches_are_led_by_plans_that_fit() -> None:
    problem = problem_of(scaled("a100-sxm:1x2", "one"), scaled("a100-sxm:1x2", "two"))
    plans = [plan_of(kinds=(replicas(count, 4, (0, 1, 12)),)) for count in (1, 2)]
    safe, faster = estimate_mixed(problem, plans)
    risky = replace(faster, oom_z=OOM_Z)

    def result(cost: MixedCost, gap: float) -> MixedResult:
        certificate = MixedCertificate(structures=2, plans=3, rates_alone=(1.0, 2.0), gap=gap, limits=())
        return MixedResult(ranked=(cost,), closest=None, certificate=certificate)

    assert best_of([result(risky, 0.0), result(safe, 0.1)]) == result(safe, 0.1)
    both = best_of([result(safe, 0.0), result(faster, 0.1)])
    assert both.ranked == (faster, safe)
    assert both.certificate.gap == pytest.approx(0.1)
    assert (both.certificate.structures, both.certificate.plans) == (4, 6)


def test_parts_in_another_order_have_the_same_best_plan() -> None:
    few, more = scaled("a100-sxm:1x2", "one"), scaled("a100-sxm:1x2", "more", speed=0.4)
    found = [search_mixed(problem_of(*parts), 16).ranked[0].step_s for parts in ((few, more), (more, few))]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_groupings_are_all_partitions_of_all_subsets() -> None:
    found = list(groupings((0, 1, 2)))
    assert len(found) == len(set(found)) == 15  # Bell(4), the empty one included
    assert ((0, 2), (1,)) in {tuple(sorted(finding)) for finding in found}


def test_pipelines_use_nearly_all_devices_and_legal_degrees() -> None:
    problem = problem_of(scaled("a100-sxm:1x8", "one"), scaled("a100-sxm:3x4", "two"))
    found = pipelines(problem, (0, 1), 64, {0: (1, 2, 4, 8), 1: (1, 2, 4)})
    for finding in found:
        assert finding.count * sum(tp for _, tp in finding.places) >= 0.9 * 20
        assert {part for part, _ in finding.places} == {0, 1}
    assert Pipelines(count=4, places=((0, 2), *((1, 1),) * 3)) in found


def test_a_batch_without_a_sequence_for_a_replica_is_refused() -> None:
    with pytest.raises(InputError, match="num_microbatches"):
        ReplicaKind(num_microbatches=0, stages=replicas(1, 1, (0, 1, 12)).stages)


def test_every_plan_is_one_of_the_framework() -> None:
    """The built-in trainer has no context parallelism, which Megatron-LM would take for such sequences."""
    parts = scaled("a100-sxm:1x4", "a100"), scaled("h100-sxm:1x4", "h100")
    problem = problem_of(*parts, seq_len=65536, framework=load_framework("torch"))
    result = search_mixed(problem, 16)
    for cost in result.ranked:
        assert cost.plan.common.cp == 1
        for kind in cost.plan.kinds:
            plan = as_parallel(problem, cost.plan, kind, kind.stages[0].tp)
            workload = replace(problem.as_if(0, problem.nodes_of(cost.plan)).workload, num_devices=plan.num_devices)
            assert broken(book_of(problem.framework).rules, workload, plan) == ()


BOUNDED = [
    ("llama2-7b", "h100-sxm:1x8+a100-sxm:2x8", 64, {}),
    ("llama2-7b", "h100-sxm:1x8+mi300x:1x8", 60, {"framework": "torchtitan"}),
    ("mixtral-8x7b", "h100-sxm:1x4+a100-sxm:1x4", 16, {}),
    ("llama3-8b", "h100-sxm:1x4+a100-sxm:1x8", 48, {"seq_len": 32768}),
]


def space_of_all(model: str, cluster: str, global_batch: int, options: dict[str, Any]) -> MixedSpace:
    problem = make_mixed_problem(model, cluster=load_any_cluster(cluster), **{"seq_len": 4096} | options)
    spaces = tuple(make_space(problem.alone(part), global_batch) for part in (0, 1))
    return MixedSpace(problem=problem, spaces=spaces, global_batch=global_batch, equal=Equal(), most_z=RISKY_Z)


@pytest.fixture(scope="module")
def of_torchtitan() -> tuple[MixedSpace, list[Candidate]]:
    """A space with the plans of all schedules, and its candidates."""
    space = space_of_all("llama2-7b", "h100-sxm:1x8+mi300x:1x8", 64, {"framework": "torchtitan", "seq_len": 1024})
    return space, list(itertools.chain(*candidates_of(space).values()))


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-v", "dualpipe-v"])
def test_every_schedule_is_searched_within_its_bounds(
    of_torchtitan: tuple[MixedSpace, list[Candidate]], schedule: str
) -> None:
    space, candidates = of_torchtitan
    candidates = [candidate for candidate in candidates if candidate.schedule == schedule]
    assert check_bounds(space, random.Random(1).sample(candidates, 8), random.Random(1)) >= 25


def test_a_schedule_that_splits_the_backward_pass_wins_over_unlike_nodes() -> None:
    cluster, words = "h200-sxm:1x8+h100-sxm:1x8", {"global_batch": 16, "seq_len": 4096, "prefer": "fastest"}
    found, usual = (
        autoplan.search_mixed(
            "llama2-7b",
            cluster=cluster,
            to="torchtitan",
            fix=["pp=4", "cp=1"],
            at_most=["vp=2"],
            forbid=forbid,
            **words,
        ).best
        for forbid in ([], ["schedule=zb-h1", "schedule=zb-v", "schedule=dualpipe-v"])
    )
    assert found.plan.schedule == "zb-v"
    assert found.plan.parts == {0, 1}
    assert found.step_s < usual.step_s


def test_degrees_of_samples_are_for_one_part_alone() -> None:
    options = {"seq_len": 32768, "lengths": "1k:56,32k:1", "batching": "unpadded"}
    space = space_of_all("llama3-8b", "h100-sxm:1x8+a100-sxm:1x8", 64, options)
    assert space.limits_of([0]).of("dynamic_cp") == (False, True)
    assert space.limits_of([0, 1]).of("dynamic_cp") == (False,)


def check_bounds(space: MixedSpace, candidates: Sequence[Candidate], choices: random.Random) -> int:
    """Compare the best and random plans of candidates with their bounds; return how many fit."""
    refiner, num_fitting = Refiner(space.problem, space.global_batch), 0
    for candidate in candidates:
        structure = space.structure(candidate)
        found = [refined.cost for refined in refiner.refine([structure])]
        plans = [plan for _ in range(20) if (plan := random_plan(refiner, structure, choices))]
        for cost in (*found, *(cost for cost in estimate_mixed(space.problem, plans) if space.admits([cost.plan])[0])):
            if cost.oom_z <= RISKY_Z and cost.plan.global_batch == space.global_batch:
                num_fitting += 1
                assert cost.step_s >= candidate.least_s * (1 - 1e-9)
                (again,) = sharper(space, [candidate], cost.step_s * 1.01)
                assert cost.step_s >= again.least_s * (1 - 1e-9)
    return num_fitting


@pytest.mark.parametrize(("model", "cluster", "global_batch", "options"), BOUNDED)
def test_no_plan_beats_the_bound_of_its_structure(
    model: str, cluster: str, global_batch: int, options: dict[str, Any]
) -> None:
    space = space_of_all(model, cluster, global_batch, options)
    candidates = list(itertools.chain(*candidates_of(space).values()))
    choices = random.Random(1)
    picked = choices.sample(candidates, 30 if space.problem.model.moe else 12)  # few plans with experts fit
    assert check_bounds(space, picked, choices) >= 8


@pytest.mark.parametrize("num_groups", [1, 2])
def test_no_faster_plan_has_other_layers_than_the_bounds_leave_open(num_groups: int) -> None:
    """Nor another split of the batch over groups beside each other."""
    space = replace(space_of_all("llama2-7b", "h100-sxm:1x4+a100-sxm:1x8", 48, {}), equal=Equal(replicas=True))
    refiner = Refiner(space.problem, 48, equal=space.equal)
    num_compared = num_left = num_all = 0
    deep = [
        candidate
        for candidate in itertools.chain(*candidates_of(space).values())
        if len(candidate.groups) == num_groups and len(candidate.form[0][0].places) in (2, 3)
    ]
    for layouts in open_layouts(space, random.Random(1).sample(deep, 6 if num_groups == 1 else 4)):
        structure, ((ways, _), *_) = space.structure(layouts.candidate), layouts.candidate.form
        sizes, kinds = structure.sizes, structure.kinds
        first = range(kinds[0].count, 48 // sizes[0] + 1) if num_groups > 1 else [48 // sizes[0]]
        splits = [(total, *[(48 - total * sizes[0]) // size for size in sizes[1:]]) for total in first]
        every = [
            Layout(replace(structure, kinds=tuple(replace(kind, vp=vp) for kind in kinds)), layers, rounds)
            for vp in space.chunks((0, 1), len(ways.places), ways.schedule)
            for layers in spread_layers(32, vp, [32] * len(ways.places))
            for rounds in splits
            if sum(map(operator.mul, rounds, sizes)) == 48
            and all(total >= kind.count for total, kind in zip(rounds, kinds, strict=True))
        ]
        costs = [cost for cost in refiner.priced(every) if cost.oom_z <= RISKY_Z]
        if not costs:
            continue
        num_compared += 1
        within_s = 1.02 * min(cost.step_s for cost in costs)
        left = list(layouts.within(within_s))
        best, every_best = (
            {plan: min(of_plan) for plan, of_plan in by_layers(priced).items() if min(of_plan) <= within_s}
            for priced in (refiner.priced(left), costs)
        )
        assert best == every_best
        num_left, num_all = num_left + len(left), num_all + len(every)
    assert num_compared >= 2
    assert num_left < num_all / 5  # a tenth of all that 115 other candidates have, more in some draws


def by_layers(costs: Sequence[MixedCost]) -> dict[object, list[float]]:
    """The steps of plans by the layers of their stages."""
    result: dict[object, list[float]] = {}
    for cost in costs:
        kind = cost.plan.kinds[0]
        if cost.oom_z <= RISKY_Z:
            result.setdefault((kind.vp, tuple(stage.layers for stage in kind.stages)), []).append(cost.step_s)
    return result


@pytest.mark.parametrize("target", ["torchtitan", "nanotron", "autoplan"])
def test_the_best_pipelines_over_unlike_nodes_are_proven(target: str) -> None:
    """Bounds alone left 2.7, 2.1 and 5.7 % open."""
    place = {"cluster": "h100-sxm:8x8+a100-sxm:16x8", "global_batch": 512, "seq_len": 8192}
    result = autoplan.search_mixed("llama3-8b", to=target, **place)
    assert len(result.best.plan.parts) == 2
    assert result.file.certificate is not None
    assert result.file.certificate.gap == 0


def test_bounds_hold_where_replicas_share_parameters_in_host_memory() -> None:
    """The more replicas share them, the less each reads: no step is bounded by those of one group alone."""
    space = space_of_all(*BOUNDED[1])
    offloaded = [
        candidate
        for candidate in itertools.chain(*candidates_of(space).values())
        if {pipelines.count for pipelines, _ in candidate.form} == {2}
        and all(
            ways.kinds.offload[row] == Offload.PARAMETERS.code and ways.kinds.pp[row] == 1
            for ways, row in zip(candidate.groups, candidate.rows, strict=True)
        )
    ]
    assert check_bounds(space, offloaded[:50], random.Random(1)) >= 10


def random_plan(refiner: Refiner, structure: Structure, choices: random.Random) -> MixedPlan | None:
    """A plan of the structure with the batch shared out at random, and layers moved from stage to stage."""
    kinds = [
        replace(kind, vp=choices.choice([2, 4])) if kind.schedule == Schedule.INTERLEAVED else kind
        for kind in structure.kinds
    ]
    layers = []
    for kind in kinds:
        cut = list(even_chunks(refiner.problem.model.num_layers, len(kind.places)))
        for _ in range(choices.randint(0, len(cut))):
            giver, taker = choices.randrange(len(cut)), choices.randrange(len(cut))
            by = choices.randint(0, max(cut[giver] - kind.vp, 0) // 2)
            cut[giver], cut[taker] = cut[giver] - by, cut[taker] + by
        layers.append(tuple(cut))
    sizes = [kind.round * size for kind, size in zip(kinds, structure.micro_batches, strict=True)]
    first = choices.randint(1, max(refiner.global_batch // sizes[0], 1)) if len(kinds) > 1 else 0
    rounds = [*([first] if len(kinds) > 1 else []), (refiner.global_batch - first * sizes[0]) // sizes[-1]]
    if any(total < kind.count for total, kind in zip(rounds, kinds, strict=True)):
        return None
    return refiner._plan(replace(structure, kinds=tuple(kinds)), layers, rounds, None)


@pytest.fixture(scope="module")
def experts() -> tuple[MixedProblem, MixedResult]:
    """A mixture of experts on two kinds of nodes, and the search of all its plans."""
    parts = load_any_cluster("h100-sxm:1x4+a100-sxm:1x8").parts
    problem = problem_of(*parts, model=replace(load_model("mixtral-8x7b"), num_layers=4), seq_len=4096)
    return problem, search_mixed(problem, 16)


def test_flags_narrow_the_plans_of_all_parts(experts: tuple[MixedProblem, MixedResult]) -> None:
    problem, free = experts
    assert free.ranked[0].plan.common.ep > 1
    narrowed = search_mixed(problem, 16, fix=["tp=2", "ep=2"], at_most=["pp=4"], forbid=["recompute=full", "offload"])
    assert narrowed.ranked[0].step_s >= free.ranked[0].step_s * (1 - free.certificate.gap)
    for cost in narrowed.ranked:
        assert cost.plan.common.ep == 2
        assert cost.plan.common.recompute != "full"
        assert {stage.tp for kind in cost.plan.kinds for stage in kind.stages} == {2}
        assert all(len(kind.stages) <= 4 for kind in cost.plan.kinds)


@pytest.mark.parametrize(
    ("model", "cluster", "framework"),
    [
        ("llama2-7b", "h100-sxm:2x8", "megatron-core"),
        ("llama3-8b", "a100-sxm:2x8", "torchtitan"),
        ("mixtral-8x7b", "h100-sxm:2x8", "nemo"),
        ("llama2-13b", "mi300x:1x8", "deepspeed-zero"),
    ],
)
def test_a_cluster_of_one_part_has_the_plan_of_the_plain_search(model: str, cluster: str, framework: str) -> None:
    problem = make_problem(model, cluster=cluster, framework=framework, seq_len=4096)
    plain = plain_search(problem, make_space(problem, 64))
    found = search_mixed(as_mixed(problem), 64)
    best = found.ranked[0]
    assert best.step_s == pytest.approx(plain.ranked[0].step_s, rel=1e-9)
    assert best.plan in {MixedPlan.of(plan.plan, 0, problem.model.num_layers) for plan in plain.ranked}
    assert found.certificate.gap == 0


def test_where_nothing_fits_plans_that_may_run_out_of_memory_are_ranked_as_on_equal_nodes() -> None:
    problem = make_problem("llama3-70b", cluster="h100-sxm:1x8", framework="deepspeed-zero", seq_len=1024)
    fix = ["offload=parameters", "recompute=full", "micro_batch=4"]
    (best, *_) = plain_search(problem, make_space(problem, 32, fix=fix)).ranked
    found = search_mixed(as_mixed(problem), 32, fix=fix)
    assert (best.verdict, found.ranked[0].verdict) == ("risky", "risky")
    assert found.ranked[0].step_s == best.step_s
    halves = [scaled("a100-sxm:1x4", name, memory_gb=5.2, speed=speed) for name, speed in (("one", 1), ("two", 0.5))]
    found = search_mixed(problem_of(*halves), 16, fix=["pp=4"])
    assert (found.ranked[0].verdict, len(found.ranked[0].plan.parts)) == ("risky", 2)
    assert 0 <= found.certificate.gap < 0.3


def test_no_degree_of_experts_beats_the_search_of_all(experts: tuple[MixedProblem, MixedResult]) -> None:
    """Structures whose pipelines have the same degrees were kept once, whatever their degree of experts."""
    problem, free = experts
    best_s = free.ranked[0].step_s
    for ep in (2, 4):
        fixed = search_mixed(problem, 16, fix=[f"ep={ep}"]).ranked
        assert all(cost.plan.common.ep == ep for cost in fixed)
        assert best_s <= fixed[0].step_s * (1 + 1e-9)
