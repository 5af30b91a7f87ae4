"""`autoplan predict`: price every row of a table of measured runs."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli.inputs import ForceOption

if TYPE_CHECKING:
    from autoplan.read.predictions import Prediction

COLUMNS = ("id", "step_time_s", "step_time_low_s", "step_time_high_s", "peak_memory_gib", "verdict", "note")


def predict(
    runs: Annotated[Path, typer.Option(help="CSV table of runs in the columns of measured_runs.csv.")],
    out: Annotated[Path, typer.Option(help="CSV table of predictions to write.")],
    force: ForceOption = False,
) -> None:
    """Price every run of a table from its configuration alone, in the columns that a scorer reads."""
    from autoplan.cli.inputs import check_output
    from autoplan.files import write_text
    from autoplan.read.predictions import predict as predict_run
    from autoplan.read.runs import read_runs

    check_output(out, force=force)
    predictions = [predict_run(run) for run in read_runs(runs)]
    write_text(out, prediction_table(predictions), force=force)
    verdicts = Counter(prediction.verdict for prediction in predictions)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    typer.echo(f"{len(predictions)} runs: {counted or 'none priced'}; written to {out}")


def prediction_table(predictions: Iterable[Prediction]) -> str:
    """The predictions as CSV text in `COLUMNS`; blank where there is no figure."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for prediction in predictions:
        values = (getattr(prediction, column) for column in COLUMNS)
        writer.writerow(f"{value:.6g}" if isinstance(value, float) else value or "" for value in values)
    return text.getvalue()
