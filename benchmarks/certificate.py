"""Certificates of searches, checked by full enumeration, and by random plans where there are too many.

usage: python benchmarks/certificate.py [--small N] [--large N] [--plans N] [--seed N] [--report FILE]

Small problems are drawn at random: any preset of a model on 1 to 64 devices of any preset of a cluster, any framework
whose rules are known, and random --forbid, --fix, --max and objectives.  Every legal plan of their spaces is priced by
the estimate.  Those too large for that have 256 to 16,384 devices and many axes: plans are drawn, half of them from all
cells alike and half from the cell of the best plan; one of the former has to fit.  Rows are told as they come, on
stderr.  Anything wrong is told, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from drawn_problems import FEW, Case, Rng, draw, draw_plans, kind_of
from numpy.typing import NDArray

from autoplan.base.arrays import Floats, Ints
from autoplan.base.errors import AutoplanError, NoPlanError
from autoplan.base.files import write_text
from autoplan.cost.energy import step_energy_j
from autoplan.cost.estimate import estimate
from autoplan.search.cells import DEGREES, Cell
from autoplan.search.findings import KEPT
from autoplan.search.objectives import OBJECTIVES, Run, costs_of, figures_at, find_objectives
from autoplan.search.ranking import ordering, seconds_per_sequence
from autoplan.search.sampler import Sampling
from autoplan.search.sizes import search_sizes
from autoplan.search.study import MARGIN, search
from autoplan.spec.axes import AXIS
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import SearchResult

SEED = 7
MAX_ENUMERATED = 16_000  # plans of a small problem
MAX_OBJECTIVES = 4_000  # plans of one whose objectives are compared, size by size
# Plans of a large problem; with a range of batches, each of which is a space of its own.
MIN_REPRESENTED, MAX_REPRESENTED, MAX_OF_RANGES = 500_000, 30_000_000, 3_000_000
BLOCK_PLANS = 2048  # priced at once
SAME = 1e-12  # steps this close are equal: the sums of larger batches may be added up in another order
TIE = 1e-8  # costs this close are equal: fronts take steps of 1e-9 in their logarithms

# -- what is compared --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Priced:
    """Plans and what the estimate says of them."""

    batch: PlanBatch
    pace: Floats  # seconds per sequence
    joules: Floats  # per sequence
    memory: Floats  # bytes
    verdict: Ints

    @classmethod
    def of(cls, problem: Problem, batch: PlanBatch) -> Priced:
        """Join them, block by block."""
        columns: list[tuple[NDArray[Any], ...]] = []
        for at in range(0, len(batch), BLOCK_PLANS):
            costs = estimate(problem, batch.take(np.arange(at, min(at + BLOCK_PLANS, len(batch)))))
            joules = step_energy_j(problem.cluster, costs.terms_s, costs.step_s) / costs.batch.global_batch
            columns.append((seconds_per_sequence(costs), joules, costs.memory_bytes, costs.verdict))
        if not columns:
            return cls(batch=batch, pace=np.empty(0), joules=np.empty(0), memory=np.empty(0), verdict=np.empty(0, int))
        pace, joules, memory, verdict = (np.concatenate(column) for column in zip(*columns, strict=True))
        return cls(batch=batch, pace=pace, joules=joules, memory=memory, verdict=verdict)

    def wanted(self) -> Ints:
        """Plans that fit; where none does, those that may."""
        return np.flatnonzero(self.verdict == min(int(self.verdict.min(initial=2)), 1))


def wrong_with_search(case: Case, priced: Priced, result: SearchResult) -> Iterator[str]:
    """Contradictions of a search by full enumeration."""
    space, certificate = case.space, result.certificate
    candidates = space.candidates(space.cells())
    names = [name for name in PlanBatch.__slots__ if name not in ("layouts", "placement")]
    if len(candidates) and len(candidates.distinct(*names)[0]) != len(candidates):
        yield "a plan is counted twice"
    if certificate.plans != len(candidates):
        yield f"the certificate represents {certificate.plans} plans, there are {len(candidates)}"
    wanted = priced.wanted()
    if not len(wanted):
        closest = result.closest
        if result.ranked or (closest is None) != (not len(priced.batch)):
            yield "a plan was found where none fits, or none was told where there is one that does not"
        elif closest and closest.memory_bytes > priced.memory.min() * (1 + SAME):
            yield f"the closest plan needs {closest.memory_bytes}, another one {priced.memory.min()}"
        return
    pace, batch = priced.pace[wanted], priced.batch.take(wanted)
    near = np.flatnonzero(pace <= pace.min() * (1 + MARGIN))
    near = near[ordering(pace[near], batch.take(near))]
    if not result.ranked:
        yield f"{len(wanted)} plans fit, none was found"
        return
    best = result.ranked[0]
    if best.plan != batch.plan(int(near[0])) or abs(best.s_per_sequence / pace[near[0]] - 1) > SAME:
        yield f"{best.plan.describe()} was found, {batch.plan(int(near[0])).describe()} is best"
    if [plan.plan for plan in result.ranked] != [batch.plan(int(at)) for at in near[:KEPT]]:
        yield f"{len(result.ranked)} of {len(near)} plans within {MARGIN:.0%} are listed, or in another order"
    if not certificate.proven or certificate.best_step_s != best.step_s:
        yield "the best plan is not proven, or the certificate is of another one"


def wrong_with_gap(case: Case, best: float | None, seed: int) -> Iterator[str]:
    """Contradiction, by the proven best, of the gap that a search of a few random cells states."""
    try:
        result = search(case.problem, case.space, sampling=Sampling(name="random", trials=3, seed=seed, warm=False))
    except NoPlanError:
        return
    found, least = result.ranked[0].s_per_sequence, result.certificate.least_left
    if best is None or found < best * (1 - SAME):
        yield f"random cells hold a plan of {found}, the best is {best}"
    elif best < found * (1 - SAME) and (
        least is None or result.certificate.proven or best < least * found * (1 - SAME)
    ):
        yield f"a gap to {least} of the best plan found is stated, the best is at {best / found}"


def wrong_with_objectives(case: Case, rng: Rng) -> Iterator[str]:
    """Contradictions of a search for random objectives by full enumeration of some sizes of the cluster."""
    names = rng.choice(list(OBJECTIVES), size=int(rng.integers(1, 4)), replace=False).tolist()
    objectives = find_objectives(names)
    priced_cluster = replace(case.problem.cluster, price_per_device_hour=2.0)
    case = replace(case, problem=replace(case.problem, cluster=priced_cluster))
    nodes = priced_cluster.num_nodes
    sizes = sorted({nodes, max(nodes // 2, 1)})
    run = Run(tokens=1e12, device_hours=None if rng.random() < 0.5 else 1e15)
    if "tokens" in names:
        run = replace(run, device_hours=1e15)
    rows: list[tuple[int, tuple[float, ...], float]] = []  # verdict, costs, seconds of the run
    for size in sizes:
        problem, space = case.on(size)
        batch, _ = space.plans(space.cells())
        if not 0 < len(batch) <= MAX_OBJECTIVES:
            return
        priced = Priced.of(problem, batch)
        for at in priced.wanted().tolist():
            figures = figures_at(
                problem,
                run,
                seconds_per_sequence=float(priced.pace[at]),
                joules_per_sequence=float(priced.joules[at]),
                memory_bytes=float(priced.memory[at]),
            )
            rows.append((int(priced.verdict[at]), costs_of(objectives, figures), figures.run_s or 0.0))
    if rows and rng.random() < 0.4:
        run = replace(run, deadline_s=float(np.quantile([row[2] for row in rows], rng.uniform(0.05, 1))) * (1 + TIE))
    rows = [row for row in rows if run.deadline_s is None or row[2] <= run.deadline_s]
    safest = min((row[0] for row in rows), default=0)
    costs = np.array([row[1] for row in rows if row[0] == safest])
    asked = f"{', '.join(names)} on {sizes} nodes"
    try:
        front = search_sizes(sizes, case.on, objectives, run, barred=AXIS).report.front  # in the spaces alone
    except AutoplanError as error:
        if len(costs):
            yield f"{asked}: {error}, though {len(costs)} plans would do"
        return
    if not len(costs):
        yield f"{asked}: a plan was found, though none will do"
        return
    found = np.array([costs_of(objectives, costs_of_plan.figures) for costs_of_plan in front])
    for row_costs in found:
        if not (np.abs(costs / row_costs - 1) <= TIE).all(axis=1).any():
            yield f"{asked}: no plan costs {row_costs}"
        if ((costs <= row_costs * (1 + TIE)).all(axis=1) & (costs < row_costs * (1 - TIE)).any(axis=1)).any():
            yield f"{asked}: what costs {row_costs} is beaten"
    left = costs
    for row_costs in found:
        left = left[~(row_costs <= left * (1 + TIE)).all(axis=1)]
    if len(left):
        yield f"{asked}: {len(left)} plans of the front are missing, such as {left[0]}"


def wrong_with_plans(priced: Priced, result: SearchResult) -> Iterator[str]:
    """Contradictions of a search by any plans."""
    best = result.ranked[0] if result.ranked else None
    verdict = VERDICTS.index(best.verdict) if best else len(VERDICTS) - 1
    safer = np.flatnonzero(priced.verdict < verdict)
    if len(safer):
        yield f"{priced.batch.plan(int(safer[0])).describe()} is {VERDICTS[int(priced.verdict[safer[0]])]}"
    if best is not None:
        pace = np.where(priced.verdict == verdict, priced.pace, np.inf)
        if pace.min(initial=np.inf) < best.s_per_sequence * (1 - SAME):
            yield f"{priced.batch.plan(int(np.argmin(pace))).describe()} is better than {best.plan.describe()}"
    elif result.closest and len(priced.batch) and priced.memory.min() < result.closest.memory_bytes * (1 - SAME):
        yield "the closest plan is not the one that needs least memory"


def cell_of(plan: ParallelPlan) -> Cell:
    """Cell of a plan."""
    return Cell(**{name: getattr(plan, name) for name in DEGREES})


# -- what is told ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Counts over small problems."""

    problems: int = 0
    enumerated: int = 0
    priced: int = 0  # by the searches
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def small(rng: Rng, count: int) -> Tally:
    """Search and enumerate so many small problems."""
    tally = Tally()
    while tally.problems < count:
        case = draw(rng, is_large=False)
        if case is None or case.space.size(case.space.cells()) > MAX_ENUMERATED:
            continue
        batch, _ = case.space.plans(case.space.cells())
        if not len(batch) and rng.random() >= FEW:
            continue
        tally.problems += 1
        result = search(case.problem, case.space)
        priced = Priced.of(case.problem, batch)
        best = result.ranked[0].s_per_sequence if result.ranked else None
        wrong = [
            *wrong_with_search(case, priced, result),
            *wrong_with_gap(case, best, int(rng.integers(1000))),
            *wrong_with_objectives(case, rng),
        ]
        tally.wrong += [f"{case.command}: {text}" for text in wrong]
        tally.enumerated += len(batch)
        tally.priced += result.certificate.priced
        outcome = result.ranked[0].verdict if result.ranked else "too large" if len(batch) else "empty"
        tally.kinds.update((kind_of(case.problem.model), outcome, f"rules of {case.problem.framework.rules}"))
    return tally


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """A large problem."""

    command: str
    wall_s: float
    result: SearchResult
    drawn: int
    fitting: int
    nearest: float  # pace of the best random plan over that of the best
    wrong: tuple[str, ...]


