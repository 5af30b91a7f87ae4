"""Is the way from one plan to another made of legal plans, from the one to the other, and does it tell every change?"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.base.errors import AutoplanError, InputError
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.search.axes import axes_of, differing, plan_of, words
from autoplan.search.choice import compared
from autoplan.search.plan_changes import Difference, changes, fastest_path, nearest_equal, prices
from autoplan.spec.blocks import Experts
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import ParallelPlan, chunk_layers, parse_recompute
from autoplan.spec.problem import Problem
from search_cases import DENSE, make

PROBLEM, _ = make()
EXPERTS = dataclasses.replace(
    PROBLEM,
    model=dataclasses.replace(DENSE, moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=4096)),
)


@st.composite
def plans(draw: st.DrawFn, problem: Problem) -> ParallelPlan:
    """A legal plan on 16 devices."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    tp, pp, cp = one_of(1, 2, 4, 8), one_of(1, 2, 4), one_of(1, 1, 2)
    dp, rest = divmod(16, tp * pp * cp)
    assume(not rest and dp)
    vp = one_of(1, 2, 3) if pp > 1 else 1
    replicate = one_of(*(size for size in (1, 2) if dp % size == 0))
    table = {
        "global_batch": 64,
        "micro_batch": one_of(1, 2, 4),
        "tp": tp,
        "sp": tp != 1 and one_of(True, True, False),
        "cp": cp,
        "cp_kind": one_of("ring", "all_to_all"),
        "pp": pp,
        "vp": vp,
        "schedule": "interleaved" if vp != 1 else "1f1b",
        "ep": one_of(1, 2, 4) if problem.model.moe else 1,
        "etp": one_of(1, tp) if problem.model.moe else 1,
        "dp_replicate": replicate,
        "dp_shard": dp // replicate,
        "sharding": one_of("none", "zero1") if replicate == 1 else "zero1",
        "offload": one_of("none", "none", "optimizer"),
        "tp_overlap": tp != 1 and one_of(True, False),
        "grad_reduce_overlap": one_of(True, False),
        **parse_recompute(one_of("none", "selective", "full", "full:2", "mlp")),
    }
    table["param_gather_overlap"] = table["sharding"] != "none" and table["grad_reduce_overlap"]
    try:
        plan = ParallelPlan(**table)
        assume(not broken(RULES, problem.workload, plan))
    except AutoplanError:
        assume(False)
    return plan


CASES = st.sampled_from([PROBLEM, EXPERTS]).flatmap(
    lambda problem: st.tuples(st.just(problem), plans(problem), plans(problem))
)


def meant(problem: Problem, plan: ParallelPlan) -> ParallelPlan:
    """`plan` with plain values for what means nothing in it, and the layers of its chunks spelled out."""
    rebuilt = plan_of(problem, axes_of(problem.model, plan))
    return dataclasses.replace(rebuilt, layers_per_chunk=chunk_layers(rebuilt, problem.model.num_layers))


@settings(max_examples=30, deadline=None)
@given(CASES)
def test_the_axes_of_a_plan_make_that_plan(case: tuple[Problem, ParallelPlan, ParallelPlan]) -> None:
    problem, plan, _ = case
    direct, other = prices(problem, [plan, meant(problem, plan)])
    assert (direct.step_s, direct.memory_bytes) == (other.step_s, other.memory_bytes)
    assert axes_of(problem.model, direct.plan) == axes_of(problem.model, other.plan)
    assert direct.plan.describe() == other.plan.describe()


@settings(max_examples=6, deadline=None)
@given(CASES)
def test_every_step_is_legal_and_as_safe_as_the_last_which_is_the_best(
    case: tuple[Problem, ParallelPlan, ParallelPlan],
) -> None:
    problem, before, after = case
    difference = Difference(problem=problem, rules=RULES, before=before, after=after)
    steps, axis_changes = fastest_path(difference), changes(difference)
    last = prices(problem, [after])[0]
    assert difference.mix(()) == before or not difference.axes()
    assert [change.axis for change in axis_changes] == list(difference.axes())
    assert sorted(axis for step in steps for axis in step.axes) == sorted(difference.axes())
    if steps:
        assert steps[-1].plan == last
    for step in steps:
        assert not broken(RULES, problem.workload, step.plan.plan)
        assert VERDICTS.index(step.plan.verdict) <= VERDICTS.index(last.verdict)
    for axis_change in axis_changes:
        assert (axis_change.alone is None) == bool(axis_change.why_not)
        assert axis_change.before != axis_change.after
        if axis_change.alone:
            assert not broken(RULES, problem.workload, axis_change.alone.plan)
            assert prices(problem, [difference.mix((axis_change.axis,))]) == [axis_change.alone]


