"""Accuracy of predicted steps on measured runs.

Prices a table of runs as the presets ship, with intervals that were fitted without the source that they are judged on,
and with none of the calibrations.  Every prediction table is scored; then come what each term contributes and the worst
runs of every source with their terms.

Calibrations hold no factor, so that a fit moves intervals alone.  `--ship` writes them: of every framework on a
generation of devices what its runs are like (`cost.spreads.Familiarity`), and the general spreads.  These are the
likeliest for the errors of runs before anybody looked at their source (`first_errors.csv`), times three factors:
`COVER` of plain runs (known dense models under Megatron-LM's layers) lie inside intervals that are symmetric where
nothing is hard to predict; as many of all runs lie above their intervals as below; and `COVER` of them lie inside, in
the mean of sources, of which the next one counts as one more, half outside.  Errors of runs that were in view when the
model was made, or corrected, say too little of the next source, so that they count nothing.  Where a recipe leaves in
doubt which of two builds a run had, its interval holds both and its error is that of the nearer one.

usage: python benchmarks/accuracy.py [--runs RUNS.csv] [--scorer SCORER.py] [--worst N] [--as-shipped]
                                     [--report REPORT.md] [--ship]
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt
from measured_runs import RUNS, SHARED, source_of, with_answers
from reports import existing, make_parser, write_report
from scipy.optimize import minimize

import autoplan
from autoplan.base.arrays import Bools, Floats
from autoplan.base.files import write_text
from autoplan.cost.calibration import MeasuredRun, likeness
from autoplan.cost.estimate import estimate
from autoplan.cost.spreads import (
    GENERAL_PARTS,
    HARD,
    KINDS,
    NORMAL_90,
    NOVELTIES,
    SYMMETRIC,
    Familiarity,
    Sides,
    faster_squares,
    general_spreads,
)
from autoplan.readers.calibration import calibration_among, calibration_text
from autoplan.runs.predictions import log_doubt, predict, prediction_table
from autoplan.runs.runs import Run, read_runs
from autoplan.spec.calibration import Calibration
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.problem import Problem
from autoplan.spec.run_outcome import Prediction
from autoplan.spec.terms import STEP_TERMS

Strings = npt.NDArray[np.str_]

PRESETS = Path(autoplan.__file__).parent / "presets"
MIN_RUNS = 15  # of a framework on a generation, for a calibration
MIN_ERROR = 1e-3  # of a logarithm: below it runs scatter
# Where spreads start, and how far their logarithms may lie from that [judged]: of what is new, and of components.
PRIOR_SPREAD, PRIOR_WIDTH = 0.1, 0.7
HARD_SPREAD, HARD_WIDTH = 0.2, 1.0
LATER = (  # sources that came when the presets had been made
    "alpa", "bridge_ab", "colossalai", "dlperf", "flagperf_ds", "flagperf_mds", "flagperf_paddle", "launcher2208",
    "libai_bert", "libai_gpt", "mlperf_8b", "mlperf_gpt3", "paddlenlp", "primus_pipe", "sailor", "xtuner_moe", "yafsdp",
)  # fmt: skip
# log(measured / predicted) of runs before anything was changed for them: blind ones at 52dd93eb, of round 5 at
# 64938afe, of round 6 at 8d046304, of round 7 at 6304bef7; others at 0d6b68c5.
FIRST_ERRORS = Path(__file__).with_name("first_errors.csv")
ROUNDS = Path(__file__).with_name("rounds.csv")  # in which a source was first predicted
BLIND = Path(__file__).with_name("blind_runs.csv")
FINETUNED = Path(__file__).with_name("finetuning_runs.csv")
COVER = 0.90  # share of the runs of a new source that shall be inside, on average
TAIL = (1 - COVER) / 2
MANY_RUNS = 10  # of a source: more of them count no more
WIDTHS = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3)  # of intervals, relative to those that are fitted
SAID_SHARE = 0.25  # of a run's variance, from which a part counts as resting on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that finished, its estimate, and the fold in which it is left out of its source."""

    run: Run
    source: str
    measured: MeasuredRun
    cost: CostEstimate
    fold: str
    doubt: float  # logarithm of its step under the framework that it may as well have had; 0: none
    first_error: float | None = None  # log(measured / predicted) as first predicted, where that was kept
    round: int | None = None  # in which it was first predicted
    is_blind: bool = False  # predicted before its answer was looked at

    @property
    def problem(self) -> Problem:
        """The problem of the run."""
        return self.measured.problem

    @property
    def key(self) -> tuple[str, str]:
        """Framework and generation of devices, which share a calibration."""
        return self.problem.framework.calibration_name, self.problem.cluster.device.generation

    @property
    def is_similar(self) -> bool:
        """Return whether the run is of a framework that is priced as another one."""
        return "framework" in self.problem.calibration.unseen

    @property
    def log_error(self) -> float:
        """Return log(measured / predicted)."""
        return float(np.log(self.measured.step_s / self.cost.step_s[0]))

    @property
    def nearer_error(self) -> float:
        """Return log(measured / predicted) of the framework in doubt that comes nearer."""
        return min(self.log_error, self.log_error - self.doubt, key=abs)


