"""Search for the fastest plan of a mixed cluster: structures of pipelines within limits, the best ones refined."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from autoplan.cost.memory.recompute import stores_scores
from autoplan.frameworks.registry import book_of
from autoplan.search.limits import default_limits
from autoplan.search.mixed_refinement import Accepts, RefinedStructure, Refiner, accept_all, ordered
from autoplan.search.space import Space
from autoplan.search.structures import LEAST_USED, MAX_STAGES, Pipelines, Structure, groupings, pipelines
from autoplan.search.study import search
from autoplan.spec.enums import Recompute, Sharding
from autoplan.spec.estimate import RISKY_Z
from autoplan.spec.mixed_problem import MixedProblem, common_axes
from autoplan.spec.mixed_result import MixedCertificate, MixedResult
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan

KEPT_PIPELINES = 3  # of every group of parts, taken on to be combined
KEPT_STRUCTURES = 4  # of every set of parts in use, whose other choices are looked at
KEPT_CHOICES = 2  # of them, whose kinds are given different micro-batches
KEPT_PLANS = 20
MICRO_BATCHES = (1, 2, 4, 8)

# What is left out, in words.
LIMITS = (
    "every group of parts forms equal pipelines, whose stages on one part have one tp; parts may be idle",
    f"at least {LEAST_USED:.0%} of the devices of a group in use, at most {MAX_STAGES} stages",
    "tp a power of two in the scale-up domain; of three parts and more the same on all",
    "parts in the order of their memory, of two also the reverse",
    f"the best {KEPT_PIPELINES} pipelines of every group combined; micro-batches, sharding and recomputation of the "
    f"best {KEPT_STRUCTURES} structures of every set of parts in use",
    f"micro-batch {'|'.join(map(str, MICRO_BATCHES))}, 1f1b without interleaving, cp 1, ep 1",
)
STARTED = "what the framework starts: one tp and one cut of the layers on all parts"


def _refine_plainly(
    refiner: Refiner, ways: Iterable[tuple[Pipelines, ...]], shardings: Sequence[Sharding]
) -> list[RefinedStructure]:
    """Refine structures with one sequence a micro-batch and sharded states.

    Those that do not fit are refined with recomputation too.
    """
    plain = [
        Structure(kinds=kinds, micro_batches=(1,) * len(kinds), common=common_axes(refiner.problem, sharding=sharding))
        for kinds in ways
        for sharding in _possible(kinds, shardings)
        if sharding != "none"
    ]
    refined = refiner.refine(plain)
    fitting = {candidate.structure for candidate in refined if candidate.cost.oom_z <= RISKY_Z}
    return ordered(
        refined
        + refiner.refine(
            replace(each, common=replace(each.common, recompute=Recompute.FULL))
            for each in plain
            if each not in fitting
        )
    )


def _possible(kinds: tuple[Pipelines, ...], shardings: Sequence[Sharding]) -> list[Sharding]:
    """Return shardings that are priced: over parts, weights and gradients travel between replicas of one stage only."""
    is_deep = any(len(kind.places) > 1 for kind in kinds)
    return [sharding for sharding in shardings if sharding in ("none", "zero1") or not is_deep]


def _other_choices(
    problem: MixedProblem, kinds: tuple[Pipelines, ...], shardings: Sequence[Sharding], recomputes: Sequence[Recompute]
) -> Iterator[Structure]:
    """Yield other choices of a structure: micro-batches, alike on all kinds, sharding and recomputation."""
    for micro, sharding, recompute in itertools.product(MICRO_BATCHES, _possible(kinds, shardings), recomputes):
        common = common_axes(problem, sharding=sharding, recompute=recompute)
        yield Structure(kinds=kinds, micro_batches=(micro,) * len(kinds), common=common)


def _other_micro_batches(structure: Structure) -> Iterator[Structure]:
    """Yield the structure with another micro-batch on one of its kinds."""
    sizes = structure.micro_batches
    for at, micro in itertools.product(range(len(structure.kinds)), MICRO_BATCHES):
        yield replace(structure, micro_batches=(*sizes[:at], micro, *sizes[at + 1 :]))


def _subsets(parts: Sequence[int]) -> list[tuple[int, ...]]:
    return [group for size in range(1, len(parts) + 1) for group in itertools.combinations(parts, size)]


def best_alone(problem: MixedProblem, part: int, global_batch: int) -> RankedPlan | None:
    """Return the best plan of one part by itself, of all plans that a search on it covers; None where none fits."""
    own: Problem = problem.as_if(part, frozenset((part,)))
    rules = book_of(own.framework).rules
    space = Space(workload=own.workload, limits=default_limits(own, (global_batch,)), rules=rules)
    ranked = search(own, space).ranked if space.cells() else ()
    return ranked[0] if ranked else None


def search_mixed(
    problem: MixedProblem,
    global_batch: int,
    shardings: Sequence[Sharding] = (Sharding.NONE, Sharding.ZERO1),
    accepts: Accepts | None = None,
) -> MixedResult:
    """Find the best plans, and how far they stay behind the sum of the rates that the parts reach alone.

    `accepts` says which plans the framework starts, all of whose stages have one tensor-parallel degree.
    """
    refiner = Refiner(problem, global_batch, accepts or accept_all)
    parts = range(len(problem.cluster.parts))
    structures: set[tuple[Pipelines, ...]] = set()
    best_of: dict[tuple[int, ...], list[Pipelines]] = {}
    refined: list[RefinedStructure] = []
    for group in _subsets(parts):
        ways = [way for way in pipelines(problem, group, global_batch) if accepts is None or way.has_one_tp]
        structures |= {(way,) for way in ways}
        of_group = _refine_plainly(refiner, [(way,) for way in ways], shardings)
        best_of[group] = list(dict.fromkeys(candidate.structure.kinds[0] for candidate in of_group))[:KEPT_PIPELINES]
        refined += of_group
    combined = {
        kinds
        for grouping in groupings(parts)
        if len(grouping) > 1
        for kinds in itertools.product(*(best_of[group] for group in grouping))
    }
    structures |= combined
    refined += _refine_plainly(refiner, sorted(combined, key=repr), shardings)

    # Their plain choices say which structures are worth others.  Every set of parts has its own, so that one part more
    # takes nothing away.
    shortlist = list(dict.fromkeys(structure.kinds for structure in _best_by_parts(refined, KEPT_STRUCTURES)))
    scores = stores_scores(problem.as_if(0, frozenset((0,))))
    recomputes: list[Recompute] = (
        [Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL] if scores else [Recompute.NONE, Recompute.FULL]
    )
    refined += refiner.refine(
        structure for kinds in shortlist for structure in _other_choices(problem, kinds, shardings, recomputes)
    )
    refined += refiner.refine(
        other for structure in _best_by_parts(refined, KEPT_CHOICES) for other in _other_micro_batches(structure)
    )
    limits = (*LIMITS, STARTED) if accepts else LIMITS
    return _result(problem, global_batch, refined, len(structures), refiner.num_priced, limits)


def _best_by_parts(refined: Iterable[RefinedStructure], most: int) -> list[Structure]:
    """Return, for every set of parts, the structures with its best plans: at most `most` ways to form pipelines."""
    kept: dict[frozenset[int], dict[tuple[Pipelines, ...], Structure]] = defaultdict(dict)
    for candidate in ordered(refined):
        kinds = candidate.structure.kinds
        of_parts = kept[frozenset(part for kind in kinds for part, _ in kind.places)]
        if len(of_parts) < most:
            of_parts.setdefault(kinds, candidate.structure)
    return [structure for of_parts in kept.values() for structure in of_parts.values()]


def _result(
    problem: MixedProblem,
    global_batch: int,
    refined: Sequence[RefinedStructure],
    num_structures: int,
    num_priced: int,
    limits: tuple[str, ...],
) -> MixedResult:
    costs = [candidate.cost for candidate in ordered(refined)]
    ranked = tuple({cost.plan: cost for cost in costs if cost.oom_z <= RISKY_Z}.values())[:KEPT_PLANS]
    parts = range(len(problem.cluster.parts))
    plans_alone = tuple(best_alone(problem, part, global_batch) for part in parts)
    rates = []
    for part, plan in zip(parts, plans_alone, strict=True):
        of_part = [cost for cost in costs if cost.plan.parts == {part}]
        # A part that cannot hold the model alone counts with what it would reach if it could.
        reached = [cost.sequences_per_s for cost in of_part if cost.oom_z <= RISKY_Z]
        reached = reached or [cost.sequences_per_s for cost in of_part]
        rates.append(max([*reached, global_batch / plan.step_s if plan else 0.0]))
    certificate = MixedCertificate(
        structures=num_structures,
        plans=num_priced,
        rates_alone=tuple(rates),
        gap=1 - ranked[0].sequences_per_s / sum(rates) if ranked else 1.0,
        limits=limits,
    )
    closest = costs[0] if costs and not ranked else None
    return MixedResult(ranked=ranked, closest=closest, alone=plans_alone, certificate=certificate)
