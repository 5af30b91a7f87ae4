"""Does Perfetto's own trace processor find the estimate's times in a trace?"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from autoplan.cost.estimate import stage_costs
from autoplan.cost.timeline import timeline
from autoplan.frameworks.presets import load_framework
from autoplan.report.trace import trace_json
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.terms import STREAM_OF, STREAMS
from autoplan.spec.timeline import Timeline
from commands import run
from test_estimate import problem_of

if TYPE_CHECKING:  # loads pandas
    from perfetto_processor import Processor

NANOSECOND = 1e-9

PLANS = {
    "megatron-core": ParallelPlan(global_batch=64, pp=4, tp=2, sp=True, dp_shard=4),
    "torchtitan": ParallelPlan(
        global_batch=16, pp=2, vp=2, schedule="interleaved", tp=2, sp=True, dp_shard=2, sharding="zero3"
    ),
    "nemo": ParallelPlan(global_batch=32, pp=4, vp=2, schedule="zb-v", dp_shard=4),
    "megascale": ParallelPlan(global_batch=24, pp=3, schedule="gpipe", dp_shard=2, recompute="full"),
    "pytorch-fsdp": ParallelPlan(global_batch=8, dp_shard=8, sharding="zero3"),
}


def busy_by_stream(processor: Processor) -> dict[tuple[str, str], float]:
    """Seconds by (process, stream): a stream may be spread over several threads."""
    rows = processor.query(
        "select process.name as stage, thread.name as stream, sum(slice.dur) as dur "
        "from slice join thread_track on slice.track_id = thread_track.id "
        "join thread using (utid) join process using (upid) group by 1, 2"
    )
    found: dict[tuple[str, str], float] = defaultdict(float)
    for row in rows:
        found[row.stage.partition(":")[0], row.stream.partition(" (")[0]] += row.dur * NANOSECOND
    return found


@pytest.mark.parametrize("framework", PLANS)
def test_perfetto_computes_the_busy_times_of_the_estimate(framework: str) -> None:
    from perfetto_processor import Processor

    problem, plan = problem_of(framework=load_framework(framework)), PLANS[framework]
    line = timeline(problem, plan)
    processor = Processor(trace_json(line, plan.describe()).encode())
    busy = busy_by_stream(processor)
    events = sum(len([*rank.events()]) for rank in line.ranks)
    for stage in stage_costs(problem, plan):
        expected = dict.fromkeys(STREAMS, 0.0)
        for name, seconds in stage.terms_s.items():
            expected[STREAM_OF[name]] += plan.num_microbatches * seconds
        for other in line.ranks[stage.stage].other_events:
            expected[other.stream] += other.duration_s
        for stream, seconds in expected.items():
            found = busy.get((f"stage {stage.stage}", stream), 0.0)
            assert found == pytest.approx(seconds, abs=events * NANOSECOND), (stage.stage, stream)
    check_whole(processor, line, events)


def check_whole(processor: Processor, line: Timeline, events: int) -> None:
    (bounds,) = processor.query(
        "select min(ts) as first, max(ts + dur) as last, count(*) as n, max(depth) as deep from slice"
    )
    assert bounds.first == 0
    assert bounds.last * NANOSECOND == pytest.approx(line.step_s, abs=NANOSECOND)
    assert bounds.n == events
    assert bounds.deep == 0  # no slice lies over another
    assert [row.name for row in processor.query("select name from stats where severity = 'error' and value > 0")] == []
    peaks = processor.query(
        "select process.name as stage, max(value) as peak from counter "
        "join process_counter_track on counter.track_id = process_counter_track.id join process using (upid) group by 1"
    )
    for row, rank in zip(sorted(peaks, key=lambda peak: peak.stage), line.ranks, strict=True):
        assert row.peak == round(float(rank.memory_bytes.max()))
        assert row.stage.startswith(f"{rank.place.words}: rank")


def test_a_slice_says_which_pass_it_is() -> None:
    line = timeline(problem_of(), ParallelPlan(global_batch=4, pp=2))
    events = json.loads(trace_json(line, "a plan"))["traceEvents"]
    first = next(event for event in events if event["ph"] == "X")
    assert first["name"] == "forward 0"
    assert first["args"] == {"microbatch": 0, "chunk": 0}
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "stage 0: rank 0",
        "stage 1: rank 1",
    }


def test_estimate_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "step.json"
    asked = ["llama3-8b", "--cluster", "h100-sxm:2x8", "--global-batch", "32", "--seq-len", "4096", "--pp", "2"]
    result = run(tmp_path, "estimate", *asked, "--trace", str(trace), "--json")
    assert f"wrote {trace}: open it in ui.perfetto.dev" in result.stderr
    step_s = json.loads(result.stdout)["best"]["step_s"]
    assert json.loads(trace.read_text())["otherData"]["step_s"] == step_s
    again = run(tmp_path, "estimate", *asked, "--trace", str(trace))
    assert again.returncode == 1
    assert "exists" in again.stderr
