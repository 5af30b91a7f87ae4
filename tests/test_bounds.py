from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import legal
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.frameworks.registry import book_of
from autoplan.readers.cluster import load_cluster
from autoplan.search.bounds import (
    first_layers,
    group_bounds,
    group_bytes,
    kind_bounds,
    kind_costs,
    plain_bounds,
    plan_bounds,
)
from autoplan.search.flags import with_flags
from autoplan.search.kind_memory import kind_memory
from autoplan.search.layer_spread import spread_of
from autoplan.search.limits import default_limits
from autoplan.search.space import Inside, Space
from autoplan.search.study import search
from autoplan.spec.axes import USUAL_SCHEDULES
from autoplan.spec.blocks import Experts, LatentAttention
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.lengths import BATCHINGS, Lengths
from autoplan.spec.measurement import Measurement
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import Operation
from autoplan.spec.optimizers import OptimizerName
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.preference import Preference
from autoplan.spec.problem import PREFERENCE_RULES, Problem
from autoplan.spec.timing import TimingTable
from autoplan.spec.training import TrainingSpec
from problems import problem_for

DENSE = ModelSpec(
    name="dense", num_layers=10, hidden_size=2048, vocab_size=32000, num_heads=16, num_kv_heads=8, ffn_size=5504
)
MODELS = (
    DENSE,
    replace(DENSE, name="tied", num_layers=7, tied_embeddings=True, vocab_size=250_000),
    replace(
        DENSE,
        name="experts",
        num_layers=9,
        moe=Experts(num_experts=16, experts_per_token=4, expert_ffn_size=1408, num_dense_layers=2),
    ),
    replace(
        DENSE,
        name="latent",
        num_layers=6,
        num_mtp_layers=1,
        mla=LatentAttention(q_lora_rank=512, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
        moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=1024, shared_expert_ffn_size=1024),
    ),
    ModelSpec(
        name="window",
        num_layers=12,
        hidden_size=1024,
        vocab_size=50000,
        num_heads=8,
        ffn_size=4096,
        window=1024,
        full_attention_interval=3,
    ),
    replace(DENSE, name="encoder", num_layers=8, bidirectional=True, head_transform=True, head_bias=True),
)
CLUSTERS = ("h100-sxm:2x8", "a100-sxm-40:3x8", "gb200-nvl72:4x4", "mi300x:1x8", "v100:4x4", "cpu:2x1")


# What is trained, and by which optimizer.
LORA = FineTuning(rank=16, targets=("all-linear",), saved_modules=("embed_tokens",))
TRAINED: tuple[tuple[FineTuning | None, OptimizerName], ...] = (
    *((None, "adam"),) * 3,
    (None, "muon"),
    (replace(LORA, dropout=0.1), "lion"),
    (replace(LORA, quantization="nf4", saved_modules=(), dora=True), "adam"),
    (FineTuning(frozen=("embed_tokens", "lm_head")), "adafactor"),
)
# What a batch is of.
UNEVEN = Lengths(histogram=((100, 30), (700, 9), (1900, 1)))
SAMPLES: tuple[dict[str, Any], ...] = (
    *({},) * 3,
    *({"lengths": UNEVEN, "batching": batching} for batching in BATCHINGS),
    {"preference": Preference()},
    {"preference": Preference(loss="reward"), "lengths": UNEVEN, "batching": "padded"},
)


def make(
    model: ModelSpec,
    cluster: str,
    framework: str,
    batches: tuple[int, ...],
    seq_len: int,
    all_schedules: bool,
    trained: tuple[FineTuning | None, OptimizerName] = (None, "adam"),
    samples: dict[str, Any] | None = None,
) -> tuple[Problem, Space]:
    spec, known = load_cluster(cluster), load_framework(framework)
    if samples and "preference" in samples and known.rules not in PREFERENCE_RULES:
        samples = None
    precision = "bf16" if "bf16" in spec.device.peak_flops_per_s else "fp16"
    problem = problem_for(
        model,
        spec,
        known,
        training=TrainingSpec(
            seq_len=seq_len, precision=precision, finetuning=trained[0], optimizer=trained[1], **samples or {}
        ),
    )
    book, limits = book_of(problem.framework), default_limits(problem, batches)
    if not all_schedules:
        others = [f"schedule={name}" for name in limits.of("schedule") if name not in USUAL_SCHEDULES]
        limits = with_flags(limits, fix=(), at_most=(), forbid=("uneven_stages", *others))
    return problem, Space(workload=problem.workload, limits=limits, rules=book.rules)


