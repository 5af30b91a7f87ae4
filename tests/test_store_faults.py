"""When disk, file or server fail: is the database whole, is it said in one line, and does it go on later?"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autoplan.base.errors import InputError, StoreError
from autoplan.profiler.store import open_store
from autoplan.profiler.store.exchange import write_exchange
from autoplan.profiler.store.schema import SCHEMA
from stores import GEMM, LAB, SERVER, migrate_later, postgres_schema, some_records

ROOT = Path(__file__).parents[1]
NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without the rights of root, who may write everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def most_file_bytes(size: int) -> Iterator[None]:
    """No file may grow beyond `size`: writing fails as on a full disk, with another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="autoplan-test-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert text.isprintable()
    return text


def assert_whole(path: Path) -> int:
    """The number of records of a sound file."""
    with open_store(str(path)) as store:
        assert list(store.check()) == []
        return sum(holding.num_records for holding in store.holdings())


# -- disk


def test_a_disk_that_fills_up_keeps_what_was_added_and_goes_on_later(place: Path) -> None:
    path, records = place / "timings.db", some_records(0, 3000)
    with most_file_bytes(800_000), open_store(str(path)) as store, pytest.raises(StoreError) as error:
        store.add(records)
    assert re.search(r"the disk (is full|refuses to write).* run the command again", line(error))
    assert 0 <= assert_whole(path) < 3000
    with open_store(str(path)) as store:
        store.add(records)
    assert assert_whole(path) == 3000


def test_a_full_file_system_keeps_what_was_added_and_goes_on_later(place: Path) -> None:
    small = place / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system of its own cannot be mounted here")
    try:
        path, records = small / "timings.db", some_records(0, 6000)
        with open_store(str(path)) as store, pytest.raises(StoreError, match="the disk is full; free some space"):
            store.add(records)
        with pytest.raises(InputError, match="cannot be written: No space left"):
            write_exchange(small / "out.jsonl.gz", records)
        assert {entry.name for entry in small.iterdir()} <= {"timings.db", "timings.db-wal", "timings.db-shm"}
        subprocess.run(["mount", "-o", "remount,size=16m", str(small)], check=True)
        assert assert_whole(path) < 6000
        with open_store(str(path)) as store:
            store.add(records)
        assert assert_whole(path) == 6000
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_an_export_that_does_not_fit_leaves_no_file(place: Path) -> None:
    with most_file_bytes(5_000), pytest.raises(InputError, match="cannot be written: File too large"):
        write_exchange(place / "out.jsonl.gz", some_records(0, 3000))
    assert list(place.iterdir()) == []


# -- permission


def test_a_read_only_file_can_be_searched_but_not_changed(place: Path) -> None:
    path = place / "timings.db"
    with open_store(str(path)) as store:
        store.add([GEMM])
    path.chmod(0o444)
    place.chmod(0o555)
    with unprivileged():
        with open_store(str(path), writable=False) as store:
            assert list(store.records()) == [GEMM]
            assert len(store.timings(LAB)) == 1
        with (
            pytest.raises(StoreError, match=r"may not be written|cannot be opened") as error,
            open_store(str(path)) as it,
        ):
            it.add(some_records(0, 1))
    assert line(error).startswith(str(path))
    assert assert_whole(path) == 1


def test_a_folder_that_may_not_be_written_is_named(place: Path) -> None:
    place.chmod(0o555)
    with unprivileged(), pytest.raises(StoreError, match=r"cannot be opened|Permission denied") as error:
        open_store(str(place / "new" / "timings.db"))
    assert str(place) in line(error)


def test_a_file_that_may_not_be_read_is_named(place: Path) -> None:
    path = place / "timings.db"
    with open_store(str(path)) as store:
        store.add([GEMM])
    path.chmod(0o000)
    with unprivileged():
        for writable in (True, False):
            with pytest.raises(StoreError, match="cannot be opened") as error:
                open_store(str(path), writable=writable)
    line(error)


