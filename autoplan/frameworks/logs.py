"""Step times in the log of any framework."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import get_args

from autoplan.base.errors import InputError
from autoplan.base.files import is_file
from autoplan.base.units import check_count
from autoplan.frameworks.common.log_lines import MAX_STEP_S, LineContent, LineSplitter, ReadLine, Source, split_label
from autoplan.frameworks.registry import LOGS
from autoplan.spec.framework import Framework

WARMUP = 2  # first steps after a start, in which kernels are tuned and compiled, memory reserved, connections opened

LOG_NAME = re.compile(r"(.*?)\.(log|out|err|stdout|stderr)(\.gz)?", re.DOTALL)
HEAD_BYTES = 2**22  # a file that is not named like a log must contain a step time in so many bytes
MAX_BYTES = 2**32  # read from a log, after decompression
_CHUNK = 2**20
_GZIP = b"\x1f\x8b"
_MAX_TIMES = 100_000  # the newest times kept per source, since a log may be endless
_MAX_TIMERS = 1_000  # the newest times kept per timer and rank
_MAX_LABELS = 100_000
_NEAR = 64  # times of the recent past that a slower rank may still correct
_BAR_FORGETS = 10  # steps after which the first one has 3 % of the weight in tqdm's moving average (newest: .3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Batch of a step, if known: rates are converted with it, and steps with another batch left out."""

    num_sequences: int
    seq_len: int
    num_devices: int

    def __str__(self) -> str:
        return f"{self.num_sequences:,} sequences of {self.seq_len:,} tokens"

    def is_other(self, content: LineContent) -> bool:
        """Return whether a line belongs to a step with another batch."""
        return content.num_sequences not in (None, self.num_sequences) or content.seq_len not in (None, self.seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """Run described by a log, in the order of its lines.

    Each of `step_s` is the time of one step, or the mean of several steps that were logged together.  Excluded are
    times that cover one of the first `warmup` steps after a start or a step with another batch than the plan's, and, if
    any others remain, times that an evaluation or a checkpoint may be part of.
    """

    framework: str
    source: Source  # where the times come from
    step_s: tuple[float, ...]
    num_steps: int  # steps covered by `step_s`
    losses: tuple[float, ...] = ()
    allocated_bytes: float | None = None  # highest peak of the reporting ranks
    reserved_bytes: float | None = None
    # Medians of parts of a step, which may overlap, by rank, or the least and the most of all ranks.
    timers_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def median_s(self) -> float:
        """Median step time, which is robust against disturbed steps."""
        return float(median(self.step_s))

    @property
    def interval_s(self) -> tuple[float, float]:
        """95 % confidence interval of the median step time; with fewer than six times, their range.

        From order statistics, for any distribution: Conover, Practical Nonparametric Statistics, section 3.2.
        """
        ordered = sorted(self.step_s)
        at = max(math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2), 0)
        return ordered[at], ordered[-1 - at]

    def peak_bytes(self, framework: Framework) -> float | None:
        """Return the peak that is predicted for `framework`, if the log told it."""
        return self.allocated_bytes if framework.memory.logs_memory == "allocated" else self.reserved_bytes


@dataclass(slots=True)
class _Time:
    step: int
    num_steps: int
    step_s: float
    counts: bool  # covers none of the first steps and no step with another batch
    is_paused: bool


@dataclass(slots=True)
class _Series:
    """Times of one source."""

    times: deque[_Time] = field(default_factory=lambda: deque(maxlen=_MAX_TIMES))
    first: int | None = None  # first step since the last start
    previous: int | None = None  # last step whose end was logged
    moment: float | None = None  # value logged for that step
    is_paused: bool = False
    paused_until: int = -1  # step

    def counted(self) -> list[_Time]:
        counting = [time for time in self.times if time.counts]
        return [time for time in counting if not time.is_paused] or counting


@dataclass(slots=True)
class _Dialect:
    """Values read so far from the lines of one framework."""

    name: str
    read: ReadLine
    series: dict[Source, _Series] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)  # step by label
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_TIMES))
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    timers: dict[str, dict[str, deque[float]]] = field(default_factory=dict)  # by name and rank


