"""Tuning: runs of the plans that may be the fastest, most promising first, until the best one is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from autoplan.api.candidates import Candidates, kept_candidates, searched_candidates
from autoplan.api.plan_files import is_plan_file, make_plan_file
from autoplan.api.plan_run import warn_of_emulation
from autoplan.api.problem import ProblemOptions
from autoplan.api.trial_runners import Runner, TrialOptions, runner_of
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.files import encode
from autoplan.base.values import parse_duration
from autoplan.search.storage import opened
from autoplan.search.trials import Budget, Trials, spent_hours
from autoplan.search.tune import TunedTrial, Tuning, TuningState
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile, SpaceFlags
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.tune_report import TriedPlan, TuneReport


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlace:
    """Place of the trials and the study of a tuning."""

    folder: Path
    storage: str | None = None  # of the study, where it is not in the folder: a path or a URL
    study: str | None = None  # its name; None: from what is tuned

    @property
    def trials(self) -> Path:
        """Return the folder of the trials: those of another study have one of their own."""
        return self.folder / self.study if self.study else self.folder

    @property
    def name(self) -> str | None:
        """Return the name of the study; None: from what is tuned."""
        return self.study or (None if self.storage else "tune")

    def made(self) -> str:
        """Return the storage of the study, in a folder that is there then."""
        if self.storage:
            return self.storage
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be written: {error.strerror or error}") from None
        return str(self.folder / "study.journal")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """Trials of a tuning, and the plan file with the best plan first; None where no trial has finished."""

    report: TuneReport
    file: PlanFile | None
    is_interrupted: bool

    @property
    def best(self) -> ParallelPlan:
        """Return the fastest plan that ran; NoPlanError where none did."""
        if self.report.best is None:
            raise NoPlanError(f"no trial has finished: {self.report.ended}")
        return self.report.best.plan


def tune(
    model: str | Path,
    *,
    cluster: str | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    program: Sequence[str] = (),
    fix: Iterable[str] = (),
    at_most: Iterable[str] = (),
    forbid: Iterable[str] = (),
    trials: int = 10,
    budget: str | None = None,
    gpu_hours: float | None = None,
    parallel: int = 1,
    steps: int = 10,
    warmup: int = 2,
    template: str | None = None,
    to: str = "autoplan",
    target_version: str | None = None,
    image: str | None = None,
    limit: str = "15m",
    work: str | Path = "tune",
    storage: str | None = None,
    study: str | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    show: Callable[[str], None] = lambda text: None,
    **options: Unpack[ProblemOptions],
) -> TuneResult:
    """Run the plans that may be the fastest for some steps each, most promising first, and return the best.

    `model` is as for `search`, with `cluster`, `global_batch` and `seq_len`, or a plan file, whose plans are tried.
    Trials run on this machine by the built-in trainer or by `program`, or as the jobs of a scheduler's `template`.
    They end when no plan is left that may be faster, after so many `trials`, or when the time `budget` or `gpu_hours`
    are spent; the same call goes on in the folder `work`.  `progress` hears of the search, `show` of every trial.

    Raises InputError where something that was given cannot be used, and NoPlanError where no plan can be started.
    """
    asked = TrialOptions(
        program=tuple(program),
        template=template,
        to=to,
        target_version=target_version,
        image=image,
        steps=steps,
        warmup=warmup,
        parallel=parallel,
        limit_s=parse_duration(limit),
        db=options.get("db"),
    )
    spend = Budget(
        trials=trials,
        seconds=parse_duration(budget) if budget else math.inf,
        gpu_hours=math.inf if gpu_hours is None else gpu_hours,
    )
    if is_plan_file(Path(model)):
        candidates = kept_candidates(Path(model), options.get("db"))
    elif cluster is None or global_batch is None or seq_len is None:
        raise InputError("give model with cluster, global_batch and seq_len, or a plan file")
    else:
        flags = SpaceFlags(global_batch=str(global_batch), fix=tuple(fix), at_most=tuple(at_most), forbid=tuple(forbid))
        problem_options: ProblemOptions = {"framework": "torch", **options}
        candidates = searched_candidates(str(model), cluster, seq_len, problem_options, flags, progress)
    runner = start_runner(asked, candidates)
    return run_trials(asked, runner, spend, StudyPlace(folder=Path(work), storage=storage, study=study), show=show)


def start_runner(asked: TrialOptions, candidates: Candidates) -> Runner:
    """Return what runs trials, with a warning where the built-in trainer emulates the plans' precision here."""
    runner = runner_of(asked, candidates)
    if not (asked.program or asked.template):
        warn_of_emulation(candidates.problem)
    return runner


def run_trials(
    asked: TrialOptions,
    runner: Runner,
    budget: Budget,
    place: StudyPlace,
    *,
    show: Callable[[str], None] = lambda text: None,
    show_now: Callable[[str], None] = lambda text: None,
) -> TuneResult:
    """Run trials until there is a reason to stop; `show` hears what stays, `show_now` what is going on."""
    candidates = runner.candidates
    with opened(place.made()) as storage:
        tuning = Tuning.joined(storage, candidates.problem, candidates.plans, name=place.name, about=asked.about)
        trials = Trials(
            tuning=tuning,
            jobs=runner.jobs,
            problem=candidates.problem,
            folder=place.trials,
            prepare=lambda index: encode(candidates.trial_file(index)),
            budget=budget,
            parallel=asked.parallel,
            warmup=asked.warmup,
            limit_s=asked.limit_s,
            enough=runner.enough,
            show=show,
            show_now=show_now,
        )
        is_interrupted = False
        try:
            ended = trials.run()
        except KeyboardInterrupt:
            is_interrupted, ended = True, "interrupted; the same call goes on from here"
        if runner.keeper:
            runner.keeper.keep_trials(candidates.problem, tuning)
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

    others = sorted((ranked for ranked in candidates.plans if ranked is not best), key=rank)
    return make_plan_file(candidates.problem, [best, *others], None, timings=candidates.timings)


def _report(candidates: Candidates, tuning: Tuning, view: TuningState, ended: str) -> TuneReport:
    return TuneReport(
        ended=ended,
        is_separated=view.stop == "separated",
        best=_tried(tuning, view.best) if view.best else None,
        best_s=view.best_s,
        trials=tuple(_tried(tuning, trial) for trial in view.trials if trial.result),
        candidates=len(tuning.plans),
        left=len(view.left),
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
