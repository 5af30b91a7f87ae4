"""Laws that prices keep to, whatever the problem: what a better machine, more work or other names may change.

usage: python benchmarks/metamorphic.py [--problems N] [--minutes N] [--plans N] [--seed N] [--report FILE]

Problems are drawn as for `certificate.py`, with random legal plans of each.  Every plan is priced on the machine as it
is and on one that differs in one thing; a price that breaks a law is told, at once on stderr, and the exit status is 1.
Zero-bubble pipelines are priced pass by pass, which takes long: few plans of a problem have them.  No new problem
begins after `--minutes`.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from drawn_problems import Case, draw, draw_plans
from reports import make_parser, write_report

from autoplan.api.training_run import resized
from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.base.errors import AutoplanError
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.spec.enums import Offload, Recompute, Sharding
from autoplan.spec.estimate import CostEstimate, StageCost
from autoplan.spec.plan import ALL_LAYERS, FULL, SPLIT_SCHEDULES, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.topology.cluster import ClusterSpec

SEED = 11
ROUNDING = 1e-9  # relative: sums that are added up in another order
STATES = ("weights", "gradients", "optimizer")  # terms of memory
MAX_SPLIT = 6  # plans of a problem with zero-bubble pipelines
BETTER = 1.5  # how much faster or larger a part of the machine becomes

Change = Callable[[Problem], Problem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Plans of a problem with their prices as it is, which all laws compare with."""

    problem: Problem
    plans: PlanBatch
    costs: CostEstimate

    @classmethod
    def of(cls, problem: Problem, plans: PlanBatch) -> Priced:
        """Price the plans."""
        return cls(problem=problem, plans=plans, costs=estimate(problem, plans))


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Relation that must hold between the price of a plan as it is and after a change.

    `excess` returns the rows of the plans that the law speaks of, and by how much each of them breaks it: a share, 0 or
    less where it is kept.
    """

    name: str
    excess: Callable[[Priced], tuple[Ints, Floats]]


# -- changes of a problem ----------------------------------------------------------------------------------------------


def _on(problem: Problem, cluster: ClusterSpec) -> Problem:
    return replace(problem, cluster=cluster)


def with_faster_kernels(problem: Problem) -> Problem:
    """Return the problem on devices whose matrix units and memory are faster."""
    return _on(problem, replace(problem.cluster, device=problem.cluster.device.slowed(BETTER)))


def with_faster_links(problem: Problem) -> Problem:
    """Return the problem on nodes whose links, bridges and host links are faster."""
    cluster = problem.cluster
    levels = tuple(
        replace(
            level,
            bandwidth_bytes_per_s=BETTER * level.bandwidth_bytes_per_s,
            host_bridge_bytes_per_s=level.host_bridge_bytes_per_s and BETTER * level.host_bridge_bytes_per_s,
        )
        for level in cluster.levels
    )
    device = replace(cluster.device, host_link_bytes_per_s=BETTER * cluster.device.host_link_bytes_per_s)
    return _on(problem, replace(cluster, levels=levels, device=device))


def with_faster_network(problem: Problem) -> Problem:
    """Return the problem on a cluster whose NICs are faster."""
    network = replace(problem.cluster.network, nic_bytes_per_s=BETTER * problem.cluster.network.nic_bytes_per_s)
    return _on(problem, replace(problem.cluster, network=network))


def with_less_latency(problem: Problem) -> Problem:
    """Return the problem on a cluster whose messages start sooner."""
    cluster = problem.cluster
    levels = tuple(replace(level, latency_s=level.latency_s / BETTER) for level in cluster.levels)
    network = replace(cluster.network, latency_s=cluster.network.latency_s / BETTER)
    return _on(problem, replace(cluster, levels=levels, network=network))


def with_more_memory(problem: Problem) -> Problem:
    """Return the problem on devices with more memory."""
    device = problem.cluster.device
    return _on(
        problem,
        replace(
            problem.cluster,
            device=replace(
                device,
                memory_bytes=BETTER * device.memory_bytes,
                visible_memory_bytes=BETTER * device.visible_memory_bytes,
            ),
        ),
    )


def renamed(problem: Problem) -> Problem:
    """Return the problem with other names of model, cluster and device."""
    cluster = replace(problem.cluster, name="a", device=replace(problem.cluster.device, name="b"))
    return replace(problem, cluster=cluster, model=replace(problem.model, name="c"))


# -- laws --------------------------------------------------------------------------------------------------------------


def never_slower(name: str, change: Change) -> Law:
    """Return the law that no plan takes longer after a change."""

    def excess(priced: Priced) -> tuple[Ints, Floats]:
        after = estimate(change(priced.problem), priced.plans)
        return _all(priced), after.step_s / priced.costs.step_s - 1

    return Law(name=f"{name}: no plan is slower", excess=excess)


def _all(priced: Priced) -> Ints:
    return np.arange(len(priced.plans))


def _same_when_renamed(priced: Priced) -> tuple[Ints, Floats]:
    before, after = priced.costs, estimate(renamed(priced.problem), priced.plans)
    return _all(priced), np.maximum(
        np.abs(after.step_s / before.step_s - 1), np.abs(after.memory_bytes / before.memory_bytes - 1)
    )


def _longer_sequences(priced: Priced) -> tuple[Ints, Floats]:
    """Cached blocks are left out: what the allocator keeps depends on which sizes follow one another.

    The rank that is fullest with them may be another one than before, so that then all ranks are compared one by one.
    """
    problem, plans = priced.problem, priced.plans
    longer = replace(problem, training=replace(problem.training, seq_len=2 * problem.training.seq_len))
    before, after = priced.costs, estimate(longer, plans)
    shrinks = np.divide(*(costs.memory_bytes - costs.memory_terms_bytes["cached"] for costs in (before, after))) - 1
    for at in map(int, np.flatnonzero(shrinks > ROUNDING)):
        ranks = zip(*(stage_costs(each, plans.plan(at)) for each in (problem, longer)), strict=True)
        shrinks[at] = max(_without_cached(shorter) / _without_cached(own) - 1 for shorter, own in ranks)
    return _all(priced), np.maximum(before.step_s / after.step_s - 1, shrinks)


def _without_cached(cost: StageCost) -> float:
    return cost.memory_bytes - cost.memory_terms_bytes["cached"]


def _more_micro_batches(priced: Priced) -> tuple[Ints, Floats]:
    """Pipelines that gather their weights once a step are left out.

    Their gathers are spread over the micro-batches of a step, so that the fewer there are the longer a pipeline takes
    to fill.
    """
    rows = np.flatnonzero((priced.plans.pp == 1) | (priced.plans.sharding != Sharding.ZERO3.code))
    plans = priced.plans.take(rows)
    more = estimate(priced.problem, replace(plans, global_batch=2 * plans.global_batch))
    return rows, priced.costs.step_s[rows] / more.step_s - 1


def _more_replicas(priced: Priced) -> tuple[Ints, Floats]:
    """Pipelines are left out: their stages lie further apart then, and other links carry their groups.

    Four ranks of a node of eight that are linked one by one reduce half as fast as all eight.
    """
    rows = np.flatnonzero(priced.plans.pp == 1)
    plans = priced.plans.take(rows)
    larger = resized(priced.problem, 2 * priced.problem.cluster.num_nodes)
    more = replace(plans, dp_replicate=2 * plans.dp_replicate, global_batch=2 * plans.global_batch)
    before, after = priced.costs, estimate(larger, more)
    times = before.step_s[rows] / after.step_s
    return rows, np.maximum(times, before.memory_bytes[rows] / after.memory_bytes) - 1


def _never_larger(name: str, terms: tuple[str, ...], changed: Callable[[PlanBatch], tuple[Ints, PlanBatch]]) -> Law:
    """Return the law that a change of plans makes what a rank keeps in `terms` smaller, or its peak.

    `changed` returns the rows of the plans that the law speaks of, and what becomes of them.  Buffers may make up for
    what is kept, and a peak without them may come while others are alive.  The fullest rank may become another one, so
    that where its figures break the law all ranks are compared one by one.
    """

    def excess(priced: Priced) -> tuple[Ints, Floats]:
        rows, less = changed(priced.plans)
        before, after = priced.costs, estimate(priced.problem, less)
        had, kept = (add_up(costs.memory_terms_bytes[term] for term in terms) for costs in (before, after))
        grown = np.minimum(kept / np.maximum(had[rows], 1.0), after.memory_bytes / before.memory_bytes[rows]) - 1
        for at in map(int, np.flatnonzero(grown > ROUNDING)):
            plan, smaller = priced.plans.plan(int(rows[at])), less.plan(at)
            ranks = zip(stage_costs(priced.problem, plan), stage_costs(priced.problem, smaller), strict=True)
            grown[at] = max(_growth(*rank, terms) for rank in ranks)
        return rows, grown

    return Law(name=name, excess=excess)


def _growth(before: StageCost, after: StageCost, terms: tuple[str, ...]) -> float:
    """Growth of what a rank keeps in `terms`, or of its peak where that is less, as a share."""
    kept = [sum(cost.memory_terms_bytes.get(term, 0.0) for term in terms) for cost in (after, before)]
    return min(kept[0] / max(kept[1], 1.0), after.memory_bytes / before.memory_bytes) - 1


def _less_sharded(less: Sharding, more: Sharding) -> Law:
    """Return the law that sharding `more` makes the states smaller, or the peak."""

    def changed(plans: PlanBatch) -> tuple[Ints, PlanBatch]:
        rows = np.flatnonzero((plans.sharding == less.code) & (plans.dp * plans.cp > 1))
        return rows, replace(plans.take(rows), sharding=np.full(len(rows), more.code))

    return _never_larger(f"{less} to {more}: no plan needs more memory", STATES, changed)


def _repeating_all(plans: PlanBatch) -> tuple[Ints, PlanBatch]:
    rows = np.flatnonzero(plans.recompute == Recompute.NONE.code)
    everywhere, layers = np.full(len(rows), FULL), np.full(len(rows), ALL_LAYERS)
    return rows, replace(plans.take(rows), recompute=everywhere, recompute_num_layers=layers)


def _with_optimizer_on_host(plans: PlanBatch) -> tuple[Ints, PlanBatch]:
    rows = np.flatnonzero(plans.offload == Offload.NONE.code)
    return rows, replace(plans.take(rows), offload=np.full(len(rows), Offload.OPTIMIZER.code))


LAWS = (
    never_slower("faster kernels", with_faster_kernels),
    never_slower("faster links", with_faster_links),
    never_slower("a faster network", with_faster_network),
    never_slower("less latency", with_less_latency),
    never_slower("more memory", with_more_memory),
    Law(name="other names: the same", excess=_same_when_renamed),
    Law(name="twice the sequence: no plan is faster or smaller", excess=_longer_sequences),
    Law(name="twice the micro-batches: no plan is faster", excess=_more_micro_batches),
    Law(name="twice the nodes, replicas and batch: no plan is faster or smaller", excess=_more_replicas),
    _less_sharded(Sharding.ZERO1, Sharding.ZERO2),
    _less_sharded(Sharding.ZERO2, Sharding.ZERO3),
    _never_larger("full recomputation: no plan needs more memory", ("activations",), _repeating_all),
    _never_larger("optimizer on the host: no plan needs more memory", STATES, _with_optimizer_on_host),
)


# -- problems ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Count of what was priced, and what broke a law."""

    problems: int = 0
    plans: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)


