"""Do the db commands do what they say, and does no output of theirs ever show a password?"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from sqlalchemy import text

import commands
from autoplan.profiler.store import open_store
from autoplan.profiler.store.schema import SCHEMA
from stores import GEMM, SERVER, postgres_schema, some_records

AUTOPLAN = [sys.executable, "-c", "from autoplan.cli import main; main()"]
BAD = replace(GEMM, operation="wgrad", samples_s=(1e-5,))


def environment(folder: Path) -> dict[str, str]:
    return {"COLUMNS": "200", "HOME": str(folder), "XDG_DATA_HOME": str(folder / "share")}


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, whose every output counts."""
    kept = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "AUTOPLAN_DB", "PGPASSWORD")}
    return subprocess.run(
        [*AUTOPLAN, "db", *arguments],
        cwd=folder,
        env={**kept, **environment(folder), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def good(folder: Path, *arguments: str, **variables: str) -> str:
    done = commands.run(folder, "db", *arguments, **environment(folder), **variables)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def bad(folder: Path, *arguments: str, **variables: str) -> str:
    done = commands.run(folder, "db", *arguments, **environment(folder), **variables)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert re.fullmatch(r"autoplan: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


def filled(folder: Path) -> Path:
    with open_store(str(folder / "a.db")) as store:
        store.add([GEMM, *some_records(0, 3)])
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path)


def test_info_tells_where_and_what(folder: Path) -> None:
    shown = good(folder, "info", "--db", "a.db")
    assert shown.startswith(f"a.db, schema {SCHEMA}, 0 training runs\n")
    assert re.search(r"h100-sxm\s+2.13.0\s+nccl 2.28.3\s+cuda 13.0\s+1\s+4\s+0\s+2026-11-21", shown)
    info = json.loads(good(folder, "info", "--db", "a.db", "--json"))
    assert info["database"] == "a.db"
    assert info["holdings"][0]["num_records"] == 4


def test_the_variable_and_the_data_folder_are_defaults(folder: Path) -> None:
    assert "share/autoplan/timings.db: no such file" in bad(folder, "info")
    assert good(folder, "info", AUTOPLAN_DB="a.db").startswith("a.db")
    good(folder, "pull", "a.db")
    assert (folder / "share/autoplan/timings.db").is_file()
    assert "h100-sxm" in good(folder, "info")


def test_list_and_show(folder: Path) -> None:
    shown = good(folder, "list", "--db", "a.db", "--operation", "gemm", "--device", "h100-sxm", "--trust", "ada")
    assert len(shown.splitlines()) == 2
    assert re.search(rf"{GEMM.key[:12]}\s+gemm\s+4096x4096x4096\s+bf16\s+210.0 us\s+ok\s+h100-sxm", shown)
    assert len(json.loads(good(folder, "list", "--db", "a.db", "--limit", "2", "--json"))) == 2
    printed = json.loads(good(folder, "show", GEMM.key[:10].upper(), "--db", "a.db", "--json"))
    assert printed["record"]["samples_s"] == list(GEMM.samples_s)
    assert printed["hidden"] is None
    assert "known are gemm" in bad(folder, "list", "--db", "a.db", "--operation", "sort")


def test_a_list_is_narrowed_by_host_driver_status_and_day(folder: Path) -> None:
    updated = replace(GEMM.fingerprint, driver="580.95.05")
    later = replace(GEMM, shape=(8, 8, 8), host="node8", measured_at="2026-11-24T09:00:00+00:00", status="unstable")
    later = replace(later, fingerprint=updated)
    with open_store(str(folder / "a.db")) as store:
        store.add([later])
    for flags, keys in (
        (("--host", "node7"), [GEMM.key]),
        (("--status", "unstable"), [later.key]),
        (("--driver", "580"), [later.key]),
        (("--driver", "580.95.05", "--device", GEMM.fingerprint.device), [later.key]),
        (("--driver", "58"), []),
        (("--driver", "580.95.05", "--device", "a100-sxm"), []),
        (("--since", "2026-11-22"), [later.key]),
        (("--since", "2026-11-21"), [GEMM.key, later.key]),
        (("--since", "2026-11-24T09:00Z"), [later.key]),
        (("--since", "2026-11-24T09:00:01Z"), []),
        (("--until", "2026-11-24T09:00Z"), [GEMM.key]),
        (("--until", "20261124"), [GEMM.key]),
        (("--host", "node7", "--status", "unstable"), []),
    ):
        listed = json.loads(good(folder, "list", "--db", "a.db", "--json", *flags))
        assert [record["key"] for record in listed] == keys
    known = "known are ok, unstable, contaminated, failed, oom"
    assert f"status 'slow': {known}" in bad(folder, "list", "--db", "a.db", "--status", "slow")
    for since in ("yesterday", "2026", "2026-13-01", "2026-11-24T09:00:00+02:00"):
        assert "write a day or a moment in UTC" in bad(folder, "list", "--db", "a.db", "--since", since)


def test_a_choice_is_hidden_and_approved_at_once(folder: Path) -> None:
    hot = [replace(GEMM, shape=(8 * at, 8, 8), host="n04", measured_at="2026-11-22T09:00:00Z") for at in range(1, 4)]
    with open_store(str(folder / "a.db")) as store:
        store.add([*hot, replace(hot[0], measured_at="2026-11-24T09:00:00Z", conditions={})])
    on = ("--db", "a.db")
    choice = (*on, "--host", "n04", "--since", "2026-11-22", "--until", "2026-11-23", "--operation", "gemm")
    assert len(json.loads(good(folder, "list", *choice, "--json"))) == 3
    assert run(folder, "hide", *choice, "--reason", "fan stood still").stderr == "3 hidden, 0 already were\n"
    none = run(folder, "hide", *on, "--host", "n40", "--reason", "fan stood still")
    assert none.stderr == "no match: none was hidden; autoplan db list takes the same filters\n"
    assert good(folder, "list", *choice).count("n04") == 0
    listed = json.loads(good(folder, "list", *on, "--review", "hidden", "--json"))
    assert [entry["review"] for entry in listed] == ["hidden"] * 3
    changed = json.loads(good(folder, "approve", *choice, "--reason", "fan was replaced before", "--json"))
    assert (changed["changed"], changed["as_before"]) == (3, 0)
    assert len(json.loads(good(folder, "list", *on, "--review", "approved", "--json"))) == 3
    assert len(json.loads(good(folder, "list", *on, "--review", "proposed", "--json"))) == 5
    words = json.loads(good(folder, "show", hot[0].key, *on, "--json"))["words"]
    assert [(word["hides"], word["reason"]) for word in words] == [
        (False, "fan was replaced before"),
        (True, "fan stood still"),
    ]
    twice = run(folder, "hide", hot[0].key, hot[0].key[:12].upper(), *on, "--reason", "said twice")
    assert twice.stderr == "1 hidden, 0 already were\n"
    assert "the reason is empty" in bad(folder, "hide", hot[1].key, *on, "--reason", " ")
    refusal = "give either keys, or filters such as --host"
    assert refusal in bad(folder, "hide", *on, "--reason", "all of it")
    assert refusal in bad(folder, "hide", GEMM.key, *on, "--host", "n04", "--reason", "both")
    assert "write a day" in bad(folder, "hide", *on, "--until", "soon", "--reason", "x")


def test_a_list_that_is_cut_says_so(folder: Path) -> None:
    from test_run_record import RUN

    with open_store(str(folder / "a.db")) as store:
        store.add([RUN, replace(RUN, measured_at="2026-11-20T10:00:00+00:00", step_s=(9.0,))])
    for what in ((), ("--runs",)):
        done = run(folder, "list", "--db", "a.db", "--limit", "1", "--json", *what)
        assert len(json.loads(done.stdout)) == 1
        assert done.stderr == "autoplan: showing the first 1: raise --limit or add filters\n"
    assert run(folder, "list", "--db", "a.db", "--runs").stderr == ""


@pytest.mark.parametrize("error", [OSError("no such user"), KeyError("getpwuid(): uid not found: 12345")])
def test_a_user_without_a_name_is_known_by_number(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """As in a container that runs as a number which no file lists."""
    monkeypatch.setattr("getpass.getuser", mock.Mock(side_effect=error))
    assert json.loads(good(folder, "hide", GEMM.key[:8], "--reason", "hot", "--db", "a.db", "--json"))["changed"] == 1
    assert json.loads(good(folder, "show", GEMM.key, "--db", "a.db", "--json"))["hidden"]["by"] == str(os.getuid())


def test_push_pull_and_hide_travel(folder: Path) -> None:
    with open_store(str(folder / "a.db")) as store:
        store.add([replace(GEMM, shape=(1, 1, 1), measured_by="eve")])
    assert good(folder, "push", "b.db", "--db", "a.db", "--trust", "ada") == "1 new, 0 already there\n"
    assert good(folder, "push", "b.db", "--db", "a.db") == "4 new, 1 already there\n"
    assert json.loads(good(folder, "pull", "b.db", "--db", "c.db", "--json"))["new"] == 5
    assert (
        "1 hidden, 0 already were" in run(folder, "hide", GEMM.key[:8], "--reason", "hot\nGPU", "--db", "b.db").stderr
    )
    assert good(folder, "pull", "b.db", "--db", "c.db") == "0 new, 4 already there, 1 hidden not copied; 1 new review\n"
    assert json.loads(good(folder, "show", GEMM.key, "--db", "c.db", "--json"))["hidden"]["reason"] == "hotGPU"
    assert GEMM.key[:12] not in good(folder, "list", "--db", "c.db")
    assert GEMM.key[:12] in good(folder, "list", "--db", "c.db", "--hidden")
    back = run(folder, "approve", GEMM.key[:8], "--reason", "was cool", "--db", "b.db").stderr
    assert back == "1 approved, 0 already were\n"
    good(folder, "pull", "b.db", "--db", "c.db")
    assert GEMM.key[:12] in good(folder, "list", "--db", "c.db")


@pytest.mark.parametrize("name", ["hide", "approve"])
def test_a_wrong_name_makes_no_database(tmp_path: Path, name: str) -> None:
    said = bad(tmp_path, name, GEMM.key, "--reason", "hot", "--db", "typo.db")
    assert "typo.db: no such file: `autoplan profile` or `autoplan db import` makes one" in said
    assert list(tmp_path.iterdir()) == []


def test_records_of_another_version_are_passed_over_in_one_line(folder: Path) -> None:
    old = some_records(0, 3)[0]
    with open_store(str(folder / "a.db")) as store, store._database.writing() as connection:
        connection.execute(text(f"UPDATE records SET operation = 'sort' WHERE key = '{old.key}'"))
    line = "autoplan: warning: rows of a.db that this version does not understand were skipped: 1; `autoplan db check`"
    for arguments in (("list",), ("push", "b.db"), ("export", "t.jsonl.gz"), ("list", "--device", "h100-sxm")):
        done = commands.run(folder, "db", *arguments, "--db", "a.db", **environment(folder))
        assert (done.returncode, done.stderr.count(line)) == (0, 1), done.stderr
    assert f"{old.key[:12]}  sort " in good(folder, "check", "--db", "a.db")
    assert json.loads(good(folder, "hide", old.key[:12], "--reason", "old", "--db", "a.db", "--json"))["changed"] == 1
    assert commands.run(folder, "db", "list", "--db", "a.db", **environment(folder)).stderr == ""


def test_push_quarantines_what_cannot_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, open_store(str(folder / "a.db")) as store:
        # As an older program would add it.
        patch.setattr(
            "autoplan.profiler.store.plausible.implausible", lambda record: ""
        )  # as an older program would add it
        store.add([BAD])
    assert re.match(
        rf"{BAD.key[:12]}  wgrad 4096x4096x4096 bf16: [\d,]+ TFLOP/s", good(folder, "check", "--db", "a.db")
    )
    assert json.loads(good(folder, "check", "--db", "a.db", "--json"))[0]["key"] == BAD.key
    assert "1 quarantined, the first" in good(folder, "push", "b.db", "--db", "a.db")
    assert BAD.key[:12] not in good(folder, "list", "--db", "b.db")
    assert json.loads(good(folder, "show", BAD.key, "--db", "b.db", "--json"))["hidden"]["by"] == "check"


def test_export_and_import(folder: Path) -> None:
    good(folder, "export", "t.jsonl.gz", "--db", "a.db", "--anonymous")
    assert "exists" in bad(folder, "export", "t.jsonl.gz", "--db", "a.db")
    assert good(folder, "import", "t.jsonl.gz", "--db", "b.db") == "4 new, 0 already there\n"
    assert good(folder, "import", "t.jsonl.gz", "--db", "b.db") == "0 new, 4 already there\n"
    assert "node7" not in good(folder, "show", GEMM.key, "--db", "b.db")
    assert "nothing.gz: cannot be read" in bad(folder, "import", "nothing.gz", "--db", "c.db")
    assert not (folder / "c.db").exists()


def test_operations_that_are_not_known_are_passed_over_with_a_word(folder: Path) -> None:
    good(folder, "export", "t.jsonl.gz", "--db", "a.db")
    header, first, *rest = gzip.decompress((folder / "t.jsonl.gz").read_bytes()).splitlines(keepends=True)
    later = json.dumps({**json.loads(first), "operation": "fft"}).encode() + b"\n"
    (folder / "later.jsonl.gz").write_bytes(gzip.compress(b"".join([header, later, first, *rest])))
    done = commands.run(folder, "db", "import", "later.jsonl.gz", "--db", "d.db", **environment(folder))
    assert (done.returncode, done.stdout) == (0, "4 new, 0 already there\n")
    assert "does not know: 1 of fft\n" in done.stderr


def test_a_log_is_imported(folder: Path) -> None:
    from test_nccl_tests import ALL_TO_ALL

    (folder / "log.txt").write_text(ALL_TO_ALL)
    assert good(folder, "import", "log.txt", "--db", "b.db") == "2 new, 0 already there\n"
    assert "all_to_all" in good(folder, "list", "--db", "b.db")


def test_the_tables_of_aiconfigurator_are_imported(folder: Path) -> None:
    pytest.importorskip("aiconfigurator_core")
    pytest.importorskip("pyarrow")
    from autoplan.profiler.imports.aiconfigurator import read_records

    first = next(read_records(devices=["a100-sxm"]))
    assert (first.mode, first.fingerprint.device, len(first.samples_s)) == ("imported", "a100-sxm", 1)
    assert first.source.startswith("aiconfigurator-core a100_sxm")


def test_commands_are_described() -> None:
    shown = subprocess.run([*AUTOPLAN, "db", "--help"], capture_output=True, text=True, check=True).stdout
    for name in ("info", "list", "show", "push", "pull", "export", "import", "check", "hide", "approve"):
        assert re.search(rf"^  {name}\s+\w", shown, re.MULTILINE)


# -- passwords

SECRET = "GEHEIM77"


@pytest.fixture(scope="module")
def picky_server() -> Iterator[int]:
    """A server that asks in PostgreSQL's protocol for a password, and tells all but bob that the one given is wrong."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                asked = peer.recv(int.from_bytes(peer.recv(4), "big") - 4)
                if asked[:4] == (80877103).to_bytes(4, "big"):  # for TLS
                    peer.sendall(b"N")
                    asked = peer.recv(int.from_bytes(peer.recv(4), "big") - 4)
                peer.sendall(b"R" + (8).to_bytes(4, "big") + (3).to_bytes(4, "big"))
                given = peer.recv(1024)[5:].rstrip(b"\0")
                shown = b"of %d letters" % len(given) if b"bob" in asked else given
                text = b"SFATAL\0C28P01\0Mpassword " + shown + b" is wrong\0\0"
                peer.sendall(b"E" + (len(text) + 4).to_bytes(4, "big") + text)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


URLS = (
    "postgresql://ada:{secret}@127.0.0.1:{port}/postgres",
    "postgresql://ada:{secret}%40%2F%3A@127.0.0.1:{port}/postgres",
    "postgresql+psycopg://ada@127.0.0.1:{port}/postgres?password={secret}",
    "postgresql://127.0.0.1:{port}/postgres?user=ada&password={secret}",
    "postgresql://ada:{secret}@127.0.0.1:1/nowhere",
    "postgresql://ada:{secret}@no.such.host.invalid/postgres",
    "postgresql://ada:{secret}@127.0.0.1:{port}/postgres?nonsense=1",
    "postgresql://ada:{secret}@127.0.0.1:{port}/postgres?connect_timeout=x",
    "postgresql://ada:{secret}@127.0.0.1:99999/postgres",
    "postgresql://ada:x@{secret}@127.0.0.1:{port}/postgres",
    "postgresql://ada:{secret}/x@127.0.0.1:{port}/postgres",
    "postgresql://ada:{secret}#?@127.0.0.1:{port}/postgres",
    "postgresql://127.0.0.1:{secret}/postgres",
    "mysql://ada:{secret}@127.0.0.1/x",
    "sqlite:///x.db?password={secret}",
    "host=127.0.0.1 port={port} user=ada password={secret}",
    "ada:{secret}@127.0.0.1:{port}/postgres",
)


# Several commands with each URL, all in one process, to save its start: folders, URLs and arguments, as JSON.
MANY = """
import json, os, sys
from autoplan.cli import main
for folder, url, commands in json.loads(sys.argv[1]):
    os.chdir(folder)
    os.environ["AUTOPLAN_DB"] = url
    for arguments in commands:
        sys.argv[1:] = arguments
        try:
            main()
        except SystemExit as left:
            print("left with", left.code, flush=True)
    for stream in (sys.stdout, sys.stderr):
        print("END OF URL", file=stream, flush=True)
"""


JOB = ("--cluster", "h100-sxm:1x8", "--global-batch", "8", "--seq-len", "4096")


@pytest.fixture(scope="module")
def said_of_urls(picky_server: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str, str]]:
    """By URL the folder in which all commands failed with it, and their whole output and errors."""
    pytest.importorskip("psycopg")
    asked = []
    for url in URLS:
        folder = filled(tmp_path_factory.mktemp("secret"))
        place = url.format(secret=SECRET, port=picky_server)
        commands = (
            ("db", "info", "--db", place, "--json"),
            ("db", "push", place, "--db", "a.db"),
            ("db", "pull", place, "--db=a.db"),
            ("db", "info", place),  # the flag was forgotten: the parser of the command line complains
            ("db", "info"),
            ("estimate", "llama3-8b", *JOB, "--timings", "db", "--db", place),
            ("profile", "llama3-8b", "--dry-run", "--ranks", "1", "--db", place),
        )
        asked.append((str(folder), place, commands))
    done = subprocess.run(
        [sys.executable, "-c", MANY, json.dumps(asked)], capture_output=True, text=True, timeout=300, check=True
    )
    outputs, errors = (text.split("END OF URL\n")[:-1] for text in (done.stdout, done.stderr))
    return {
        url: (Path(folder), output, error)
        for url, (folder, _, _), output, error in zip(URLS, asked, outputs, errors, strict=True)
    }


@pytest.mark.parametrize("url", URLS)
def test_no_password_is_shown_whatever_goes_wrong(said_of_urls: dict[str, tuple[Path, str, str]], url: str) -> None:
    folder, output, errors = said_of_urls[url]
    assert output == "".join(f"left with {status}\n" for status in (1, 1, 1, 2, 1, 1, 1)), errors
    assert len(re.findall(r"^autoplan: .+$", errors, re.MULTILINE)) == 6
    assert SECRET not in errors
    assert "Traceback" not in errors
    for file in folder.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()


def test_a_password_from_the_environment_is_used_and_not_shown(folder: Path, picky_server: int) -> None:
    pytest.importorskip("psycopg")
    place = f"postgresql://ada@127.0.0.1:{picky_server}/postgres"
    assert "password *** is wrong" in bad(folder, "info", "--db", place, PGPASSWORD=SECRET)


def test_a_password_from_pgpass_is_used(folder: Path, picky_server: int) -> None:
    pytest.importorskip("psycopg")
    passfile = folder / "pgpass"
    passfile.write_text(f"127.0.0.1:{picky_server}:*:bob:{SECRET}\n")
    passfile.chmod(0o600)
    place = f"postgresql://bob@127.0.0.1:{picky_server}/postgres"
    said = bad(folder, "info", "--db", place, PGPASSFILE=str(passfile))
    assert f"password of {len(SECRET)} letters is wrong" in said


def test_a_real_role_with_a_password_shows_it_nowhere(folder: Path) -> None:
    """The same on a server that lets it in: in the outputs of commands that work, and in all that they write."""
    with postgres_schema() as url:
        place = url.replace(SERVER, SERVER.replace("@", f":{SECRET}@"))
        outputs = [good(folder, "push", place, "--db", "a.db")]
        for command in (("info", "--json"), ("list",), ("check",), ("export", "out.jsonl.gz"), ("info",)):
            done = run(folder, *command, "--db", place)
            assert done.returncode == 0, done.stderr
            outputs.append(done.stdout + done.stderr)
        good(folder, "pull", place, "--db", "c.db")
        good(folder, "hide", GEMM.key, "--reason", "test", "--db", place)
    assert SECRET not in "".join(outputs)
    for file in folder.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
