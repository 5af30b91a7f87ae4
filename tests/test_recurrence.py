"""Does the recurrence take exactly as long as a simulation of the schedule, and as the papers say?"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.arrays import Floats
from autoplan.base.errors import InputError
from autoplan.cost.passes import SplitPass
from autoplan.cost.pipeline import recurrence
from autoplan.cost.pipeline.closed_forms import gpipe_s, one_forward_one_backward_s
from autoplan.cost.pipeline.order import PipelineShape, microbatch_group
from autoplan.cost.pipeline.recurrence import PipelineTimes, is_recurrent, pipeline_times
from autoplan.spec.enums import Schedule
from pipeline_oracle import (
    TORCH,
    cases,
    gpipe,
    interleaved,
    one_forward_one_backward,
    simulate,
    simulate_blocking,
    simulate_blocking_ring,
    torch_actions,
)

EVERY_SCHEDULE = {schedule: (1 if schedule in ("gpipe", "1f1b", "zb-h1") else 2) for schedule in Schedule}


def run(schedule: Schedule, p: int, v: int, m: int, times: Floats, send_s: Floats, **switch: Any) -> PipelineTimes:
    """`times`: (forward, input gradient, weight gradient) x plans x chunks."""
    return pipeline_times(PipelineShape(schedule, p, v, m), SplitPass(*times), send_s, **switch)


def equal(schedule: Schedule, p: int, v: int, m: int, *times: float, send_s: float = 0.0, **switch: Any) -> float:
    """Makespan where every stage takes (forward, input gradient, weight gradient), spread over its chunks."""
    table = np.array(times)[:, None, None] / v * np.ones((3, 1, p * v))
    return float(run(schedule, p, v, m, table, np.array([send_s]), **switch).makespan_s[0])


def unequal(p: int, v: int, seed: int, plans: int = 1) -> tuple[Floats, Floats]:
    """(times, messages): chunks within a factor of six of one another, a few of them empty."""
    rng = np.random.default_rng(seed)
    times = rng.uniform(0.3, 2.0, (3, plans, p * v)) * (rng.random((plans, p * v)) > 0.05)
    return times, rng.uniform(0.0, 0.5, plans) * rng.integers(0, 2, plans)


def named(times: Floats) -> dict[str, list[float]]:
    """The times of one plan in the oracle's words."""
    forward, inputs, weights = times[:, 0].tolist()
    return {"F": forward, "I": inputs, "W": weights, "B": (times[1, 0] + times[2, 0]).tolist()}


# -- against simulation -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 20), st.integers(0, 10**6))
def test_the_recurrence_is_the_simulation_of_megatrons_schedules(p: int, v: int, m: int, seed: int) -> None:
    schedules: list[tuple[Schedule, int, Any]] = [
        ("gpipe", 1, gpipe(p, m)),
        ("1f1b", 1, one_forward_one_backward(p, m)),
        ("interleaved", v, interleaved(p, v, m, microbatch_group(p, m))),
    ]
    for schedule, chunks, ranks in schedules:
        times, send = unequal(p, chunks, seed)
        exact = simulate(ranks, named(times), float(send[0]))
        assert run(schedule, p, chunks, m, times, send).makespan_s[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("name", "schedule", "v"), TORCH)
def test_the_recurrence_is_the_simulation_of_torchs_schedules(name: str, schedule: Schedule, v: int) -> None:
    for seed, (p, m) in enumerate(itertools.product((1, 2, 3, 5), (2, 6, 10, 15))):
        ranks = torch_actions(name, p, v, m)
        if ranks is not None:
            times, send = unequal(p, v, seed)
            exact = simulate(ranks, named(times), float(send[0]))
            assert run(schedule, p, v, m, times, send).makespan_s[0] == pytest.approx(exact, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 4), st.integers(1, 20), st.integers(0, 10**6))
def test_blocking_messages_are_the_simulation_of_megatrons_calls(p: int, v: int, k: int, m: int, seed: int) -> None:
    times, send = unequal(p, 1, seed)
    exact = simulate_blocking(p, m, named(times), float(send[0]))
    assert run("1f1b", p, 1, m, times, send, blocking=True).makespan_s[0] == pytest.approx(exact, rel=1e-12)
    if p > 1:
        times, send = unequal(p, v, seed)
        exact = simulate_blocking_ring(p, v, k * p, named(times), float(send[0]))
        blocked = run("interleaved", p, v, k * p, times, send, blocking=True)
        assert blocked.makespan_s[0] == pytest.approx(exact, rel=1e-12)


# -- published numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "v", "m", "expected"), [(4, 1, 8, 33.0), (4, 2, 8, 28.5), (4, 2, 4, 16.5), (4, 2, 9, 31.5), (8, 4, 16, 53.25)]
)
def test_worked_makespans_of_megatrons_schedules(p: int, v: int, m: int, expected: float) -> None:
    """`modelling` E1; nine micro-batches on four stages run in groups of five."""
    assert equal("1f1b" if v == 1 else "interleaved", p, v, m, 1.0, 1.0, 1.0) == pytest.approx(expected)
    if v == 1:
        assert equal("gpipe", p, v, m, 1.0, 1.0, 1.0) == pytest.approx(expected)


