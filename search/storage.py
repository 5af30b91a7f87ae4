"""Storage of searches: Optuna storages by URL, and studies that only identical searches can join."""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import optuna
from optuna.storages import BaseStorage, GrpcStorageProxy, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from autoplan.base.errors import InputError
from autoplan.base.urls import is_url, redact_url
from autoplan.base.version import __version__
from autoplan.frameworks.common.rules import Rule
from autoplan.search.damage import DAMAGE
from autoplan.search.space import Space
from autoplan.spec.problem import Problem

IDENTITY = "autoplan"  # study attribute that identifies the search
IDENTITY_PATIENCE_S = 5.0  # the creator writes that attribute right after the study
BUSY_TIMEOUT_S = 60.0  # SQLite: how long a worker waits for other writers
GRPC_TIMEOUT_S = 10.0
MAX_OPENINGS, OPENING_PAUSE_S = 5, 0.3
# Modules whose errors are storage errors; json for a damaged journal.
_LIBRARIES = ("alembic", "grpc", "json", "optuna", "psycopg", "sqlalchemy")
_JOURNAL_STARTS = b'{"op_code":'  # beginning of each line by Optuna
_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)
_GRPC = re.compile(r"grpc://(?P<host>[\w.-]+):(?P<port>[0-9]{1,5})")


@contextmanager
def opened(url: str | None) -> Iterator[BaseStorage]:
    """Open memory (None), a journal file, a proxy's grpc://host:port or a database; errors contain no password."""
    with _one_line_errors(url):
        storage = _open(url)
        try:
            yield storage
        finally:
            if isinstance(storage, RDBStorage):
                storage.remove_session()
                storage.engine.dispose()
            elif isinstance(storage, GrpcStorageProxy):
                storage.close()


def _open(url: str | None) -> BaseStorage:
    if url is None:
        return InMemoryStorage()
    if match := _GRPC.fullmatch(url):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            proxy = GrpcStorageProxy(host=match["host"], port=int(match["port"]))
        proxy.wait_server_ready(timeout=GRPC_TIMEOUT_S)
        return proxy
    if "://" not in url:
        return _journal(url)
    if not is_url(url):
        raise InputError("--storage: write a path, grpc://host:port, or a URL whose password is percent-encoded")
    scheme, address = url.split("://", 1)
    if scheme == "sqlite":
        return _sqlite(url)
    driver = {"postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}.get(scheme, scheme)
    return _database(f"{driver}://{address}", {"pool_pre_ping": True})


def _journal(path: str) -> JournalStorage:
    """Open a journal and truncate an incomplete last line (full disk, power loss), which would corrupt the next."""
    lock = JournalFileSymlinkLock(path)
    backend = JournalFileBackend(path, lock_obj=lock)
    lock.acquire()  # no other writer
    try:
        content = Path(path).read_bytes()
        if content and not content.startswith(_JOURNAL_STARTS):
            raise InputError(f"--storage {path}: is not the journal of a study: give another path")
        if not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
    finally:
        lock.release()
    try:
        return JournalStorage(backend)
    except DAMAGE:
        raise InputError(f"--storage {path}: is damaged: give another") from None


def _database(url: str, options: dict[str, Any]) -> RDBStorage:
    """Open a database; if several workers create its tables at once, all but one have to retry."""
    from sqlalchemy.exc import DBAPIError

    for _ in range(MAX_OPENINGS - 1):
        with suppress(DBAPIError):
            return RDBStorage(url, engine_kwargs=options)
        time.sleep(OPENING_PAUSE_S)
    return RDBStorage(url, engine_kwargs=options)


def _sqlite(url: str) -> RDBStorage:
    """Open SQLite so that it locks the file before a claim reads and writes a trial; otherwise two may claim it."""
    from sqlalchemy import event

    storage = _database(url, {"connect_args": {"timeout": BUSY_TIMEOUT_S}})
    storage.engine.dispose()
    event.listen(storage.engine, "connect", _use_wal)
    event.listen(storage.engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return storage


def _use_wal(connection: sqlite3.Connection, _: object) -> None:
    """Disable implicit transactions of the driver, and lose none when a process is killed."""
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


@contextmanager
def _one_line_errors(url: str | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        is_from_storage = isinstance(error, OSError | ImportError) or type(error).__module__.split(".")[0] in _LIBRARIES
        if url is None or not is_from_storage:
            raise
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise InputError(f"--storage {redact_url(url)}: {_without_secret(message, url)}") from None


def _without_secret(text: str, url: str) -> str:
    """Return an error's text without the password of a quoted URL."""
    secret = re.search(r"://[^/@]*:([^/@]*)@", url)
    for variant in {secret[1], unquote(secret[1])} if secret else ():
        text = text.replace(variant, "***") if variant else text
    return text


def join_study(
    storage: BaseStorage, name: str | None, identity: Mapping[str, str], *, metric: str = ""
) -> tuple[optuna.Study, bool]:
    """Return the study and whether it was created here; raise InputError if it belongs to a different search.

    `metric` is what viewers of the study call its values.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if name is not None and not _NAME.fullmatch(name):
        raise InputError(f"--study {name!r}: write at most 100 letters, digits, '.', '_' and '-'")
    try:
        study = optuna.create_study(study_name=name, storage=storage, direction="minimize")
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(study_name=name, storage=storage)
        _check_same(study, identity)
        return study, False
    if metric:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([metric])
    study.set_user_attr(IDENTITY, dict(identity))
    return study, True


def _check_same(study: optuna.Study, identity: Mapping[str, str]) -> None:
    until = time.monotonic() + IDENTITY_PATIENCE_S
    while (recorded := study.user_attrs.get(IDENTITY)) is None:
        if time.monotonic() > until:
            raise InputError(f"study {study.study_name} was not made by this command: give another --study")
        time.sleep(0.1)
    if recorded == dict(identity):
        return
    differences = [
        f"{key} {recorded.get(key)}, here {value}" for key, value in identity.items() if recorded.get(key) != value
    ]
    raise InputError(
        f"study {study.study_name} belongs to another problem ({'; '.join(differences)}): give another --study"
    )


def identity(problem: Problem, space: Space, **more: object) -> dict[str, str]:
    """Return the identity of a search: a short description and a hash of everything that determines its answer."""
    return {
        "version": __version__,
        "model": problem.model.name,
        "cluster": f"{problem.cluster.name} of {problem.cluster.num_devices}",
        **{name: str(value) for name, value in more.items()},
        "problem": fingerprint((__version__, problem, space, sorted(more.items()))),
    }


def fingerprint(value: object) -> str:
    """Return a hash of nested dataclasses, mappings, sequences, arrays and plain values, the same in any process."""
    digest = hashlib.sha256()
    for part in _parts(value):
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _parts(value: object) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, Rule):  # its functions cannot be hashed, but the place in the framework's source can
        yield value.source.encode()
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.init and field.compare:  # the others are derived or caches
                yield field.name.encode()
                yield from _parts(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, tuple | list):
        yield str(len(value)).encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(value, key=repr)).encode()
    elif hasattr(value, "__qualname__"):  # a function, such as a framework's split of the layers
        yield f"{value.__module__}.{value.__qualname__}".encode()
    elif isinstance(value, np.ndarray):
        yield repr((value.shape, value.dtype.str)).encode()
        yield value.tobytes()
    else:
        assert value is None or isinstance(value, str | int | float | Enum), type(value)
        yield repr(value).encode()
