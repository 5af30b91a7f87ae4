"""Results of a search so far: counts and best plans, merged from blocks and stored as text in a study.

Two classes keep plans: `NearBest` keeps all plans within a margin of the fastest, `Front` the Pareto front.  Both
decide which bounds rule a plan out, so the same engine searches one or several measures.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints
from autoplan.search.damage import refusing_damage
from autoplan.search.ranking import TIE, Leaders, ordering
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import PlanBatch, batch_arrays

FITS, RISKY = VERDICTS.index("fits"), VERDICTS.index("risky")
KEPT = 1000  # plans that a result ranks
KEPT_WINNERS = 20_000  # best plans of cells, one per cell in a result
SLACK = 2  # tie widths by which rounding may put a bound above an estimate
MAX_BYTES = 1 << 24  # unpacked size of one block's text


class NearBest:
    """Incumbents in one measure: all plans within `margin` of the best."""

    def __init__(self, margin: float) -> None:
        self.margin = margin
        self.best: float = math.inf
        self.least_skipped: float = math.inf
        self.plans: Leaders = Leaders(KEPT)

    @property
    def batch(self) -> PlanBatch | None:
        """Plans, best first; some may be above the bar, which may have dropped since they were added."""
        return self.plans.batch

    @property
    def bar(self) -> float:
        """Threshold: only plans with a lower bound below it need pricing."""
        # The slack keeps a plan whose bound equals its price below the bar.
        return self.best * (1.0 + self.margin) * (1.0 + 2 * TIE)

    def emptied(self) -> NearBest:
        """Return incumbents with the same bar but without plans."""
        empty = NearBest(self.margin)
        empty.best = self.best
        return empty

    def rules_out(self, bounds: Floats) -> Bools:
        """Return whether plans with these bounds are not below the bar."""
        return np.asarray(bounds[:, 0] >= self.bar)

    def skip(self, bounds: Floats) -> None:
        """Record the smallest of these bounds, whose plans are ruled out."""
        self.least_skipped = min(self.least_skipped, float(bounds[:, 0].min(initial=math.inf)))

    def offer(self, measures: Floats, batch: PlanBatch) -> None:
        """Add the plans of `batch` that are among the best."""
        self.plans.offer(measures[:, 0], batch)
        self.best = min(self.best, float(measures[:, 0].min(initial=math.inf)))

    def rows(self) -> dict[str, Any]:
        """Return plain values for `add_rows`, some kilobytes, without plans above the bar."""
        figures = {"best": _finite(self.best), "least_skipped": _finite(self.least_skipped)}
        return figures | {"plans": _leader_rows(self.plans, self.bar)}

    def add_rows(self, rows: dict[str, Any], placement: tuple[str, ...] | None) -> None:
        """Take in what was kept elsewhere; the order does not matter."""
        self.best = min(self.best, _infinite(rows["best"]))
        self.least_skipped = min(self.least_skipped, _infinite(rows["least_skipped"]))
        _offer_rows(self.plans, rows["plans"], placement)


class Front:
    """Pareto front in several measures, with the plainest of equal plans; logarithms are compared in steps of `TIE`."""

    def __init__(self, num_measures: int) -> None:
        self.batch: PlanBatch | None = None
        self._keys: Ints = np.empty((0, num_measures), dtype=np.int64)
        self._known: Ints = self._keys  # keys of plans kept elsewhere, which also rule out others

    def __len__(self) -> int:
        return len(self._keys)

    def emptied(self) -> Front:
        """Return a front that rules out the same plans but contains none."""
        empty = Front(self._keys.shape[1])
        empty._known = np.concatenate([self._known, self._keys])
        return empty

    def rules_out(self, bounds: Floats) -> Bools:
        """Return whether plans with these bounds cannot belong to the front."""
        open_rows = np.flatnonzero(np.isfinite(bounds).all(axis=1))
        keys = np.floor(np.log(bounds[open_rows]) / TIE).astype(np.int64) - SLACK
        rivals = np.concatenate([self._known, self._keys])
        # Plans that are good in all measures rule out the most others and come first.
        for rival in rivals[np.argsort(rivals.sum(axis=1))]:
            is_open = ~(rival <= keys).all(axis=1)
            open_rows, keys = open_rows[is_open], keys[is_open]
        out = np.ones(len(bounds), dtype=np.bool_)
        out[open_rows] = False
        return out

    def skip(self, bounds: Floats) -> None:
        """Do nothing, as a front has no gap to report."""

    def offer(self, measures: Floats, batch: PlanBatch) -> None:
        """Add the plans of `batch` that belong to the front, and drop the plans that they beat."""
        self._add(np.round(np.log(measures) / TIE).astype(np.int64), batch)

    def _add(self, keys: Ints, batch: PlanBatch) -> None:
        if self.batch is not None:
            keys, batch = np.concatenate([self._keys, keys]), PlanBatch.concatenate([self.batch, batch])
        plainness = np.empty(len(keys), dtype=np.int64)
        plainness[ordering(np.ones(len(keys)), batch)] = np.arange(len(keys))
        # In this order the first remaining plan is not dominated by the others.
        candidates, front = np.lexsort([plainness, *keys.T[::-1]]), []
        while len(candidates):
            front.append(int(candidates[0]))
            candidates = candidates[~(keys[candidates[0]] <= keys[candidates]).all(axis=1)]
        self._keys, self.batch = keys[front], batch.take(np.array(front, dtype=np.int64))

    def rows(self) -> dict[str, Any]:
        """Return plain values for `add_rows`."""
        return {} if self.batch is None else {**rows_of(self.batch), "keys": self._keys.tolist()}

    def add_rows(self, rows: dict[str, Any], placement: tuple[str, ...] | None) -> None:
        """Take in what was kept elsewhere; the order does not matter."""
        if rows:
            self._add(np.array(rows["keys"], dtype=np.int64), batch_of(rows, placement))


Incumbents = NearBest | Front  # bounds and measures have the shape (plans, measures)


@dataclass(slots=True)
class Findings:
    """Findings in one block of cells, or in many."""

    incumbents: Incumbents
    winners: Leaders = field(default_factory=lambda: Leaders(KEPT_WINNERS))  # best plans of cells in the first measure
    # Numbers of expanded cells, bounded plans, priced plans, and priced plans by verdict.
    counts: Counter[str] = field(default_factory=Counter)

    def packed(self) -> str:
        """Return the findings as text for a trial attribute."""
        table = {
            "counts": self.counts,
            "incumbents": self.incumbents.rows(),
            "winners": _leader_rows(self.winners, math.inf),
        }
        return base64.b85encode(zlib.compress(msgspec.json.encode(table))).decode()

    def add_packed(self, text: str, placement: tuple[str, ...] | None) -> None:
        """Add findings from `packed` text, with the placement of the space; InputError if the text is damaged."""
        with refusing_damage():
            table = msgspec.json.decode(zlib.decompressobj().decompress(base64.b85decode(text), MAX_BYTES))
            self.counts.update(table["counts"])
            self.incumbents.add_rows(table["incumbents"], placement)
            _offer_rows(self.winners, table["winners"], placement)


def _leader_rows(leaders: Leaders, bar: float) -> dict[str, Any]:
    """Return the plans not above `bar` as plain values, column by column."""
    if leaders.batch is None:
        return {"objective": []}
    keep = leaders.objective <= bar
    return {**rows_of(leaders.batch.take(keep)), "objective": leaders.objective[keep].tolist()}


def _offer_rows(leaders: Leaders, rows: dict[str, Any], placement: tuple[str, ...] | None) -> None:
    """Offer plans from the plain values of `_leader_rows`."""
    if rows["objective"]:
        leaders.offer(np.array(rows["objective"], dtype=np.float64), batch_of(rows, placement))


def rows_of(batch: PlanBatch) -> dict[str, Any]:
    """Return plans as plain values, column by column."""
    used, layout = np.unique(batch.layout, return_inverse=True)
    columns: dict[str, Any] = {name: getattr(batch, name).tolist() for name in batch_arrays()}
    return columns | {"layout": layout.tolist(), "layouts": [batch.layouts[at] for at in used]}


def batch_of(rows: dict[str, Any], placement: tuple[str, ...] | None) -> PlanBatch:
    """Return plans from the plain values of `rows_of`."""
    columns = {name: np.array(rows[name]) for name in batch_arrays()}
    layouts = tuple(tuple(layers) for layers in rows["layouts"])
    return PlanBatch(**columns, layouts=layouts, placement=placement)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _infinite(value: float | None) -> float:
    return math.inf if value is None else value
