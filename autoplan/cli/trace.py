"""Traces of one step, as a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoplan.cost.timeline import Timeline


def write_trace(line: Timeline, plan: str, path: Path, *, force: bool, quiet: bool) -> None:
    """One step of a plan, which is told in words, as a Chrome trace."""
    from autoplan.base.files import write_text
    from autoplan.report.trace import trace_json

    write_text(path, trace_json(line, plan), force=force)
    if not quiet:
        print(f"wrote {path}: open it in ui.perfetto.dev", file=sys.stderr)
