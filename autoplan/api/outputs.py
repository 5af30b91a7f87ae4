"""Types of the --json output of commands, from which `schema` derives JSON Schemas.

Import this module only where a command or a schema needs it: it imports everything that it describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoplan.profiler.record import Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store import Holding, Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Output of `predict`: the number of rows with each outcome."""

    out: str
    runs: int
    verdicts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Output of `calibrate`: median errors of the step time, as shares."""

    out: str
    runs: int
    median_error_before: float
    median_error: float  # each run left out of the fit in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """Output of `profile`: measurements of each operation by how they ended."""

    planned: int
    outcomes: dict[str, dict[str, int]]
    elapsed_s: float
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMeasurement:
    """A measurement that `profile --dry-run` shows."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    kernel: str
    mode: str
    expected_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMeasurements:
    """Output of `profile --dry-run`; `sure` are probabilities that the order of the plans is right, now and after."""

    device: str
    ranks: int
    nodes: int
    expected_s: float
    budget_s: float
    known: int
    sure: float | None
    sure_after: float | None
    measurements: tuple[PlannedMeasurement, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRate:
    """Rate of devices, links or groups that `profile --health` measured, in FLOP/s or bytes/s of a device."""

    what: str
    number: int  # of devices, pairs or groups
    usual: float
    least: float
    described: float | None  # what the cluster file makes of it


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPart:
    """A part that `profile --health` found slower than its peers: of a device, or between two."""

    part: str  # device, link, nic or pair
    hosts: tuple[str, ...]
    devices: tuple[int, ...]  # index of each in its node
    rate_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHealth:
    """Output of `profile --health`."""

    device: str
    ranks: int
    nodes: int
    elapsed_s: float
    rates: tuple[CheckedRate, ...]
    slow: tuple[SlowPart, ...]
    disturbance: str  # what disturbed the products in each visit; blank: there was a calm one
    rounds: int  # in which all pairs meet
    rounds_left: int  # for which the budget left no time


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Output of `topo`: the quotient graph and its places, in SI units."""

    cluster: str
    num_nodes: int
    num_devices: int
    bisection_bytes_per_s: float | None
    vertices: list[dict[str, Any]]
    edges: list[dict[str, Any]]
    places: dict[str, Any]
    traffic: dict[str, Any] | None = None  # of a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTopology:
    """Output of `topo` where parts are unlike."""

    cluster: str
    parts: list[Topology]
    between: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Output of `db info`."""

    database: str
    schema: int
    holdings: list[Holding]
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Output of `db list`: a record; `review` says whether a person has approved it, or it is proposed or hidden."""

    key: str
    seconds: float | None
    review: str
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """Output of `db list --runs`: a training run."""

    key: str
    seconds: float | None
    review: str
    run: RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Output of `db show`: a record, who hid it, and all that was said of it, the newest word first."""

    key: str
    seconds: float | None
    record: Record
    hidden: Mark | None
    words: list[Mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """Output of `db show`: a training run, who hid it, and all that was said of it."""

    key: str
    seconds: float | None
    run: RunRecord
    hidden: Mark | None
    words: list[Mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Output of `db export`."""

    file: str
    records: int
    runs: int
    marks: int  # that hide records or runs, or take them back into use


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """Output of `db hide` and `db approve`."""

    changed: int
    as_before: int
