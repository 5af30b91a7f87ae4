"""`autoplan calibrate`: bring the predictions to the level of runs that were measured on one's own cluster."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import autoplan
from autoplan import api
from autoplan.base.errors import InputError
from autoplan.base.files import encode, write_text
from autoplan.base.units import format_seconds
from autoplan.cli.inputs import check_outputs, url_with_password
from autoplan.cli.options import RUNS_HELP, DbOption, ForceOption, QuietOption, SetOption, whole_number
from autoplan.cli.remarks import print_written, say

if TYPE_CHECKING:
    from autoplan.api.measured_runs import Imported, ImportedRun


RunsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help=RUNS_HELP),
]
FromLogsOption = Annotated[
    Path | None,
    typer.Option(
        "--from-logs",
        metavar="DIR",
        help="Folder with logs of past runs and their launch files; the runs go into the timing database.",
    ),
]
ClusterOption = Annotated[
    str | None, typer.Option(metavar="CLUSTER", help="Cluster on which the logs were written, with its full size.")
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Model for launch files that name none, as for search.")
]
SeqLenOption = Annotated[
    int | None, whole_number("--seq-len", "TOKENS", "Sequence length for launch files that name none.")
]
TimingsOption = Annotated[
    bool,
    typer.Option(
        "--timings", help="Fit on top of the measured timings in the database, for a search with --timings db."
    ),
]
OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Calibration (TOML) to write.")]
AsJsonOption = Annotated[bool, typer.Option("--json", help="Print the errors, or the outcome for each log, as JSON.")]


def calibrate(
    context: typer.Context,
    runs: RunsOption = None,
    from_logs: FromLogsOption = None,
    cluster: ClusterOption = None,
    model: ModelOption = None,
    seq_len: SeqLenOption = None,
    variables: SetOption = None,
    url: DbOption = None,
    timings: TimingsOption = False,
    out: OutOption = None,
    force: ForceOption = False,
    as_json: AsJsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fit a calibration to finished runs of one framework on one kind of device; three runs are enough.

    It starts from the shipped calibration and moves away only as far as the runs justify.  From a table, it writes a
    file for --calibration FILE.  From logs, it stores the runs in the timing database, for --calibration db.  Launch
    files are never executed.
    """
    if (runs is None) == (from_logs is None):
        raise InputError("give either a table of runs, --runs FILE, or a folder of logs, --from-logs DIR")
    check_outputs(out, force=force)
    if from_logs is not None:
        if cluster is None:
            raise InputError("--from-logs needs --cluster: name the cluster on which the logs were written")
        imported = api.measured_runs.import_logs(
            from_logs,
            cluster=cluster,
            db=url_with_password(context, url),
            with_times=timings,
            model=model,
            seq_len=seq_len,
            variables=variables or (),
        )
        _hand_over_imported(imported, from_logs, out, force=force, as_json=as_json, quiet=quiet)
        return
    assert runs is not None
    if cluster or model or seq_len or variables or url or timings:
        raise InputError("--cluster, --db and related options go with --from-logs: a table of runs has these columns")
    if out is None:
        raise InputError("a calibration from a table is written to a file: give --out FILE")
    calibrated = autoplan.calibrate(runs)
    for text in () if quiet else calibrated.warnings:
        say(text)
    calibrated.save(out, force=force)
    if as_json:
        errors = calibrated.table()
        typer.echo(encode(api.outputs.Calibrated(out=str(out), **next(iter(errors)))), nl=False)
    if not quiet:
        use = f"use it with --calibration {shlex.quote(str(out))}"
        print(f"{calibrated.headline}; wrote {out}: {use}", file=sys.stderr)


def _hand_over_imported(
    imported: Imported, folder: Path, out: Path | None, *, force: bool, as_json: bool, quiet: bool
) -> None:
    """Print the result for every log, and write the calibration."""
    if as_json:
        typer.echo(encode(imported), nl=False)
    else:
        _print_imported(imported)
    if not imported.taken:
        raise InputError(
            f"{folder}: no run could be used; each log needs its launch file in the same or a parent folder"
        )
    if out is not None:
        if len(imported.calibrations) != 1:
            frameworks = " and ".join(imported.calibrations) or "none"
            raise InputError(f"--out writes the calibration of one framework, found {frameworks}: leave it out")
        (fitted,) = imported.calibrations.values()
        from autoplan.readers.calibration import calibration_text

        write_text(out, calibration_text(fitted.calibration), force=force)
        print_written(out, quiet=quiet)


def _print_imported(imported: Imported) -> None:
    from rich.text import Text

    from autoplan.cost.spreads import NORMAL_90
    from autoplan.report.terminal import make_console, print_table

    console = make_console()
    if imported.taken:
        columns = [(name, False) for name in ("log", "framework", "plan")]
        columns += [(name, True) for name in ("devices", "step", "predicted")]
        print_table(console, columns, map(_cells, imported.taken), keep=len(columns))
    if imported.passed_over:
        console.print("\nskipped" if imported.taken else "skipped")
        for path, reason in imported.passed_over.items():
            console.print(Text(f"  {path}: {reason}"), soft_wrap=True)
    num_unread = sum(imported_log.num_unread > 0 for imported_log in imported.taken)
    if num_unread:
        console.print(f"\n{num_unread} runs used options that were not understood: autoplan read lists them")
    num_present = len(imported.taken) - imported.num_new
    console.print(
        f"\n{len(imported.taken)} runs: {imported.num_new} new in the database, {num_present} already there; "
        f"{len(imported.passed_over)} files skipped"
    )
    for name, fitted in imported.calibrations.items():
        spread = float(fitted.calibration.time_spreads[0])
        console.print(
            f"{name}: median error {100 * fitted.median_error_before:.1f} % with the shipped calibration, "
            f"{100 * fitted.median_error:.1f} % with this one (leave-one-out); the 90 % interval of a step is then "
            f"-{-100 * math.expm1(-NORMAL_90 * spread):.0f} to +{100 * math.expm1(NORMAL_90 * spread):.0f} %: "
            "--calibration db",
            soft_wrap=True,
        )
    for name, why in imported.without.items():
        console.print(f"{name}: not calibrated, {why}", soft_wrap=True)


def _cells(imported_log: ImportedRun) -> tuple[str, ...]:
    run = imported_log.run
    came = format_seconds(run.seconds) if run.seconds else {"oom": "out of memory"}.get(run.status, run.status)
    texts = (imported_log.log, run.framework, run.plan.describe(), str(run.plan.num_devices), came)
    return (*texts, format_seconds(imported_log.predicted_s))
