"""Traces of a step in all supported formats: torch's profiler, exports of Nsight Systems, AMD's profilers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import is_file, is_folder
from autoplan.profiler.imports import kineto, nsight, rocpd, rocprof
from autoplan.profiler.imports.kineto import RankTrace


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace of a step, or of Chakra, which has no start times and is refused on reading."""
    is_export = nsight.is_report(path) or rocpd.is_database(path) or rocprof.is_output(path)
    return is_export or kineto.is_trace(path) or _is_chakra(path)


def trace_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return trace files, including those in folders, of one format in each."""
    traces: list[Path] = []
    for path in map(Path, paths):
        if not is_folder(path):
            traces.append(path)
            continue
        exports = [item for item in sorted(path.rglob("*.sqlite")) if nsight.is_report(item)]
        databases = [item for item in sorted((*path.rglob("*.db"), *path.rglob("*.rpd"))) if rocpd.is_database(item)]
        outputs = [item for item in sorted(path.rglob("*.json*")) if rocprof.is_output(item)]
        traces += exports or databases or outputs or kineto.trace_files([path])
    return traces


def read_ranks(path: Path) -> list[RankTrace]:
    """Return the activity of the ranks in a file: one rank for torch's profiler, all traced devices for the others."""
    if nsight.is_report(path):
        return nsight.read_report(path)
    if rocpd.is_database(path):
        return rocpd.read_database(path)
    if rocprof.is_output(path):
        return rocprof.read_output(path)
    if _is_chakra(path):
        raise InputError(
            f"{path}: an execution trace (Chakra): it tells the order of operations, and not when each of them ran: "
            "use the trace of torch's profiler (Kineto) of the same run"
        )
    return [kineto.read_trace(path)]


def _is_chakra(path: Path) -> bool:
    """Return whether a file is an execution trace of torch or Chakra: in its binary form, or by its keys in JSON."""
    if path.suffix == ".et" and is_file(path):
        return True
    head = kineto.json_head(path)
    is_own_json = b'"schema"' in head and (b"chakra" in head or b'"rf_id"' in head)
    return is_own_json or b'"workload_graph"' in head
