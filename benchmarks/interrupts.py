"""Interrupts at random moments: nothing is lost, half written or left running.

usage: python benchmarks/interrupts.py [--strikes N] [--seed N] [--only WORD] [--report REPORT.md]

Every command runs once to its end, which says how long it takes.  Then it is started again and again, in the same
folder, and meets SIGINT, SIGTERM or SIGKILL at a random moment of that time.  After each strike no process that it
started may live on, every file that it writes is absent or complete, what a database or a study held before is still
there, and of SIGINT and SIGTERM it ends by itself without a traceback.  A command that came to its end begins with
empty databases the next time.  At last each command runs to its end once more.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from reports import make_parser, write_report

ROOT = Path(__file__).parent.parent
AUTOPLAN = (sys.executable, "-m", "autoplan")
MARK = "AUTOPLAN_INTERRUPTED"  # in the environment of a command and of all that it starts
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
END_S = 40.0  # a command that was struck, and its ranks, must have ended by then
MODEL = 'name = "small"\nnum_layers = 2\nhidden_size = 32\nvocab_size = 256\nnum_heads = 4\nffn_size = 64\n'
TASK = ("--cluster", "cpu:1x2", "--global-batch", "4", "--seq-len", "16", "--framework", "torch")
LARGE = ("--cluster", "h100-sxm:64x8", "--global-batch", "1024", "--seq-len", "8192")
SHARED = ("--cluster", "h100-sxm:8x8", "--global-batch", "128", "--seq-len", "8192")
KERNELS = ("--seq-len", "32", "--tp", "1", "--micro-batches", "1", "--ranks", "2", "--allowance", "0.05s")


@dataclass(frozen=True, slots=True)
class Case:
    """A command, the files that it writes and the databases whose rows it may only add to."""

    name: str
    words: tuple[str, ...]
    files: dict[str, Callable[[Path], object]]
    databases: dict[str, str] = field(default_factory=dict)  # the table of each that gains rows; of a journal none
    forced: bool = True  # whether it takes --force


def _json(path: Path) -> object:
    return json.loads(path.read_text(encoding="utf-8"))


def _page(path: Path) -> None:
    if not path.read_text(encoding="utf-8").rstrip().endswith("</html>"):
        raise ValueError("the page has no end")


def _script(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, capture_output=True)


def _lines(path: Path) -> None:
    if (text := path.read_text(encoding="utf-8")) and not text.endswith("\n"):
        raise ValueError("the last line has no end")


CASES = (
    Case("search", ("search", "llama3-70b", *LARGE, "--out", "large.json"), {"large.json": _json}),
    Case(
        "search with workers",
        ("search", "mixtral-8x7b", *SHARED, "--out", "shared.json", "--workers", "2", "--storage", "study.log"),
        {"shared.json": _json},
        {"study.log": ""},
    ),
    Case("export", ("export", "plan.json", "--to", "autoplan", "--out", "launch"), {"launch/launch.sh": _script}),
    Case("report", ("report", "plan.json", "--out", "page.html"), {"page.html": _page}),
    Case(
        "run",
        ("run", "plan.json", "--steps", "20", "--out", "run.json", "--db", "runs.db", "--log", "run.log"),
        {"run.json": _json, "run.log": _lines},
        {"runs.db": "runs"},
    ),
    Case(
        "tune",
        ("tune", "plan.json", "--steps", "3", "--trials", "4", "--storage", "tune.log", "--out", "tuned.json"),
        {"tuned.json": _json},
        {"tune.log": ""},
    ),
    Case(
        "profile",
        ("profile", "small.toml", *KERNELS, "--only", "norm,rope,send_recv,all_reduce", "--db", "times.db"),
        {},
        {"times.db": "records"},
        forced=False,
    ),
)


def _started(mark: str) -> list[int]:
    """Processes that bear the mark and have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _start(case: Case, folder: Path, mark: str) -> subprocess.Popen[str]:
    words = [*AUTOPLAN, *case.words, *(["--force"] if case.forced else [])]
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        words, cwd=folder, env=environment, start_new_session=True, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def _rows(path: Path, table: str) -> int:
    """Rows of a table; raises ValueError where the file is damaged."""
    if not path.exists():
        return 0
    try:
        with sqlite3.connect(path, timeout=30) as database:
            (verdict,) = database.execute("PRAGMA integrity_check").fetchone()
            if verdict != "ok":
                raise ValueError(verdict)
            if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone():
                return 0
            return int(database.execute(f'SELECT COUNT(*) FROM "{table}"').fetchone()[0])
    except sqlite3.DatabaseError as error:
        raise ValueError(str(error)) from None


def _operations(path: Path, table: str) -> int:
    """Operations of a journal of Optuna; raises ValueError where any but the last is damaged."""
    if not path.exists():
        return 0
    *written, _ = path.read_bytes().split(b"\n")
    return sum(bool(json.loads(line)) for line in written)


