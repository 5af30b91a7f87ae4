"""Content of one line of a training log, and the interface of its readers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

# Where a step time comes from, the best first.  Of `tokens` (a second, of each device) and `samples` (a second, of the
# job) it follows with the batch that is trained; of `moments`, at which lines were written, from their difference;
# `bar` is tqdm's moving average, `timers` are parts of a step added up, `whole` is the mean of a run from its start.
Source = Literal["stated", "tokens", "samples", "moments", "bar", "timers", "whole"]

Pause = Literal["evaluation", "checkpoint"]

MOST_STEP_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Content of a line, as far as it was understood.

    `times` holds, by source, seconds of a step, or what `Source` names: a rate a second or a moment in seconds.
    `pause` says that what the line ends or begins may take part in the next step's time.  `num_sequences` and `seq_len`
    are of the step's batch, which some runs let grow.
    """

    times: tuple[tuple[Source, float], ...] = ()
    step: int | None = None  # the one that has just ended
    num_sequences: int | None = None
    seq_len: int | None = None
    loss: float | None = None
    allocated_bytes: float | None = None  # at the peak
    reserved_bytes: float | None = None
    pause: Pause | None = None


class LineReader(Protocol):
    """Reader of the lines of one log, which may remember those before."""

    def read(self, line: str) -> Seen | None:
        """Return what a line says; None where it is not one of the framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """Lines that a framework writes: its usual name, what a line with a time looks like, and who reads them."""

    name: str
    looked_for: str
    reader: Callable[[], LineReader]


def quantity(text: str | None, factor: float = 1.0) -> float | None:
    """`text` as a positive finite number times `factor`; None for anything else.  Commas may set off thousands."""
    value = number(text)
    return value * factor if value is not None and value > 0 else None


def number(text: str | None) -> float | None:
    """`text` as a finite number; None for anything else."""
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
