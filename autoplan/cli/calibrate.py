"""`autoplan calibrate`: bring the predictions to the level of runs that were measured on one's own cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.cli.inputs import ForceOption, QuietOption
from autoplan.errors import InputError

if TYPE_CHECKING:
    from autoplan.read.runs import Run

LEAST_RUNS = 3


def calibrate(
    runs: Annotated[Path, typer.Option(help="CSV table of measured runs in the columns of measured_runs.csv.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Calibration (TOML) to write.")],
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fit a calibration to finished runs of one framework on one kind of device, from as few as three.

    It starts from the shipped calibration and moves away from it only as far as the runs demand; pass it on with
    --calibration.
    """
    from autoplan.cli.inputs import check_output
    from autoplan.cost.calibration import MeasuredRun, calibrated
    from autoplan.files import write_text
    from autoplan.read.calibration import calibration_text
    from autoplan.read.outcomes import read_outcomes
    from autoplan.read.runs import read_runs

    check_output(out, force=force)
    steps = {one.id: one.step_s for one in read_outcomes(runs) if one.is_finished}
    measured = []
    kinds = set()
    for run in read_runs(runs):
        if (step_s := steps.get(run.id)) is None:
            continue
        if run.problem is None or run.plan is None:
            if not quiet:
                print(f"autoplan: {run.id} is left out: {run.refusal}", file=sys.stderr)
            continue
        measured.append(MeasuredRun(problem=run.problem, plan=run.plan, step_s=step_s))
        kinds.add(_kind(run))
    if len(measured) < LEAST_RUNS:
        raise InputError(f"{runs}: {len(measured)} finished runs that can be priced, a calibration needs {LEAST_RUNS}")
    if len(kinds) > 1:
        raise InputError(f"{runs}: runs of {' and of '.join(sorted(kinds))}: give each of them a table of its own")
    fitted = calibrated(measured, name=f"{runs.stem}: {min(kinds)}")
    write_text(out, calibration_text(fitted.calibration), force=force)
    if not quiet:
        before, after = 100 * fitted.median_error_before, 100 * fitted.median_error
        print(
            f"{len(measured)} runs: median error {before:.1f} % with the shipped calibration, {after:.1f} % with each "
            f"left out of this one; wrote {out}",
            file=sys.stderr,
        )


def _kind(run: Run) -> str:
    assert run.problem is not None
    return f"{run.problem.framework.name} on {run.problem.cluster.device.name}"
