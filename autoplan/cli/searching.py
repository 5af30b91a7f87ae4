"""What does a search find that is asked for by flags, of the fastest step or for a run?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.api.problem import ProblemOptions, make_problem, make_space
from autoplan.base.errors import InputError
from autoplan.cli.objectives import RunFlags, search_run

if TYPE_CHECKING:
    from autoplan.cli.today import Started
    from autoplan.search.space import Space
    from autoplan.search.study import Shared
    from autoplan.spec.model import ModelSpec
    from autoplan.spec.plan_file import PlanFile, SpaceFlags
    from autoplan.spec.problem import Problem
    from autoplan.spec.search_result import Confidence, SearchResult
    from autoplan.topology.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a search is asked, by the flags as typed."""

    model: str | ModelSpec
    cluster: ClusterSpec
    seq_len: int | None
    options: ProblemOptions
    quiet: bool
    space: SpaceFlags
    run: RunFlags
    sharing: Sharing
    sampler: str
    trials: int
    seed: int
    robust: float | None
    why: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Who shares a search: workers started here, and others that meet them in a storage."""

    storage: str | None  # without its password
    url: str | None  # with it
    study: str | None
    workers: int

    @contextmanager
    def opened(self) -> Iterator[Shared | None]:
        """Where they meet: in the storage, in a journal file that is gone afterwards, or nowhere where one is alone."""
        from autoplan.search.study import Shared

        if self.url:
            yield Shared(url=self.url, name=self.study)
        elif self.study:
            raise InputError(f"--study {self.study} needs --storage: say where it is kept")
        elif self.workers == 1:
            yield None
        else:
            with tempfile.TemporaryDirectory() as folder:
                yield Shared(url=str(Path(folder) / "journal"))

    @property
    def is_given(self) -> bool:
        """Whether one of its flags was typed."""
        return bool(self.storage or self.study or self.workers != 1)


def check_for_parts(run: RunFlags, sharing: Sharing, *, sampler: str, robust: float | None, why: bool) -> None:
    """Refuse what a search of a mixed cluster does not do yet."""
    if robust is not None or why:
        raise InputError(f"{'--why' if why else '--robust'} is not there for mixed clusters yet: leave it out")
    if sharing.is_given or sampler != "bound":
        raise InputError("mixed clusters are searched by one process: leave --storage and the like out")
    if run.are_given:
        raise InputError("objectives and runs are not searched on mixed clusters yet: leave their flags out")


def searched(asked: Asked, started: Started | None) -> PlanFile:
    """The plan file of what was asked of a cluster of equal nodes."""
    storage = asked.sharing.storage
    if storage and not storage.startswith("grpc:") and not asked.quiet:
        from autoplan.cli.progress import say_how_to_watch

        say_how_to_watch(storage)
    problem = make_problem(asked.model, cluster=asked.cluster, seq_len=asked.seq_len, **asked.options)
    if started and not asked.space.narrows:
        from autoplan.cli.today import allowed_for

        wishes = (*asked.space.allow, *allowed_for(problem, started.plan))
        asked = replace(asked, space=replace(asked.space, allow=wishes))

    def space_of(one: Problem) -> Space:
        space = asked.space
        return make_space(one, space.global_batch, fix=space.fix, at_most=space.at_most, allow=space.allow)

    if asked.run.are_given:
        return _best_for_run(problem, asked, space_of)
    return _fastest_step(problem, asked, space_of(problem), started)


def _best_for_run(problem: Problem, asked: Asked, space_of: Callable[[Problem], Space]) -> PlanFile:
    """The plans that are best in the objectives of a run, of all its numbers of nodes."""
    from autoplan.api.plan_files import make_plan_file
    from autoplan.cli.progress import progress_bar
    from autoplan.search.workers import worker_processes

    if asked.robust is not None or asked.why:
        flag = "--why" if asked.why else "--robust"
        raise InputError(f"{flag} is about step times: leave objectives and runs out")
    if asked.sampler != "bound":
        raise InputError(f"--sampler {asked.sampler} is for step times on one cluster: leave objectives and runs out")
    with asked.sharing.opened() as shared:
        join = partial(search_run, problem, asked.run, space_of, shared=shared)
        with (
            worker_processes(join, asked.sharing.workers - 1),
            progress_bar(quiet=asked.quiet, unit="sizes") as advance,
        ):
            chosen = join(progress=advance)
    return make_plan_file(
        chosen.problem,
        chosen.plans,
        chosen.certificate,
        timings=asked.options.get("timings") or "",
        run=chosen.report,
        space=asked.space,
    )


def _fastest_step(problem: Problem, asked: Asked, space: Space, started: Started | None) -> PlanFile:
    """The plans with the fastest step.

    Of several that are as fast the best is the one nearest to what runs today, where no flag narrows the space.
    """
    from autoplan.api.plan_files import make_plan_file
    from autoplan.cli.progress import progress_bar
    from autoplan.search.advice import check_result
    from autoplan.search.choice import choice_of, robust_margin, robust_order
    from autoplan.search.placement import place_best
    from autoplan.search.sampler import Sampling
    from autoplan.search.study import MARGIN
    from autoplan.search.study import search as run
    from autoplan.search.workers import worker_processes

    margin = MARGIN if asked.robust is None else max(MARGIN, robust_margin(problem, asked.robust))
    sampling = None
    if asked.sampler != "bound":
        sampling = Sampling(name=asked.sampler, trials=asked.trials, seed=asked.seed)
    with asked.sharing.opened() as shared:
        join = partial(run, problem, space, margin=margin, shared=shared, sampling=sampling)
        with worker_processes(join, asked.sharing.workers - 1), progress_bar(quiet=asked.quiet) as advance:
            result = join(progress=advance)
    check_result(problem, space, result)
    result = place_best(problem, result)
    if started and not asked.space.narrows:
        from autoplan.cli.today import nearest_result

        result = nearest_result(problem, space, result, started.plan)
    if asked.robust is not None:
        result = robust_order(problem, result, asked.robust)
    choice = choice_of(result)
    if asked.why:
        choice = _explained(choice, problem, space, result, margin)
    timings = asked.options.get("timings") or ""
    file = make_plan_file(problem, result.rivals, result.certificate, timings=timings, choice=choice, space=asked.space)
    if started is None:
        return file
    from autoplan.cli.today import today_of

    return replace(file, today=today_of(problem, started, file, result))


def _explained(choice: Confidence, problem: Problem, space: Space, result: SearchResult, margin: float) -> Confidence:
    """With what would change the answer, and why obvious plans lost."""
    from autoplan.search.obvious import obvious
    from autoplan.search.sensitivity import sensitivity

    return replace(
        choice, sensitivity=sensitivity(problem, space, result, margin), obvious=obvious(problem, space, result)
    )
