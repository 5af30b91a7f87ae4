"""Conversion between rows of the timing database and records or runs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Row

from autoplan.base.errors import InputError
from autoplan.profiler.record import NOT_CONTENT, Fingerprint, Record
from autoplan.profiler.run_record import RunRecord
from autoplan.profiler.store.marks import now

BESIDE = " beside "  # in the kernel name of a measurement with intentional concurrent work


def record_row(key: str, record: Record, fingerprint_id: int) -> dict[str, Any]:
    """Return the row of a record, by column."""
    same = ("operation", "dtype", "kernel", "mode", "status", "reason", "source", "protocol", "measured_by", "host")
    shape = "x".join(map(str, record.shape))
    return {
        "key": key,
        "fingerprint_id": fingerprint_id,
        "shape": shape,
        "work_hash": _work_hash(f"{record.operation} {shape} {record.dtype}"),
        "is_alone": BESIDE not in record.kernel,
        "seconds": record.seconds if record.samples_s else None,
        "samples": np.asarray(record.samples_s, dtype="<f8").tobytes(),
        "conditions": json.dumps(dict(record.conditions), sort_keys=True, ensure_ascii=False),
        "measured_at": record.measured_at,
        "added_at": now(),
        **{name: getattr(record, name) for name in same},
    }


def record_of(row: Row[Any], fingerprint: Fingerprint) -> Record:
    """Return the record for a row and its machine; raises InputError if this version does not understand it."""
    try:
        return Record(
            fingerprint=fingerprint,
            operation=row.operation,
            shape=shape_of(row.shape),
            dtype=row.dtype,
            samples_s=tuple(np.frombuffer(row.samples, dtype="<f8").tolist()),
            kernel=row.kernel,
            mode=row.mode,
            status=row.status,
            reason=row.reason,
            conditions=json.loads(row.conditions),
            source=row.source,
            protocol=int(row.protocol),
            measured_by=row.measured_by,
            host=row.host,
            measured_at=row.measured_at,
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"record {row.key[:12]} cannot be read, `autoplan db check` lists such ones: {error}"
        ) from None


def run_row(key: str, run: RunRecord, fingerprint_id: int) -> dict[str, Any]:
    """Return the row of a run, by column."""
    content = msgspec.to_builtins(run)
    apart = {name: content.pop(name) for name in NOT_CONTENT}
    del content["fingerprint"]
    return {
        "key": key,
        "fingerprint_id": fingerprint_id,
        "framework": run.framework,
        "model": run.model.name,
        "status": run.status,
        "seconds": run.seconds,
        "content": json.dumps(content, sort_keys=True, ensure_ascii=False),
        "added_at": now(),
        **apart,
    }


def run_of(row: Row[Any], fingerprint: Fingerprint) -> RunRecord:
    """Return the run for a row and its machine; raises InputError if this version does not understand it."""
    try:
        content = json.loads(row.content) | {name: getattr(row, name) for name in NOT_CONTENT}
        return msgspec.convert(content | {"fingerprint": msgspec.to_builtins(fingerprint)}, RunRecord)
    except (ValueError, TypeError) as error:
        raise InputError(f"run {row.key[:12]} cannot be read: {error}") from None


def _work_hash(work: str) -> int:
    """Return a signed 64-bit hash, like the database's integers; a million shapes collide with probability 3e-8."""
    return int.from_bytes(hashlib.sha256(work.encode()).digest()[:8], signed=True)


def shape_of(text: str) -> tuple[int, ...]:
    """Return the numbers in text such as 4096x4096x64."""
    return tuple(map(int, text.split("x")))
