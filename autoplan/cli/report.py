"""`autoplan report`: one HTML page that shows the answer of a search, why it is so, and what to do next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from autoplan.base.errors import AutoplanError, InputError
from autoplan.cli.options import DbOption, ForceOption, QuietOption

if TYPE_CHECKING:
    from autoplan.report.page.content import MixedContent, PlanContent, Step
    from autoplan.search.space import Space
    from autoplan.spec.plan_file import MixedPlanFile, PlanFile
    from autoplan.spec.problem import Problem
    from autoplan.spec.run_report import SizeOutcome
    from autoplan.spec.search_result import RankedPlan, SearchResult, Sensitivity

T = TypeVar("T")

SIZES = (0.25, 0.5, 1, 2)  # of the cluster, for the scaling curve
PARTS = 5  # that are worked out again


def report(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the page is written.")] = Path("report.html"),
    url: DbOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write one self-contained HTML page of a plan file: it loads nothing, and can be mailed or put on a wiki.

    What the file does not hold is searched and priced again: plans that none beats in time and memory, the best plans
    on fewer and more nodes, and the numbers that the answer hangs on.
    """
    from autoplan.api.plan_files import load_any_plan_file
    from autoplan.cli.inputs import check_output, whole_url

    check_output(out, force=force)
    write_page(load_any_plan_file(plan), plan, out, url=whole_url(context, url), force=force, quiet=quiet)


def write_page(
    file: PlanFile | MixedPlanFile, path: Path, out: Path, *, url: str | None, force: bool, quiet: bool
) -> None:
    """The page of `file`, which lies at `path`, into the file `out`."""
    from autoplan.api.plan_files import problem_of
    from autoplan.base.files import write_text
    from autoplan.report.page.page import page
    from autoplan.spec.plan_file import PlanFile

    content: PlanContent | MixedContent
    if isinstance(file, PlanFile):
        content = _content(file, path, problem_of(file, url), quiet=quiet)
    else:
        content = _mixed_content(file, path)
    write_text(out, page(content), force=force)
    if not quiet:
        print(f"wrote {out}", file=sys.stderr)


def _mixed_content(file: MixedPlanFile, path: Path) -> MixedContent:
    """What the page of a plan of a mixed cluster shows."""
    from autoplan.api.plan_files import mixed_problem_of
    from autoplan.cli.starting import NOT_STARTED
    from autoplan.cost.mixed.stages import mixed_stages, mixed_timeline
    from autoplan.report.page.content import MixedContent

    problem, missing = mixed_problem_of(file), {"start": NOT_STARTED}
    try:
        schedule = mixed_timeline(problem, file.best.plan)
    except AutoplanError as error:
        schedule, missing["schedule"] = None, str(error)
    return MixedContent(
        file=file,
        stages=mixed_stages(problem, file.best.plan),
        schedule=schedule,
        steps=tuple(_look(path)),
        missing=missing,
    )


def _content(file: PlanFile, path: Path, problem: Problem, *, quiet: bool) -> PlanContent:
    """Everything that the page shows; what cannot be had is said instead."""
    from autoplan.cli.progress import progress_bar
    from autoplan.cost.collectives.traffic import step_traffic
    from autoplan.cost.provenance import term_shares
    from autoplan.cost.timeline import timeline
    from autoplan.report.page.content import PlanContent
    from autoplan.spec.estimate import placed
    from autoplan.spec.plan import PlanBatch

    plan, missing, done = file.best.plan, dict[str, str](), list[str]()
    with progress_bar(quiet=quiet, doing="preparing the page", unit="parts") as advance:

        def tried(name: str, make: Callable[[], T], otherwise: T) -> T:
            try:
                return make()
            except AutoplanError as error:
                missing[name] = str(error)
                return otherwise
            finally:
                done.append(name)
                if advance:
                    advance(len(done), PARTS)

        start: tuple[Step, ...] = tried("start", lambda: _start(file, path), ())
        return PlanContent(
            file=file,
            stages=placed(file.stages, plan.num_microbatches, problem.capacity_bytes),
            traffic=step_traffic(problem, plan),
            rests_on=term_shares(problem, PlanBatch.of([plan], problem.model.num_layers)),
            schedule=tried("schedule", lambda: timeline(problem, plan), None),
            front=tried("front", lambda: _front(file, problem), ()),
            sizes=tried("sizes", lambda: _sizes(file, problem), ()),
            sensitivity=tried("sensitivity", lambda: _sensitivity(file, problem), None),
            steps=(*start, *_refine(file, path)),
            missing=missing,
        )


# -- what was not in the file -----------------------------------------------------------------------------------------


