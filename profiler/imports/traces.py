"""Traces of a step in all supported formats: torch's profiler and exports of Nsight Systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import is_file, is_folder
from autoplan.profiler.imports import kineto, nsight
from autoplan.profiler.imports.kineto import RankTrace

_HEAD_BYTES = 4096


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace of a step, or of Chakra, which has no times and is refused on reading."""
    return kineto.is_trace(path) or nsight.is_report(path) or _is_chakra(path)


def trace_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return trace files, including those in folders."""
    traces: list[Path] = []
    for path in map(Path, paths):
        if is_folder(path):
            exports = [item for item in sorted(path.rglob("*.sqlite")) if nsight.is_report(item)]
            traces += exports or kineto.trace_files([path])
        else:
            traces.append(path)
    return traces


def read_ranks(path: Path) -> list[RankTrace]:
    """Return the activity of the ranks in a file: one rank for torch's profiler, all devices for an nsys export."""
    if nsight.is_report(path):
        return nsight.read_report(path)
    if _is_chakra(path):
        raise InputError(
            f"{path}: an execution trace of Chakra: it has the order of operations but no durations: "
            "use the trace of torch's profiler (Kineto) of the same run"
        )
    return [kineto.read_trace(path)]


def _is_chakra(path: Path) -> bool:
    """Return whether a file is a Chakra execution trace, by its schema or by the name of its compressed form."""
    if not is_file(path):
        return False
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError:
        return False
    return path.suffix == ".et" or (head.lstrip()[:1] == b"{" and b'"schema"' in head and b"chakra" in head)
