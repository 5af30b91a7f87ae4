"""Accuracy of predicted steps on measured runs.

Prices a table of runs as the presets ship, and again with calibrations that were fitted without the runs that they are
judged on: a model left out (or, in a source of one model, a number of devices), a whole source left out, one factor for
a framework on a generation of devices, and none at all.  Every prediction table is scored; then come what each term
contributes and the worst runs of every source with their terms.

usage: python benchmarks/accuracy.py [--runs RUNS.csv] [--scorer SCORER.py] [--worst N] [--as-shipped]
                                     [--report REPORT.md] [--ship]
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import numpy as np
from measured_runs import RUNS, SHARED, source_of, with_answers
from reports import existing, make_parser, write_report

import autoplan
from autoplan.base.arrays import Floats
from autoplan.base.files import write_text
from autoplan.cost.calibration import (
    RUNS_PER_FACTOR,
    Linearised,
    MeasuredRun,
    Pricer,
    conformal_spread,
    fit,
    shares_exposed,
)
from autoplan.cost.estimate import NORMAL_90, STEP_TERMS, estimate, spread_kinds
from autoplan.read.calibration import calibration_text
from autoplan.runs.predictions import predict, prediction_table
from autoplan.runs.runs import Run, read_runs
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.plan import PlanBatch
from autoplan.spec.run_outcome import Prediction
from autoplan.spec.timing import FACTORS, TIME_SPREADS, Calibration

PRESETS = Path(autoplan.__file__).parent / "presets" / "calibrations"
LEAST_RUNS = 20  # of a source or pair, for a spread of its own
LEAST_GAIN = 0.05  # part of the median error that a factor must take away, or it stays 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run that finished, and the fold in which it is left out."""

    run: Run
    source: str
    measured: MeasuredRun
    spread: str  # of `TIME_SPREADS`, the one that holds for it
    fold: str

    @property
    def key(self) -> tuple[str, str]:
        """Framework and generation of devices, which share a calibration."""
        return self.measured.problem.framework.calibration_name, self.generation

    @property
    def kind(self) -> tuple[tuple[str, str], str]:
        """Whose errors are alike: of one framework and generation, and waiting for the same things."""
        return self.key, self.spread

    @property
    def generation(self) -> str:
        """Generation of the devices."""
        return self.measured.problem.cluster.device.generation


