"""Command `autoplan score`: rates predictions of measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli.options import CalibrationOption


def score(
    runs: Annotated[Path, typer.Option(help="CSV table of measured runs in the columns of measured_runs.csv.")],
    predictions: Annotated[
        Path | None, typer.Option(help="Table that `autoplan predict` wrote; left out, the runs are priced now.")
    ] = None,
    calibration: CalibrationOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare predictions with what was measured, source by source: errors, intervals, ranks, picks and memory."""
    import msgspec

    from autoplan.api.calibrations import plain_calibration
    from autoplan.base.errors import InputError
    from autoplan.report.score import score_by_source, score_table
    from autoplan.runs.outcomes import read_outcomes
    from autoplan.runs.predictions import predict_runs, read_predictions

    if predictions is not None and calibration is not None:
        raise InputError("--predictions were priced already: leave --calibration out")
    outcomes = list(read_outcomes(runs))
    if predictions is not None:
        said = list(read_predictions(predictions))
    else:
        said = predict_runs(runs, plain_calibration(calibration) if calibration else None)
    by_id = {one.id: one for one in said}
    if not any(one.id in by_id for one in outcomes):
        raise InputError(f"{predictions or runs} has none of the runs of {runs}: predict that table first")
    rows = score_by_source(outcomes, by_id)
    typer.echo(msgspec.json.encode(rows).decode() if json else score_table(rows), nl=json)
