"""Is the timeline of a step the estimate, event by event?"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.pipeline.order import chunks_of_ranks
from autoplan.cost.timeline import timeline
from autoplan.frameworks.presets import load_framework
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import Schedule
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import END_TERMS, STEP_TERMS, STREAMS
from autoplan.spec.timeline import Event, RankTimeline, Timeline
from test_blocks import eager
from test_estimate import cases, problem_of, problems

EXACT = 1e-9


@st.composite
def any_schedule(draw: st.DrawFn) -> tuple[Problem, ParallelPlan]:
    """A pipeline under each of the schedules."""
    problem = draw(problems)
    schedule = draw(st.sampled_from(Schedule))
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    vp = 2 if schedule in ("interleaved", "zb-v", "dualpipe-v") else 1
    m = draw(st.integers(2 * pp if schedule == "dualpipe-v" else 1, 3 * pp + 2))
    dp = draw(st.sampled_from([1, 4]))
    plan = ParallelPlan(
        global_batch=m * dp,
        pp=pp,
        vp=vp,
        schedule=schedule,  # type: ignore[arg-type]
        tp=draw(st.sampled_from([1, 2])),
        dp_shard=dp,
        sharding=draw(st.sampled_from(["none", "zero1", "zero2", "zero3"])),
        recompute=draw(st.sampled_from(["none", "full"])),
    )
    return problem, plan


def check(problem: Problem, plan: ParallelPlan) -> None:
    batch = PlanBatch.of([plan], problem.model.num_layers)
    cost, stages = estimate(problem, batch), stage_costs(problem, plan)
    line = timeline(problem, plan)
    step = float(cost.step_s[0])
    tiny = EXACT * step
    assert line.step_s == step
    assert sorted(rank for rank_line in line.ranks for rank in rank_line.ranks) == list(range(plan.num_devices))
    terms = {name: float(value[0]) for name, value in cost.terms_s.items()}
    sums = []
    for rank, stage in zip(line.ranks, stages, strict=True):
        own = rank.terms_s()
        sums.append(own)
        for name, per_microbatch in stage.terms_s.items():
            assert own[name] == pytest.approx(plan.num_microbatches * per_microbatch, rel=EXACT, abs=tiny), name
        for name in END_TERMS:
            assert own[name] == terms[name]
        fill_the_step(rank, step)
        assert rank.memory_bytes.max() == pytest.approx(stage.memory_bytes, rel=EXACT)
        assert (np.diff(rank.memory_time_s) > 0).all()
        assert rank.memory_time_s[-1] <= step + tiny
        chunks = chunks_of_ranks(plan.schedule, plan.pp, plan.vp)[rank.place.stage].tolist()
        assert passes_of(rank) == {
            (microbatch, chunk) for microbatch in range(plan.num_microbatches) for chunk in chunks
        }
    # One of the ranks has every term as the estimate tells it: the critical one.
    assert any(own == pytest.approx(terms, rel=1e-6, abs=1e-6 * step) for own in sums)
    assert tuple(sums[0]) == STEP_TERMS


def passes_of(rank: RankTimeline) -> set[tuple[int | None, int | None]]:
    """The (micro-batch, chunk) that go forward and backward exactly once each."""
    kinds: dict[tuple[int | None, int | None], list[str]] = defaultdict(list)
    for pass_ in rank.passes:
        kinds[pass_.microbatch, pass_.chunk].append(pass_.kind)
    whole, split = ["forward", "backward"], ["forward", "input_gradient", "weight_gradient"]
    assert all(order in (whole, split) for order in kinds.values())
    return set(kinds)


def fill_the_step(rank: RankTimeline, step: float) -> None:
    """Events that are not beside others follow one another from the start of the step to its end."""
    events = sorted((event for event in rank.events() if not event.is_hidden), key=lambda event: event.start_s)
    now = 0.0
    for interval in events:
        assert interval.stream in STREAMS
        assert interval.start_s == pytest.approx(now, abs=EXACT * step)
        assert interval.duration_s >= 0
        now = interval.start_s + interval.duration_s
    assert now == pytest.approx(step, rel=EXACT)
    for event in rank.other_events:
        assert event.start_s >= -EXACT * step
        assert event.duration_s >= 0


@settings(max_examples=20, deadline=None)
@given(cases())
def test_the_timeline_is_the_estimate(case: tuple[Problem, ParallelPlan]) -> None:
    check(*case)


@settings(max_examples=20, deadline=None)
@given(any_schedule())
def test_the_timeline_is_the_estimate_under_every_schedule(case: tuple[Problem, ParallelPlan]) -> None:
    check(*case)


# -- what the order says -----------------------------------------------------------------------------------------------


def by_pass(line: Timeline) -> dict[tuple[str, int | None, int | None], Event]:
    """Passes of the step by (kind, micro-batch, chunk), backward standing for the gradient of the inputs."""
    names = {"input_gradient": "backward"}
    return {
        (names.get(pass_.kind, pass_.kind), pass_.microbatch, pass_.chunk): pass_
        for rank in line.ranks
        for pass_ in rank.passes
    }


@settings(max_examples=20, deadline=None)
@given(any_schedule())
def test_a_pass_begins_when_the_message_that_it_needs_is_there(case: tuple[Problem, ParallelPlan]) -> None:
    problem, plan = case
    line = timeline(problem, plan)
    if abs(line.order_error) > 1e-12:  # priced by a closed form that is not exact: waits are longer or shorter
        waits = ("gpipe",) if not problem.framework.overlap.p2p_overlap else ()  # for the messages of unlike stages
        assert plan.schedule in ("1f1b", "interleaved", *waits)
        return
    passes, last = by_pass(line), plan.pp * plan.vp - 1
    for (kind, microbatch, chunk), span in passes.items():
        assert chunk is not None
        before = {"forward": ("forward", microbatch, chunk - 1), "backward": ("backward", microbatch, chunk + 1)}
        giver = passes.get(before.get(kind, ("forward", microbatch, chunk)))
        if kind == "backward" and chunk == last:
            giver = passes["forward", microbatch, chunk]
        if giver:
            assert span.start_s >= giver.start_s + giver.duration_s - EXACT * line.step_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_what_was_measured_of_a_pipeline_is_in_its_passes(schedule: Schedule) -> None:
    times = {("pipeline_actions", m, 2, 2): 1.0 + 2 * m * 0.25 for m in (2, 8)}
    problem = eager(problem_of(), times | {("embedding", 2048, 1024, 32000, 1): 3.0})
    plan = ParallelPlan(global_batch=8, pp=2, schedule=schedule)
    check(problem, plan)
    if schedule != "zb-h1":  # whose passes are three: one more action is told as a wait
        assert timeline(problem, plan).order_error == pytest.approx(0.0, abs=0.01)


def test_two_stages_alternate_as_drawn_in_every_text() -> None:
    """1F1B, two stages, two micro-batches: F0 F1 - B0 - B1 on the first, - F0 B0 F1 B1 - on the last, in passes."""
    first, last = timeline(problem_of(), ParallelPlan(global_batch=2, pp=2)).ranks
    assert [pass_.name for pass_ in first.passes] == ["forward 0", "forward 1", "backward 0", "backward 1"]
    assert [pass_.name for pass_ in last.passes] == ["forward 0", "backward 0", "forward 1", "backward 1"]
    assert [other.kind for other in last.other_events if other.kind == "message"] == ["message"] * 3
    assert first.ranks == (0,)
    assert first.memory_bytes.max() > first.memory_bytes[0]


@pytest.mark.parametrize("framework", ["megatron-core", "torch", "pytorch-fsdp"])
def test_memory_rises_with_the_forward_passes_and_is_back_at_the_end(framework: str) -> None:
    problem = problem_of(framework=load_framework(framework))
    line = timeline(problem, ParallelPlan(global_batch=16, pp=4, dp_shard=2, schedule="gpipe"))
    for rank in line.ranks:
        forwards = [pass_ for pass_ in rank.passes if pass_.kind == "forward"]
        during = [
            rank.memory_bytes[np.searchsorted(rank.memory_time_s, forward.start_s, "right") - 1] for forward in forwards
        ]
        assert np.diff(during).min() > 0
        assert rank.memory_bytes[-1] < during[0]


def test_a_calibration_stretches_everything_alike() -> None:
    plan = ParallelPlan(global_batch=16, pp=4, dp_shard=2)
    plain, twice = (timeline(problem_of(calibration=Calibration(overall=overall)), plan) for overall in (1.0, 2.0))
    for rank, slow in zip(plain.ranks, twice.ranks, strict=True):
        for event, other in zip(rank.events(), slow.events(), strict=True):
            assert other.duration_s == pytest.approx(2 * event.duration_s)
            assert other.start_s == pytest.approx(2 * event.start_s)


def test_a_reduction_that_hides_is_shown_beside_the_passes() -> None:
    problem = problem_of(framework=load_framework("megatron-core"))
    rank = timeline(problem, ParallelPlan(global_batch=64, dp_shard=8)).ranks[0]
    beside = [other for other in rank.other_events if other.is_hidden]
    assert {span.kind for span in beside} == {"data_parallel_reduce", "parameter_gather"}
    end_s = rank.passes[-1].start_s + rank.passes[-1].duration_s
    assert all(span.start_s + span.duration_s <= end_s * (1 + 1e-12) for span in beside)


def test_a_step_that_is_too_long_is_refused() -> None:
    with pytest.raises(InputError, match="too long for a timeline: give a smaller --global-batch"):
        timeline(problem_of(), ParallelPlan(global_batch=2**17, pp=4))