problems = st.builds(
    make,
    st.sampled_from(MODELS),
    st.sampled_from(CLUSTERS),
    st.sampled_from(preset_frameworks()),
    st.sampled_from(((48,), (24, 96), (7, 480))),
    st.sampled_from((2048, 8192)),
    st.booleans(),
    st.sampled_from(TRAINED),
    st.sampled_from(SAMPLES),
)


def some_kinds(space: Space, count: int, seed: int) -> tuple[PlanBatch, PlanBatch, Ints]:
    """(groups, some of their kinds, the group of each)."""
    cells = space.cells()
    groups, owner = space.groups(cells)
    kinds, of_group = space.kinds(cells, groups, owner)
    chosen = np.random.default_rng(seed).permutation(len(kinds))[:count]
    return groups, kinds.take(chosen), of_group[chosen]


def some_plans(problem: Problem, space: Space, count: int, seed: int) -> tuple[PlanBatch, Floats, Floats]:
    """(legal plans, the bounds of their step times, those of their memory)."""
    _, kinds, _ = some_kinds(space, count, seed)
    kinds, _ = space.shared(kinds)
    costs = kind_costs(problem, kinds, first_layers(problem, space, kinds))
    parts, bounds, bytes_ = [kinds.take(np.empty(0, dtype=np.int64))], [np.empty(0)], [np.empty(0)]
    rng = np.random.default_rng(seed + 1)
    for found in plan_bounds(problem, space, costs):
        kind, plan = np.divmod(rng.permutation(found.step_s.size)[: 4 * len(found.kinds)], len(found.inside))
        plans = space.plans_of(kinds, found.inside, found.kinds[kind], plan)
        lawful = legal(space.rules, space.workload, plans)
        parts.append(plans.take(lawful))
        bounds.append(found.step_s[kind, plan][lawful])
        bytes_.append(found.memory_bytes[kind, plan][lawful])
    return PlanBatch.concatenate(parts), np.concatenate(bounds), np.concatenate(bytes_)


LIMITS = replace(MODELS[2], name="limits", clamped_activation=True, mlp_bias=True)


