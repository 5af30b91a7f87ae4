"""Published recipes beside the best plans that a search finds for the same models, clusters, batches and precisions.

Recipes that the authors of a framework tuned and published are rows of the table of measured runs.  Each is priced by
the cost model, and so is the best plan of a default search of the same problem, which keeps what the recipe chose of
the numerics of training, and the kernels of its software.  A recipe that fits and is priced below the best plan
contradicts the proof of that search, which is one over plans that fit, and the exit status is 1.  Recipes that ran and
by the model do not fit, or are not sure to, are counted by themselves: their memory is wrong, or what the table leaves
out of them, not the proof.

Where the best plan is much faster it is told which changes of the recipe make it so, each after those before it, what
recipes of the same model, devices, precision and length measured, and whether the fastest of them took about as long
as the price of the best plan: then its authors found what the search finds.  Other prices nothing confirms.

usage: python benchmarks/recipes.py [--runs RUNS.csv] [--report REPORT.md] [--jobs N] [--source NAME ...]
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from autoplan.runs.predictions import recompute_is_stated
from autoplan.runs.runs import Run, read_runs
from autoplan.search.excluded_options import with_excluded_options
from autoplan.search.placement import place_best
from autoplan.search.plan_changes import Difference, fastest_path, prices
from autoplan.search.study import search
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem

# Sources whose configurations the authors of the framework, or the submitters to MLPerf, tuned.
TUNED = ("nvbridge", "dgxc", "nemo2407", "mlm2021", "mlm2024", "megascale", "mtnlg", "launcher2208", "mlperf")
TOLERANCE = 1e-3  # a recipe so little below the best plan is no exception
MUCH_FASTER = 0.10  # a best plan so far below a tuned recipe has to be believed for a reason
CONFIRMED = 0.9  # of the fastest measured time: a best plan that is priced no lower was found by others
# Why plans are priced much faster than tuned recipes, by how an id or the name of a model begins: the longest counts.
_LATER = (
    "later recipes of its model changed the same; the overlap alone gained 15 to 18 % (bridge_ab-020 to -023), "
    "micro-batch 4 instead of 1 a factor of 2.8 (nvbridge-227, -100)"
)
_AS_ELSEWHERE = (
    "its latest recipes here neither hide expert traffic nor run one graph; those of DeepSeek-V3 and Qwen3-30B in "
    "26.06 for other Blackwell devices do both, and took .93 to 1.06 times their price (nvbridge-001, -002, -007, "
    "-008, -041, -042, -049)"
)
_ON_HOPPER = (
    "no recipe here hides expert traffic or captures a graph; the price of pipelines is in doubt: its own two took 1.3 "
    "and 1.7 times theirs, the one that drops tokens .93 times"
)
_INTERLEAVED = "its table does not say how it interleaves, which its source does; priced without, micro-batches wait"
_GRAPHED = (
    "its recipe, but Super's on B200, captures attention, Mamba and routers, which its row does not say "
    "(Megatron-Bridge v0.3.1 to 067f987, nemotronh): it has what graphs save here, and the price without is too high"
)
_PROXY = "a proxy with fewer layers, which keeps the degrees that all 126 need: fewer fit without cp or pp"
_SPLIT_HEAD = "the last of 2 stages has a head of 202,048 words, as long as 3 of its 24 layers"
_SPLIT_EXPERTS = "not measured: experts whole, where etp 4 gathers their tokens and cuts their products in four"
REASONS = {
    "mlm2021": "all its runs repeat every layer, one forward pass in four (arXiv:2104.04473, section 3.5)",
    "mlm2024": f"{_INTERLEAVED}; nor does it say the micro-batch, which is priced as 1",
    "mlm2024-003": "its table does not say the micro-batch, priced as 1; a study of scaling, whose tp grows by steps",
    "mlm2024-004": "as mlm2024-003, and priced 15 % above its measurement: its micro-batch is probably a larger one",
    "megascale": _INTERLEAVED,
    "nemo2407-009": "the last of 4 stages has a head of 256,000 words, as long as 3 of its 10 layers",
    "dgxc-293": "ep 64 goes through the network, and nothing hides it before Megatron-Core 0.14; ep 8 stays in a node",
    "dgxc-294": "as dgxc-293",
    "dgxc-024": _PROXY,
    "dgxc-030": _PROXY,
    "dgxc-210": _PROXY,
    "dgxc-216": _PROXY,
    "dgxc-288": _SPLIT_HEAD,
    "dgxc-289": _SPLIT_HEAD,
    "dgxc-290": _SPLIT_HEAD,
    "dgxc-291": _SPLIT_EXPERTS,
    "dgxc-292": _SPLIT_EXPERTS,
    "launcher2208-011": "its file does not interleave, and m micro-batches wait for pp - 1 more; it took 1.3 times its "
    "price",
    "nemotron-h": "virtual stages of hybrids, which Megatron-Core has from 2026 on (pull request 3377), not "
    "that container",
    "nvbridge-260": "its recipe repeats 5 of 32 layers, its row all: recompute_num_layers, and 9.07 s measured",
    "nvbridge-290": "its recipe hides expert traffic, which its row does not say (Megatron-Bridge v0.1.0rc4, "
    "scripts/performance/run_script.py: A2A_1F1B on H100)",
    "Qwen3": _LATER,
    "DeepSeekV3": _LATER,
    "Kimi_K2": _AS_ELSEWHERE,
    "nvbridge-043": _AS_ELSEWHERE,
    "nvbridge-090": _AS_ELSEWHERE,
    "nvbridge-136": _AS_ELSEWHERE,
    "nvbridge-100": _AS_ELSEWHERE,
    "nvbridge-227": f"{_LATER}; {_AS_ELSEWHERE}",
    "nvbridge-258": f"{_LATER}; {_AS_ELSEWHERE}",
    "nvbridge-050": _ON_HOPPER,
    "nvbridge-101": _ON_HOPPER,
    "nvbridge-191": _ON_HOPPER,
    "nvbridge-264": _ON_HOPPER,
    "nemotron3-nano": _GRAPHED,
    "nemotron3.5-lightning": _GRAPHED,
    "nemotron3-super": f"{_GRAPHED}; waits of micro-batches of 1 and casts of 64 experts a rank are fitted to its runs",
}
# What the table leaves out of recipes that ran and by the model do not fit, or are not sure to, by how an id begins.
_README = "README.md of its commit says tp 2 of the 5B model, with which it needs 43 to 50 GiB; conf/training says 1"
DOUBTS = {
    "dgxc-213": "within what is not known of it: 94 % of the memory",
    "launcher2208-00": _README,
    "launcher2208-007": "its speed fits full recomputation, not the selective one of its file",
    "nemo2407-004": "a run in the way of MLPerf: 8-bit parameters (conf/training/gpt3/175b_mlperf.yaml) need 69 GiB",
    "nemo2407-008": "within what is not known of it: its loss over 256,000 words holds 8 bytes a logit, fused or not",
    "nemo2407-010": "its table tells no 8-bit parameters: with them it needs 77 of 79 GiB, 87 without; "
    "nemotron_340b.yaml of the 24.07 container repeats attention alone",
    "nemo2407-015": "its table tells no recomputation: states of 14 bytes a parameter, which nothing shards, need 65 "
    "of 79 GiB, so that it repeats layers or has narrower states than the launcher's sft.yaml",
    "nvbridge-017": "its recipe shards all states by Megatron-FSDP (067f987, nemotronh/common.py), its row does not",
    "nvbridge-018": "as nvbridge-017",
    "nvbridge-077": "within what is not known of it: 194 of 186 GiB, 145 of them activations of the 40 layers left",
    "nvbridge-245": "offloads activations of 40 of 80 layers (v0.2.0, configs/llama3/workload_base_configs.py: GB200, "
    "fp8_cs), which its row does not say; then as nvbridge-077",
    "nvbridge-165": "its precision runs with pp 4 and vp 5 (Megatron-Bridge v0.3.1, llama3_workload_base_configs.py)",
    "nvbridge-268": "offloads activations of 40 of 80 layers (v0.1.0rc4, llama3_70b_llm_pretrain.yaml: GB200, fp8_cs)",
}
_ACCUMULATION = "gradient_accumulation_fusion"
RULES = "megatron-lm"  # of frameworks whose rules are not known: these sources run Megatron's code


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A published configuration and the runs that it is the configuration of."""

    ids: tuple[str, ...]
    problem: Problem
    plan: ParallelPlan
    measured_s: float  # median of its runs
    fixed: tuple[str, ...]  # options that were no choice in its software
    unknown: tuple[str, ...]  # what decides its memory or time and is not told

    @property
    def pace_s(self) -> float:
        """Measured seconds per sequence."""
        return self.measured_s / self.plan.global_batch

    def is_like(self, other: Recipe) -> bool:
        """Return whether another recipe trains the same model on as many devices in the same precision."""
        return all(
            mine == theirs
            for mine, theirs in (
                (self.family, other.family),
                (self.problem.cluster.num_devices, other.problem.cluster.num_devices),
                (self.problem.cluster.device.name, other.problem.cluster.device.name),
                (self.problem.training.seq_len, other.problem.training.seq_len),
                (self.plan.precision, other.plan.precision),
                (self.plan.token_dropping, other.plan.token_dropping),
            )
        )

    @property
    def family(self) -> str:
        """The model without what a table says of its training in brackets."""
        return self.problem.model.name.partition(" (")[0]

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
    steps: tuple[tuple[str, float], ...] = ()  # changes on the way to the best plan, and how much faster each makes it
    failure: str = ""

    @property
    def ratio(self) -> float:
        """The time of the recipe over that of the best plan."""
        return self.recipe_s / self.best_s

    @property
    def is_faster(self) -> bool:
        """Return whether the recipe is faster than what was proven to be the fastest that fits."""
        return self.ratio < 1.0 - TOLERANCE

    @property
    def is_much_slower(self) -> bool:
        """Return whether the best plan has to be believed for a reason."""
        return self.ratio > 1.0 + MUCH_FASTER

    @property
    def is_unsure(self) -> bool:
        """Return whether a recipe that ran is faster than what was proven, and by the model may not fit."""
        return self.is_faster and not self.is_exception

    @property
    def reason(self) -> str:
        """Why the best plan is believed to be much faster, or its memory is not; blank where nobody looked."""
        reasons = DOUBTS if self.is_unsure else REASONS
        named = (self.recipe.ids[0], self.recipe.family)
        beginnings = [start for start in reasons if any(name.startswith(start) for name in named)]
        return reasons[max(beginnings, key=len)] if beginnings else ""

    @property
    def is_exception(self) -> bool:
        """Return whether it contradicts the proof, or there is none."""
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
    found: dict[str, list[tuple[Run, Problem, ParallelPlan, float, tuple[str, ...], bool]]] = {}
    answered = list(with_answers(path, read_runs(path)))
    tells_interleaving = {source_of(run) for run, row in answered if row["vp"]}
    for run, row in answered:
        if not source_of(run).startswith(sources) or row["status"] != "ok" or not (run.problem and run.plan):
            continue
        problem = run.problem
        if problem.framework.rules == "unknown":
            problem = replace(problem, framework=replace(problem.framework, rules=RULES))
        # An overlap of traffic that there is none of is no choice.
        plan = run.plan if run.plan.tp > 1 else replace(run.plan, tp_overlap=False)
        problem = replace(problem, framework=problem.framework.choosing(plan).preferring(f"attention={plan.attention}"))
        problem, fixed = with_accumulation_of(plan, problem)
        measured = step_s(row, run.problem, plan)
        is_interleaving_told = plan.pp == 1 or source_of(run) in tells_interleaving
        found.setdefault(repr((problem, plan)), []).append((run, problem, plan, measured, fixed, is_interleaving_told))
    return [
        Recipe(
            ids=tuple(run.id for run, *_ in rows),
            problem=rows[0][1],
            plan=rows[0][2],
            measured_s=statistics.median(measured for *_, measured, _, _ in rows),
            unknown=unknown_of([run for run, *_ in rows], is_interleaving_told=any(is_told for *_, is_told in rows)),
            fixed=rows[0][4],
        )
        for rows in found.values()
    ]


