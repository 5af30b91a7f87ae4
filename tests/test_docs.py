"""Does everything that README.md and docs/ show work as shown?"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import typer

from autoplan.cli import COMMANDS, make_app
from documented import PAGES, ROOT, Commands, File, answer, blocks, calls, elided, is_refusal, set_up
from stores import postgres_schema

SERVER = "postgresql://ada@db.lab/timings"  # the team's, in the pages


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_of_a_page_answer_as_shown(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_DB", "timings.db")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    set_up(tmp_path)
    for block in blocks(path.read_text()):
        if isinstance(block, File):
            (tmp_path / block.name).write_text(block.text)
        elif not block.needs:
            check_answer(block, tmp_path)


def check_answer(block: Commands, folder: Path) -> None:
    status, printed = answer(block, folder)
    assert bool(status) is is_refusal(block.output or ""), printed
    if block.output is not None:
        assert elided(printed, block.output) == block.output, "run `python tests/support/documented.py`"


def test_timings_are_shared_on_a_server_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_DB", "timings.db")
    with ExitStack() as stack:
        url = None
        for block in blocks((ROOT / "docs/how-to/timings.md").read_text()):
            if isinstance(block, File):
                (tmp_path / block.name).write_text(block.text)
            elif block.needs == "PostgreSQL":
                url = url or stack.enter_context(postgres_schema())
                here = tuple(line.replace(SERVER, url) for line in block.lines)
                status, printed = answer(replace(block, lines=here), tmp_path)
                assert status == 0, printed
            elif not block.needs and url is None and block.lines[0].startswith("autoplan db"):
                assert answer(block, tmp_path)[0] == 0  # what is sent; the page's own test runs the rest
        assert url is not None


@lru_cache
def app() -> Any:
    return typer.main.get_command(make_app())


def command_of(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that is called, and what is left of the arguments."""
    command, rest = app(), list(arguments)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {shlex.join(arguments)}"
        command = command.commands[rest.pop(0)]
    return command, rest


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_commands_of_other_machines_are_complete(path: Path) -> None:
    for block in blocks(path.read_text()):
        if isinstance(block, Commands) and block.needs:
            for line in block.lines:
                for arguments in calls(line):
                    command, rest = command_of(arguments)
                    command.make_context("autoplan", rest)  # refuses unknown options, missing and wrong values


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_options_that_the_text_names_exist(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`(autoplan [^`]+)`", text):
        for arguments in calls(code.replace("\n", " ")):
            command, rest = command_of(arguments)
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            ours = rest[: rest.index("--")] if "--" in rest else rest
            named = {word.partition("=")[0] for word in ours if word.startswith("-")}
            assert named <= known, code


def test_readme_names_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"`autoplan {name}" not in readme] == []


def test_readme_shows_what_make_search_runs() -> None:
    made = subprocess.run(["make", "--dry-run", "search"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Lines before them prepare the environment, and name the package too.
    commands = [line.removeprefix(".venv/bin/") for line in made.splitlines() if line.startswith(".venv/bin/autoplan ")]
    started = [arguments for line in commands for arguments in calls(line)]
    shown = [
        [*arguments, "--force"]
        for block in blocks((ROOT / "README.md").read_text())
        if isinstance(block, Commands)
        for line in block.lines
        for arguments in calls(line)
    ]
    assert started == shown[: len(started)]
    assert len(started) == 2


def test_pages_say_how_accurate_predictions_are() -> None:
    """In the figures of the newest results."""
    accuracy, memory = (max((ROOT / "benchmarks/results").glob(f"*_{name}.md")) for name in ("accuracy", "memory"))
    tables = {
        title: {line.rsplit(None, 16)[0]: line.split()[-16:] for line in table.splitlines() if line}
        for title, table in re.findall(r"^([A-Z][\w -]+)\n\n(source .+\n(?:.+\n)+)", accuracy.read_text(), re.M)
    }
    num_finished, median, tenth, cover = 1, 3, 4, 6
    shipped, unseen, later = (
        tables[title] for title in ("As shipped", "A whole source left out", "All later sources left out")
    )
    finished = [
        cells
        for name, cells in shipped.items()
        if name not in ("source", "all runs", "mean of sources") and cells[num_finished] != "0"
    ]
    mean, later_mean = shipped["mean of sources"], later["mean of sources"]
    memory_errors = [float(error) for error in re.findall(r"^\w+ +\d+ +([\d.]+) ", memory.read_text(), re.M)[:6]]
    shown = " ".join((ROOT / "README.md").read_text().split())
    for figure in (
        f"{len(finished)} published sources with finished runs | {float(mean[median]):.1f} %, mean of sources",
        f"{_percent(unseen['all runs'][cover])}, with the whole source held out",
        f"the 17 that came later | {float(later_mean[median]):.1f} %",
        f"90 % of the runs of a source are within {float(mean[tenth]):.0f} %",
        f"is {max(float(cells[median]) for cells in finished):.0f} % off",
        f"within {min(memory_errors):.1f} to {max(memory_errors):.0f} %",
    ):
        assert figure in shown
    summary = (ROOT / "docs/accuracy.md").read_text()
    runs = later["all runs"]
    assert (
        f"(17) | {runs[1]} | {float(later_mean[median]):.1f} %, mean of sources | {_percent(runs[cover])} |" in summary
    )
    for start, title in (
        ("blind: predicted once, before the result was looked at", "Blind runs as first predicted"),
        ("the same runs as predicted today", "Blind runs as predicted now"),
        ("fine-tuning, as first predicted", "Fine-tuning as first predicted"),
        ("fine-tuning as predicted today", "Fine-tuning as predicted now"),
    ):
        runs = tables[title]["all runs"]
        assert f"| {start} | {runs[1]} | {float(runs[median]):.1f} % | {_percent(runs[cover])} |" in summary
    runs = tables["Blind runs as first predicted"]["all runs"]
    assert f"On {runs[1]} published runs that were predicted before" in shown
    assert f"median error of the step time is {float(runs[median]):.1f} %" in shown
    num_publications = len(tables["Blind runs as first predicted"].keys() - {"source", "all runs", "mean of sources"})
    row = f"| {runs[1]} runs of {num_publications} publications, predicted before looking at the result |"
    assert f"{row} {float(runs[median]):.1f} % | {_percent(runs[cover])} |" in shown


def _percent(share: str) -> str:
    return f"{100 * float(share):.0f} %"


def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]* src="?([^" >]+)', page.read_text())
        loaded += re.findall(r"<link [^>]*>", page.read_text())
        assert [address for address in loaded if "//" in address] == [], page
