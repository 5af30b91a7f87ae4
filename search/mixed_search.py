"""Search for the fastest plan of a mixed cluster: structures of pipelines in the order of their bounds, refined.

Plans of a single part come from a search on that part; plans of several parts use axes in the spaces of all these
parts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from autoplan.cost.input_rate import slowest_input
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.spreads import NORMAL_90
from autoplan.search.choice import normal_z
from autoplan.search.mixed_bounds import Candidate, MixedSpace
from autoplan.search.mixed_candidates import MIN_JOINT, Candidates, beside, sharper, spanning
from autoplan.search.mixed_layouts import open_layouts
from autoplan.search.mixed_refinement import (
    Accepts,
    RefinedStructure,
    Refiner,
    accept_all,
    num_parts_of,
    order_of,
)
from autoplan.search.ranking import training_flops_per_token
from autoplan.search.space import Space
from autoplan.search.structures import MAX_STAGES, MIN_USED, NOTHING_EQUAL, Equal, Layout, Structure
from autoplan.search.study import search
from autoplan.spec.axes import USUAL_SCHEDULES
from autoplan.spec.enums import Schedule
from autoplan.spec.estimate import OOM_Z, RISKY_Z, datasheet_peak
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem
from autoplan.spec.mixed_result import MixedCertificate, MixedCost, MixedResult
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import SearchResult

FIRST_FORMS = 16  # forms per set of parts, refined with the axes with the smallest bound
KEPT_FORMS = 4  # of these, whose other axes are tried
MAX_AXES = 16
MAX_LAYOUTS, FEW_LAYOUTS = 3000, 200  # whose bounds leave them open: priced at most, and at least so many together
KEPT_PLANS = 20
# Clusters with fewer nodes that are searched at most, those with the highest possible rates first: with a node less in
# one part, and with more less where the gap is as large as this, or there are no more nodes than these.
MAX_FEWER, MUCH_OPEN, FEW_NODES = 12, 0.15, 12
MUCH_SLOWER = 1.5  # parts alone that are as much slower than the best plan are not searched with fewer nodes

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
    The simplest plan that is slower than the fastest by at most `margin`, a share, comes first.  Parts with a node less
    are searched for faster plans too, as devices may divide badly; with more nodes less if these are few, the best plan
    leaves many idle, its bounds leave much open, or a part alone does not share out the batch.
    """
    searched: set[tuple[int, int]] = set()  # parts alone, each with its number of nodes

    def find(problem: MixedProblem, known_s: float, rates_alone: Sequence[float]) -> _Found:
        own = [problem.alone(part) for part in range(len(problem.cluster.parts))]
        spaces, numbers = tuple(map(space_of, own)), list(enumerate(_num_nodes(problem)))
        results_alone: list[SearchResult | None] = []
        for number, alone, space in zip(numbers, own, spaces, strict=True):
            is_open = number not in searched and MUCH_SLOWER * rates_alone[number[0]] > global_batch / known_s
            is_open = is_open and bool(space.cells())
            results_alone.append(search(alone, space, margin=margin) if is_open else None)
            searched.add(number)
        for most_z in (RISKY_Z, OOM_Z):
            mixed = MixedSpace(problem=problem, spaces=spaces, global_batch=global_batch, equal=equal, most_z=most_z)
            found = _searched(mixed, results_alone, accepts, margin, known_s)
            if found.result.ranked or known_s < np.inf:
                break
        return found

    found = find(problem, np.inf, [np.inf] * len(problem.cluster.parts))
    if len(problem.cluster.parts) == 1:
        return found.result
    certificate, results, open_rates = found.result.certificate, [found.result], [found.most_rate]
    spaces = [space_of(problem.alone(part)) for part, rate in enumerate(certificate.rates_alone) if rate == 0]
    divides = all(len(space.groups(space.cells())[0]) for space in spaces) and bool(results[0].ranked)
    uses_most = divides and results[0].ranked[0].plan.num_devices >= MIN_USED * problem.cluster.num_devices
    is_deep = certificate.gap >= MUCH_OPEN or not uses_most or problem.cluster.num_nodes <= FEW_NODES
    fewer, tried = {_num_nodes(fewer): fewer for fewer in _with_fewer_nodes(problem)}, set[tuple[int, ...]]()
    device_rates = _device_rates(problem)
    rates_alone = [rate or np.inf for rate in certificate.rates_alone]
    while fewer and len(tried) < MAX_FEWER:
        number, most = max(
            ((number, _most_rate(device_rates, smaller)) for number, smaller in fewer.items()), key=itemgetter(1)
        )
        best = max((result.ranked[0].sequences_per_s for result in results if result.ranked), default=0.0)
        if most <= best:
            break
        smaller = fewer.pop(number)
        tried.add(number)
        on_smaller = find(smaller, global_batch / best if best else np.inf, rates_alone)
        faster = tuple(cost for cost in on_smaller.result.ranked if cost.sequences_per_s > best)
        results.append(replace(on_smaller.result, ranked=faster))
        open_rates.append(on_smaller.most_rate)
        if is_deep:
            fewer |= {_num_nodes(less): less for less in _with_fewer_nodes(smaller) if _num_nodes(less) not in tried}
    return best_of(results, open_rates)


class _Found(NamedTuple):
    """Result of a search in which every part in use has all of its devices in use."""

    result: MixedResult
    most_rate: float  # sequences per second that its bounds leave open, 0 if none


