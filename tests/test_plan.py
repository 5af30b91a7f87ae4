"""Do plans survive the way into a batch and back, and are layers spread as the plan says?"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError, UnpricedError
from autoplan.spec.axes import AXES
from autoplan.spec.chunk_order import chunks_of_stages
from autoplan.spec.enums import ContextParallelKind, Offload, Precision, RankOrder, Recompute, Schedule, Sharding
from autoplan.spec.plan import (
    ParallelPlan,
    PlanBatch,
    check_priced,
    chunk_layers,
    distinct_rows,
    even_chunks,
    parse_recompute,
)

LAYERS = 24
degree = st.sampled_from([1, 2, 3, 4, 6, 8, 35])


@st.composite
def layouts(draw: st.DrawFn, chunks: int) -> tuple[int, ...] | None:
    """Layers of every chunk that add up to LAYERS, or none."""
    if draw(st.booleans()):
        return None
    cuts = sorted(draw(st.lists(st.integers(0, LAYERS), min_size=chunks - 1, max_size=chunks - 1)))
    return tuple(np.diff([0, *cuts, LAYERS]).tolist())


recomputations = st.sampled_from(Recompute) | st.sampled_from(["full:1", "full:5", "moe_act", "core_attn+layernorm"])


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    """Any plan that is priced, its degrees not tied to a cluster."""
    pp, vp = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from([1, 1, 2, 3]))
    schedule = "interleaved" if vp > 1 else draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    dp_replicate, dp_shard, micro_batch = draw(degree), draw(degree), draw(st.integers(1, 4))
    return ParallelPlan(
        global_batch=micro_batch * dp_replicate * dp_shard * draw(st.integers(1, 9)),
        micro_batch=micro_batch,
        tp=draw(degree),
        sp=draw(st.booleans()),
        cp=draw(degree),
        cp_kind=draw(st.sampled_from(ContextParallelKind)),  # type: ignore[arg-type]
        pp=pp,
        vp=vp,
        schedule=schedule,  # type: ignore[arg-type]
        layers_per_chunk=draw(layouts(pp * vp)),
        ep=draw(degree),
        etp=draw(degree),
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        sharding=draw(st.sampled_from(Sharding)),  # type: ignore[arg-type]
        **parse_recompute(draw(recomputations)),  # type: ignore[arg-type]
        precision=draw(st.sampled_from(Precision)),  # type: ignore[arg-type]
        offload=draw(st.sampled_from(["none", "optimizer"])),  # type: ignore[arg-type]
        tp_overlap=draw(st.booleans()),
        grad_reduce_overlap=draw(st.booleans()),
        param_gather_overlap=draw(st.booleans()),
        rank_order=draw(st.sampled_from(RankOrder)),
    )


def spelled_out(plan: ParallelPlan) -> ParallelPlan:
    """`plan` as a batch gives it back: even layers are left to the default, all others are named."""
    layers = chunk_layers(plan, LAYERS)
    return dataclasses.replace(plan, layers_per_chunk=layers if len(set(layers)) > 1 else None)


def assert_same(batch: PlanBatch, other: PlanBatch) -> None:
    for field in dataclasses.fields(PlanBatch):
        if field.name not in ("layout", "layouts"):
            np.testing.assert_array_equal(getattr(batch, field.name), getattr(other, field.name), err_msg=field.name)
    assert [batch.layouts[at] for at in batch.layout] == [other.layouts[at] for at in other.layout]


# -- batches ----------------------------------------------------------------------------------------------------------


@given(st.lists(plans(), min_size=1, max_size=5))
def test_plans_come_back_from_a_batch(several: list[ParallelPlan]) -> None:
    batch = PlanBatch.of(several, LAYERS)
    assert len(batch) == len(several)
    assert [batch.plan(at) for at in range(len(batch))] == [spelled_out(plan) for plan in several]


@given(st.lists(plans(), min_size=1, max_size=5))
def test_a_batch_of_plans_taken_from_a_batch_is_the_same_batch(several: list[ParallelPlan]) -> None:
    batch = PlanBatch.of(several, LAYERS)
    assert_same(PlanBatch.of([batch.plan(at) for at in range(len(batch))], LAYERS), batch)


@given(st.lists(plans(), min_size=1, max_size=5))
def test_derived_sizes_of_a_batch_equal_those_of_its_plans(several: list[ParallelPlan]) -> None:
    batch = PlanBatch.of(several, LAYERS)
    for name in ("dp", "num_devices", "num_microbatches"):
        assert getattr(batch, name).tolist() == [getattr(plan, name) for plan in several]


@given(st.lists(plans(), min_size=1, max_size=6), st.data())
def test_taking_by_index_or_by_mask_gives_those_plans(several: list[ParallelPlan], data: st.DataObject) -> None:
    batch = PlanBatch.of(several, LAYERS)
    which = data.draw(st.lists(st.integers(0, len(several) - 1), max_size=6))
    taken = batch.take(np.array(which, dtype=np.int64))
    assert [taken.plan(at) for at in range(len(taken))] == [batch.plan(at) for at in which]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(several), max_size=len(several))))
    kept = batch.take(mask)
    assert [kept.plan(at) for at in range(len(kept))] == [batch.plan(int(at)) for at in np.flatnonzero(mask)]


@given(st.lists(st.lists(plans(), max_size=4), min_size=1, max_size=4))
def test_concatenated_batches_hold_all_plans_in_order(parts: list[list[ParallelPlan]]) -> None:
    batches = [PlanBatch.of(part, LAYERS) for part in parts]
    assert_same(PlanBatch.concatenate(batches), PlanBatch.of([plan for part in parts for plan in part], LAYERS))


@given(st.lists(plans(), min_size=2, max_size=6), st.data())
def test_a_batch_cut_in_two_and_joined_is_the_same_batch(several: list[ParallelPlan], data: st.DataObject) -> None:
    batch = PlanBatch.of(several, LAYERS)
    cut = data.draw(st.integers(0, len(several)))
    at = np.arange(len(several))
    assert_same(PlanBatch.concatenate([batch.take(at < cut), batch.take(at >= cut)]), batch)


def test_an_empty_batch_has_no_plans() -> None:
    batch = PlanBatch.of([], LAYERS)
    assert len(batch) == 0
    assert len(PlanBatch.concatenate([batch, batch])) == 0


@given(plans())
def test_what_is_not_quantised_is_in_16_bits_or_in_fp32(plan: ParallelPlan) -> None:
    wide: Precision = "fp32" if plan.precision == "fp32" else "bf16"
    batch = PlanBatch.of([plan], LAYERS).unquantised()
    assert batch.plan(0) == spelled_out(dataclasses.replace(plan, precision=wide))


def test_every_field_of_a_plan_is_in_a_batch_or_refused_where_it_is_not_the_default() -> None:
    in_batch = {field.name for field in dataclasses.fields(PlanBatch)} | {"layers_per_chunk"}
    assert {field.name for field in dataclasses.fields(ParallelPlan)} <= in_batch


def test_the_plans_of_a_batch_share_their_placement() -> None:
    plain, placed = ParallelPlan(global_batch=8), ParallelPlan(global_batch=8, placement=("b", "a"))
    batch = PlanBatch.of([placed, placed], LAYERS)
    assert batch.plan(1) == placed
    assert batch.take(np.array([0])).placement == placed.placement
    assert PlanBatch.concatenate([batch, PlanBatch.of([], LAYERS)]).placement == placed.placement
    with pytest.raises(InputError, match="same placement"):
        PlanBatch.of([plain, placed], LAYERS)
    with pytest.raises(InputError, match="same placement"):
        PlanBatch.concatenate([batch, PlanBatch.of([plain], LAYERS)])


# -- what is not priced -----------------------------------------------------------------------------------------------


def test_an_unpriced_value_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnpricedError, match="not priced yet: "):
        check_priced(ParallelPlan(global_batch=8, schedule="gpipe", pp=2, vp=2))


@settings(max_examples=30)
@given(plans())
def test_a_priced_plan_is_accepted(plan: ParallelPlan) -> None:
    check_priced(plan)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schedule": "zb-v", "pp": 2}, "'zb-v' needs vp 2, vp is 1"),
        ({"schedule": "dualpipe-v", "pp": 2, "vp": 3}, "'dualpipe-v' needs vp 2, vp is 3"),
        ({"schedule": "dualpipe-v", "pp": 8, "vp": 2}, "needs 2 pp = 16 micro-batches, there are 8"),
        ({"vp": 2, "pp": 2}, "needs schedule = 'interleaved'"),
    ],
)
def test_a_schedule_without_an_order_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ParallelPlan(global_batch=8, **changes)


# -- single plans -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "vp", "ep", "etp", "dp_replicate", "dp_shard", "micro_batch"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_degree_below_one_is_refused(axis: str, value: int) -> None:
    with pytest.raises(InputError, match=axis):
        ParallelPlan(**{"global_batch": 8, axis: value})


def test_interleaving_needs_the_interleaved_schedule() -> None:
    with pytest.raises(InputError, match="interleaved"):
        ParallelPlan(global_batch=8, pp=2, vp=2)


def test_microbatches_are_the_sequences_of_one_replica_in_micro_batches() -> None:
    plan = ParallelPlan(global_batch=96, micro_batch=2, tp=2, pp=2, dp_replicate=2, dp_shard=3)
    assert (plan.dp, plan.num_devices, plan.num_microbatches) == (6, 24, 8)


def test_words_of_a_plan_are_ordered_so_that_later_shardings_shard_more() -> None:
    assert tuple(Sharding) == ("none", "zero1", "zero2", "zero3")
    assert tuple(Schedule)[:3] == ("1f1b", "gpipe", "interleaved")
    assert Offload.NONE == next(iter(Recompute)) == "none"


@given(plans())
def test_a_plan_is_described_in_one_line(plan: ParallelPlan) -> None:
    text = plan.describe()
    assert "\n" not in text
    assert f"micro-batch {plan.micro_batch}" in text


def test_a_description_names_the_axes_that_are_used() -> None:
    plan = ParallelPlan(global_batch=64, tp=4, sp=True, pp=2, dp_shard=16, vp=5, schedule="interleaved")
    assert plan.describe() == "tp 4 pp 2 vp 5 dp 16, micro-batch 1, ZeRO-1"
    plain = ParallelPlan(global_batch=8, tp=2, tp_overlap=True)
    assert plain.describe().endswith("no sequence parallelism, TP overlap")
    for kind, words in (("ring", "ring attention"), ("all_to_all", "all-to-all attention")):
        assert words in ParallelPlan(global_batch=8, cp=2, cp_kind=kind).describe()  # type: ignore[arg-type]
    assert ParallelPlan(global_batch=1).describe() == "one device, micro-batch 1"


def test_a_plan_is_spelled_out_in_the_words_of_the_field() -> None:
    plan = ParallelPlan(global_batch=64, tp=2, sp=True, pp=4, vp=5, schedule=Schedule.INTERLEAVED, dp_shard=8)
    assert plan.describe() == "tp 2 pp 4 vp 5 dp 8, micro-batch 1, ZeRO-1"
    assert plan.spell_out() == (
        "tp 2 pp 4 dp 8, micro-batch 1, 1F1B interleaved with 5 virtual stages, distributed optimizer (ZeRO-1)"
    )
    sharded_fully = dataclasses.replace(
        plan, pp=1, vp=1, schedule=Schedule.ONE_F_ONE_B, sharding=Sharding.ZERO3, recompute=Recompute.FULL
    )
    assert sharded_fully.spell_out() == "tp 2 dp 8, micro-batch 1, fully sharded (ZeRO-3), full recompute"
    offloaded = dataclasses.replace(plan, recompute=Recompute.FULL, recompute_num_layers=2, offload=Offload.OPTIMIZER)
    assert offloaded.describe().endswith("ZeRO-1, recompute 2 layers a virtual stage, optimizer on the CPU")


@pytest.mark.parametrize(
    ("layers", "says"),
    [((1, 2, 2, 2), "uneven stages"), ((1, 2, 2, 1), "uneven virtual stages"), ((2, 2, 2, 2), None)],
)
def test_a_description_tells_uneven_ranks_from_uneven_chunks(layers: tuple[int, ...], says: str | None) -> None:
    plan = ParallelPlan(global_batch=8, pp=2, vp=len(layers) // 2, schedule="interleaved", layers_per_chunk=layers)
    assert [word for word in plan.describe().split(", ") if "uneven" in word] == ([says] if says else [])


def test_a_rank_of_a_v_has_a_chunk_of_each_end() -> None:
    """Ranks of a V hold chunks 0 and 3, and 1 and 2; others chunks 0 and 2, and 1 and 3."""
    assert chunks_of_stages((1, 2, 3, 4), 2, Schedule.ZB_V) == [(1, 4), (2, 3)]
    assert chunks_of_stages((1, 2, 3, 4), 2, Schedule.INTERLEAVED) == [(1, 3), (2, 4)]
    folded = ParallelPlan(global_batch=8, pp=2, vp=2, schedule="zb-v", layers_per_chunk=(2, 1, 1, 2))
    assert "uneven stages" in folded.describe().split(", ")
    even = dataclasses.replace(folded, layers_per_chunk=(1, 1, 2, 2))
    assert "uneven virtual stages" in even.describe().split(", ")


# -- layers -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(1, 64))
def test_even_chunks_hold_every_layer_and_differ_by_one_at_most(layers: int, chunks: int) -> None:
    spread = even_chunks(layers, chunks)
    assert len(spread) == chunks
    assert sum(spread) == layers
    assert max(spread) - min(spread) <= 1


@given(st.integers(1, 400), st.integers(3, 64))
def test_the_ends_are_the_last_to_take_one_layer_more(layers: int, chunks: int) -> None:
    spread = even_chunks(layers, chunks)
    if layers % chunks <= chunks - 2:
        assert spread[0] == spread[-1] == layers // chunks


def test_layers_that_divide_are_spread_evenly() -> None:
    assert even_chunks(32, 8) == (4,) * 8
    assert even_chunks(61, 4) == (15, 16, 15, 15) or even_chunks(61, 4) == (15, 15, 16, 15)


def test_a_layout_is_kept_as_given() -> None:
    plan = ParallelPlan(global_batch=8, pp=3, layers_per_chunk=(7, 9, 8))
    assert chunk_layers(plan, LAYERS) == (7, 9, 8)


def test_a_layout_that_does_not_add_up_is_refused_with_both_numbers() -> None:
    plan = ParallelPlan(global_batch=8, pp=2, layers_per_chunk=(7, 9))
    with pytest.raises(InputError, match=r"16.*24"):
        chunk_layers(plan, LAYERS)


def test_a_layout_needs_one_entry_a_chunk() -> None:
    with pytest.raises(InputError, match="3 entries, pp x vp is 4"):
        ParallelPlan(global_batch=8, pp=2, vp=2, schedule="interleaved", layers_per_chunk=(8, 8, 8))


def test_a_chunk_may_be_empty_but_not_negative() -> None:
    assert chunk_layers(ParallelPlan(global_batch=8, pp=2, layers_per_chunk=(24, 0)), LAYERS) == (24, 0)
    with pytest.raises(InputError, match="layers_per_chunk"):
        ParallelPlan(global_batch=8, pp=2, layers_per_chunk=(25, -1))


@given(st.integers(1, 4), st.data())
def test_rows_are_like_the_distinct_ones_that_stand_for_them(width: int, data: st.DataObject) -> None:
    # Sizes whose product passes 64 bits, so that codes are numbered again on the way.
    size = st.sampled_from([0, 1, 2, 2**31, 2**40])
    rows = np.array(data.draw(st.lists(st.tuples(*[size] * width), max_size=20)), dtype=np.int64).reshape(-1, width)
    first, representative = distinct_rows(*rows.T)
    assert (rows[first][representative] == rows).all()
    assert len(first) == len(set(map(tuple, rows.tolist())))


def test_distinct_plans_stand_for_those_that_share_their_axes() -> None:
    plans = [ParallelPlan(global_batch=8, tp=tp, sp=tp > 1, dp_shard=dp) for tp in (1, 2) for dp in (1, 2, 4)]
    first, representative = PlanBatch.of(plans, LAYERS).distinct("tp", "sp")
    assert [plans[at].tp for at in first] == [1, 2]
    assert representative.tolist() == [0, 0, 0, 1, 1, 1]


def test_every_phrase_of_a_plan_is_in_the_glossary() -> None:
    """README says that the glossary explains every term: also those of rare options."""
    rows = (Path(__file__).parents[1] / "docs" / "glossary.md").read_text().splitlines()
    terms = [term.strip(" `") for row in rows if row.startswith("| ") for term in row.split(" | ")[0][2:].split(", ")]
    known = [re.compile(re.escape(term).replace(r"\.\.\.", ".+"), re.IGNORECASE) for term in terms]
    phrases = {phrase for axis in AXES for phrase in axis.phrases.values() if phrase}
    assert len(phrases) > 30
    assert {phrase for phrase in phrases if not any(term.match(phrase) for term in known)} == set()
