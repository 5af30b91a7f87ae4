"""Search for the fastest plan of a mixed cluster: structures of pipelines in the order of their bounds, refined.

Plans of a single part come from a search on that part; plans of several parts use axes in the spaces of all these
parts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.base.errors import AutoplanError, InputError
from autoplan.cost.input_rate import slowest_input
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.spreads import NORMAL_90
from autoplan.cost.step import straggler_share
from autoplan.search.choice import normal_z
from autoplan.search.mixed_bounds import Candidate, MixedSpace
from autoplan.search.mixed_pipeline_bounds import BISECTIONS, ROUNDING, Ways
from autoplan.search.mixed_refinement import (
    Accepts,
    RefinedStructure,
    Refiner,
    accept_all,
    num_parts_of,
    order_of,
)
from autoplan.search.space import Space
from autoplan.search.structures import MAX_STAGES, MIN_USED, NOTHING_EQUAL, Equal, Structure, groupings
from autoplan.search.study import search
from autoplan.spec.axes import COLUMNS, USUAL_SCHEDULES
from autoplan.spec.estimate import OOM_Z, RISKY_Z
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem
from autoplan.spec.mixed_result import MixedCertificate, MixedCost, MixedResult
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import SearchResult

FIRST_FORMS = 16  # forms per set of parts, refined with the axes with the smallest bound
KEPT_FORMS = 4  # of these, whose other axes are tried
MAX_AXES = 16
ABOUT = 1.05  # times the smallest possible time of combined groups, at which their ways are compared
MAX_JOINT, MIN_JOINT = 20_000, 3  # structures of combined groups, and ways of each with the same axes
MAX_LAYOUTS = 512  # of single groups whose bounds leave them open, priced one by one
KEPT_PLANS = 20
MUCH_OPEN = 0.15  # gap from which plans on fewer nodes are looked at

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
# Plan axes common to all replicas.
_SHARED = (
    *("recompute_modules", "recompute_num_layers"),
    *(
        axis.name
        for axis in COLUMNS
        if axis.name not in ("global_batch", "micro_batch", "tp", "pp", "vp", "sp", "dp_shard", "etp", "schedule")
    ),
)


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
    The simplest plan that is slower than the fastest by at most `margin`, a share, comes first.  Parts
    with fewer nodes are searched too where the number of devices divides badly: the best plan leaves many idle, its
    bounds leave much open, or a part alone does not share out the batch.
    """
    result = _search_all(problem, global_batch, space_of, accepts, equal, margin)
    without_plan = [part for part, rate in enumerate(result.certificate.rates_alone) if rate == 0]
    spaces = (space_of(problem.alone(part)) for part in without_plan)
    divides = all(len(space.groups(space.cells())[0]) for space in spaces)
    is_near = divides and result.certificate.gap < MUCH_OPEN
    if is_near and result.ranked and result.ranked[0].plan.num_devices >= MIN_USED * problem.cluster.num_devices:
        return result
    smaller = [
        _search_all(fewer, global_batch, space_of, accepts, equal, margin) for fewer in _with_fewer_nodes(problem)
    ]
    return best_of([result, *(replace(found, ranked=_priced_on(problem, found)) for found in smaller)])


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
    spaces = tuple(_priced(space_of(own)) for own in alone)
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
        return [ok and lawful for ok, lawful in zip(accepts(plans), space.admits(plans), strict=True)]

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
    alone_s = min((cost.step_s for cost in costs if cost.oom_z <= most_z), default=np.inf)
    costs += [candidate.cost for candidate in _refined(space, refiner, candidates, alone_s)]
    left = _closed(space, refiner, sorted(itertools.chain(*candidates.values()), key=attrgetter("least_s")), costs)
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


def _closed(
    space: MixedSpace, refiner: Refiner, candidates: Sequence[Candidate], costs: list[MixedCost]
) -> list[Candidate]:
    """Add the costs of all plans of single groups that may be the fastest, best bounds first, and return the others."""
    left, num_open = [], MAX_LAYOUTS
    for candidate in candidates:
        best_s = min((cost.step_s for cost in costs if cost.oom_z <= space.most_z), default=np.inf)
        if len(candidate.groups) > 1 or num_open == 0 or best_s == np.inf:
            left.append(candidate)
        elif candidate.least_s < best_s:
            layouts = list(itertools.islice(space.layouts(candidate, best_s), num_open + 1))
            left += [candidate] if len(layouts) > num_open else []
            costs += refiner.priced(layouts[:num_open])
            num_open -= min(len(layouts), num_open)
    return left


