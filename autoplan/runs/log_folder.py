"""Past runs in a folder of logs, each with the launch file that started it.

A log belongs to the launch file in its own folder or, if there is none, in the nearest parent folder.  If there are
several, it belongs to the one whose name is a prefix of the log's (`70b.sh`: `70b.log`, `70b-4711.out`); without such a
prefix all of them must start the same plan.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import is_folder
from autoplan.base.units import cleaned
from autoplan.frameworks.common.launch import Launch
from autoplan.frameworks.launch_files import MAX_BYTES as MAX_LAUNCH_BYTES
from autoplan.frameworks.launch_files import looks_like_launch
from autoplan.frameworks.logs import HEAD_BYTES, LOG_NAME, MAX_BYTES, Batch, LoggedRun, LogReader, chunks, tells_times
from autoplan.frameworks.registry import FRAMEWORKS
from autoplan.runs.failure import LogEnd
from autoplan.spec.plan import chunk_layers

MAX_FILES = 100_000  # per folder; a run writes few
_PIECE = 2**12  # bytes of a log between two progress checks

_RANK_STREAMS = ("stdout.log", "stderr.log")  # written by torchrun --log-dir into a folder per rank

_WRITTEN_BY = {entry.target: entry.logs for entry in FRAMEWORKS if entry.logs}


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A logged run: its launch file and its log; `logged` is None if no step was timed.

    A run whose log ends with an out-of-memory error ran out of memory, however many steps it timed before.
    """

    log: Path  # the first of its logs
    launch_file: Path
    launch: Launch
    logged: LoggedRun | None
    is_out_of_memory: bool
    reason: str  # why it failed; blank if it did not
    ended_s: float  # last modification of its log, as a Unix time


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A file that yielded no run, and why."""

    path: Path
    reason: str


@dataclass(slots=True)
class _SortedFiles:
    """Files in a folder and its subfolders, by type."""

    launches: dict[Path, list[Path]] = field(default_factory=lambda: defaultdict(list))  # by folder
    logs: dict[tuple[Path, str], list[Path]] = field(default_factory=lambda: defaultdict(list))  # by run
    passed_over: list[PassedOver] = field(default_factory=list)


def past_runs(folder: Path, read: Callable[[Path], Launch]) -> Iterator[PastRun | PassedOver]:
    """Yield the runs with logs in `folder` or below, and the files that yield none.

    `read` parses a launch file.  Unreadable files are passed over without stopping; links to files are followed, links
    to folders are not.
    """
    files = _find(folder)
    yield from files.passed_over
    readings: dict[Path, Launch | str] = {}

    def reading(path: Path) -> Launch | str:
        if path not in readings:
            try:
                readings[path] = read(path)
            except (AutoplanError, ValueError) as error:
                readings[path] = cleaned(str(error))
        return readings[path]

    for (_, name), logs in sorted(files.logs.items()):
        try:
            path, launch = _started_by(logs[0], name, folder, files.launches, reading)
            yield _read_run(logs, path, launch)
        except InputError as error:
            yield PassedOver(path=logs[0], reason=cleaned(str(error)))


# -- files ------------------------------------------------------------------------------------------------------------


def _find(folder: Path) -> _SortedFiles:
    files = _SortedFiles()
    inodes: set[tuple[int, int]] = set()
    if not is_folder(folder):
        raise InputError(f"{folder} is no folder: name the one that holds logs and launch files")

    def complain(error: OSError) -> None:
        where = Path(str(error.filename or folder))
        files.passed_over.append(PassedOver(path=where, reason=f"cannot be read: {error.strerror or error}"))

    paths = (Path(top, name) for top, _, names in os.walk(folder, onerror=complain) for name in names)
    found_paths = sorted(islice(paths, MAX_FILES + 1))
    if len(found_paths) > MAX_FILES:
        files.passed_over.append(PassedOver(path=folder, reason=f"only {MAX_FILES:,} of its files were looked at"))
    for path in sorted(found_paths[:MAX_FILES], key=Path.is_symlink):  # the target of a link has its own name
        try:
            _sort_in(path, files, inodes)
        except (InputError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            files.passed_over.append(PassedOver(path=path, reason=cleaned(reason)))
    return files


def _sort_in(path: Path, files: _SortedFiles, inodes: set[tuple[int, int]]) -> None:
    """Add a file by its type; a file with several links counts once."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) in inodes:
        return
    inodes.add((status.st_dev, status.st_ino))
    log_name = LOG_NAME.fullmatch(path.name)
    if log_name is None:
        head = b"".join(chunks(path, HEAD_BYTES))
        if b"\0" in head:
            return
        if not tells_times(head):
            text = head.decode("utf-8", errors="replace")
            if status.st_size <= MAX_LAUNCH_BYTES and looks_like_launch(path, text):
                files.launches[path.parent].append(path)
            return
    if path.name in _RANK_STREAMS and path.parent.name.isdigit():
        files.logs[path.parent.parent, ""].append(path)
    else:
        files.logs[path.parent, log_name[1] if log_name else path.stem].append(path)


