"""Timer of operations, with a statement of how certain its result is.

The protocol of `modelling` C8 and `closed-loop` 2 and 8: all ranks run the operation together; warm-up, an inner loop
long enough for the clock, a soak that brings the device to the clocks of training, then rounds of samples until one is
free of other load and of slow phases, and its median has settled.  On GPUs events enclose many launches; on CPUs
kernels are timed by the process's own CPU time, which others cannot lengthen by taking turns, and collectives by the
wall clock.

If a GPU finished a kernel before the host launched the next one, the result would be the host's time, which training
hides behind longer kernels.  So the device is held back until a whole sample is queued.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from autoplan.base.arrays import Floats
from autoplan.base.units import cleaned
from autoplan.profiler.machine.sensors import Sensors, Window, foreign_load
from autoplan.profiler.operations.inputs import ChainedRun, Run, StagedRun
from autoplan.profiler.protocol import Outcome, Rules
from autoplan.profiler.record import SLOWED

MAX_KEPT = 400  # maximum samples in a record
MAX_CALLS = 100_000  # maximum calls in a sample
MAX_WALL_OVER_CPU = 1.05  # above this ratio a kernel waited for its core (`closed-loop` 8)
HOST_BOUND = 0.8  # queueing time over sample time above which the device may wait for the host
HOST_LOOKS = 5  # measurements of the queueing time
HOLD_MARGIN = 1.25  # over the queueing time, which varies
# About 1,000 launches of 2 us: a held device queues 1,024 of them, then the host waits.
MAX_QUEUED_S = 2e-3
_SPIN_CYCLES = 10_000_000


class Team(Protocol):
    """Interface to the ranks that measure together, as needed by the timer."""

    def meet(self) -> None:
        """Wait for all ranks."""

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank."""

    def decide(self, value: float) -> float:
        """Return the value of a working rank on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """Samples of one rank in a round; `samples_s` is empty for an idle rank."""

    samples_s: tuple[float, ...]
    wall_over_cpu: float
    window: Window


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Samples of all ranks in a round, and what disturbed them."""

    samples_s: list[float]
    foreign: float  # share of other load
    is_slow: bool  # a device ran slower than usual
    slowdown: str  # what made a device slower; blank if nothing did
    reports: list[_Report]

    @property
    def disturbance(self) -> float:
        return self.foreign + bool(self.slowdown)

    @property
    def working(self) -> list[_Report]:
        return [report for report in self.reports if report.samples_s]

    @property
    def by_rank_s(self) -> tuple[float, ...]:
        return tuple(float(np.median(report.samples_s)) if report.samples_s else 0.0 for report in self.reports)


