"""Search for the fastest plan of a mixed cluster: structures of pipelines in the order of their bounds, refined.

Plans of a single part come from a search on that part; plans of several parts use axes in the spaces of all these
parts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np

from autoplan.base.errors import AutoplanError
from autoplan.cost.input_rate import slowest_input
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.spreads import NORMAL_90
from autoplan.search.choice import normal_z
from autoplan.search.mixed_bounds import Candidate, MixedSpace
from autoplan.search.mixed_candidates import MIN_JOINT, candidates_of, fastest_s
from autoplan.search.mixed_refinement import (
    Accepts,
    RefinedStructure,
    Refiner,
    accept_all,
    num_parts_of,
    order_of,
)
from autoplan.search.space import Space
from autoplan.search.structures import MAX_STAGES, MIN_USED, NOTHING_EQUAL, Equal, Structure
from autoplan.search.study import search
from autoplan.spec.axes import USUAL_SCHEDULES
from autoplan.spec.enums import Schedule
from autoplan.spec.estimate import OOM_Z, RISKY_Z
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem
from autoplan.spec.mixed_result import MixedCertificate, MixedCost, MixedResult
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import SearchResult

FIRST_FORMS = 16  # forms per set of parts, refined with the axes with the smallest bound
KEPT_FORMS = 4  # of these, whose other axes are tried
MAX_AXES = 16
MAX_LAYOUTS = 512  # of single groups whose bounds leave them open, priced one by one
KEPT_PLANS = 20
MUCH_OPEN = 0.15  # gap from which plans on fewer nodes are searched
# Of clusters with one node less as many, and as many with another one less, where devices could be so much faster.
MAX_FEWER, MUCH_SLOWER = 6, 1.5

# Exclusions, for the certificate.
LIMITS = (
    "every group of parts forms equal pipelines, with one tp per part; parts may be idle",
    f"at least {MIN_USED:.0%} of the devices of a multi-part group in use, at most {MAX_STAGES} stages",
    "tp within the scale-up domain; with three or more parts the same on all",
    "parts in the order of their memory; with two parts also the reverse",
    f"of groups beside each other at least {MIN_JOINT} ways of each with the same axes, those that do most in the "
    "least time of all, and hold as many micro-batches as they would alone",
)
STARTED = "only what the framework can start"


def search_mixed(
    problem: MixedProblem,
    global_batch: int,
    space_of: Callable[[Problem], Space],
    accepts: Accepts = accept_all,
    equal: Equal = NOTHING_EQUAL,
    *,
    margin: float = 0.0,
) -> MixedResult:
    """Find the best plans, and a bound on how much faster any other plan may be.

    Plans that fit are ranked; if there are none, plans that may run out of memory, as on equal nodes.  `space_of`
    returns the plans of a single part; `accepts` says which plans the framework can start, of those with `equal` parts.
    The simplest plan that is slower than the fastest by at most `margin`, a share, comes first.  Parts with fewer nodes
    are searched too where the number of devices divides badly: the best plan leaves many idle, its bounds leave much
    open, or a part alone does not share out the batch.
    """

    def find(problem: MixedProblem) -> MixedResult:
        return _search_all(problem, global_batch, space_of, accepts, equal, margin)

    result = find(problem)
    without_plan = [part for part, rate in enumerate(result.certificate.rates_alone) if rate == 0]
    spaces = tuple(space_of(problem.alone(part)) for part in range(len(problem.cluster.parts)))
    divides = all(len(spaces[part].groups(spaces[part].cells())[0]) for part in without_plan)
    is_close = divides and result.certificate.gap < MUCH_OPEN
    if is_close and result.ranked and result.ranked[0].plan.num_devices >= MIN_USED * problem.cluster.num_devices:
        return result
    space = MixedSpace(problem=problem, spaces=spaces, global_batch=global_batch, equal=equal, most_z=RISKY_Z)
    device_rates, results, wave = space.device_rates(), [result], [problem]
    for ratio in (1.0, MUCH_SLOWER):
        smaller = {_num_nodes(fewer): fewer for wider in wave for fewer in _with_fewer_nodes(wider)}
        wave = sorted(smaller.values(), key=partial(_most_rate, device_rates), reverse=True)[:MAX_FEWER]
        for fewer in wave:
            best = max((found.ranked[0].sequences_per_s for found in results if found.ranked), default=0.0)
            if ratio * best < _most_rate(device_rates, fewer):
                found = find(fewer)
                results.append(replace(found, ranked=_priced_on(problem, found)))
    return best_of(results)


def _num_nodes(problem: MixedProblem) -> tuple[int, ...]:
    """Return the number of nodes of every part."""
    return tuple(part.num_nodes for part in problem.cluster.parts)


def _most_rate(device_rates: Sequence[float], problem: MixedProblem) -> float:
    """Return the sequences per second of all devices at these rates."""
    parts = zip(problem.cluster.parts, device_rates, strict=True)
    return sum(part.num_devices * rate for part, rate in parts)


def _with_fewer_nodes(problem: MixedProblem) -> Iterator[MixedProblem]:
    """Yield the problem with one node less in a part, or as many as the next power of two."""
    parts = problem.cluster.parts
    for at, part in enumerate(parts):
        for nodes in sorted({part.num_nodes - 1, 1 << (part.num_nodes.bit_length() - 1)} - {0, part.num_nodes}):
            fewer = (*parts[:at], replace(part, num_nodes=nodes, nodes=()), *parts[at + 1 :])
            yield replace(problem, cluster=replace(problem.cluster, parts=fewer))


def _priced_on(problem: MixedProblem, result: MixedResult) -> tuple[MixedCost, ...]:
    """Return the plans of a result on a part of a cluster, with their prices on all of it."""
    costs: list[MixedCost] = []
    for cost in result.ranked:
        with suppress(AutoplanError):  # some states are sharded over whole nodes alone
            costs += estimate_mixed(problem, [cost.plan])
    return tuple(costs)


def _search_all(
    problem: MixedProblem,
    global_batch: int,
    space_of: Callable[[Problem], Space],
    accepts: Accepts,
    equal: Equal,
    margin: float,
) -> MixedResult:
    """Return the result of a search in which every part in use has all of its devices in use."""
    alone = [problem.alone(part) for part in range(len(problem.cluster.parts))]
    spaces = tuple(map(space_of, alone))
    results_alone = [
        search(own, plans, margin=margin) if plans.cells() else None for own, plans in zip(alone, spaces, strict=True)
    ]
    for most_z in (RISKY_Z, OOM_Z):
        space = MixedSpace(problem=problem, spaces=spaces, global_batch=global_batch, equal=equal, most_z=most_z)
        if (result := _searched(space, results_alone, accepts, margin)).ranked:
            break
    return result


def best_of(results: Sequence[MixedResult]) -> MixedResult:
    """Join searches of one cluster, of those with plans that fit if there are any, and what all bounds leave open.

    The best of their first plans comes first, the others by their rates.
    """
    found = [result for result in results if result.ranked]
    results = [result for result in found if result.ranked[0].verdict == "fits"] or found or results[:1]
    if len(results) == 1:
        return results[0]
    first = max((result.ranked[0] for result in results), key=lambda cost: cost.sequences_per_s)
    others = sorted(itertools.chain(*(result.ranked for result in results)), key=lambda cost: -cost.sequences_per_s)
    ranked = {cost.plan: cost for cost in (first, *others)}
    certificates = [result.certificate for result in results]
    most = max(result.ranked[0].sequences_per_s / (1 - result.certificate.gap) for result in results)
    certificate = replace(
        certificates[0],
        structures=sum(certificate.structures for certificate in certificates),
        plans=sum(certificate.plans for certificate in certificates),
        rates_alone=tuple(map(max, zip(*(certificate.rates_alone for certificate in certificates), strict=True))),
        gap=1 - first.sequences_per_s / most,
    )
    return MixedResult(ranked=tuple(ranked.values())[:KEPT_PLANS], closest=None, certificate=certificate)


def robust_order(result: MixedResult, quantile: float) -> MixedResult:
    """Return the plans in the order of this quantile of their time for a sequence; the gap is that of the time."""
    z = normal_z(quantile) / NORMAL_90
    ranked = sorted(result.ranked, key=lambda cost: (cost.high_s / cost.step_s) ** z / cost.sequences_per_s)
    slower = result.ranked[0].sequences_per_s / ranked[0].sequences_per_s
    certificate = replace(result.certificate, gap=1 - (1 - result.certificate.gap) / slower)
    return replace(result, ranked=tuple(ranked), certificate=certificate)


def _searched(
    space: MixedSpace, results_alone: Sequence[SearchResult | None], accepts: Accepts, margin: float
) -> MixedResult:
    """Return the best plans that are as safe as the space asks for."""
    problem, global_batch, most_z = space.problem, space.global_batch, space.most_z

    def is_answer(plans: Sequence[MixedPlan]) -> list[bool]:
        lawful = space.admits(plans).tolist()
        accepted = iter(accepts(list(itertools.compress(plans, lawful))))
        return [is_lawful and next(accepted) for is_lawful in lawful]

    costs, rates, bounds = [], [], []
    for part, result in enumerate(results_alone):
        plans = [] if result is None else [*result.ranked[:KEPT_PLANS], *result.rivals]
        if result and result.closest:
            plans.append(result.closest)
        rates.append(max((global_batch / plan.step_s for plan in plans), default=0.0))
        if result and result.ranked:
            bounds.append(result.ranked[0].step_s * min(result.certificate.least_left or 1.0, 1.0))
        written = [MixedPlan.of(plan.plan, part, problem.model.num_layers) for plan in plans]
        priced = zip(estimate_mixed(problem, written), is_answer(written), strict=True)
        costs += [cost for cost, is_lawful in priced if is_lawful]

    refiner = Refiner(problem, global_batch, is_answer, most_z, space.equal)
    candidates = candidates_of(space)
    costs += [refined.cost for refined in _refined(space, refiner, candidates, _fastest_s(space, costs))]
    in_order = sorted(itertools.chain(*candidates.values()), key=attrgetter("least_s"))
    left = _price_layouts(space, refiner, in_order, costs)
    costs.sort(key=partial(order_of, most_z))
    fitting = [cost for cost in costs if cost.oom_z <= most_z]
    near = [cost for cost in fitting if cost.step_s <= (1 + margin) * fitting[0].step_s]
    best: dict[object, MixedCost] = {}  # by distribution of layers and micro-batches
    for cost in (*sorted(near, key=lambda cost: num_parts_of(cost.plan))[:1], *fitting):
        best.setdefault(cost.plan.kinds, cost)
    ranked = tuple(best.values())[:KEPT_PLANS]
    best_s = ranked[0].step_s if ranked else np.inf
    bounds.append(fastest_s(space, [candidate for candidate in left if candidate.least_s < best_s], best_s))
    waits_s = global_batch * slowest_input(problem.training, problem.cluster.num_nodes)[0]
    certificate = MixedCertificate(
        structures=sum(map(len, candidates.values())),
        plans=refiner.num_priced + sum(result.certificate.priced for result in results_alone if result),
        rates_alone=tuple(rates),
        gap=max(1 - max(min(bounds), waits_s) / best_s, 0.0) if np.isfinite([best_s, min(bounds)]).any() else 0.0,
        limits=(*LIMITS, *((STARTED,) if space.equal.replicas else ()), *space.describe()),
    )
    return MixedResult(ranked=ranked, closest=costs[0] if costs and not ranked else None, certificate=certificate)


def _price_layouts(
    space: MixedSpace, refiner: Refiner, candidates: Sequence[Candidate], costs: list[MixedCost]
) -> list[Candidate]:
    """Add to `costs` those of all plans of single groups that may be the fastest; return the candidates left unpriced.

    The candidates come with the smallest bounds first, so that plans priced early spare later ones.
    """
    left, num_more, best_s = [], MAX_LAYOUTS, _fastest_s(space, costs)
    for candidate in candidates:
        if len(candidate.groups) > 1 or num_more == 0 or best_s == np.inf:
            left.append(candidate)
        elif candidate.least_s < best_s:
            layouts = list(itertools.islice(space.layouts(candidate, best_s), num_more + 1))
            left += [candidate] if len(layouts) > num_more else []
            priced = refiner.priced(layouts[:num_more])
            costs += priced
            best_s = min(best_s, _fastest_s(space, priced))
            num_more -= min(len(layouts), num_more)
    return left


def _fastest_s(space: MixedSpace, costs: Iterable[MixedCost]) -> float:
    """Return the shortest step of the costs that are as safe as the space asks for."""
    return min((cost.step_s for cost in costs if cost.oom_z <= space.most_z), default=np.inf)


def _refined(
    space: MixedSpace, refiner: Refiner, candidates: dict[tuple[frozenset[int], bool], list[Candidate]], best_s: float
) -> list[RefinedStructure]:
    """Refine the forms with the smallest bounds, and the best ones with other axes and virtual stages.

    Every set of parts and every schedule has its own quota, so an additional one removes none; the set with the
    smallest bound comes first.  Forms that cannot beat `best_s` or later results are skipped.
    """
    refined: list[RefinedStructure] = []
    quotas: dict[object, list[Candidate]] = defaultdict(list)
    for parts, ways in candidates.items():
        for way in ways:
            quotas[parts, way.schedule].append(way)
    for of_parts in sorted(quotas.values(), key=lambda of_parts: of_parts[0].least_s):
        forms: dict[object, list[Candidate]] = defaultdict(list)
        form_of: dict[object, object] = {}
        for candidate in of_parts:
            if candidate.least_s < best_s:
                if (rows := candidate.form_rows) not in form_of:
                    form_of[rows] = candidate.form
                forms[form_of[rows]].append(candidate)
        structures = [space.structure(candidates[0]) for candidates in itertools.islice(forms.values(), FIRST_FORMS)]
        improved, tried = refiner.refine(structures), set(structures)
        for better in (_other_micro_batches, _other_axes, _other_chunks, _other_chunks):
            best_s = min(best_s, _fastest_s(space, (found.cost for found in improved)))
            forms = {form: [way for way in alike if way.least_s < best_s] for form, alike in forms.items()}
            best: dict[object, Structure] = {}
            for found in improved:
                best.setdefault(_form(found.structure), found.structure)
            kept = itertools.islice(best.values(), KEPT_FORMS)
            neighbours = dict.fromkeys(other for structure in kept for other in better(space, forms, structure))
            structures = [structure for structure in neighbours if structure not in tried]
            improved, tried = refiner.ordered((*improved, *refiner.refine(structures))), tried.union(structures)
        refined += improved
    return refiner.ordered(refined)


def _form(structure: Structure) -> object:
    kinds = (replace(kind, vp=1, schedule=Schedule.ONE_F_ONE_B) for kind in structure.kinds)
    return tuple(kinds), structure.micro_batches


def _other_micro_batches(
    space: MixedSpace, forms: dict[object, list[Candidate]], structure: Structure
) -> Iterator[Structure]:
    """Yield the structure with other micro-batches, which determine the message sizes on slow links between parts."""
    for candidates in filter(None, forms.values()):
        kinds, micro_batches = zip(*candidates[0].form, strict=True)
        if kinds == structure.kinds and micro_batches != structure.micro_batches:
            yield space.structure(candidates[0])


def _other_axes(space: MixedSpace, forms: dict[object, list[Candidate]], structure: Structure) -> Iterator[Structure]:
    """Yield the structure with the other axes that have the smallest bounds."""
    form = tuple(zip(structure.kinds, structure.micro_batches, strict=True))
    yield from map(space.structure, forms.get(form, [])[1 : MAX_AXES + 1])


def _other_chunks(space: MixedSpace, forms: dict[object, list[Candidate]], structure: Structure) -> Iterator[Structure]:
    """Yield the structure with other numbers of virtual stages in one of its kinds, or all where these are equal."""
    for at, kind in enumerate(structure.kinds):
        parts, usual = sorted({part for part, _ in kind.places}), kind.schedule in USUAL_SCHEDULES
        for schedule in USUAL_SCHEDULES if usual else (kind.schedule,):
            for vp in space.chunks(parts, len(kind.places), schedule):
                if space.equal.replicas:
                    kinds = tuple(replace(other, vp=vp, schedule=schedule) for other in structure.kinds)
                    yield replace(structure, kinds=kinds)
                elif vp != kind.vp:
                    other = replace(kind, vp=vp, schedule=schedule)
                    yield replace(structure, kinds=(*structure.kinds[:at], other, *structure.kinds[at + 1 :]))
