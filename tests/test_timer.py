from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from autoplan.profiler.machine.sensors import Sensors, Window, foreign_load, pace  # noqa: E402
from autoplan.profiler.operations.inputs import ChainedRun, StagedRun  # noqa: E402
from autoplan.profiler.protocol import Outcome, Rules, rules_for  # noqa: E402
from autoplan.profiler.timer import hold_for, measure, median_interval, scatter, spread, usual  # noqa: E402

CPU = torch.device("cpu")
# Nothing here depends on how busy the machine is.
CALM = Rules(
    num_samples=5,
    sample_s=1e-4,
    allowance_s=0.0,
    most_foreign=1e9,
    most_slowdown=1e9,
    most_spread=1e9,
    most_scatter=1e9,
)


class Alone:
    """The team of one rank."""

    def meet(self) -> None:
        pass

    def gather(self, mine: object) -> list[Any]:
        return [mine]

    def decide(self, mine: float) -> float:
        return mine


class WithSlowRank(Alone):
    """This rank, one that takes three times as long, and one that stands by."""

    def gather(self, mine: Any) -> list[Any]:
        self.mine = mine.samples_s
        slow = tuple(3 * sample for sample in mine.samples_s)
        return [mine, replace(mine, samples_s=slow), replace(mine, samples_s=())]


class WithLiar(Alone):
    def __init__(self, lie: object) -> None:
        self.lie = lie

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self.lie if not isinstance(self.lie, tuple) else replace(mine, samples_s=self.lie)]


def work() -> None:
    sum(range(1000))


def measured(team: Alone, rules: Rules, *, is_collective: bool = False) -> Outcome:
    sensors = Sensors(CPU, "here")
    return measure(work, team=team, device=CPU, sensors=sensors, rules=rules, is_collective=is_collective)


def test_every_sample_of_a_round_is_kept() -> None:
    outcome = measured(Alone(), replace(CALM, sample_s=0.05))  # longer than a busy machine keeps one call waiting
    assert (outcome.status, outcome.reason) == ("ok", "")
    assert len(outcome.samples_s) == 5
    assert all(sample > 0 for sample in outcome.samples_s)
    assert int(outcome.conditions["calls"]) > 1  # one call is too short for a sample


def test_of_a_collective_the_slowest_rank_counts_and_of_a_kernel_the_median_rank() -> None:
    team = WithSlowRank()
    assert measured(team, CALM, is_collective=True).samples_s == tuple(3 * sample for sample in team.mine)
    kernel = measured(team, CALM)
    assert kernel.samples_s == pytest.approx([2 * sample for sample in team.mine])
    assert kernel.conditions["slowest_device"] == "+50.0 %"


def test_rounds_under_other_load_are_repeated_then_marked() -> None:
    outcome = measured(Alone(), replace(CALM, most_foreign=-1.0, allowance_s=0.05))
    assert outcome.status == "contaminated"
    assert "other load took" in outcome.reason
    assert len(outcome.samples_s) == 5  # of the cleanest round


def test_rounds_on_a_core_that_has_become_slower_are_marked() -> None:
    class Slow(Alone):
        def gather(self, mine: Any) -> list[Any]:
            return [replace(mine, window=replace(mine.window, pace=1.25))]

    outcome = measured(Slow(), replace(CALM, most_slowdown=0.1))
    assert (outcome.status, outcome.reason) == ("contaminated", "device slowed down: 25 % slower than usual")
    patient = measured(Slow(), replace(CALM, most_slowdown=0.1, allowance_s=60.0))  # it is not waited for
    assert patient.status == "contaminated"
    assert measured(Slow(), replace(CALM, most_slowdown=0.3)).conditions["pace"] == "1.25"


def test_a_median_that_does_not_settle_is_marked() -> None:
    class Clock(Alone):
        # The length of the first call and of a sample; what has gone by after one round and after two.
        answers = iter((0.001, 1.0, 0.1, 9.0))

        def decide(self, mine: float) -> float:
            return next(self.answers)

    outcome = measured(Clock(), replace(CALM, most_spread=-1.0, allowance_s=0.5))
    assert outcome.status == "unstable"
    assert "the median is known to" in outcome.reason
    assert len(outcome.samples_s) == 10  # it was given its allowance
    assert measured(Alone(), replace(CALM, most_scatter=-1.0)).status == "unstable"


@pytest.mark.parametrize(
    "lie", ["garbage", None, 3.0, (1.0,), (1.0, 1.0, 1.0, 1.0, float("nan")), (0.0,) * 5, (-1.0,) * 5]
)
def test_a_rank_that_returns_no_times_is_named(lie: object) -> None:
    outcome = measured(WithLiar(lie), CALM)
    assert (outcome.status, outcome.samples_s) == ("failed", ())
    assert outcome.reason.startswith("rank 1 returned no times but")