def main() -> None:
    """Price, score, print and, if asked, write the report and the shipped calibrations."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=str(RUNS))
    parser.add_argument("--scorer", type=existing, default=str(SHARED / "tools" / "score_runs.py"))
    parser.add_argument("--worst", type=int, default=10, help="runs with the largest errors to show of every source")
    parser.add_argument("--as-shipped", action="store_true", help="leave out the tables of sources left out")
    parser.add_argument("--ship", action="store_true", help="write the calibrations that the package ships")
    options = parser.parse_args()
    runs = list(read_runs(options.runs))
    blind_runs = list(read_runs(BLIND))
    blind = read_cases(BLIND, blind_runs) + read_cases(FINETUNED, list(read_runs(FINETUNED)))
    # Runs whose first errors were not worked out yet stay unseen.
    first_predicted = [replace(case, is_blind=True) for case in blind if case.first_error is not None]
    cases = read_cases(options.runs, runs) + first_predicted
    if options.ship:
        ship(cases)
        return
    scoring = Scoring(options.runs, options.scorer, runs)
    blind_scoring = Scoring(BLIND, options.scorer, blind_runs)
    tuned_scoring = Scoring(FINETUNED, options.scorer, list(read_runs(FINETUNED)))
    text = io.StringIO()
    with contextlib.redirect_stdout(_Both(sys.stdout, text)):
        start = time.perf_counter()
        print(f"As shipped\n\n{scoring.shipped()}")
        print(f"{len(runs)} runs priced one by one in {time.perf_counter() - start:.1f} s\n")
        if not options.as_shipped:
            show_unseen(cases, scoring)
            show_blind(cases, blind_scoring, tuned_scoring)
            show_rounds(cases)
            show_kinds(cases)
            show_general(cases)
            show_widths(cases)
        show_ablation(cases)
        show_worst(cases, options.worst)
    if options.report:
        made_by = "`python benchmarks/accuracy.py`"
        write_report(options.report, "Accuracy on measured runs", made_by, text.getvalue())


class _Both(io.TextIOBase):
    """Writes to several streams."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


def read_cases(path: Path, runs: Sequence[Run]) -> list[Case]:
    """The finished runs with a price, each with the fold that it is left out with inside its source."""
    finished = []
    with FIRST_ERRORS.open(encoding="utf-8", newline="") as file:
        first_errors = {row["id"]: float(row["log_error"]) for row in csv.DictReader(file)}
    with ROUNDS.open(encoding="utf-8", newline="") as file:
        rounds = {row["source"]: int(row["round"]) for row in csv.DictReader(file)}
    for run, row in with_answers(path, runs):
        if run.problem and run.plan and row["status"] == "ok" and row["step_time_s"]:
            measured = MeasuredRun(problem=run.problem, plan=run.plan, step_s=float(row["step_time_s"]))
            cost = estimate(run.problem, run.problem.batch([run.plan]))
            doubt = log_doubt(run, cost)
            finished.append(
                Case(
                    run=run,
                    source=source_of(run),
                    measured=measured,
                    cost=cost,
                    fold="",
                    doubt=doubt,
                    first_error=first_errors.get(run.id),
                    round=rounds.get(source_of(run)) if run.id in first_errors else None,
                )
            )
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in finished:
        by_source[case.source].append(case)
    return [replace(case, fold=f"{case.source}: {say(case)}") for case, say in _with_folds(by_source)]


