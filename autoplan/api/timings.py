"""Measured times: which ones a problem may be priced with, and the database that holds them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from autoplan.base.errors import InputError, StoreWarning
from autoplan.profiler.record import Fingerprint
from autoplan.profiler.selection import for_training
from autoplan.read.calibration import built_in_calibration
from autoplan.spec.framework import Framework
from autoplan.spec.problem import Problem
from autoplan.spec.timing import SHAPES, Calibration, Measurement, Operation, TimingTable, burst_factors
from autoplan.topology.cluster import ClusterSpec, DeviceSpec

if TYPE_CHECKING:
    from autoplan.profiler.store import Store

TIMINGS = ("aiconfigurator", "db")

# A profile runs them one by one, as torch does: frameworks fuse them, each in its way, unless they are eager as well.
_FUSED = ("rope", "swiglu", "swiglu_backward", "cross_entropy")


def with_timings(problem: Problem, source: str, url: str | None = None) -> Problem:
    """Return the problem with the times that `source` holds of its device: one of `TIMINGS`, "db" at `url`."""
    if source not in TIMINGS:
        raise InputError(f"no timings are known as {source!r}: use {' or '.join(TIMINGS)}")
    measurements = _published(problem) if source == "aiconfigurator" else usable_timings(problem, url)
    if not measurements:
        raise InputError(f"{source} has no timings of {problem.cluster.device.name}: leave --timings out")
    return with_measurements(problem, measurements, is_own=source == "db" and problem.framework.kernels.eager_layers)


def with_measurements(problem: Problem, measurements: list[Measurement], *, is_own: bool | None = None) -> Problem:
    """Return the problem with measured times: own ones are of the very kernels and layers that the framework runs."""
    own = problem.framework.kernels.eager_layers if is_own is None else is_own
    calibration, device = problem.calibration, problem.cluster.device
    # One that was fitted beside measured times was so beside bursts at the level of the shipped one.
    if calibration.fitted_with and calibration.fitted_with.timings:
        calibration = built_in_calibration(problem.framework, device)
    return replace(problem, timings=_table(measurements, device, calibration, is_own=own))


def stored_table(cluster: ClusterSpec, framework: Framework, url: str | None) -> TimingTable:
    """Return the times in the database at `url` that plans of `framework` are priced with."""
    device = cluster.device
    measurements = stored_timings(cluster, url, usable_operations(framework))
    if not measurements:
        raise InputError(f"the database has no timings of {device.name}: leave --timings out")
    calibration = built_in_calibration(framework, device)
    return _table(measurements, device, calibration, is_own=framework.kernels.eager_layers)


def _table(
    measurements: list[Measurement], device: DeviceSpec, calibration: Calibration, *, is_own: bool
) -> TimingTable:
    return TimingTable.of(measurements, slower=burst_factors(device, calibration), is_own=is_own)


def _published(problem: Problem) -> list[Measurement]:
    from autoplan.profiler.imports.aiconfigurator import read_measurements  # brings a reader of Parquet files

    device = problem.cluster.device
    operations = [operation for operation in SHAPES if operation != "experts" or problem.model.moe]
    # Its 8-bit products are those of serving: with them steps of 8-bit runs on H100 come out 6 to 15 % longer.
    wide = read_measurements(devices=[device.name], operations=operations, dtypes=["bf16", "fp16"])
    return for_training(wide, device)


def usable_operations(framework: Framework) -> list[Operation]:
    """Return the operations whose times in the database are those of the kernels that the framework runs."""
    return [name for name in SHAPES if framework.kernels.eager_layers or name not in _FUSED]


def usable_timings(problem: Problem, url: str | None) -> list[Measurement]:
    """Return the times of these operations that the database at `url` holds."""
    return stored_timings(problem.cluster, url, usable_operations(problem.framework))


def stored_timings(cluster: ClusterSpec, url: str | None, operations: Collection[Operation]) -> list[Measurement]:
    """Return the times of the machine that the cluster file names, else of the one with its device measured last."""
    device, machine = cluster.device.name, cluster.machine
    with opened_store(url, writable=False) as store:
        if machine is not None:
            wanted = Fingerprint(device=device, **asdict(machine))
        else:
            wanted = store.latest(device) or Fingerprint(device=device)
        return store.timings(wanted, operations=operations)


@contextmanager
def opened_store(url: str | None, *, writable: bool, creates: bool = True) -> Iterator[Store]:
    """Open the timing database; a StoreWarning tells in the end how many of its rows were passed over."""
    from autoplan.profiler.store import open_store  # brings SQLAlchemy

    with open_store(url, writable=writable, creates=creates) as store:
        yield store
        if store.num_unread:
            text = (
                f"rows of {store.name} that this version does not understand, and passes over: {store.num_unread:,}; "
                "`autoplan db check` lists them"
            )
            warnings.warn(text, StoreWarning, stacklevel=3)
