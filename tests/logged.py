"""Logs of runs, read as a whole."""

from __future__ import annotations

from pathlib import Path

from autoplan.read.logs import LoggedRun, LogReader
from autoplan.read.logs.folder import MOST_LOG_BYTES
from autoplan.read.logs.reader import WARMUP, chunks


def read_log(path: Path, *, warmup: int = WARMUP) -> LoggedRun:
    reader = LogReader(warmup=warmup)
    for data in chunks(path, MOST_LOG_BYTES):
        reader.feed(data)
    return reader.finish()
