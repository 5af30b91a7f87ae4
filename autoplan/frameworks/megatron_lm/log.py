"""Reader of the log lines of Megatron-LM, Megatron-Bridge and Megatron-DeepSpeed.

`training_log` in megatron/training/training.py at d98e8a6 (2026-08), core_v0.15.0, core_v0.8.0 (from which on a line
begins with a timestamp) and megatron/training.py at v2.5 and v2.0: always the same fields between bars.  Some forks
write seconds or more blanks (Megatron-DeepSpeed, ModelLink).  The batch is that of the last step before the line;
Megatron-DeepSpeed adds the current sequence length of its curriculum.  The time is the mean since the last such line;
its timer, `interval-time` in `train`, is stopped during evaluation and checkpointing.
Memory: `report_memory` in megatron/training/utils/common_utils.py, in MiB.  Evaluation:
`evaluate_and_print_results`; checkpoints: `save_checkpoint` in megatron/training/checkpointing.py.  Timers, means per
step since the last line if `--timing-log-option` is max or minmax: `Timers` in megatron/core/timers.py at 00caa53.
"""

from __future__ import annotations

import re

from autoplan.base.units import MIB
from autoplan.frameworks.common.log_lines import LineContent, LogFormat, number, quantity

_STEP = re.compile(r"\biteration\s{1,12}(\d{1,12})/\s{0,12}\d{1,12} \|")
_TIME = re.compile(r"elapsed time per iteration \((m?s)\): {1,12}([0-9.eE+-]{1,30})")
_BATCH = re.compile(r"\bglobal batch size: {1,12}(\d{1,12})\b")
_LENGTH = re.compile(r"\b(?:curriculum|actual) seqlen: {1,12}(\d{1,12})\b")
_LOSS = re.compile(r"\blm loss: {1,12}([0-9.eE+-]{1,30})")
_MEMORY = re.compile(r"memory \(MB\) \|.{0,60}max allocated: ([0-9.]{1,30}) \|.{0,60}max reserved: ([0-9.]{1,30})")

_TIMER = re.compile(r" {1,12}([a-z/-]{1,60}) \.{2,48}: (?:\([0-9.]{1,20}, )?([0-9.]{1,20})\)?")
_OUTSIDE_A_STEP = ("setup", "checkpoint", "evaluate", "interval", "startup")


def read(line: str) -> LineContent | None:
    """Parse a line of the log; None if it is not a line of Megatron-LM."""
    if "elapsed time per iteration" in line:
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
    if " .." in line and (timer := _TIMER.fullmatch(line)) and (timer_s := quantity(timer[2], 1e-3)):
        is_of_a_step = not any(word in timer[1] for word in _OUTSIDE_A_STEP)
        return LineContent(timers=((timer[1], timer_s),)) if is_of_a_step else None
    if "validation loss at" in line:
        return LineContent(pause="evaluation")
    if "saving checkpoint at iteration" in line or "successfully saved checkpoint" in line:
        return LineContent(pause="checkpoint")
    return None


LOG = LogFormat(
    name="Megatron-LM", looked_for="iteration N/M | ... | elapsed time per iteration (ms): T", make_reader=lambda: read
)
