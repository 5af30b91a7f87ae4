"""Step times in a log, whichever framework wrote it."""

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
from autoplan.frameworks.common.log_lines import (
    MOST_STEP_S,
    LineContent,
    LineSplitter,
    ReadLine,
    Source,
    split_label,
)
from autoplan.frameworks.registry import LOGS

WARMUP = 2  # steps from a start on: kernels are chosen and compiled, memory is taken, connections are made

LOG_NAME = re.compile(r"(.*?)\.(log|out|err|stdout|stderr)(\.gz)?", re.DOTALL)
HEAD_BYTES = 2**22  # in which a file without the name of a log must tell a step
MOST_BYTES = 2**32  # of a log, unpacked, in which steps are looked for
_CHUNK = 2**20
_GZIP = b"\x1f\x8b"
_MOST_TIMES = 100_000  # of one source that are kept, the newest; a log may be endless
_MOST_LABELS = 100_000
_NEAR = 64  # readings back that a slower rank may still be late for
_BAR_FORGETS = 10  # steps after which tqdm's moving average (weight .3 for the newest) holds 3 % of the first one


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Batch of a step, where it is known: rates are read with it, and steps that train something else left out."""

    num_sequences: int
    seq_len: int
    num_devices: int

    def __str__(self) -> str:
        return f"{self.num_sequences:,} sequences of {self.seq_len:,} tokens"

    def is_other(self, content: LineContent) -> bool:
        """Return whether a line is of a step with another batch."""
        return content.num_sequences not in (None, self.num_sequences) or content.seq_len not in (None, self.seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """Run as its log describes it, in the order of the lines.

    Each of `step_s` is the time of one step or the mean of some that were logged together.  Left out are those that
    cover one of the first `warmup` steps after a start or a step with another batch than the plan's, and, where others
    remain, those of a step that an evaluation or a checkpoint may have taken part in.
    """

    framework: str
    source: Source  # how the times were told
    step_s: tuple[float, ...]
    num_steps: int  # that `step_s` cover
    losses: tuple[float, ...] = ()
    allocated_bytes: float | None = None  # highest peak of the ranks that told
    reserved_bytes: float | None = None
    timers_s: Mapping[str, float] = field(default_factory=dict)  # parts of a step, which may hold others: medians

    @property
    def median_s(self) -> float:
        """The step time that counts: robust against steps that something else took part in."""
        return float(median(self.step_s))

    @property
    def interval_s(self) -> tuple[float, float]:
        """Interval about 95 % sure to hold the median that more steps would show; under six times, their range.

        By order statistics, whatever the distribution: Conover, Practical Nonparametric Statistics, section 3.2.
        """
        ordered = sorted(self.step_s)
        at = max(math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2), 0)
        return ordered[at], ordered[-1 - at]


@dataclass(slots=True)
class _Time:
    step: int
    num_steps: int
    step_s: float
    counts: bool  # covers none of the first steps, and none with another batch
    is_paused: bool


@dataclass(slots=True)
class _Series:
    """The times of one source."""

    times: deque[_Time] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    first: int | None = None  # step since the last start
    previous: int | None = None  # step whose end was told before
    moment: float | None = None  # of that
    is_paused: bool = False
    paused_until: int = -1  # step

    def counted(self) -> list[_Time]:
        counting = [time for time in self.times if time.counts]
        return [time for time in counting if not time.is_paused] or counting


@dataclass(slots=True)
class _Dialect:
    """Values read so far from lines of one framework."""

    name: str
    read: ReadLine
    series: dict[Source, _Series] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)  # step by label
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    timers: dict[str, deque[float]] = field(default_factory=dict)


class LogReader:
    """Reads a log while it is written; several ranks may write side by side.

    Of ranks that report the same step the slowest counts.  A rank whose step number falls has started again.
    """

    def __init__(self, batch: Batch | None = None, *, warmup: int = WARMUP) -> None:
        check_count("warmup", warmup, at_least=0)
        self._batch, self._warmup = batch, warmup
        self._splitter = LineSplitter()
        self._other: LineContent | None = None  # the last step with another batch
        self._is_other = False  # whether the steps of now are so
        self._dialects = [_Dialect(name=log.name, read=log.make_reader()) for log in LOGS.values()]

    def feed(self, data: bytes, now_s: float | None = None) -> list[str]:
        """Take in what was written; the lines that it completes.  `now_s` is the moment at which it was, if it is."""
        lines = self._splitter.feed(data)
        for line in lines:
            self._read(line, now_s)
        return lines

    @property
    def has_times(self) -> bool:
        """Return whether a line told a time or a rate, be it of a step that is left out."""
        return any(dialect.series for dialect in self._dialects)

    @property
    def num_steps(self) -> int:
        """Steps timed so far, those left out not counted."""
        best = self._best()
        return sum(time.num_steps for time in best[2]) if best else 0

    def finish(self) -> LoggedRun:
        """Return the run that the log describes; refused where it says no step time."""
        for line in self._splitter.finish():
            self._read(line, None)
        run = self.so_far()
        if run is None:
            looked_for = "; ".join(f"{log.name}: {log.looked_for}" for log in LOGS.values())
            hint = "" if self.has_times else f".  Looked for: {looked_for}"
            raise InputError(f"{self.lacks}{hint}")
        return run

    def so_far(self) -> LoggedRun | None:
        """Return the run that the log describes by now; None where it has no step time yet."""
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
            timers_s={name: float(median(times)) for name, times in dialect.timers.items()},
        )

    def _best(self) -> tuple[_Dialect, Source, list[_Time]] | None:
        """The most exact source that has times; of frameworks that share it, the one with most."""
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
        """Remark on the last batch other than the plan's that steps of the log train; blank if none did."""
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
        """Reason why no step time can be told from the log, where none can."""
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
        for name, seconds in content.timers:
            dialect.timers.setdefault(name, deque(maxlen=_MOST_TIMES)).append(seconds)
        if content.pause:
            for item in self._dialects:  # Trainer and DeepSpeed write one log
                for series in item.series.values():
                    series.is_paused = True
        if not content.times:
            return
        times = dict(content.times)
        was_other = self._is_other
        if self._batch and (content.num_sequences or content.seq_len):
            self._is_other = self._batch.is_other(content)
            self._other = content if self._is_other else self._other
        is_other = was_other or self._is_other  # a time may cover steps of both
        if content.step is not None:
            if now_s is not None:
                times.setdefault("moments", now_s)
            if content.step < dialect.last.get(label, 0):  # this rank has started again
                dialect.last.clear()
                for series in dialect.series.values():
                    series.first = series.previous = series.moment = None
                    series.paused_until = -1
            if len(dialect.last) < _MOST_LABELS or label in dialect.last:
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
        # Steps since the start before those that this time covers; the first line stands for as many as others do.
        num_before = 0 if previous is None else previous - series.first + min(num_steps, series.first)
        counts = not is_other and (source == "whole" or num_before >= self._warmup + forgets)
        is_paused = step <= series.paused_until
        series.times.append(_Time(step=step, num_steps=num_steps, step_s=step_s, counts=counts, is_paused=is_paused))

    def _slower(self, series: _Series, source: Source, step: int, value: float) -> None:
        """Another rank says the time of a step that is held: the slower of the two counts."""
        if source in ("moments", "bar"):  # a bar that is closed says the mean of all its steps
            return
        for at in range(1, min(len(series.times), _NEAR) + 1):
            earlier = series.times[-at]
            if earlier.step == step:
                step_s = self._step_s(source, value, None, earlier.num_steps)
                earlier.step_s = max(earlier.step_s, step_s or 0.0)
                return

    def _step_s(self, source: Source, value: float, before: float | None, num_steps: int) -> float | None:
        """Seconds of a step; None where they cannot be told."""
        if source == "moments":
            step_s = (value - before) / num_steps if before is not None else 0.0
        elif source == "tokens" and self._batch:
            step_s = self._batch.num_sequences * self._batch.seq_len / (value * self._batch.num_devices)
        elif source == "samples" and self._batch:
            step_s = self._batch.num_sequences / value
        else:
            step_s = 0.0 if source in ("tokens", "samples") else value
        return step_s if 0 < step_s <= MOST_STEP_S else None


def is_log(path: Path) -> bool:
    """Return whether a file is called as logs are, or tells step times."""
    has_name = LOG_NAME.fullmatch(path.name) is not None
    return is_file(path) and (has_name or tells_times(b"".join(chunks(path, HEAD_BYTES))))


def tells_times(head: bytes) -> bool:
    """Return whether the beginning of a file has a line with a step time."""
    reader = LogReader()
    reader.feed(head)
    return reader.has_times


def chunks(path: Path, most_bytes: int) -> Iterator[bytes]:
    """The first bytes of a log, piece by piece, unpacked where gzip packed it: of a packed one, what was written."""
    try:
        with path.open("rb") as plain:
            stream = gzip.GzipFile(fileobj=plain) if plain.peek(2)[:2] == _GZIP else plain
            bytes_left = most_bytes
            while data := stream.read(min(_CHUNK, bytes_left)):
                yield data
                bytes_left -= len(data)
    except EOFError:  # the job was killed while it wrote
        return
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, zlib.error) as error:  # a name that no file system takes, a file that is no gzip file
        raise InputError(f"{str(path)!r}: cannot be read: {error}") from None
