"""Command `autoplan score`: rates predictions of measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import autoplan
from autoplan.cli.options import RUNS_HELP, CalibrationOption, JsonOption


def score(
    runs: Annotated[Path, typer.Option(metavar="FILE", help=RUNS_HELP)],
    predictions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Output of `autoplan predict`; without it, the runs are priced now."),
    ] = None,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
) -> None:
    """Compare predictions with measurements, source by source: errors, intervals, ranking, choices and memory."""
    scores = autoplan.score(runs, predictions=predictions, calibration=calibration)
    typer.echo(scores.to_json() if json else scores.to_text(), nl=False)