def test_kernels_on_a_cpu_are_timed_by_their_own_time_and_collectives_by_the_wall() -> None:
    rules = replace(CALM, sample_s=1e-3)
    sensors = Sensors(CPU, "here")

    def sleep() -> None:
        time.sleep(20e-3)  # torch's threads spin for some milliseconds after the product that tells the device's pace

    waiting = measure(sleep, team=Alone(), device=CPU, sensors=sensors, rules=rules, is_collective=True)
    assert min(waiting.samples_s) >= 20e-3
    idle = measure(
        sleep, team=Alone(), device=CPU, sensors=sensors, rules=replace(rules, sample_s=1e-5), is_collective=False
    )
    assert float(idle.conditions["wall_over_cpu"]) > 1.05
    assert idle.conditions["clock"] == "cpu time"


def test_of_a_chain_a_link_is_timed() -> None:
    rules, sensors = replace(CALM, sample_s=1e-3), Sensors(CPU, "here")
    chain = ChainedRun(run=lambda: time.sleep(8e-3), num_links=4)
    found = measure(chain, team=Alone(), device=CPU, sensors=sensors, rules=rules, is_collective=True)
    assert 2e-3 <= min(found.samples_s) < 8e-3


def test_the_interval_of_a_median_narrows_with_agreement() -> None:
    assert median_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert spread([1.0] * 20) == 0.0
    assert scatter([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((4 - 2) / 3)
    assert spread([1.0, 2.0] * 10) > spread([1.0, 1.1] * 10) > 0


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=50))
def test_the_interval_lies_within_the_samples(samples: list[float]) -> None:
    low, high = median_interval(samples)
    assert min(samples) <= low <= high <= max(samples)


def test_other_load_is_what_the_ranks_of_a_host_did_not_use() -> None:
    mine = Window(host="a", wall_s=2.0, busy_core_s=3.0, own_core_s=1.0, num_cores=2)
    assert foreign_load([mine], on_cpu=True) == pytest.approx((3 - 1) / (2 * 2))
    assert foreign_load([mine, replace(mine, own_core_s=2.0)], on_cpu=True) == 0.0
    busy = Window(host="b", wall_s=1.0, busy_core_s=4.0, own_core_s=1.0, num_cores=4)
    assert foreign_load([mine, replace(mine, own_core_s=2.0), busy], on_cpu=True) == pytest.approx(0.75)
    assert foreign_load([replace(mine, own_core_s=9.0)], on_cpu=True) == 0.0  # clocks tick apart


def test_on_devices_other_load_is_what_others_ran_there() -> None:
    window = Window(host="a", wall_s=1.0, busy_core_s=64.0, num_cores=64, foreign_device=0.3)
    assert foreign_load([window, replace(window, foreign_device=0.1)], on_cpu=False) == 0.3


def test_sensors_see_the_time_that_this_process_takes() -> None:
    sensors = Sensors(CPU, "here")
    sensors.start()
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass
    window = sensors.stop()
    assert window.own_core_s >= 0.05
    assert window.wall_s > 0  # on a virtual machine the two clocks need not agree over so short a time
    assert window.busy_core_s >= 0
    assert window.num_cores >= 1
    assert window.pace == 1.0  # there is no other check yet


def test_a_core_is_slow_against_its_own_better_checks() -> None:
    assert pace([0.5]) == 1.0
    assert pace([1.0, 1.0, 1.0, 1.0, 1.3]) == pytest.approx(1.3)
    assert pace([1.3, 1.3, 1.3, 1.0]) == pytest.approx(1.0 / 1.225)  # a quarter of the way from 1.0 to 1.3
    # A single lucky check makes no slow ones of all that follow.
    assert pace([0.6, *[1.0] * 8]) == 1.0


def test_what_a_measurement_takes_is_known_before() -> None:
    rules = Rules(num_samples=17, sample_s=0.01, warmup_calls=3, soak_s=0.5)
    assert rules.expected_s(1e-6) == pytest.approx(0.5 + 20 * 0.01, rel=1e-3)
    assert rules.expected_s(0.05) == pytest.approx(0.5 + 20 * 0.05 + 3 * 0.05)
    # Of long ones fewer are taken, 5 at least: a round of 1 s has 10 of .1 s.
    assert rules.expected_s(0.1) == pytest.approx(0.5 + (10 + 3) * 0.1 + 3 * 0.1)
    assert rules.expected_s(1.0) == pytest.approx(0.5 + (5 + 3) + 3)
    assert rules_for("cuda", "sustained").soak_s > 0
    assert rules_for("cuda", "burst").soak_s == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["sustained", "burst"])