def _priced(space: Space) -> Space:
    """Return the plans whose schedules can be priced with different stages."""
    schedules = [word for word in space.limits.of("schedule") if word in USUAL_SCHEDULES]
    if not schedules:
        raise InputError(f"a mixed cluster has the schedules {' and '.join(USUAL_SCHEDULES)} only: leave others out")
    return replace(space, limits=space.limits.where(schedule=schedules))


def candidates_of(space: MixedSpace) -> dict[tuple[frozenset[int], bool], list[Candidate]]:
    """Return the structures of every set of several parts, in one or several groups, smallest bounds first."""
    parts = range(len(space.spaces))
    ways = {
        group: of_group
        for size in range(1, len(parts) + 1)
        for group in itertools.combinations(parts, size)
        if (of_group := space.ways(group)) is not None
    }
    by_parts: dict[tuple[frozenset[int], bool], list[Candidate]] = defaultdict(list)
    for group, of_group in ways.items():
        if len(group) > 1:
            by_parts[frozenset(group), False] += [
                Candidate(float(of_group.least_s[at]), (of_group,), (at,))
                for at in np.flatnonzero(np.isfinite(of_group.least_s)).tolist()
            ]
    between, vendors = space.problem.cluster.between, space.problem.cluster.vendors
    for grouping in groupings(parts):
        if len(grouping) > 1 and all(group in ways for group in grouping):
            of_vendors = {vendors[part] for part, *rest in grouping if not rest}
            if len(of_vendors) > 1 and not between.cross_vendor_collectives:
                continue
            used = frozenset(itertools.chain(*grouping))
            by_parts[used, True] += _joined(space, [ways[group] for group in grouping])
    return {key: sorted(of_parts, key=attrgetter("least_s")) for key, of_parts in by_parts.items() if of_parts}


def _joined(space: MixedSpace, groups: Sequence[Ways]) -> Iterator[Candidate]:
    """Yield structures of combined groups, using the ways with the highest rates of each group."""
    if not all(ways.most_rate.any() for ways in groups):
        return
    tables, about_s = [], ABOUT * space.global_batch / sum(float(ways.most_rate.max()) for ways in groups)
    for ways in groups:
        by_axes: dict[tuple[int, ...], dict[object, int]] = defaultdict(dict)
        kinds = ways.kinds
        # Experts are whole or split like other matrices, which is the same if these are whole.
        split = np.where(kinds.tp == 1, -1, kinds.etp > 1)
        of_replicas = [kinds.pp, kinds.vp > 1] if space.equal.replicas else []
        of_replicas += [kinds.micro_batch] if space.equal.batches else []
        of_replicas += [kinds.tp] if space.equal.tp else []
        axes = np.stack([*(getattr(kinds, name) for name in _SHARED), *of_replicas, split], axis=1)
        order = np.lexsort([-ways.most_rate, -_done(ways, about_s, slice(None), ways.most_rate)])
        for at in order[ways.most_rate[order] > 0].tolist():
            *key, split_at = axes[at].tolist()
            for choice in (0, 1) if split_at < 0 else (split_at,):
                by_axes[(*key, choice)].setdefault((ways.form[at], kinds.micro_batch[at], kinds.vp[at]), at)
        tables.append(by_axes)
    keys = tables[0].keys() & set.intersection(*(set(table) for table in tables))
    max_choices = max(round((MAX_JOINT / max(len(keys), 1)) ** (1 / len(groups))), MIN_JOINT)
    overhead_s = min(calibration.overall for calibration in space.problem.calibrations)
    overhead_s *= space.problem.framework.host.step_overhead_s
    choices = [
        rows
        for key in sorted(keys)
        for rows in itertools.product(*(itertools.islice(table[key].values(), max_choices) for table in tables))
    ]
    picks = np.array(choices, dtype=np.int64).reshape(-1, len(groups))
    rates = [ways.most_rate[rows] for ways, rows in zip(groups, picks.T, strict=True)]
    for time_s, rows in zip(_joint_s(space, groups, picks, rates, overhead_s).tolist(), choices, strict=True):
        if time_s < np.inf:
            yield Candidate(time_s, tuple(groups), rows)


