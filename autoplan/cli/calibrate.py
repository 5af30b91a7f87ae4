"""`autoplan calibrate`: bring the predictions to the level of runs that were measured on one's own cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError
from autoplan.cli.options import DbOption, ForceOption, QuietOption, SetOption, whole_number

if TYPE_CHECKING:
    from autoplan.runs.runs import Run


def calibrate(
    context: typer.Context,
    runs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV table of measured runs in the columns of measured_runs.csv."),
    ] = None,
    from_logs: Annotated[
        Path | None,
        typer.Option(
            "--from-logs",
            metavar="DIR",
            help="Folder of logs of past runs with the launch files that started them: kept in the timing database.",
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="CLUSTER", help="On which the logs were written, in its whole size.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Of launch files that name none, as for search.")
    ] = None,
    seq_len: Annotated[int | None, whole_number("--seq-len", "TOKENS", "Of launch files that name none.")] = None,
    variables: SetOption = None,
    url: DbOption = None,
    timings: Annotated[
        bool,
        typer.Option(
            "--timings", help="Fit beside the measured times in the database: for a search with --timings db."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Calibration (TOML) to write.")] = None,
    force: ForceOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the errors, or what became of the logs, as JSON.")
    ] = False,
    quiet: QuietOption = False,
) -> None:
    """Fit a calibration to finished runs of one framework on one kind of device, from as few as three.

    It starts from the shipped calibration and moves away from it only as far as the runs demand.  That of a table is
    written to a file: pass it on with --calibration FILE.  Runs from logs are kept in the timing database: search and
    estimate use them with --calibration db.  Nothing in a launch file is run.
    """
    from autoplan.cli.inputs import check_output, whole_url

    if (runs is None) == (from_logs is None):
        raise InputError("give either a table of runs, --runs FILE, or a folder of logs, --from-logs DIR")
    if out is not None:
        check_output(out, force=force)
    if from_logs is not None:
        from autoplan.api.launch_files import make_given
        from autoplan.cli.from_logs import import_logs

        if cluster is None:
            raise InputError("--from-logs needs --cluster: name the cluster on which the logs were written")
        given = make_given(model, seq_len=seq_len, variables=variables or ())
        import_logs(
            from_logs,
            cluster,
            given,
            whole_url(context, url),
            with_times=timings,
            out=out,
            force=force,
            as_json=as_json,
            quiet=quiet,
        )
        return
    assert runs is not None
    if cluster or model or seq_len or variables or url or timings:
        raise InputError("a table of runs says all of them: --cluster, --db and the like go with --from-logs")
    if out is None:
        raise InputError("a calibration from a table is written to a file: give --out FILE")
    _from_table(runs, out, force=force, as_json=as_json, quiet=quiet)


def _from_table(runs: Path, out: Path, *, force: bool, as_json: bool, quiet: bool) -> None:
    from autoplan.api.calibrations import LEAST_RUNS, fitted_to
    from autoplan.base.files import write_text
    from autoplan.cost.calibration import MeasuredRun
    from autoplan.read.calibration import calibration_text
    from autoplan.runs.outcomes import read_outcomes
    from autoplan.runs.runs import read_runs

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
    fitted = fitted_to(measured, name=f"{runs.stem}: {min(kinds)}")
    write_text(out, calibration_text(fitted.calibration), force=force)
    if as_json:
        from autoplan.api.outputs import Calibrated
        from autoplan.base.files import encode

        made = Calibrated(
            out=str(out),
            runs=len(measured),
            median_error_before=fitted.median_error_before,
            median_error=fitted.median_error,
        )
        typer.echo(encode(made), nl=False)
    if not quiet:
        before, after = 100 * fitted.median_error_before, 100 * fitted.median_error
        print(
            f"{len(measured)} runs: median error {before:.1f} % with the shipped calibration, {after:.1f} % with each "
            f"left out of this one; wrote {out}: take it with --calibration {shlex.quote(str(out))}",
            file=sys.stderr,
        )


def _kind(run: Run) -> str:
    assert run.problem is not None
    return f"{run.problem.framework.name} on {run.problem.cluster.device.name}"
