"""Import of past runs by `autoplan calibrate --from-logs`, from their logs and launch files."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autoplan.base.errors import AutoplanError, InputError
from autoplan.cost.calibration import Fitted
from autoplan.profiler.run_record import RunRecord

if TYPE_CHECKING:
    from autoplan.frameworks.common.launch import Given
    from autoplan.topology.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A past run that the database holds now."""

    log: str  # inside the folder, like the launch file
    launch_file: str
    num_unread: int  # options of that which were not understood and may matter
    predicted_s: float  # a step, by the shipped calibration
    run: RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Outcome of importing a folder of logs."""

    taken: tuple[Taken, ...]
    passed_over: dict[str, str]  # why, by path inside the folder
    num_new: int  # in the database; the others were held already
    calibrations: dict[str, Fitted]  # by framework: from all its runs on such nodes that are held
    without: dict[str, str]  # frameworks that have none, and why


def import_logs(
    folder: Path,
    cluster: str,
    given: Given,
    url: str | None,
    *,
    with_times: bool,
    out: Path | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Keep the runs in the database, calibrate the frameworks that ran, and say what became of every log."""
    from autoplan.api.problem import load_cluster
    from autoplan.base.files import encode, write_text
    from autoplan.read.calibration import calibration_text

    place = load_cluster(cluster)
    imported = _imported(folder, place, given, url, with_times=with_times)
    if as_json:
        typer.echo(encode(imported), nl=False)
    else:
        _print_imported(imported)
    if not imported.taken:
        raise InputError(f"{folder}: no run was taken; each log needs its launch file beside it or in a folder above")
    if out is not None:
        if len(imported.calibrations) != 1:
            known = " and ".join(imported.calibrations) or "none"
            raise InputError(f"--out takes the calibration of one framework, there are {known}: leave it out")
        (fitted,) = imported.calibrations.values()
        write_text(out, calibration_text(fitted.calibration), force=force)
        if not quiet:
            print(f"wrote {out}", file=sys.stderr)


def _imported(folder: Path, cluster: ClusterSpec, given: Given, url: str | None, *, with_times: bool) -> Imported:
    from autoplan.api.calibrations import calibration_of
    from autoplan.api.past_runs import past_record, problem_of
    from autoplan.api.timings import stored_table
    from autoplan.cost.estimate import estimate
    from autoplan.frameworks.launch_files import read_launch_on_part
    from autoplan.frameworks.presets import load_framework
    from autoplan.profiler.store import open_store
    from autoplan.runs.log_folder import PassedOver, past_runs
    from autoplan.spec.plan import PlanBatch
    from autoplan.spec.timing import NO_TIMINGS

    taken: list[Taken] = []
    passed_over: dict[str, str] = {}
    with open_store(url) as store:  # what is wrong with it shall be known before any log is read
        for past in past_runs(folder, lambda path: read_launch_on_part(path, given, cluster)):
            if isinstance(past, PassedOver):
                passed_over[_inside(past.path, folder)] = past.reason
                continue
            log = _inside(past.log, folder)
            try:
                problem = problem_of(cluster, past)
                cost = estimate(problem, PlanBatch.of([past.launch.plan], problem.model.num_layers))
                record = past_record(problem, past)
            except AutoplanError as error:
                passed_over[log] = str(error)
                continue
            one = Taken(
                log=log,
                launch_file=_inside(past.launch_file, folder),
                num_unread=sum(option.matters for option in past.launch.unread),
                predicted_s=float(cost.step_s[0]),
                run=record,
            )
            taken.append(one)
        num_new = store.add([one.run for one in taken]).new
    calibrations, without = {}, {}
    for name in sorted({one.run.framework for one in taken}):
        try:
            framework = load_framework(name)
            timings = stored_table(cluster, framework, url) if with_times else NO_TIMINGS
            calibrations[name] = calibration_of(cluster, framework, url, timings)
        except InputError as error:
            without[name] = str(error).partition(":")[0]
    return Imported(
        taken=tuple(taken), passed_over=passed_over, num_new=num_new, calibrations=calibrations, without=without
    )


def _inside(path: Path, folder: Path) -> str:
    """A path inside the folder, as a terminal may show it."""
    from autoplan.base.units import cleaned

    return cleaned(str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path))


def _print_imported(imported: Imported) -> None:
    from rich.table import Table
    from rich.text import Text

    from autoplan.base.units import format_seconds
    from autoplan.cost.estimate import NORMAL_90
    from autoplan.report.terminal import make_console

    console = make_console()
    if imported.taken:
        table = Table(box=None, pad_edge=False)
        for name in ("log", "framework", "plan"):
            table.add_column(name)
        for name in ("devices", "step", "predicted"):
            table.add_column(name, justify="right", no_wrap=True)
        for one in imported.taken:
            run = one.run
            came = format_seconds(run.seconds) if run.seconds else {"oom": "out of memory"}.get(run.status, run.status)
            texts = (Text(one.log), run.framework, run.plan.describe(), str(run.plan.num_devices), came)
            table.add_row(*texts, format_seconds(one.predicted_s))
        console.print(table)
    if imported.passed_over:
        console.print("\npassed over" if imported.taken else "passed over")
        for path, reason in imported.passed_over.items():
            console.print(Text(f"  {path}: {reason}"), soft_wrap=True)
    num_unread = sum(one.num_unread > 0 for one in imported.taken)
    if num_unread:
        console.print(
            f"\n{num_unread} runs were started with options that were not understood: autoplan read lists them"
        )
    held = len(imported.taken) - imported.num_new
    console.print(
        f"\n{len(imported.taken)} runs: {imported.num_new} new in the database, {held} held already; "
        f"{len(imported.passed_over)} files passed over"
    )
    for name, fitted in imported.calibrations.items():
        spread = fitted.calibration.time_spread
        console.print(
            f"{name}: median error {100 * fitted.median_error_before:.1f} % with the shipped calibration, "
            f"{100 * fitted.median_error:.1f} % with each run left out of its own; the 90 % interval of a step is then "
            f"-{-100 * math.expm1(-NORMAL_90 * spread):.0f} to +{100 * math.expm1(NORMAL_90 * spread):.0f} %: "
            "--calibration db",
            soft_wrap=True,
        )
    for name, why in imported.without.items():
        console.print(f"{name}: not calibrated, {why}", soft_wrap=True)
