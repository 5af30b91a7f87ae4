"""Reader of the log lines of MLPerf training (`mllog`), written by runs of NeMo, Primus and others.

As in mlcommons/training_results_v4.0 (NVIDIA: GPT-3, Llama-2-70B with LoRA) and in Primus: training runs in blocks
between evaluations, whose metadata contain the number of samples.  A sample is a sequence, for GPT-3 a token.

Some submissions of mlcommons/training_results_v5.1 state times of steps in `tracked_stats`, which then count alone.
Their `throughput` says the same as the block that it ends.
"""

from __future__ import annotations

import json
from typing import Any

from autoplan.frameworks.common.log_lines import LineContent, LogFormat, ReadLine, quantity

_MARK = ":::MLLOG "
_SIZES = ("global_batch_size", "max_sequence_length")


class _Reader:
    """Parser of the lines of one log."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._since: tuple[float, float] | None = None  # (moment in seconds, samples so far) of a line of this block
        self._stated = 0.0  # samples so far of the last stated step; 0: none is stated

    def read(self, line: str) -> LineContent | None:
        """Parse a line of the log; None if it is not a line of MLPerf."""
        _, mark, text = line.partition(_MARK)
        event = _decoded(text) if mark else {}
        key, value, moment_s = event.get("key"), event.get("value"), quantity(str(event.get("time_ms")), 1e-3)
        if moment_s is None:
            return None
        if key in _SIZES and (size := quantity(str(value))):
            self._sizes[key] = round(size)
        metadata = event.get("metadata")
        if key == "tracked_stats":
            return self._stated_step(value, metadata)
        loss = quantity(str(value)) if key == "train_loss" else None
        samples = _samples(metadata, ends=key == "block_stop")
        if self._stated or samples is None or key not in ("block_start", "train_loss", "block_stop"):
            return LineContent(loss=loss)
        before, self._since = self._since, None if key == "block_stop" else (moment_s, samples)
        if key == "block_start" or before is None:
            return LineContent(loss=loss)
        return self._timed(moment_s - before[0], samples, samples - before[1], loss)

    def _stated_step(self, value: object, metadata: object) -> LineContent | None:
        """Return the time of a step in the statistics of a run; its number is that of samples, except for some."""
        stated = value if isinstance(value, dict) else {}
        counted, batch = metadata if isinstance(metadata, dict) else {}, self._sizes.get("global_batch_size")
        step_s = quantity(str(stated.get("train_step_time")))
        samples = quantity(str(counted.get("samples_count", counted.get("step"))))
        if step_s is None or samples is None or not batch:
            return None
        is_next = samples > self._stated and samples % batch == 0
        self._stated = max(samples, self._stated)
        return LineContent(
            step=round(samples / batch) if is_next else None,
            num_sequences=batch,
            seq_len=self._sizes.get("max_sequence_length"),
            times=(("stated", step_s),),
            loss=quantity(str(stated.get("reduced_train_loss"))),
        )

    def _timed(self, seconds: float, samples: float, new_samples: float, loss: float | None) -> LineContent:
        """Return the mean step time over the new samples."""
        batch, length = (self._sizes.get(name) for name in _SIZES)
        if not batch or new_samples <= 0 or seconds <= 0:
            return LineContent(loss=loss)
        # A block never has as many steps as a sequence has tokens.
        of_a_step = batch * length if length and new_samples % (batch * length) == 0 else batch
        return LineContent(
            step=round(samples / of_a_step),
            num_sequences=batch,
            seq_len=length,
            times=(("stated", seconds * of_a_step / new_samples),),
            loss=loss,
        )


def _samples(metadata: object, *, ends: bool) -> float | None:
    """Return the number of samples in a line: before a block, or including it if the block `ends`."""
    counted = metadata if isinstance(metadata, dict) else {}
    if "samples_count" in counted:
        count = str(counted["samples_count"])
        return 0.0 if count == "0" else quantity(count)
    first = counted.get("first_epoch_num")
    counts = (first, counted.get("epoch_count") if ends else 0)
    return float(sum(counts)) if all(isinstance(count, int) for count in counts) else None  # type: ignore[arg-type]


def _decoded(text: str) -> dict[str, Any]:
    try:
        event = json.loads(text)
    except (ValueError, RecursionError):  # truncated, not JSON, or nested without an end
        return {}
    return event if isinstance(event, dict) else {}


def _make_reader() -> ReadLine:
    return _Reader().read


LOG = LogFormat(
    name="MLPerf",
    looked_for=':::MLLOG {"key": "block_stop", "metadata": {"samples_count": N}}',
    make_reader=_make_reader,
)
