"""HTML page of a plan file, with everything that is computed for it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from autoplan.api.compare import fastest
from autoplan.api.export import start_of
from autoplan.api.problem import space_of
from autoplan.api.record_facts import step_sources
from autoplan.api.results import MixedPlanResult, PricedPlans, Progress
from autoplan.base.errors import AutoplanError, InputError
from autoplan.cost.collectives.traffic import step_traffic
from autoplan.cost.mixed.stages import mixed_stages, mixed_timeline
from autoplan.cost.provenance import term_shares
from autoplan.cost.timeline import timeline
from autoplan.readers.model import preset_models
from autoplan.report.page.content import Control, MixedContent, PlanContent, Step
from autoplan.report.page.page import page
from autoplan.search.choice import robust_margin, robust_order
from autoplan.search.excluded_options import with_options_of
from autoplan.search.objectives import Run
from autoplan.search.sensitivity import sensitivity
from autoplan.search.space import Space
from autoplan.search.study import MARGIN, search
from autoplan.spec.estimate import placed
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.problem import Problem
from autoplan.spec.run_report import SizeOutcome
from autoplan.spec.search_result import RankedPlan, SearchResult, Sensitivity

T = TypeVar("T")

SIZES = (0.25, 0.5, 1, 2)  # of the cluster, for the scaling curve
PARTS = 4  # that are worked out again


def page_of(
    result: PricedPlans | MixedPlanResult,
    path: str | Path = "plan.json",
    progress: Progress | None = None,
) -> str:
    """Return a self-contained HTML page of a result whose plan file is, or will be, at `path`.

    Computes what the file does not contain: the Pareto front of time and memory, the best plans on fewer and more
    nodes, and the sensitivity of the answer.
    """
    if isinstance(result, MixedPlanResult):
        return page(_mixed_content(result, Path(path)))
    return page(_content(result, Path(path), progress))


def shown_content(
    result: PricedPlans, *, controls: tuple[Control, ...] = (), pinned: Iterable[PricedPlans] = ()
) -> PlanContent:
    """Return what a page shows of one plan, with nothing searched: controls, and pinned plans to compare it with."""
    file, problem, plan, missing = result.file, result.problem, result.file.best.plan, dict[str, str]()
    try:
        schedule = timeline(problem, plan)
    except AutoplanError as error:
        schedule, missing["schedule"] = None, str(error)
    return PlanContent(
        file=file,
        stages=placed(file.stages, plan.num_microbatches, problem.capacity_bytes),
        traffic=step_traffic(problem, plan),
        rests_on=term_shares(problem, problem.batch([plan])),
        schedule=schedule,
        controls=controls,
        pinned=tuple(priced.file for priced in pinned),
        was_searched=False,
        records=step_sources(result) if file.timings else None,
        missing=missing,
    )


def _mixed_content(result: MixedPlanResult, path: Path) -> MixedContent:
    """Return what the page of a plan of a mixed cluster shows."""
    file, problem, missing, start = result.file, result.problem, dict[str, str](), list[Step]()
    try:
        purpose = "Write the launch files of this plan"
        start.append(Step(purpose=purpose, command=start_of(file, path)))
    except AutoplanError as error:
        missing["start"] = str(error)
    try:
        schedule = mixed_timeline(problem, file.best.plan)
    except AutoplanError as error:
        schedule, missing["schedule"] = None, str(error)
    return MixedContent(
        file=file,
        stages=mixed_stages(problem, file.best.plan),
        schedule=schedule,
        steps=(*start, *_look(path)),
        missing=missing,
    )


def _content(result: PricedPlans, path: Path, progress: Progress | None) -> PlanContent:
    """Return everything that the page shows, or why a part is not available."""
    file, problem, missing, done = result.file, result.problem, dict[str, str](), list[str]()

    def tried(name: str, make: Callable[[], T], otherwise: T) -> T:
        try:
            return make()
        except AutoplanError as error:
            missing[name] = str(error)
            return otherwise
        finally:
            done.append(name)
            if progress:
                progress(len(done), PARTS)

    start: tuple[Step, ...] = tried("start", lambda: _start(file, path), ())
    content = shown_content(result)
    missing |= content.missing
    return replace(
        content,
        was_searched=True,
        front=tried("front", lambda: _front(file, problem), ()),
        sizes=tried("sizes", lambda: _sizes(file, problem), ()),
        sensitivity=tried("sensitivity", lambda: _sensitivity(file, problem), None),
        steps=(*start, *_refine(file, path)),
        missing=missing,
    )


# -- what was not in the file -----------------------------------------------------------------------------------------


def _space(file: PlanFile, problem: Problem) -> Space:
    """The space that was searched, or the same on another number of nodes."""
    if file.space is None:
        raise InputError("the plan file contains one priced plan, not the result of a search")
    return with_options_of(space_of(problem, file.space), file.best.plan)


def _front(file: PlanFile, problem: Problem) -> tuple[RankedPlan, ...]:
    if file.run and len(file.run.front) > 1:
        return ()  # the file has its own
    return search(problem, _space(file, problem), measures=("time", "memory")).ranked


def _sizes(file: PlanFile, problem: Problem) -> tuple[SizeOutcome, ...]:
    if file.run and len(file.run.sizes) > 1:
        return file.run.sizes
    nodes = problem.cluster.num_nodes
    sizes = dict.fromkeys(int(share * nodes) for share in SIZES if share * nodes >= 1)
    return tuple(fastest(problem, size, lambda resized: _space(file, resized), Run()) for size in sizes)


def _sensitivity(file: PlanFile, problem: Problem) -> Sensitivity[ParallelPlan]:
    if file.choice and file.choice.sensitivity:
        return file.choice.sensitivity
    if file.run:
        raise InputError("the sensitivity is computed only for the fastest step on one cluster")
    space = _space(file, problem)
    return sensitivity(problem, space, _result(file, problem, space), MARGIN)


def _result(file: PlanFile, problem: Problem, space: Space) -> SearchResult:
    """The search of the file again: its plans, and those that the file has no room for."""
    quantile = file.certificate.quantile if file.certificate else None
    if quantile is None:
        result = search(problem, space)
    else:
        margin = max(MARGIN, robust_margin(problem, quantile))
        result = robust_order(problem, search(problem, space, margin=margin), quantile)
    slower = file.certificate.slower_than_fastest if file.certificate else None
    certificate = replace(result.certificate, slower_than_fastest=slower)
    return replace(result, rivals=(file.best, *result.rivals), certificate=certificate)


# -- what to do next --------------------------------------------------------------------------------------------------


def _start(file: PlanFile, path: Path) -> tuple[Step, ...]:
    """Commands that write what starts the plan, and put a run beside the prediction."""
    write = "Write the launch files of this plan"
    run = f"autoplan run {shlex.quote(str(path))} --steps 20 --log run.log --command -- bash launch/launch.sh"
    return (
        Step(purpose=f"{write} with torchrun", command=start_of(file, path)),
        Step(purpose=f"{write} on Slurm", command=start_of(file, path, "slurm")),
        Step(purpose="Start them, and compare the step times in the log with the prediction", command=run),
    )


def _refine(file: PlanFile, path: Path) -> Iterator[Step]:
    """Commands that measure the cluster and look closer."""
    best = file.best.plan
    yield Step(
        purpose="Measure the kernels and collectives of this model on your cluster, on one node or by every rank",
        command=f"autoplan profile {_model(file)} --seq-len {file.training.seq_len} --tp {best.tp} "
        f"--micro-batches {best.micro_batch} --budget 30m",
    )
    if file.certificate and not file.timings and file.command.startswith("autoplan search "):
        force = "" if "--force" in file.command else " --force"
        yield Step(purpose="Search again with the measurements", command=f"{file.command} --timings db{force}")
    plan = shlex.quote(str(path))
    yield Step(purpose="See which changes free memory", command=f"autoplan estimate {plan} --memory")
    yield from _look(path)


def _look(path: Path) -> Iterator[Step]:
    """Commands that tell more of the plan."""
    plan = shlex.quote(str(path))
    yield Step(purpose="See what limits the plan, and what faster plans would need", command=f"autoplan explain {plan}")
    trace = f"autoplan estimate {plan} --trace trace.json"
    yield Step(purpose="Open the step of every rank in Perfetto (ui.perfetto.dev)", command=trace)


def _model(file: PlanFile) -> str:
    """The model as it was typed, where the command names it first; else a name that people can replace."""
    words = file.command.split()
    if words[0] == "autoplan" and len(words) > 2 and words[2][0] not in "-'\"":  # a path with blanks in it is quoted
        return words[2]
    return file.model.name if file.model.name in preset_models() else "MODEL"