def main() -> None:
    """Price, score, print and, if asked, write the report and the shipped calibrations."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=str(RUNS))
    parser.add_argument("--scorer", type=existing, default=str(SHARED / "tools" / "score_runs.py"))
    parser.add_argument("--worst", type=int, default=10, help="runs with the largest errors to show of every source")
    parser.add_argument(
        "--as-shipped", action="store_true", help="leave out what fits calibrations, which takes minutes"
    )
    parser.add_argument("--ship", action="store_true", help="write the calibrations that the package ships")
    options = parser.parse_args()
    runs = list(read_runs(options.runs))
    cases = read_cases(options.runs, runs)
    if options.ship:
        ship(cases)
        return
    scoring = Scoring(options.runs, options.scorer, runs)
    text = io.StringIO()
    with contextlib.redirect_stdout(_Both(sys.stdout, text)):
        start = time.perf_counter()
        print(f"As shipped\n\n{scoring.shipped()}")
        print(f"{len(runs)} runs priced one by one in {time.perf_counter() - start:.1f} s\n")
        if not options.as_shipped:
            show_folds(cases, scoring)
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
    for run, row in with_answers(path, runs):
        if run.problem and run.plan and row["status"] == "ok" and row["step_time_s"]:
            measured = MeasuredRun(problem=run.problem, plan=run.plan, step_s=float(row["step_time_s"]))
            batch = PlanBatch.of([run.plan], run.problem.model.num_layers)
            spread = TIME_SPREADS[int(spread_kinds(run.problem, batch)[0])]
            finished.append(Case(run=run, source=source_of(run), measured=measured, spread=spread, fold=""))
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


class Fits:
    """Calibrations of every framework on every generation, from all cases or without some of them.

    Factors are 1 unless runs say otherwise of models that no fit has seen: those of one framework and generation take
    up the factor that brings them closest, each model left out in turn, then the next, while each takes away
    `LEAST_GAIN` of the median error, or two together as much.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = by_key(cases)
        self._models: dict[tuple[str, str], Linearised] = {}

    def whole(self, key: tuple[str, str]) -> Calibration:
        """Fit to all runs."""
        own = self._cases[key]
        names = self.factors(key, range(len(own)))
        return fit([case.measured for case in own], Calibration(), names) if names else Calibration()

    def without(self, key: tuple[str, str], left_out: frozenset[str]) -> Calibration:
        """Fit to the runs whose ids are not left out."""
        kept = [at for at, case in enumerate(self._cases[key]) if case.run.id not in left_out]
        names = self.factors(key, kept)
        return self._model(key).only(names).fit(Calibration(), kept) if names else Calibration()

    def factors(self, key: tuple[str, str], kept: Sequence[int]) -> tuple[str, ...]:
        """Factors that the runs at `kept` tell apart."""
        own, model = self._cases[key], self._model(key)
        names: tuple[str, ...] = ()
        path = names
        least = _median_error(own, kept, model.log_errors(Calibration(), kept))
        while len(path) < min(len(kept) // RUNS_PER_FACTOR, len(FACTORS)) and len(path) <= len(names) + 1:
            tried = [(*path, name) for name in FACTORS if name not in path]
            errors = [_median_error(own, kept, _unseen_errors(model.only(factors), own, kept)) for factors in tried]
            path = tried[int(np.argmin(errors))]
            if min(errors) <= (1 - LEAST_GAIN) ** (len(path) - len(names)) * least:
                names, least = path, min(errors)
        return names

    def _model(self, key: tuple[str, str]) -> Linearised:
        if key not in self._models:
            self._models[key] = Linearised([case.measured for case in self._cases[key]], FACTORS, Calibration())
        return self._models[key]


def _median_error(cases: Sequence[Case], kept: Sequence[int], errors: Floats) -> float:
    """The mean over sources of the median of `errors`, those of the runs at `kept`.

    A source counts by the square root of the number of its runs: neither do the most runs decide, nor the fewest.
    """
    by_source: dict[str, list[float]] = defaultdict(list)
    for at, error in zip(kept, errors, strict=True):
        by_source[cases[at].source].append(abs(error))
    if not by_source:
        return 0.0
    sizes = [np.sqrt(len(errors_of_source)) for errors_of_source in by_source.values()]
    return float(np.average([np.median(errors_of_source) for errors_of_source in by_source.values()], weights=sizes))


def _unseen_errors(model: Linearised, cases: Sequence[Case], kept: Sequence[int]) -> Floats:
    """Errors of the runs at `kept`, each under a fit to those of the other folds."""
    folds = np.array([cases[at].fold for at in kept])
    rows, errors = np.array(kept), np.empty(len(kept))
    for fold in np.unique(folds):
        rest = rows[folds != fold]
        found = model.fit(Calibration(), rest) if len(rest) else Calibration()
        errors[folds == fold] = model.log_errors(found, rows[folds == fold])
    return errors


def log_errors(cases: Sequence[Case], calibration: Calibration) -> Floats:
    """log(measured / predicted) of every case."""
    runs = [case.measured for case in cases]
    return np.log([run.step_s for run in runs] / Pricer(runs).calibrated_s(calibration))


Steps = dict[str, tuple[float, float]]  # id of a run -> (step, spread of its logarithm)


def left_out(cases: Sequence[Case], fits: Fits, fold_of: Callable[[Case], str]) -> Steps:
    """Steps of all cases by calibrations that have not seen their fold, and spreads from the other folds' errors."""
    errors: dict[str, float] = {}
    folds: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        folds[fold_of(case)].append(case)
    for fold in folds.values():
        unseen = frozenset(case.run.id for case in fold)
        for key, own in by_key(fold).items():
            for case, error in zip(own, log_errors(own, fits.without(key, unseen)), strict=True):
                errors[case.run.id] = float(error)
    return _with_spreads(cases, errors, fold_of)


def _with_spreads(cases: Sequence[Case], errors: dict[str, float], fold_of: Callable[[Case], str]) -> Steps:
    """Each run's step, with the conformal spread of the runs of its kind in other folds."""
    steps: Steps = {}
    cache: dict[object, float] = {}
    for case in cases:
        name = (fold_of(case), case.kind)
        if name not in cache:
            others = [other for other in cases if fold_of(other) != name[0]]
            cache[name] = spread_of_kind(case, others, errors)
        steps[case.run.id] = (case.measured.step_s / np.exp(errors[case.run.id]), cache[name])
    return steps


def spread_of_kind(case: Case, others: Sequence[Case], errors: dict[str, float]) -> float:
    """The conformal spread of runs like `case`; of its framework, of its generation or of all if those are too few."""
    for alike in (
        [other for other in others if other.kind == case.kind],
        [other for other in others if other.key == case.key],
        [other for other in others if other.generation == case.generation],
        others,
    ):
        if len(alike) >= LEAST_RUNS:
            break
    return conformal_spread(np.array([errors[other.run.id] for other in alike]))


def in_fit(cases: Sequence[Case], make: Callable[[tuple[str, str]], Calibration]) -> Steps:
    """Steps of all cases by one calibration for every framework and generation."""
    steps: Steps = {}
    for key, own in by_key(cases).items():
        calibration = make(key)
        errors = log_errors(own, calibration)
        spread = conformal_spread(errors) if len(own) >= LEAST_RUNS else calibration.time_spread
        for case, error in zip(own, errors, strict=True):
            steps[case.run.id] = (case.measured.step_s / np.exp(error), spread)
    return steps


def ship(cases: Sequence[Case]) -> None:
    """Write the calibration of every framework and generation, with the spread of runs that it has not seen."""
    fits = Fits(cases)
    unseen = left_out(cases, fits, lambda case: case.fold)
    for key, own in by_key(cases).items():
        if len(own) < RUNS_PER_FACTOR:
            continue
        calibration = fits.whole(key)
        errors = {case.run.id: float(np.log(case.measured.step_s / unseen[case.run.id][0])) for case in own}
        median = 100 * float(np.median(np.abs(np.expm1(list(errors.values())))))
        one_of_kind = {case.spread: case for case in own}
        spreads = {name: spread_of_kind(case, own, errors) for name, case in one_of_kind.items()}
        spreads.setdefault("time_spread", max(spreads.values()))
        sources = ", ".join(sorted({case.source for case in own}))
        calibration = replace(
            calibration,
            name=" on ".join(key),
            **spreads,
            exposed_share=float(np.quantile(shares_exposed([case.measured for case in own]), 0.95)),
            memory_spread=own[0].measured.problem.calibration.memory_spread,
            sources=(f"{len(own)} runs ({sources}): median error {median:.1f} % with a model left out",),
        )
        write_text(PRESETS / f"{'-'.join(key)}.toml", calibration_text(calibration), force=True)
        print(f"{calibration.name}: {calibration.sources[0]}")


# -- tables -----------------------------------------------------------------------------------------------------------


class Scoring:
    """Scores prediction tables with the scorer, as people do it."""

    def __init__(self, runs: Path, scorer: Path, table: Sequence[Run]) -> None:
        self._runs, self._scorer, self._table = runs, scorer, table
        self._as_shipped = [predict(run) for run in table]

    def shipped(self) -> str:
        """The score of what ships."""
        return self._score(self._as_shipped)

    def with_steps(self, steps: Steps) -> str:
        """The score with other steps, where there are some."""
        return self._score([_with_step(prediction, steps.get(prediction.id)) for prediction in self._as_shipped])

    def _score(self, predictions: Sequence[Prediction]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "predictions.csv"
            write_text(path, prediction_table(predictions), force=True)
            command = (sys.executable, str(self._scorer), str(self._runs), str(path))
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _with_step(prediction: Prediction, step: tuple[float, float] | None) -> Prediction:
    if step is None:
        return prediction
    value, spread = step
    width = float(np.exp(NORMAL_90 * spread))
    return replace(prediction, step_time_s=value, step_time_low_s=value / width, step_time_high_s=value * width)


def show_folds(cases: Sequence[Case], scoring: Scoring) -> None:
    """Scores of calibrations that have not seen what they are judged on, and of fewer factors."""
    fits = Fits(cases)
    chosen = {" on ".join(key): fits.factors(key, range(len(own))) for key, own in by_key(cases).items()}
    print("Fits are of factors; traits that presets list as fitted stay as they ship, with all runs in view.")
    print("\n".join(f"{name}: {', '.join(factors)}" for name, factors in chosen.items() if factors), end="\n\n")
    for title, steps in (
        ("In fit", in_fit(cases, fits.whole)),
        ("A model, or a number of devices, left out", left_out(cases, fits, lambda case: case.fold)),
        ("A whole source left out", left_out(cases, fits, lambda case: case.source)),
        ("One factor for a framework on a generation", in_fit(cases, lambda key: _scalar(cases, key))),
        ("No calibration", in_fit(cases, lambda key: Calibration())),
    ):
        print(f"{title}\n\n{scoring.with_steps(steps)}", flush=True)


def _scalar(cases: Sequence[Case], key: tuple[str, str]) -> Calibration:
    return fit([case.measured for case in cases if case.key == key], Calibration(), FACTORS[:1])


def show_ablation(cases: Sequence[Case]) -> None:
    """Print errors of the shipped predictions without each term, by source."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        cost = _cost(case)
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
        costs = [_cost(case) for case in own]
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


def _cost(case: Case) -> CostEstimate:
    problem = case.measured.problem
    return estimate(problem, PlanBatch.of([case.measured.plan], problem.model.num_layers))


if __name__ == "__main__":
    main()