def _with_folds(by_source: dict[str, list[Case]]) -> Iterator[tuple[Case, Callable[[Case], str]]]:
    """Models where a source has several, else numbers of devices, else sequence lengths."""

    def model(case: Case) -> str:
        return case.measured.problem.model.name

    def size(case: Case) -> str:
        return f"{case.measured.problem.cluster.num_devices} devices"

    def length(case: Case) -> str:
        return f"{case.measured.problem.training.seq_len} tokens"

    for cases in by_source.values():
        say = next((say for say in (model, size) if len({say(case) for case in cases}) > 1), length)
        for case in cases:
            yield case, say


# -- calibrations -----------------------------------------------------------------------------------------------------


def by_key(cases: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
    """The cases of every framework on every generation."""
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.key].append(case)
    return dict(sorted(groups.items()))


def calibrations(cases: Sequence[Case]) -> dict[str, Calibration]:
    """The calibration of every framework on a generation with enough runs, by name, with no spread of time.

    Spreads of memory are those that ship.
    """
    return {
        "-".join(key): _calibration(key, own)
        for key, own in by_key([case for case in cases if not case.is_similar and not case.is_blind]).items()
        if len(own) >= MIN_RUNS
    }


def _calibration(key: tuple[str, str], own: Sequence[Case]) -> Calibration:
    errors = np.array([case.log_error for case in own])
    median = 100 * float(np.median(np.abs(np.expm1(errors))))
    sources = sorted({case.source for case in own})
    known_runs = likeness([case.problem for case in own], [case.cost for case in own])
    del known_runs["exposed_share"]  # up to which spreads of its own would hold
    return Calibration(
        name=" on ".join(key),
        **known_runs,
        memory_spread=own[0].problem.calibration.memory_spread,
        sources=(f"{len(own)} runs ({', '.join(sources)}): median error {median:.1f} %",),
    )


def without_source(cases: Sequence[Case], asked: Sequence[Case] | None = None) -> list[Calibration]:
    """The calibration of every case's problem, or of every one `asked`, if nothing were known of its source."""
    everything, known = calibrations(cases), {}
    for source in {case.source for case in cases if not case.is_blind}:  # blind ones are in no calibration
        keys = {case.key for case in cases if case.source == source}
        others = calibrations([case for case in cases if case.key in keys and case.source != source])
        names = {"-".join(key) for key in keys}
        known[source] = {name: of for name, of in everything.items() if name not in names} | others
    return [
        calibration_among(known.get(case.source, everything), *case.key, is_similar=case.is_similar)
        for case in (cases if asked is None else asked)
    ]


