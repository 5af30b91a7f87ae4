from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.api.problem import make_problem
from autoplan.base.arrays import Bools
from autoplan.base.errors import InputError
from autoplan.frameworks.common.rules import Rule, Rulebook, legal, legal_so_far
from autoplan.frameworks.megatron_lm import rules as megatron_lm
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.frameworks.nanotron import rules as nanotron
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import BOOKS
from autoplan.frameworks.torchtitan import rules as torchtitan
from autoplan.readers.cluster import load_cluster
from autoplan.search.cells import Cell
from autoplan.search.flags import CALLED_OTHERWISE, FORBIDDEN_COUNTS, with_flags
from autoplan.search.layouts import chunk_counts, layouts
from autoplan.search.limits import Limits, batch_grid, default_limits, divisors
from autoplan.search.space import Space
from autoplan.spec.blocks import Experts
from autoplan.spec.enums import RankOrder
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch, parse_recompute
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload
from problems import problem_for

DENSE = ModelSpec(
    name="dense", num_layers=6, hidden_size=768, vocab_size=1000, num_heads=12, num_kv_heads=6, ffn_size=1536
)
MOE = ModelSpec(
    name="moe",
    num_layers=4,
    hidden_size=512,
    vocab_size=1000,
    num_heads=8,
    ffn_size=1024,
    moe=Experts(num_experts=6, experts_per_token=2, expert_ffn_size=512, num_dense_layers=1),
)
TRAINING = TrainingSpec(seq_len=512)


def space_of(model: ModelSpec, num_devices: int, limits: Limits) -> Space:
    return Space(workload=Workload(model=model, training=TRAINING, num_devices=num_devices), limits=limits, rules=RULES)


def enumerated(space: Space) -> list[ParallelPlan]:
    cells = space.cells()
    batch, _ = space.plans(cells)
    return [batch.plan(at) for at in range(len(batch))]


def all_shapes(limits: Limits, model: ModelSpec, devices: int) -> Iterator[ParallelPlan]:
    """Combinations of axis values, with no regard to divisibility, in the canonical form of a plan."""
    numbers = range(1, devices + 1)
    experts = list(numbers) if model.moe else [1]
    for tp, cp, pp, replicate, shard in product(numbers, repeat=5):
        if tp * cp * pp * replicate * shard != devices or pp > model.num_layers:
            continue
        if tp > dict(limits.upper_bounds)["tp"] or cp > dict(limits.upper_bounds)["cp"]:
            continue
        if replicate > 1 and not (tp * cp * shard in limits.shard_domains and cp * shard > 1):
            continue
        shapes = [
            (vp, schedule, layout)
            for vp in ((1,) if limits.split else chunk_counts(model.num_layers, pp))
            for layout in ((limits.split(model, pp),) if limits.split else layouts(model.num_layers, pp, vp))
            for schedule in limits.of("schedule")
            if schedule != "gpipe" or vp == 1
        ]
        for ep, etp, micro, (vp, schedule, layout), sharding, recompute, kind, batch, sp in product(
            experts,
            sorted({1, tp}) if model.moe else [1],
            range(1, dict(limits.upper_bounds)["micro_batch"] + 1),
            shapes,
            limits.of("sharding"),
            limits.recomputes,
            limits.of("cp_kind")[: None if cp > 1 else 1],
            limits.global_batches,
            limits.of("sp") if tp > 1 and 512 // cp % tp == 0 else (False,),
        ):
            stage = tp * cp * replicate * shard
            if stage % (ep * etp * replicate):
                continue
            has_copies = cp * replicate * shard > 1 or (model.moe is not None and stage > ep * etp)
            if recompute.startswith("full:") and int(recompute[5:]) >= max(layout):
                continue
            if (sharding != "none" and not has_copies) or (sharding == "none" and replicate > 1):
                continue
            with suppress(InputError):  # a schedule that does not exist with such chunks
                yield ParallelPlan(
                    global_batch=batch,
                    micro_batch=micro,
                    tp=tp,
                    sp=bool(sp),
                    cp=cp,
                    cp_kind=kind,  # type: ignore[arg-type]
                    pp=pp,
                    vp=vp,
                    schedule=schedule,  # type: ignore[arg-type]
                    layers_per_chunk=layout if len(set(layout)) > 1 else None,
                    ep=ep,
                    etp=etp,
                    dp_replicate=replicate,
                    dp_shard=shard,
                    sharding=sharding,  # type: ignore[arg-type]
                    **parse_recompute(recompute),  # type: ignore[arg-type]
                    param_gather_overlap=sharding != "none",
                )


