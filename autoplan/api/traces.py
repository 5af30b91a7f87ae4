"""Traces and logs of real steps, compared with the prediction of their plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autoplan.api.plan_run import plan_to_run, predicted_run
from autoplan.api.results import Table
from autoplan.base.errors import InputError
from autoplan.base.files import encode
from autoplan.cost.timeline import timeline
from autoplan.frameworks.logs import MAX_BYTES, Batch, LoggedRun, LogReader, chunks
from autoplan.profiler.imports.kineto import ACTIVITIES, Activity, Piece, RankTrace, draw
from autoplan.profiler.imports.traces import read_ranks, trace_files
from autoplan.report.page.run_trace import TracedStep, trace_page
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.terms import END_TERMS, PIPELINE_TERMS, TERMS, UPDATE_TERMS

APART = 0.03  # of the step: beyond it the marks of steps and what ran in them are not of the same steps
WORTH_A_WORD = 0.05  # of the step

_WAITS = tuple(
    term.name for term in TERMS if term.stream not in ("compute", "host")
)  # of the network or of other ranks: kernels of communication run for as long as they wait
_HOST = tuple(term.name for term in TERMS if term.stream == "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTerm:
    """Predicted and measured seconds of a part of a step, averaged over ranks."""

    what: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStage:
    """Predicted step of one rank of a pipeline stage, as a trace is drawn."""

    stage: str
    drawn: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceResult:
    """Traces of some ranks, with the prediction if the plan was given."""

    ranks: tuple[RankTrace, ...]
    predicted_step_s: float | None = None
    terms: tuple[ComparedTerm, ...] = ()
    predicted: tuple[DrawnStage, ...] = ()  # none where the schedule has too many passes to be drawn
    remarks: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Mean step time of the ranks."""
        return float(np.mean([rank.step_s for rank in self.ranks]))

    def table(self) -> Table:
        """Return seconds of a step by rank and activity."""
        columns = ("rank", "step_s", *self.ranks[0].seconds, "idle_s", "exposed_s", "hidden_s")
        rows = (
            (rank.rank, rank.step_s, *rank.seconds.values(), rank.idle_s, rank.exposed_s, rank.hidden_s)
            for rank in self.ranks
        )
        return Table(columns=columns, rows=tuple(rows))

    def page(self) -> str:
        """Return a self-contained HTML page: the predicted step and those of the ranks, on one axis."""
        return trace_page(
            [TracedStep(stage.stage, stage.drawn) for stage in self.predicted],
            [
                TracedStep(f"rank {at if rank.rank is None else rank.rank}", rank.drawn)
                for at, rank in enumerate(self.ranks)
            ],
            [(term.what, term.predicted_s, term.measured_s) for term in self.terms],
            self.remarks,
        )

    def to_json(self) -> str:
        """Return the traces and the comparison as JSON."""
        return encode(self)


# What is compared: of the prediction terms, of a trace what was measured.
_COMPARED: tuple[tuple[str, tuple[str, ...], Callable[[RankTrace], float]], ...] = (
    ("matrix products and head", ("gemm", "head"), lambda rank: rank.seconds["gemm"]),
    ("attention core", ("attention",), lambda rank: rank.seconds["attention"]),
    ("other kernels, copies", ("memory_bound",), lambda rank: rank.seconds["kernels"] + rank.seconds["copies"]),
    ("recomputation", ("recompute",), lambda rank: 0.0),
    ("optimizer", ("optimizer",), lambda rank: rank.seconds["optimizer"]),
    ("exposed communication, waits", _WAITS, lambda rank: rank.exposed_s),
    ("host, gaps between kernels", _HOST, lambda rank: rank.idle_s),
)
# Of a rank's predicted terms: what a trace calls them; others are communication and waits, or of the host.
_ACTIVITY_OF: dict[str, Activity] = {
    "gemm": "gemm",
    "head": "gemm",
    "attention": "attention",
    "memory_bound": "kernels",
    "recompute": "kernels",
    "optimizer": "optimizer",
    **dict.fromkeys(_WAITS, "collectives"),
}
_ADVICE = {
    _WAITS: "check the links and overlap in the cluster and framework files, and whether ranks wait for a slow one",
    _HOST: "check data loading, launches (compiled code, CUDA graphs) and the overhead of the profiler",
}
_OF_KERNELS = "measure the kernels that ran (`autoplan profile --for PLAN`), or check that precision and kernels match"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogResult:
    """Run reconstructed from its log, with the prediction if the plan was given."""

    run: LoggedRun
    predicted_step_s: float | None = None
    terms: tuple[ComparedTerm, ...] = ()  # none where the log has no timers of them

    def to_json(self) -> str:
        """Return the run and the comparison as JSON."""
        return encode(self)