@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 1.4, 0.9)])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 4), (3, 9), (4, 8), (8, 32), (16, 64)])
def test_zero_bubble_schedules_leave_the_published_bubble(p: int, m: int, times: tuple[float, float, float]) -> None:
    """ZB-H1 (p - 1)(F + I - W) (arXiv:2401.10241, table 1); ZB-V only the way down to the turn, where F = I = W."""
    forward, inputs, weights = times
    work = m * sum(times)
    assert equal("zb-h1", p, 1, m, *times) == pytest.approx(work + (p - 1) * (forward + inputs - weights))
    if forward == inputs == weights:
        assert equal("zb-v", p, 2, m, *times) == pytest.approx(work + (p - 1) * forward / 2)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8), (4, 20), (8, 32)])
def test_dualpipe_v_leaves_the_bubble_of_its_readme(p: int, m: int) -> None:
    """(PP / 2 - 1)(F&B + B - 3 W) with PP = 2 p chunks; exact where all take the same time, else above."""
    for forward, inputs, weights in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8)):
        backward = inputs + weights
        readme = (p - 1) * (forward + backward + backward - 3 * weights) / 2
        bubble = equal("dualpipe-v", p, 2, m, forward, inputs, weights) - m * (forward + backward)
        assert readme * (1 if inputs == weights else 0.9) <= bubble + 1e-9 <= readme + 2e-9


@pytest.mark.parametrize(("p", "m", "send", "added"), [(4, 8, 0.1, 1.9), (8, 64, 0.1, 13.9), (4, 64, 0.05, 6.55)])
def test_blocking_messages_of_1f1b_add_2_m_plus_2_p_minus_5(p: int, m: int, send: float, added: float) -> None:
    """`modelling` E3."""
    blocked = equal("1f1b", p, 1, m, 1.0, 1.0, 1.0, send_s=send, blocking=True)
    assert blocked == pytest.approx(3.0 * (m + p - 1) + added)


def test_overlapped_messages_add_what_the_reference_worked_out() -> None:
    """`modelling` E3: 10.0 for p = 4, m = 64 and a message of 0.1; 0.7 interleaved for p = 4, v = 2, m = 8 and 0.05."""
    plain = equal("1f1b", 4, 1, 64, 1.0, 1.0, 1.0, send_s=0.1)
    assert plain - 3.0 * 67 == pytest.approx(10.0)
    assert equal("interleaved", 4, 2, 8, 1.0, 1.0, 1.0, send_s=0.05) - 28.5 == pytest.approx(0.7)


# -- against the closed forms -----------------------------------------------------------------------------------------


def closed(p: int, v: int, m: int, times: Floats) -> Floats:
    per_rank = times.reshape(3, -1, v, p).sum(axis=2)
    plans = per_rank.shape[1]
    return one_forward_one_backward_s(
        per_rank[0], per_rank[1] + per_rank[2], np.full(plans, m), np.full(plans, v, dtype=np.int64)
    ).work_s


def test_the_closed_form_of_gpipe_is_exact_and_that_of_1f1b_a_close_lower_bound() -> None:
    for p, m in ((2, 3), (4, 16), (8, 32)):
        times = np.random.default_rng(p).uniform(0.7, 1.3, (3, 400, p))
        none = np.zeros(400)
        flow = gpipe_s(times[0], times[1] + times[2], np.full(400, m), np.zeros((400, p - 1)), overlaps=True).work_s
        assert run("gpipe", p, 1, m, times, none).makespan_s == pytest.approx(flow)
        error = closed(p, 1, m, times) / run("1f1b", p, 1, m, times, none).makespan_s - 1
        assert error.max() <= 1e-9
        assert error.min() > -0.04
        assert error.mean() > -0.002


@pytest.mark.parametrize(("p", "v", "m", "least"), [(4, 2, 8, -0.15), (8, 4, 32, -0.16), (16, 4, 64, -0.17)])
def test_the_closed_form_of_interleaved_chunks_that_differ_by_a_layer_is_off(
    p: int, v: int, m: int, least: float
) -> None:
    """A chunk of three layers among chunks of two stalls every turn of its ring: what sums per rank cannot see."""
    rng = np.random.default_rng(0)
    layers = 2.0 + (rng.random((500, p * v)) < 0.25)
    times = np.broadcast_to(layers, (3, 500, p * v))
    error = closed(p, v, m, times) / run("interleaved", p, v, m, times, np.zeros(500)).makespan_s - 1
    assert least < error.min() < -0.08
    assert error.max() < 0.1


# -- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "blocking"), [*((alone, False) for alone in Schedule), ("1f1b", True), ("interleaved", True)]
)
def test_many_plans_are_as_many_single_ones(schedule: Schedule, blocking: bool) -> None:
    p, v, m = 3, EVERY_SCHEDULE[schedule], 9
    times, send = unequal(p, v, 1, plans=40)
    together = run(schedule, p, v, m, times, send, blocking=blocking)
    for at in range(40):
        alone = run(schedule, p, v, m, times[:, at : at + 1], send[at : at + 1], blocking=blocking)
        assert np.array_equal(alone.end_s[0], together.end_s[at])
        assert alone.send_free_s[0] == together.send_free_s[at]