@pytest.mark.parametrize(
    ("book", "model", "devices", "batches", "recomputes"),
    [
        (megatron_lm.BOOK, DENSE, 12, (24,), ("none", "full")),
        (megatron_lm.BOOK, DENSE, 6, (6, 10), ("none", "full:1", "full:2", "full")),
        (megatron_lm.BOOK, MOE, 8, (16,), ("none", "moe_act", "mla_up_proj", "moe+layernorm")),
        (megatron_lm.BOOK, MOE, 12, (12,), ("none", "full")),
        (torchtitan.BOOK, DENSE, 6, (6, 12), ("none", "selective", "full")),
        (torchtitan.BOOK, MOE, 8, (16,), ("none", "full")),
        (nanotron.BOOK, DENSE, 12, (24,), ("none", "full")),
    ],
)
def test_enumeration_equals_brute_force(
    book: Rulebook, model: ModelSpec, devices: int, batches: tuple[int, ...], recomputes: tuple[str, ...]
) -> None:
    limits = Limits(
        global_batches=batches,
        upper_bounds=(("tp", 6), ("cp", 2), ("micro_batch", 4)),
        shard_domains=(2, 4) if book.shards_over_part else (),
        recomputes=recomputes,
        split=book.split,
    ).where(
        sharding=book.words("sharding"),
        schedule=book.words("schedule"),
        sp=(True, False),
        gradient_accumulation_fusion=(True,),
    )
    space = replace(space_of(model, devices, limits), rules=book.rules)
    found = enumerated(space)
    shapes = list(all_shapes(limits, model, devices))
    lawful = legal(book.rules, space.workload, PlanBatch.of(shapes, model.num_layers))
    expected = {plan for plan, good in zip(shapes, lawful, strict=True) if good}
    assert len(found) == len(set(found)), "a plan is enumerated twice"
    assert set(found) == expected
    assert len(expected) > 50


@pytest.mark.parametrize("book", [BOOKS[name] for name in BOOKS if name != "unknown"])
@pytest.mark.parametrize(("model", "devices"), [(DENSE, 12), (MOE, 8)])
def test_what_is_turned_down_early_holds_no_legal_plan(book: Rulebook, model: ModelSpec, devices: int) -> None:
    limits = Limits(
        global_batches=(12,),
        upper_bounds=(("tp", 8), ("cp", 2), ("micro_batch", 2)),
        shard_domains=(4,) if book.shards_over_part else (),
        recomputes=("none", "full", *(("full:1", "full:2") if book.repeats_some_layers else ())),
        split=book.split,
        offload_percents=(100, 25) if "offload_percent" in book.extras else (100,),
    ).where(
        sharding=book.words("sharding"),
        schedule=book.words("schedule"),
        offload=("none", "optimizer"),
        gradient_accumulation_fusion=(True,),
    )
    space = replace(space_of(model, devices, limits), rules=book.rules)
    cells = space.cells()
    groups, owner = space.groups(cells)
    kinds, _ = space.kinds(cells, groups, owner)
    plans, _ = space.plans_in(space.shared(kinds)[0])
    plans = plans.take(legal(book.rules, space.workload, plans))
    expected = enumerated(space)
    assert {plans.plan(at) for at in range(len(plans))} == set(expected)
    assert len(plans) == len(expected) > 5  # Accelerate admits few
    assert space.size(cells) == len(space.candidates(cells))
    unasked = replace(space, rules=())
    assert len(kinds) < len(unasked.kinds(cells, *unasked.groups(cells))[0])


