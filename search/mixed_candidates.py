"""Structures of pipelines on the parts of a mixed cluster, with lower bounds on their step times.

Groups of parts form pipelines of their own, beside each other, or one group spans several parts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.cost.step import straggler_share
from autoplan.search.mixed_bounds import Candidate, Form, MixedSpace
from autoplan.search.mixed_pipeline_bounds import BISECTIONS, ROUNDING, Ways
from autoplan.search.structures import groupings
from autoplan.spec.axes import COLUMNS, USUAL_SCHEDULES
from autoplan.spec.enums import Schedule

ABOUT = 1.05  # times the smallest possible time of combined groups, at which their ways are compared
MAX_JOINT, MIN_JOINT = 20_000, 3  # structures of combined groups, and ways of each with the same axes
# Plan axes common to all replicas.
_SHARED = (
    *("recompute_modules", "recompute_num_layers"),
    *(
        axis.name
        for axis in COLUMNS
        if axis.name not in ("global_batch", "micro_batch", "tp", "pp", "vp", "sp", "dp_shard", "etp", "schedule")
    ),
)


Candidates = dict[tuple[frozenset[int], bool], list[Candidate]]  # by the parts in use, and whether in several groups


def candidates_of(space: MixedSpace, within_s: float = np.inf) -> Candidates:
    """Return the structures of every set of several parts, in one or several groups, smallest bounds first."""
    return spanning(space, within_s) | beside(space, within_s)


def spanning(space: MixedSpace, within_s: float) -> Candidates:
    """Return the structures of pipelines that span several parts, with bounds below `within_s`."""
    result: Candidates = {}
    for group in _groups(space):
        if len(group) > 1 and (ways := space.ways(group, space.forms(group))) is not None:
            ways = space.bounded(ways, within_s)
            order = np.argsort(ways.least_s, kind="stable").tolist()
            result[frozenset(group), False] = [Candidate(float(ways.least_s[at]), (ways,), (at,)) for at in order]
    return {key: of_parts for key, of_parts in result.items() if of_parts}


def _groups(space: MixedSpace) -> Iterator[tuple[int, ...]]:
    """Yield all groups of parts."""
    parts = range(len(space.spaces))
    return itertools.chain.from_iterable(itertools.combinations(parts, size) for size in range(1, len(parts) + 1))


def beside(space: MixedSpace, within_s: float) -> Candidates:
    """Return the structures of groups beside each other, with bounds below `within_s`."""
    between, vendors = space.problem.cluster.between, space.problem.cluster.vendors
    together = []
    for grouping in groupings(range(len(space.spaces))):
        of_vendors = {vendors[part] for part, *more in grouping if not more}
        if len(grouping) > 1 and (len(of_vendors) == 1 or between.cross_vendor_collectives):
            together.append(grouping)
    rated = _rated(space, together, within_s)
    result: Candidates = defaultdict(list)
    for grouping in together:
        if all(group in rated for group in grouping):
            used = frozenset(itertools.chain(*grouping))
            joined = _joined(space, [rated[group] for group in grouping])
            result[used, True] += [candidate for candidate in joined if candidate.least_s < within_s]
    return {key: sorted(of_parts, key=attrgetter("least_s")) for key, of_parts in result.items() if of_parts}


def _rated(
    space: MixedSpace, together: Sequence[tuple[tuple[int, ...], ...]], within_s: float
) -> dict[tuple[int, ...], Ways]:
    """Return the ways of all groups with their rates beside others, where steps of less than `within_s` allow."""
    ways: dict[tuple[int, ...], Ways] = {}
    forms = {group: space.forms(group) for group in dict.fromkeys(itertools.chain(*together))}
    for group, with_partners in _with_partners(space, together, forms).items():
        if (found := space.ways(group, with_partners)) is not None:
            ways[group] = found
    prices = {
        group: space.prices(of_group, np.full(len(of_group.form), space.problem.cluster.num_devices))
        for group, of_group in ways.items()
    }
    most = {}
    for group, of_group in ways.items():
        floor_s = space.floor_s(of_group, prices[group])
        most[group] = float((of_group.kinds.dp_shard * of_group.kinds.micro_batch / floor_s).max())
    result = {}
    for group, of_group in ways.items():
        others = [
            sum(most.get(other, 0.0) for other in grouping if other != group)
            for grouping in together
            if group in grouping
        ]
        rates = space.rates(of_group, prices[group], least=space.global_batch / within_s - max(others))
        rows = np.flatnonzero(rates.most > 0)
        result[group] = replace(of_group, kinds=replace(of_group.kinds, vp=rates.chunks), most_rate=rates.most).take(
            rows
        )
    return {group: of_group for group, of_group in result.items() if len(of_group.form)}


def _with_partners(
    space: MixedSpace,
    together: Sequence[tuple[tuple[int, ...], ...]],
    forms: Mapping[tuple[int, ...], Sequence[Form]],
) -> dict[tuple[int, ...], list[Form]]:
    """Return the forms of every group for which other groups have equal ones, if replicas must be equal.

    If their micro-batches must be equal too, all replicas together have to divide the batch.
    """
    if not space.equal.replicas:
        return {group: list(of_group) for group, of_group in forms.items()}

    def key(form: Form) -> tuple[int, ...]:
        return form.cell.pp, form.cell.cp, form.cell.tp if space.equal.tp else 0

    counts: dict[tuple[int, ...], dict[tuple[int, ...], set[int]]] = {}
    for group, of_group in forms.items():
        counts[group] = defaultdict(set)
        for form in of_group:
            counts[group][key(form)].add(form.way.count)
    kept: set[tuple[tuple[int, ...], tuple[int, ...], int]] = set()
    for grouping in together:
        for alike in counts[grouping[0]].keys() & set.intersection(*(set(counts[group]) for group in grouping)):
            for numbers in itertools.product(*(counts[group][alike] for group in grouping)):
                if not space.equal.batches or space.global_batch % sum(numbers) == 0:
                    kept |= {(group, alike, number) for group, number in zip(grouping, numbers, strict=True)}
    return {
        group: [form for form in of_group if (group, key(form), form.way.count) in kept]
        for group, of_group in forms.items()
    }


def _joined(space: MixedSpace, groups: Sequence[Ways]) -> Iterator[Candidate]:
    """Yield structures of combined groups, using the ways with the highest rates of each group."""
    tables, about_s = [], ABOUT * space.global_batch / sum(float(ways.most_rate.max()) for ways in groups)
    for ways in groups:
        by_axes: dict[tuple[int, ...], dict[object, int]] = defaultdict(dict)
        kinds = ways.kinds
        # Experts are whole or split like other matrices, which is the same if these are whole.
        split = np.where(kinds.tp == 1, -1, kinds.etp > 1)
        # All pipelines have one schedule, plain beside interleaved 1F1B if these need not be equal.
        is_usual = np.isin(kinds.schedule, [schedule.code for schedule in USUAL_SCHEDULES])
        schedules = kinds.schedule if space.equal.replicas else np.where(is_usual, -1, kinds.schedule)
        of_replicas = [schedules, *([kinds.pp] if space.equal.replicas else [])]
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
    # Where no matrix is split, experts are both.
    choices = list(
        dict.fromkeys(
            rows
            for key in sorted(keys)
            for rows in itertools.product(*(itertools.islice(table[key].values(), max_choices) for table in tables))
        )
    )
    picks = np.array(choices, dtype=np.int64).reshape(-1, len(groups))
    rates = [ways.most_rate[rows] for ways, rows in zip(groups, picks.T, strict=True)]
    for time_s, rows in zip(_joint_s(space, groups, picks, rates, overhead_s).tolist(), choices, strict=True):
        if time_s < np.inf:
            yield Candidate(time_s, tuple(groups), rows)


def _joint_s(
    space: MixedSpace, groups: Sequence[Ways], picks: Ints, rates: Sequence[Floats], end_s: Floats | float
) -> Floats:
    """Time of groups with these ways and rates for the batch, with equal whole micro-batches within a group.

    Infinite where all replicas need equal numbers of micro-batches, which do not add up to the batch, or a group has no
    plan.
    """
    runs, global_batch = np.flatnonzero(np.min(rates, axis=0) > 0), space.global_batch
    chosen = [(ways, rows[runs], rate[runs]) for ways, rows, rate in zip(groups, picks.T, rates, strict=True)]
    if space.equal.batches:
        sizes = [_round(ways, rows) for ways, rows, _ in chosen]
        number, times_s = global_batch / add_up(sizes), zip(sizes, chosen, strict=True)
        within_s = np.max([number * size / rate for size, (_, _, rate) in times_s], axis=0)
        within_s = np.where(number % 1 == 0, within_s, np.inf)
    else:
        within_s = global_batch / add_up(rate for _, _, rate in chosen)
        high = 2.0 * within_s
        for _ in range(BISECTIONS):
            middle = (within_s + high) / 2
            enough = add_up(_done(ways, middle, rows, rate) for ways, rows, rate in chosen) >= global_batch
            within_s, high = np.where(enough, within_s, middle), np.where(enough, middle, high)
    low = np.full(len(picks), np.inf)
    low[runs] = within_s
    num_devices = np.sum([ways.num_devices[rows] for ways, rows in zip(groups, picks.T, strict=True)], axis=0)
    work_s = np.asarray((1.0 + straggler_share(num_devices)) * (end_s + low))
    return np.maximum(work_s, space.exchange_s(groups))


def sharper(space: MixedSpace, candidates: Sequence[Candidate], within_s: float) -> list[Candidate]:
    """Return the candidates with bounds below `within_s`, tightened for plans that take less than that; in their order.

    Accounts for filling and draining of pipelines with the actual number of micro-batches.  At least one group has an
    even share of states or more, which its replicas store and update; all have where replicas must be equal.
    """
    joined: dict[tuple[tuple[int, ...], ...], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        joined[tuple(ways.parts for ways in candidate.groups)].append(candidate)
    result: list[Candidate] = []
    for parts, alike in joined.items():
        if len(parts) == 1:
            result += alike
            continue
        groups, picks = alike[0].groups, np.array([candidate.rows for candidate in alike])
        chosen = [ways.take(rows) for ways, rows in zip(groups, picks.T, strict=True)]
        num_replicas = np.sum([ways.kinds.dp_shard for ways in chosen], axis=0)
        even = [space.rates(ways, space.prices(ways, num_replicas), within_s) for ways in chosen]
        if space.equal.replicas:
            ends_s = np.max([own.end_s for own in even], axis=0)
            times_s = _joint_s(space, groups, picks, [own.most for own in even], ends_s)
        else:
            num_devices = np.full_like(num_replicas, space.problem.cluster.num_devices)
            rates = [space.rates(ways, space.prices(ways, num_devices), within_s).most for ways in chosen]
            of_one = [
                _joint_s(space, groups, picks, [*rates[:at], own.most, *rates[at + 1 :]], own.end_s)
                for at, own in enumerate(even)
            ]
            times_s = np.min(of_one, axis=0)
        result += [
            candidate._replace(least_s=max(time_s, candidate.least_s))
            for candidate, time_s in zip(alike, times_s.tolist(), strict=True)
        ]
    return sorted((candidate for candidate in result if candidate.least_s < within_s), key=attrgetter("least_s"))


def _done(ways: Ways, time_s: Floats | float, rows: Ints | slice, rate: Floats) -> Floats:
    """Sequences that a group completes in a time at a rate, with equal whole micro-batches per replica."""
    size = _round(ways, rows)
    return np.asarray(size * np.floor(time_s * rate / size + ROUNDING), dtype=np.float64)


def _round(ways: Ways, rows: Ints | slice) -> Floats:
    """Sequences of one more micro-batch, or round of them, in all replicas of a group."""
    kinds = ways.kinds
    rounds = np.where(kinds.schedule[rows] == Schedule.INTERLEAVED.code, kinds.pp[rows], 1)
    return np.asarray(kinds.dp_shard[rows] * kinds.micro_batch[rows] * rounds, dtype=np.float64)