@settings(max_examples=8, deadline=None)
@given(CASES)
def test_what_costs_nothing_stays_as_it_is(case: tuple[Problem, ParallelPlan, ParallelPlan]) -> None:
    problem, before, after = case
    best = prices(problem, [after])[0]
    kept = nearest_equal(problem, RULES, before, best)
    assert kept.s_per_sequence <= best.s_per_sequence * (1 + 1e-8)
    assert VERDICTS.index(kept.verdict) <= VERDICTS.index(best.verdict)
    assert not broken(RULES, problem.workload, kept.plan)
    # No other axis can go back for nothing.
    assert nearest_equal(problem, RULES, before, kept) == kept


def test_an_axis_that_cannot_go_back_ends_the_way_back() -> None:
    """States shared over 8 of 16 replicas are, of 8 replicas, shared over all: another plan than before, each time."""
    flags = {"sharding": "zero1", "grad_reduce_overlap": True, "param_gather_overlap": True}
    before = ParallelPlan(global_batch=64, micro_batch=4, ep=8, dp_replicate=2, dp_shard=8, **flags)
    pipeline = {"pp": 2, "vp": 2, "schedule": "interleaved"}
    after = ParallelPlan(global_batch=64, micro_batch=4, cp=2, dp_shard=4, **pipeline, **flags)
    kept = nearest_equal(EXPERTS, RULES, before, prices(EXPERTS, [after])[0])
    assert Difference(problem=EXPERTS, rules=RULES, before=before, after=kept.plan).axes() == (
        "cp",
        "pp",
        "ep",
        "sharding",
    )


def test_equal_plans_have_no_way_between_them() -> None:
    plan = ParallelPlan(global_batch=64, tp=2, sp=True, dp_shard=8)
    difference = Difference(problem=PROBLEM, rules=RULES, before=plan, after=plan)
    assert (fastest_path(difference), changes(difference)) == ((), ())
    gap = compared(*prices(PROBLEM, [plan, plan]))
    assert gap.ratio == 1.0
    assert math.isclose(gap.high, 1.0 / gap.low)


def test_changes_that_need_each_other_are_made_together() -> None:
    """16 sequences a micro-batch leave no whole micro-batch for eight replicas."""
    before = ParallelPlan(global_batch=64, micro_batch=16, tp=8, sp=True, dp_shard=2, recompute="full")
    after = ParallelPlan(global_batch=64, micro_batch=2, tp=2, sp=True, dp_shard=8)
    difference = Difference(problem=PROBLEM, rules=RULES, before=before, after=after)
    by_axis = {change.axis: change for change in changes(difference)}
    assert {axis: (change.before, change.after) for axis, change in by_axis.items()} == {
        "tp": ("8", "2"),
        "micro_batch": ("16", "2"),
        "recompute": ("full", "none"),
    }
    assert "global_batch 64 must be divisible by micro_batch 16 x dp 8" in by_axis["tp"].why_not
    recompute, both = (step.axes for step in fastest_path(difference))
    assert recompute == ("recompute",)
    assert set(both) == {"tp", "micro_batch"}


def test_the_rest_of_the_devices_goes_to_data_parallelism() -> None:
    plan = ParallelPlan(global_batch=64, tp=4, sp=True, pp=2, dp_shard=2)
    axes = axes_of(DENSE, plan)
    assert plan_of(PROBLEM, axes | {"tp": 2}).dp_shard == 4
    with pytest.raises(InputError, match="tp 3 x pp 2 does not divide the 16 devices"):
        plan_of(PROBLEM, axes | {"tp": 3})
    with pytest.raises(InputError, match="dp 2 is not a multiple of the 4 ranks"):
        plan_of(PROBLEM, axes | {"sharding": ("zero1", 4)})


def test_layers_follow_the_number_of_chunks_and_differ_alone_where_it_is_the_same() -> None:
    even = ParallelPlan(global_batch=64, pp=2, dp_shard=8)
    uneven = dataclasses.replace(even, layers_per_chunk=(13, 11))
    deeper = ParallelPlan(global_batch=64, pp=4, dp_shard=4, layers_per_chunk=(5, 7, 7, 5))
    axes = [axes_of(DENSE, plan) for plan in (even, uneven, deeper)]
    assert differing(axes[0], axes[1]) == ("layers",)
    assert differing(axes[1], axes[2]) == ("pp",)
    assert (words("layers", axes[1]["layers"]), words("layers", axes[2]["layers"])) == ("13, 11", "5, 2 x 7, 5")
    assert Difference(problem=PROBLEM, rules=RULES, before=even, after=deeper).mix(("pp",)) == deeper
