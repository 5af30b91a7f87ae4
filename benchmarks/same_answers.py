"""Comparison of the answers of two checkouts: many command lines are run in each, and their output compared.

usage: python benchmarks/same_answers.py record CHECKOUT --out FOLDER [--runs CSV] [--only GROUP] [--jobs N]
                                                [--cases FILE]
       python benchmarks/same_answers.py compare FOLDER_A FOLDER_B [--renames FILE] [--only GROUP] [--show N]

`record` writes a text file for every case: each command with its exit status, its output and the files that it wrote.
The cases stand in `cases.json` of the same folder; `--cases` takes those of an earlier record, so that both are of the
same commands.  `compare` compares JSON by its fields, whatever their order, without those of `VOLATILE`; of a page the
JSON inside it and its text; what `predict` and `export` wrote, plan files aside, and all other text, byte for byte.
Versions of autoplan in texts are taken as equal.  The exit status is 1 where anything differs.

The file of `--renames` is TOML:

    lines = ["^autoplan: warning"]   # patterns: lines with them may differ
    [fields]                         # of JSON: old = "new"; old = "" leaves a field out
    step_s = "step_time_s"
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from answer_cases import EVERY_FILE, RUNS, Case, make_cases
from answer_server import Server, as_text

GROUPS = ("predict", "exports", "searches")
CASES_FILE = "cases.json"
VOLATILE = ("versions",)  # fields of JSON that may differ
VERBATIM = re.compile(r"\d+ (predict wrote|export wrote (?!.*\bplan\.json$))")  # files that are compared as they are
MARK = "@@@ "  # begins the head of a section in a record
NO_NEWLINE = " (no newline at its end)"
NUM_SHOWN, LINES_SHOWN = 5, 30

_VERSION = re.compile(r"\bautoplan \d+\.\d+[\w.+]*")
_SCRIPT = re.compile(r'<script type="application/json" class="([^"]*)">(.*?)</script>', re.DOTALL)
_UNSEEN = re.compile(r"<(script|style)\b.*?</\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


# -- records ----------------------------------------------------------------------------------------------------------


def files_below(folder: Path) -> dict[str, tuple[str, bool]]:
    """The texts of all files below a folder, databases aside, and whether they are executable."""
    return {
        path.relative_to(folder).as_posix(): (as_text(path), os.access(path, os.X_OK))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".db"
    }


def write_sections(sections: Mapping[str, str]) -> str:
    """A record: every section below a line with its title."""
    lines = []
    for title, text in sections.items():
        is_cut = bool(text) and not text.endswith("\n")
        lines.append(f"{MARK}{title}{NO_NEWLINE if is_cut else ''}\n{text}" + "\n" * is_cut)
    return "".join(lines)


def read_sections(record: str) -> dict[str, str]:
    """The sections of a record, by their titles."""
    sections = {}
    for part in f"\n{record.removesuffix(chr(10))}".split(f"\n{MARK}")[1:]:
        title, below, text = part.partition("\n")
        is_cut = title.endswith(NO_NEWLINE)
        sections[title.removesuffix(NO_NEWLINE)] = text + "\n" * (bool(below) and not is_cut)
    return sections


def run_case(server: Server, case: Case, runs: Path | None) -> dict[str, str]:
    """Run the commands of a case; return its sections."""
    sections: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in case.files.items():
            (folder / file).write_text(text)
        if case.needs_runs and runs:
            shutil.copy(runs, folder / RUNS)
        number = 0
        for command in case.commands:
            is_for_all = EVERY_FILE in command
            for file in sorted(files_below(folder / "launch")) if is_for_all else [""]:
                number += 1
                arguments = [f"launch/{file}" if word == EVERY_FILE else word for word in command]
                sections |= run_step(server, folder, number, arguments)
    return sections


def run_step(server: Server, folder: Path, number: int, arguments: list[str]) -> dict[str, str]:
    """Run one command of a case; return its sections."""
    before = files_below(folder)
    status, output, errors = server.run(folder, arguments)
    sections = {
        f"{number} command": f"autoplan {' '.join(arguments)}\nexit {status}\n",
        f"{number} stderr": errors,
        f"{number} stdout": output,
    }
    for file, (text, is_executable) in files_below(folder).items():
        if before.get(file) != (text, is_executable):
            title = f"{number} {arguments[0]} wrote {file}{' (executable)' * is_executable}"
            sections[title] = "as stdout\n" if text == output else text
    return {title: text.replace(str(folder), "FOLDER") for title, text in sections.items()}


def record(arguments: argparse.Namespace) -> int:
    """Run all cases on a checkout, and write what it answers."""
    out: Path = arguments.out
    stored = json.loads(arguments.cases.read_text()) if arguments.cases else None
    cases = make_cases() if stored is None else [Case(**case) for case in stored]
    if arguments.only:
        cases = [case for case in cases if case.group == arguments.only]
    if any(case.needs_runs for case in cases) and not arguments.runs.is_file():
        sys.exit(f"{arguments.runs} is not there: name the table of measured runs with --runs")
    for group in {case.group for case in cases}:
        shutil.rmtree(out / group, ignore_errors=True)
        (out / group).mkdir(parents=True)
    (out / CASES_FILE).write_text(json.dumps([asdict(case) for case in cases], indent=1) + "\n")
    began_s = time.monotonic()
    times_s = run_cases(arguments.checkout.resolve(), cases, arguments.runs, out, arguments.jobs)
    print_summary(out, cases, times_s, time.monotonic() - began_s)
    return 0


def run_cases(checkout: Path, cases: list[Case], runs: Path, out: Path, jobs: int) -> dict[str, float]:
    """Run the cases on this many processes, and write their records; return how long each took."""
    times_s = {}
    local = threading.local()
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as scratch:

        def start() -> None:
            local.server = Server(checkout, Path(tempfile.mkdtemp(dir=scratch)))
            servers.append(local.server)

        def answer(case: Case) -> None:
            began_s = time.monotonic()
            sections = run_case(local.server, case, runs)
            (out / case.group / f"{case.name}.txt").write_bytes(write_sections(sections).encode())
            times_s[f"{case.group}/{case.name}"] = time.monotonic() - began_s

        with ThreadPoolExecutor(jobs, initializer=start) as pool:
            list(pool.map(answer, cases))
        for server in servers:
            server.close()
    return times_s


def exits_of(record: str) -> list[int]:
    """The exit statuses of the commands of a record."""
    return [
        int(text.rstrip("\n").rpartition(" ")[2])
        for title, text in read_sections(record).items()
        if title.endswith(" command")
    ]


def print_summary(out: Path, cases: list[Case], times_s: Mapping[str, float], wall_s: float) -> None:
    """Print how many cases there are, how many were refused, and which took longest."""
    kinds: Counter[tuple[str, str]] = Counter()
    for case in cases:
        exits = exits_of((out / case.group / f"{case.name}.txt").read_bytes().decode())
        # What cannot be read back is told of every export, so only its first two commands count.
        exits = exits[:2] if case.group == "exports" else exits
        kinds[case.group, "failed" if any(code not in (0, 1) for code in exits) else "refused" * any(exits)] += 1
    for group in GROUPS:
        num_cases = sum(count for (other, _), count in kinds.items() if other == group)
        if num_cases:
            print(f"{group}: {num_cases} cases, {kinds[group, 'refused']} refused, {kinds[group, 'failed']} failed")
    longest = sorted(times_s, key=lambda name: -times_s[name])[:3]
    print(f"{wall_s:.0f} s; longest: {', '.join(f'{name} {times_s[name]:.1f} s' for name in longest)}")


# -- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """Differences that are allowed: names of JSON fields, by the old ones, and lines that match patterns."""

    fields: dict[str, str] = field(default_factory=dict)
    lines: tuple[re.Pattern[str], ...] = ()


def read_renames(path: Path) -> Renames:
    """Read a file of `--renames`."""
    table = tomllib.loads(path.read_text())
    if unknown := set(table) - {"fields", "lines"}:
        raise SystemExit(f"{path}: unknown {', '.join(sorted(unknown))}: it has fields and lines")
    return Renames(fields=table.get("fields", {}), lines=tuple(re.compile(line) for line in table.get("lines", ())))


def without_volatile(value: Any, fields: Mapping[str, str]) -> Any:
    """A JSON value with new names for its fields, and without those that may differ."""
    if isinstance(value, dict):
        renamed = {fields.get(key, key): without_volatile(inner, fields) for key, inner in value.items()}
        return {key: inner for key, inner in renamed.items() if key and key not in VOLATILE}
    if isinstance(value, list):
        return [without_volatile(inner, fields) for inner in value]
    return value


def comparable_json(text: str, renames: Renames) -> str | None:
    """A JSON text in one form; None where it is none."""
    if not text.startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return json.dumps(without_volatile(value, renames.fields), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def comparable_page(page: str, renames: Renames) -> str:
    """The data inside an HTML page, and its words."""
    parts = [f"{name}\n{comparable_json(text, renames) or text}\n" for name, text in _SCRIPT.findall(page)]
    words = _TAG.sub("\n", _UNSEEN.sub("", page))
    return "".join(parts) + "\n".join(line.strip() for line in words.splitlines() if line.strip()) + "\n"


def comparable(title: str, text: str, renames: Renames) -> str:
    """Part of a section that is compared."""
    if not VERBATIM.match(title):
        is_page = title.endswith(".html")
        text = comparable_page(text, renames) if is_page else comparable_json(text, renames) or text
    text = _VERSION.sub("autoplan VERSION", text)
    if renames.lines:
        lines = text.splitlines(keepends=True)
        text = "".join(line for line in lines if not any(pattern.search(line) for pattern in renames.lines))
    return text


def differences(old: str, new: str, renames: Renames) -> list[str]:
    """The lines of a unified diff of two records of one case; none where they answer the same."""
    old_sections, new_sections = read_sections(old), read_sections(new)
    lines: list[str] = []
    for title in dict.fromkeys((*old_sections, *new_sections)):
        texts = [
            comparable(title, sections[title], renames) if title in sections else None
            for sections in (old_sections, new_sections)
        ]
        if texts[0] == texts[1]:
            continue
        if None in texts:
            lines.append(f"{MARK}{title}: only in the {'second' if texts[0] is None else 'first'}")
            continue
        before, after = (str(text).splitlines() for text in texts)
        found = [line.rstrip("\n") for line in difflib.unified_diff(before, after, n=1)][2:]
        lines += [f"{MARK}{title}", *(found or ["other ends of lines"])]
    return lines


def records_of(folder: Path, groups: Iterable[str]) -> dict[str, Path]:
    """The records in a folder, by group and name."""
    return {f"{group}/{path.stem}": path for group in groups for path in sorted((folder / group).glob("*.txt"))}


def compared(first: Path, second: Path, groups: Iterable[str], renames: Renames) -> Iterator[tuple[str, list[str]]]:
    """Cases with their differences."""
    groups = tuple(groups)
    old, new = records_of(first, groups), records_of(second, groups)
    for name in dict.fromkeys((*old, *new)):
        if name not in old or name not in new:
            yield name, [f"only in {first if name in old else second}"]
            continue
        yield name, differences(old[name].read_bytes().decode(), new[name].read_bytes().decode(), renames)


def compare(arguments: argparse.Namespace) -> int:
    """Print which cases differ, and how the first of them do; return 1 where any does."""
    renames = read_renames(arguments.renames) if arguments.renames else Renames()
    groups = (arguments.only,) if arguments.only else GROUPS
    cases = list(compared(arguments.first, arguments.second, groups, renames))
    if not cases:
        sys.exit(f"no records in {arguments.first} and {arguments.second}")
    differing = [(name, lines) for name, lines in cases if lines]
    for name, lines in differing[: arguments.show]:
        print(f"{name} differs:")
        print("\n".join(f"  {line}" for line in lines[:LINES_SHOWN]))
        if len(lines) > LINES_SHOWN:
            print(f"  ... {len(lines) - LINES_SHOWN} lines more")
    if len(differing) > arguments.show:
        print(f"also: {', '.join(name for name, _ in differing[arguments.show :])}")
    for group in groups:
        num_cases = sum(name.startswith(f"{group}/") for name, _ in cases)
        num_differing = sum(name.startswith(f"{group}/") for name, _ in differing)
        print(f"{group}: {num_differing} of {num_cases} cases differ")
    return int(bool(differing))


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="run all cases on a checkout")
    recorder.add_argument("checkout", type=Path)
    recorder.add_argument("--out", type=Path, required=True, help="folder for the records")
    recorder.add_argument("--runs", type=Path, default=Path("../shared/data/measured_runs.csv"), help="measured runs")
    recorder.add_argument("--cases", type=Path, help="cases.json of an earlier record")
    recorder.add_argument("--jobs", type=int, default=2, help="processes that answer")
    comparer = commands.add_parser("compare", help="compare two records")
    comparer.add_argument("first", type=Path)
    comparer.add_argument("second", type=Path)
    comparer.add_argument("--renames", type=Path, help="TOML of what may differ")
    comparer.add_argument("--show", type=int, default=NUM_SHOWN, help="cases whose differences are shown")
    for command in (recorder, comparer):
        command.add_argument("--only", choices=GROUPS, help="of the cases only these")
    return parser


def main() -> int:
    """Do what the command line says."""
    arguments = make_parser().parse_args()
    return record(arguments) if arguments.command == "record" else compare(arguments)


if __name__ == "__main__":
    sys.exit(main())
