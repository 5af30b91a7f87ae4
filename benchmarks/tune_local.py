"""Regret of `autoplan tune` on this machine after five trials.

Measures the machine with `autoplan profile`, and tune has its trials of the plans that a search proposes with these
times.  Then every plan that tune considered runs several times on two ranks, in turn, so that a slow minute hits all of
them; the medians are the truth.  The regret is how much slower the plan that tune keeps is than the fastest, by that
truth, beside what two runs of one plan differ by.  With --unmeasured the search knows nothing of this machine.

Give it a machine of its own.  What was run is kept in FOLDER; after --budget seconds it stops, and the same call goes
on from there.

usage: python benchmarks/tune_local.py FOLDER [--rounds N] [--trials N] [--budget SECONDS] [--unmeasured]
       [--report REPORT.md]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from reports import make_parser, write_report

from autoplan.api.plan_files import make_plan_file
from autoplan.api.problem import make_problem, make_space
from autoplan.base.files import encode, write_text
from autoplan.frameworks.logs import LogReader
from autoplan.jobs.job import AUTOPLAN, OUTCOME, PLAN, JobStatus, LocalJobs
from autoplan.profiler.machine.hardware import emulates_bf16
from autoplan.search.choice import distinct
from autoplan.search.storage import opened
from autoplan.search.study import search
from autoplan.search.trial_results import read_result
from autoplan.search.trials import Budget, Trials
from autoplan.search.tune import MARGIN, TunedTrial, Tuning, tuning_state
from autoplan.spec.enums import Precision
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan

MODEL = """\
name = "small"
num_layers = 8
hidden_size = 256
vocab_size = 4096
num_heads = 8
ffn_size = 704
"""
SEQ_LEN, GLOBAL_BATCH = 128, "8"
VISITS = 3  # of what the profile measures: the middle counts
PRECISION: Precision = (
    Precision.FP32 if emulates_bf16() else Precision.BF16
)  # a step in bf16 would take many times as long
STEPS, WARMUP = 6, 2
OPTIONS = ("--steps", str(STEPS), "--warmup", str(WARMUP))
NEAR = 0.02
POLL_S = 0.1


def main() -> None:
    """Measure what is missing, print, and write the report if asked."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="two or more say what runs of one plan differ by")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of this call")
    parser.add_argument("--unmeasured", action="store_true", help="leave the profile out")
    options = parser.parse_args()
    until_s = time.monotonic() + options.budget
    options.folder.mkdir(parents=True, exist_ok=True)
    model = options.folder / "small.toml"
    write_text(model, MODEL, force=True)
    timings = options.folder / "timings.db"
    if not options.unmeasured:
        profile(model, timings)
    problem = make_problem(
        model,
        cluster="cpu:1x2",
        seq_len=SEQ_LEN,
        precision=PRECISION,
        framework="torch",
        timings=None if options.unmeasured else "db",
        db=str(timings),
    )
    plans = distinct(search(problem, make_space(problem, GLOBAL_BATCH, fix=[], at_most=[], forbid=[]), margin=MARGIN))
    tried = tune(problem, plans, options.folder, options.trials, until_s)
    truth = measure(problem, plans, options.folder / "truth", options.rounds, until_s)
    text = "\n".join(table(problem, plans, truth, tried))
    print(text)
    if options.report:
        made_by = (
            f"{os.cpu_count()} cores, products in {PRECISION}; "
            f"`python benchmarks/tune_local.py --rounds {options.rounds} --trials {options.trials}"
            f"{' --unmeasured' if options.unmeasured else ''}`"
        )
        write_report(options.report, "Tuning on this machine", made_by, text)


