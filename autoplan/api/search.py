"""Search: the fastest plans that fit, or the best ones for a whole run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from autoplan.api.encoder_options import encoder_ranks
from autoplan.api.options import ProblemOptions, SearchOptions, split_options
from autoplan.api.plan_files import make_plan_file
from autoplan.api.plan_result import PlanResult
from autoplan.api.problem import (
    load_cluster,
    make_problem,
    priced_target,
    quantile_of,
    space_flags,
    space_of,
    unpriced_parts,
)
from autoplan.api.results import Progress, unmeasured_text
from autoplan.api.training_run import RunOptions, search_run
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.units import GIB, format_bytes
from autoplan.cost.spreads import NORMAL_90
from autoplan.launch.targets import job_of
from autoplan.search.advice import check_result
from autoplan.search.allowances import allowances
from autoplan.search.baselines import baseline_plans
from autoplan.search.choice import choice_of, robust_margin, robust_order
from autoplan.search.excluded_options import with_excluded_options
from autoplan.search.placement import place_best
from autoplan.search.sampler import Sampling
from autoplan.search.sensitivity import sensitivity
from autoplan.search.simple import simplest_first
from autoplan.search.study import MARGIN, Shared
from autoplan.search.study import search as run_study
from autoplan.search.workers import worker_processes
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile, SpaceFlags
from autoplan.spec.problem import Problem
from autoplan.topology.cluster import ClusterSpec

if TYPE_CHECKING:
    from autoplan.api.launch_files import LaunchStart
    from autoplan.spec.search_result import Certificate, RankedPlan

# Ranks over which published runs with a step time gather weights: of llm-foundry and torchtitan (benchmarks/results).
WIDEST_MEASURED_ZERO3 = 512

UNLIKE_LINKS = 0.5  # spread of their rates from which a search says so

T = TypeVar("T")


def search(
    model: str | Path | ModelSpec | None = None,
    *,
    cluster: str | Path | ClusterSpec,
    global_batch: int | str | None = None,
    seq_len: int | None = None,
    launch_file: str | Path | None = None,
    variables: Iterable[str] | Mapping[str, str] = (),
    target: str | None = None,
    to: str | None = None,
    fix: Iterable[str] | Mapping[str, Any] = (),
    at_most: Iterable[str] | Mapping[str, Any] = (),
    forbid: Iterable[str] = (),
    allow: Iterable[str] = (),
    prefer: str = "simple",
    robust: float | None = None,
    why: bool = False,
    sampler: str = "bound",
    trials: int = 100,
    seed: int = 0,
    workers: int = 1,
    storage: str | None = None,
    study: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[SearchOptions],
) -> PlanResult:
    """Return the fastest plans that fit, best first, with the proof that none is better.

    `model` and `cluster` are names, paths or loaded objects; `global_batch` is in sequences, or a range ("256:512")
    from which the batch with the highest throughput is chosen; `seq_len` is in tokens.  `launch_file` can supply all of
    these, and is compared with the best plan; `variables` are its shell variables, `target` its format.

    `to` restricts the search to plans that an export target can express, priced as its framework unless the options
    name one; with a `launch_file` and no framework it is the target whose file that is. `fix` and `at_most` narrow the
    space ({"tp": 8}), as does `forbid` ("offload", "sharding=zero3"); `allow` adds options that change the numerics of
    training ("moment_dtype=bf16"). `prefer` is "simple" (the simplest plan that is at most 1 % slower than the fastest,
    and without launch file), "fastest", or "robust" (with the lowest 0.9-quantile of the step time, or the quantile
    `robust`). `why` adds what would change the answer. With objectives, node counts or a run among the `options` (see
    `RunOptions`), the best plan for those is found.
    The sampler "bound" proves its answer; tpe, gp, nsga2, cmaes and random try `trials` combinations with a `seed`.
    `workers` processes share the search, together with others that use the same `storage` and `study`.

    Raises InputError for unusable arguments, NoPlanError if no plan fits, UnpricedError for a framework without rules.
    """
    quantile = quantile_of(prefer, robust)
    problem_options, run = split_options(options, "search")
    ranks = problem_options.get("encoder_ranks")
    if ranks and (run or launch_file is not None):
        raise InputError(
            "--encoder-ranks are for the fastest step on equal nodes: leave objectives, runs and --from out"
        )
    if ranks == "auto":
        problem_options["encoder_ranks"] = None
    if launch_file is not None and (run or quantile is not None):
        raise InputError("--from finds the fastest step on equal nodes: leave objectives, runs and --robust out")
    to = priced_target(to, problem_options) if launch_file is None else to
    stated = {"model": model, "seq_len": seq_len, "global_batch": global_batch}
    started, problem = _started(launch_file, load_cluster(cluster), problem_options, variables, target, stated)
    if started and to is None and "framework" not in problem_options:
        to = started.target
    batch = started.global_batch if started else str(global_batch)
    question = _Question(
        problem=problem,
        space=space_flags(batch, fix=fix, at_most=at_most, forbid=forbid, allow=allow, to=to),
        timings=problem_options.get("timings") or "",
        quantile=quantile,
        is_simple=prefer == "simple",
        why=why,
        sampling=None if sampler == "bound" else Sampling(name=sampler, trials=trials, seed=seed),
        sharing=_Sharing(storage=storage, study=study, workers=workers, progress=progress),
        started=started,
    )
    if ranks == "auto":
        grids = encoder_ranks(problem.model, problem.cluster)
        chosen: list[ProblemOptions] = [{**problem_options, "encoder_ranks": grid} for grid in grids]
        problems = [make_problem(problem.model, cluster=cluster, seq_len=seq_len, **of) for of in chosen]
        return _best_of(question, problems)
    return _best_run(question, run) if run else _best_step(question)


def _started(
    path: str | Path | None,
    cluster: ClusterSpec,
    options: ProblemOptions,
    variables: Iterable[str] | Mapping[str, str],
    target: str | None,
    stated: Mapping[str, Any],
) -> tuple[LaunchStart | None, Problem]:
    """Return the start from a launch file, if there is one, and the problem.

    What the file says of the numerics of training stays.
    """
    if path is None:
        if variables or target:
            raise InputError("--set and --as need a launch file: give --from FILE")
        if None in stated.values():
            raise InputError("give model, global_batch and seq_len, or a launch_file that has them")
        return None, make_problem(stated["model"], cluster=cluster, seq_len=stated["seq_len"], **options)
    from autoplan.api.launch_files import start_from  # brings the readers of all frameworks

    started = start_from(path, cluster, options, variables=variables, target=target, **stated)
    problem = started.problem()
    return started, replace(problem, framework=problem.framework.choosing(started.plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """Question to a search: the problem, which plans count, how one is chosen, and who helps to look."""

    problem: Problem
    space: SpaceFlags
    timings: str
    quantile: float | None  # of the step time, that is to be the least
    is_simple: bool  # a simple plan that is nearly as fast is preferred
    why: bool
    sampling: Sampling | None
    sharing: _Sharing
    started: LaunchStart | None

    def file(self, problem: Problem, plans: Sequence[RankedPlan], certificate: Certificate, **parts: Any) -> PlanFile:
        """Return the plan file of an answer."""
        parts |= {"timings": self.timings, "space": self.space, "command": "autoplan.search() of Python"}
        return make_plan_file(problem, plans, certificate, **parts)


def _best_run(question: _Question, run: RunOptions) -> PlanResult:
    if question.quantile is not None or question.why:
        raise InputError(f"{'--why' if question.why else '--robust'} is for step times: leave objectives and runs out")
    if question.sampling is not None:
        name = question.sampling.name
        raise InputError(f"--sampler {name} is for step times on one cluster: leave objectives and runs out")
    make_space = partial(space_of, flags=question.space)
    best_size = partial(
        search_run, question.problem, run, make_space, barred=question.space.barred, is_simple=question.is_simple
    )
    chosen = question.sharing.run(best_size)
    return _result(question.file(chosen.problem, chosen.plans, chosen.certificate, run=chosen.report), chosen.problem)


def _best_of(question: _Question, problems: Sequence[Problem]) -> PlanResult:
    """Return the answer of the problem with the fastest step; NoPlanError if none has a plan."""
    answers, refusal = [], NoPlanError("")
    for problem in problems:
        try:
            answers.append(_best_step(replace(question, problem=problem)))
        except NoPlanError as error:
            refusal = error
    if not answers:
        raise refusal
    return min(answers, key=lambda answer: answer.file.best.step_s)


def _best_step(question: _Question) -> PlanResult:
    """Return the plans with the least step time, or the least quantile of it."""
    problem, quantile, started, sampling = question.problem, question.quantile, question.started, question.sampling
    space = space_of(problem, question.space)
    margin = MARGIN if quantile is None else max(MARGIN, robust_margin(problem, quantile))
    result = question.sharing.run(partial(run_study, problem, space, margin=margin, sampling=sampling))
    check_result(problem, space, result)
    result = place_best(problem, result)
    if sampling is None:
        space, result = with_excluded_options(problem, space, result, question.space.barred, margin=margin)
    if started and not question.space.narrows:
        result = started.nearest_result(problem, space, result)
    if quantile is not None:
        result = robust_order(problem, result, quantile)
    flips = sensitivity(problem, space, result, margin) if question.why else None
    if question.is_simple and quantile is None and not started:
        result = simplest_first(problem, space, result)
    choice = choice_of(result)
    if question.why:
        choice = replace(choice, sensitivity=flips, obvious=baseline_plans(problem, space, result))
    file = question.file(problem, result.rivals, result.certificate, choice=choice)
    if not file.best.terms_s["input"]:
        file = replace(file, allowances=allowances(problem, space, result.rivals[0]))
    if started:
        file = replace(file, today=started.compared(problem, file, result))
    return _result(file, problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing:
    """Participants of a search: workers started here, and others that meet them in a storage."""

    storage: str | None
    study: str | None
    workers: int
    progress: Progress | None

    def run(self, search: Callable[..., T]) -> T:
        """Return what `search` finds with the help of the workers."""
        with self._opened() as shared:
            join = partial(search, shared=shared)
            with worker_processes(join, self.workers - 1):
                return join(progress=self.progress)

    @contextmanager
    def _opened(self) -> Iterator[Shared | None]:
        """Yield where they meet: the storage, a journal file that is gone afterwards, or nowhere where one is alone."""
        if self.storage:
            yield Shared(url=self.storage, name=self.study)
        elif self.study:
            raise InputError(f"--study {self.study} needs --storage: say where it is stored")
        elif self.workers == 1:
            yield None
        else:
            with tempfile.TemporaryDirectory() as folder:
                yield Shared(url=str(Path(folder) / "journal"))


def _result(file: PlanFile, problem: Problem) -> PlanResult:
    if file.space and file.space.to:
        job_of(file, file.space.to)  # which says what it cannot express of the model
    plan, warnings = file.best.plan, [*unpriced_parts(problem.model)]
    encoder = problem.model.any_encoder
    if problem.model.cross_attention and encoder and not encoder.patches:
        warnings.append(
            f"the encoder of {problem.model.name} is assumed to read as many tokens per sample as its decoder, "
            f"{problem.encoder_len:,}: --encoder-len says another number"
        )
    elif encoder and not problem.model.cross_attention and encoder.images == 1:
        count = f"{encoder.images:g} x {encoder.image_tokens:,} tokens of images or sound"
        warnings.append(f"a sample of {problem.model.name} has {count}: --images and --image-tokens set another number")
    if file.best.verdict != "fits":
        risk = f"{100 * file.best.oom_probability:.0f} %"
        warnings.append(f"no plan fits safely: the OOM risk of this one is {risk}")
    if remark := unmeasured_text(problem):
        warnings.append(remark)
    if problem.link_spread >= UNLIKE_LINKS and problem.cluster.num_devices > 1:
        factor = math.exp(NORMAL_90 * problem.link_spread)
        warnings.append(
            f"links of servers such as {problem.cluster.name} differ: the interval allows for rates {factor:.0f} times "
            "higher or lower; autoplan profile measures them"
        )
    host, total = file.best.host_memory_bytes, problem.cluster.host.memory_bytes
    if plan.offload != "none":
        warnings.append(
            f"the plan needs {host / GIB:,.1f} of {format_bytes(total)} on every host: if yours has less, set [host] "
            "in a file of autoplan new cluster, or pass --forbid offload"
        )
    if plan.sharding == "zero3" and plan.dp_shard * plan.cp > WIDEST_MEASURED_ZERO3:
        warnings.append(
            f"zero3 gathers weights over {plan.dp_shard * plan.cp:,} ranks: no measured run has more than "
            f"{WIDEST_MEASURED_ZERO3}; compare with --forbid sharding=zero3"
        )
    return PlanResult(file=file, problem=problem, warnings=tuple(warnings))