def large(rng: Rng, count: int, num_plans: int) -> Iterator[Large]:
    """Yield so many large problems, each searched beside so many random plans."""
    while count:
        case = draw(rng, is_large=True)
        if case is None:
            continue
        cells = case.space.cells()
        most = MAX_OF_RANGES if ":" in case.batch else MAX_REPRESENTED
        if not MIN_REPRESENTED <= case.space.size(cells) <= most:
            continue
        if case_result := beside_plans(case, rng, num_plans):
            count -= 1
            yield case_result


def beside_plans(case: Case, rng: Rng, num_plans: int) -> Large | None:
    """A search beside random plans, of which one at least has to fit."""
    cells, half = case.space.cells(), -(-num_plans // 2)
    anywhere = Priced.of(case.problem, draw_plans(case.space, cells, rng, half))
    if not (anywhere.verdict == 0).any():
        return None
    start = time.perf_counter()
    result = search(case.problem, case.space)
    wall_s = time.perf_counter() - start
    best = result.ranked[0]
    others = Priced.of(case.problem, draw_plans(case.space, [cell_of(best.plan)], rng, half))
    fitting = np.concatenate([priced.pace[priced.verdict == 0] for priced in (anywhere, others)])
    return Large(
        command=case.command,
        wall_s=wall_s,
        result=result,
        drawn=len(anywhere.batch) + len(others.batch),
        fitting=len(fitting),
        nearest=float(fitting.min()) / best.s_per_sequence,
        wrong=tuple(
            f"{case.command}: {text}" for priced in (anywhere, others) for text in wrong_with_plans(priced, result)
        ),
    )


def _row(row: Large) -> str:
    found = row.result.certificate
    least = "all priced" if found.least_left is None else f"{100 * (found.least_left - 1):.1f} %"
    cells = (
        f"`{row.command}`",
        f"{found.plans:,}",
        f"{found.bounded:,}",
        f"{found.priced:,}",
        f"{row.wall_s:.2f}",
        "proven" if found.proven else "not proven",
        least,
        f"{row.drawn:,}",
        f"{row.fitting:,}",
        f"{row.nearest:.4f}",
    )
    return "| " + " | ".join(cells) + " |"


def report(tally: Tally, rows: Sequence[Large], seed: int, cpu_s: float) -> str:
    """Report of both parts."""
    wrong = [*tally.wrong, *(text for row in rows for text in row.wrong)]
    gaps = [row for row in rows if not row.result.certificate.proven]
    lines = [
        f"# Certificates beside full enumeration and random plans, {datetime.date.today()}",
        "",
        f"`python benchmarks/certificate.py`, seed {seed}: {cpu_s:.0f} s of CPU time, "
        f"Python {platform.python_version()}, numpy {np.__version__}.",
        "",
        f"## {tally.problems} random problems beside full enumeration",
        "",
        f"{tally.enumerated:,} legal plans were priced one by one; the searches priced "
        f"{100 * tally.priced / max(tally.enumerated, 1):.1f} % as many. "
        + ", ".join(f"{kind}: {count}" for kind, count in sorted(tally.kinds.items()))
        + ".",
        "",
        "Compared, each exactly: the best plan and its step, all plans within 5 % of it and their order, the number of "
        "plans represented, each of them once; the plan nearest to fitting where none fits; the best or the front for "
        "one to three random objectives over one or two sizes, with and without a deadline; and that the gap which a "
        "search of three random cells states holds the best.",
        "",
        f"Wrong: {len(tally.wrong)}.",
        "",
        f"## {len(rows)} problems too large to price",
        "",
        f"Gap 0 (proven) in {len(rows) - len(gaps)}; {sum(row.drawn for row in rows):,} random legal plans, of which "
        f"{sum(row.fitting for row in rows):,} fit: {sum(len(row.wrong) for row in rows)} beat the best. `beyond`: the "
        "least bound of what was not priced; `nearest`: the best random plan over the best.",
        "",
        "| problem | plans | bounds | priced | wall s | | beyond | drawn | fit | nearest |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|",
        *map(_row, rows),
        "",
        *([f"- {text}" for text in wrong] and ["## Wrong", "", *(f"- {text}" for text in wrong), ""]),
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the report, and write it where `--report` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=200)
    parser.add_argument("--large", type=int, default=50)
    parser.add_argument("--plans", type=int, default=2000, help="random ones of each large problem")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--report", type=Path)
    flags = parser.parse_args()
    rng, start = np.random.default_rng(flags.seed), time.process_time()
    tally = small(rng, flags.small)
    rows = []
    for found in large(rng, flags.large, flags.plans):
        rows.append(found)
        print(_row(found), *found.wrong, file=sys.stderr, flush=True)
    text = report(tally, rows, flags.seed, time.process_time() - start)
    print(text)
    if flags.report:
        write_text(flags.report, text, force=True)
    sys.exit(bool(tally.wrong or any(row.wrong for row in rows)))


if __name__ == "__main__":
    main()
