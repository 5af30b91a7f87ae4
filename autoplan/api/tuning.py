"""Tuning: short runs of the plans that may be fastest, most promising first, until the best one is known."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack, cast

from autoplan.api.options import ProblemOptions, check_names
from autoplan.api.plan_files import is_plan_file, load_plan_file, make_plan_file, problem_of
from autoplan.api.plan_run import FRAMEWORK, warn_of_emulation
from autoplan.api.problem import make_problem, space_flags, space_of
from autoplan.api.results import Progress
from autoplan.api.run_keeper import RunKeeper
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.files import encode, refused_writes
from autoplan.base.values import parse_duration, parse_positive
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.trainer.rules import RULES, check_model, check_training
from autoplan.jobs.job import Jobs, LocalJobs
from autoplan.jobs.scheduler import SchedulerJobs
from autoplan.jobs.template import load_job_template
from autoplan.launch.targets import job_of
from autoplan.search.advice import check_result
from autoplan.search.choice import distinct
from autoplan.search.excluded_options import with_excluded_options
from autoplan.search.storage import opened
from autoplan.search.study import search
from autoplan.search.trials import Budget, Trials, spent_hours
from autoplan.search.tune import MARGIN, MAX_PLANS, TunedTrial, Tuning, TuningState
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile, SpaceFlags
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.tune_report import TriedPlan, TuneReport


class TuneOptions(ProblemOptions, total=False):
    """Options of a tuning: of the problem, of the plans that are tried, of the trials and of their study."""

    fix: Iterable[str] | None  # limits of the plans, as for `search`
    at_most: Iterable[str] | None
    forbid: Iterable[str] | None
    program: Sequence[str] | None  # that trains by a plan, instead of the built-in trainer
    trials: int  # runs at most, those of earlier calls among them: 10
    budget: str | None  # time of this call, such as "30m"
    gpu_hours: float | str | None  # of all devices, earlier calls among them
    parallel: int  # trials at once, where they do not share devices: 1
    steps: int  # of a trial that are timed: 10
    warmup: int  # steps before them: 2
    template: str | None  # of a scheduler whose jobs the trials are: slurm, kubernetes, or a TOML file
    to: str  # with a template, what trains, as for `export`: the built-in "autoplan"
    image: str | None  # of the containers, on Kubernetes
    limit: str  # time of a trial after which it counts as hung: "15m"
    work: str | Path  # folder of the trials and the study: "tune"
    storage: str | None  # of the study, where it is not in the folder: a path or a URL
    study: str | None  # its name; None: from what is tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """Trials of a tuning, and the plan file with the best plan first; None if no trial finished."""

    report: TuneReport
    file: PlanFile | None
    is_interrupted: bool

    @property
    def best(self) -> ParallelPlan:
        """Return the fastest plan that ran; NoPlanError if none did."""
        if self.report.best is None:
            raise NoPlanError(f"no trial finished: {self.report.ended}")
        return self.report.best.plan


def tune(
    model: str | Path,
    *,
    cluster: str | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    progress: Progress | None = None,
    show: Callable[[str], None] = lambda text: None,
    **options: Unpack[TuneOptions],
) -> TuneResult:
    """Run the plans that may be fastest for a few steps each, most promising first, and return the best.

    `model` is as for `search`, with `cluster`, `global_batch` and `seq_len`, or a plan file with the plans to try.
    Trials run on this machine with the built-in trainer or `program`, or as jobs of a scheduler `template`.  The tuning
    ends when no other plan could be faster, after `trials` trials, or when the time `budget` or `gpu_hours` is spent;
    the same call continues in the folder `work`.  `progress` reports on the search, `show` on every trial.

    Raises InputError for arguments that cannot be used, and NoPlanError if no plan can be started.
    """
    prepared = prepare(model, cluster=cluster, global_batch=global_batch, seq_len=seq_len, progress=progress, **options)
    return prepared.run(show=show)


def prepare(
    model: str | Path,
    *,
    cluster: str | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[TuneOptions],
) -> PreparedTuning:
    """Return what `tune` will run, with a warning where the built-in trainer emulates the plans' precision here."""
    check_names(options, TuneOptions, "tune")
    budget, gpu_hours = options.get("budget"), options.get("gpu_hours")
    if isinstance(gpu_hours, str):
        gpu_hours = parse_positive(gpu_hours, "--gpu-hours")
    trial_options = _trial_options(options)
    limits = Budget(
        trials=trial_options.trials,
        seconds=parse_duration(budget) if budget else math.inf,
        gpu_hours=math.inf if gpu_hours is None else gpu_hours,
    )
    if is_plan_file(Path(model)):
        file = load_plan_file(Path(model))
        plans = (file.best, *file.alternatives)
        candidates = Candidates(problem=problem_of(file, options.get("db")), plans=plans, timings=file.timings)
    elif cluster is None or global_batch is None or seq_len is None:
        raise InputError("give model with cluster, global_batch and seq_len, or a plan file")
    else:
        given_options = {name: value for name, value in options.items() if name in ProblemOptions.__annotations__}
        problem_options = cast("ProblemOptions", {"framework": FRAMEWORK, **given_options})
        fix, at_most, forbid = options.get("fix"), options.get("at_most"), options.get("forbid")
        flags = space_flags(global_batch, fix=fix or (), at_most=at_most or (), forbid=forbid or ())
        candidates = _searched(str(model), cluster, seq_len, problem_options, flags, progress)
    runner = _runner_of(trial_options, candidates)
    if not (trial_options.program or trial_options.template):
        warn_of_emulation(candidates.problem)
    return PreparedTuning(
        how=trial_options,
        runner=runner,
        budget=limits,
        folder=Path(options.get("work", "tune")),
        storage=options.get("storage"),
        study=options.get("study"),
    )


