"""`autoplan predict`: price every row of a table of measured runs."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli.options import CalibrationOption, ForceOption


def predict(
    runs: Annotated[Path, typer.Option(help="CSV table of runs in the columns of measured_runs.csv.")],
    out: Annotated[Path, typer.Option(help="CSV table of predictions to write.")],
    calibration: CalibrationOption = None,
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Price every run of a table from its configuration alone, in the columns that a scorer reads."""
    from autoplan.api.calibrations import plain_calibration
    from autoplan.base.files import write_text
    from autoplan.cli.inputs import check_output
    from autoplan.runs.predictions import predict_runs, prediction_table

    check_output(out, force=force)
    predictions = predict_runs(runs, plain_calibration(calibration) if calibration else None)
    write_text(out, prediction_table(predictions), force=force)
    verdicts = Counter(prediction.verdict for prediction in predictions)
    if json:
        from autoplan.api.outputs import Predicted
        from autoplan.base.files import encode

        typer.echo(
            encode(
                Predicted(
                    out=str(out),
                    runs=len(predictions),
                    verdicts={str(verdict): count for verdict, count in verdicts.items()},
                )
            ),
            nl=False,
        )
        return
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    typer.echo(f"{len(predictions)} runs: {counted or 'none priced'}; written to {out}")
    typer.echo(f"next: autoplan score --runs {shlex.quote(str(runs))} --predictions {shlex.quote(str(out))}", err=True)