def _faults_of_files(case: Case, folder: Path, before: dict[str, int]) -> Iterator[str]:
    """Faults of files that are damaged or lost; `before` takes the numbers of rows."""
    for name, check in case.files.items():
        if (folder / name).exists():
            try:
                check(folder / name)
            except (ValueError, subprocess.CalledProcessError) as error:
                yield f"{name} is half written: {error}"
    for name, table in case.databases.items():
        try:
            rows = (_rows if table else _operations)(folder / name, table)
        except ValueError as error:
            yield f"{name} is damaged: {error}"
            continue
        if rows < before.get(name, 0):
            yield f"{name} lost {before[name] - rows} rows"
        before[name] = rows


def _left_running(mark: str) -> list[int]:
    end = time.monotonic() + END_S
    while (left := _started(mark)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def _empty(case: Case, folder: Path, before: dict[str, int]) -> None:
    """Remove the databases of a command, and what is known of them."""
    before.clear()
    for name in case.databases:
        for path in folder.glob(f"{name}*"):
            path.unlink()


def _strike(case: Case, folder: Path, number: signal.Signals, delay_s: float, before: dict[str, int]) -> list[str]:
    """Start the command, strike it, and say what was wrong then."""
    mark = os.urandom(8).hex()
    process, faults = _start(case, folder, mark), []
    has_ended = True
    try:
        _, errors = process.communicate(timeout=delay_s)
        if process.returncode:
            faults.append(f"status {process.returncode}: {errors.strip()[-200:]}")
    except subprocess.TimeoutExpired:
        has_ended = False
        process.send_signal(number)
        try:
            _, errors = process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            faults.append("it did not end")
            errors = ""
    if "Traceback" in errors and ", in main" in errors:  # else Python itself had not loaded the program yet
        faults.append("traceback: " + errors.strip().splitlines()[-1])
    if left := _left_running(mark):
        faults.append(f"{len(left)} processes live on")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    faults += _faults_of_files(case, folder, before)
    if has_ended:
        _empty(case, folder, before)
    return faults


def _to_its_end(case: Case, folder: Path) -> tuple[float, str]:
    """(Seconds that the command takes, what was wrong)."""
    began = time.monotonic()
    process = _start(case, folder, "whole")
    _, errors = process.communicate(timeout=1200)
    fault = "" if process.returncode == 0 else f"status {process.returncode}: {errors.strip()[-200:]}"
    return time.monotonic() - began, fault


def main() -> int:
    """Strike the commands, print what was wrong; the exit status says whether anything was."""
    parser = make_parser(__doc__)
    parser.add_argument("--strikes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="WORD", default="", help="commands with this word in their name")
    given = parser.parse_args()
    # A shell starts what runs in its background so that it and all of its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw, faults, strikes = random.Random(given.seed), [], Counter[tuple[str, str]]()
    cases = [case for case in CASES if given.only in case.name]
    folder = Path(tempfile.mkdtemp())
    (folder / "small.toml").write_text(MODEL)
    subprocess.run([*AUTOPLAN, "search", "small.toml", *TASK, "--quiet"], cwd=folder, check=True, capture_output=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    takes_s, rows = {}, {case.name: dict[str, int]() for case in cases}
    for case in cases:
        takes_s[case.name], fault = _to_its_end(case, folder)
        faults += [f"{case.name}: {fault}"] if fault else []
        _empty(case, folder, rows[case.name])
    for at in range(given.strikes):
        case, number = cases[at % len(cases)], SIGNALS[draw.randrange(len(SIGNALS))]
        delay_s = draw.uniform(0, takes_s[case.name])
        wrong = _strike(case, folder, number, delay_s, rows[case.name])
        strikes[case.name, number.name] += 1
        faults += [f"{case.name}, {number.name} after {delay_s:.2f} s: {fault}" for fault in wrong]
        print(at + 1, case.name, number.name, f"{delay_s:.2f} s", "; ".join(wrong), flush=True)
    for case in cases:
        _, fault = _to_its_end(case, folder)
        faults += [f"{case.name}, to its end: {fault}"] if fault else []
    lines = [f"{'command':22} {'seconds':>8} {'SIGINT':>8} {'SIGTERM':>8} {'SIGKILL':>8}"]
    for case in cases:
        counts = (f"{strikes[case.name, number.name]:8}" for number in SIGNALS)
        lines.append(f"{case.name:22} {takes_s[case.name]:8.1f} {' '.join(counts)}")
    text = "\n".join([*lines, "", f"{given.strikes} strikes, {len(faults)} faults", *faults])
    print(text)
    shutil.rmtree(folder)
    if given.report:
        write_report(given.report, "Interrupts", "`python benchmarks/interrupts.py`", text)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
