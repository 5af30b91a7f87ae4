"""Times that the price of a plan looks up, and the records that serve each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from autoplan.spec.operations import Operation
from autoplan.spec.timing import TimeSource

# How a time is had: as `Provenance` has it for measured ones; of a backward pass from its forward pass, by the ratio of
# their references; or not measured at all, from curves and datasheets.
Served = Literal["measured", "disturbed", "interpolated", "scaled", "by its forward pass", "not measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededTime:
    """Time of one shape that the price of a plan looks up."""

    operation: Operation
    dtype: str
    shape: tuple[int, ...]  # as `SHAPES` names it
    served: Served
    seconds: float | None  # None where it was not measured
    # Share of each term of the step that grows with it; of one that was not measured, the terms that a measurement
    # would enter, without a share.
    terms: dict[str, float | None]
    step_share: float
    sources: tuple[TimeSource, ...]  # what it is made of, those that count most first


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFacts:
    """Origin of a record: who measured it, where and when, and how calm the machine was."""

    key: str
    kernel: str  # what ran, with the backend that it chose
    device: str
    host: str
    measured_by: str
    measured_at: str  # ISO 8601, UTC
    age_days: float | None  # None where nobody wrote when
    driver: str
    torch: str
    collectives: str
    other_load: str  # share of the machine, in words
    status: str
    mode: str
    source: str  # of an imported record
    spread: float | None  # standard deviation of its samples over their median; None of a single one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSources:
    """Origin of the time of a step, term by term and shape by shape."""

    timings: str  # what the plan was priced with: db, aiconfigurator; blank: nothing measured
    database: str
    machine: str  # that the times were read for, in words
    terms_s: dict[str, float]
    measured_shares: dict[str, float]  # of every term: what rests on times that were measured, in one way or another
    needed: tuple[NeededTime, ...]  # those with the largest share of the step first
    # Of every term that rests on measured times: standard deviation of the logarithm of these, all of them together.
    spreads: dict[str, float]
    records: dict[str, RecordFacts] = field(default_factory=dict)  # by the beginnings of keys in `sources`
    unknown: str = ""  # why some of the records are not told of
