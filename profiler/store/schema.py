"""Schema of the timing database: tables, insertion of rows, and migration of older versions."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from autoplan.base.errors import NoStoreError, StoreError, StoreWarning

DAMAGED = "is damaged: move it away and restore a copy, or pull or profile again"
SCHEMA = 5  # the newest revision in `migrations/versions`
# The first version after which versions only add tables and optional columns, and change indexes, so that a program
# works with a database that is one version older or newer.
FIRST_TOLERANT = 3
MIGRATIONS = Path(__file__).parent / "migrations"
VERSION_TABLE = "autoplan_schema"  # not Alembic's own name: Optuna's studies may share the database
_MIGRATION_LOCK = 0x6175746F706C616E  # "autoplan"

_ID = BigInteger().with_variant(Integer, "sqlite")  # only an INTEGER counts itself up there

metadata: MetaData = MetaData()

fingerprints: Table = Table(
    "fingerprints",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("device", Text, nullable=False, index=True),
    Column("content", Text, nullable=False),  # complete content, as JSON
)

records: Table = Table(
    "records",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("key", String(64), nullable=False, unique=True),  # SHA-256 of the content
    Column("fingerprint_id", _ID, ForeignKey("fingerprints.id"), nullable=False),
    Column("operation", Text, nullable=False),
    Column("shape", Text, nullable=False),  # 4096x4096x4096
    Column("dtype", Text, nullable=False),
    Column("work_hash", BigInteger, nullable=False),  # hash of operation, shape and dtype, which is faster to sort
    *(Column(name, Text, nullable=False) for name in ("kernel", "mode", "status", "reason")),
    Column("is_alone", Boolean, nullable=False),  # no intentional concurrent work
    Column("seconds", Double),  # median of the samples
    Column("samples", LargeBinary, nullable=False),  # seconds, float64, little-endian
    Column("conditions", Text, nullable=False),  # JSON
    Column("source", Text, nullable=False),
    Column("protocol", Integer, nullable=False),
    *(Column(name, Text, nullable=False) for name in ("measured_by", "host", "measured_at", "added_at")),
    # Has all that a search reads, in the order in which it is grouped: nothing is sorted, and no row is looked up.
    Index(
        "records_by_work",
        *("fingerprint_id", "operation", "dtype", "is_alone", "status", "mode", "work_hash", "measured_at"),
        *("seconds", "id", "shape", "key"),
    ),
)

# Measured training runs.  `content` is the run as JSON, without its machine and the fields in the columns after it; the
# columns before it are used to select runs.
runs: Table = Table(
    "runs",
    metadata,
    Column("id", _ID, primary_key=True),
    Column("key", String(64), nullable=False, unique=True),  # SHA-256 of the content
    Column("fingerprint_id", _ID, ForeignKey("fingerprints.id"), nullable=False),
    *(Column(name, Text, nullable=False) for name in ("framework", "model", "status")),
    Column("seconds", Double),  # median of the step times
    Column("content", Text, nullable=False),
    *(Column(name, Text, nullable=False) for name in ("measured_by", "host", "measured_at", "added_at")),
)


def _marks(name: str, of: str) -> Table:
    """Return the table of marks that hide or approve rows of the table `of`, by a person or the automatic check."""
    return Table(
        name,
        metadata,
        Column("id", _ID, primary_key=True),
        Column("record_id", _ID, ForeignKey(f"{of}.id"), nullable=False),
        Column("hides", Boolean, nullable=False),
        *(Column(column, Text, nullable=False) for column in ("by", "reason", "at")),
        Index(f"{name}_by_record", "record_id", "at", "by", "hides", unique=True),
    )


marks: Table = _marks("marks", "records")
run_marks: Table = _marks("run_marks", "runs")  # from schema 4 on


def insert_new(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> int:
    """Add the rows that are missing; return their number."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    new = insert(table).on_conflict_do_nothing().returning(next(iter(table.primary_key)))  # drivers count otherwise
    return len(connection.execute(new, rows).all())


def stored_schema(connection: Connection, name: str) -> int:
    """Return the schema version of the database `name`; 0 if it has none."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return 0
    rows = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).all()
    version = ", ".join(str(row[0]) for row in rows)  # several rows name no version
    if rows and not re.fullmatch("[1-9][0-9]{0,8}", version):
        raise StoreError(f"{name} {DAMAGED} (its schema is {version[:40]!r})")
    return int(version) if rows else 0


def check_schema(schema: int, name: str) -> None:
    """Raise an error for a database more than one version newer or older than this program; warn of a newer one."""
    if schema > SCHEMA + 1:
        raise StoreError(f"{name} has schema {schema}, this autoplan knows {SCHEMA}: update autoplan")
    if schema > SCHEMA:
        text = f"{name} has schema {schema}, this autoplan knows {SCHEMA} and ignores newer features: update autoplan"
        warnings.warn(text, StoreWarning, stacklevel=4)
    if schema == 0:
        raise NoStoreError(f"{name} holds no timings yet: `autoplan profile` or `autoplan db import` writes some")
    if schema < max(SCHEMA - 1, FIRST_TOLERANT):
        raise StoreError(
            f"{name} has schema {schema}, this autoplan {SCHEMA}: its owner can migrate it by writing to it"
        )


def may_migrate(connection: Connection) -> bool:
    """Return whether this role owns the tables of the database, as required for changing them."""
    if connection.dialect.name != "postgresql":
        return True
    query = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass(:table)"
    return connection.execute(text(query), {"table": VERSION_TABLE}).scalar() is not False


def migrate(connection: Connection, name: str) -> None:
    """Migrate the database to this program's schema, in the transaction of `connection`; one process at a time."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(text(f"pg_advisory_xact_lock({_MIGRATION_LOCK})")))
    if (schema := stored_schema(connection, name)) < SCHEMA:
        from alembic import command
        from alembic.config import Config

        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
        command.upgrade(config, "head")
    else:
        check_schema(schema, name)
