"""Fuzzing of everything that reads a file: nothing but an error of one line may come out, whatever the file holds.

usage: python benchmarks/fuzz.py [--seconds N] [--seed N] [--only WORD] [--examples FOLDER ...] [--out FOLDER]

Files that are shipped, that `export` writes, that the tests hold and those of the folders of examples are cut, joined
and filled with values that break parsers; random bytes come beside them.  Databases are changed as the statements that
make them, and byte by byte.  Whatever reads such a file reads it, and what is read is used (`fuzz_subjects.py`): a
cluster becomes a topology, a model is priced, a plan file explained; lists of words are command lines.  A file that
makes one raise anything but an error of one line, hang, take a gibibyte, write outside of the folder that it runs in,
and of launch files start a process, open a connection, run text as a program or touch a file is kept in the output
folder, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz_subjects import MAX_CHARACTERS, Seed, Subject, examples, exports, file_subjects, launch_subjects

import autoplan
from autoplan.base.errors import AutoplanError
from autoplan.base.files import write_text

LONGEST_S = 10.0  # of the processor, that reading one file may take
MAX_ADDRESSES_BYTES = 8 * 2**30  # of address space
MAX_RESIDENT_BYTES = 2**30  # of memory, at any time
LONGEST_MESSAGE = 1500  # characters
NASTY = (
    "", "0", "-1", "1e999", "-0.0", "nan", ".nan", ".inf", "1" * 5000, "0x" + "f" * 5000, "99999999999999999999",
    "4294967296", "1_000", "0o17", "true", "null", "~", "None", "auto", "[]", "{}", "[1, 2]", "{a: 1}", "''", '"', "'",
    "\\", "\0", "\ufeff", "\u2028", "\\ud800", "\U0001f600", "[" * 3000, "{" * 3000, "(" * 3000, '{"a":' * 3000,
    "- " * 3000, "$(" * 500, "${a:-" * 500, "$(touch pwned)", "`touch pwned`", "; touch pwned", "| touch pwned",
    "> pwned", "<<EOF", "${X:?}", "$((1 + ", "${!a*}", "!!python/object/apply:os.system [touch pwned]", "!!binary x",
    "&a [*a]", "<<: *a", "2026-99-99", "? a", "--- a", "%YAML 9", "import os", "__import__('os').system('touch pwned')",
    "exec('touch pwned')", "open('pwned', 'w')", "lambda: 0", "../../pwned", "/dev/zero", "~/pwned", "file:///pwned",
)  # fmt: skip
TAME = ("0", "1", "2", "3", "4", "7", "8", "16", "64", "4096", "1.5", "5e8", "true", "false", "bf16", "fp16", "full")
WORDS, MARKS = re.compile(r"[\w.+-]+"), re.compile(r"[^\w\s]")

OWN = tuple({str(Path(autoplan.__file__).parent), sys.prefix, sys.base_prefix})  # presets, and modules imported late
ANNOTATES = ("typing", "annotationlib")  # evaluate the annotations of classes
FORBIDDEN = re.compile(
    r"os\.(system|exec|fork|forkpty|posix_spawn|spawn|remove|rename|rmdir|mkdir|link|symlink|truncate|chmod|chown|utime"
    r"|putenv|unsetenv|kill|startfile)|subprocess\..*|shutil\..*|socket\..*|pty\..*|pickle\..*|ctypes\..*|tempfile\..*"
)


CHANGES_FOLDERS = ("os.mkdir", "os.remove", "os.rename", "os.rmdir")  # their last argument: an open folder, or -1


class Forbidden(BaseException):
    """Deed of a reader beside reading; no `except Exception` of a reader can hide it."""


class Guard:
    """Sees what the process does while a reader runs."""

    def __init__(self, scratch: Path) -> None:
        self.watches, self.is_strict = False, False
        self.scratch = str(scratch.resolve())
        sys.addaudithook(self._saw)

    @contextmanager
    def watching(self, is_strict: bool = True) -> Iterator[None]:
        """Watch for a limited time; where `is_strict`, nothing but reading happens, else writing in `scratch` too."""
        signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
        self.watches, self.is_strict = True, is_strict
        try:
            yield
        finally:
            self.watches = False
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watches:
            return
        writes = event == "sqlite3.connect" or (event in CHANGES_FOLDERS and arguments[-1] == -1)
        if event == "open":
            path, mode, flags = (*arguments, None, None, None)[:3]
            writes = any(letter in str(mode or "") for letter in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if self.is_strict and (writes or not str(path).startswith(OWN)):
                raise Forbidden(f"opened {path!r} ({mode or flags})")
        if not self.is_strict:
            for path in arguments[: 2 if event == "os.rename" else 1] if writes else ():
                if not isinstance(path, int) and not self._is_inside(os.fsdecode(path)):
                    raise Forbidden(f"{event} of {path!r}, outside of the folder that it runs in")
        elif event == "exec":
            name = getattr(arguments[0], "co_filename", "")
            if name.startswith("<") and sys._getframe(1).f_globals.get("__name__") not in ANNOTATES:
                raise Forbidden(f"ran a program from {name}")
        elif FORBIDDEN.fullmatch(event):
            raise Forbidden(f"{event} {arguments!r:.200}")

    def _is_inside(self, path: str) -> bool:
        """Return whether a path leads into the folder of scratch files, or to a device."""
        place = os.path.realpath(path.removeprefix("file:").partition("?")[0])
        return place.startswith((self.scratch, "/dev/", "/proc/")) or path == ":memory:"


def mutated(seed: Seed, seeds: Sequence[Seed], dice: random.Random) -> str:
    """The text of a file after some changes."""
    if dice.random() < 0.03:
        return dice.randbytes(dice.randrange(500)).decode("utf-8", errors="replace")
    text = seed.text
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        text = dice.choice(CHANGES)(text, seeds, dice)
    return text[:MAX_CHARACTERS]


def _replace_word(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    words = list((MARKS if dice.random() < 0.1 else WORDS).finditer(text))
    if not words:
        return dice.choice(NASTY)
    word = dice.choice(words)
    new = dice.choice((dice.choice(NASTY), dice.choice(words).group(), dice.choice(TAME)))
    return text[: word.start()] + new + text[word.end() :]


def _insert(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    at = dice.randrange(len(text) + 1)
    return text[:at] + dice.choice(NASTY) + text[at:]


def _cut(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    first = dice.randrange(len(text) + 1)
    return text[:first] + text[first + dice.choice((1, 5, 50, len(text))) :]


def _lines(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    if not lines:
        return text
    at = dice.randrange(len(lines))
    other = dice.choice(dice.choice(seeds).text.splitlines(keepends=True) or ["\n"])
    kept = dice.choice(([], [lines[at]] * 2, [lines[at], other], [other], [lines[at].lstrip()], [" " + lines[at]]))
    return "".join((*lines[:at], *kept, *lines[at + 1 :]))


def _join(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    other = dice.choice(seeds).text
    return text[: dice.randrange(len(text) + 1)] + other[dice.randrange(len(other) + 1) :]


def _bytes(text: str, seeds: Sequence[Seed], dice: random.Random) -> str:
    data = bytearray(text.encode("utf-8", errors="replace")[:MAX_CHARACTERS])
    for _ in range(min(dice.randrange(1, 20), len(data))):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return data.decode("utf-8", errors="replace")


CHANGES = (*[_replace_word] * 6, *[_lines] * 3, _insert, _cut, _join, _bytes)


def answer(subject: Subject, guard: Guard, file: Seed) -> str:
    """'read' or 'refused'; whatever else came out is raised."""
    try:
        with guard.watching(subject.is_watched):
            subject.read(file)
        return "read"
    except AutoplanError as error:
        if len(lines := str(error).splitlines()) != 1:
            raise ValueError(f"a message of {len(lines)} lines: {error!s:.200}") from error
        if len(str(error)) > LONGEST_MESSAGE:
            raise ValueError(f"a message of {len(str(error))} characters: {error!s:.200}") from error
        return "refused"


def _peak_bytes() -> int:
    """Return the most memory that this process, or one that it waited for, has taken."""
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@contextmanager
def home(folder: str) -> Iterator[None]:
    """Make a folder the place of the user's files and of temporary ones for a while."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("XDG_")]:
        del os.environ[name]
    os.environ["HOME"] = tempfile.tempdir = folder
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise Forbidden(f"took the processor longer than {LONGEST_S:g} s")


