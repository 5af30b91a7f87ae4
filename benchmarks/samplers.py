"""Number of cells that a sampler looks at until it has a plan within 1 % of the best.

usage: python benchmarks/samplers.py [--seeds N] [--trials N] [--gp-seeds N]

Spaces are those of `autoplan search` with its defaults for the problems below.  Every plan of a space is priced once,
and a trial is one cell, whose value is that of its best plan that fits; a cell in which none fits is pruned.  Samplers
are those of `autoplan search --sampler`, started cold, and with the cells of the five least bounds (warm).  The search
by bounds is `autoplan search` itself, counted in its study, to the same mark and to the proof.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import optuna
from optuna.trial import TrialState

from autoplan.base.arrays import Floats
from autoplan.cost.estimate import estimate
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.frameworks.presets import load_framework
from autoplan.readers.calibration import built_in_calibration
from autoplan.readers.cluster import load_cluster
from autoplan.readers.model import load_model
from autoplan.search.bounds import group_bounds
from autoplan.search.limits import default_limits
from autoplan.search.ranking import seconds_per_sequence
from autoplan.search.sampler import SAMPLERS, WARM_CELLS, Axes, make_sampler
from autoplan.search.space import Space
from autoplan.search.storage import opened
from autoplan.search.study import Shared, search
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec

PROBLEMS = (  # model, cluster, global batch, tokens of a sequence
    ("llama3-8b", "h100-sxm:4x8", 128, 8192),
    ("llama3-70b", "h100-sxm:16x8", 512, 8192),
    ("mixtral-8x7b", "h100-sxm:16x8", 512, 4096),
)
NEAR = 1.01


def problem_of(model: str, cluster: str, batch: int, seq_len: int) -> tuple[Problem, Space]:
    """A problem and its space, as the command line makes them."""
    framework, machine = load_framework("megatron-core"), load_cluster(cluster)
    problem = Problem(
        model=load_model(model),
        training=TrainingSpec(seq_len=seq_len),
        cluster=machine,
        framework=framework,
        calibration=built_in_calibration(framework, machine.device),
    )
    return problem, Space(workload=problem.workload, limits=default_limits(problem, (batch,)), rules=RULES)


def cell_values(problem: Problem, space: Space) -> Floats:
    """Seconds per sequence of the best plan of each cell that fits; inf where none does."""
    cells = space.cells()
    batch, owner = space.plans(cells)
    costs = estimate(problem, batch)
    values = np.full(len(cells), np.inf)
    fits = costs.verdict == 0
    np.minimum.at(values, owner[fits], seconds_per_sequence(costs)[fits])
    return values


def least_bounds(problem: Problem, space: Space) -> list[int]:
    """Cells in the order of their bounds."""
    cells = space.cells()
    groups, owner = space.groups(cells)
    bound = np.full(len(cells), np.inf)
    np.minimum.at(bound, owner, group_bounds(problem, space, groups)[0] / groups.global_batch)
    return np.argsort(bound, kind="stable").tolist()


def trials_to_reach(name: str, seed: int, space: Space, values: Floats, first: Sequence[int], most: int) -> int | None:
    """Trials until a cell within 1 % of the best was looked at; None: not within `most`."""
    axes = Axes(space.cells())
    study = optuna.create_study(sampler=make_sampler(name, seed))
    for cell in first:
        study.enqueue_trial(axes.params(cell))
    for count in range(1, most + 1):
        trial = study.ask(axes.distributions)
        value = float(values[axes.cell(trial.params)])
        if value <= NEAR * values.min():
            return count
        if np.isfinite(value):
            study.tell(trial, value)
        else:
            study.tell(trial, state=TrialState.PRUNED)
    return None


def ours(problem: Problem, space: Space) -> tuple[int, int]:
    """(trials of the search by bounds until one is within 1 % of the best, trials until that is proven)."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Shared(url=str(Path(folder) / "journal"), name="bound")
        best = search(problem, space, shared=shared, margin=0.0).ranked[0]
        with opened(shared.url) as storage:
            trials = optuna.load_study(study_name=shared.name, storage=storage).trials
    mark = NEAR * best.step_s / best.plan.global_batch
    feasible = [
        trial.value if trial.value is not None and trial.constraints["memory"] <= 0 else np.inf for trial in trials
    ]
    return 1 + int(np.argmax(np.array(feasible) <= mark)), len(trials)


def rows(model: str, cluster: str, batch: int, seq_len: int, options: argparse.Namespace) -> Iterator[str]:
    """The table of one problem, line by line."""
    problem, space = problem_of(model, cluster, batch, seq_len)
    values, order = cell_values(problem, space), least_bounds(problem, space)
    near = int((values <= NEAR * values.min()).sum())
    yield f"\n{model}, {cluster}, {batch} sequences of {seq_len}: {len(values)} cells, {near} within 1 % of the best\n"
    yield "| sampler | cold: median (worst) trials | warm | reached, cold / warm | s a trial, cold |"
    yield "|---|--:|--:|--:|--:|"
    reached, proven = ours(problem, space)
    yield f"| bound | {reached}, proven after {proven} | | | |"
    for name in SAMPLERS:
        most, seeds = options.trials, range(options.gp_seeds if name == "gp" else options.seeds)
        start = time.process_time()
        cold = [trials_to_reach(name, seed, space, values, (), most) for seed in seeds]
        seconds = (time.process_time() - start) / sum(run or most for run in cold)
        warm = [trials_to_reach(name, seed, space, values, order[:WARM_CELLS], most) for seed in seeds]
        done = " / ".join(f"{sum(run is not None for run in runs)} of {len(runs)}" for runs in (cold, warm))
        yield f"| {name} | {_middle(cold, most)} | {_middle(warm, most)} | {done} | {seconds:.4f} |"


def _middle(runs: list[int | None], most: int) -> str:
    counts = [most + 1 if run is None else run for run in runs]
    return " (".join(f"> {most}" if count > most else f"{count:g}" for count in (median(counts), max(counts))) + ")"


def main() -> None:
    """Print a table for each problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--gp-seeds", type=int, default=1)
    parser.add_argument("--trials", type=int, default=60)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for problem in PROBLEMS:
        for line in rows(*problem, options):
            print(line, flush=True)


if __name__ == "__main__":
    main()
