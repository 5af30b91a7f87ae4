"""Traces of a step of any kind that is known: of torch's profiler, and exports of Nsight Systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import is_file, is_folder
from autoplan.profiler.imports import kineto, nsight
from autoplan.profiler.imports.kineto import RankTrace

_HEAD_BYTES = 4096


def is_trace(path: Path) -> bool:
    """Tell whether a file is a trace of a step, or one of Chakra, which has no times and is refused when read."""
    return kineto.is_trace(path) or nsight.is_report(path) or _is_chakra(path)


def trace_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files of traces, with those that folders hold."""
    traces: list[Path] = []
    for path in map(Path, paths):
        if is_folder(path):
            exports = [item for item in sorted(path.rglob("*.sqlite")) if nsight.is_report(item)]
            traces += exports or kineto.trace_files([path])
        else:
            traces.append(path)
    return traces


def read_ranks(path: Path) -> list[RankTrace]:
    """Return what the ranks of a file did: one of a trace of torch's profiler, all devices of an export of nsys."""
    if nsight.is_report(path):
        return nsight.read_report(path)
    if _is_chakra(path):
        raise InputError(
            f"{path}: an execution trace of Chakra: it has the order of operations but no durations: "
            "use the trace of torch's profiler (Kineto) of the same run"
        )
    return [kineto.read_trace(path)]


def _is_chakra(path: Path) -> bool:
    """Tell whether a file is an execution trace: its schema names Chakra, or its name is that of its packed form."""
    if not is_file(path):
        return False
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError:
        return False
    return path.suffix == ".et" or (head.lstrip()[:1] == b"{" and b'"schema"' in head and b"chakra" in head)
