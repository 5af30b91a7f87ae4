"""What do the benchmarks share?  Their first options, and the dated report that they write if asked."""

from __future__ import annotations

import argparse
import datetime
import platform
from pathlib import Path

import autoplan
from autoplan.files import write_text


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


def write_report(path: Path, title: str, made_by: str, *blocks: str) -> None:
    """Write `blocks`, as they were printed, below the title, the day, and what they were made by."""
    lines = [
        f"# {title}, {datetime.date.today().isoformat()}",
        f"autoplan {autoplan.__version__}, Python {platform.python_version()}; {made_by}.",
        *(f"```\n{block.rstrip()}\n```" for block in blocks),
    ]
    write_text(path, "\n\n".join(lines) + "\n", force=True)
