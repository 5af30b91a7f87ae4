"""Accuracy of predicted steps on measured runs.

Prices a table of runs as the presets ship, with intervals that were fitted without the source that they are judged on.
Every prediction table is scored; then come what each term contributes and the worst runs of every source with their
terms.

Calibrations hold no factor, so that a fit moves intervals alone.  `--ship` writes them: of every framework on a
generation of devices what its runs are like (`cost.spreads.Familiarity`), and the general spreads, which are fitted to
the errors of runs before anybody looked at their source (`first_errors.csv`; `interval_fit.fitted_spreads`).  Errors of
runs that were in view when the model was made, or corrected, say too little of the next source, so that they count
nothing.  Where a recipe leaves in doubt which of two builds a run had, its interval holds both and its error is that of
the nearer one.

usage: python benchmarks/accuracy.py [--runs RUNS.csv] [--scorer SCORER.py] [--worst N] [--as-shipped]
                                     [--report REPORT.md] [--ship]
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import numpy as np
from accuracy_cases import BLIND, FINETUNED, Case, calibrations, read_cases
from interval_fit import (
    COVER,
    MANY_RUNS,
    TAIL,
    Step,
    Steps,
    Unseen,
    fitted_spreads,
    general_parts,
    general_text,
    interval_score,
    source_left_out,
    steps_of,
)
from measured_runs import RUNS, SHARED, source_of, with_answers
from reports import existing, make_parser, write_report

import autoplan
from autoplan.base.files import write_text
from autoplan.cost.spreads import NORMAL_90, Sides
from autoplan.readers.calibration import calibration_text
from autoplan.runs.predictions import predict, prediction_table
from autoplan.runs.runs import Run, read_runs
from autoplan.spec.run_outcome import Prediction
from autoplan.spec.terms import STEP_TERMS

PRESETS = Path(autoplan.__file__).parent / "presets"
LATER = (  # sources that came when the presets had been made
    "alpa", "bridge_ab", "colossalai", "dlperf", "flagperf_ds", "flagperf_mds", "flagperf_paddle", "launcher2208",
    "libai_bert", "libai_gpt", "mlperf_8b", "mlperf_gpt3", "paddlenlp", "primus_pipe", "sailor", "xtuner_moe", "yafsdp",
)  # fmt: skip
WIDTHS = (0.5, 0.7, 0.85, 1.0, 1.15, 1.3)  # of intervals, relative to those that are fitted


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
    tuned_runs = list(read_runs(FINETUNED))
    blind = read_cases(BLIND, blind_runs) + read_cases(FINETUNED, tuned_runs)
    # Runs whose first errors were not worked out yet stay unseen.
    first_predicted = [replace(case, is_blind=True) for case in blind if case.first_error is not None]
    cases = read_cases(options.runs, runs) + first_predicted
    if options.ship:
        ship(cases)
        return
    scoring = Scoring(options.runs, options.scorer, runs)
    # A finished run that was refused when it was found has no first prediction, and is not counted.
    predicted = {case.run.id for case in first_predicted}
    blind_scoring, tuned_scoring = (
        Scoring(
            path,
            options.scorer,
            [run for run, row in with_answers(path, table) if run.id in predicted or not row["step_time_s"]],
        )
        for path, table in ((BLIND, blind_runs), (FINETUNED, tuned_runs))
    )
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


def show_general(cases: Sequence[Case]) -> None:
    """Print the general spreads with the runs that each rests on."""
    unseen = Unseen.of(cases)
    print("General spreads\n")
    print(f"{'part':12}{'value':>8}{'runs':>7}{'sources':>9}{'5 %':>8}{'95 %':>8}{'inside':>8}")
    for part in general_parts(fitted_spreads(unseen), unseen):
        low, high = part.ends
        row = f"{part.name:12}{part.value:8.3f}{part.num_runs:7d}{part.num_sources:9d}"
        print(f"{row}{low:8.2f}{high:8.2f}{part.inside:8.2f}")
    print(flush=True)


def show_rounds(cases: Sequence[Case]) -> None:
    """Print what intervals that were fitted to the rounds before contain of every round, as first predicted."""
    blind = [case for case in cases if case.round is not None]
    unseen, rounds = Unseen.of(blind), np.array([case.round for case in blind])
    error = unseen.first_error
    below, above = Sides(*np.full((2, len(blind)), math.nan))
    for number in range(2, rounds.max() + 1):
        is_next = rounds == number
        next_sides = unseen.take(is_next).sides(fitted_spreads(unseen.take(rounds < number)))
        below[is_next], above[is_next] = (NORMAL_90 * side for side in next_sides)
    inside, weights = (-below <= error) & (error <= above), unseen.weights
    score = interval_score(error, below, above)
    print("Rounds by intervals that were fitted to the rounds before\n")
    titles = f"{'round':12}{'runs':>6}{'sources':>9}{'inside':>8}{'mean of sources':>17}{'width':>8}"
    print(f"{titles}{'median error':>14}{'score':>8}")
    for title, which in (
        *((str(number), rounds == number) for number in range(2, rounds.max() + 1)),
        ("all", rounds > 1),
    ):
        of_sources = float(np.average(inside[which], weights=weights[which]))
        print(
            f"{title:12}{which.sum():6d}{len(set(unseen.sources[which])):9d}{inside[which].mean():8.2f}"
            f"{of_sources:17.2f}{float(np.median((below + above)[which])):8.2f}"
            f"{float(np.median(np.abs(error[which]))):14.2f}"
            f"{float(np.average(score[which], weights=weights[which])):8.2f}"
        )
    print(flush=True)


def show_kinds(cases: Sequence[Case]) -> None:
    """Print how many runs of a kind are inside if no source had any: of a generation, with experts or without."""
    everything = Unseen.of(cases)
    kinds = np.array([f"{case.key[1]}, {'experts' if case.problem.model.moe else 'dense'}" for case in cases])
    print(
        "A whole kind of runs left out\n\n" + f"{'kind':24}{'runs':>6}{'sources':>9}{'inside':>8}{'as first said':>15}"
    )
    for kind in np.unique(kinds).tolist():
        is_kind = kinds == kind
        unseen, fitted = everything.take(is_kind), fitted_spreads(everything.take(~is_kind))
        first = unseen.as_first_predicted
        shares = [
            float(np.mean(of.inside(error, fitted))) if len(error) else math.nan
            for of, error in ((unseen, unseen.error), (first, first.first_error))
        ]
        print(f"{kind:24}{len(unseen.sources):6d}{len(set(unseen.sources)):9d}{shares[0]:8.2f}{shares[1]:15.2f}")
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
    """Steps of the cases of `LATER` sources, with general spreads of those before them alone."""
    unseen, is_later = Unseen.of(cases), np.array([case.source in LATER for case in cases])
    sides = unseen.take(is_later).sides(fitted_spreads(unseen.take(~is_later)))
    return steps_of([case for case, later in zip(cases, is_later, strict=True) if later], sides)


def ship(cases: Sequence[Case]) -> None:
    """Write the calibration of every framework and generation, and the general spreads."""
    for name, calibration in calibrations(cases).items():
        write_text(PRESETS / "calibrations" / f"{name}.toml", calibration_text(calibration), force=True)
        print(f"{calibration.name}: {calibration.sources[0]}")
    unseen = Unseen.of(cases)
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
        counted = [not sources or source_of(run) in sources for run in self._table]
        return self._score(
            [_with_step(made, steps.get(made.id)) for made in itertools.compress(self._as_shipped, counted)]
        )

    def _score(self, predictions: Sequence[Prediction]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "predictions.csv"
            write_text(path, prediction_table(predictions), force=True)
            command = [sys.executable, str(self._scorer), str(self._runs), str(path), "--source"]
            command += [prediction.id for prediction in predictions]  # it takes the beginnings of identifiers
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _with_step(prediction: Prediction, step: Step | None) -> Prediction:
    if step is None:
        return prediction
    low = step.step_s * math.exp(min(step.log_doubt, 0.0) - NORMAL_90 * step.spread.below)
    high = step.step_s * math.exp(max(step.log_doubt, 0.0) + NORMAL_90 * step.spread.above)
    return replace(prediction, step_time_s=step.step_s, step_time_low_s=low, step_time_high_s=high)


def show_unseen(cases: Sequence[Case], scoring: Scoring) -> None:
    """Scores of intervals that have not seen what they are judged on."""
    print("Predicted steps are those that ship; traits that presets list as fitted have all runs in view.\n")
    print(f"A whole source left out\n\n{scoring.with_steps(source_left_out(cases))}", flush=True)
    later = scoring.with_steps(later_left_out(cases), LATER)
    print(f"All later sources left out\n\n{later}", flush=True)


def show_blind(cases: Sequence[Case], scoring: Scoring, tuned: Scoring) -> None:
    """Scores of blind runs, as first predicted and as predicted now; no interval has seen the source of its run."""
    unseen = source_left_out(cases)
    blind = [case for case in cases if case.is_blind]
    sources = sorted({case.source for case in blind})
    first: Steps = {}
    for case in blind:
        assert case.first_error is not None
        first_s = case.measured.step_s * math.exp(-case.first_error)
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