# Timers of Megatron: the gradients are reduced within `forward-backward`, parameters gathered within `optimizer`.
_REDUCE = ("data_parallel_reduce",)
_UPDATE = tuple(name for name in UPDATE_TERMS if name not in _REDUCE)


def read_log(paths: Sequence[str | Path], *, plan: str | Path | None = None, db: str | None = None) -> LogResult:
    """Read the log of a run, or the logs of its ranks: step times, and timers of parts of a step if present.

    `plan` is the plan file that ran, as for `read_traces`; logs with rates of samples or tokens need it.

    Raises InputError if there is no step time.
    """
    file, problem = plan_to_run(Path(plan), db) if plan is not None else (None, None)
    batch = None
    if file is not None:
        best, seq_len = file.best.plan, file.training.seq_len
        batch = Batch(num_sequences=best.global_batch, seq_len=seq_len, num_devices=best.num_devices)
    reader = LogReader(batch)
    for path in paths:
        for data in chunks(Path(path), MAX_BYTES):
            reader.feed(data)
        reader.feed(b"\n")
    run = reader.finish()
    if file is None or problem is None:
        return LogResult(run=run)
    predicted = predicted_run(problem, file.best.plan)
    return LogResult(run=run, predicted_step_s=predicted.step_s, terms=tuple(_timed(run, predicted.terms_s)))


def _timed(run: LoggedRun, terms_s: Mapping[str, float]) -> Iterator[ComparedTerm]:
    """Yield the parts of a step from its timers, each on its slowest rank; they add up to the step."""
    timers_s = {name: max(times_s.values()) for name, times_s in run.timers_s.items()}
    if "forward-backward" not in timers_s or "optimizer" not in timers_s:
        return
    reduce_s = timers_s.get("all-grads-sync", 0.0)
    parts = (
        ("forward and backward, with waits", PIPELINE_TERMS, timers_s["forward-backward"] - reduce_s),
        ("gradient reduction", _REDUCE, reduce_s),
        ("optimizer, parameter gather", _UPDATE, timers_s["optimizer"]),
    )
    rest_s = run.median_s - sum(measured_s for _, _, measured_s in parts)
    ends = tuple(name for name in END_TERMS if name not in UPDATE_TERMS)
    for what, names, measured_s in (*parts, ("rest", ends, rest_s)):
        predicted_s = sum(terms_s.get(name, 0.0) for name in names)
        if predicted_s or measured_s:
            yield ComparedTerm(what=what, predicted_s=predicted_s, measured_s=measured_s)


