"""Reader of the log lines of torchtitan.

`MetricsProcessor.log` and `log_validation` in torchtitan/components/metrics.py at b5bcd76 (2026-08), v0.2.2, v0.2.0 and
v0.1.0; earlier in train.py: `wps` instead of `tps` (e62573d), and at first `iter`, the seconds per step (6d9e4e6).
`tps` is tokens per second and device over the steps since the last line, including checkpoints; validation restarts
the clock.  Memory is the peak reserved by the allocator since then.  All ranks in the environment variable LOG_RANK
write to the log; ranks without a loss write -1.  The timestamp format is that of `init_logger` in
torchtitan/tools/logging.py.  Checkpoints: torchtitan/components/checkpoint.py.
"""

from __future__ import annotations

import re
from datetime import datetime

from autoplan.base.units import GIB
from autoplan.frameworks.common.log_lines import LineContent, LogFormat, Source, quantity

_STEP = re.compile(r"(\bvalidate )?\bstep: {1,12}(\d{1,12})  (?:loss: {1,12}([0-9.eE+-]{1,30}))?")
_RATE = re.compile(r"\b(?:tps|wps): {1,12}([0-9,]{1,30})")
_TIME = re.compile(r"\biter: {1,12}([0-9.eE+-]{1,30})  ")
_MEMORY = re.compile(r"\bmemory: {1,12}([0-9.]{1,30})GiB")
_MOMENT = re.compile(r"\b(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ")


def read(line: str) -> LineContent | None:
    """Parse a line of the log; None if it is not a line of torchtitan."""
    if "aving the checkpoint" in line:
        return LineContent(pause="checkpoint")
    if "step: " not in line or not (step := _STEP.search(line)):
        return None
    if step[1]:
        return LineContent(pause="evaluation")
    rate, time, memory = _RATE.search(line), _TIME.search(line), _MEMORY.search(line)
    sources: list[tuple[Source, float | None]] = [
        ("stated", quantity(time[1]) if time else None),
        ("tokens", quantity(rate[1]) if rate else None),
        ("moments", _moment(line) if rate or time else None),
    ]
    times = tuple((source, value) for source, value in sources if value is not None)
    if not times:
        return None
    return LineContent(
        step=int(step[2]),
        times=times,
        loss=quantity(step[3]),
        reserved_bytes=quantity(memory[1], GIB) if memory else None,
    )


def _moment(line: str) -> float | None:
    """Return the seconds since a fixed time; a clock set back in autumn costs one step."""
    if (moment := _MOMENT.search(line)) is None:
        return None
    try:
        return (datetime.strptime(moment[1], "%Y-%m-%d %H:%M:%S,%f") - datetime(1970, 1, 1)).total_seconds()
    except ValueError:
        return None


LOG = LogFormat(name="torchtitan", looked_for="step: N  loss: L  ...  memory: M GiB  tps: T", make_reader=lambda: read)
