"""Functions that benchmarks share: first options, curves as presets hold them, and dated reports."""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import autoplan
from autoplan.base.files import write_text
from autoplan.base.units import file_units


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark with that docstring, whose first line is its help; it knows --report."""
    parser = argparse.ArgumentParser(description=(about or "").strip().splitlines()[0])
    parser.add_argument("--report", type=Path, help="also write the tables to this Markdown file")
    return parser


def existing(text: str) -> Path:
    """A file that is there, for the `type` of an option."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not there: name another file")
    return path


def curve_toml(head: str, curve: Any, **more: float) -> str:
    """A fitted curve as a preset holds it, `more` figures behind it as comments."""
    lines = [f"[{head}]"]
    for parameter in fields(curve):
        if parameter.name in ("source", "efficiency"):  # the level is that of training, not of the tables
            continue
        value, key = getattr(curve, parameter.name), parameter.name
        for human, inside, factor in file_units(parameter.name):
            if human in ("_us", "_mib"):
                key, value = parameter.name[: -len(inside)] + human, value / factor
        lines.append(f"{key} = {value:.3g}")
    return "\n".join([*lines, *(f"# {name}: {value:.3g}" for name, value in more.items())])


def write_report(path: Path, title: str, made_by: str, *blocks: str) -> None:
    """Write `blocks`, as they were printed, below the title, the day, the commit, and what they were made by."""
    lines = [
        f"# {title}, {datetime.date.today().isoformat()}",
        f"autoplan {autoplan.__version__}{_commit()}, Python {platform.python_version()}; {made_by}.",
        *(f"```\n{block.rstrip()}\n```" for block in blocks),
    ]
    write_text(path, "\n\n".join(lines) + "\n", force=True)


def _commit() -> str:
    """Return the commit of this checkout, with a word on files that were changed since; blank outside of one."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=, changed", "--exclude=*")
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" ({found})"