# -- runs -------------------------------------------------------------------------------------------------------------


def _started_by(
    log: Path,
    name: str,
    folder: Path,
    launches: dict[Path, list[Path]],
    reading: Callable[[Path], Launch | str],
) -> tuple[Path, Launch]:
    places: Iterable[Path] = (log.parent, *log.parent.parents)
    candidates = next((launches[place] for place in places if place in launches), [])
    if not candidates:
        raise InputError(f"no launch file lies beside it or above it, up to {folder}")
    if len(candidates) > 1:
        candidates = _longest_prefixes(name, candidates) or candidates
    read = [(path, launch) for path in candidates if isinstance(launch := reading(path), Launch)]
    if not read:
        raise InputError(str(reading(candidates[0])))
    first, *later_files = read
    if any(_start_key(launch) != _start_key(first[1]) for _, launch in later_files):
        named_files = " or ".join(path.name for path, _ in read[:4])
        raise InputError(f"whether {named_files} started it is not clear: name the log as the launch file is named")
    return first


def _longest_prefixes(name: str, launches: list[Path]) -> list[Path]:
    """Return the launch files with the longest name that is a prefix of a log's name."""
    alike = [path for path in launches if re.match(re.escape(path.stem) + r"(?![a-zA-Z0-9])", name)]
    longest = max((len(path.stem) for path in alike), default=0)
    return [path for path in alike if len(path.stem) == longest]


def _start_key(launch: Launch) -> tuple[object, ...]:
    """Return plan and problem of a launch file, independent of the model's name and the notation of even layers."""
    model, plan = replace(launch.model, name="any", aliases=(), sources=()), replace(launch.plan, layers_per_chunk=None)
    return launch.framework, model, launch.training, plan, chunk_layers(launch.plan, model.num_layers)


def _read_run(logs: list[Path], launch_file: Path, launch: Launch) -> PastRun:
    plan = launch.plan
    batch = Batch(num_sequences=plan.global_batch, seq_len=launch.training.seq_len, num_devices=plan.num_devices)
    reader = LogReader(batch)
    out_of_memory, errors = "", []
    for log in logs:
        words, num_steps = LogEnd(), 0
        for data in chunks(log, MAX_BYTES):
            for start in range(0, len(data), _PIECE):
                had_memory = not words.out_of_memory
                for line in reader.feed(data[start : start + _PIECE]):
                    words.read(line)
                if had_memory and words.out_of_memory:
                    num_steps = reader.num_steps
        for line in reader.feed(b"\n"):
            words.read(line)
        if reader.num_steps == num_steps:  # no step was timed after the out-of-memory error
            out_of_memory = out_of_memory or words.out_of_memory
        errors.append(words.error)
    error = next(filter(None, errors), "")
    logged = reader.finish() if reader.num_steps else None
    if logged is None and reader.other_batch:  # a run of a different plan, however it ended
        raise InputError(reader.lacks)
    if logged is None and not (out_of_memory or error):
        raise InputError(f"{reader.lacks}, and names no error")
    if logged is not None:
        writers = _WRITTEN_BY.get(launch.target, (logged.framework,))
        if logged.framework not in writers:
            raise InputError(f"a log of {logged.framework}, and {launch_file.name} is a file of {launch.target}")
    return PastRun(
        log=logs[0],
        launch_file=launch_file,
        launch=launch,
        logged=logged,
        is_out_of_memory=bool(out_of_memory),
        reason=out_of_memory or ("" if logged else error),
        ended_s=max(log.stat().st_mtime for log in logs),
    )
