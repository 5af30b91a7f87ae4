"""Do stages and timeline of a mixed plan add up to its estimate, and to those of a plan whose stages are alike?"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.api.plan_files import make_mixed_file
from autoplan.base.errors import InputError
from autoplan.cost.estimate import stage_costs
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.mixed.stages import mixed_stages, mixed_timeline
from autoplan.cost.passes import SplitPass
from autoplan.cost.pipeline.order import PipelineShape
from autoplan.cost.pipeline.recurrence import rank_steps
from autoplan.cost.pipeline.waits import ROWS
from autoplan.cost.timeline import timeline
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.report.trace import trace_json
from autoplan.search.mixed_explanation import explain_mixed
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, ReplicaKind, as_parallel
from autoplan.spec.terms import END_TERMS, STEP_TERMS
from autoplan.spec.timeline import RankTimeline, Timeline
from autoplan.topology.mixed_cluster import BetweenSpec
from mixed_cases import SMALL, plan_of, problem_of, replicas, scaled, stages, whole
from pipeline_oracle import simulate_blocking
from test_timeline import EXACT, fill_the_step, passes_of

H2, H4 = load_cluster("h100-sxm:2x8"), load_cluster("h100-sxm:4x8")
A4 = load_cluster("a100-sxm:4x8")
FAR = BetweenSpec(device_bytes_per_s=2e9, latency_s=1e-3)
HALF = scaled("h100-sxm:4x8", "half", speed=0.5, memory_gb=40)


def check(problem: MixedProblem, plan: MixedPlan) -> None:
    """Check what holds of stages and timeline of every plan."""
    (cost,) = estimate_mixed(problem, [plan])
    placed, line = mixed_stages(problem, plan), mixed_timeline(problem, plan)
    tiny = EXACT * cost.step_s
    assert line.step_s == pytest.approx(cost.step_s, rel=EXACT)
    assert line.pipeline_s == max(kind.pipeline_s for kind in cost.kinds)
    priced = [(kind, stage) for kind in cost.kinds for stage in kind.stages]
    sums = []
    for (kind, expected), place_cost, rank in zip(priced, placed, line.ranks, strict=True):
        assert rank.place == place_cost.place
        stage, count = place_cost.cost, place_cost.place.num_microbatches
        assert (stage.layers, stage.forward_s, stage.backward_s) == (
            expected.layers,
            pytest.approx(expected.forward_s, rel=EXACT),
            pytest.approx(expected.backward_s, rel=EXACT),
        )
        assert sum(stage.terms_s.values()) == pytest.approx(expected.forward_s + expected.backward_s, rel=EXACT)
        assert stage.memory_bytes == expected.memory_bytes
        assert sum(stage.memory_terms_bytes.values()) == pytest.approx(expected.memory_bytes, rel=EXACT)
        assert place_cost.place.capacity_bytes == expected.capacity_bytes
        if stage.layers:  # else no pass lasts, and none of its peak is seen
            assert rank.memory_bytes.max() == pytest.approx(expected.memory_bytes, rel=EXACT)
        own = rank.terms_s()
        sums.append(own)
        for name, seconds in stage.terms_s.items():
            assert own[name] == pytest.approx(count * seconds, rel=EXACT, abs=tiny), name
        wait_s = line.pipeline_s - kind.pipeline_s  # for slower replicas
        for name in END_TERMS:
            assert own[name] == pytest.approx(cost.terms_s[name] + wait_s * (name == "stragglers"), abs=tiny)
        fill_the_step(rank, cost.step_s)
        assert max(over(event) for event in rank.passes) <= kind.pipeline_s + tiny
        assert passes_of(rank) == {(microbatch, place_cost.place.stage) for microbatch in range(count)}
    # The stage with most work of the slowest replicas has every term as the estimate tells it.
    assert any(own == pytest.approx(cost.terms_s, rel=1e-6, abs=1e-6 * cost.step_s) for own in sums)
    assert tuple(sums[0]) == STEP_TERMS
    ranks = [number for rank in line.ranks for number in rank.ranks]
    assert len(set(ranks)) == len(ranks) == plan.num_devices


def over(event: object) -> float:
    return event.start_s + event.duration_s  # type: ignore[attr-defined,no-any-return]


@st.composite
def kinds_on(draw: st.DrawFn, part: int) -> ReplicaKind:
    """Replicas that begin on a part and may go over to the other."""
    tp, last = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([part, 1 - part]))
    cut, more = draw(st.integers(1, 11)), draw(st.sampled_from([tp, 2]))
    deep = ((part, tp, cut), (last, more, 12 - cut))
    places = draw(st.sampled_from([((part, tp, 12),), deep, (*deep[:1], (part, tp, 0), *deep[1:])]))
    return replicas(
        draw(st.integers(1, 2)), draw(st.integers(1, 9)), *places, micro_batch=draw(st.sampled_from([1, 2]))
    )


@settings(max_examples=20, deadline=None)
@given(
    kinds_on(0),
    kinds_on(1),
    st.sampled_from(["none", "zero1"]),
    st.sampled_from(["none", "full"]),
    st.sampled_from([A4, HALF]),
    st.sampled_from([BetweenSpec(), FAR]),
    st.booleans(),
)
def test_stages_and_timeline_add_up_to_the_estimate(
    first: ReplicaKind,
    second: ReplicaKind,
    sharding: str,
    recompute: str,
    part: object,
    between: BetweenSpec,
    tied: bool,
) -> None:
    model = replace(SMALL, tied_embeddings=tied)
    problem = problem_of(H4, part, model=model, between=between)  # type: ignore[arg-type]
    check(problem, plan_of(kinds=(first, second), sharding=sharding, recompute=recompute))  # type: ignore[arg-type]


def test_shares_of_states_of_their_own_are_in_memory_term_by_term() -> None:
    kinds = [
        ReplicaKind(count=4, num_microbatches=4, stages=stages((part, 1, 12)), state_share=share)
        for part, share in enumerate((0.05, 0.2))
    ]
    for sharding in ("zero1", "zero3"):
        fast, slow = (replace(cluster, num_nodes=1) for cluster in (H4, HALF))
        fast, slow = (replace(cluster, devices_per_node=4) for cluster in (fast, slow))
        problem, plan = problem_of(fast, slow), plan_of(kinds=tuple(kinds), sharding=sharding)  # type: ignore[arg-type]
        check(problem, plan)
        less, more = (stage.cost.memory_terms_bytes["optimizer"] for stage in mixed_stages(problem, plan))
        assert more == pytest.approx(4 * less)


# -- equal parts ------------------------------------------------------------------------------------------------------

PLAIN = [(8, 1, 4, "none"), (4, 2, 4, "full"), (2, 4, 4, "none"), (1, 12, 2, "none")]


def same(line: Timeline, other: Timeline, *, rows: list[int] | None = None) -> None:
    """Two timelines whose rows, or those of the second at `rows`, do the same at every moment."""
    assert line.step_s == pytest.approx(other.step_s, rel=1e-9)
    assert line.order_error == pytest.approx(other.order_error, abs=1e-9)
    for rank, twin in zip(line.ranks, [other.ranks[at] for at in rows] if rows else other.ranks, strict=True):
        assert moments(rank) == pytest.approx(moments(twin), rel=1e-9, abs=1e-9 * line.step_s)
        assert [event.name for event in rank.events()] == [event.name for event in twin.events()]
        assert peaks_of(rank) == pytest.approx(peaks_of(twin), rel=1e-9)


def moments(rank: RankTimeline) -> list[float]:
    return [moment for event in rank.events() for moment in (event.start_s, event.duration_s)]


def peaks_of(rank: RankTimeline) -> list[float]:
    """Memory in the middle of every pass."""
    middles = [pass_.start_s + pass_.duration_s / 2 for pass_ in rank.passes]
    return [float(rank.memory_bytes[at - 1]) for at in np.searchsorted(rank.memory_time_s, middles)]


@pytest.mark.parametrize(("tp", "pp", "dp", "recompute"), PLAIN)
def test_one_part_has_the_timeline_of_a_plain_cluster_and_so_have_its_halves(
    tp: int, pp: int, dp: int, recompute: str
) -> None:
    places = [(0, tp, 12 // pp)] * pp
    plan = plan_of(kinds=(replicas(dp, 8, *places),), recompute=recompute)  # type: ignore[arg-type]
    problem = problem_of(H4)
    plain, parallel = whole(problem, H4), as_parallel(problem, plan, plan.kinds[0], tp)
    expected, found = timeline(plain, parallel), mixed_timeline(problem, plan)
    same(found, expected)
    assert [rank.ranks for rank in found.ranks] == [rank.ranks for rank in expected.ranks]
    for stage_cost, stage in zip(mixed_stages(problem, plan), stage_costs(plain, parallel), strict=True):
        assert stage_cost.cost.terms_s == pytest.approx(stage.terms_s, rel=1e-9)
        assert stage_cost.cost.memory_terms_bytes == pytest.approx(stage.memory_terms_bytes, rel=1e-9)
        assert stage_cost.cost.oom_probability == pytest.approx(stage.oom_probability, rel=1e-9)
    # The same in two halves that were not merged: replicas apart, and pipelines across.
    halves = problem_of(H2, H2)
    if pp % 2 == 0:
        across = [(part, tp, 12 // pp) for part in (0, 1) for _ in range(pp // 2)]
        same(mixed_timeline(halves, replace(plan, kinds=(replicas(dp, 8, *across),))), expected)
    apart = [replicas(dp // 2, 8, *[(part, tp, 12 // pp)] * pp) for part in (0, 1)]
    same(expected, mixed_timeline(halves, replace(plan, kinds=tuple(apart))), rows=[*range(pp)])


# -- uneven stages ----------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 6), st.integers(1, 20), st.data())
def test_unlike_hops_run_as_the_simulation_of_blocking_calls(p: int, m: int, data: st.DataObject) -> None:
    def drawn_times(low: float, high: float, count: int) -> list[float]:
        return data.draw(st.lists(st.floats(low, high), min_size=count, max_size=count))

    forward, backward, hops = drawn_times(0.5, 2, p), drawn_times(0.5, 4, p), drawn_times(0.01, 2, p - 1)
    found = rank_steps(
        PipelineShape("1f1b", p, 1, m),
        SplitPass(np.array(forward), np.array(backward), np.zeros(p)),
        np.array(hops),
        blocking=True,
    )
    makespan = max(float(finding.end_s[-1]) for finding in found)
    assert makespan == pytest.approx(simulate_blocking(p, m, {"F": forward, "B": backward}, hops))
    for rank, rank_order in enumerate(found):
        over_hops = set((rank_order.rows[rank_order.rows >= len(ROWS) * p] - len(ROWS) * p).tolist())
        assert over_hops == {hop for hop in (rank - 1, rank) if 0 <= hop < p - 1}


def test_a_message_over_a_slow_hop_takes_long_and_other_messages_do_not() -> None:
    problem = problem_of(H4, A4, between=FAR)
    plan = plan_of(kinds=(replicas(2, 8, (0, 8, 5), (0, 8, 4), (1, 8, 3)),))
    (cost,) = estimate_mixed(problem, [plan])
    near_s, far_s, _ = (stage.send_s for stage in cost.kinds[0].stages)
    line = mixed_timeline(problem, plan)
    first, _, last = (
        max(other.duration_s for other in rank.other_events if other.kind == "message") for rank in line.ranks
    )
    assert far_s > 5 * near_s
    assert last / first > 5
    assert [rank.place.part for rank in line.ranks] == ["h100-sxm", "h100-sxm", "a100-sxm"]


def test_replicas_that_are_done_early_wait_for_the_others() -> None:
    problem = problem_of(H4, HALF)
    plan = plan_of(kinds=(replicas(4, 8, (0, 8, 12)), replicas(4, 8, (1, 8, 12))))
    (cost,) = estimate_mixed(problem, [plan])
    fast, slow = mixed_timeline(problem, plan).ranks
    assert (fast.place.name, slow.place.name) == ("A0", "B0")
    assert (fast.ranks, slow.ranks) == (tuple(range(32)), tuple(range(32, 64)))
    wait = next(other for other in fast.other_events if other.kind == "stragglers")
    assert wait.start_s == pytest.approx(cost.kinds[0].pipeline_s)
    assert wait.duration_s == pytest.approx(cost.kinds[1].pipeline_s - cost.kinds[0].pipeline_s)
    assert slow.terms_s() == pytest.approx(cost.terms_s)


def test_a_trace_names_stages_and_parts() -> None:
    problem = problem_of(H4, HALF)
    plan = plan_of(kinds=(replicas(2, 8, (0, 8, 12)), replicas(2, 4, (1, 8, 6), (1, 8, 6))))
    events = json.loads(trace_json(mixed_timeline(problem, plan), "words"))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "stage A0 on h100-sxm: ranks 0-15",
        "stage B0 on half: ranks 32-47",
        "stage B1 on half: ranks 48-63",
    ]
    assert {event["pid"] for event in events} == {1, 2, 3}


def test_a_mixed_step_that_is_too_long_is_refused() -> None:
    plan = plan_of(kinds=(replicas(1, 2**18, (0, 8, 6), (1, 8, 6)),))
    with pytest.raises(InputError, match="too long for a timeline"):
        mixed_timeline(problem_of(H4, A4), plan)


# -- plans beside it --------------------------------------------------------------------------------------------------


def test_a_change_is_told_with_what_the_estimate_says_of_it() -> None:
    problem = problem_of(H4, HALF)
    kinds = (replicas(2, 8, (0, 8, 12), micro_batch=2), replicas(2, 4, (0, 8, 5), (1, 8, 7)))
    plan = plan_of(kinds=kinds)
    (cost,) = estimate_mixed(problem, [plan])
    found = explain_mixed(problem, make_mixed_file(problem, [cost], None))
    assert found.plan == cost
    assert found.stages == mixed_stages(problem, plan)
    near_changes = {near.change: near for near in found.changes}
    assert {what for what, _, _ in near_changes} == {
        "recomputation",
        "sharding",
        "micro-batch of B",  # that of A leaves the step as it is: A waits for B
        "layers of A",
        "schedule",
        "micro-batches of A, B",
    }
    for (what, before, after), near in near_changes.items():
        assert before != after
        assert near.plan == estimate_mixed(problem, [near.plan.plan])[0]
        assert near.ratio == pytest.approx(cost.sequences_per_s / near.plan.sequences_per_s)
        assert near.plan.plan.global_batch == plan.global_batch, what
    # One of every thing that fits, and the fastest where that does not.
    assert len({(what, near.plan.verdict) for (what, _, _), near in near_changes.items()}) == len(near_changes)
    assert [near.ratio for near in found.changes] == sorted(near.ratio for near in found.changes)


def test_another_schedule_is_a_change_where_the_framework_has_it() -> None:
    plan = plan_of(kinds=(replicas(2, 8, (0, 4, 6), (1, 4, 6)),), sharding="none")
    said = {}
    for name in ("megatron-core", "torchtitan"):
        problem = problem_of(H4, HALF, framework=load_framework(name))
        (cost,) = estimate_mixed(problem, [plan])
        changes = explain_mixed(problem, make_mixed_file(problem, [cost], None)).changes
        said[name] = next(near for near in changes if near.change[0] == "schedule")
        assert said[name].plan == estimate_mixed(problem, [said[name].plan.plan])[0]
    assert said["megatron-core"].change[2].startswith("interleaved")
    assert said["torchtitan"].change[1:] == ("1f1b", "zb-v")
    assert said["torchtitan"].ratio < 1


def test_a_change_that_lacks_memory_is_told_where_it_would_be_the_fastest() -> None:
    problem = problem_of(H4, HALF)
    full = plan_of(kinds=(replicas(1, 16, (0, 8, 12), micro_batch=4), replicas(1, 16, (1, 8, 12))), recompute="full")
    capacity = max(stage.cost.memory_bytes for stage in mixed_stages(problem, full)) * 1.2
    tight = replace(problem, reserve_bytes=HALF.device.visible_memory_bytes - capacity)
    (cost,) = estimate_mixed(tight, [full])
    changes = explain_mixed(tight, make_mixed_file(tight, [cost], None)).changes
    without = [near for near in changes if near.change[0] == "recomputation"]
    assert without[0].ratio < 1
    assert without[0].plan.oom_z > cost.oom_z