# -- general spreads --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """General variances of runs that are slower than predicted, and the factor on their spreads for faster ones."""

    squares: Floats
    below: float  # of all parts but the symmetric ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Cases beside calibrations that have not seen their source: arrays have one element per case."""

    sources: Strings
    error: Floats  # log(measured / predicted)
    first_error: Floats  # the same, as first predicted; nan where it was in view
    own: Sides  # variances of devices and links that stand for unlike ones
    parts: Floats  # of the general variance, to be multiplied by `GeneralSpreads.squares`: shape (cases, parts)

    @classmethod
    def of(cls, cases: Sequence[Case], made_by: Sequence[Calibration]) -> Unseen:
        """The cases, each under its calibration."""
        own, parts = [], []
        for case, calibration in zip(cases, made_by, strict=True):
            known = Familiarity.of(replace(case.problem, calibration=calibration), case.cost.batch)
            _, general = known.own_parts(case.cost.terms_s, case.cost.step_s)
            own.append([float(side[0]) for side in known.equipment(case.cost.terms_s, case.cost.step_s)])
            parts.append(general[0])
        return cls(
            sources=np.array([case.source for case in cases]),
            error=np.array([case.nearer_error for case in cases]),
            first_error=np.array([math.nan if case.first_error is None else case.first_error for case in cases]),
            own=Sides(*np.array(own).T),
            parts=np.array(parts),
        )

    def take(self, which: Bools) -> Unseen:
        """Return some of the cases."""
        own = Sides(*(side[which] for side in self.own))
        others = {field.name: getattr(self, field.name)[which] for field in fields(self) if field.name != "own"}
        return Unseen(own=own, **others)

    @property
    def as_first_predicted(self) -> Unseen:
        """The cases whose error was kept before anybody looked at their source."""
        return self.take(~np.isnan(self.first_error))

    def spread(self, squares: Floats) -> Floats:
        """Return the spread of every case that is slower than predicted, with these general variances."""
        return np.sqrt(self.own.above + self.parts @ squares)

    def sides(self, fitted: Fitted) -> Sides:
        """Return the spreads of every case on both sides."""
        below = np.sqrt(self.own.below + self.parts @ faster_squares(fitted.squares, fitted.below))
        return Sides(below, self.spread(fitted.squares))

    @property
    def plain(self) -> Unseen:
        """The cases with nothing new but their size: dense models under Megatron-LM's layers."""
        names = {*KINDS, *NOVELTIES} - {"narrow", "power", "size"}
        is_new = np.any(self.parts[:, [name in names for name in GENERAL_PARTS]] > 0, axis=1)
        return self.take(~is_new)

    def inside(self, error: Floats, fitted: Fitted) -> Bools:
        """Return which cases would lie in their intervals with these errors."""
        below, above = self.sides(fitted)
        return (-NORMAL_90 * below <= error) & (error <= NORMAL_90 * above)

    @property
    def weights(self) -> Floats:
        """Weights of the cases, of which those of a source add up to 1, or to less where it has few runs."""
        _, at, counts = np.unique(self.sources, return_inverse=True, return_counts=True)
        return np.asarray((np.minimum(counts, MANY_RUNS) / MANY_RUNS / counts)[at])


def fitted_spreads(unseen: Unseen) -> Fitted:
    """General spreads under which first errors are likeliest, times what the cover of plain and of all runs needs.

    Errors are spread by Laplace's distribution, whose tails are long, and spreads start near `PRIOR_SPREAD` and
    `HARD_SPREAD`: a part of which no run tells stays there.  Every source of ten runs counts the same, since its runs
    share a machine and recipes and err alike; one of fewer counts less, as a single run may err for reasons of its own.
    """
    unseen = unseen.as_first_predicted
    weights, error = unseen.weights, np.maximum(np.abs(unseen.first_error), MIN_ERROR)
    counts = (1, len(HARD), len(GENERAL_PARTS) - 1 - len(HARD))
    prior = np.repeat(np.log([PRIOR_SPREAD, HARD_SPREAD, PRIOR_SPREAD]), counts)
    width = np.repeat([math.inf, HARD_WIDTH, PRIOR_WIDTH], counts)  # what every step has needs no prior

    def surprise(logs: Floats) -> tuple[float, Floats]:
        squares = np.exp(2 * logs)
        spread = unseen.spread(squares)
        scale = spread * NORMAL_90 / math.log(10)  # a tenth of a Laplace distribution lies beyond log(10) scales
        off = (logs - prior) / width
        value = (weights * (np.log(scale) + error / scale)).sum() + (off**2).sum() / 2
        slope = weights * (1 - error / scale) / (2 * spread**2)
        return float(value), slope @ unseen.parts * 2 * squares + off / width

    found = minimize(surprise, prior, jac=True, method="L-BFGS-B", bounds=[(math.log(1e-3), 1.0)] * len(prior))
    squares = np.exp(2 * np.asarray(found.x, dtype=np.float64))
    plain = unseen.plain
    if len(plain.sources):
        squares *= _factor(np.abs(plain.first_error), plain.own.above, plain.parts @ squares, plain.weights, 2 * TAIL)
    symmetric, others = np.where(SYMMETRIC, squares, 0.0), np.where(SYMMETRIC, 0.0, squares)
    above, below = (
        _factor(sign * unseen.first_error, own + unseen.parts @ symmetric, unseen.parts @ others, unseen.weights, TAIL)
        for sign, own in ((1.0, unseen.own.above), (-1.0, unseen.own.below))
    )
    return Fitted(squares=symmetric + others * above, below=math.sqrt(below / above))