class LogReader:
    """Reader of a log while it is written; several ranks may write to it.

    If ranks report the same step, the slowest one counts.  A rank whose step number decreases has restarted.
    """

    def __init__(self, batch: Batch | None = None, *, warmup: int = WARMUP) -> None:
        check_count("warmup", warmup, at_least=0)
        self._batch, self._warmup = batch, warmup
        self._splitter = LineSplitter()
        self._other: LineContent | None = None  # the last step with another batch
        self._is_other = False  # whether the current steps have another batch
        self._dialects = [_Dialect(name=log.name, read=log.make_reader()) for log in LOGS.values()]

    def feed(self, data: bytes, now_s: float | None = None) -> list[str]:
        """Process new data of the log and return the lines that it completes; `now_s` is the time of live data."""
        lines = self._splitter.feed(data)
        for line in lines:
            self._read(line, now_s)
        return lines

    @property
    def has_times(self) -> bool:
        """Return whether a line contained a time or a rate, including those of excluded steps."""
        return any(dialect.series for dialect in self._dialects)

    @property
    def num_steps(self) -> int:
        """Number of steps timed so far, without excluded ones."""
        best = self._best()
        return sum(time.num_steps for time in best[2]) if best else 0

    def finish(self) -> LoggedRun:
        """Return the run described by the log; raises InputError if it contains no step time."""
        for line in self._splitter.finish():
            self._read(line, None)
        run = self.so_far()
        if run is None:
            looked_for = "; ".join(f"{log.name}: {log.looked_for}" for log in LOGS.values())
            hint = "" if self.has_times else f".  Looked for: {looked_for}"
            raise InputError(f"{self.lacks}{hint}")
        return run

    def so_far(self) -> LoggedRun | None:
        """Return the run described by the log so far; None if it contains no step time yet."""
        best = self._best()
        if best is None:
            return None
        dialect, source, times = best
        return LoggedRun(
            framework=dialect.name,
            source=source,
            step_s=tuple(time.step_s for time in times),
            num_steps=sum(time.num_steps for time in times),
            losses=tuple(dialect.losses),
            allocated_bytes=dialect.allocated_bytes,
            reserved_bytes=dialect.reserved_bytes,
            timers_s={
                name: {whose: float(median(list(times)[self._warmup :] or times)) for whose, times in times_of.items()}
                for name, times_of in dialect.timers.items()
            },
        )

    def _best(self) -> tuple[_Dialect, Source, list[_Time]] | None:
        """Return the most exact source with times; if frameworks share it, the framework with the most times."""
        for source in get_args(Source):
            timed = [
                (dialect, source, times)
                for dialect in self._dialects
                if source in dialect.series and (times := dialect.series[source].counted())
            ]
            if timed:
                return max(timed, key=lambda item: len(item[2]))
        return None

    @property
    def other_batch(self) -> str:
        """Remark on the last batch in the log that differs from the plan's; blank if there is none."""
        if self._batch is None or self._other is None:
            return ""
        trained = replace(
            self._batch,
            num_sequences=self._other.num_sequences or self._batch.num_sequences,
            seq_len=self._other.seq_len or self._batch.seq_len,
        )
        return f"steps in the log have {trained}, those of the plan {self._batch}"

    @property
    def lacks(self) -> str:
        """Reason why the log gives no step time, if it gives none."""
        series_seen = [(dialect.name, source) for dialect in self._dialects for source in dialect.series]
        rates = [name for name, source in series_seen if source in ("tokens", "samples")]
        if rates and self._batch is None:
            return f"the log of {rates[0]} has only rates: give the global batch to read times from it"
        if self.other_batch:
            return f"the log has no step time of the plan's batch: {self.other_batch}"
        if series_seen:
            return (
                f"the log of {series_seen[0][0]} has no step time after the first {self._warmup} steps, which warm up: "
                "log more steps, or more often"
            )
        return "the log contains no step time"

    def _read(self, line: str, now_s: float | None) -> None:
        label, text = split_label(line)
        for dialect in self._dialects:
            content = dialect.read(text)
            if content is not None:
                self._take(dialect, label, content, now_s)

    def _take(self, dialect: _Dialect, label: str, content: LineContent, now_s: float | None) -> None:
        if content.loss is not None:
            dialect.losses.append(content.loss)
        for name in ("allocated_bytes", "reserved_bytes"):
            if (peak := getattr(content, name)) is not None:
                setattr(dialect, name, max(peak, getattr(dialect, name) or 0.0))
        for name, whose, seconds in content.timers:
            times_of = dialect.timers.setdefault(name, {})
            times_of.setdefault(whose, deque(maxlen=_MAX_TIMERS)).append(seconds)
        if content.pause:
            for item in self._dialects:  # the Trainer and DeepSpeed write to the same log
                for series in item.series.values():
                    series.is_paused = True
        if not content.times:
            return
        times = dict(content.times)
        was_other = self._is_other
        if self._batch and (content.num_sequences or content.seq_len):
            self._is_other = self._batch.is_other(content)
            self._other = content if self._is_other else self._other
        is_other = was_other or self._is_other  # a time may cover both kinds of steps
        if content.step is not None:
            if now_s is not None:
                times.setdefault("moments", now_s)
            if content.step < dialect.last.get(label, 0):  # this rank has restarted
                dialect.last.clear()
                for series in dialect.series.values():
                    series.first = series.previous = series.moment = None
                    series.paused_until = -1
            if len(dialect.last) < _MAX_LABELS or label in dialect.last:
                dialect.last[label] = content.step
        for source, value in times.items():
            self._add(dialect.series.setdefault(source, _Series()), source, content.step, value, is_other=is_other)

    def _add(self, series: _Series, source: Source, step: int | None, value: float, *, is_other: bool) -> None:
        if step is None:
            step = (series.previous or 0) + 1
        if series.previous is not None and step <= series.previous:
            self._slower(series, source, step, value)
            return
        series.first = step if series.first is None else series.first
        previous, series.previous = series.previous, step
        moment, series.moment = series.moment, value
        forgets = _BAR_FORGETS if source == "bar" else 0
        if series.is_paused:
            series.is_paused, series.paused_until = False, step + forgets
        num_steps = 1 if previous is None else step - previous
        step_s = self._step_s(source, value, moment, num_steps)
        if step_s is None:
            return
        # Steps between the start and those of this time; the first line is assumed to cover as many as the others.
        num_before = 0 if previous is None else previous - series.first + min(num_steps, series.first)
        counts = not is_other and (source == "whole" or num_before >= self._warmup + forgets)
        is_paused = step <= series.paused_until
        series.times.append(_Time(step=step, num_steps=num_steps, step_s=step_s, counts=counts, is_paused=is_paused))

    def _slower(self, series: _Series, source: Source, step: int, value: float) -> None:
        """Correct the time of a step to that of a slower rank."""
        if source in ("moments", "bar"):  # a closed bar shows the mean of all its steps
            return
        for at in range(1, min(len(series.times), _NEAR) + 1):
            earlier = series.times[-at]
            if earlier.step == step:
                step_s = self._step_s(source, value, None, earlier.num_steps)
                earlier.step_s = max(earlier.step_s, step_s or 0.0)
                return

    def _step_s(self, source: Source, value: float, before: float | None, num_steps: int) -> float | None:
        """Return the seconds of a step; None if they are unknown."""
        if source == "moments":
            step_s = (value - before) / num_steps if before is not None else 0.0
        elif source == "tokens" and self._batch:
            step_s = self._batch.num_sequences * self._batch.seq_len / (value * self._batch.num_devices)
        elif source == "samples" and self._batch:
            step_s = self._batch.num_sequences / value
        else:
            step_s = 0.0 if source in ("tokens", "samples") else value
        return step_s if 0 < step_s <= MAX_STEP_S else None


def is_log(path: Path) -> bool:
    """Return whether a file is named like a log or contains step times."""
    has_name = LOG_NAME.fullmatch(path.name) is not None
    return is_file(path) and (has_name or tells_times(b"".join(chunks(path, HEAD_BYTES))))


def tells_times(head: bytes) -> bool:
    """Return whether the beginning of a file contains a line with a step time."""
    reader = LogReader()
    reader.feed(head)
    return reader.has_times


def chunks(path: Path, most_bytes: int) -> Iterator[bytes]:
    """Yield the first bytes of a log in chunks; gzip is decompressed, even if it was cut off."""
    try:
        with path.open("rb") as plain:
            stream = gzip.GzipFile(fileobj=plain) if plain.peek(2)[:2] == _GZIP else plain
            bytes_left = most_bytes
            while data := stream.read(min(_CHUNK, bytes_left)):
                yield data
                bytes_left -= len(data)
    except EOFError:  # the job was killed while writing
        return
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, zlib.error) as error:  # an invalid file name, or not a gzip file
        raise InputError(f"{str(path)!r}: cannot be read: {error}") from None
