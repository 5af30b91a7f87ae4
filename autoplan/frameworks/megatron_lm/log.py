"""Reader of the log lines of Megatron-LM, Megatron-Bridge and Megatron-DeepSpeed.

`training_log` in megatron/training/training.py at d98e8a6 (2026-08), core_v0.15.0, core_v0.8.0 (from which on a line
begins with a timestamp) and megatron/training.py at v2.5 and v2.0: always the same fields between bars.  Some forks
write seconds or more blanks (Megatron-DeepSpeed, ModelLink), Argonne's Megatron-DeepSpeed `name_of_field=value`.  The
batch is that of the last step before the line; Megatron-DeepSpeed adds the current sequence length of its curriculum.
The time is the mean since the last such line; its timer, `interval-time` in `train`, is stopped during evaluation and
checkpointing.
Memory: `report_memory` in megatron/training/utils/common_utils.py, in MiB.  Evaluation:
`evaluate_and_print_results`; checkpoints: `save_checkpoint` in megatron/training/checkpointing.py.  Timers, means per
step since the last line, over the ranks or of each (`--timing-log-option`): `Timers` in megatron/core/timers.py at
00caa53.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autoplan.base.units import MIB
from autoplan.frameworks.common.log_lines import LEAST, MOST, LineContent, LogFormat, number, quantity

_STEP = re.compile(r"\biteration(?:\s|=)\s{0,12}(\d{1,12})/\s{0,12}\d{1,12} \|")
_TIME = re.compile(r"elapsed[ _]time[ _]per[ _]iteration[ _]\(?(m?s)\)?[:=] {0,12}([0-9.eE+-]{1,30})")
_BATCH = re.compile(r"\bglobal[ _]batch[ _]size[:=] {0,12}(\d{1,12})\b")
_LENGTH = re.compile(r"\b(?:curriculum|actual)[ _]seqlen[:=] {0,12}(\d{1,12})\b")
_LOSS = re.compile(r"\blm loss[:=] {0,12}([0-9.eE+-]{1,30})")
_MEMORY = re.compile(r"memory \(MB\) \|.{0,60}max allocated: ([0-9.]{1,30}) \|.{0,60}max reserved: ([0-9.]{1,30})")

_TIMER = re.compile(r" {1,12}([a-z/-]{1,60}) \.{2,48}: (?:\(([0-9.]{1,20}), )?([0-9.]{1,20})\)?")
_TIMER_OF_RANKS = re.compile(r" {1,4}([a-z/-]{1,60}):")
_RANK = re.compile(r" {1,12}rank {1,6}(\d{1,7}): ([0-9.]{1,20})")
_OUTSIDE_A_STEP = ("setup", "checkpoint", "evaluate", "interval", "startup")


class _Reader:
    """Parser of the lines of one log."""

    def __init__(self) -> None:
        self._timer = ""  # whose times of all ranks follow

    def read(self, line: str) -> LineContent | None:
        """Parse a line of the log; None if it is not a line of Megatron-LM."""
        if self._timer and (rank := _RANK.fullmatch(line)):
            return _timers(self._timer, {f"rank {rank[1]}": rank[2]})
        timer = _TIMER_OF_RANKS.fullmatch(line)
        self._timer = timer[1] if timer else ""
        return _content(line)


def _timers(name: str, times_ms: Mapping[str, str | None]) -> LineContent | None:
    """Return the times of a part of a step; None if it is of another part of the run."""
    if any(word in name for word in _OUTSIDE_A_STEP):
        return None
    found = ((name, whose, quantity(time_ms, 1e-3)) for whose, time_ms in times_ms.items())
    return LineContent(timers=tuple((name, whose, time_s) for name, whose, time_s in found if time_s))


def _content(line: str) -> LineContent | None:
    if "elapsed time per iteration" in line or "elapsed_time_per_iteration_ms=" in line:
        step, time = _STEP.search(line), _TIME.search(line)
        step_s = quantity(time[2], 1e-3 if time[1] == "ms" else 1.0) if time else None
        if step is None or step_s is None:
            return None
        loss, batch, length = _LOSS.search(line), _BATCH.search(line), _LENGTH.search(line)
        return LineContent(
            step=int(step[1]),
            num_sequences=int(batch[1]) if batch else None,
            seq_len=int(length[1]) if length else None,
            times=(("stated", step_s),),
            loss=number(loss[1]) if loss else None,
        )
    if "memory (MB)" in line and (memory := _MEMORY.search(line)):
        return LineContent(allocated_bytes=quantity(memory[1], MIB), reserved_bytes=quantity(memory[2], MIB))
    if " .." in line and (timer := _TIMER.fullmatch(line)):
        return _timers(timer[1], {LEAST: timer[2], MOST: timer[3]})
    if "validation loss at" in line:
        return LineContent(pause="evaluation")
    if "saving checkpoint at iteration" in line or "successfully saved checkpoint" in line:
        return LineContent(pause="checkpoint")
    return None


LOG = LogFormat(
    name="Megatron-LM",
    looked_for="iteration N/M | ... | elapsed time per iteration (ms): T",
    make_reader=lambda: _Reader().read,
)