def test_a_gpu_is_timed_by_events(mode: Any) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device, dtype=torch.float16)
    rules = rules_for("cuda", mode)
    sensors = Sensors(device, "here")
    outcome = measure(lambda: x @ x, team=Alone(), device=device, sensors=sensors, rules=rules, is_collective=False)
    assert outcome.status in ("ok", "contaminated", "unstable")
    # No device computes 1e16 products a second.
    assert 2 * 4096**3 / 1e16 < min(outcome.samples_s) < 1


def test_a_long_call_is_repeated_as_often_as_the_budget_allows() -> None:
    def long_call() -> None:
        time.sleep(0.05)

    rules = replace(CALM, long_s=0.01, round_s=0.0, sample_s=0.01, soak_s=1.0)
    for left_s, num_samples, status in ((0.01, 1, "unstable"), (0.2, 2, "unstable"), (9.0, 5, "ok")):
        outcome = measure(
            long_call, team=Alone(), device=CPU, sensors=Sensors(CPU, "here"), rules=rules, is_collective=True,
            left_s=left_s,
        )  # fmt: skip
        assert (outcome.status, len(outcome.samples_s) <= num_samples) == (status, True)
        assert 0.049 < outcome.samples_s[0] < 1.0  # a busy machine wakes it late
        assert ("the budget left" in outcome.reason) == (status == "unstable")


def test_one_slow_look_at_queueing_does_not_make_a_kernel_wait_for_its_host() -> None:
    looks = [(1e-3, 5e-3), (1e-3, 5e-3), (4.9e-3, 5e-3), (1.1e-3, 5.1e-3), (1e-3, 5e-3)]
    assert hold_for(100, *usual(looks)) == (100, 0.0)
    assert hold_for(100, *looks[2])[1] > 0
    assert hold_for(100, *usual([(4.8e-3, 5e-3)] * 3 + [(1e-3, 5e-3)] * 2))[1] > 0


def test_the_backend_of_attention_is_told() -> None:
    from autoplan.profiler.operations.attention import backend_of
    from autoplan.profiler.operations.inputs import InputFactory
    from autoplan.profiler.operations.kernels import build

    shape = (1, 64, 4, 2, 16, 0)
    for kernel in ("sdpa flash", "sdpa"):
        factory = InputFactory(device=CPU, dtype="fp32", kernel=kernel)
        assert backend_of(build("attention", shape, factory)) == "flash cpu"
        assert backend_of(build("attention_backward", shape, factory)) == "flash cpu"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        factory = InputFactory(device=CPU, dtype="fp32", kernel="sdpa")
        assert backend_of(build("attention", shape, factory)) == "math"


def test_a_device_is_held_only_where_its_host_may_be_behind() -> None:
    assert hold_for(100, queued_s=1e-3, sample_s=5e-3) == (100, 0.0)  # kernels longer than their launches
    assert hold_for(100, queued_s=1e-3, sample_s=1e-3) == (100, pytest.approx(1.25e-3))  # until all are queued
    assert hold_for(1000, queued_s=5e-3, sample_s=5e-3) == (400, pytest.approx(2.5e-3))  # the most that a device queues
    assert hold_for(10, queued_s=0.1, sample_s=0.1)[0] == 1


@pytest.mark.gpu
def test_what_launches_take_is_no_part_of_a_short_kernel() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda", 0)
    x, rules = torch.ones(64, device=device), rules_for("cuda", "burst")

    def seconds(*, counts_host: bool) -> float:
        sensors = Sensors(device, "here")
        found = measure(
            lambda: x.add(1),
            team=Alone(),
            device=device,
            sensors=sensors,
            rules=rules,
            is_collective=False,
            counts_host=counts_host,
        )
        return float(np.median(found.samples_s))

    assert seconds(counts_host=False) < seconds(counts_host=True) < 1e-3


@pytest.mark.gpu
def test_what_comes_before_a_call_is_no_part_of_it() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda", 0)
    x = torch.randn(4096, 4096, device=device, dtype=torch.float16)

    def seconds(run: Any) -> float:
        found = measure(
            run,
            team=Alone(),
            device=device,
            sensors=Sensors(device, "here"),
            rules=rules_for("cuda", "sustained"),
            is_collective=False,
        )
        return float(np.median(found.samples_s))

    staged = StagedRun(prepare=lambda: x @ x @ x, run=lambda made: made @ x)
    assert seconds(staged) == pytest.approx(seconds(lambda: x @ x), rel=0.1)
