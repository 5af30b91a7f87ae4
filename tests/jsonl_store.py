"""A timing database in one file of lines, as small as a sweep's needs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from profiler.record import Fingerprint, Record
from profiler.sweep import Key


class JsonlStore:
    def __init__(self, path: Path) -> None:
        self._path = path

    def records(self) -> list[Record]:
        if not self._path.exists():
            return []
        return [msgspec.json.decode(line, type=Record) for line in self._path.read_bytes().splitlines()]

    def known(self, fingerprint: Fingerprint) -> set[Key]:
        return {
            (one.operation, one.shape, one.dtype, one.kernel, one.mode)
            for one in self.records()
            if one.fingerprint == fingerprint
        }

    def add(self, records: Iterable[Record]) -> None:
        with self._path.open("ab") as file:
            file.writelines(msgspec.json.encode(one) + b"\n" for one in records)
            file.flush()
            os.fsync(file.fileno())