def fuzz(seconds: float, seed: int, only: str, folders: Sequence[Path], out: Path) -> int:
    """Fuzz what reads files for so many seconds of the processor; return the number of wrong files, kept in `out`."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # no model is looked for by a random name
    signal.signal(signal.SIGPROF, _out_of_time)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    seeds, dice = [*exports(), *examples(folders)], random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, home(folder):
        guard = Guard(Path(folder))
        found = [*launch_subjects(seeds, dice), *file_subjects(Path(folder))]
        subjects = [subject for subject in found if only in subject.name]
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        slowest: dict[str, float] = defaultdict(float)
        wrong, end, peak_bytes = set[str](), time.process_time() + seconds, _peak_bytes()
        while time.process_time() < end:
            subject = dice.choice(subjects)
            own = subject.seeds or seeds
            start = dice.choice(own if dice.random() < 0.95 else seeds)
            file = Seed(start.name, mutated(start, own, dice))
            began = time.process_time()
            try:
                outcome = answer(subject, guard, file)
                peak_bytes, before = _peak_bytes(), peak_bytes
                if peak_bytes > max(MAX_RESIDENT_BYTES, before):
                    raise MemoryError(f"it took {peak_bytes / 2**20:.0f} MiB")
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                outcome = "wrong"
                place = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{subject.name}: {type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
                if kind not in wrong:
                    wrong.add(kind)
                    kept = out / f"wrong_{len(wrong)}_{re.sub('[^a-z0-9.]+', '_', subject.name)}"
                    write_text(kept, file.text.encode("utf-8", errors="replace").decode(), force=True)
                    print(f"{kind}: {error!s:.300}\n  kept as {kept}", file=sys.stderr)
            counts[subject.name][outcome] += 1
            slowest[subject.name] = max(slowest[subject.name], time.process_time() - began)
    print(f"{len(seeds)} launch files to start from, seed {seed}, {seconds:g} s, {peak_bytes / 2**20:.0f} MiB at most")
    for name, count in sorted(counts.items()):
        summary = ", ".join(f"{number} {what}" for what, number in sorted(count.items()))
        print(f"{name}: {count.total()} files, {summary}; slowest {1e3 * slowest[name]:.0f} ms")
    return len(wrong)


def main() -> None:
    """Fuzz for a while, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="WORD", help="kinds of files with this word in their name")
    parser.add_argument("--examples", type=Path, nargs="*", default=[], metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("fuzz"), metavar="FOLDER")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    sys.exit(1 if fuzz(asked.seconds, asked.seed, asked.only, asked.examples, asked.out) else 0)


if __name__ == "__main__":
    main()