def _joint_s(
    space: MixedSpace, groups: Sequence[Ways], picks: Ints, rates: Sequence[Floats], end_s: Floats | float
) -> Floats:
    """Time of groups with these ways and rates for the batch, with equal whole micro-batches within a group.

    Infinite where all replicas need equal numbers of micro-batches, which do not add up to the batch.
    """
    chosen, global_batch = list(zip(groups, picks.T, rates, strict=True)), space.global_batch
    if space.equal.batches:
        sizes = [_round(ways, rows) for ways, rows, _ in chosen]
        number = global_batch / add_up(sizes)
        rows = np.flatnonzero((number % 1 == 0) & np.all([rate > 0 for rate in rates], axis=0))
        low, times_s = np.full(len(picks), np.inf), zip(sizes, rates, strict=True)
        low[rows] = np.max([number[rows] * size[rows] / rate[rows] for size, rate in times_s], axis=0)
    else:
        low = global_batch / add_up(rates)
        high = 2.0 * low
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            enough = add_up(_done(ways, middle, rows, rate) for ways, rows, rate in chosen) >= global_batch
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    num_devices = np.sum([ways.num_devices[rows] for ways, rows, _ in chosen], axis=0)
    work_s = np.asarray((1.0 + straggler_share(num_devices)) * (end_s + low))
    return np.maximum(work_s, space.exchange_s(groups))


def fastest_s(space: MixedSpace, candidates: Sequence[Candidate], within_s: float) -> float:
    """Lower bound on plans of the candidates that take less than `within_s`, tighter than the candidates' bounds.

    Accounts for filling and draining of pipelines with the actual number of micro-batches.  At least one group has an
    even share of states or more, which its replicas store and update.
    """
    times_s = [candidate.least_s for candidate in candidates if len(candidate.groups) == 1]
    joined: dict[tuple[tuple[int, ...], ...], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if len(candidate.groups) > 1:
            joined[tuple(ways.parts for ways in candidate.groups)].append(candidate)
    for alike in joined.values():
        groups, picks = alike[0].groups, np.array([candidate.rows for candidate in alike])
        chosen = [ways.take(rows) for ways, rows in zip(groups, picks.T, strict=True)]
        num_replicas = np.sum([ways.kinds.dp_shard for ways in chosen], axis=0)
        num_devices = np.full_like(num_replicas, space.problem.cluster.num_devices)
        rates = [space.rates(ways, num_devices, within_s).most for ways in chosen]
        for at, ways in enumerate(chosen):
            own = space.rates(ways, num_replicas, within_s)
            own_rates = [*rates[:at], own.most, *rates[at + 1 :]]
            times_s.append(float(_joint_s(space, groups, picks, own_rates, own.end_s).min()))
    return min(times_s, default=np.inf)


def _done(ways: Ways, time_s: Floats | float, rows: Ints | slice, rate: Floats) -> Floats:
    """Sequences that a group completes in a time at a rate, with equal whole micro-batches per replica."""
    size = _round(ways, rows)
    return np.asarray(size * np.floor(time_s * rate / size + ROUNDING), dtype=np.float64)


def _round(ways: Ways, rows: Ints | slice) -> Floats:
    """Sequences of one more micro-batch, or round of them, in all replicas of a group."""
    kinds = ways.kinds
    rounds = np.where(kinds.vp[rows] > 1, kinds.pp[rows], 1)
    return np.asarray(kinds.dp_shard[rows] * kinds.micro_batch[rows] * rounds, dtype=np.float64)


def _refined(
    space: MixedSpace, refiner: Refiner, candidates: dict[tuple[frozenset[int], bool], list[Candidate]], best_s: float
) -> list[RefinedStructure]:
    """Refine the forms with the smallest bounds, and the best ones with other axes and virtual stages.

    Every set of parts has its own quota, so an additional part removes none; the set with the smallest bound comes
    first.  Forms that cannot beat `best_s` or later results are skipped.
    """
    refined: list[RefinedStructure] = []
    for of_parts in sorted(candidates.values(), key=lambda of_parts: of_parts[0].least_s):
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
            best_s = min([best_s, *(found.cost.step_s for found in improved if found.cost.oom_z <= space.most_z)])
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
    return tuple(replace(kind, vp=1) for kind in structure.kinds), structure.micro_batches


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
        for vp in space.chunks(sorted({part for part, _ in kind.places}), len(kind.places)):
            if vp == kind.vp:
                continue
            if space.equal.replicas:
                yield replace(structure, kinds=tuple(replace(other, vp=vp) for other in structure.kinds))
            else:
                kinds = (*structure.kinds[:at], replace(kind, vp=vp), *structure.kinds[at + 1 :])
                yield replace(structure, kinds=kinds)
