"""Timeline of a step: the events of every rank, and its memory over time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autoplan.base.arrays import Floats
from autoplan.spec.estimate import StagePlace
from autoplan.spec.terms import STEP_TERMS, STREAM_OF


class Event(NamedTuple):
    """An interval of a rank's time; `kind` is a pass ("forward"), a term of the step or "message".

    `is_hidden`: it overlaps with the rank's work and adds nothing to the step; the other events of a rank fill the step
    without gaps.
    """

    stream: str  # of STREAMS
    kind: str
    name: str  # for people
    start_s: float
    duration_s: float
    microbatch: int | None = None
    chunk: int | None = None  # in model order
    is_hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """Timeline of one pipeline rank."""

    place: StagePlace
    ranks: tuple[int, ...]  # global ranks that do the same
    passes: tuple[Event, ...]  # undivided, including their waits, over all streams
    pass_terms_s: Mapping[tuple[str, int], Mapping[str, float]]  # of one pass by (kind, chunk), without zeros
    other_events: tuple[Event, ...]  # messages and waits of the pipeline, then end-of-step terms
    memory_time_s: Floats  # times from which the rank holds
    memory_bytes: Floats  # these bytes

    def events(self) -> Iterator[Event]:
        """Yield all events, first the passes, divided over the streams."""
        for event in self.passes:
            start = event.start_s
            terms = self.pass_terms_s[event.kind, event.chunk or 0]
            for stream, names in itertools.groupby(terms, STREAM_OF.__getitem__):
                took = list(names)
                seconds = sum(terms[name] for name in took)
                kind, name = event.kind, event.name
                if stream != "compute":
                    kind, name = took[0], f"{took[0]} of {event.name}".replace("_", " ")
                yield event._replace(stream=stream, kind=kind, name=name, start_s=start, duration_s=seconds)
                start += seconds
        yield from self.other_events

    def terms_s(self) -> dict[str, float]:
        """Terms of the step on this rank: its work, its waits, and the end of the step."""
        sums = dict.fromkeys(STEP_TERMS, 0.0)
        for event in self.passes:
            for name, seconds in self.pass_terms_s[event.kind, event.chunk or 0].items():
                sums[name] += seconds
        for event in self.other_events:
            if not event.is_hidden:
                sums[event.kind] += event.duration_s
        return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Timeline of a plan's step: ranks by stage, on a mixed cluster one replica kind after another."""

    step_s: float
    pipeline_s: float  # part of the step until the end of the last backward pass
    order_error: float  # `pipeline_s` of the estimate relative to the simulated order, minus 1
    ranks: tuple[RankTimeline, ...]