def cases(rng: np.random.Generator, count: int, num_plans: int) -> Iterator[tuple[Case, PlanBatch]]:
    """Yield so many random problems with random legal plans."""
    while count:
        case = draw(rng, is_large=bool(rng.random() < 0.3))
        if case is None:
            continue
        plans = with_few_split(draw_plans(case.space, case.space.cells(), rng, num_plans))
        if len(plans):
            count -= 1
            yield case, plans


def with_few_split(plans: PlanBatch) -> PlanBatch:
    """Return the plans, of those with zero-bubble pipelines the first few."""
    is_split = np.isin(plans.schedule, list(SPLIT_SCHEDULES))
    return plans.take(np.flatnonzero(~is_split | (np.cumsum(is_split) <= MAX_SPLIT)))


def check(tally: Tally, case: Case, plans: PlanBatch) -> None:
    """Hold the prices of `plans` against every law, and add what breaks one to the tally."""
    tally.problems += 1
    tally.plans += len(plans)
    priced = Priced.of(case.problem, plans)
    for law in LAWS:
        try:
            rows, excess = law.excess(priced)
        except AutoplanError:  # such as a longer sequence than the model has positions
            continue
        bad = np.flatnonzero(excess > ROUNDING)
        tally.broken[law.name] += len(bad)
        if len(bad):
            worst = int(bad[np.argmax(excess[bad])])
            plan = plans.plan(int(rows[worst])).describe()
            tally.examples.append(f"{excess[worst]:.2%} {law.name}: {plan}: {case.command}")
            print(tally.examples[-1], file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Draw problems, check the laws, print what breaks them; 1 where anything does."""
    parser = make_parser(__doc__)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no problem begins")
    parser.add_argument("--plans", type=int, default=40, help="random plans of each problem")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args(arguments)
    tally, start, until_s = Tally(), time.process_time(), time.monotonic() + 60 * options.minutes
    for case, plans in cases(np.random.default_rng(options.seed), options.problems, options.plans):
        check(tally, case, plans)
        if tally.problems % 50 == 0:
            print(f"{tally.problems} problems, {tally.broken.total()} broken", file=sys.stderr, flush=True)
        if time.monotonic() >= until_s:
            break
    lines = [
        f"{tally.problems} problems, {tally.plans:,} plans, seed {options.seed}, "
        f"{time.process_time() - start:.0f} s of CPU time",
        *(f"{tally.broken[law.name]:7,} break {law.name}" for law in LAWS),
        *tally.examples,
    ]
    print("\n".join(lines))
    if options.report:
        write_report(options.report, "Laws that prices keep to", "`python benchmarks/metamorphic.py`", "\n".join(lines))
    return int(tally.broken.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
