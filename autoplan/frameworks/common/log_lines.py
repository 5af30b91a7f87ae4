"""Lines of training logs: split from chunks of bytes, stripped of colours and labels, and parsed."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MAX_LINE_BYTES = 2**16  # of a line; the rest of a longer one is passed over

_ENDS = re.compile(rb"[\r\n]+")  # a bar of tqdm returns to the start of its line
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
# `[rank0]:` of torch's own tracebacks and, like `[default0]:`, of torchrun --tee, `0: ` of srun --label,
# `[1,0]<stdout>:` of mpirun --tag-output (Open MPI), `[0] ` of mpirun -prepend-rank (hydra), `[pod/a-0/torch] ` of
# kubectl logs --prefix.
_LABEL = re.compile(
    r"\s{0,8}(\[[\w.-]{1,60}\d\]:|\d{1,7}: |\[\d{1,3},\d{1,7}\]<\w{1,8}>:|\[\d{1,7}\] |\[pod/[\w./-]{1,250}\] )"
)
_MOMENT = re.compile(
    r"\s{0,8}\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) "
)  # kubectl logs --timestamps


class LineSplitter:
    """Splits chunks of bytes into complete lines."""

    def __init__(self) -> None:
        self._unfinished = b""
        self._is_cut = False  # the rest of this line is passed over

    def feed(self, data: bytes) -> list[str]:
        """Return the lines completed by `data`, cleaned and without empty ones."""
        pieces = _ENDS.split(data)
        lines = []
        for piece in pieces[:-1]:
            if not self._is_cut:
                lines.append(self._unfinished + piece)
            self._unfinished, self._is_cut = b"", False
        if not self._is_cut:
            self._unfinished += pieces[-1]
            if len(self._unfinished) > MAX_LINE_BYTES:
                lines.append(self._unfinished)
                self._unfinished, self._is_cut = b"", True
        return [text for line in lines if (text := cleaned_line(line))]

    def finish(self) -> list[str]:
        """Return the last line if it has no line end."""
        unfinished, self._unfinished = self._unfinished, b""
        return [text] if (text := cleaned_line(unfinished)) else []


def cleaned_line(line: bytes) -> str:
    """A line as text, without colours and control characters; a tab is a space."""
    text = _ESCAPES.sub("", line[:MAX_LINE_BYTES].decode("utf-8", errors="replace").replace("\t", " "))
    if not text.isprintable():
        text = "".join(letter for letter in text if unicodedata.category(letter)[0] != "C")
    return text.rstrip()


def split_label(line: str) -> tuple[str, str]:
    """Return (labels of launchers before a line of one rank, each before that of the next, blank if none; the rest).

    A moment among them tells ranks apart no more than the line itself does, and is no part of either.
    """
    labels, at = "", 0
    while match := _LABEL.match(line, at) or _MOMENT.match(line, at):
        labels += match[1] if match.re is _LABEL else ""
        at = match.end()
    return labels, line[at:]


# -- content of a line ------------------------------------------------------------------------------------------------


# Where a step time comes from, the best first.  Of `tokens` (a second, of each device) and `samples` (a second, of the
# job) it follows with the batch that is trained; of `moments`, at which lines were written, from their difference;
# `bar` is tqdm's moving average, `timers` are parts of a step added up, `whole` is the mean of a run from its start.
Source = Literal["stated", "tokens", "samples", "moments", "bar", "timers", "whole"]

Pause = Literal["evaluation", "checkpoint"]

MAX_STEP_S = 1e6
LEAST, MOST = "least", "most"  # times of a part of a step on the fastest and the slowest rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LineContent:
    """Content of a line as far as it was understood.

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
    # (part of the last steps, rank or `LEAST` or `MOST` of all ranks, seconds of a step)
    timers: tuple[tuple[str, str, float], ...] = ()


# Reads one line of a framework's log, and may remember those before; None where it is not one of the framework.
ReadLine = Callable[[str], LineContent | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """Log format of a framework: its name, an example of a line with a step time, and its parser."""

    name: str
    looked_for: str
    make_reader: Callable[[], ReadLine]


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
