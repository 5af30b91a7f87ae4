"""What README.md and docs/ show: files to write, commands to run and what they answer.

In these pages
- a fence with a title that is a file name is a file, which is written before the commands behind it run;
- a `bash` fence holds commands, and a `text` fence right behind it what they print, of which one line `...` leaves out
  any number of lines; commands fail where the last line printed is the one of an error, and nowhere else;
- a title `needs X` marks commands that not every machine can run.

`python tests/support/documented.py` runs all pages and writes into them what the commands print today.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from commands import run

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"[|&;<>$`*(]")


@dataclass(frozen=True, slots=True)
class File:
    """A file that a page shows whole."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands, one string each, with what they print where the page shows it, and where that stands in the page."""

    lines: tuple[str, ...]
    needs: str
    output: str | None
    place: tuple[int, int]


def blocks(page: str) -> Iterator[File | Commands]:
    """The files and commands of a page, in order."""
    fences = list(_FENCE.finditer(page))
    for at, fence in enumerate(fences):
        language, title, body = fence.groups()
        if language == "bash" and (title is None or title.startswith("needs ")):
            follows = fences[at + 1] if at + 1 < len(fences) else None
            shown = follows is not None and follows[1] == "text" and not page[fence.end() : follows.start()].strip()
            yield Commands(
                lines=tuple(line for line in body.replace("\\\n", " ").splitlines() if line and line[0] != "#"),
                needs=(title or "").removeprefix("needs "),
                output=follows[3] if shown and follows is not None else None,
                place=follows.span(3) if shown and follows is not None else (0, 0),
            )
        elif title is not None:
            yield File(title, body)


def calls(line: str) -> Iterator[list[str]]:
    """The arguments of every `autoplan` in a line, whatever starts it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            if "autoplan" in words:
                yield words[words.index("autoplan") + 1 :]
            words = []
        else:
            words.append(word)


def answer(commands: Commands, folder: Path) -> tuple[int, str]:
    """Exit status and everything printed: in this process where the commands are nothing but `autoplan`."""
    if any(_SHELL.search(line) or not line.startswith("autoplan ") for line in commands.lines):
        search_path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(commands.lines)],
            cwd=folder,
            env=os.environ | {"PATH": search_path, "COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, _trimmed(done.stdout)
    printed = ""
    for line in commands.lines:
        process = run(folder, *shlex.split(line)[1:])
        printed += _trimmed(process.stdout + process.stderr)
        if process.returncode:
            return process.returncode, printed
    return 0, printed


def _trimmed(printed: str) -> str:
    """Lines without blanks at their ends, which editors take away."""
    return re.sub(r" +$", "", printed, flags=re.MULTILINE)


def is_refusal(printed: str) -> bool:
    """Return whether the last line is the one with which a command fails."""
    return printed.rstrip().rpartition("\n")[2].startswith("autoplan: ")


def elided(printed: str, shown: str) -> str:
    """Output without as many lines as a page leaves out of it."""
    before, dots, behind = f"\n{shown}".partition("\n...\n")
    if not dots:
        return printed
    lines = printed.splitlines(keepends=True)
    first, last = before.count("\n"), behind.count("\n")
    return "".join([*lines[:first], "...\n", *lines[len(lines) - last :]])


def set_up(folder: Path) -> None:
    """Gives a page the examples of the project."""
    (folder / "examples").symlink_to(ROOT / "examples")


def _write_today() -> None:
    os.environ["AUTOPLAN_DB"] = "timings.db"
    for path in PAGES:
        page, moved = path.read_text(), 0
        with tempfile.TemporaryDirectory() as name:
            set_up(Path(name))
            for block in blocks(path.read_text()):
                if isinstance(block, File):
                    (Path(name) / block.name).write_text(block.text)
                elif not block.needs:
                    status, printed = answer(block, Path(name))
                    if status and not is_refusal(block.output or ""):
                        print(f"{path.relative_to(ROOT)}: {block.lines} failed ({status}): {printed}")
                    elif block.output is not None:
                        start, stop = (place + moved for place in block.place)
                        today = elided(printed, block.output)
                        moved += len(today) - (stop - start)
                        page = page[:start] + today + page[stop:]
        path.write_text(page)


if __name__ == "__main__":
    _write_today()