def _space(file: PlanFile, problem: Problem) -> Space:
    """The space that was searched, or the same on another number of nodes."""
    from autoplan.api.problem import make_space

    if file.space is None:
        raise InputError("the plan file holds one plan that was priced, not the answer of a search")
    asked = file.space
    return make_space(problem, asked.global_batch, fix=asked.fix, at_most=asked.at_most, allow=asked.allow)


def _front(file: PlanFile, problem: Problem) -> tuple[RankedPlan, ...]:
    from autoplan.search.study import search

    if file.run and len(file.run.front) > 1:
        return ()  # the file has its own
    return search(problem, _space(file, problem), measures=("time", "memory")).ranked


def _sizes(file: PlanFile, problem: Problem) -> tuple[SizeOutcome, ...]:
    from autoplan.cli.compare import fastest
    from autoplan.search.objectives import Run

    if file.run and len(file.run.sizes) > 1:
        return file.run.sizes
    nodes = problem.cluster.num_nodes
    sizes = dict.fromkeys(int(share * nodes) for share in SIZES if share * nodes >= 1)
    return tuple(fastest(problem, size, lambda one: _space(file, one), Run()) for size in sizes)


def _sensitivity(file: PlanFile, problem: Problem) -> Sensitivity:
    from autoplan.search.sensitivity import sensitivity
    from autoplan.search.study import MARGIN

    if file.choice and file.choice.sensitivity:
        return file.choice.sensitivity
    if file.run:
        raise InputError("what the answer hangs on is worked out for the fastest step of one cluster")
    space = _space(file, problem)
    return sensitivity(problem, space, _result(file, problem, space), MARGIN)


def _result(file: PlanFile, problem: Problem, space: Space) -> SearchResult:
    """The search of the file again: its plans, and those that the file has no room for."""
    from autoplan.search.choice import robust_margin, robust_order
    from autoplan.search.study import MARGIN, search

    quantile = file.certificate.quantile if file.certificate else None
    if quantile is None:
        result = search(problem, space)
    else:
        margin = max(MARGIN, robust_margin(problem, quantile))
        result = robust_order(problem, search(problem, space, margin=margin), quantile)
    return replace(result, rivals=(file.best, *result.rivals))


# -- what to do next --------------------------------------------------------------------------------------------------


def _start(file: PlanFile, path: Path) -> tuple[Step, ...]:
    """Commands that write what starts the plan, and put a run beside the prediction."""
    from autoplan.cli.starting import start_of
    from autoplan.report.page.content import Step

    write = "Write the files that start this plan"
    run = f"autoplan run {shlex.quote(str(path))} --steps 20 --log run.log --command -- bash launch/launch.sh"
    return (
        Step(purpose=f"{write} with torchrun", command=start_of(file, path, "torchrun")),
        Step(purpose=f"{write} on Slurm", command=start_of(file, path, "slurm")),
        Step(purpose="Start them, and put the step times of the log beside the prediction", command=run),
    )


def _refine(file: PlanFile, path: Path) -> Iterator[Step]:
    """Commands that measure the cluster and look closer."""
    from autoplan.report.page.content import Step

    best = file.best.plan
    yield Step(
        purpose="Measure the kernels and collectives of this model on your cluster, on one node or by every rank",
        command=f"autoplan profile {_model(file)} --seq-len {file.training.seq_len} --tp {best.tp} "
        f"--micro-batches {best.micro_batch} --budget 30m",
    )
    if file.certificate and not file.timings:
        force = "" if "--force" in file.command else " --force"
        yield Step(purpose="Search again with what was measured", command=f"{file.command} --timings db{force}")
    plan = shlex.quote(str(path))
    yield Step(purpose="See which changes of the plan would free memory", command=f"autoplan estimate {plan} --memory")
    yield from _look(path)


def _look(path: Path) -> Iterator[Step]:
    """Commands that tell more of the plan."""
    from autoplan.report.page.content import Step

    plan = shlex.quote(str(path))
    yield Step(purpose="See what binds, and what faster plans would need", command=f"autoplan explain {plan}")
    trace = f"autoplan estimate {plan} --trace trace.json"
    yield Step(purpose="Open the step of every rank in Perfetto (ui.perfetto.dev)", command=trace)


def _model(file: PlanFile) -> str:
    """The model as it was typed, where the command names it first; else a name that people can replace."""
    from autoplan.read.model import preset_models

    words = file.command.split()
    if len(words) > 2 and words[2][0] not in "-'\"":  # a path with blanks in it is quoted
        return words[2]
    return file.model.name if file.model.name in preset_models() else "MODEL"
