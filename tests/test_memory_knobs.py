"""Is every change that is offered to free memory legal, single, and worth what it says?"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autoplan.cost.estimate import estimate
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.frameworks.presets import load_framework
from autoplan.readers.model import load_model
from autoplan.search.memory_knobs import memory_knobs
from autoplan.spec.enums import RecomputeModule
from autoplan.spec.plan import ParallelPlan, PlanBatch, parse_recompute
from autoplan.spec.plan_words import DEGREES
from autoplan.spec.problem import Problem
from problems import problem_for

MODELS = {name: load_model(name) for name in ("llama3-8b", "deepseek-v2-lite")}


def problem_of(model: str) -> Problem:
    return problem_for(MODELS[model], "h100-sxm:4x8")


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, ParallelPlan]:
    """A legal plan on 32 devices."""
    problem = problem_of(draw(st.sampled_from(sorted(MODELS))))
    tp, pp, vp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    replicate = draw(st.sampled_from([1, 2]))
    plan = ParallelPlan(
        global_batch=256,
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        tp=tp,
        sp=tp > 1,
        pp=pp,
        vp=vp if pp > 1 else 1,
        schedule="interleaved" if pp > 1 and vp > 1 else "1f1b",
        dp_replicate=replicate,
        dp_shard=32 // (tp * pp * replicate),
        sharding=draw(st.sampled_from(["none", "zero1"])),  # type: ignore[arg-type]
        **parse_recompute(draw(st.sampled_from(["none", "selective", "full:2", "full"]))),  # type: ignore[arg-type]
    )
    return problem, plan


@settings(max_examples=30, deadline=None)
@given(cases())
def test_every_knob_is_legal_and_frees_what_it_says(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    setting = problem.workload
    assume(not broken(RULES, setting, plan))
    before = estimate(problem, PlanBatch.of([plan], problem.model.num_layers)).memory_bytes[0]
    knobs = memory_knobs(problem, plan, RULES)
    assert knobs
    for knob in knobs:
        assert not broken(RULES, setting, knob.plan.plan), knob.change
        assert knob.plan.plan.num_devices == 32
        assert before - knob.plan.memory_bytes == pytest.approx(knob.freed_bytes)
        assert sum(getattr(knob.plan.plan, axis) != getattr(plan, axis) for axis in DEGREES if axis != "dp") <= 2


def test_the_knobs_of_a_plan_that_does_not_fit_name_what_makes_it_fit() -> None:
    problem = problem_of("llama3-8b")
    plan = ParallelPlan(global_batch=256, micro_batch=4, dp_shard=32)
    knobs = {knob.change: knob.plan.verdict for knob in memory_knobs(problem, plan, RULES)}
    assert knobs["recompute all layers"] == "risky"
    assert knobs["recompute mlp"] == "oom"
    assert {"micro-batch 4 -> 2", "tp 1 -> 2", "pp 1 -> 2", "zero2", "optimizer on the host"} <= set(knobs)


def test_a_leaner_plan_has_fewer_knobs() -> None:
    problem = problem_of("llama3-8b")
    lean = ParallelPlan(global_batch=256, dp_shard=32, sharding="zero3", recompute="full")
    changes = {knob.change for knob in memory_knobs(problem, lean, RULES)}
    assert not any(change.startswith(("recompute", "zero", "micro-batch")) for change in changes)


def test_a_layer_moves_from_the_stage_that_needs_most_to_the_one_that_needs_least() -> None:
    problem = problem_of("llama3-8b")
    plan = ParallelPlan(global_batch=256, pp=4, dp_shard=8)
    (moved,) = (knob for knob in memory_knobs(problem, plan, RULES) if knob.change.startswith("one layer"))
    assert moved.plan.plan.layers_per_chunk is not None
    assert sum(moved.plan.plan.layers_per_chunk) == 32
    assert moved.plan.plan == dataclasses.replace(plan, layers_per_chunk=moved.plan.plan.layers_per_chunk)


def test_a_framework_without_named_parts_is_offered_what_it_calls_selective() -> None:
    problem = dataclasses.replace(problem_of("llama3-8b"), framework=load_framework("torchtitan"))
    plan = ParallelPlan(global_batch=256, micro_batch=4, dp_shard=32, sharding="zero3")
    changes = {knob.change for knob in memory_knobs(problem, plan, universal.RULES_ALONE)}
    assert "recompute selectively" in changes
    assert not any(module in change for change in changes for module in RecomputeModule)
