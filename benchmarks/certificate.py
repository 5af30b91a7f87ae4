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
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.api.problem import make_problem, make_space
from autoplan.api.training_run import resized
from autoplan.base.arrays import Floats, Ints
from autoplan.base.errors import AutoplanError, NoPlanError
from autoplan.base.files import write_text
from autoplan.cost.energy import step_energy_j
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.frameworks.common.rules import legal
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.model import load_model, preset_models
from autoplan.search.cells import DEGREES, Cell
from autoplan.search.findings import KEPT
from autoplan.search.flags import EXTENTS, FORBIDDEN
from autoplan.search.limits import COUNTS
from autoplan.search.objectives import OBJECTIVES, Run, costs_of, figures_at, find_objectives
from autoplan.search.ranking import ordering, seconds_per_sequence
from autoplan.search.sampler import Sampling
from autoplan.search.sizes import search_sizes
from autoplan.search.space import Space
from autoplan.search.study import MARGIN, search
from autoplan.spec.axes import AXIS, SEARCHED, shown
from autoplan.spec.axis import Kind
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import SearchResult

SEED = 7
MAX_ENUMERATED = 16_000  # plans of a small problem
STATE_BYTES = 18  # of a parameter: with less memory in all hardly a plan fits
KEPT_SCHEDULES = 0.1  # share of the further schedules of a framework that a search keeps
FEW = 0.1  # of the problems that have no plan, or hardly one that fits, are taken
MAX_OBJECTIVES = 4_000  # plans of one whose objectives are compared, size by size
SMALL_NODES, SMALL_DEVICES = (1, 2, 3, 4, 6, 8), (1, 2, 4, 6, 8, 16)
LARGE_NODES = (32, 48, 64, 96, 128, 192, 256, 512, 768, 1024, 2048)
LARGE_DEVICES = 16_384
# Plans of a large problem; with a range of batches, each of which is a space of its own.
MIN_REPRESENTED, MAX_REPRESENTED, MAX_OF_RANGES = 500_000, 30_000_000, 3_000_000
BLOCK_PLANS = 2048  # priced at once
DRAWN_CELLS = 512  # at once
MAX_DRAWS = 20  # of this many cells, until a space is taken to hold too few legal plans
SAME = 1e-12  # steps this close are equal: the sums of larger batches may be added up in another order
TIE = 1e-8  # costs this close are equal: fronts take steps of 1e-9 in their logarithms

