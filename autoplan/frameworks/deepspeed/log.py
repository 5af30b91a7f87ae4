"""Reader of the log lines of DeepSpeed.

At edaa722 (2026-08) and v0.9.5, unless noted: `PipelineEngine.train_batch` in runtime/pipe/engine.py ("iter time (s)",
the mean of the steps since the last line; also v0.4.3); `ThroughputTimer.stop` in utils/timer.py ("CurrSamplesPerSec"
of the last step, also v0.7.0; v0.4.3 has only "SamplesPerSec", a running average); with wall_clock_breakdown
`SynchronizedWallClockTimer.log` ("time (ms) | fwd: ...", one line per step; before 2023-07, b354c28, the timers are
called `forward` and accumulate over all steps, and are not read).  Memory in GiB: the throughput line, and
`see_memory_usage` in runtime/utils.py.  Samples per second are those of the whole job.
"""

from __future__ import annotations

import re

from autoplan.base.units import GIB
from autoplan.frameworks.common.log_lines import LineContent, LogFormat, number, quantity

_PIPE = re.compile(r"\bsteps: (\d{1,12}) loss: (\S{1,30}) .{0,500}?iter time \(s\): ([0-9.]{1,30})")
_RATE = re.compile(r"(?:global_step=|\b\d{1,12}/)(\d{1,12}), .{0,80}?\b(?:Curr)?SamplesPerSec=([0-9.eE+-]{1,40})")
_ALLOCATED = re.compile(r"\bMax(?:MemAllocated=|_MA )([0-9.]{1,30}) ?GB")
_RESERVED = re.compile(r"\bMax_CA ([0-9.]{1,30}) GB")
_TIMER = re.compile(r"\| (fwd|bwd|step): ([0-9.]{1,30})")


def read(line: str) -> LineContent | None:
    """Parse a line of the log; None if it is not a line of DeepSpeed."""
    if "iter time (s)" in line and (pipe := _PIPE.search(line)):
        step_s = quantity(pipe[3])
        return LineContent(step=int(pipe[1]), times=(("stated", step_s),), loss=number(pipe[2])) if step_s else None
    if "SamplesPerSec=" in line and (rate := _RATE.search(line)):
        samples_per_s, memory = quantity(rate[2]), _ALLOCATED.search(line)
        if samples_per_s is None:
            return None
        peak = quantity(memory[1], GIB) if memory else None
        return LineContent(step=int(rate[1]), times=(("samples", samples_per_s),), allocated_bytes=peak)
    if "time (ms) |" in line:
        parts = {name: number(text) for name, text in _TIMER.findall(line)}
        total_s = sum(value or 0.0 for value in parts.values()) * 1e-3
        return LineContent(times=(("timers", total_s),)) if len(parts) == 3 and total_s > 0 else None
    if "Max_MA " in line and (memory := _ALLOCATED.search(line)):
        reserved = _RESERVED.search(line)
        return LineContent(
            allocated_bytes=quantity(memory[1], GIB),
            reserved_bytes=quantity(reserved[1], GIB) if reserved else None,
        )
    return LineContent(pause="checkpoint") if "Saving model checkpoint" in line else None


LOG = LogFormat(
    name="DeepSpeed",
    looked_for="global_step=N, ... CurrSamplesPerSec=S, steps: N ... iter time (s): T, or time (ms) | fwd: ...",
    make_reader=lambda: read,
)
