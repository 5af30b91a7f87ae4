"""Cause of failure of a run, from the end of its log."""

from __future__ import annotations

import re
from collections import deque

from autoplan.base.units import cleaned
from autoplan.frameworks.common.log_lines import split_label

_MAX_LINES = 200  # lines: the traceback of a rank, and its launcher's messages after it
# Out-of-memory errors of torch's allocators (CUDA, HIP, CPU), CUDA, cuBLAS, Python, and of Slurm for host memory.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|not enough memory|"
    r"\bMemoryError\b|\boom[-_]kill",
    re.IGNORECASE,
)
# At the start of a line, or after the host name that pdsh puts first (`worker-1: `).
_ERROR = re.compile(
    r"(?:[\w.-]{1,253}: )?((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception|Interrupt)(?::.*|$))"
)
_LAUNCHERS = ("ChildFailedError", "CalledProcessError")  # only report that another process failed
_STARTERS = ("srun: ", "slurmstepd: ", "pdsh@")  # as do lines starting with these


class LogEnd:
    """End of a log, and the cause of failure found in it."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._out_of_memory = ""

    def read(self, line: str) -> None:
        """Process a line."""
        text = cleaned(split_label(line)[1].strip())
        if text:
            self._lines.append(text)
        if not self._out_of_memory and _OUT_OF_MEMORY.search(text):
            self._out_of_memory = text

    @property
    def out_of_memory(self) -> str:
        """First out-of-memory line; blank if there is none."""
        return self._out_of_memory

    @property
    def error(self) -> str:
        """First error at the end, which causes the others; blank if there is none."""
        errors = [match[1] for line in self._lines if (match := _ERROR.match(line))]
        program_errors = [line for line in errors if not any(name in line for name in _LAUNCHERS)]
        return next(iter(program_errors or errors), "")

    @property
    def reason(self) -> str:
        """The first error at the end, else its last line."""
        last = [line for line in self._lines if not line.startswith(_STARTERS)] or list(self._lines)
        return self.error or next(iter(last[-1:]), "it wrote nothing")