def with_accumulation_of(plan: ParallelPlan, problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """Return the problem, and limits of its plans, for a recipe of software in which accumulation was no choice."""
    framework = problem.framework
    if plan.gradient_accumulation_fusion or framework.offers is None or _ACCUMULATION in framework.offers:
        return problem, ()
    offering = replace(framework, offers=(*framework.offers, _ACCUMULATION))
    return replace(problem, framework=offering), (f"{_ACCUMULATION}=off",)


def unknown_of(runs: Sequence[Run], *, is_interleaving_told: bool) -> tuple[str, ...]:
    """Return what decides the memory and time of a recipe and no row of it tells."""
    return (
        *(() if any(map(recompute_is_stated, runs)) else ("recomputation not told",)),
        *(() if is_interleaving_told else ("interleaving not told",)),
    )


def step_s(row: dict[str, str], problem: Problem, plan: ParallelPlan) -> float:
    """Return the measured time of a step; NaN where the row has none."""
    if row["step_time_s"]:
        return float(row["step_time_s"])
    rate = float(row["tokens_per_s_per_gpu"] or "nan") * problem.cluster.num_devices
    return plan.global_batch * problem.training.seq_len / rate


def compare(recipe: Recipe) -> Comparison:
    """Search the recipe's problem, and price both."""
    problem, plan = recipe.problem, recipe.plan
    cost = estimate(problem, problem.batch([plan]))
    priced = Comparison(
        recipe=recipe,
        recipe_s=float(cost.step_s[0]),
        verdict=VERDICTS[int(cost.verdict[0])],
        refusals=broken(book_of(problem.framework).rules, problem.workload, plan),
    )
    try:
        space = make_space(problem, plan.global_batch, fix=recipe.fixed)
        _, result = with_excluded_options(problem, space, place_best(problem, search(problem, space)), ())
    except AutoplanError as error:
        return replace(priced, failure=str(error))
    if not result.ranked:
        return replace(priced, failure="no plan")
    best = result.ranked[0]
    compared = replace(priced, best=best.plan, best_s=best.step_s)
    return replace(compared, steps=steps_to(recipe, best.plan)) if compared.is_much_slower else compared


def steps_to(recipe: Recipe, best: ParallelPlan) -> tuple[tuple[str, float], ...]:
    """Return the changes from a recipe to the best plan in a greedy order, each with how much faster it makes it."""
    rules = book_of(recipe.problem.framework).rules
    difference = Difference(problem=recipe.problem, rules=rules, before=recipe.plan, after=best)
    steps, before_s = [], prices(recipe.problem, [recipe.plan])[0].s_per_sequence
    for step in fastest_path(difference):
        after_s = step.plan.s_per_sequence
        steps.append((" with ".join(step.axes), before_s / after_s))
        before_s = after_s
    return tuple(steps)


def fastest_like(recipe: Recipe, comparisons: Iterable[Comparison]) -> Recipe | None:
    """Return the recipe of the same problem that was measured to be the fastest; None if none was measured."""
    rivals = [each.recipe for each in comparisons if each.recipe.is_like(recipe) and each.recipe.pace_s > 0]
    return min(rivals, key=lambda rival: rival.pace_s, default=None)


def share_of_fastest(each: Comparison, comparisons: Iterable[Comparison]) -> float:
    """Return the price of the best plan over the fastest measured time of the same problem; NaN without one."""
    fastest = fastest_like(each.recipe, comparisons)
    return each.best_s / each.recipe.plan.global_batch / fastest.pace_s if fastest else float("nan")


def longest_steps(comparisons: Iterable[Comparison]) -> str:
    """Return the changes that gain the most on the ways to best plans, with how many ways each leads."""
    longest = Counter(max(each.steps, key=lambda step: step[1])[0] for each in comparisons if each.steps)
    return ", ".join(f"{axes} {count}" for axes, count in longest.most_common())


def table(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """Lines: every recipe, the worst first, and what they come to."""
    found = sorted(comparisons, key=lambda each: each.ratio if not each.failure else 0.0)
    yield f"{'recipe / best':>13} {'measured':>9} {'priced':>8} {'best':>8}  recipe"
    for each in found:
        yield (
            f"{each.ratio:13.3f} {each.recipe.measured_s:8.3f}s {each.recipe_s:7.3f}s {each.best_s:7.3f}s  "
            f"{each.recipe.ids[0]}{f' +{len(each.recipe.ids) - 1}' * (len(each.recipe.ids) > 1)}: {each.recipe.name}"
        )
        said = ", ".join((each.verdict, *each.recipe.unknown))
        yield f"{'':43}recipe: {each.recipe.plan.describe()}; {said}"
        if each.best:
            yield f"{'':43}best:   {each.best.describe()}"
        if each.steps:
            yield f"{'':43}by:     {', '.join(f'{axes} {gain:.3f}' for axes, gain in each.steps)}"
        if each.is_much_slower and (fastest := fastest_like(each.recipe, found)):
            if (gain := each.recipe.pace_s / fastest.pace_s) > 1.0 + MUCH_FASTER:
                yield f"{'':43}since:  {fastest.ids[0]} measured {gain:.3f} times as fast: {fastest.plan.describe()}"
            share = share_of_fastest(each, found)
            yield f"{'':43}best:   {share:.3f} of the fastest measured time of its problem ({fastest.ids[0]})"
        if (each.is_much_slower or each.is_unsure) and each.reason:
            yield f"{'':43}why:    {each.reason}"
        for line in (*each.refusals, *((each.failure,) if each.failure else ())):
            yield f"{'':43}! {line}"
    gaps = [each.ratio for each in found if not each.failure]
    exceptions = [each for each in found if each.is_exception]
    much = [each for each in found if each.is_much_slower]
    yield ""
    unsure = [each for each in found if each.is_unsure]
    yield f"{len(found)} configurations: {len(exceptions)} priced below the best plan of a default search"
    yield f"{len(unsure)} more priced below it, whose memory the model does not call a fit"
    yield f"of the steps to best plans more than {MUCH_FASTER:.0%} faster, the longest by count: {longest_steps(much)}"
    if gaps:
        yield (
            f"time of a recipe over the best plan's: median {statistics.median(gaps):.3f}, least {min(gaps):.3f}, "
            f"most {max(gaps):.3f}; best plan more than {MUCH_FASTER:.0%} faster: {len(much)}"
        )
    untold = [each for each in much if "interleaving not told" in each.recipe.unknown]
    confirmed = [each for each in much if each not in untold and share_of_fastest(each, found) >= CONFIRMED]
    yield (
        f"of these, {len(untold)} are beside recipes whose interleaving is not told; of the others, {len(confirmed)} "
        f"best plans cost at least {CONFIRMED:.0%} of the fastest measured time of the same problem, and "
        f"{len(much) - len(untold) - len(confirmed)} cost less, which no measurement confirms"
    )


if __name__ == "__main__":
    sys.exit(main())
