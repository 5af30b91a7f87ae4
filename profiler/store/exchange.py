"""Exchange of timings without a server: a jsonl.gz file with a header line, then records and runs."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autoplan.base.errors import InputError
from autoplan.base.files import replacing
from autoplan.base.units import cleaned
from autoplan.base.version import __version__
from autoplan.profiler.record import PROTOCOL, Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store.marks import BY_CHECK, Mark
from autoplan.spec.operations import SHAPES

FORMAT, VERSION = "autoplan-timings", 3
# Versions of files without marks, and with records only, which older programs can read.
WITHOUT_MARKS, WITHOUT_RUNS = 2, 1
Measured = TypeVar("Measured", Record, RunRecord)
# Bounds on external data, decompressed: a line has room for the maximum number of samples in a record.
MAX_LINE_BYTES = 2**20
MAX_BYTES = 2**33
MAX_RECORDS = 10_000_000
MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class _RunLine:
    """A line with a run, which has another prefix than a record."""

    run: RunRecord


@dataclass(frozen=True, slots=True)
class _MarkLine:
    """A line that hides a record or run, or reverts this."""

    mark: Mark


_RUN_LINE, _MARK_LINE = b'{"run":', b'{"mark":'


@dataclass(frozen=True, slots=True)
class _Named:
    """Field of a record in any version."""

    operation: str


_OPERATION = re.compile(r"[a-z][a-z0-9_]{0,39}")  # format of operation names


def write_exchange(
    path: Path,
    records: Iterable[Record],
    *,
    runs: Sequence[RunRecord] = (),
    marks: Sequence[Mark] = (),
    anonymous: bool = False,
    force: bool = False,
) -> int:
    """Write records, runs and marks to a file, completely or not at all; return the number of records and runs.

    `anonymous` removes hosts and users.
    """
    header = {
        "format": FORMAT,
        "version": VERSION if marks else WITHOUT_MARKS if runs else WITHOUT_RUNS,
        "protocol": PROTOCOL,
        "autoplan": __version__,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    num_records = 0
    # Without name and time in the gzip header, the same records give the same bytes, except for the header line's time.
    with replacing(path, force=force) as target, gzip.GzipFile(filename="", mode="wb", fileobj=target, mtime=0) as out:
        out.write(json.dumps(header).encode() + b"\n")
        for record in records:
            out.write(msgspec.json.encode(_anonymous(record) if anonymous else record) + b"\n")
            num_records += 1
        for run in runs:
            out.write(msgspec.json.encode(_RunLine(_anonymous(run) if anonymous else run)) + b"\n")
        for mark in marks:
            out.write(msgspec.json.encode(_MarkLine(_nameless(mark) if anonymous else mark)) + b"\n")
    return num_records + len(runs)


def is_exchange(path: Path) -> bool:
    """Return whether a file is gzip-compressed, like every export."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_exchange(path: Path, unknown: Counter[str] | None = None) -> Iterator[Record | RunRecord | Mark]:
    """Yield the records, runs and marks of a file; read it to the end before storing any, since damage shows late.

    Operations of later versions, and kinds of lines written by the next version, are skipped and counted by name in
    `unknown`.
    """
    lines = _lines(path)
    _check_header(path, next(lines, b""))
    for number, line in enumerate(lines, start=2):
        if number > MAX_RECORDS + 1:
            raise InputError(f"{path}: more than {MAX_RECORDS:,} records: split it")
        try:
            if line.startswith(_RUN_LINE):
                yield msgspec.json.decode(line, type=_RunLine).run
            elif line.startswith(_MARK_LINE):
                yield msgspec.json.decode(line, type=_MarkLine).mark
            else:
                yield msgspec.json.decode(line, type=Record)
        except RecursionError:
            raise InputError(f"{path}: line {number}: nested too deeply: nothing was imported") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if name := _unknown_operation(line) or _unknown_kind(line):
                if unknown is not None:
                    unknown[name] += 1
                continue
            raise InputError(f"{path}: line {number}: {cleaned(str(error))}: nothing was imported") from None


def _unknown_operation(line: bytes) -> str:
    """Return the operation of a record if this version does not know it, otherwise blank."""
    try:
        operation = msgspec.json.decode(line, type=_Named).operation
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return operation if operation not in SHAPES and _OPERATION.fullmatch(operation) else ""


def _unknown_kind(line: bytes) -> str:
    """Return the kind of a line, its single key, if this version does not know it, otherwise blank."""
    try:
        (name,) = msgspec.json.decode(line, type=dict[str, dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return ""
    is_known = line.startswith((_RUN_LINE, _MARK_LINE))
    return name if not is_known and _OPERATION.fullmatch(name) else ""


def _nameless(mark: Mark) -> Mark:
    """Return a mark without its author (unless the automatic check) and reason, which may contain names."""
    return mark if mark.by == BY_CHECK else replace(mark, by="", reason="")


def _anonymous(record: Measured) -> Measured:
    """Return the record or run without host and user, also in its free text."""
    names = [name for name in (record.host, record.measured_by) if name]

    def without(text: str) -> str:
        for name in names:
            text = text.replace(name, "-")
        return text

    anonymous = replace(record, host="", measured_by="", reason=without(record.reason))
    anonymous = replace(anonymous, conditions={key: without(value) for key, value in anonymous.conditions.items()})
    if isinstance(anonymous, Record):
        return anonymous
    return replace(anonymous, plan=replace(anonymous.plan, placement=None))  # contains host names


def _lines(path: Path) -> Iterator[bytes]:
    size = 0
    try:
        with gzip.open(path, "rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                size += len(line)
                if len(line) > MAX_LINE_BYTES or size > MAX_BYTES:
                    raise InputError(
                        f"{path}: unpacked, a line is longer than {MAX_LINE_BYTES:,} bytes or the whole longer than "
                        f"{MAX_BYTES:,}: no export of autoplan is"
                    )
                yield line
    except EOFError:
        raise InputError(f"{path}: ends too early, as if not copied whole: nothing was imported") from None
    except gzip.BadGzipFile as error:
        raise InputError(f"{path}: no exchange file, or damaged ({error}): nothing was imported") from None
    except zlib.error as error:
        raise InputError(f"{path}: damaged ({error}): nothing was imported") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _check_header(path: Path, line: bytes) -> None:
    header: dict[str, Any] = {}
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        header = msgspec.json.decode(line, type=dict[str, Any])
    if header.get("format") != FORMAT:
        raise InputError(f"{path}: no export of autoplan: its first line does not say so")
    # Additional content of the next version is skipped line by line.
    for name, newest, newest_read in (("version", VERSION, VERSION + 1), ("protocol", PROTOCOL, PROTOCOL)):
        if not isinstance(header.get(name), int) or header[name] > newest_read:
            raise InputError(
                f"{path}: its {name} is {header.get(name)!r}, this autoplan knows {newest}: update autoplan"
            )
