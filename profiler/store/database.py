"""Access to a timing database (SQLite file or PostgreSQL server), with one-line errors."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from autoplan.base.errors import InputError, NoStoreError, StoreError
from autoplan.base.files import is_folder, of_user, own_folder
from autoplan.base.urls import is_url, redact_url
from autoplan.profiler.store.schema import DAMAGED, SCHEMA, check_schema, may_migrate, migrate, stored_schema

VARIABLE = "AUTOPLAN_DB"
BUSY_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10
ON_BEGIN = "on_begin"  # execution option: how SQLite begins a transaction
# PostgreSQL memory per query step, so that long lists of excluded records are hashed, not scanned.
WORK_MEMORY = "64MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """An open database; `name` is safe to show."""

    name: str
    engine: Engine = field(repr=False)
    secrets: tuple[str, ...] = field(repr=False)  # must never be shown
    schema: int = 0  # this program's version, or one version older or newer

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A read-only transaction on a consistent state of the database."""
        with self.telling(), self.engine.connect() as connection:
            if connection.dialect.name == "postgresql":  # where each statement would see what was added before it
                connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is committed at the end of the block, or not at all."""
        with self.telling(), self.engine.connect() as connection:
            # SQLite: a transaction that starts with reading could not wait for its turn to write.
            connection.execution_options(**{ON_BEGIN: "BEGIN IMMEDIATE"})
            yield connection
            connection.commit()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Convert database errors to one line without secrets."""
        try:
            yield
        except SQLAlchemyError as error:
            raise StoreError(self._explained(error)) from None
        except UnicodeDecodeError as error:  # the driver's message quotes a damaged file
            raise StoreError(f"{self.name} {DAMAGED} ({error.reason})") from None

    def _explained(self, error: SQLAlchemyError) -> str:
        cause = error.orig if isinstance(error, DBAPIError) and error.orig else error
        reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        for secret in self.secrets:
            reason = reason.replace(secret, "***")
        for part, advice in _ADVICE:
            if part in str(cause):
                return f"{self.name}: {advice} ({reason})"
        return f"{self.name}: {reason}"


# Messages of drivers and their meaning for the user.  Earlier commits are intact in every case.
_RESUME = "run the command again: earlier writes are kept and nothing is duplicated"
_ADVICE = (
    ("disk is full", f"the disk is full; free some space and {_RESUME}"),
    ("No space left", f"the disk of the server is full; free some space and {_RESUME}"),
    ("disk I/O error", f"the disk refuses to write; see to its space and limits and {_RESUME}"),
    ("readonly database", "may not be written: ask for write permission, or name another one with --db"),
    ("malformed", DAMAGED),
    ("not a database", "is not a SQLite database, or damaged: move it away or name another one with --db"),
    ("database is locked", f"other programs kept it busy for {BUSY_TIMEOUT_S:.0f} s; {_RESUME}"),
    ("unable to open", "cannot be opened: see whether the folder exists and may be read and written"),
    (
        "permission denied for schema",
        "this role may not use the schema, or its owner has not made the tables yet (by a first `autoplan db push`)",
    ),
    ("permission denied", "this role may not do that: read access is enough to search and pull, not to push or hide"),
    ("read-only transaction", "may only be read"),
    ("terminating connection", f"the server ended the connection; {_RESUME}"),
    ("server closed the connection", f"the server went away; {_RESUME}"),
    ("connection is lost", f"the server went away; {_RESUME}"),
)


def open_database(url: str | None, *, writable: bool, creates: bool) -> Database:
    """Open the database at `url` (see `open_store`), with this program's schema or one version older or newer."""
    text = url or os.environ.get(VARIABLE) or str(default_path())
    if "://" in text or redact_url(text) != text:
        database = _server_or_file(text, writable=writable, creates=creates)
    else:
        database = _sqlite(of_user(text), writable=writable, creates=creates)
    try:
        with database.reading() as connection:
            schema = stored_schema(connection, database.name)
            is_owner = may_migrate(connection)
        if writable and is_owner and schema < SCHEMA and (schema or creates):
            with database.writing() as connection:
                migrate(connection, database.name)
            schema = SCHEMA
        check_schema(schema, database.name)
    except BaseException:
        database.engine.dispose()
        raise
    return replace(database, schema=schema)