def _factor(error: Floats, fixed: Floats, variance: Floats, weights: Floats, share: float) -> float:
    """Return the least factor on `variance`, beside a `fixed` one, with which at most this share of errors is beyond.

    That is above the upper end of the interval; shares are means of sources.  Runs of a source err alike, so that the
    next source counts as one more, half of it beyond: intervals are the wider the fewer sources are known (conformal
    prediction of groups, Dunn, Wasserman and Ramdas, arXiv:1809.07441, smoothed as by Vovk et al.).
    """
    allowed = max(share * (weights.sum() + 1) - 0.5, 0.0)

    def excess(log_factor: float) -> float:
        is_beyond = error > NORMAL_90 * np.sqrt(fixed + variance * math.exp(log_factor))
        return float(weights @ is_beyond) - allowed

    low, high = -6.0, 6.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return math.exp(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the general spreads, and the unseen runs of whose variance it is `SAID_SHARE` or more."""

    name: str
    spread: float
    num_runs: int
    num_sources: int
    factor: float  # within which nine tenths of them are
    inside: float  # share of them inside their interval

    @property
    def evidence(self) -> str:
        """Evidence that it rests on."""
        if not self.num_runs:
            return "no run: where the fit starts, times what the cover of all asks for"
        return (
            f"{self.num_runs} runs of {self.num_sources} new sources, of whose variance it is a quarter or more: "
            f"nine tenths within a factor of {self.factor:.2f}, {100 * self.inside:.0f} % inside the interval"
        )


def general_parts(fitted: Fitted, unseen: Unseen) -> Iterator[Part]:
    """Yield the general spreads with what each rests on."""
    unseen = unseen.as_first_predicted
    spread, error = unseen.spread(fitted.squares), unseen.first_error
    inside = unseen.inside(error, fitted)
    for at, name in enumerate(GENERAL_PARTS):
        which = unseen.parts[:, at] * fitted.squares[at] >= SAID_SHARE * spread**2
        yield Part(
            name=name,
            spread=float(np.sqrt(fitted.squares[at])),
            num_runs=int(which.sum()),
            num_sources=len(set(unseen.sources[which])),
            factor=math.exp(float(np.quantile(np.abs(error[which]), 0.9))) if which.any() else math.nan,
            inside=float(np.mean(inside[which])) if which.any() else math.nan,
        )


def general_text(fitted: Fitted, unseen: Unseen) -> str:
    """The general spreads as the file that ships."""
    parts = list(general_parts(fitted, unseen))
    first = unseen.as_first_predicted
    order = np.argsort(first.first_error)
    shares = np.cumsum(first.weights[order]) / first.weights.sum()
    low, high = np.exp(first.first_error[order][np.searchsorted(shares, [TAIL, 1 - TAIL])])
    evidence = {part.name: part.evidence for part in parts} | {
        "below": f"of new sources' runs, each source as much, a twentieth take less than {low:.2f} times the predicted "
        f"step, and a twentieth more than {high:.2f} times"
    }
    lines = [f"{part.name} = {part.spread:.3g}" for part in parts] + [f"below = {fitted.below:.3g}"]
    return "\n".join([*lines, "", "[evidence]", *(f'{name} = "{text}"' for name, text in evidence.items())]) + "\n"


def show_general(cases: Sequence[Case]) -> None:
    """Print the general spreads with the runs that each rests on."""
    unseen = Unseen.of(cases, without_source(cases))
    fitted = fitted_spreads(unseen)
    print("General spreads\n")
    print(f"{'part':12}{'spread':>8}{'runs':>7}{'sources':>9}{'factor':>8}{'inside':>8}")
    for part in general_parts(fitted, unseen):
        row = f"{part.name:12}{part.spread:8.3f}{part.num_runs:7d}{part.num_sources:9d}"
        print(row + (f"{part.factor:8.2f}{part.inside:8.2f}" if part.num_runs else f"{'-':>8}{'-':>8}"))
    symmetric = ", ".join(np.array(GENERAL_PARTS)[SYMMETRIC].tolist())
    print(f"\nOf runs that are faster than predicted, all but {symmetric} are {fitted.below:.2f} times these.\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Predicted step, and spreads of its logarithm on both sides."""

    step_s: float
    spread: Sides
    log_doubt: float


Steps = dict[str, Step]  # by the id of a run


def steps_of(cases: Sequence[Case], sides: Sides) -> Steps:
    """Predicted steps of cases with these spreads."""
    return {
        case.run.id: Step(
            step_s=float(case.cost.step_s[0]), spread=Sides(sides.below[at], sides.above[at]), log_doubt=case.doubt
        )
        for at, case in enumerate(cases)
    }


def source_left_out(cases: Sequence[Case]) -> Steps:
    """Steps of all cases, with spreads from calibrations and general spreads that have not seen their source.

    What is new about runs of other sources is judged beside all of them but their own.
    """
    unseen = Unseen.of(cases, without_source(cases))
    sides = Sides(np.empty(len(cases)), np.empty(len(cases)))
    for source in np.unique(unseen.sources):
        own = unseen.sources == source
        for spread, left_out in zip(sides, unseen.take(own).sides(fitted_spreads(unseen.take(~own))), strict=True):
            spread[own] = left_out
    return steps_of(cases, sides)


def show_rounds(cases: Sequence[Case]) -> None:
    """Print what intervals that were fitted to the rounds before contain of every round, as first predicted."""
    blind = [case for case in cases if case.round is not None]
    unseen, rounds = Unseen.of(blind, without_source(cases, blind)), np.array([case.round for case in blind])
    error = unseen.first_error
    below, above = Sides(*np.full((2, len(blind)), math.nan))
    for number in range(2, rounds.max() + 1):
        is_next = rounds == number
        next_sides = unseen.take(is_next).sides(fitted_spreads(unseen.take(rounds < number)))
        below[is_next], above[is_next] = (NORMAL_90 * side for side in next_sides)
    inside, weights = (-below <= error) & (error <= above), unseen.weights
    print("Rounds by intervals that were fitted to the rounds before\n")
    print(f"{'round':12}{'runs':>6}{'sources':>9}{'inside':>8}{'mean of sources':>17}{'width':>8}{'median error':>14}")
    for title, which in (
        *((str(number), rounds == number) for number in range(2, rounds.max() + 1)),
        ("all", rounds > 1),
    ):
        of_sources = float(np.average(inside[which], weights=weights[which]))
        print(
            f"{title:12}{which.sum():6d}{len(set(unseen.sources[which])):9d}{inside[which].mean():8.2f}"
            f"{of_sources:17.2f}{float(np.median((below + above)[which])):8.2f}"
            f"{float(np.median(np.abs(error[which]))):14.2f}"
        )
    print(flush=True)


def show_kinds(cases: Sequence[Case]) -> None:
    """Print how many runs of a kind are inside if no source had any: of a generation, with experts or without."""
    kinds = np.array([f"{case.key[1]}, {'experts' if case.problem.model.moe else 'dense'}" for case in cases])
    print(
        "A whole kind of runs left out\n\n" + f"{'kind':24}{'runs':>6}{'sources':>9}{'inside':>8}{'as first said':>15}"
    )
    for kind in np.unique(kinds).tolist():
        is_kind = kinds == kind
        others = [case for case, own in zip(cases, is_kind, strict=True) if not own]
        known = calibrations(others)
        fitted = fitted_spreads(Unseen.of(others, without_source(others)))
        own = [case for case, other in zip(cases, is_kind, strict=True) if other]
        unseen = Unseen.of(own, [calibration_among(known, *case.key, is_similar=case.is_similar) for case in own])
        first = unseen.as_first_predicted
        shares = [
            float(np.mean(of.inside(error, fitted))) if len(error) else math.nan
            for of, error in ((unseen, unseen.error), (first, first.first_error))
        ]
        print(f"{kind:24}{len(own):6d}{len(set(unseen.sources)):9d}{shares[0]:8.2f}{shares[1]:15.2f}")
    print(flush=True)


def show_widths(cases: Sequence[Case]) -> None:
    """Print what intervals of other widths contain, beside those that know how far the runs of each source are off."""
    measured = [case for case in cases if not case.is_blind]
    blind = [case for case in cases if case.is_blind]
    steps = source_left_out(cases)
    print("Intervals of other widths, a whole source left out\n")
    print(f"{'runs':28}{'interval':38}{'inside':>8}{'sources below .85':>19}{'width':>7}{'width / error':>15}")
    for title, own in (("measured", measured), ("blind, as first predicted", blind)):
        error = np.array([case.nearer_error if own is measured else case.first_error for case in own])
        sources = np.array([case.source for case in own])
        below, above = (NORMAL_90 * np.array([steps[case.run.id].spread[side] for case in own]) for side in (0, 1))
        known = np.empty(len(own))
        for source in np.unique(sources):
            known[sources == source] = np.quantile(np.abs(error[sources == source]), COVER)
        ends = np.quantile(error, [TAIL, 1 - TAIL])
        rows = [(f"{factor} times the fitted one", factor * below, factor * above) for factor in WIDTHS]
        rows += [
            ("the same for all", np.full(len(own), -ends[0]), np.full(len(own), ends[1])),
            ("90 % of the source's own runs", known, known),
        ]
        for name, low, high in rows:
            inside = (-low <= error) & (error <= high)
            many = [which for source in np.unique(sources) if (which := sources == source).sum() >= MANY_RUNS]
            few = sum(bool(inside[which].mean() < 0.85) for which in many)
            width = float(np.median(low + high))
            print(
                f"{title:28}{name:38}{inside.mean():8.2f}{f'{few} of {len(many)}':>19}{width:7.2f}"
                f"{width / np.median(np.abs(error)):15.1f}"
            )
    print(flush=True)


def later_left_out(cases: Sequence[Case]) -> Steps:
    """Steps of the cases of `LATER` sources, with calibrations and general spreads of those before them alone."""
    before = calibrations([case for case in cases if case.source not in LATER])
    made_by = [calibration_among(before, *case.key, is_similar=case.is_similar) for case in cases]
    is_later = np.array([case.source in LATER for case in cases])
    fitted = fitted_spreads(Unseen.of(cases, without_source(cases)).take(~is_later))
    sides = Unseen.of(cases, made_by).take(is_later).sides(fitted)
    return steps_of([case for case, later in zip(cases, is_later, strict=True) if later], sides)


def uncalibrated(cases: Sequence[Case]) -> Steps:
    """Steps of all cases with the spreads of runs of which nothing is known but the general case."""
    unseen = Unseen.of(cases, [Calibration()] * len(cases))
    shipped = Fitted(squares=general_spreads().squares, below=general_spreads().below)
    return steps_of(cases, unseen.sides(shipped))


def ship(cases: Sequence[Case]) -> None:
    """Write the calibration of every framework and generation, and the general spreads."""
    for name, calibration in calibrations(cases).items():
        write_text(PRESETS / "calibrations" / f"{name}.toml", calibration_text(calibration), force=True)
        print(f"{calibration.name}: {calibration.sources[0]}")
    unseen = Unseen.of(cases, without_source(cases))
    text = general_text(fitted_spreads(unseen), unseen)
    write_text(PRESETS / "spreads.toml", text, force=True)
    print(text)


# -- tables -----------------------------------------------------------------------------------------------------------


class Scoring:
    """Scores prediction tables with the scorer, as people do it."""

    def __init__(self, runs: Path, scorer: Path, table: Sequence[Run]) -> None:
        self._runs, self._scorer, self._table = runs, scorer, table
        self._as_shipped = [predict(run) for run in table]

    def shipped(self) -> str:
        """The score of what ships."""
        return self._score(self._as_shipped)

    def with_steps(self, steps: Steps, sources: Sequence[str] = ()) -> str:
        """The score with other steps, where there are some; of these sources alone if any are named."""
        return self._score(
            [_with_step(prediction, steps.get(prediction.id)) for prediction in self._as_shipped], sources
        )

    def _score(self, predictions: Sequence[Prediction], sources: Sequence[str] = ()) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "predictions.csv"
            write_text(path, prediction_table(predictions), force=True)
            command = [sys.executable, str(self._scorer), str(self._runs), str(path)]
            command += ["--source", *(f"{source}-" for source in sources)] if sources else []
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _with_step(prediction: Prediction, step: Step | None) -> Prediction:
    if step is None:
        return prediction
    low = step.step_s * math.exp(min(step.log_doubt, 0.0) - NORMAL_90 * step.spread.below)
    high = step.step_s * math.exp(max(step.log_doubt, 0.0) + NORMAL_90 * step.spread.above)
    return replace(prediction, step_time_s=step.step_s, step_time_low_s=low, step_time_high_s=high)


def show_unseen(cases: Sequence[Case], scoring: Scoring) -> None:
    """Scores of intervals that have not seen what they are judged on, and of those without calibration."""
    print("Predicted steps are those that ship; traits that presets list as fitted have all runs in view.\n")
    for title, steps in (
        ("A whole source left out", source_left_out(cases)),
        ("No calibration", uncalibrated(cases)),
    ):
        print(f"{title}\n\n{scoring.with_steps(steps)}", flush=True)
    later = scoring.with_steps(later_left_out(cases), LATER)
    print(f"All later sources left out\n\n{later}", flush=True)


def show_blind(cases: Sequence[Case], scoring: Scoring, tuned: Scoring) -> None:
    """Scores of blind runs, as first predicted and as predicted now; no interval has seen the source of its run."""
    unseen = source_left_out(cases)
    blind = [case for case in cases if case.is_blind]
    sources = sorted({case.source for case in blind})
    first: Steps = {}
    for case in blind:
        first_s = case.measured.step_s * math.exp(-(case.first_error or 0.0))
        first[case.run.id] = replace(unseen[case.run.id], step_s=first_s)
    print(f"Blind runs as first predicted\n\n{scoring.with_steps(first, sources)}")
    print(f"Blind runs as predicted now\n\n{scoring.with_steps(unseen, sources)}")
    print(f"Fine-tuning as first predicted\n\n{tuned.with_steps(first, sources)}")
    print(f"Fine-tuning as predicted now\n\n{tuned.with_steps(unseen, sources)}", flush=True)


def show_ablation(cases: Sequence[Case]) -> None:
    """Print errors of the shipped predictions without each term, by source."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        cost = case.cost
        step = float(cost.step_s[0])
        errors[case.source]["all"].append(abs(step / case.measured.step_s - 1))
        for name in STEP_TERMS:
            less = step - float(cost.terms_s[name][0])
            errors[case.source][name].append(abs(less / case.measured.step_s - 1))
    names = ("all", *STEP_TERMS)
    print("Median error in % without each term\n")
    print(f"{'':12}" + "".join(f"{name[:9]:>10}" for name in names))
    for source, terms in sorted(errors.items()):
        print(f"{source:12}" + "".join(f"{100 * np.median(terms[name]):10.2f}" for name in names))


def show_worst(cases: Sequence[Case], worst: int) -> None:
    """The runs of every source that are furthest off, with their terms in percent of the step."""
    by_source: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_source[case.source].append(case)
    for source, own in sorted(by_source.items()):
        print(f"\n{source}: the {min(worst, len(own))} worst of {len(own)} runs")
        costs = [case.cost for case in own]
        errors = np.array([float(c.step_s[0]) / case.measured.step_s - 1 for c, case in zip(costs, own, strict=True)])
        for at in np.argsort(-np.abs(errors))[:worst]:
            case, cost = own[at], costs[at]
            step = float(cost.step_s[0])
            shares = ((name, float(value[0]) / step) for name, value in cost.terms_s.items())
            terms = ", ".join(f"{name} {100 * share:.0f}" for name, share in shares if share >= 0.01)
            problem = case.measured.problem
            what = f"{problem.model.name}, {problem.training.seq_len} tokens, {case.measured.plan.describe()}"
            print(f"  {case.run.id}: {case.measured.step_s:.2f} s measured, {100 * errors[at]:+.0f} %: {what}")
            print(f"      {terms}")


if __name__ == "__main__":
    main()
