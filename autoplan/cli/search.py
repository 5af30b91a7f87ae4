"""Command `autoplan search`: finds the plan that trains a model fastest on a cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import autoplan
from autoplan import api, report
from autoplan.base.errors import InputError, refuse
from autoplan.base.urls import command_line
from autoplan.cli.complete import targets, words
from autoplan.cli.files import write_page
from autoplan.cli.flags import PROBLEM, RUN, shared_flags
from autoplan.cli.inputs import check_outputs, is_typed, problem_options, run_options, typed_options, url_with_password
from autoplan.cli.options import (
    AsOption,
    ClusterOption,
    FixOption,
    ForbidOption,
    ForceOption,
    MaxOption,
    OptionalModelArgument,
    OptionalSeqLenOption,
    PlanJsonOption,
    QuietOption,
    SetOption,
    whole_number,
)
from autoplan.cli.process import leave_on_sigterm
from autoplan.cli.progress import progress_bar, say_how_to_watch
from autoplan.cli.remarks import print_warnings, print_written
from autoplan.spec.axes import AXES

if TYPE_CHECKING:
    from autoplan.api.plan_result import PlanResult
    from autoplan.api.results import MixedPlanResult

# Parameters with the same meaning as in `autoplan.search_mixed` or `autoplan.search`.
MIXED_SEARCH_FLAGS = (
    *("model", "global_batch", "seq_len", "launch_file", "variables", "target"),
    *("forbid", "to", "fix", "allow", "prefer", "robust", "why"),
)
SEARCH_FLAGS = (
    *MIXED_SEARCH_FLAGS,
    *("sampler", "trials", "seed", "workers", "study"),
)


LaunchFileOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Your current launch file: supplies missing options, and is compared with the best plan.",
    ),
]
ToOption = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        help="Consider only plans that this target, NAME or NAME@VERSION, can run; by default that of --from.",
        autocompletion=targets,
    ),
]
GlobalBatchOption = Annotated[
    str | None,
    typer.Option(metavar="N|LOW:HIGH", help="Sequences per step; from a range, the one with the highest throughput."),
]
MaxTpOption = Annotated[int | None, whole_number("--max-tp", "N", "Short for --max tp=N.")]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CHOICE",
        help="Also consider plans with an option that changes the numerics of training: "
        f"{', '.join(axis.name for axis in AXES if axis.exact is not None)}, or a value such as moment_dtype=bf16 "
        "(repeatable).",
    ),
]
PreferOption = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="simple: the simplest plan at most 1 % slower than the fastest; fastest; or robust: same as --robust 0.9.",
        autocompletion=words(("simple", "fastest", "robust")),
    ),
]
RobustOption = Annotated[
    float | None,
    typer.Option(metavar="Q", help="Choose the plan with the lowest Q-quantile of the step time, such as 0.9."),
]
WhyOption = Annotated[
    bool, typer.Option("--why", help="Also show what would change the answer, and why obvious plans lost.")
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Shared storage of the search, to resume or distribute it: a path, sqlite:///, postgresql:// or "
        "grpc://host:port. Watch it with optuna-dashboard.",
    ),
]
StudyOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the search in the storage.", show_default="derived from the problem"),
]
WorkersOption = Annotated[int, whole_number("--workers", "N", "Processes on this machine that share the search.")]
SamplerOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="bound proves the answer; tpe, gp, nsga2, cmaes and random only try --trials combinations.",
        autocompletion=words(("bound", "tpe", "gp", "nsga2", "cmaes", "random")),
    ),
]
TrialsOption = Annotated[int, whole_number("--trials", "N", "Combinations of degrees that a sampler tries.")]
SeedOption = Annotated[int, whole_number("--seed", "N", "Seed of the sampler.")]
OutOption = Annotated[Path, typer.Option(metavar="FILE", help="Plan file to write.")]
PageOption = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Also write the HTML page of `autoplan report`.")
]
DetailsOption = Annotated[
    bool, typer.Option("--details", help="Also show the next plans, the search space, and memory by stage.")
]


@shared_flags(PROBLEM, after="seq_len")
@shared_flags(RUN, after="why")
def search(
    context: typer.Context,
    cluster: ClusterOption,
    model: OptionalModelArgument = None,
    launch_file: LaunchFileOption = None,
    variables: SetOption = None,
    target: AsOption = None,
    to: ToOption = None,
    global_batch: GlobalBatchOption = None,
    seq_len: OptionalSeqLenOption = None,
    fix: FixOption = None,
    max_: MaxOption = None,
    max_tp: MaxTpOption = None,
    forbid: ForbidOption = None,
    allow: AllowOption = None,
    prefer: PreferOption = "simple",
    robust: RobustOption = None,
    why: WhyOption = False,
    storage: StorageOption = None,
    study: StudyOption = None,
    workers: WorkersOption = 1,
    sampler: SamplerOption = "bound",
    trials: TrialsOption = 100,
    seed: SeedOption = 0,
    out: OutOption = Path("plan.json"),
    page: PageOption = None,
    force: ForceOption = False,
    details: DetailsOption = False,
    json: PlanJsonOption = False,
    quiet: QuietOption = False,
    **_: Any,
) -> None:
    """Find the fastest plan that fits and write it to plan.json.

    The search covers every plan that the framework supports on the whole cluster and that does not change the
    numerics of training. Narrow it with --fix, --max and --forbid; widen it with --allow.
    With objectives, node counts or a training run, it finds the best plan for those.
    With a launch file, it also shows how good that is, and what each change on the way to the best plan gains.
    """
    check_outputs(out, page, force=True)  # existing answers are checked later
    if sampler == "bound" and (idle := [f"--{name}" for name in ("trials", "seed") if is_typed(context, name)]):
        raise InputError(
            f"{' and '.join(idle)} needs a --sampler: without one, a search covers all plans: leave it out"
        )
    if launch_file is None and (model is None or global_batch is None or seq_len is None):
        context.fail("give MODEL, --global-batch and --seq-len, or a launch file that contains them: --from FILE")
    leave_on_sigterm()
    result = _searched(context, quiet=quiet).with_command(command_line())
    path = out if force or is_typed(context, "out") else _free_path(out, result)
    ending = "" if path == out else f": {out} holds something else, which --force overwrites"
    _hand_over(result, path, page, ending, force=force, details=details, json=json, quiet=quiet)


def _searched(context: typer.Context, *, quiet: bool) -> PlanResult | MixedPlanResult:
    """Search a homogeneous or a mixed cluster with the typed options."""
    from autoplan.topology.mixed_cluster import MixedCluster

    params = context.params
    cluster, options, run = (
        api.problem.load_any_cluster(params["cluster"]),
        problem_options(context),
        run_options(context),
    )
    max_tp = params["max_tp"]
    at_most = [*(params["max_"] or []), *([f"tp={max_tp}"] if max_tp is not None else [])]
    if isinstance(cluster, MixedCluster):
        _check_mixed(params)
        typed = typed_options(context, MIXED_SEARCH_FLAGS)
        is_short = not run and ":" not in (params["global_batch"] or "")
        with progress_bar(quiet=quiet or is_short, unit="sets of parts" if run else "batches") as advance:
            return autoplan.search_mixed(cluster=cluster, at_most=at_most, progress=advance, **typed, **options, **run)
    storage = params["storage"]
    if storage and not storage.startswith("grpc:") and not quiet:
        say_how_to_watch(storage)
    with progress_bar(quiet=quiet, unit="sizes" if run else "combinations") as advance:
        return autoplan.search(
            cluster=cluster,
            at_most=at_most,
            storage=url_with_password(context, storage),
            progress=advance,
            **typed_options(context, SEARCH_FLAGS),
            **options,
            **run,
        )


def _check_mixed(typed: dict[str, Any]) -> None:
    """Raise InputError for flags that a search of a mixed cluster does not support."""
    shared = [f"--{name}" for name in ("workers", "storage", "study") if typed[name] not in (None, 1)]
    refusals = (
        (
            typed["launch_file"] is None and (typed["variables"] or typed["target"]),
            "--set and --as need a launch file: give --from FILE",
        ),
        (
            typed["sampler"] != "bound",
            f"--sampler {typed['sampler']} tries degrees on equal nodes; plans of a mixed cluster are searched by "
            "their bounds, which prove the best one: leave it out",
        ),
        (
            shared,
            f"{' and '.join(shared)}: a mixed cluster is searched by one process, within seconds, as what it prices "
            "next depends on the best plan so far: leave out, or search a part alone, such as --cluster h100-sxm:8x8",
        ),
    )
    refuse(refusals)


def _free_path(path: Path, result: PlanResult | MixedPlanResult) -> Path:
    """Return `path`, or the first of plan-2.json, plan-3.json and so on if it holds something else than `result`."""
    free, number = path, 2
    while (free.exists() or free.is_symlink()) and not api.plan_files.holds_answer(free, result):
        free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return free


def _hand_over(
    result: PlanResult | MixedPlanResult,
    out: Path,
    page: Path | None,
    ending: str,
    *,
    force: bool,
    details: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Print an answer and write its plan file and page; overwrite other answers or pages only with `force`.

    `ending` follows the name of the plan file that was written.
    """
    is_unchanged = not force and api.plan_files.holds_answer(out, result)
    is_kept = not force and not is_unchanged and (out.exists() or out.is_symlink())
    if not is_unchanged and not is_kept:
        result.save(out, force=force)
    if json:
        typer.echo(result.to_json(), nl=False)
    else:
        _print(result, None if is_kept else out, details=details)
    print_warnings(result.warnings, quiet=quiet)
    if is_kept:
        raise InputError(
            f"{out} contains something else and was kept: overwrite it with --force, or choose another name with --out"
        )
    if page is not None:
        write_page(result, out, page, force=force, quiet=quiet)
    if is_unchanged and not quiet:
        print(f"{out} is unchanged", file=sys.stderr)
    elif not is_unchanged:
        print_written(out, quiet=quiet, ending=ending)


def _print(result: PlanResult | MixedPlanResult, path: Path | None, *, details: bool) -> None:
    """Print an answer, and next steps with the plan file at `path` if it was written."""
    from autoplan.spec.axes import LABELS

    console, is_close = report.terminal.make_console(), False
    if isinstance(result, api.results.MixedPlanResult):
        report.mixed_search.print_mixed(console, result.file, details=details)
    else:
        file = result.file
        report.answer.print_search(console, file, details=details)
        if file.run:
            report.run_report.print_run(console, file.run)
        if file.today:
            report.launch_file.print_today(console, file.today, LABELS)
        is_close = file.choice is not None and file.choice.is_close
    steps = []
    if path is not None:
        steps.append(api.export.next_step(result.file, path))
        if is_close:
            steps.append(("measure", api.export.measurement(file, path)))
        steps.append(("why", f"autoplan explain {shlex.quote(str(path))}"))
    if not details:
        steps.append(("more", "--details: the next plans, the search space, memory by stage"))
    if steps:
        report.terminal.print_next_steps(console, *steps)
