"""Is a cluster of equal nodes, written as a mixed one, priced and searched as the plain one?"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autoplan.api.problem import make_problem, make_space
from autoplan.base.errors import UnpricedError
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.mixed.stages import mixed_stages, mixed_timeline
from autoplan.cost.timeline import timeline
from autoplan.frameworks.common.rules import legal
from autoplan.spec.enums import RankOrder
from autoplan.spec.mixed_problem import MixedPlan, as_parallel
from autoplan.spec.model import Encoder
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.topology.mixed_cluster import MixedCluster
from mixed_cases import SMALL, as_mixed
from test_measured_times import TABLE
from test_mixed_stages import same

CASES = [
    ("llama2-7b", "h100-sxm:4x8", "megatron-core", {}),
    ("llama3-70b", "a100-sxm:8x8", "nemo", {}),
    ("mixtral-8x7b", "h100-sxm:8x8", "megatron-core", {}),
    ("llama3-8b", "h100-sxm:2x8", "torchtitan", {"seq_len": 32768}),
    ("llama3-8b", "h100-sxm:4x8", "torchtitan", {"seq_len": 2048}),
    ("llama2-13b", "mi300x:2x8", "nanotron", {}),
    ("deepseek-v3", "h200-sxm:32x8", "megatron-core", {}),
    ("llama2-7b", "a100-sxm:2x8", "deepspeed-zero", {}),
    ("llama3-8b", "h100-sxm:1x8", "megatron-core", {"optimizer": "muon"}),
    ("llama3-8b", "a100-sxm:2x8", "transformers", {"lora_rank": 16}),
    ("llama3-8b", "a100-sxm:2x8", "deepspeed-hf", {"loss": "dpo"}),
    ("llama2-7b", "h100-sxm:2x8", "megatron-core", {"lengths": "500:3,4000:1", "batching": "padded"}),
]
NUM_PLANS = 24


def some_plans(problem: Problem) -> PlanBatch:
    """Lawful plans of many kinds."""
    space = make_space(problem, 256)
    cells = [random.Random(seed).choice(space.cells()) for seed in range(20)]
    kinds, _ = space.kinds(cells, *space.groups(cells))
    plans, _ = space.plans_in(kinds.take(np.array(random.Random(1).choices(range(len(kinds)), k=NUM_PLANS))))
    lawful = np.flatnonzero(legal(space.rules, space.workload, plans)).tolist()
    return plans.take(np.array(random.Random(2).choices(lawful, k=NUM_PLANS)))


@pytest.mark.parametrize(("model", "cluster", "framework", "options"), CASES)
def test_every_plan_of_one_part_costs_what_the_estimate_says(
    model: str, cluster: str, framework: str, options: dict[str, Any]
) -> None:
    check_plans_of_one_part(make_problem(model, cluster=cluster, framework=framework, **{"seq_len": 4096} | options))


def test_encoders_and_measured_times_are_priced_as_on_equal_nodes() -> None:
    problem = make_problem("llama3-8b", cluster="h100-sxm:2x8", seq_len=4096)
    images = replace(SMALL, name="images", bidirectional=True, vocab_size=588, tied_embeddings=True)
    encoder = Encoder(layers=images, patches=1024, image_tokens=256, projector=((2048, 4096),))
    for changes in ({"model": replace(problem.model, encoder=encoder)}, {"timings": TABLE}):
        changed = replace(problem, **changes)
        assert estimate(changed, some_plans(changed)).step_s[0] != estimate(problem, some_plans(problem)).step_s[0]
        check_plans_of_one_part(changed)
    halve(replace(problem, model=replace(problem.model, encoder=encoder)))  # messages between parts are not measured


def check_plans_of_one_part(problem: Problem) -> None:
    batch = some_plans(problem)
    num_layers, mixed = problem.model.num_layers, as_mixed(problem)
    written = [MixedPlan.of(batch.plan(at), 0, num_layers) for at in range(len(batch))]
    expected, costs = estimate(problem, batch), estimate_mixed(mixed, written)
    for at, cost in enumerate(costs):
        (kind,) = cost.plan.kinds
        again = as_parallel(mixed, cost.plan, kind, kind.stages[0].tp)
        assert PlanBatch.of([again], num_layers).plan(0) == batch.plan(at)
        terms = {name: seconds[at] for name, seconds in expected.terms_s.items()}
        assert cost.terms_s == terms
        assert (cost.step_s, cost.low_s, cost.high_s) == (expected.step_s[at], expected.low_s[at], expected.high_s[at])
        assert cost.oom_z == expected.oom_z[at]
    for at in range(0, len(batch), NUM_PLANS // 4):
        plan = batch.plan(at)
        assert [placed.cost for placed in mixed_stages(mixed, written[at])] == list(stage_costs(problem, plan))
        if plan.num_microbatches * plan.pp * plan.vp < 2000:
            same(timeline(problem, plan), mixed_timeline(mixed, written[at]))


@pytest.mark.parametrize(("model", "cluster", "framework", "options"), CASES[:5])
def test_two_halves_that_were_not_merged_cost_what_the_whole_does(
    model: str, cluster: str, framework: str, options: dict[str, Any]
) -> None:
    halve(make_problem(model, cluster=cluster, framework=framework, **{"seq_len": 4096} | options))


def halve(problem: Problem) -> None:
    """Price replicas apart and pipelines across, on one network."""
    batch, num_layers, plans = some_plans(problem), problem.model.num_layers, {}
    for at in range(len(batch)):
        whole = MixedPlan.of(batch.plan(at), 0, num_layers)
        (kind,) = whole.kinds
        half = len(kind.stages) // 2
        other = tuple(replace(stage, part=1) for stage in kind.stages)
        if kind.count % 2 == 0 and len(kind.stages) == 1:  # else pipelines that cross nodes may stay inside them
            apart = (replace(kind, count=kind.count // 2), replace(kind, count=kind.count // 2, stages=other))
            plans[replace(whole, kinds=apart)] = whole
        if 2 * half == len(kind.stages) and whole.common.rank_order == RankOrder.DP_BEFORE_PP:
            across = replace(kind, stages=kind.stages[:half] + other[half:])
            plans[replace(whole, kinds=(across,))] = whole
    part = replace(problem.cluster, num_nodes=problem.cluster.num_nodes // 2)
    cluster = MixedCluster(name="halves", parts=(part, part))
    halves = replace(
        as_mixed(problem), calibrations=(problem.calibration,) * 2, timings=(problem.timings,) * 2, cluster=cluster
    )
    priced = 0
    for plan, whole in plans.items():
        try:
            (cost,) = estimate_mixed(halves, [plan])
        except UnpricedError:  # sharded weights over a part of the halves
            continue
        priced += 1
        (expected,) = estimate_mixed(as_mixed(problem), [whole])
        # Of a pipeline inside nodes some hops are nearer than the farthest, which counts for all of them in the whole.
        assert cost.terms_s["pipeline_send"] <= expected.terms_s["pipeline_send"] * (1 + 1e-9)
        for terms in (cost.terms_s, expected.terms_s):
            del terms["pipeline_send"], terms["stragglers"]
        assert cost.terms_s == pytest.approx(expected.terms_s, rel=1e-9, abs=1e-12)
    assert priced >= len(plans) // 4