def test_a_rule_is_asked_early_if_all_that_it_looks_at_is_known() -> None:
    plans = [ParallelPlan(global_batch=8, tp=tp, dp_shard=8 // tp) for tp in (1, 2, 4, 8)]
    batch = PlanBatch.of(plans, DENSE.num_layers)

    def rule(holds: Callable[[Workload, PlanBatch], Bools]) -> Rule:
        return Rule(source="", holds=holds, text=lambda s, p: "")

    few = rule(lambda s, b: b.num_microbatches <= 2)  # 1, 2, 4 and 8 of them
    rules = (few, rule(lambda s, b: b.vp > 1), rule(lambda s, b: (b.tp < 2) | ~b.repeats("mlp") & (b.schedule > 0)))
    workload = space_of(DENSE, 8, Limits(global_batches=(8,))).workload
    of_counts = frozenset(("tp", "dp_replicate", "dp_shard", "global_batch", "micro_batch"))
    assert legal_so_far(rules, workload, batch, of_counts).tolist() == [True, True, False, False]
    assert legal_so_far(rules, workload, batch, of_counts - {"tp", "dp_shard"}).all()
    of_all = of_counts | {"recompute_modules", "schedule"}
    assert legal_so_far(rules, workload, batch, of_all).tolist() == [True, False, False, False]
    assert not legal_so_far(rules, workload, batch, of_counts | {"vp"}).any()


def test_every_plan_uses_all_devices_and_belongs_to_its_cell() -> None:
    space = space_of(DENSE, 24, Limits(global_batches=(48,), shard_domains=(8,)))
    cells = space.cells()
    batch, owner = space.plans(cells)
    assert (batch.num_devices == 24).all()
    assert (np.diff(owner) >= 0).all()
    for axis in ("pp", "tp", "cp", "dp_replicate", "dp_shard"):
        assert (getattr(batch, axis) == np.array([getattr(cell, axis) for cell in cells])[owner]).all()


def test_degrees_need_not_be_powers_of_two() -> None:
    plans = enumerated(space_of(DENSE, 24, Limits(global_batches=(48,))))
    assert {3, 6, 12} <= {plan.tp for plan in plans}
    assert {3, 6} <= {plan.pp for plan in plans}
    assert {3, 24} <= {plan.dp for plan in plans}
    assert {3} <= {plan.micro_batch for plan in plans}


def test_blocks_hold_every_cell_once_in_order() -> None:
    space = space_of(MOE, 8, Limits(global_batches=(16,)))
    cells = space.cells()
    blocks = list(space.blocks(cells, 100))
    assert len(blocks) > 3
    assert [cell for block in blocks for cell in block] == list(cells)


def test_layers_of_llama_405b_on_sixteen_ranks_are_those_that_meta_used() -> None:
    """126 layers on 16 ranks x 8 chunks: the first and the last chunk have none (arXiv:2407.21783, section 3.3.2)."""
    assert 8 in chunk_counts(126, 16)
    assert (0, *[1] * 126, 0) in layouts(126, 16, 8)
    ranks = {tuple(sum(layout[rank::16]) for rank in range(16)) for layout in layouts(126, 16, 1)}
    assert (7, *[8] * 14, 7) in ranks


def test_uneven_stages_have_any_number_of_chunks() -> None:
    """61 layers are a prime number: on 4 ranks 15 chunks of one layer each are as even as it gets."""
    assert 15 not in chunk_counts(61, 4)
    assert chunk_counts(61, 4, is_uneven=True) == tuple(range(1, 16))
    assert chunk_counts(61, 1, is_uneven=True) == (1,)


@given(st.integers(1, 130), st.integers(1, 24), st.integers(0, 2))
def test_layouts_place_every_layer_and_leave_no_rank_empty(num_layers: int, pp: int, mtp: int) -> None:
    for vp in chunk_counts(num_layers, pp, is_uneven=bool(num_layers % 2)):
        for layout in layouts(num_layers, pp, vp, mtp):
            assert len(layout) == pp * vp
            assert sum(layout) == num_layers
            assert min(layout) >= 0
            assert all(layout[1:-1])
            assert all(sum(layout[rank::pp]) for rank in range(pp))
            assert max(layout) - min(layout) <= 3 + mtp


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them(number: int) -> None:
    assert list(divisors(number)) == [each for each in range(1, number + 1) if number % each == 0]


@given(st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 300))
def test_a_batch_grid_lies_in_its_range(low: int, width: int, devices: int) -> None:
    grid = batch_grid(low, low + width, devices)
    assert grid
    assert list(grid) == sorted(set(grid))
    assert low <= grid[0]
    assert grid[-1] <= low + width
    assert len(grid) < 60


def test_a_batch_grid_prefers_what_all_degrees_divide() -> None:
    assert all(batch % 48 == 0 for batch in batch_grid(512, 2048, 192))
    assert any(batch % 192 == 0 for batch in batch_grid(512, 2048, 192))
    assert batch_grid(100, 100, 64) == (100,)


def problem() -> Problem:
    return problem_for(DENSE, "h100-sxm:2x8", seq_len=8192)


SOME_LAYERS = tuple(f"full:{number}" for number in range(1, DENSE.num_layers))
PIPELINES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


def test_default_limits_follow_the_cluster_and_the_sequence() -> None:
    limits = default_limits(problem(), (16,))
    assert dict(limits.upper_bounds) == {"tp": 8, "cp": 2, "micro_batch": 16}
    assert limits.shard_domains == (8,)
    assert limits.recomputes == ("none", "full", "mlp", *SOME_LAYERS)
    assert (limits.fewer_at_ends, limits.shards_any_part) == (4, True)
    scores = replace(problem(), training=TrainingSpec(seq_len=1024))
    scores = replace(scores, framework=scores.framework.preferring("attention=unfused"))
    assert "selective" in default_limits(scores, (16,)).recomputes
    assert dict(default_limits(scores, (16,)).upper_bounds)["cp"] == 1


@pytest.mark.parametrize(
    ("framework", "shardings", "schedules", "recomputes"),
    [
        ("torchtitan", ("none", "zero2", "zero3"), PIPELINES, ("none", "selective", "full")),
        ("pytorch-fsdp", ("none", "zero2", "zero3"), PIPELINES, ("none", "full", *SOME_LAYERS)),
        ("nanotron", ("none", "zero1"), ("1f1b", "gpipe"), ("none", "full")),
        ("deepspeed-zero", ("none", "zero1", "zero2", "zero3"), ("1f1b",), ("none", "full")),
    ],
)
def test_default_limits_follow_the_framework(
    framework: str, shardings: tuple[str, ...], schedules: tuple[str, ...], recomputes: tuple[str, ...]
) -> None:
    limits = default_limits(replace(problem(), framework=load_framework(framework)), (16,))
    assert (limits.of("sharding"), limits.of("schedule"), limits.recomputes) == (shardings, schedules, recomputes)


def test_a_schedule_goes_with_the_chunks_that_it_needs() -> None:
    few = ["micro-batch=1", "recompute=none", "cp=1"]
    limits = with_flags(default_limits(problem(), (16,)), fix=["schedule=zb-v", *few], at_most=(), forbid=())
    assert {(plan.schedule, plan.vp) for plan in enumerated(replace(space_of(MOE, 8, limits), rules=()))} == {
        ("zb-v", 2)
    }
    wider = with_flags(default_limits(problem(), (16,)), fix=few, at_most=["pp=2"], forbid=[])
    wider = wider.where(schedule=("1f1b", "interleaved", "gpipe"))
    found = {(plan.schedule, plan.pp) for plan in enumerated(replace(space_of(MOE, 8, wider), rules=()))}
    assert found == {("1f1b", 1), ("1f1b", 2), ("gpipe", 2), ("interleaved", 2)}


def test_flags_fix_bound_and_forbid() -> None:
    limits = default_limits(problem(), (16,))
    asked = with_flags(
        limits, fix=["tp=16", "sharding=zero1", "micro-batch=2"], at_most=["PP=4", "cp=1"], forbid=["ep-overlap"]
    )
    plans = enumerated(replace(space_of(DENSE, 16, asked), rules=()))
    assert {plan.tp for plan in plans} == {16}
    assert {plan.sharding for plan in plans} == {"zero1"}
    assert {plan.micro_batch for plan in plans} == {2}
    assert {plan.cp for plan in plans} == {1}
    assert {plan.ep_overlap for plan in plans} == {False}
    assert "tp = 16" in asked.describe(problem().model)


@pytest.mark.parametrize(
    "flags",
    [
        {"fix": ["tp"]},
        {"fix": ["tp=x"]},
        {"fix": ["tp=2", "tp=4"]},
        {"fix": ["sharding=zero1", "Sharding=none"]},
        {"at_most": ["micro-batch=2", "micro_batch=4"]},
        {"fix": ["sharding=zero9"]},
        {"fix": ["sp=maybe"]},
        {"at_most": ["sharding=zero1"]},
        {"fix": ["tp=8"], "at_most": ["tp=4"]},
        {"at_most": ["pp=-1"]},
        {"forbid": ["luck"]},
    ],
)
def test_senseless_flags_are_refused(flags: dict[str, list[str]]) -> None:
    asked = {"fix": [], "at_most": [], "forbid": [], **flags}
    with pytest.raises(InputError):
        with_flags(default_limits(problem(), (16,)), **asked)


@pytest.mark.parametrize(
    ("fix", "says"),
    [
        ("precision=fp8", "use --precision"),
        ("schedule=zb-x", "must be one of 1f1b"),
        ("micro_batches=1", "did you mean micro_batch"),
        ("luck=3", "known: tp"),
    ],
)
def test_what_is_no_axis_points_to_the_right_flag(fix: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        with_flags(default_limits(problem(), (16,)), fix=[fix], at_most=(), forbid=())


def test_a_fixed_value_replaces_a_default_bound_but_not_that_of_the_user() -> None:
    assert with_flags(default_limits(problem(), (16,)), fix=["tp=16"], at_most=(), forbid=()).fixes("tp")
    with pytest.raises(InputError, match="--fix tp=8 is above --max tp=4"):
        with_flags(default_limits(problem(), (16,)), fix=["tp=8"], at_most=["tp=4"], forbid=())


@pytest.mark.parametrize("name", FORBIDDEN_COUNTS)
def test_no_plan_has_a_forbidden_value_of_a_count(name: str) -> None:
    whole = Limits(global_batches=(16,)).where(schedule=("1f1b", "interleaved"))
    found = {getattr(plan, name) for plan in enumerated(space_of(MOE, 8, whole))}
    assert len(found) > 1
    least = with_flags(whole, fix=(), at_most=(), forbid=[f"{name}={max(found)}"])
    assert {getattr(plan, name) for plan in enumerated(space_of(MOE, 8, least))} == found - {max(found)}
    alone = with_flags(whole, fix=(), at_most=(), forbid=[name])
    assert {getattr(plan, name) for plan in enumerated(space_of(MOE, 8, alone))} == {1}


def test_cells_are_ordered_by_stages() -> None:
    cells = space_of(DENSE, 24, Limits(global_batches=(48,))).cells()
    assert [cell.pp for cell in cells] == sorted(cell.pp for cell in cells)
    assert len(set(cells)) == len(cells)
    assert all(isinstance(cell, Cell) for cell in cells)


# -- rank orders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "framework", "orders"), [("1x8", "nemo", 1), ("4x8", "nemo", 2), ("4x8", "nanotron", 1)]
)
def test_both_rank_orders_are_looked_at_where_links_differ(size: str, framework: str, orders: int) -> None:
    cluster = load_cluster(f"h100-sxm:{size}")
    problem = problem_for(MOE, cluster, framework, training=TRAINING)
    limits = default_limits(problem, (8,))
    assert limits.of("rank_order") == tuple(RankOrder)[:orders]
    few = with_flags(limits, fix=["micro-batch=1", "recompute=none"], at_most=[], forbid=[])
    found = {plan.rank_order for plan in enumerated(space_of(MOE, 8, few))}
    assert found == set(tuple(RankOrder)[:orders])
    fixed = with_flags(few, fix=["rank_order=tp-cp-ep-pp-dp"], at_most=[], forbid=[])
    assert fixed.of("rank_order") == tuple(RankOrder)[1:]
    assert all(plan.pp == 1 or plan.ep * plan.etp == plan.tp * plan.cp for plan in enumerated(space_of(MOE, 8, fixed)))


def test_what_people_call_an_axis_says_what_to_write() -> None:
    for words, says in CALLED_OTHERWISE.items():
        with pytest.raises(InputError, match=re.escape(says)):
            with_flags(default_limits(problem(), (16,)), fix=[f"{words}=2"], at_most=(), forbid=())


@pytest.mark.parametrize(
    ("cluster", "dispatchers"),
    [
        ("h100-sxm:1x8", {"alltoall", "allgather", "deepep", "hybridep"}),
        ("gb200-nvl72:2x4", {"alltoall", "allgather", "hybridep"}),
        ("rtx-pro-6000:1x8", {"alltoall", "allgather"}),  # Blackwell, and over PCIe
        ("h100-pcie:1x8", {"alltoall", "allgather"}),
        ("a100-sxm:1x8", {"alltoall", "allgather"}),
    ],
)
def test_dispatchers_over_nvlink_are_searched_where_there_is_nvlink(cluster: str, dispatchers: set[str]) -> None:
    asked = make_problem("qwen3-30b-a3b", cluster=load_cluster(cluster), seq_len=4096)
    assert set(map(str, default_limits(asked, (64,)).of("dispatcher"))) == dispatchers