def test_plans_are_run_in_blocks_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    times, send = unequal(4, 2, 2, plans=100)
    whole = run("interleaved", 4, 2, 8, times, send)
    monkeypatch.setattr(recurrence, "BLOCK_VALUES", 1)
    assert np.array_equal(run("interleaved", 4, 2, 8, times, send).end_s, whole.end_s)
    assert run("interleaved", 4, 2, 8, times[:, :0], send[:0]).makespan_s.shape == (0,)


@pytest.mark.parametrize(("schedule", "p", "v", "m"), cases((1, 4), (2, 8, 13)))
def test_no_pipeline_is_shorter_than_its_work(schedule: Schedule, p: int, v: int, m: int) -> None:
    times, send = unequal(p, v, 3, plans=50)
    result = run(schedule, p, v, m, times, send)
    assert (result.end_s >= result.busy_s * (1 - 1e-12)).all()
    assert (result.send_free_s >= result.busy_s.max(axis=1) * (1 - 1e-12)).all()
    assert (result.exposed_send_s >= 0).all()
    assert (result.exposed_send_s[send == 0] == 0).all()
    # One micro-batch goes through every chunk and back, whatever the order.
    assert (result.send_free_s >= times[:2].sum(axis=(0, 2)) * (1 - 1e-12)).all()
    assert (result.critical == result.busy_s.argmax(axis=1)).all()


@pytest.mark.parametrize(("schedule", "p", "v", "m"), cases((3, 4), (8, 11)))
def test_what_takes_longer_never_ends_sooner(schedule: Schedule, p: int, v: int, m: int) -> None:
    times, send = unequal(p, v, 4, plans=60)
    before = run(schedule, p, v, m, times, send)
    rng = np.random.default_rng(5)
    slower = times + (rng.random(times.shape) < 0.1) * rng.uniform(0, 1, times.shape)
    assert (run(schedule, p, v, m, slower, send).end_s >= before.end_s - 1e-9).all()
    assert (run(schedule, p, v, m, times, send + 0.1).end_s >= before.end_s - 1e-9).all()
    assert run(schedule, p, v, m, 3 * times, 3 * send).end_s == pytest.approx(3 * before.end_s)


@pytest.mark.parametrize("schedule", Schedule)
def test_another_microbatch_costs_its_work(schedule: Schedule) -> None:
    """Exactly its work where the chunks are equal; where they are not, at least that of the least busy rank: until the
    busiest one decides, it may work in what were gaps before.
    """
    p, v = 4, EVERY_SCHEDULE[schedule]
    turn = p if schedule == "interleaved" else 1
    growth = np.diff([equal(schedule, p, v, m, 1.0, 1.2, 0.8) for m in range(2 * p, 6 * p, turn)])
    assert growth == pytest.approx(3.0 * turn)
    times = np.random.default_rng(6).uniform(0.3, 2.0, (3, 200, p * v))
    results = [run(schedule, p, v, m, times, np.zeros(200)) for m in range(2 * p, 6 * p, turn)]
    least = turn * results[0].busy_s.min(axis=1) / (2 * p)
    for before, after in itertools.pairwise(results):
        assert (after.makespan_s - before.makespan_s >= least * (1 - 1e-9)).all()


@pytest.mark.parametrize("schedule", Schedule)
def test_one_stage_has_no_bubble_and_sends_nothing(schedule: Schedule) -> None:
    v = EVERY_SCHEDULE[schedule]
    times, _ = unequal(1, v, 7, plans=5)
    result = run(schedule, 1, v, 6, times, np.full(5, 10.0))
    assert result.makespan_s == pytest.approx(6 * times.sum(axis=(0, 2)))
    assert result.critical.tolist() == [0] * 5


# -- limits -----------------------------------------------------------------------------------------------------------


def test_an_order_too_long_is_refused_by_its_length_alone() -> None:
    assert is_recurrent(PipelineShape("interleaved", 16, 8, 1024))
    assert not is_recurrent(PipelineShape("interleaved", 16, 8, 4096))
    with pytest.raises(InputError, match="use the closed form"):
        equal("interleaved", 16, 8, 4096, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-v", "dualpipe-v"])
def test_schedules_whose_calls_never_block_refuse_the_switch(schedule: Schedule) -> None:
    with pytest.raises(InputError, match="only 1f1b and interleaved"):
        equal(schedule, 4, EVERY_SCHEDULE[schedule], 8, 1.0, 1.0, 1.0, blocking=True)


def test_a_blocking_ring_needs_as_many_microbatches_as_stages() -> None:
    with pytest.raises(InputError, match="micro-batches or more, there are 3"):
        equal("interleaved", 4, 2, 3, 1.0, 1.0, 1.0, blocking=True)
