"""Measured timings: which ones a problem can be priced with, and the database that stores them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.base.errors import AutoplanError, InputError, StoreWarning
from autoplan.base.files import is_file
from autoplan.profiler.contention import contention_shares
from autoplan.profiler.record import Fingerprint
from autoplan.profiler.selection import for_training
from autoplan.readers.calibration import built_in_calibration
from autoplan.spec.calibration import Calibration, burst_factors
from autoplan.spec.framework import Framework
from autoplan.spec.measurement import Measurements
from autoplan.spec.operations import COLLECTIVES, SHAPES, Operation
from autoplan.spec.pinned_timings import PinnedTimings
from autoplan.spec.problem import Problem
from autoplan.spec.timing import NOWHERE, TimingOrigin, TimingTable
from autoplan.topology.cluster import ClusterSpec, DeviceSpec

if TYPE_CHECKING:
    from autoplan.profiler.store import HostsApart, Store

TIMINGS = ("aiconfigurator", "db")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTimings:
    """Measurements that serve a problem, and where they were found."""

    measurements: Measurements
    contention: Mapping[Operation, float] = field(default_factory=dict)  # share of overlapped time that overlap costs
    origin: TimingOrigin = NOWHERE


def with_timings(problem: Problem, source: str, url: str | None = None) -> Problem:
    """Return the problem with the times of its device from `source`: one of `TIMINGS`; "db": the database at `url`."""
    if source not in TIMINGS:
        raise InputError(f"unknown timings {source!r}: use {' or '.join(TIMINGS)}")
    is_stored = source == "db"
    usable = usable_timings(problem, url) if is_stored else FoundTimings(measurements=_published(problem))
    if not usable.measurements:
        raise InputError(f"{source} has no timings of {problem.cluster.device.name}: leave --timings out")
    return with_measurements(problem, usable, is_own=is_stored and problem.framework.is_trainer)


def with_measurements(problem: Problem, timings: FoundTimings, *, is_own: bool | None = None) -> Problem:
    """Return the problem with measured times; `is_own`: of the kernels and layers that the framework itself runs."""
    runs_same_kernels = problem.framework.is_trainer if is_own is None else is_own
    calibration, device = problem.calibration, problem.cluster.device
    # One that was fitted beside measured times was so beside bursts at the level of the shipped one.
    if calibration.fitted_with and calibration.fitted_with.timings:
        calibration = built_in_calibration(problem.framework, device)
    return replace(problem, timings=_table(timings, device, calibration, is_own=runs_same_kernels))


def stored_table(cluster: ClusterSpec, framework: Framework, url: str | None) -> TimingTable:
    """Return the timings in the database at `url` that price plans of `framework`."""
    device = cluster.device
    timings = stored_timings(cluster, url, framework.timed_operations, framework.layer_kernels)
    if not timings.measurements:
        raise InputError(f"the database has no timings of {device.name}: leave --timings out")
    calibration = built_in_calibration(framework, device)
    return _table(timings, device, calibration, is_own=framework.is_trainer)


def pinned_problem(problem: Problem, source: str, pinned: PinnedTimings, url: str | None) -> Problem:
    """Return the problem with the times that a plan file carries.

    A StoreWarning tells where their source holds others by now: the database at `url`, else the one that they came
    from, if it is at hand.  Published ones are read where they were published.
    """
    if source == "db":
        if moved := _moved(problem, pinned, url):
            warnings.warn(moved, StoreWarning, stacklevel=2)
        return replace(problem, timings=pinned.table(problem.cluster.device.name))
    problem = with_timings(problem, source, url)
    if problem.timings.digest != pinned.digest:
        text = f"the tables of {source} are not those that the plan was priced with: it is priced with the current ones"
        warnings.warn(text, StoreWarning, stacklevel=2)
    return problem


def _moved(problem: Problem, pinned: PinnedTimings, url: str | None) -> str:
    """Describe how the times have changed since they were pinned; empty if they have not, or if it is unknown."""
    if url is None and not is_at_hand(pinned.database):
        return ""
    try:
        today = with_timings(problem, "db", url or pinned.database or None).timings
    except AutoplanError:
        if url is not None:
            raise
        return ""
    if today.digest == pinned.digest:
        return ""
    return (
        f"{today.origin.database} has other timings than the plan: {_differences(pinned, today)}; the plan keeps its "
        "own, `autoplan estimate PLAN --timings db` uses the current ones"
    )


def is_at_hand(database: str) -> bool:
    """Return whether to use a database that the user did not name: only an existing file, never a server."""
    return bool(database) and "://" not in database and is_file(Path(database))


def _differences(pinned: PinnedTimings, today: TimingTable) -> str:
    before = {(name, time.shape): time.seconds for name, times in pinned.times.items() for time in times}
    now = {
        (f"{operation} {dtype}", shape): seconds
        for (operation, dtype), times in today.times.items()
        for shape, seconds in times.exact.items()
    }
    changed = sum(seconds != now[key] for key, seconds in before.items() if key in now)
    parts = {
        "changed": changed,
        "gone": len(before.keys() - now.keys()),
        "new": len(now.keys() - before.keys()) if pinned.num_pinned == pinned.num_times else 0,
    }
    words = [f"{number:,} {change}" for change, number in parts.items() if number]
    if today.origin.machine != pinned.machine:
        words.append(f"of {today.origin.machine} instead of {pinned.machine}")
    return ", ".join(words) or "other shapes"


def _table(timings: FoundTimings, device: DeviceSpec, calibration: Calibration, *, is_own: bool) -> TimingTable:
    slower = burst_factors(device, calibration)
    return TimingTable.of(
        timings.measurements, slower=slower, is_own=is_own, contention=timings.contention, origin=timings.origin
    )


def _published(problem: Problem) -> Measurements:
    from autoplan.profiler.imports.aiconfigurator import read_measurements  # brings a reader of Parquet files

    device = problem.cluster.device
    operations = [operation for operation in SHAPES if operation != "experts" or problem.model.moe]
    # Its 8-bit products are those of serving: with them steps of 8-bit runs on H100 come out 6 to 15 % longer.
    wide = read_measurements(devices=[device.name], operations=operations, dtypes=["bf16", "fp16"])
    return Measurements.of(for_training(wide, device))


def usable_timings(problem: Problem, url: str | None) -> FoundTimings:
    """Return the times of these operations in the database at `url`."""
    framework = problem.framework
    return stored_timings(problem.cluster, url, framework.timed_operations, framework.layer_kernels)


def stored_timings(
    cluster: ClusterSpec, url: str | None, operations: Collection[Operation], layer_kernels: str = ""
) -> FoundTimings:
    """Return the timings of the machine in the cluster file, or of the last measured machine with its device.

    Of units of a trainer only those count whose kernels' names begin with `layer_kernels`.
    """
    with opened_store(url, writable=False) as store:
        machine = machine_of(cluster, store) or Fingerprint(device=cluster.device.name)
        origin = TimingOrigin(database=store.name, machine=machine.words)
        measurements = store.timings(machine, operations=operations, layer_kernels=layer_kernels)
        contention = contention_shares(store.beside_products(machine), measurements.of_operations(COLLECTIVES))
        timings = FoundTimings(measurements=measurements, contention=contention, origin=origin)
        if store.hosts_apart:
            _warn_of_hosts(store.hosts_apart)
        return timings


def machine_of(cluster: ClusterSpec, store: Store) -> Fingerprint | None:
    """Return the machine in the cluster file, or the last measured one with its device; None if unknown."""
    device, machine = cluster.device.name, cluster.machine
    if machine is None:
        return store.latest(device)
    return Fingerprint(device=device, **asdict(machine) | {"power_cap_w": machine.power_cap_w or _usual_cap_w(cluster)})


def _usual_cap_w(cluster: ClusterSpec) -> int:
    """Return the power cap of devices without other information: that of their datasheet."""
    return 0 if cluster.device.vendor == "cpu" else round(cluster.device.tdp_w)


def _warn_of_hosts(apart: list[HostsApart]) -> None:
    worst = max(apart, key=lambda pair: pair.ratio)
    slow, fast = (name or "a host without a name" for name in (worst.slow, worst.fast))
    text = (
        f"hosts differ in {len(apart):,} measured shape{'s' if len(apart) > 1 else ''}: {worst.what} takes "
        f"{100 * (worst.ratio - 1):.0f} % longer on {slow} than on {fast}; the median host counts, of two the slower"
    )
    warnings.warn(text, StoreWarning, stacklevel=4)


@contextmanager
def opened_store(url: str | None, *, writable: bool, creates: bool = True) -> Iterator[Store]:
    """Open the timing database; on closing, a StoreWarning tells how many of its rows were skipped."""
    from autoplan.profiler.store import open_store  # brings SQLAlchemy

    with open_store(url, writable=writable, creates=creates) as store:
        yield store
        if store.num_unread:
            text = (
                f"rows of {store.name} that this version does not understand were skipped: {store.num_unread:,}; "
                "`autoplan db check` lists them"
            )
            warnings.warn(text, StoreWarning, stacklevel=3)