@settings(max_examples=8, deadline=None)
@given(problems, st.integers(0, 2**16))
def test_a_price_does_not_depend_on_the_plans_beside(made: tuple[Problem, Space], seed: int) -> None:
    """What decides the kernels of a plan is worked out once for all plans that share it."""
    problem, space = made
    plans, _, _ = some_plans(problem, space, 60, seed)
    together = estimate(problem, plans)
    for at in range(0, len(plans), max(len(plans) // 12, 1)):
        alone = estimate(problem, plans.take(np.array([at])))
        assert alone.step_s[0] == pytest.approx(together.step_s[at], rel=1e-12), plans.plan(at)
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[at], rel=1e-12), plans.plan(at)


def test_fused_experts_beside_others_keep_their_price() -> None:
    problem, _ = make(LIMITS, "gb200-nvl72:4x4", "nemo-26.06", (48,), 2048, False)
    problem = replace(problem, training=replace(problem.training, precision="mxfp8"))
    plain = ParallelPlan(global_batch=48, ep=8, dp_shard=16, precision="mxfp8")
    plans = [plain, replace(plain, ep_overlap=True), replace(plain, cuda_graphs="full_iteration")]
    together = estimate(problem, PlanBatch.of(plans, LIMITS.num_layers)).step_s
    alone = [estimate(problem, PlanBatch.of([plan], LIMITS.num_layers)).step_s[0] for plan in plans]
    assert together == pytest.approx(alone, rel=1e-12)


# Steps of one micro-batch, in which no gradients are alive beside all activations.
DROPPED_GRADIENTS = make(DENSE, "mi300x:1x8", "transformers", (8,), 2048, False)


@settings(max_examples=8, deadline=None)
@given(problems, st.integers(0, 2**16))
@example(DROPPED_GRADIENTS, 0)
def test_no_plan_beats_its_bounds(made: tuple[Problem, Space], seed: int) -> None:
    problem, space = made
    plans, bound, least = some_plans(problem, space, 150, seed)
    if not len(plans):
        return
    found = estimate(problem, plans)
    assert (bound <= found.step_s * (1 + 1e-9)).all(), plans.plan(int(np.argmax(bound / found.step_s)))
    assert (least <= found.memory_bytes * (1 + 1e-9)).all(), plans.plan(int(np.argmax(least / found.memory_bytes)))
    assert (bound > 0.3 * found.step_s).mean() > 0.3


@settings(max_examples=8, deadline=None)
@given(problems, st.integers(0, 2**16))
def test_kinds_that_differ_in_times_alone_share_their_memory(made: tuple[Problem, Space], seed: int) -> None:
    problem, space = made
    _, kinds, _ = some_kinds(space, 30, seed)
    together = kind_memory(problem, kinds)
    for at in range(len(kinds)):
        alone = kind_memory(problem, kinds.take(np.array([at])))
        for name in type(alone).__slots__:
            assert getattr(alone, name)[0] == pytest.approx(getattr(together, name)[at], rel=1e-12), name


# A small optimizer, of which no part is worth keeping on the host; a rank with unlike layers that waits for its host.
SMALL_STATES = (make(DENSE, "h100-sxm:2x8", "nemo-23.06", (48,), 2048, False, TRAINED[-1]), 1.0)
UNLIKE_LAYERS = (make(MODELS[2], "gb200-nvl72:4x4", "torch", (7, 480), 2048, False, TRAINED[4]), 0.5)


@settings(max_examples=8, deadline=None)
@given(problems, st.sampled_from((0.2, 0.5, 0.8, 1.0)))
@example(*SMALL_STATES)
@example(*UNLIKE_LAYERS)
def test_bounds_of_kinds_and_groups_lie_below_those_of_their_plans(made: tuple[Problem, Space], share: float) -> None:
    """`share`: of the plans, those with the least memory that count."""
    problem, space = made
    groups, kinds, of_group = some_kinds(space, 200, 3)
    if not len(kinds):
        return
    least_percent = min(space.limits.offload_percents)
    first = first_layers(problem, space, kinds)
    of_any_share = kind_costs(problem, kinds, first, least_percent=least_percent)
    kinds, of_kind = space.shared(kinds)
    costs = kind_costs(problem, kinds, first_layers(problem, space, kinds))
    found = list(plan_bounds(problem, space, costs))
    most_bytes = float(np.quantile(np.concatenate([finding.memory_bytes.ravel() for finding in found]), share))
    kind_s, kind_bytes = (found[of_kind] for found in kind_bounds(problem, space, of_any_share, most_bytes))
    group_s, least_bytes = group_bounds(problem, space, groups, most_bytes)
    assert group_bytes(problem, space, groups) == pytest.approx(least_bytes, rel=1e-12)
    plain_s = plain_bounds(problem, space, groups)
    assert (plain_s <= group_s * (1 + 1e-9)).all()
    of_group = of_group[of_kind]
    for bounds in found:
        members = bounds.kinds
        assert (plain_s[of_group[members]] <= bounds.step_s.min(axis=1) * (1 + 1e-9)).all()
        least = bounds.memory_bytes.min(axis=1) * (1 + 1e-9)
        first = np.where(bounds.memory_bytes <= most_bytes, bounds.step_s, np.inf).min(axis=1) * (1 + 1e-9)
        assert (kind_s[members] <= first).all()
        assert (group_s[of_group[members]] <= first).all()
        assert (kind_bytes[members] <= least).all()
        assert (least_bytes[of_group[members]] <= least).all()


def test_a_group_with_fixed_replicas_may_hold_whole_states_with_fewer_communicators() -> None:
    tiny = replace(DENSE, name="tiny", num_layers=2, hidden_size=256, vocab_size=1000, ffn_size=512)
    problem, space = make(tiny, "h100-sxm:2x8", "megatron-core", (16,), 2048, False)
    space = replace(space, limits=with_flags(space.limits, fix=("dp_replicate=2",), at_most=(), forbid=()))
    groups, kinds, of_group = some_kinds(space, 10_000, 0)
    _, least_bytes = group_bounds(problem, space, groups)
    plans, kind = space.plans_in(kinds)
    assert {"none", "zero1"} <= {tuple(Sharding)[at] for at in plans.sharding}
    assert (least_bytes[of_group[kind]] <= estimate(problem, plans).memory_bytes * (1 + 1e-9)).all()


@settings(max_examples=6, deadline=None)
@given(problems, st.sampled_from((0.0, 0.5, 0.9)))
def test_the_certified_plan_is_that_of_full_enumeration(made: tuple[Problem, Space], reserved: float) -> None:
    problem, space = made
    problem = replace(problem, reserve_bytes=reserved * problem.capacity_bytes)
    if space.size(space.cells()) > 40_000:
        return
    batch, _ = space.plans(space.cells())
    if not 0 < len(batch) < 8_000:
        return
    found = search(problem, space)
    assert found.certificate.plans == len(space.candidates(space.cells()))
    costs = estimate(problem, batch)
    verdict = costs.verdict.min()
    if verdict == 2:
        assert not found.ranked
        assert found.closest is not None
        assert found.closest.memory_bytes == pytest.approx(costs.memory_bytes.min())
        return
    best = (costs.step_s / batch.global_batch)[costs.verdict == verdict].min()
    first = found.ranked[0]
    assert first.step_s / first.plan.global_batch == pytest.approx(best, rel=1e-12)


def one_plan(pp: int, layout: tuple[int, ...], schedule: str, number: int) -> Inside:
    columns = (len(layout) // pp, Schedule(schedule).code, 0, number)
    vp, word, index, numbers = (np.array([value]) for value in columns)
    return Inside(layouts=(layout,), pp=pp, vp=vp, schedule=word, layout=index, recompute_num_layers=numbers)


def test_the_first_rank_of_llama_405b_by_hand() -> None:
    """126 layers on 16 ranks, embedding and head counted as layers: 7 on the ends, 8 between, 3 of each recomputed."""
    spread = spread_of(replace(DENSE, num_layers=126), one_plan(16, (7, *[8] * 14, 7), "1f1b", 3))
    figures = {name: int(getattr(spread, name).sum()) for name in ("first", "kept_first", "last", "heaviest", "before")}
    assert figures == {"first": 7, "kept_first": 4, "last": 7, "heaviest": 8, "before": 7 + 13 * 8}
    assert (int(spread.repeated.sum()), int(spread.rank[0])) == (48, 14)


def test_the_first_rank_of_a_v_has_the_ends_of_the_model() -> None:
    """Chunks 0 and 5 of six on three ranks, 1 and 4, 2 and 3; the head is on the first rank."""
    spread = spread_of(replace(DENSE, num_layers=21), one_plan(3, (1, 2, 3, 4, 5, 6), "zb-v", 2))
    figures = {name: int(getattr(spread, name).sum()) for name in ("first", "kept_first", "last", "heaviest")}
    assert figures == {"first": 7, "kept_first": 7 - 1 - 2, "last": 7, "heaviest": 7}
    assert spread.is_folded.all()
    assert not spread.has_path.any()


def test_no_plan_beats_its_bounds_where_measured_times_fall_as_buffers_grow() -> None:
    """Collectives over both nodes whose times go up and down from size to size, as no curve does."""
    problem, space = make(DENSE, "h100-sxm:2x8", "megatron-core", (480,), 8192, False)
    operations: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    timings = TimingTable.of(
        Measurement(
            operation=operation,
            shape=(members, members // 2, 8 // (members // 2), 2**power),
            dtype="bf16",
            device="h100-sxm",
            seconds=1e-5 + 2**power / 2e9 * (20.0 if power % 2 else 1.0),
        )
        for operation in operations
        for members in (2, 4, 8, 16)
        for power in range(14, 34)
    )
    problem = replace(problem, timings=timings)
    plans, bound, _ = some_plans(problem, space, 1500, 5)
    found = estimate(problem, plans)
    assert (found.terms_s["data_parallel_reduce"] > 0.2 * found.step_s).any(), "the measured times count"
    assert (bound <= found.step_s * (1 + 1e-9)).all()