Rng = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A problem with its space, as the command line makes them, and the command."""

    command: str
    batch: str
    space_flags: dict[str, Any]
    problem: Problem
    space: Space

    def on(self, num_nodes: int) -> tuple[Problem, Space]:
        """Return the problem on this many nodes."""
        problem = resized(self.problem, num_nodes)
        return problem, make_space(problem, self.batch, **self.space_flags)


# -- what is drawn -----------------------------------------------------------------------------------------------------


@cache
def _models() -> dict[str, list[str]]:
    """The presets of every kind of model."""
    found: dict[str, list[str]] = {}
    for name in preset_models():
        found.setdefault(kind_of(load_model(name)), []).append(name)
    return found


@cache
def _frameworks() -> dict[str, list[str]]:
    """The presets that keep to every book of rules."""
    found: dict[str, list[str]] = {}
    for name in preset_frameworks():
        found.setdefault(load_framework(name).rules, []).append(name)
    found.pop("unknown")
    return found


def _one_of(kinds: dict[str, list[str]], rng: Rng) -> str:
    """Kinds are as likely as one another, however many there are of each."""
    return str(rng.choice(kinds[str(rng.choice(list(kinds)))]))


def draw_model(rng: Rng) -> str:
    """Return a random preset of a model; kinds of models are equally likely."""
    return _one_of(_models(), rng)


def kind_of(model: ModelSpec) -> str:
    """Kind of its layers."""
    return "hybrid" if model.layer_pattern else "MLA" if model.mla else "MoE" if model.moe else "dense"


def draw(rng: Rng, *, is_large: bool, is_narrowed: bool = True) -> Case | None:
    """A random problem, its space narrowed at random or whole; None where what was drawn does not go together."""
    name, nodes = str(rng.choice(preset_clusters())), int(rng.choice(LARGE_NODES if is_large else SMALL_NODES))
    devices = load_cluster(name).devices_per_node if is_large else int(rng.choice(SMALL_DEVICES))
    if not (256 <= nodes * devices <= LARGE_DEVICES if is_large else nodes * devices <= 64):
        return None
    parts: dict[str, Any] = {
        "model": _one_of(_models(), rng),
        "cluster": f"{name}:{nodes}x{devices}",
        "precision": str(rng.choice(["bf16", "bf16", "fp16", "fp8"])),
        "framework": _one_of(_frameworks(), rng),
    }
    seq_len = int(rng.choice((1024, 2048, 4096, 8192, 32768)))
    usual = nodes * devices * int(rng.choice((1, 2, 3, 4, 8)))
    batch = f"{usual}:{usual * 3 // 2}" if rng.random() < 0.25 else str(usual if rng.random() < 0.9 else usual // 2 + 1)
    space_flags: dict[str, Any] = {"fix": [], "at_most": [], "forbid": []}
    try:
        problem = make_problem(**parts, seq_len=seq_len)
        # Sometimes with so little memory that only few plans fit.
        if rng.random() < 0.3:
            problem = replace(problem, reserve_bytes=float(rng.uniform(0.3, 0.95)) * problem.capacity_bytes)
        states = STATE_BYTES * count_parameters(problem.model)
        if states > problem.capacity_bytes * problem.cluster.num_devices and rng.random() >= FEW:
            return None
        if is_narrowed:
            space_flags["forbid"] = _forbidden(rng, problem, batch, 0.3 if is_large else 0.8)
        space = make_space(problem, batch, **space_flags)
        if is_narrowed and rng.random() < (0.2 if is_large else 0.6):
            space_flags |= _narrowing(rng, space)
            space = make_space(problem, batch, **space_flags)
    except AutoplanError:
        return None
    words = [parts.pop("model"), *(f"--{key} {value}" for key, value in parts.items())]
    words += [f"--global-batch {batch}", f"--seq-len {seq_len}"]
    words += [
        f"--{key} {value}"
        for key, flag in zip(("fix", "max", "forbid"), space_flags, strict=True)
        for value in space_flags[flag]
    ]
    if problem.reserve_bytes:
        words.append(f"--reserve-memory {problem.reserve_bytes / 2**30:.3f}GiB")
    return Case(command=" ".join(words), batch=batch, space_flags=space_flags, problem=problem, space=space)


def _forbidden(rng: Rng, problem: Problem, batch: str, share: float) -> list[str]:
    """Random share of the choices that this framework offers beside the plain ones."""
    plain = {f"{axis.name}={shown(axis.default)}" for axis in SEARCHED} | {"recompute=none", "sp=off", "sp=on"}
    choices = {choice for choice in FORBIDDEN if "=" in choice or choice in EXTENTS}
    found: list[str] = []
    for choice in sorted(choices - plain):
        # Zero-bubble pipelines are priced pass by pass, which takes long where there are many micro-batches.
        if rng.random() >= (1.0 - KEPT_SCHEDULES if choice.startswith("schedule=") else share):
            continue
        try:
            make_space(problem, batch, fix=[], at_most=[], forbid=[*found, choice])
        except AutoplanError:
            continue
        found.append(choice)
    return found


def _narrowing(rng: Rng, space: Space) -> dict[str, list[str]]:
    """An axis that is fixed to its value in some plan, or bounded by it."""
    plans = draw_plans(space, space.cells(), rng, 1)
    if not len(plans):
        return {}
    plan = plans.plan(0)
    if rng.random() < 0.5:
        axis = str(rng.choice((*COUNTS, *(axis.name for axis in SEARCHED if axis.kind is Kind.WORD))))
        return {"fix": [f"{axis}={getattr(plan, axis)}"]}
    axis = str(rng.choice(COUNTS))
    return {"at_most": [f"{axis}={getattr(plan, axis)}"]}


def draw_plans(space: Space, cells: Sequence[Cell], rng: Rng, count: int) -> PlanBatch:
    """Draw legal plans, fewer where they are rare: of a random cell a random group, kind and plan of the kind."""
    parts: list[PlanBatch] = []
    for _ in range(MAX_DRAWS if cells else 0):
        drawn_cells = [cells[at] for at in rng.integers(len(cells), size=min(DRAWN_CELLS, 2 * count))]
        groups, owner = space.groups(drawn_cells)
        rows = _one_each(owner, rng)
        groups, owner = groups.take(rows), owner[rows]
        kinds, of_group = space.kinds(drawn_cells, groups, owner)
        kinds, of_kind = space.shared(kinds.take(_one_each(of_group, rng)))
        kinds = kinds.take(_one_each(of_kind, rng))
        for inside, kind in space.alike(kinds):
            if len(inside):
                plans = space.plans_of(kinds, inside, kind, rng.integers(len(inside), size=len(kind)))
                parts.append(plans.take(legal(space.rules, space.workload, plans)))
        if sum(map(len, parts)) >= count:
            break
    if not parts:
        return space.candidates([])
    return PlanBatch.concatenate(parts).take(np.arange(min(count, sum(map(len, parts)))))


def _one_each(owner: Ints, rng: Rng) -> Ints:
    """A random row of each owner."""
    order = rng.permutation(len(owner))
    return order[np.unique(owner[order], return_index=True)[1]]


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
