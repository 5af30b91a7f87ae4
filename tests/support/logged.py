"""Logs of runs, read as a whole."""

from __future__ import annotations

from pathlib import Path

from autoplan.frameworks.logs import WARMUP, LoggedRun, LogReader, chunks
from autoplan.runs.log_folder import MOST_LOG_BYTES


def read_log(path: Path, *, warmup: int = WARMUP) -> LoggedRun:
    reader = LogReader(warmup=warmup)
    for data in chunks(path, MOST_LOG_BYTES):
        reader.feed(data)
    return reader.finish()