def _num_nodes(problem: MixedProblem) -> tuple[int, ...]:
    """Return the number of nodes of every part."""
    return tuple(part.num_nodes for part in problem.cluster.parts)


def _device_rates(problem: MixedProblem) -> list[float]:
    """Return the sequences per second of a device of every part at its peak."""
    training, parts = problem.training, problem.cluster.parts
    flops = training.seq_len * training_flops_per_token(problem.model, training)
    return [datasheet_peak(part.device, training.precision)[1] / flops for part in parts]


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


def best_of(results: Sequence[MixedResult], open_rates: Iterable[float] = ()) -> MixedResult:
    """Join searches of one cluster, of those with plans that fit if there are any, and what all bounds leave open.

    The best of their first plans comes first, the others by their rates.  `open_rates` are left open beyond their gaps.
    """
    found = [result for result in results if result.ranked]
    results = [result for result in found if result.ranked[0].verdict == "fits"] or found or results[:1]
    if len(results) == 1:
        return results[0]
    first = max((result.ranked[0] for result in results), key=lambda cost: cost.sequences_per_s)
    others = sorted(itertools.chain(*(result.ranked for result in results)), key=lambda cost: -cost.sequences_per_s)
    ranked = {cost.plan: cost for cost in (first, *others)}
    certificates = [result.certificate for result in results]
    gaps = (result.ranked[0].sequences_per_s / (1 - result.certificate.gap) for result in results)
    most = max(*gaps, *open_rates)
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
    space: MixedSpace, results_alone: Sequence[SearchResult | None], accepts: Accepts, margin: float, known_s: float
) -> _Found:
    """Return the best plans that are as safe as the space asks for; only those that take less than `known_s` matter."""
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
    candidates: Candidates = {}
    for find in (spanning, beside):  # plans of the first spare ways of the second
        best_s = min(_fastest_s(space, costs), known_s)
        candidates |= (found := find(space, best_s))
        costs += [refined.cost for refined in _refined(space, refiner, found, best_s)]
    left = _price_layouts(space, refiner, itertools.chain(*candidates.values()), costs, known_s)
    costs.sort(key=partial(order_of, most_z))
    fitting = [cost for cost in costs if cost.oom_z <= most_z]
    near = [cost for cost in fitting if cost.step_s <= (1 + margin) * fitting[0].step_s]
    best: dict[object, MixedCost] = {}  # by distribution of layers and micro-batches
    for cost in (*sorted(near, key=lambda cost: num_parts_of(cost.plan))[:1], *fitting):
        best.setdefault(cost.plan.kinds, cost)
    ranked = tuple(best.values())[:KEPT_PLANS]
    best_s = ranked[0].step_s if ranked else np.inf
    unpriced = sharper(space, left, min(best_s, known_s))
    least_s = min((*bounds, *(candidate.least_s for candidate in unpriced)), default=np.inf)
    waits_s = global_batch * slowest_input(problem.training, problem.cluster.num_nodes)[0]
    certificate = MixedCertificate(
        structures=sum(map(len, candidates.values())),
        plans=refiner.num_priced + sum(result.certificate.priced for result in results_alone if result),
        rates_alone=tuple(rates),
        gap=max(1 - max(least_s, waits_s) / best_s, 0.0) if np.isfinite([best_s, least_s]).any() else 0.0,
        limits=(*LIMITS, *((STARTED,) if space.equal.replicas else ()), *space.describe()),
    )
    found_plans = MixedResult(
        ranked=ranked, closest=costs[0] if costs and not ranked else None, certificate=certificate
    )
    return _Found(found_plans, global_batch / max(least_s, waits_s))


def _price_layouts(
    space: MixedSpace, refiner: Refiner, candidates: Iterable[Candidate], costs: list[MixedCost], known_s: float
) -> list[Candidate]:
    """Add to `costs` those of all plans that may be the fastest; return the candidates left unpriced.

    Replicas of all groups have the same layers and shares, or the candidate is left.  The smallest bounds come first,
    so that plans priced early spare later ones.
    """
    num_more, best_s, left = MAX_LAYOUTS, min(_fastest_s(space, costs), known_s), list[Candidate]()
    candidates = [candidate for candidate in candidates if candidate.least_s < best_s]
    if best_s == np.inf:
        return candidates
    waiting: list[Layout] = []
    for layouts in open_layouts(space, sharper(space, candidates, best_s)):
        candidate = layouts.candidate
        if candidate.least_s >= best_s:
            break
        are_alike = len(candidate.groups) == 1 or space.equal.replicas
        within = list(itertools.islice(layouts.within(best_s), num_more + 1)) if are_alike else []
        if not are_alike or len(within) > num_more:
            left.append(candidate)
            continue
        waiting, num_more = waiting + within, num_more - len(within)
        if len(waiting) >= FEW_LAYOUTS:
            costs += refiner.priced(waiting, best_s)
            waiting, best_s = [], min(_fastest_s(space, costs), known_s)
    costs += refiner.priced(waiting, best_s)
    return left


def _fastest_s(space: MixedSpace, costs: Iterable[MixedCost]) -> float:
    """Return the shortest step of the costs that are as safe as the space asks for."""
    return min((cost.step_s for cost in costs if cost.oom_z <= space.most_z), default=np.inf)


def _refined(space: MixedSpace, refiner: Refiner, candidates: Candidates, best_s: float) -> list[RefinedStructure]:
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
