"""Databases and records for the tests of the timing database."""

from __future__ import annotations

import os
import random
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from autoplan.base.errors import StoreError
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import open_store, schema

LAB = Fingerprint(
    device="h100-sxm",
    memory_bytes=80 * 2**30,
    devices_per_node=8,
    runtime="cuda 13.0",
    torch="2.13.0",
    collectives="nccl 2.28.3",
    topology="5f2c",
)
SERVER = "postgres@127.0.0.1:5432"
GEMM = Record(
    fingerprint=LAB,
    operation="gemm",
    shape=(4096, 4096, 4096),
    dtype="bf16",
    samples_s=(2.0e-4, 2.1e-4, 2.2e-4),
    kernel="torch",
    conditions={"clock": "1755 MHz"},
    measured_by="ada",
    host="node7",
    measured_at="2026-11-21T12:00:00Z",
)


def some_records(seed: int, count: int) -> list[Record]:
    """Plausible records, the same for the same seed."""
    rng = random.Random(seed)
    return [
        Record(
            fingerprint=LAB,
            operation="gemm",
            shape=(128 * (at + 1), 1024, 1024 * (seed + 1)),
            dtype="bf16",
            samples_s=tuple(2e-6 * (at + 1) * (seed + 1) * (1 + 0.01 * rng.random()) for _ in range(5)),
            measured_by=f"user{seed}",
        )
        for at in range(count)
    ]


def stored_records(path: Path) -> list[Record]:
    """Content of the SQLite file, in order; nothing where another process has yet to make it."""
    try:
        with open_store(str(path), writable=False) as store:
            return list(store.records())
    except StoreError:
        return []


@contextmanager
def postgres_schema(server: str = SERVER) -> Iterator[str]:
    """URL of a schema of its own in the server's database, which is dropped afterwards; skips where none answers."""
    psycopg = pytest.importorskip("psycopg")
    where = f"postgresql://{server}/postgres"
    try:
        admin = psycopg.connect(where, autocommit=True, connect_timeout=5)
    except psycopg.OperationalError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no PostgreSQL server answers at {server}: {str(error).splitlines()[0]}")
    name = f"autoplan_test_{uuid.uuid4().hex[:12]}"
    with admin:
        admin.execute(f"CREATE SCHEMA {name}")
        try:
            yield f"{where}?options={quote(f'-csearch_path={name}', safe='')}"
        finally:
            admin.execute(f"DROP SCHEMA {name} CASCADE")


def migrate_later(patch: pytest.MonkeyPatch, folder: Path, then: str) -> None:
    """Let there be a version after the last, which adds a column and does what `then` says."""
    later = folder / "migrations"
    shutil.copytree(schema.MIGRATIONS, later)
    (later / "versions" / "next.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        f"revision = '{schema.SCHEMA + 1}'\ndown_revision = '{schema.SCHEMA}'\n"
        f"def upgrade():\n    op.add_column('fingerprints', sa.Column('site', sa.Text))\n{then}"
    )
    patch.setattr(schema, "MIGRATIONS", later)
    patch.setattr(schema, "SCHEMA", schema.SCHEMA + 1)
    patch.setattr("autoplan.profiler.store.database.SCHEMA", schema.SCHEMA)