def read_traces(paths: Sequence[str | Path], *, plan: str | Path | None = None, db: str | None = None) -> TraceResult:
    """Read traces of torch's profiler, one file per rank, compressed or not; or folders of them.

    Exports of Nsight Systems to SQLite and databases or JSON of rocprofv3 are read as well, with all devices that they
    traced.

    `plan` is the plan file that ran: what was predicted of it, with its measured times or those of the database `db`,
    stands beside what the ranks did.

    Raises InputError where a file is no trace, or traces are not of one run.
    """
    ranks = sorted(
        (rank for path in trace_files(paths) for rank in read_ranks(path)),
        key=lambda rank: (rank.rank is None, rank.rank or 0),
    )
    for first, second in itertools.pairwise(ranks):
        if first.rank is not None and first.rank == second.rank:
            raise InputError(
                f"{first.file} and {second.file}: both are of the same rank, {first.rank}: name one run's traces"
            )
    remarks = _remarks(ranks)
    worlds = {rank.world_size for rank in ranks if rank.world_size}
    if len(worlds) > 1:
        raise InputError(
            f"traces are of runs with {' and '.join(map(str, sorted(worlds)))} ranks: name those of one run"
        )
    if worlds and (missing := max(worlds) - len(ranks)) > 0:
        remarks.append(f"{missing} of {max(worlds)} ranks have no trace here: the mean is over the others")
    if plan is None:
        return TraceResult(ranks=tuple(ranks), remarks=tuple(remarks))
    file, problem = plan_to_run(Path(plan), db)
    if worlds and file.best.plan.num_devices != max(worlds):
        raise InputError(f"{plan}: the plan is for {file.best.plan.num_devices} devices, the traces of {max(worlds)}")
    predicted = predicted_run(problem, file.best.plan)
    terms = tuple(
        ComparedTerm(
            what=part,
            predicted_s=sum(predicted.terms_s.get(name, 0.0) for name in names),
            measured_s=float(np.mean([measured(rank) for rank in ranks])),
        )
        for part, names, measured in _COMPARED
    )
    return TraceResult(
        ranks=tuple(ranks),
        predicted_step_s=predicted.step_s,
        terms=tuple(term for term in terms if term.predicted_s or term.measured_s),
        predicted=tuple(_predicted(problem, file.best.plan)),
        remarks=(*remarks, *_where(terms, predicted.step_s)),
    )


def _predicted(problem: Problem, plan: ParallelPlan) -> Iterator[DrawnStage]:
    """Yield the predicted step of every stage: passes with their terms one after another, and what is between them."""
    try:
        predicted = timeline(problem, plan)
    except InputError:  # too many passes
        return
    for rank in predicted.ranks:
        spans: list[tuple[float, float, int]] = []
        for event in rank.passes:
            start_s = event.start_s
            for name, seconds in rank.pass_terms_s[event.kind, event.chunk or 0].items():
                if activity := _ACTIVITY_OF.get(name):
                    spans.append((start_s, start_s + seconds, ACTIVITIES.index(activity)))
                start_s += seconds
        spans += [
            (event.start_s, event.start_s + event.duration_s, ACTIVITIES.index(_ACTIVITY_OF[event.kind]))
            for event in rank.other_events
            if not event.is_hidden and event.kind in _ACTIVITY_OF
        ]
        yield DrawnStage(stage=rank.place.words, drawn=draw(np.array(spans), 0.0, predicted.step_s))


def _remarks(ranks: Sequence[RankTrace]) -> list[str]:
    """Name the reasons to doubt step times, each for the file where it is strongest."""
    remarks = []
    if unmarked := [rank.file for rank in ranks if not rank.is_marked]:
        remarks.append(
            f"{unmarked[0]}{_and_more(unmarked)}: no steps are marked, so the whole trace counts as one: "
            "call step() of torch's profiler, or name ranges `step 1`, `step 2` for others"
        )
    covered = [(rank.step_s / rank.marked_step_s, rank.file) for rank in ranks if rank.is_marked and rank.marked_step_s]
    if apart := sorted((share for share in covered if abs(share[0] - 1) > APART), key=lambda share: -abs(share[0] - 1)):
        share, file = apart[0]
        remarks.append(
            f"{file}{_and_more(apart)}: what ran covers {100 * share:.0f} % of the marked steps: "
            "trace several, whose ends weigh less"
        )
    return remarks


def _and_more(items: Sequence[object]) -> str:
    return f" and {len(items) - 1} more" if len(items) > 1 else ""


def _where(terms: Sequence[ComparedTerm], step_s: float) -> list[str]:
    """Name the part with the largest prediction error, and what to check."""
    worst = max(zip(terms, _COMPARED, strict=True), key=lambda pair: abs(pair[0].measured_s - pair[0].predicted_s))
    term, (part, names, _) = worst
    difference_s = term.measured_s - term.predicted_s
    if abs(difference_s) < WORTH_A_WORD * step_s:
        return []
    more = "longer" if difference_s > 0 else "shorter"
    return [f"{part}: {100 * abs(difference_s) / step_s:.0f} % of the step {more}; {_ADVICE.get(names, _OF_KERNELS)}"]
