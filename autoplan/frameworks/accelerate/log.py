"""Reader of the log lines of the Trainer of transformers.

transformers 5.23.0 and 4.x: `ProgressCallback` in trainer_callback.py shows a tqdm bar on stderr, `training_bar`,
without a description, and another one during evaluation; metrics are logged as a Python dict, whose numbers are strings
from 5.0 on (`on_log`).  Only the last dict contains a time (`speed_metrics` in trainer_utils.py:
`train_steps_per_second`, the mean of all steps).  tqdm 4.70.1, std.py `format_meter`: "n/total [elapsed<left, rate]".
"""

from __future__ import annotations

import re

from autoplan.frameworks.common.log_lines import LineContent, LogFormat, Source, number, quantity

_BAR = re.compile(
    r"^\s{0,8}\d{1,3}%\|[^|]{0,400}\| {0,9}(\d{1,12})/(\d{1,12}) \[[0-9:]{1,12}<[0-9:?]{1,12}, (.{1,20}?)[\],]"
)
_RATE = re.compile(r"\s{0,8}([0-9.]{1,20})(s/it|it/s)")
_LOSS = re.compile(r"^\{'loss': '?([0-9.eE+-]{1,30})'?,")
_STEP_RATE = re.compile(r"'train_steps_per_second': '?([0-9.eE+-]{1,30})")


class Reader:
    """Parses lines of the Trainer; the first bar without a description is assumed to be the training bar."""

    def __init__(self) -> None:
        self._num_steps = ""

    def read(self, line: str) -> LineContent | None:
        """Parse a line of the log; None if it is not a line of the Trainer."""
        if "it]" in line or "it/s" in line:
            return self._bar(line)
        if "{'" not in line:
            return None
        line = line[line.index("{'") :]
        if loss := _LOSS.match(line):
            return LineContent(loss=number(loss[1]))
        if summary := _STEP_RATE.search(line):
            rate = quantity(summary[1])
            return LineContent(times=(("whole", 1 / rate),)) if rate else None
        return LineContent(pause="evaluation") if line.startswith("{'eval_") else None

    def _bar(self, line: str) -> LineContent | None:
        bar = _BAR.match(line)
        if bar is None:
            return None
        self._num_steps = self._num_steps or bar[2]
        if bar[2] != self._num_steps:
            return LineContent(pause="evaluation")
        rate = _RATE.fullmatch(bar[3])
        value = quantity(rate[1]) if rate else None
        if rate is None or value is None:
            return None
        times: tuple[tuple[Source, float], ...] = (("bar", value if rate[2] == "s/it" else 1 / value),)
        return LineContent(step=int(bar[1]), times=times)


LOG = LogFormat(
    name="HF Trainer",
    looked_for="tqdm's bar N/M [..., T s/it], or 'train_steps_per_second'",
    make_reader=lambda: Reader().read,
)
