"""Structures of pipelines on the parts of a mixed cluster, with lower bounds on their step times.

Groups of parts form pipelines of their own, beside each other, or one group spans several parts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.cost.step import straggler_share
from autoplan.search.mixed_bounds import Candidate, MixedSpace
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
    rounds = np.where(kinds.schedule[rows] == Schedule.INTERLEAVED.code, kinds.pp[rows], 1)
    return np.asarray(kinds.dp_shard[rows] * kinds.micro_batch[rows] * rounds, dtype=np.float64)