def profile(model: Path, timings: Path) -> None:
    """Measure what is not in the database yet, as a user would."""
    options = {
        "--db": timings, "--framework": "torch", "--dtypes": PRECISION, "--seq-len": SEQ_LEN, "--tp": "1,2",
        "--micro-batches": "1,2,4,8", "--ranks": 2, "--visits": VISITS, "--allowance": "1s",
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    subprocess.run([*AUTOPLAN, "profile", str(model), *words], check=True)


def tune(
    problem: Problem, plans: Sequence[RankedPlan], folder: Path, most: int, until_s: float
) -> tuple[TunedTrial, ...]:
    """The trials of `autoplan tune`, stopped by nothing but their number."""
    folder.mkdir(parents=True, exist_ok=True)
    with opened(str(folder / "study.journal")) as storage:
        tuning = Tuning.joined(storage, problem, plans, name="tune", about={"options": " ".join(OPTIONS)})
        trials = Trials(
            tuning=tuning,
            jobs=LocalJobs(OPTIONS),
            problem=problem,
            folder=folder / "tune",
            prepare=lambda at: encode(make_plan_file(problem, [plans[at]], None)),
            budget=Budget(trials=most, seconds=until_s - time.monotonic()),
            parallel=1,
            warmup=WARMUP,
            limit_s=120.0,
            show=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print(trials.run(), file=sys.stderr)
        return tuning.trials()


def measure(
    problem: Problem, plans: Sequence[RankedPlan], folder: Path, rounds: int, until_s: float
) -> list[list[float]]:
    """Step times of every plan, by round."""
    found: list[list[float]] = [[] for _ in plans]
    for round_ in range(rounds):
        for at, plan in enumerate(plans):
            run = folder / f"{round_}-{at:02d}"
            if not (run / OUTCOME).is_file():
                if time.monotonic() > until_s:
                    sys.exit(f"{round_} rounds and {at} plans of {rounds} rounds are done: call again")
                run.mkdir(parents=True, exist_ok=True)
                write_text(run / PLAN, encode(make_plan_file(problem, [plan], None)), force=True)
                finish(run)
            result = read_result(run, LogReader(), JobStatus(state="ended", status=0), seconds=0.0)
            if result.step_s is None:
                print(f"{plan.plan.describe()}: {result.reason}", file=sys.stderr)
            else:
                found[at].append(result.step_s)
    return found


def finish(run: Path) -> None:
    """Run a prepared trial to its end."""
    jobs = LocalJobs(OPTIONS)
    name = jobs.start(run)
    try:
        while jobs.poll([name])[name].state != "ended":
            time.sleep(POLL_S)
    finally:
        jobs.cancel([name])


def table(
    problem: Problem, plans: Sequence[RankedPlan], truth: Sequence[Sequence[float]], tried: Sequence[TunedTrial]
) -> Iterator[str]:
    """Plans, in the order of their truth, and what tune made of them."""
    model = problem.model
    middle = np.array([median(runs) if runs else np.inf for runs in truth])
    best = float(middle.min())
    ratios = [abs(np.log(first / two)) for runs in truth for first, two in pairwise(runs)]
    yield f"{len(plans)} plans of {model.num_layers} layers of {model.hidden_size} on two ranks, {STEPS} steps each"
    yield "predicted   truth of rounds                over the best  trial"
    for at in np.argsort(middle, kind="stable").tolist():
        rounds = " ".join(f"{1000 * run_s:6.1f}" for run_s in truth[at])
        times = ", ".join(_time_text(trial) for trial in tried if trial.at == at)
        predicted, over = 1000 * plans[at].step_s, middle[at] / best - 1
        yield f"{predicted:6.1f} ms  {rounds} ms  {over:8.1%}  {times:24} {plans[at].plan.describe()}"
    kept, regret = tuning_state(plans, tried).best, float("inf")
    if kept:
        regret = middle[kept.at] / best - 1
        yield f"\nkept: {plans[kept.at].plan.describe()}"
    noise = (
        f"{np.median(ratios):.1%} (median), {np.percentile(ratios, 90):.1%} (p90)" if ratios else "what is not known"
    )
    yield f"regret after {len(tried)} trials: {regret:.1%}; two runs of one plan differ by {noise}"
    yield f"the plan predicted best is {middle[0] / best - 1:.1%} over the best; aim: {NEAR:.0%}, or the noise"


def _time_text(trial: TunedTrial) -> str:
    """A trial in a word or two."""
    if trial.result is None or trial.result.step_s is None:
        return f"{trial.number}: {trial.result.how if trial.result else 'under way'}"
    return f"{trial.number}: {trial.result.how} {1000 * trial.result.step_s:.1f} ms"


if __name__ == "__main__":
    main()