def default_path() -> Path:
    """Return the path of the user's own timings."""
    return own_folder("data") / "timings.db"


def _server_or_file(text: str, *, writable: bool, creates: bool) -> Database:
    if not is_url(text):
        raise InputError(
            "the database URL cannot be read: write postgresql://user@host:port/name, special characters of a password "
            "in percent code (@ is %40), or leave the password to PGPASSWORD or ~/.pgpass"
        )
    url = make_url(text)
    kind = url.get_backend_name()
    if kind == "sqlite":
        if not url.database or url.query:
            raise InputError(f"{redact_url(text)}: name the file, sqlite:////folder/timings.db, without options")
        return _sqlite(Path(url.database), writable=writable, creates=creates)
    if kind not in ("postgresql", "postgres"):
        raise InputError(f"{redact_url(text)}: a timing database is a SQLite file or postgresql://...")
    return _postgresql(text, url, writable=writable)


def _postgresql(text: str, url: URL, *, writable: bool) -> Database:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise InputError("PostgreSQL needs psycopg: pip install 'autoplan[postgres]'") from None
    options: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": "autoplan"}
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        connect_args={name: value for name, value in options.items() if name not in url.query},
        hide_parameters=True,
        execution_options={} if writable else {"postgresql_readonly": True},
    )
    event.listen(engine, "begin", _use_memory)
    passwords = [str(url.password or ""), os.environ.get("PGPASSWORD", "")]
    passwords += [str(value) for name, value in url.query.items() if "pass" in name.lower()]
    secrets = {form for word in passwords if word for form in (word, quote(word, safe=""), unquote(word))}
    return Database(name=redact_url(text), engine=engine, secrets=tuple(sorted(secrets, key=len, reverse=True)))


def _sqlite(path: Path, *, writable: bool, creates: bool) -> Database:
    name = str(path)
    if is_folder(path):
        raise StoreError(f"{name} is a folder: name a file")
    try:
        if writable and creates:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.exists():
            raise NoStoreError(f"{name}: no such file: `autoplan profile` or `autoplan db import` makes one")
    except OSError as error:
        raise StoreError(f"{name}: {error.strerror or error}") from None
    place = f"file:{quote(os.fsencode(path.absolute()))}"

    def connect(options: str) -> sqlite3.Connection:
        # `_begin` starts transactions, not the driver, which would start them late.
        return sqlite3.connect(
            f"{place}?{options}", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )

    def connected() -> sqlite3.Connection:
        connection = connect("mode=rwc" if writable else "mode=ro")
        if writable:
            _use_wal(connection)
            return connection
        try:
            connection.execute("PRAGMA schema_version")
            return connection
        except sqlite3.OperationalError:
            # In WAL mode even a reader writes files next to the database.  If it may not, and no writer left its log
            # there, the file is opened as immutable.
            if Path(f"{path}-wal").exists():
                raise
            return connect("mode=ro&immutable=1")

    engine = create_engine("sqlite://", creator=connected, hide_parameters=True)
    event.listen(engine, "begin", _begin)
    return Database(name=name, engine=engine, secrets=())


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(ON_BEGIN, "BEGIN"))


def _use_memory(connection: Connection) -> None:
    connection.exec_driver_sql(f"SET LOCAL work_mem = '{WORK_MEMORY}'")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Allow reading during a write; switching to WAL does not wait for locks, so this function waits."""
    waited_until = time.monotonic() + BUSY_TIMEOUT_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = wal")
            break  # a file system without shared memory keeps the rollback journal: slower, but correct
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > waited_until:
                raise
            time.sleep(0.05)
