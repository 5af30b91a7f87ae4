"""Log lines of the built-in trainer, one per step: its number, its seconds and the loss."""

from __future__ import annotations

import re

from autoplan.frameworks.common.log_lines import LineContent, LogFormat, number, quantity

_LINE = re.compile(r"trainer step (\d{1,12}) \| (\S{1,30}) s \| loss (\S{1,30})")


def line(step: int, step_s: float, loss: float) -> str:
    """Return the log line of a step."""
    return f"trainer step {step} | {step_s:.6g} s | loss {loss:.6g}\n"


def read(line: str) -> LineContent | None:
    """Parse a line of the log; None if it is not a line of the trainer."""
    match = _LINE.search(line) if "trainer step" in line else None
    seconds = quantity(match[2]) if match else None
    if match is None or seconds is None:
        return None
    return LineContent(step=int(match[1]), times=(("stated", seconds),), loss=number(match[3]))


LOG = LogFormat(name="the built-in trainer", looked_for="trainer step N | T s | loss L", make_reader=lambda: read)
