"""Reader of the log lines of nanotron.

`LoggerWriter.add_scalars_from_list` in src/nanotron/logging.py at v0.1 (43b5e6b) and v0.5, logging/base.py at 2411b02
(2026-04), with the values of `train_step_logs` in trainer.py: `elapsed_time_per_iteration_ms`, since 2026
`time_per_iteration_ms`.  Numbers have three digits and a suffix K, M or B (`human_format`).  A time is that of one
step, without checkpoint and evaluation.  Memory: the lines "[After train batch iter]" of the first steps, in MiB.
"""

from __future__ import annotations

import re

from autoplan.base.units import MIB
from autoplan.frameworks.common.log_lines import LineContent, LogFormat, quantity

_STEP = re.compile(r"\biteration: (\d{1,12}) / \d{1,12} \|")
_TIME = re.compile(r"\|\s(?:elapsed_)?time_per_iteration_ms: (\S{1,30})")
_LOSS = re.compile(r"\|\slm_loss: (\S{1,30})")
_RESERVED = re.compile(r"\|\scuda_max_memory_reserved: (\S{1,30})")
_PEAKS = re.compile(r"Peak allocated:? ([0-9.]{1,30})MiB\.? Peak reserved: ([0-9.]{1,30})MiB")
_THOUSANDS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def read(line: str) -> LineContent | None:
    """Parse a line of the log; None if it is not a line of nanotron."""
    if "time_per_iteration_ms" in line:
        step, time = _STEP.search(line), _TIME.search(line)
        milliseconds = _human(time[1]) if time else None
        if step is None or milliseconds is None:
            return None
        loss, reserved = _LOSS.search(line), _RESERVED.search(line)
        return LineContent(
            step=int(step[1]),
            times=(("stated", milliseconds * 1e-3),),
            loss=_human(loss[1]) if loss else None,
            reserved_bytes=_human(reserved[1]) if reserved else None,
        )
    if "Peak allocated" in line and (peaks := _PEAKS.search(line)):
        return LineContent(allocated_bytes=quantity(peaks[1], MIB), reserved_bytes=quantity(peaks[2], MIB))
    if "Saving checkpoint at" in line:
        return LineContent(pause="checkpoint")
    return None


def _human(text: str) -> float | None:
    factor = _THOUSANDS.get(text[-1:])
    return quantity(text[:-1], factor) if factor else quantity(text)


LOG = LogFormat(
    name="nanotron", looked_for="iteration: N / M | ... | elapsed_time_per_iteration_ms: T", make_reader=lambda: read
)
