"""Does `explain --timings` name the records that a price rests on, all of them, and with what they weigh?"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from autoplan.api.problem import make_problem
from autoplan.api.record_facts import facts_of, sample_deviation
from autoplan.cost.estimate import estimate
from autoplan.cost.lookups import looked_up_shapes
from autoplan.cost.provenance import shares
from autoplan.cost.served import measured_shares, needed_times, term_spreads
from autoplan.profiler.record import Record
from autoplan.profiler.store import open_store
from autoplan.report.answer import sources_text
from autoplan.spec.measurement import Match, Measurement
from autoplan.spec.needed_times import NeededTime
from autoplan.spec.operations import COLLECTIVES, Operation
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.timing import Provenance, TimingTable
from commands import run
from stores import LAB

PROBLEM = make_problem("llama3-8b", cluster="h100-sxm:2x8", seq_len=4096)
PLAN = ParallelPlan(global_batch=64, micro_batch=2, tp=4, sp=True, dp_shard=4)
BATCH = PlanBatch.of([PLAN], PROBLEM.model.num_layers)
# All products of micro-batch 2 over 4 ranks have m = 8,192 tokens.
QKV, OUT, UP, DOWN = (1536, 4096), (4096, 1024), (7168, 4096), (4096, 3584)


def product(m: int, n: int, k: int, source: str) -> Measurement:
    return time("gemm", (m, n, k), 2 * m * n * k / 6e14, source)


def time(operation: Operation, shape: tuple[int, ...], seconds: float, source: str, **more: bool) -> Measurement:
    return Measurement(
        operation=operation, shape=shape, dtype="bf16", device="h100-sxm", seconds=seconds, source=source, **more
    )


TIMES = [
    product(8192, *QKV, "a"),
    product(4096, *UP, "b"),
    product(16384, *UP, "c"),
    time("attention", (2, 4096, 8, 2, 128, 0), 5e-4, "d", is_disturbed=True),
    time("all_gather", (4, 4, 2, 2 * 4096 * 4096 * 2), 6e-4, "e"),
    time("reduce_scatter", (2, 2, 4, 2**25), 4e-4, "f"),
    time("reduce_scatter", (2, 2, 4, 2**27), 1.2e-3, "g"),
]
TIMED = replace(PROBLEM, timings=TimingTable.of(TIMES))


@pytest.fixture(scope="module")
def needed() -> dict[tuple[str, tuple[int, ...]], NeededTime]:
    return {(need.operation, need.shape): need for need in needed_times(TIMED, PLAN)}


def test_every_time_says_how_it_is_had(needed: dict[tuple[str, tuple[int, ...]], NeededTime]) -> None:
    exact = needed["gemm", (8192, *QKV)]
    assert (exact.served, [source.source for source in exact.sources]) == ("measured", ["a"])
    assert exact.seconds == TIMES[0].seconds
    between = needed["gemm", (8192, *UP)]
    assert between.served == "interpolated"
    assert {source.source for source in between.sources} <= {"a", "b", "c"}
    # Half-way by the logarithm between two that miss the fitted sum alike: both of its neighbours count most.
    assert {source.source for source in between.sources[:2]} == {"b", "c"}
    assert sum(source.share for source in between.sources) == pytest.approx(1)
    assert needed["attention", (2, 4096, 8, 2, 128, 0)].served == "disturbed"
    assert needed["attention_backward", (2, 4096, 8, 2, 128, 0)].served == "by its forward pass"
    assert needed["dgrad", (8192, *QKV)].served == "by its forward pass"
    assert needed["norm", (2048, 4096)].served == "not measured"
    assert needed["norm", (2048, 4096)].seconds is None
    gather = needed["all_gather", (4, 4, 2, 2 * 4096 * 4096 * 2)]
    assert (gather.served, [source.source for source in gather.sources]) == ("measured", ["e"])
    scatter = needed["reduce_scatter", (4, 4, 2, 2 * 4096 * 4096 * 2)]
    assert (scatter.served, {source.source for source in scatter.sources}) == ("scaled", {"f", "g"})


def test_the_spread_of_a_term_is_that_of_the_times_behind_it(
    needed: dict[tuple[str, tuple[int, ...]], NeededTime],
) -> None:
    exact, between = needed["gemm", (8192, *QKV)], needed["gemm", (8192, *UP)]
    # Half of a term on a time of 3 %, a quarter on one between two measured shapes of 4 %, each counting for half.
    halves = [replace(between.sources[0], source=name, share=0.5) for name in ("b", "c")]
    needs = [
        replace(exact, terms={"gemm": 0.5}),
        replace(between, terms={"gemm": 0.25, "pipeline_bubble": 0.1}, sources=tuple(halves)),
        replace(needed["norm", (2048, 4096)], terms={"memory_bound": None}),
    ]
    spreads = term_spreads(needs, {"a": 0.03, "b": 0.04, "c": 0.04}, Match.EXACT)
    interpolated = math.hypot(0.04 / math.sqrt(2), 0.08)
    assert spreads == pytest.approx({
        "gemm": math.hypot(0.5 * 0.03, 0.25 * interpolated) / 0.75, "pipeline_bubble": interpolated
    })  # fmt: skip
    elsewhere = term_spreads(needs[:1], {}, Match.DEVICE)
    assert elsewhere == pytest.approx({"gemm": Match.DEVICE.spread})


@pytest.mark.parametrize(
    ("samples", "expected"), [((2.0,), None), ((1.0, 3.0), math.sqrt(2) / 2), ((1.0,) * 9, 0.0)]
)  # fmt: skip
def test_how_spread_samples_are(samples: tuple[float, ...], expected: float | None) -> None:
    assert sample_deviation(samples) == pytest.approx(expected)


def test_samples_of_a_normal_distribution_have_its_deviation() -> None:
    samples = np.random.default_rng(0).normal(1.0, 0.05, 5000)
    assert sample_deviation(tuple(samples)) == pytest.approx(0.05, rel=0.05)


def test_groups_over_nodes_are_not_served_by_groups_inside_one(
    needed: dict[tuple[str, tuple[int, ...]], NeededTime],
) -> None:
    over_nodes = [
        need for (operation, shape), need in needed.items() if operation in COLLECTIVES and shape[0] != shape[1]
    ]
    assert over_nodes
    assert {need.served for need in over_nodes} == {"not measured"}


def test_nothing_that_the_price_looks_up_is_left_out(needed: dict[tuple[str, tuple[int, ...]], NeededTime]) -> None:
    for (operation, _), shapes in looked_up_shapes(TIMED, BATCH).items():
        for shape in shapes:
            # A group alone counts where it was not measured beside its siblings, and is told with these.
            beside = (*shape[:2], 8 // shape[1], shape[3]) if operation in COLLECTIVES else shape
            assert (operation, shape) in needed or (operation, beside) in needed


def test_shares_add_up_to_what_rests_on_measurements(needed: dict[tuple[str, tuple[int, ...]], NeededTime]) -> None:
    """Two ways to the same number: one time after another made longer, and all times of a provenance at once."""
    step = shares(TIMED, BATCH)
    timed = sum(step[kind][0] for kind in ("measured", "disturbed", "interpolated", "scaled"))
    assert sum(need.step_share for need in needed.values()) == pytest.approx(timed, abs=2e-4)
    added: dict[str, float] = defaultdict(float)
    for need in needed.values():
        for name, share in need.terms.items():
            added[name] += share or 0.0
    found = measured_shares(TIMED, PLAN)
    # Not of traffic that computation hides: the longer one takes, the less of the other shows.
    for name in ("gemm", "attention", "memory_bound", "head", "optimizer", "parameter_gather"):
        assert added[name] == pytest.approx(found[name], abs=2e-4), name
    assert found["gemm"] > 0.5
    assert found["head"] == 0


def test_a_time_that_replaces_itself_changes_no_price_and_one_that_is_longer_the_terms_that_are_named(
    needed: dict[tuple[str, tuple[int, ...]], NeededTime],
) -> None:
    before = estimate(TIMED, BATCH)
    for (operation, shape), need in needed.items():
        if need.seconds is None:
            continue
        same, twice = (
            estimate(replace(TIMED, timings=TIMED.timings.with_time(need.operation, need.dtype, shape, seconds)), BATCH)
            for seconds in (need.seconds, 2 * need.seconds)
        )
        # Of groups over several domains the members may lie otherwise than the shape tells.
        np.testing.assert_allclose(same.step_s, before.step_s, rtol=1e-9, err_msg=operation)
        longer = {name for name, value in twice.terms_s.items() if value[0] > same.terms_s[name][0] * (1 + 1e-3)}
        assert {name for name, share in need.terms.items() if share and share > 2e-3} <= longer


def test_a_time_that_is_missing_names_the_term_that_it_would_enter(
    needed: dict[tuple[str, tuple[int, ...]], NeededTime],
) -> None:
    assert set(needed["norm", (2048, 4096)].terms) == {"memory_bound"}
    (logits,) = (
        need for (name, shape), need in needed.items() if name == "gemm" and shape[1] > PROBLEM.model.vocab_size / 4
    )
    assert set(logits.terms) == {"head"}
    assert set(needed["dgrad", (8192, *QKV)].terms) == {"gemm"}


def test_every_provenance_has_words_on_screen() -> None:
    for name in get_args(Provenance):
        assert sources_text({name: 1.0}).startswith("100.0 % ")


def test_the_age_of_a_record_is_counted_in_days() -> None:
    record = Record(
        fingerprint=LAB,
        operation="gemm",
        shape=(1, 1, 1),
        dtype="bf16",
        samples_s=(1e-6,),
        measured_at="2026-11-20T12:00Z",
    )
    assert facts_of(record, datetime(2026, 11, 24, tzinfo=UTC)).age_days == 3.5
    assert facts_of(replace(record, measured_at="")).age_days is None


# -- the command -------------------------------------------------------------------------------------------------------


# A page for the answer of a search would be searched for again in other sizes.
ESTIMATE = "estimate llama3-8b --cluster h100-sxm:2x8 --global-batch 64 --seq-len 4096 --tp 4 --sp --micro-batch 2"


def test_the_command_tells_who_measured_what_where_and_when(url: str, tmp_path: Path) -> None:
    records = [
        Record(
            fingerprint=replace(LAB, driver="570.86"),
            operation=measured.operation,
            shape=measured.shape,
            dtype="bf16",
            samples_s=(measured.seconds,),
            kernel="sdpa",
            measured_by="ada",
            host="node7",
            measured_at="2026-11-20T12:00:00Z",
            conditions={"other_load": "0.3 %", "backend": "flash FA2"},
        )
        for measured in TIMES
    ]
    with open_store(url) as store:
        store.add(records)
    done = run(tmp_path, *ESTIMATE.split(), "--timings", "db", "--db", url, "--out", "plan.json")
    assert done.returncode == 0, done.stderr
    shown = run(tmp_path, "explain", "plan.json", "--timings", "--db", url, COLUMNS="160")
    assert shown.returncode == 0, shown.stderr
    qkv = next(line for line in shown.stdout.splitlines() if f"gemm 8192x{QKV[0]}x{QKV[1]} bf16" in line)
    assert records[0].key[:12] in qkv
    facts = next(line for line in shown.stdout.splitlines() if line.startswith(records[0].key[:12]))
    assert facts.split()[1:3] == ["node7", "2026-11-20"]
    assert all(word in facts for word in ("ada", "0.3 %", "sdpa, flash FA2", "2.13.0", "nccl 2.28.3", "570.86"))
    found = json.loads(run(tmp_path, "explain", "plan.json", "--timings", "--json", "--db", url).stdout)
    named = {source["source"] for need in found["needed"] for source in need["sources"]}
    assert set(found["records"]) == named
    assert found["unknown"] == ""
    page = run(tmp_path, "report", "plan.json", "--out", "page.html", "--quiet")
    assert page.returncode == 0, page.stderr
    html = (tmp_path / "page.html").read_text()
    assert "Records behind each term of the step" in html
    assert ("node7" in html) is ("://" not in url)  # no server is asked that nobody named


def test_the_command_says_what_it_cannot_tell(tmp_path: Path) -> None:
    done = run(tmp_path, *ESTIMATE.split(), "--out", "plan.json")
    assert done.returncode == 0, done.stderr
    shown = run(tmp_path, "explain", "plan.json", "--timings")
    assert "nothing was measured" in shown.stdout
    refused = run(tmp_path, "explain", "plan.json", "--timings", "--versus", "tp=8")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    with open_store(str(tmp_path / "t.db")) as store:
        store.add([Record(fingerprint=LAB, operation="gemm", shape=(8192, *QKV), dtype="bf16", samples_s=(2e-4,))])
    run(tmp_path, *ESTIMATE.split(), "--timings", "db", "--db", "t.db", "--out", "timed.json")
    (tmp_path / "t.db").unlink()
    shown = run(tmp_path, "explain", "timed.json", "--timings")
    assert shown.returncode == 0, shown.stderr
    assert "the records are in t.db: name it with --db" in shown.stdout
