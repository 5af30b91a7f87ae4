"""Cause of a failed run, from the end of its log."""

from __future__ import annotations

import re
from collections import deque

from autoplan.base.units import cleaned
from autoplan.frameworks.common.log_lines import split_label

_MOST_LINES = 200  # lines: the traceback of a rank, and what its launcher says after it
# torch's allocators (CUDA, HIP, CPU), CUDA's and cuBLAS's own errors, Python's, and Slurm's of the host's memory.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|not enough memory|"
    r"\bMemoryError\b|\boom[-_]kill",
    re.IGNORECASE,
)
# At the start of a line, or after the name of the host, which pdsh sets before it (`worker-1: `).
_ERROR = re.compile(
    r"(?:[\w.-]{1,253}: )?((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception|Interrupt)(?::.*|$))"
)
_LAUNCHERS = ("ChildFailedError", "CalledProcessError")  # only say that another process failed
_STARTERS = ("srun: ", "slurmstepd: ", "pdsh@")  # so do lines of these


class LogEnd:
    """End of a log, and the cause of failure that it names."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)
        self._out_of_memory = ""

    def read(self, line: str) -> None:
        """Take in a line."""
        text = cleaned(split_label(line)[1].strip())
        if text:
            self._lines.append(text)
        if not self._out_of_memory and _OUT_OF_MEMORY.search(text):
            self._out_of_memory = text

    @property
    def out_of_memory(self) -> str:
        """The first line that says that memory ran out; blank if none does."""
        return self._out_of_memory

    @property
    def error(self) -> str:
        """The first error that the end names, which the others follow from; blank if it names none."""
        errors = [match[1] for line in self._lines if (match := _ERROR.match(line))]
        program_errors = [line for line in errors if not any(name in line for name in _LAUNCHERS)]
        return next(iter(program_errors or errors), "")

    @property
    def reason(self) -> str:
        """The error that the end names, else its last line."""
        last = [line for line in self._lines if not line.startswith(_STARTERS)] or list(self._lines)
        return self.error or next(iter(last[-1:]), "it wrote nothing")
