"""Does what was measured beside products say what overlap costs, and does the price take it?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoplan.api.calibrations import described_machine
from autoplan.api.problem import make_problem
from autoplan.cost.collectives.sharded_states import unhidden_share
from autoplan.cost.estimate import estimate
from autoplan.cost.network.links import CONTENTION_SHARE, contention_share
from autoplan.profiler.contention import BesideProducts, contention_shares
from autoplan.profiler.record import Record
from autoplan.profiler.store import open_store
from autoplan.spec.enums import Sharding
from autoplan.spec.measurement import Measurement
from autoplan.spec.operations import Operation
from autoplan.spec.pinned_timings import PinnedTimings
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.timing import TimingTable

SHAPE = (8, 8, 1, 2**28)
ALONE = Measurement(operation="reduce_scatter", shape=SHAPE, dtype="bf16", device="h100-sxm", seconds=1e-3)


@pytest.mark.parametrize(
    ("seconds", "products_s", "share"),
    [
        (1.0e-3, 1.0e-3, 0.0),
        (1.3e-3, 1.0e-3, 0.3),
        (1.5e-3, 1.2e-3, 0.3),  # of the shorter one, the collective
        (1.2e-3, 0.8e-3, 0.25),  # of the shorter one, the products
        (0.9e-3, 1.0e-3, 0.0),  # noise
        (9.0e-3, 1.0e-3, 1.0),  # one after the other at worst
    ],
)
def test_overlap_costs_what_goes_beyond_the_longer_of_both(seconds: float, products_s: float, share: float) -> None:
    beside = BesideProducts(
        operation="reduce_scatter", shape=SHAPE, dtype="bf16", seconds=seconds, products_s=products_s
    )
    assert contention_shares([beside], [ALONE]) == {"reduce_scatter": pytest.approx(share, abs=1e-12)}


def test_what_hardly_overlapped_or_was_not_measured_alone_tells_nothing() -> None:
    beside = BesideProducts(operation="reduce_scatter", shape=SHAPE, dtype="bf16", seconds=5e-3, products_s=4e-3)
    assert contention_shares([beside], [ALONE]) == {}
    assert contention_shares([replace(beside, products_s=1e-3)], []) == {}


def test_a_price_takes_the_measured_contention_and_a_plan_carries_it(tmp_path: Path) -> None:
    path = str(tmp_path / "lab.db")
    plain = make_problem("llama3-8b", cluster="h100-sxm:2x8", seq_len=4096)
    machine = replace(described_machine(plain.cluster), torch="2.13.0")
    alone = Record(
        fingerprint=machine, operation="reduce_scatter", shape=SHAPE, dtype="bf16", samples_s=(1e-3,), kernel="nccl"
    )
    conditions = {"products_s": "1e-3"}
    beside = replace(alone, kernel="nccl beside gemm", samples_s=(1.5e-3,), conditions=conditions)
    old = replace(beside, samples_s=(9e-3,), conditions={})  # of before the products were timed
    with open_store(path) as store:
        store.add([alone, beside, old])
    timed = make_problem("llama3-8b", cluster="h100-sxm:2x8", seq_len=4096, timings="db", db=path)
    assert timed.timings.contention == {"reduce_scatter": pytest.approx(0.5)}
    assert contention_share(timed, "reduce_scatter", "all_reduce") == pytest.approx(0.5)
    assert contention_share(plain, "reduce_scatter") == CONTENTION_SHARE
    assert contention_share(timed, "all_gather") == CONTENTION_SHARE
    pinned = PinnedTimings.of(timed.timings, with_times=True).table("h100-sxm")
    assert (pinned.contention, pinned.digest) == (timed.timings.contention, timed.timings.digest)

    plan = ParallelPlan(global_batch=64, micro_batch=1, tp=2, dp_shard=8, sharding=Sharding.ZERO1)

    def step_s(share: float) -> float:
        table = TimingTable.of([], contention={"reduce_scatter": share})
        problem = replace(plain, timings=replace(timed.timings, contention=table.contention))
        return float(estimate(problem, PlanBatch.of([plan], problem.model.num_layers)).step_s[0])

    assert step_s(0.5) > step_s(CONTENTION_SHARE) > step_s(0.0)
    assert step_s(0.5) - step_s(0.0) == pytest.approx(5 * (step_s(CONTENTION_SHARE) - step_s(0.0)), rel=1e-6)
    assert np.isfinite(step_s(1.0))


@pytest.mark.parametrize(("cluster", "share"), [("h100-sxm:1x8", 0.10), ("mi355x:1x8", 0.58)])
def test_collectives_beside_products_cost_more_on_amd(cluster: str, share: float) -> None:
    """A gradient reduction that hides costs this share of its time where overlap was not measured."""
    problem = make_problem("llama3-8b", cluster=cluster, seq_len=4096)
    batch = PlanBatch.of([ParallelPlan(global_batch=32, dp_shard=8, sharding=Sharding.ZERO1)], problem.model.num_layers)

    def step_s(measured: dict[Operation, float]) -> float:
        timings = TimingTable.of([], contention=measured)
        return float(estimate(replace(problem, timings=timings), batch).step_s[0])

    free_s, whole_s = step_s({"reduce_scatter": 0.0}), step_s({"reduce_scatter": 1.0})
    assert (step_s({}) - free_s) / (whole_s - free_s) == pytest.approx(share)


def test_gathers_of_sharded_weights_hide_less_on_amd() -> None:
    """FSDP shows at least .15 of the traffic that its passes could hide, on MI300X .58."""
    for cluster, share in (("h100-sxm:1x8", 0.15), ("mi300x:1x8", 0.58)):
        problem = make_problem("llama3-8b", cluster=cluster, framework="torchtitan", seq_len=8192)
        assert unhidden_share(problem) == pytest.approx(share)
