"""Logs of runs, read as a whole."""

from __future__ import annotations

from pathlib import Path

from autoplan.frameworks.logs import MAX_BYTES, WARMUP, LoggedRun, LogReader, chunks


def read_log(path: Path, *, warmup: int = WARMUP) -> LoggedRun:
    reader = LogReader(warmup=warmup)
    for data in chunks(path, MAX_BYTES):
        reader.feed(data)
    return reader.finish()
