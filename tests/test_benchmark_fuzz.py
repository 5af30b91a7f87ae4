"""Does nothing but an InputError come out of the readers?  A short run of the benchmark, and what it must notice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUZZ = ROOT / "benchmarks" / "fuzz.py"


def test_two_seconds_of_broken_files_raise_input_errors_alone(tmp_path: Path) -> None:
    words = [sys.executable, str(FUZZ), "--seconds", "2", "--out", str(tmp_path / "out")]
    result = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "nanotron: " in result.stdout
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


# Each line is what a reader must not do; the guard of the benchmark has to see it.
SINS = """
import os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import fuzz
guard = fuzz.Guard(fuzz.Path.cwd() / "inside")
sins = {
    "a file": lambda: open("pwned", "w"),
    "a file that is read": lambda: open("/etc/hostname"),
    "a process": lambda: os.system("true"),
    "a program": lambda: eval("1 + 1"),
    "a folder": lambda: os.mkdir("pwned"),
    "a connection": lambda: __import__("socket").socket(),
}
for name, sin in sins.items():
    try:
        with guard.watching():
            sin()
    except fuzz.Forbidden:
        continue
    sys.exit(f"{name} was not seen")
os.mkdir("inside")
moves = {"a file that is moved": lambda: os.rename("inside", "pwned")}
for name, sin in {"a file": sins["a file"], "a folder": sins["a folder"], **moves}.items():
    try:
        with guard.watching(is_strict=False):
            sin()
    except fuzz.Forbidden:
        continue
    sys.exit(f"{name} outside of the folder was not seen")
for given in ("read", "refused", "two lines"):
    def read(file, kind=given):
        if kind != "read":
            raise fuzz.AutoplanError("no" if kind == "refused" else "no\\nno")
        raise KeyError(file.name)
    subject = fuzz.Subject("x", (), read, is_watched=True)
    try:
        assert fuzz.answer(subject, guard, fuzz.Seed("x", "y")) == given == "refused"
    except KeyError:
        assert given == "read"
    except ValueError:
        assert given == "two lines"
"""


def test_the_benchmark_sees_what_a_reader_must_not_do(tmp_path: Path) -> None:
    words = [sys.executable, "-c", SINS, str(FUZZ)]
    result = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["inside"]
