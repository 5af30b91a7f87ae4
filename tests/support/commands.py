"""The command line, run in this process: starting another one takes longer than most commands do."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from unittest import mock

from autoplan.cli import main


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Answer of `autoplan` with these arguments in a folder, with 80 columns unless `variables` say otherwise."""
    out, err = io.StringIO(), io.StringIO()
    status: int | str | None = 0
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["autoplan", *arguments]),
        mock.patch.dict("os.environ", {"COLUMNS": "80", **variables}),
    ):
        try:
            main()
        except SystemExit as left:
            status = left.code
    return subprocess.CompletedProcess(arguments, int(status or 0), out.getvalue(), err.getvalue())