def _trial_options(options: TuneOptions) -> TrialOptions:
    return TrialOptions(
        program=tuple(options.get("program") or ()),
        template=options.get("template"),
        to=options.get("to", "autoplan"),
        image=options.get("image"),
        trials=options.get("trials", 10),
        steps=options.get("steps", 10),
        warmup=options.get("warmup", 2),
        parallel=options.get("parallel", 1),
        limit_s=parse_duration(options.get("limit", "15m")),
        db=options.get("db"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTuning:
    """Trials that can be started: what runs them, until when, and where their study is kept."""

    how: TrialOptions
    runner: Runner
    budget: Budget
    folder: Path
    storage: str | None
    study: str | None

    def made_storage(self) -> str:
        """Return the storage of the study, in a folder that is there then."""
        if self.storage:
            return self.storage
        with refused_writes(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        return str(self.folder / "study.journal")

    def run(
        self,
        *,
        show: Callable[[str], None] = lambda text: None,
        show_now: Callable[[str], None] = lambda text: None,
    ) -> TuneResult:
        """Run trials until there is a reason to stop; `show` prints lines that stay, `show_now` the current state."""
        candidates, how = self.runner.candidates, self.how
        name = self.study or (None if self.storage else "tune")
        with opened(self.made_storage()) as storage:
            tuning = Tuning.joined(storage, candidates.problem, candidates.plans, name=name, about=how.about)
            trials = Trials(
                tuning=tuning,
                jobs=self.runner.jobs,
                problem=candidates.problem,
                folder=self.folder / self.study if self.study else self.folder,  # another study has its own
                prepare=lambda index: encode(candidates.trial_file(index)),
                budget=self.budget,
                parallel=how.parallel,
                warmup=how.warmup,
                limit_s=how.limit_s,
                enough=self.runner.enough,
                show=show,
                show_now=show_now,
            )
            is_interrupted = False
            try:
                ended = trials.run()
            except KeyboardInterrupt:
                is_interrupted, ended = True, "interrupted; the same command continues from here"
            if self.runner.keeper:
                self.runner.keeper.keep_trials(candidates.problem, tuning)
            # The study cannot be asked once its storage is closed.
            view = tuning.state()
        report = _report(candidates, tuning, view, ended)
        file = _plan_file(candidates, tuning, view, report.best.plan) if report.best else None
        return TuneResult(report=report, file=file, is_interrupted=is_interrupted)


def _plan_file(candidates: Candidates, tuning: Tuning, view: TuningState, best_plan: ParallelPlan) -> PlanFile:
    """Return the plan file with the best plan, then the other measured ones, the fastest of them first."""
    best = next(ranked for ranked in candidates.plans if ranked.plan == best_plan)
    timed = [tuning.plans[trial.at].plan for trial in view.measured]

    def rank(ranked: RankedPlan) -> tuple[int, float]:
        return (timed.index(ranked.plan), 0.0) if ranked.plan in timed else (len(timed), ranked.step_s)

    later = sorted((ranked for ranked in candidates.plans if ranked is not best), key=rank)
    return make_plan_file(candidates.problem, [best, *later], None, timings=candidates.timings)


def _report(candidates: Candidates, tuning: Tuning, view: TuningState, ended: str) -> TuneReport:
    return TuneReport(
        ended=ended,
        is_separated=view.stop == "separated",
        best=_tried(tuning, view.best) if view.best else None,
        best_s=view.best_s,
        trials=tuple(_tried(tuning, trial) for trial in view.trials if trial.result),
        candidates=len(tuning.plans),
        left=len(view.worth_trying),
        ratio=view.ratio,
        gpu_hours=spent_hours(candidates.problem, view),
    )


def _tried(tuning: Tuning, trial: TunedTrial) -> TriedPlan:
    assert trial.result is not None
    return TriedPlan(
        number=trial.number,
        plan=tuning.plans[trial.at].plan,
        predicted_s=tuning.plans[trial.at].step_s,
        measured_s=trial.result.step_s,
        spread=None if trial.result.step_s is None else trial.result.spread,
        end=trial.result.how,
        reason=trial.result.reason,
        seconds=trial.result.seconds,
    )


# -- the plans ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Plans of one problem, the best predicted first; `timings` says whose the problem's measured times are."""

    problem: Problem
    plans: tuple[RankedPlan, ...]
    timings: str = ""

    def trial_file(self, index: int) -> PlanFile:
        """Return the plan file that starts a trial; it names no timings, as the trial's machine does not have them."""
        return make_plan_file(self.problem, [self.plans[index]], None)


def _searched(
    model: str,
    cluster: str,
    seq_len: int,
    options: ProblemOptions,
    flags: SpaceFlags,
    progress: Progress | None,
) -> Candidates:
    """Search the best plan of each kind in the space that the flags describe."""
    problem = make_problem(model, cluster=cluster, seq_len=seq_len, **options)
    space = space_of(problem, flags)
    result = search(problem, space, progress, margin=MARGIN)
    check_result(problem, space, result)
    _, result = with_excluded_options(problem, space, result, flags.barred, margin=MARGIN)
    return Candidates(problem=problem, plans=distinct(result)[:MAX_PLANS], timings=options.get("timings") or "")


def _trainable(candidates: Candidates) -> Candidates:
    """Keep the plans that the built-in trainer runs."""
    problem, plans = candidates.problem, candidates.plans
    if problem.framework.name != FRAMEWORK:
        raise InputError(
            f"the plans are for {problem.framework.name}, the built-in trainer needs {FRAMEWORK}: "
            "name your own program with --command -- PROGRAM ARG..."
        )
    check_model(problem.model)
    check_training(problem.training)
    reasons = [next(iter(broken(RULES, problem.workload, ranked.plan)), "") for ranked in plans]
    if all(reasons):
        raise NoPlanError(f"the built-in trainer runs none of the plans: {reasons[0]}")
    trainable = tuple(ranked for ranked, reason in zip(plans, reasons, strict=True) if not reason)
    return replace(candidates, plans=trainable)


def _exportable(candidates: Candidates, to: str) -> Candidates:
    """Keep the plans that an export target can express."""
    file = candidates.trial_file(0)
    exportable, refusals = [], []
    for ranked in candidates.plans:
        try:
            job_of(replace(file, best=ranked), to)
        except InputError as error:
            refusals.append(error)
        else:
            exportable.append(ranked)
    if not exportable:
        raise NoPlanError(f"{to} starts none of the plans: {refusals[0]}")
    return replace(candidates, plans=tuple(exportable))


# -- what runs them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions:
    """Options of how one trial runs, checked to go together."""

    program: tuple[str, ...]  # of the user; empty: the built-in trainer, or what `template` and `to` start
    template: str | None
    to: str
    image: str | None
    trials: int
    steps: int
    warmup: int
    parallel: int
    limit_s: float
    db: str | None

    def __post_init__(self) -> None:
        for flag, number in (("--trials", self.trials), ("--parallel", self.parallel), ("--steps", self.steps)):
            if number < 1:
                raise InputError(f"{flag} {number}: must be 1 or more")
        if self.template and self.program:
            raise InputError("--command runs on this machine: with --template, the template says what to start")
        if not self.template and (self.to != "autoplan" or self.image):
            raise InputError("--to and --image need a --template")
        if self.parallel > 1 and not self.template:
            raise InputError("--parallel: trials on this machine share its devices and would slow each other down")

    @property
    def about(self) -> dict[str, str]:
        """Return the options that all trials of a study share, which a call that joins it must repeat."""
        about = {"steps": str(self.steps), "warmup": str(self.warmup), "program": shlex.join(self.program)}
        if self.template:
            about |= {"template": self.template, "to": self.to}
        return about

    @property
    def run_options(self) -> tuple[str, ...]:
        """Return the options of `autoplan run` in every trial."""
        db = ("--db", self.db) if self.db else ()
        return ("--steps", str(self.steps), "--warmup", str(self.warmup), *db)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Jobs that trials run as, and the plans that they can start."""

    jobs: Jobs
    candidates: Candidates
    enough: int | None = None  # steps after which a trial is ended that does not end by itself
    keeper: RunKeeper | None = None  # of trials that do not keep themselves in the database


def _runner_of(options: TrialOptions, candidates: Candidates) -> Runner:
    """Return what runs trials by the options; NoPlanError where it can start none of the candidates."""
    if options.template:
        return _scheduled(options, options.template, candidates)
    if options.program:
        return Runner(
            jobs=LocalJobs([*options.run_options, "--command", "--", *options.program]), candidates=candidates
        )
    return Runner(jobs=LocalJobs(options.run_options), candidates=_trainable(candidates))


def _scheduled(options: TrialOptions, template: str, candidates: Candidates) -> Runner:
    scheduler = load_job_template(template)
    jobs = SchedulerJobs(
        scheduler,
        time_limit_s=options.limit_s,
        num_steps=options.steps + options.warmup,
        options=options.run_options,
        to=options.to,
        image=options.image,
    )
    if jobs.runs_trainer:
        return Runner(jobs=jobs, candidates=_trainable(candidates))
    keeper = RunKeeper(options.db) if options.db else None
    if scheduler.launcher:
        candidates = _exportable(candidates, options.to)
    return Runner(jobs=jobs, candidates=candidates, enough=options.steps, keeper=keeper)
