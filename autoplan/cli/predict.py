"""`autoplan predict`: price every row of a table of measured runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

import autoplan
from autoplan import api
from autoplan.base.files import encode
from autoplan.cli.inputs import check_output
from autoplan.cli.options import RUNS_HELP, CalibrationOption, ForceOption


def predict(
    runs: Annotated[Path, typer.Option(metavar="FILE", help=RUNS_HELP)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="CSV table of predictions to write.")],
    calibration: CalibrationOption = None,
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Predict every run of a table from its configuration alone, for `autoplan score`."""
    check_output(out, force=force)
    predicted = autoplan.predict(runs, calibration=calibration)
    predicted.save(out, force=force)
    if json:
        counts = api.outputs.Predicted(out=str(out), runs=len(predicted.predictions), verdicts=predicted.verdicts)
        typer.echo(encode(counts), nl=False)
        return
    typer.echo(f"{predicted.headline}; written to {out}")
    typer.echo(f"next: autoplan score --runs {shlex.quote(str(runs))} --predictions {shlex.quote(str(out))}", err=True)
