"""Layouts of plans on a mixed cluster that bounds leave open: the layers of their stages and their micro-batches."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.step import straggler_share
from autoplan.search.balance import splits, spread_layers
from autoplan.search.mixed_bounds import Candidate, MixedSpace
from autoplan.search.mixed_pipeline_bounds import PipelineBounds, Prices, Ways
from autoplan.search.structures import Layout, Structure
from autoplan.spec.enums import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLayouts:
    """Layouts of a candidate: all replicas have the same layers, and even shares of the states."""

    space: MixedSpace
    candidate: Candidate
    groups: tuple[Ways, ...]  # one way each
    prices: tuple[Prices, ...]  # of each group
    end_s: Floats  # lower bound on the end of a step

    def within(self, within_s: float) -> Iterator[Layout]:
        """Yield all layouts with which plans may take `within_s` or less."""
        space, pp, structure = self.space, int(self.groups[0].kinds.pp[0]), self.space.structure(self.candidate)
        num_devices = np.sum([ways.num_devices for ways in self.groups], axis=0)
        passes_s = within_s / (1.0 + straggler_share(num_devices)) - self.end_s
        parts = tuple(itertools.chain(*(ways.parts for ways in self.groups)))
        for vp in space.chunks(parts, pp, structure.kinds[0].schedule):
            of_vp = replace(structure, kinds=tuple(replace(kind, vp=vp) for kind in structure.kinds))
            numbers, rounds_of_kinds = self._numbers(of_vp)
            bounds, fewest = [], 2 * pp if of_vp.schedule == Schedule.DUALPIPE_V else 1
            if any(kind.round * own.max(initial=0) < fewest for kind, own in zip(of_vp.kinds, numbers, strict=True)):
                continue
            for ways, prices, kind, own in zip(self.groups, self.prices, of_vp.kinds, numbers, strict=True):
                rows, m = np.zeros_like(own), np.maximum(kind.round * own, fewest)
                bounds.append((PipelineBounds.of(space, ways.take(rows), prices.take(rows), (vp,), m), m))
            if rounds_of_kinds is None:
                times_s = [of_kind.least_s(m) for of_kind, m in bounds]
                most = [int(np.searchsorted(of_kind, passes_s[0], side="right")) for of_kind in times_s]
                counts = [kind.count for kind in of_vp.kinds]
                rounds_of_kinds = splits(most, counts, of_vp.sizes, space.global_batch)
            for rounds in rounds_of_kinds:
                most_layers = []
                for (of_kind, m), kind, total, own in zip(bounds, of_vp.kinds, rounds, numbers, strict=True):
                    row = np.searchsorted(own, [-(-total // kind.count)])
                    most_layers.append(of_kind.take(row).layers_within(m[row], passes_s)[0])
                of_stages = np.min(most_layers, axis=0).tolist()
                for layers in spread_layers(space.problem.model.num_layers, vp, of_stages):
                    yield Layout(of_vp, layers, rounds)

    def _numbers(self, structure: Structure) -> tuple[list[Ints], Iterable[tuple[int, ...]] | None]:
        """Return the possible rounds of micro-batches of a replica of every kind, and all splits if known already."""
        global_batch, kinds = self.space.global_batch, structure.kinds
        most = [-(-global_batch // (kind.count * size)) for kind, size in zip(kinds, structure.sizes, strict=True)]
        if structure.is_in_step(self.space.equal):
            in_step = structure.rounds_in_step(global_batch)
            rounds = [in_step] if in_step else []
        elif len(kinds) == 1:
            rounds = list(splits(most, [kinds[0].count], structure.sizes, global_batch))
        else:
            return [np.arange(1, number + 1) for number in most], None
        of_kinds = zip(*rounds, strict=True) if rounds else [()] * len(kinds)
        return [
            np.array([-(-total // kind.count) for total in totals], dtype=np.int64)
            for totals, kind in zip(of_kinds, kinds, strict=True)
        ], rounds


def open_layouts(space: MixedSpace, candidates: Iterable[Candidate]) -> list[OpenLayouts]:
    """Return the layouts of the candidates, in their order; costs are worked out for all of them at once."""
    alike: dict[tuple[tuple[int, ...], ...], list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        alike[tuple(ways.parts for ways in candidate.groups)].append(candidate)
    result = []
    for of_parts in alike.values():
        picks = np.array([candidate.rows for candidate in of_parts]).T
        chosen = [ways.take(rows) for ways, rows in zip(of_parts[0].groups, picks, strict=True)]
        replicas = np.sum([ways.kinds.dp_shard for ways in chosen], axis=0)
        prices = [space.prices(ways, replicas) for ways in chosen]
        end_s = np.max([space.rest_s(*group) for group in zip(chosen, prices, strict=True)], axis=0)
        for at, candidate in enumerate(of_parts):
            row = np.array([at])
            layouts = OpenLayouts(
                space=space,
                candidate=candidate,
                groups=tuple(ways.take(row) for ways in chosen),
                prices=tuple(of_group.take(row) for of_group in prices),
                end_s=end_s[row],
            )
            result.append(layouts)
    return sorted(result, key=lambda layouts: layouts.candidate.least_s)