def grants() -> list[str]:
    """Statements that the manual tells the owner of a team's database to say, statement by statement."""
    manual = (ROOT / "docs/how-to/timings.md").read_text()
    (block,) = re.findall(r"```sql\n(.*?)```", manual, re.DOTALL)
    return [statement.strip() for statement in re.sub("--.*", "", block).split(";") if statement.strip()]


def test_roles_of_the_manual_read_write_and_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner makes and migrates the tables; a writer adds and hides, and changes nothing; a reader plans."""
    psycopg = pytest.importorskip("psycopg")
    suffix = uuid.uuid4().hex[:8]
    roles = {name: f"{name}_{suffix}" for name in ("owner", "writer", "reader")}
    with postgres_schema() as url, psycopg.connect(f"postgresql://{SERVER}/postgres", autocommit=True) as admin:
        schema = url.rpartition("%3D")[2]
        places = {name: url.replace("postgres@", f"{role}@", 1) for name, role in roles.items()}
        try:
            for statement in grants():
                for name, role in roles.items():
                    statement = re.sub(rf"\b{name}\b", role, statement)
                admin.execute(statement.replace("SCHEMA public", f"SCHEMA {schema}"))
            with pytest.raises(StoreError, match=r"the schema, or its owner has not made the tables yet"):
                open_store(places["writer"])  # which makes no tables
            with open_store(places["owner"]) as team:
                assert team.add([GEMM]).new == 1
            with open_store(places["writer"]) as team:
                assert team.add(some_records(0, 3)).new == 3
                assert team.change([GEMM.key], hides=True, by="ada", reason="hot GPU") == 1
            with psycopg.connect(places["writer"]) as writer:
                for harm in ("DELETE FROM records", "UPDATE records SET seconds = 1", "DROP TABLE marks"):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        writer.execute(harm)
                    writer.rollback()
            with open_store(places["reader"], writable=False) as team, open_store(str(tmp_path / "own.db")) as own:
                assert len(team.timings(LAB)) == 3
                assert own.add(team.records()).new == 3
                assert own.add(team.marks()).marks == 0
            with (
                open_store(places["reader"]) as team,
                pytest.raises(StoreError, match="this role may not do that") as error,
            ):
                team.add(some_records(1, 1))
            line(error)
            migrate_later(monkeypatch, tmp_path, "    op.create_table('sites', sa.Column('id', sa.Integer))\n")
            for name in ("writer", "reader", "owner", "writer", "reader"):  # before and after the owner came by
                with open_store(places[name], writable=name != "reader") as team:
                    assert team.schema == SCHEMA + (name == "owner" or "sites" in tables(admin, schema))
                    assert len(team.timings(LAB)) == 3
            with psycopg.connect(places["reader"]) as reader:
                assert reader.execute("SELECT count(*) FROM sites").fetchone() == (0,)
        finally:
            for role in roles.values():
                admin.execute(f"DROP OWNED BY {role} CASCADE")
                admin.execute(f"DROP ROLE {role}")


def tables(admin: Any, schema: str) -> set[str]:
    query = "SELECT tablename FROM pg_tables WHERE schemaname = %s"
    return {name for (name,) in admin.execute(query, [schema])}


# -- damage


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to look like one\n" * 100)
    before = path.read_bytes()
    for writable in (True, False):
        with pytest.raises(StoreError, match="is not a SQLite database, or damaged") as error:
            open_store(str(path), writable=writable)
    line(error)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["junk", "truncated"])
def test_a_damaged_file_is_said_to_be_so(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "timings.db"
    with open_store(str(path)) as store:
        store.add(some_records(0, 2000))
    whole = path.read_bytes()
    if kind == "junk":
        path.write_bytes(whole[:20_000] + b"\xde\xad" * 100_000 + whole[220_000:])
    else:
        path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match="damaged") as error, open_store(str(path), writable=False) as store:
        list(store.check())
    line(error)
    with pytest.raises(StoreError) as error, open_store(str(path)) as store:
        list(store.records())
    line(error)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE autoplan_schema SET version_num = 'x'", r"is damaged: .* \(its schema is 'x'\)"),
        ("UPDATE autoplan_schema SET version_num = '0'", r"is damaged: .* \(its schema is '0'\)"),
        ("INSERT INTO autoplan_schema VALUES ('4')", r"is damaged: .* \(its schema is '5, 4'\)"),
        ("UPDATE fingerprints SET content = x''", "holds a fingerprint that cannot be read"),
        ("UPDATE records SET fingerprint_id = 7", r"is damaged: .* \(it has no machine 7\)"),
        ("UPDATE records SET kernel = x'ff'", "holds bytes instead of text"),
        ("UPDATE records SET protocol = x''", "cannot be read"),
        ("UPDATE records SET seconds = 'long'", None),  # the samples are there
    ],
)
@pytest.mark.parametrize("writable", [True, False])
def test_rows_that_no_program_wrote_are_said_to_be_so(
    tmp_path: Path, statement: str, says: str | None, writable: bool
) -> None:
    path = tmp_path / "timings.db"
    with open_store(str(path)) as store:
        store.add([GEMM])
    with sqlite3.connect(path) as other:
        other.execute(statement)
    other.close()
    messages = []
    try:
        with open_store(str(path), writable=writable) as store:
            store.timings(LAB)
            store.holdings()
            messages += [fault.reason for fault in store.check()]
            assert list(store.records()) or store.num_unread
    except StoreError as error:
        messages.append(str(error))
    assert bool(messages) == (says is not None)
    assert all(re.search(str(says), fault) and fault.isprintable() for fault in messages)


@pytest.mark.parametrize("writable", [True, False])
def test_a_folder_is_no_database(tmp_path: Path, writable: bool) -> None:
    with pytest.raises(StoreError, match="is a folder: name a file"), open_store(str(tmp_path), writable=writable):
        pass


def test_a_name_of_a_file_that_is_no_text_is_a_database(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"times\xff.db")
    with open_store(str(path)) as store:
        store.add([GEMM])
    with open_store(str(path), writable=False) as store:
        assert list(store.records()) == [GEMM]
    assert path.is_file()


def test_a_database_that_another_program_holds_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timings.db"
    with open_store(str(path)) as store:
        store.add([GEMM])
    monkeypatch.setattr("autoplan.profiler.store.database.BUSY_TIMEOUT_S", 0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with open_store(str(path)) as store:
        assert list(store.records()) == [GEMM]
        with pytest.raises(StoreError, match=r"other programs kept it busy.*run the command again") as error:
            store.add(some_records(0, 1))
        line(error)
        other.execute("ROLLBACK")
        assert store.add(some_records(0, 1)).new == 1
    other.close()


# -- server

WRITER = """
import sys
from autoplan.profiler.store import open_store, store
from stores import some_records
store.BATCH = 10
def wait(done):
    print(done, flush=True)
    sys.stdin.readline()
with open_store(sys.argv[1]) as opened:
    opened.add(some_records(0, 100), on_batch=wait)
"""


def test_a_server_that_goes_away_in_the_middle_keeps_whole_batches_and_the_rest_follows() -> None:
    psycopg = pytest.importorskip("psycopg")
    name = f"autoplan-test-{uuid.uuid4().hex[:8]}"
    with postgres_schema() as url, psycopg.connect(f"postgresql://{SERVER}/postgres", autocommit=True) as admin:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, f"{url}&application_name={name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}", "PATH": ""},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "10\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "20\n"
        ended = admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", [name]
        ).fetchall()
        assert ended == [(True,)]
        _, said = process.communicate(input="\n" * 100, timeout=60)
        assert re.search(r"StoreError: .*the server (ended the connection|went away); run the command again", said)
        with open_store(url) as store:
            assert len(list(store.records())) == 20
            assert list(store.check()) == []
            assert store.add(some_records(0, 100)).new == 80
