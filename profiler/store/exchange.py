"""How do timings travel without a server?  In a jsonl.gz file: a line on where it comes from, then a record a line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from autoplan import __version__
from autoplan.errors import InputError
from autoplan.files import replacing
from autoplan.units import cleaned
from profiler.record import PROTOCOL, Record

FORMAT, VERSION = "autoplan-timings", 1
# Bounds on what comes from outside, unpacked: a line holds the most samples that a record may have.
MOST_LINE_BYTES = 2**20
MOST_BYTES = 2**33
MOST_RECORDS = 10_000_000
MAGIC = b"\x1f\x8b"


def write_exchange(path: Path, records: Iterable[Record], *, anonymous: bool = False, force: bool = False) -> int:
    """Write records to a file, whole or not at all; how many.  `anonymous` leaves hosts and users out."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "protocol": PROTOCOL,
        "autoplan": __version__,
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    num_records = 0
    # No name and time in the frame: the same records make the same bytes but for the header's moment.
    with replacing(path, force=force) as target, gzip.GzipFile(filename="", mode="wb", fileobj=target, mtime=0) as out:
        out.write(json.dumps(header).encode() + b"\n")
        for record in records:
            out.write(msgspec.json.encode(_anonymous(record) if anonymous else record) + b"\n")
            num_records += 1
    return num_records


def is_exchange(path: Path) -> bool:
    """Whether a file is packed, as every export is."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_exchange(path: Path) -> Iterator[Record]:
    """The records of a file, one by one; read it to its end before anything is kept, as a damaged one shows late."""
    lines = _lines(path)
    _check_header(path, next(lines, b""))
    for number, line in enumerate(lines, start=2):
        if number > MOST_RECORDS + 1:
            raise InputError(f"{path}: more than {MOST_RECORDS:,} records: split it")
        try:
            yield msgspec.json.decode(line, type=Record)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: line {number}: {cleaned(str(error))}: nothing of the file was taken") from None


def _anonymous(record: Record) -> Record:
    """The record without host and user, where its free text names them as well."""
    names = [name for name in (record.host, record.measured_by) if name]

    def without(text: str) -> str:
        for name in names:
            text = text.replace(name, "-")
        return text

    return replace(
        record,
        host="",
        measured_by="",
        reason=without(record.reason),
        conditions={key: without(value) for key, value in record.conditions.items()},
    )


def _lines(path: Path) -> Iterator[bytes]:
    size = 0
    try:
        with gzip.open(path, "rb") as stream:
            while line := stream.readline(MOST_LINE_BYTES + 1):
                size += len(line)
                if len(line) > MOST_LINE_BYTES or size > MOST_BYTES:
                    raise InputError(
                        f"{path}: unpacked, a line is longer than {MOST_LINE_BYTES:,} bytes or the whole longer than "
                        f"{MOST_BYTES:,}: no export of autoplan is"
                    )
                yield line
    except EOFError:
        raise InputError(f"{path}: ends too early, as if not copied whole: nothing of it was taken") from None
    except gzip.BadGzipFile as error:
        raise InputError(f"{path}: no exchange file, or damaged ({error}): nothing of it was taken") from None
    except zlib.error as error:
        raise InputError(f"{path}: damaged ({error}): nothing of it was taken") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _check_header(path: Path, line: bytes) -> None:
    header: dict[str, Any] = {}
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        header = msgspec.json.decode(line, type=dict[str, Any])
    if header.get("format") != FORMAT:
        raise InputError(f"{path}: no export of autoplan: its first line does not say so")
    for name, known in (("version", VERSION), ("protocol", PROTOCOL)):
        if not isinstance(header.get(name), int) or header[name] > known:
            raise InputError(
                f"{path}: its {name} is {header.get(name)!r}, this autoplan knows {known}: update autoplan"
            )
