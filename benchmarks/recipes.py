"""Published recipes beside the best plans that a search finds for the same models, clusters, batches and precisions.

Recipes that the authors of a framework tuned and published are rows of the table of measured runs.  Each is priced by
the cost model, and so is the best plan of a default search of the same problem, which keeps what the recipe chose of
the numerics of training.  A recipe that fits and is priced below the best plan contradicts the proof of that search,
which is one over plans that fit, and the exit status is 1.  Recipes that ran and by the model do not fit, or are not
sure to, are counted by themselves: their memory is wrong, not the proof.

usage: python benchmarks/recipes.py [--runs RUNS.csv] [--report REPORT.md] [--jobs N] [--source NAME ...]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from measured_runs import RUNS, source_of, with_answers
from reports import existing, make_parser, write_report

from autoplan.api.problem import make_space
from autoplan.base.errors import AutoplanError
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.runs.runs import read_runs
from autoplan.search.study import search
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem

# Sources whose configurations the authors of the framework, or the submitters to MLPerf, tuned.
TUNED = ("nvbridge", "dgxc", "nemo2407", "mlm2021", "mlm2024", "megascale", "mtnlg", "launcher2208", "mlperf")
TOLERANCE = 1e-3  # a recipe so little below the best plan is no exception
MUCH_FASTER = 0.10  # a best plan so far below a tuned recipe has to be believed for a reason
RULES = "megatron-lm"  # of frameworks whose rules are not known: these sources run Megatron's code


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A published configuration and the runs that it is the configuration of."""

    ids: tuple[str, ...]
    problem: Problem
    plan: ParallelPlan
    measured_s: float  # median of its runs

    @property
    def name(self) -> str:
        """The model, the devices and the precision."""
        problem = self.problem
        return f"{problem.model.name} {problem.cluster.num_devices} {problem.cluster.device.name} {self.plan.precision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A recipe beside the best plan of a search; times are those of the cost model."""

    recipe: Recipe
    recipe_s: float
    verdict: str  # on the memory of the recipe
    refusals: tuple[str, ...]  # rules that the recipe breaks
    best: ParallelPlan | None = None
    best_s: float = float("nan")
    failure: str = ""

    @property
    def ratio(self) -> float:
        """The time of the recipe over that of the best plan."""
        return self.recipe_s / self.best_s

    @property
    def is_faster(self) -> bool:
        """Whether the recipe is faster than what was proven to be the fastest that fits."""
        return self.ratio < 1.0 - TOLERANCE

    @property
    def is_exception(self) -> bool:
        """Whether it contradicts the proof, or there is none."""
        return bool(self.failure) or (self.is_faster and self.verdict == "fits")


def main() -> int:
    """Compare all recipes, print the table and, if asked, write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=existing, default=str(RUNS))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--source", nargs="*", default=TUNED)
    options = parser.parse_args()
    recipes = published(options.runs, tuple(options.source))
    with ProcessPoolExecutor(options.jobs) as pool:
        comparisons = list(pool.map(compare, recipes))
    text = "\n".join(table(comparisons))
    print(text)
    if options.report:
        write_report(options.report, "Published recipes beside best plans", "`python benchmarks/recipes.py`", text)
    return int(any(comparison.is_exception for comparison in comparisons))


def published(path: Path, sources: tuple[str, ...]) -> list[Recipe]:
    """Return the tuned configurations of the table at `path`, each once."""
    found: dict[str, Recipe] = {}
    times: dict[str, list[float]] = {}
    for run, row in with_answers(path, read_runs(path)):
        if not source_of(run).startswith(sources) or row["status"] != "ok" or not (run.problem and run.plan):
            continue
        problem = run.problem
        if problem.framework.rules == "unknown":
            problem = replace(problem, framework=replace(problem.framework, rules=RULES))
        problem = replace(problem, framework=problem.framework.choosing(run.plan))
        key = repr((problem, run.plan))
        times.setdefault(key, []).append(step_s(row, run.problem, run.plan))
        ids = (*found[key].ids, run.id) if key in found else (run.id,)
        found[key] = Recipe(ids=ids, problem=problem, plan=run.plan, measured_s=statistics.median(times[key]))
    return list(found.values())


def step_s(row: dict[str, str], problem: Problem, plan: ParallelPlan) -> float:
    """Return the measured time of a step; NaN where the row has none."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    rate = float(row["tokens_per_s_per_gpu"] or "nan") * problem.cluster.num_devices
    return plan.global_batch * problem.training.seq_len / rate


def compare(recipe: Recipe) -> Comparison:
    """Search the recipe's problem, and price both."""
    problem, plan = recipe.problem, recipe.plan
    cost = estimate(problem, PlanBatch.of([plan], problem.model.num_layers))
    priced = Comparison(
        recipe=recipe,
        recipe_s=float(cost.step_s[0]),
        verdict=VERDICTS[int(cost.verdict[0])],
        refusals=broken(book_of(problem.framework).rules, problem.workload, plan),
    )
    try:
        result = search(problem, make_space(problem, plan.global_batch))
    except AutoplanError as error:
        return replace(priced, failure=str(error))
    if not result.ranked:
        return replace(priced, failure="no plan")
    best = result.ranked[0]
    return replace(priced, best=best.plan, best_s=best.step_s)


def table(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Lines: every recipe, the worst first, and what they come to."""
    found = sorted(comparisons, key=lambda each: each.ratio if not each.failure else 0.0)
    yield f"{'recipe / best':>13} {'measured':>9} {'priced':>8} {'best':>8}  recipe"
    for each in found:
        yield (
            f"{each.ratio:13.3f} {each.recipe.measured_s:8.3f}s {each.recipe_s:7.3f}s {each.best_s:7.3f}s  "
            f"{each.recipe.ids[0]}{f' +{len(each.recipe.ids) - 1}' * (len(each.recipe.ids) > 1)}: {each.recipe.name}"
        )
        yield f"{'':43}recipe: {each.recipe.plan.describe()}; {each.verdict}"
        if each.best:
            yield f"{'':43}best:   {each.best.describe()}"
        for line in (*each.refusals, *((each.failure,) if each.failure else ())):
            yield f"{'':43}! {line}"
    gaps = [each.ratio for each in found if not each.failure]
    exceptions = [each for each in found if each.is_exception]
    much = [each for each in found if each.ratio > 1.0 + MUCH_FASTER]
    yield ""
    unsure = [each for each in found if each.is_faster and not each.is_exception]
    yield f"{len(found)} configurations: {len(exceptions)} priced below the best plan of a default search"
    yield f"{len(unsure)} more priced below it, whose memory the model does not call a fit"
    if gaps:
        yield (
            f"time of a recipe over the best plan's: median {statistics.median(gaps):.3f}, least {min(gaps):.3f}, "
            f"most {max(gaps):.3f}; best plan more than {MUCH_FASTER:.0%} faster: {len(much)}"
        )


if __name__ == "__main__":
    sys.exit(main())