def median_interval(samples_s: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % bootstrap interval of the median."""
    drawn = np.random.default_rng(0).choice(np.asarray(samples_s), size=(500, len(samples_s)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.05, 0.95])
    return float(low), float(high)


def spread(samples_s: Sequence[float]) -> float:
    """Return the half-width of the interval of the median over the median."""
    low, high = median_interval(samples_s)
    return (high - low) / 2 / float(np.median(samples_s))


def scatter(samples_s: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    low, middle, high = np.quantile(samples_s, [0.25, 0.5, 0.75])
    return float((high - low) / middle)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def measure(
    run: Run | StagedRun | None,
    *,
    team: Team,
    device: torch.device,
    sensors: Sensors,
    rules: Rules,
    is_collective: bool,
    counts_host: bool = True,
    left_s: float = math.inf,
) -> Outcome:
    """Time `run` on all ranks at once; None means idle.  Every rank returns the same outcome.

    For a collective, the slowest rank of each sample counts; for a kernel, the median rank.  If `counts_host` is false,
    the device does not wait for the host between launches.  Long calls are repeated as often as `left_s` allows, but at
    least once.
    """
    until = time.monotonic() + left_s
    bench = _Bench(
        run=run, team=team, device=device, sensors=sensors, rules=rules, is_collective=is_collective, until=until
    )
    if rules.rest_s:
        time.sleep(rules.rest_s)
    first_s = bench.elapsed_s(1)
    team.meet()  # hangs occur in the first calls
    first_s = team.decide(first_s)
    if first_s >= rules.long_s:
        if bench.remaining_s() < first_s:
            reason = f"the budget left no time for a second call; the first took {first_s:.2g} s"
            return Outcome(samples_s=(first_s,), status="unstable", reason=reason)
        return bench.outcome(*bench.calls_of_sample(1), counts_host=counts_host)
    bench.repeat(rules.warmup_calls - 1)
    num_calls, elapsed_s = bench.calls_of_sample(rules.least_calls)
    for _ in range(math.ceil(rules.soak_s / elapsed_s)):
        bench.repeat(num_calls)
    return bench.outcome(num_calls, elapsed_s, counts_host=counts_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """Operation on one rank (idle if `run` is None), and the means to time it."""

    run: Run | StagedRun | None
    team: Team
    device: torch.device
    sensors: Sensors
    rules: Rules
    is_collective: bool
    until: float  # end of the budget on the monotonic clock

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def by_cpu_time(self) -> bool:
        return self.on_cpu and not self.is_collective

    def remaining_s(self) -> float:
        """Return the seconds left in the budget, as decided by one rank."""
        return self.team.decide(self.until - time.monotonic()) if self.until < math.inf else math.inf

    def outcome(self, num_calls: int, elapsed_s: float, *, counts_host: bool) -> Outcome:
        """Take rounds of samples until one is undisturbed with a settled median, or time runs out."""
        hold = 0
        if not self.on_cpu and not counts_host:
            queued_s, sample_s = usual([self._queueing(num_calls) for _ in range(HOST_LOOKS)])
            num_calls, hold_s = hold_for(num_calls, self.team.decide(queued_s), self.team.decide(sample_s))
            hold = round(hold_s * _spin_hz(self.device)) if hold_s else 0
        began, rounds, rules = time.perf_counter(), list[_Round](), self.rules
        num_fitting = int(min(max(self.remaining_s() / elapsed_s, 1.0), 1e9))
        num_samples = min(rules.samples_in_round(elapsed_s), num_fitting)
        clean_s: list[float] = []
        while True:
            reports = self.team.gather(self._report(num_calls, num_samples, hold))
            if fault := _fault(reports, num_samples):
                return Outcome(status="failed", reason=fault)
            rounds.append(_judged(reports, rules, is_collective=self.is_collective, on_cpu=self.on_cpu))
            if rounds[-1].foreign <= rules.most_foreign and not rounds[-1].slowdown:
                clean_s += rounds[-1].samples_s
            gives_up = rounds[-1].is_slow and not clean_s  # slow phases of a core last for minutes
            is_over = self.remaining_s() < num_samples * elapsed_s
            spent_s = time.perf_counter() - began
            if _is_settled(clean_s, rules) or gives_up or is_over or self.team.decide(spent_s) > rules.allowance_s:
                break
        best = min(rounds, key=lambda round_: round_.disturbance)
        conditions = _conditions(best, num_calls, is_collective=self.is_collective, by_cpu_time=self.by_cpu_time)
        if hold:
            conditions["launches"] = "ahead"
        return _outcome(best, clean_s, conditions, rules, num_samples)

    def calls_of_sample(self, num_calls: int) -> tuple[int, float]:
        """Return the number of calls (at least `num_calls`) for a sample that is long enough, and its seconds."""
        while True:
            rank_s = self._host_sample_s(num_calls) if self.on_cpu else self.elapsed_s(num_calls)
            elapsed_s = max(self.team.decide(rank_s), 1e-7)  # the same for all: collectives need equal calls everywhere
            if elapsed_s >= self.rules.sample_s or num_calls >= MAX_CALLS:
                return num_calls, elapsed_s
            num_longer = math.ceil(1.1 * num_calls * self.rules.sample_s / elapsed_s)
            num_calls = min(max(2 * num_calls, num_longer), MAX_CALLS)

    def repeat(self, num_calls: int) -> None:
        """Call the operation this many times, and wait for the device."""
        run = self.run
        if run is not None:
            for _ in range(num_calls):
                run()
            synchronise(self.device)

    def elapsed_s(self, num_calls: int) -> float:
        """Return the time of calls, including their preparation."""
        began = time.perf_counter()
        self.repeat(num_calls)
        return time.perf_counter() - began

    def _host_sample_s(self, num_calls: int) -> float:
        """Return the time of calls on the host, without their preparation."""
        run, clock = self.run, time.process_time if self.by_cpu_time else time.perf_counter
        if isinstance(run, StagedRun):
            total_s = 0.0
            for _ in range(num_calls):
                inputs = run.prepare()
                began = clock()
                run.run(inputs)
                total_s += clock() - began
                del inputs
            return total_s
        began = clock()
        if run is not None:
            for _ in range(num_calls):
                run()
        return clock() - began

    def _report(self, num_calls: int, num_samples: int, hold: int) -> _Report:
        """Take this rank's samples, each the mean of calls back to back; `hold` as in `_device_samples_s`."""
        run = self.run
        self.sensors.start()
        if run is None:
            return _Report(samples_s=(), wall_over_cpu=1.0, window=self.sensors.stop())
        wall, cpu = time.perf_counter(), time.process_time()
        if self.on_cpu:
            lengths = np.array([self._host_sample_s(num_calls) for _ in range(num_samples)])
        else:
            lengths = _device_samples_s(run, num_calls, num_samples, self.sensors, hold)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        calls = num_calls * (run.num_links if isinstance(run, ChainedRun) else 1)
        samples_s = tuple((lengths / calls).tolist())
        return _Report(samples_s=samples_s, wall_over_cpu=wall / max(cpu, 1e-9), window=self.sensors.stop())

    def _queueing(self, num_calls: int) -> tuple[float, float]:
        """Return (seconds to queue calls on the host, seconds until they are finished)."""
        run, began = self.run, time.perf_counter()
        if run is not None:
            for _ in range(num_calls):
                run()
        queued_s = time.perf_counter() - began
        synchronise(self.device)
        return queued_s, time.perf_counter() - began


def _judged(reports: list[_Report], rules: Rules, *, is_collective: bool, on_cpu: bool) -> _Round:
    """Combine the reports of all ranks on a round, with what disturbed it."""
    times = np.array([report.samples_s for report in reports if report.samples_s])
    is_slow = max(report.window.pace for report in reports) > 1 + rules.most_slowdown
    return _Round(
        samples_s=(times.max(axis=0) if is_collective else np.median(times, axis=0)).tolist(),
        foreign=foreign_load([report.window for report in reports], on_cpu=on_cpu),
        is_slow=is_slow,
        slowdown=_slowdown(reports, is_slow=is_slow),
        reports=reports,
    )


def _is_settled(samples_s: Sequence[float], rules: Rules) -> bool:
    """Return whether the median of the samples is certain enough."""
    return bool(samples_s) and spread(samples_s) <= rules.most_spread and scatter(samples_s) <= rules.most_scatter


def _outcome(
    best: _Round, clean_s: Sequence[float], conditions: dict[str, str], rules: Rules, num_samples: int
) -> Outcome:
    """Return the outcome of undisturbed rounds with so many samples, or else of the `best` disturbed round."""
    if not clean_s:
        slowed = f"{SLOWED}: {best.slowdown}" if best.slowdown else ""
        why = slowed or f"other load took {100 * best.foreign:.0f} % of the machine"
        return Outcome(
            samples_s=tuple(best.samples_s),
            status="contaminated",
            reason=why,
            conditions=conditions,
            by_rank_s=best.by_rank_s,
        )
    samples_s, why = tuple(clean_s[-MAX_KEPT:]), ""
    if num_samples < rules.least_samples:
        why = f"the budget left time for {num_samples} samples"
    elif not _is_settled(clean_s, rules):
        why = (
            f"after {rules.allowance_s:g} s the median is known to {100 * spread(samples_s):.0f} %, "
            f"half of the samples lie within {100 * scatter(samples_s):.0f} %"
        )
    return Outcome(
        samples_s=samples_s,
        status="unstable" if why else "ok",
        reason=why,
        conditions=conditions,
        by_rank_s=best.by_rank_s,
    )


def hold_for(num_calls: int, queued_s: float, sample_s: float) -> tuple[int, float]:
    """Return (calls per sample, seconds to hold the device); `num_calls` queue in `queued_s`, run in `sample_s`."""
    if queued_s <= HOST_BOUND * sample_s:
        return num_calls, 0.0
    calls = max(int(num_calls * min(MAX_QUEUED_S / queued_s, 1.0)), 1)
    return calls, HOLD_MARGIN * queued_s * calls / num_calls


def usual(timings: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of several (seconds to queue, seconds until finished), since the host may be busy once."""
    queued_s, sample_s = np.median(np.asarray(timings), axis=0)
    return float(queued_s), float(sample_s)


def _spin(num_cycles: int) -> None:
    """Queue a kernel that only waits for this many cycles."""
    torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call]


def _spin_hz(device: torch.device) -> float:
    """Return the cycles per second of the waiting kernel, measured because devices count different clocks."""
    _spin(_SPIN_CYCLES)  # wakes the clocks
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    _spin(_SPIN_CYCLES)
    last.record()
    synchronise(device)
    return _SPIN_CYCLES / (1e-3 * first.elapsed_time(last))


def _device_samples_s(run: Run | StagedRun, num_calls: int, num_samples: int, sensors: Sensors, hold: int) -> Floats:
    """Time `num_calls` calls on the device with events in its queue, without their preparation.

    The preparation runs with the calls, and then alone the same number of times: an event between the two would follow
    an empty queue and include launch times, which training hides.  Before each sample the device idles for `hold`
    cycles.
    """
    marks: list[Any] = []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        marks[-1].record()

    for _ in range(num_samples):
        if hold:
            _spin(hold)
        mark()
        for _ in range(num_calls):
            run()
        mark()
        if isinstance(run, StagedRun):
            for _ in range(num_calls):
                run.prepare()
            mark()
    sensors.sample()
    marks[-1].synchronize()
    times_s = np.array([0.0, *(1e-3 * marks[0].elapsed_time(event) for event in marks[1:])]).reshape(num_samples, -1)
    lengths = np.diff(times_s, axis=1)
    return lengths[:, 0] - lengths[:, 1:].sum(axis=1)


def _slowdown(reports: Sequence[_Report], *, is_slow: bool) -> str:
    """Describe what made a device slower than usual; empty if nothing did."""
    throttling = max(report.window.slowdown for report in reports)
    pace = max(report.window.pace for report in reports)
    return throttling or (f"{100 * (pace - 1):.0f} % slower than usual" if is_slow else "")


def _fault(reports: Sequence[object], num_samples: int) -> str:
    """Describe what is wrong with the results of the ranks; empty if nothing is."""
    for rank, report in enumerate(reports):
        if not isinstance(report, _Report) or not isinstance(report.samples_s, tuple):
            return cleaned(f"rank {rank} returned no times but {str(report)[:60]!r}")
        times = report.samples_s
        if times and not (
            len(times) == num_samples and all(math.isfinite(sample_s) and sample_s > 0 for sample_s in times)
        ):
            return cleaned(f"rank {rank} returned no times but {str(times[:3])[:60]}")
    return ""


def _conditions(best: _Round, num_calls: int, *, is_collective: bool, by_cpu_time: bool) -> dict[str, str]:
    working = best.working
    conditions = {"calls": str(num_calls), "other_load": f"{100 * best.foreign:.1f} %"}
    if by_cpu_time:
        conditions["clock"] = "cpu time"
        conditions["pace"] = f"{max(report.window.pace for report in working):.2f}"
        waited = float(np.median([report.wall_over_cpu for report in working]))
        if waited > MAX_WALL_OVER_CPU:
            conditions["wall_over_cpu"] = f"{waited:.2f}"
    if len(working) > 1 and not is_collective:
        medians = [float(np.median(report.samples_s)) for report in working]
        conditions["slowest_device"] = f"+{100 * (max(medians) / float(np.median(medians)) - 1):.1f} %"
    windows = [report.window for report in working]
    for name, values in (
        ("clock_mhz", [window.clock_mhz for window in windows]),
        ("power_w", [window.power_w for window in windows]),
    ):
        if any(values):
            conditions[name] = f"{float(np.median(values)):.0f}"
    return conditions
