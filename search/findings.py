"""What has a search seen so far?  Counts and best plans, put together from blocks, and as text for a study."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec
import numpy as np

from autoplan.base.arrays import Floats
from autoplan.search.ranking import TIE, Leaders
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import PlanBatch

FITS, RISKY = VERDICTS.index("fits"), VERDICTS.index("risky")
KEPT = 1000  # plans that a result ranks
KEPT_WINNERS = 20_000  # best plans of cells, of which a result tells one a cell
COUNTS = ("expanded", "bounded", "priced")
MOST_BYTES = 1 << 24  # of the text of one block when unpacked


@dataclass(slots=True)
class Findings:
    """What has been seen of plans that are as safe as `wanted`; `margin` as in `search.study.search`."""

    wanted: int
    margin: float
    best: float = np.inf  # seconds per sequence
    plans: Leaders = field(default_factory=lambda: Leaders(KEPT))
    winners: Leaders = field(default_factory=lambda: Leaders(KEPT_WINNERS))  # of the cells, block by block
    left: float = np.inf  # the least bound of what was not priced for it
    expanded: int = 0  # cells
    bounded: int = 0
    priced: int = 0
    found: dict[int, int] = field(default_factory=lambda: {FITS: 0, RISKY: 0})

    @property
    def bar(self) -> float:
        """What a bound has to be below to be worth a price."""
        # A plan whose bound is its price is below it, too.
        return self.best * (1.0 + self.margin) * (1.0 + 2 * TIE)

    def skip(self, bound: Floats) -> None:
        """Remember the least of those bounds that are not below the bar."""
        self.left = min(self.left, float(bound[bound >= self.bar].min(initial=np.inf)))

    def add(self, other: Findings) -> None:
        """Take in what was seen elsewhere; the order does not matter."""
        self.best, self.left = min(self.best, other.best), min(self.left, other.left)
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for verdict, count in other.found.items():
            self.found[verdict] += count
        for mine, others in ((self.plans, other.plans), (self.winners, other.winners)):
            if others.batch is not None:
                mine.offer(others.objective, others.batch)

    def packed(self) -> str:
        """As text, for an attribute of a trial: some kilobytes, since plans above the bar are left out."""
        table = {
            "counts": [getattr(self, name) for name in COUNTS],
            "found": [self.found[FITS], self.found[RISKY]],
            "best": _finite(self.best),
            "left": _finite(self.left),
            "plans": _rows(self.plans, self.bar),
            "winners": _rows(self.winners, np.inf),
        }
        return as_text(table)

    @classmethod
    def unpacked(cls, text: str, wanted: int, margin: float, placement: tuple[str, ...] | None) -> Findings:
        """What `packed` made; the plans get the placement that all plans of a space have."""
        table = from_text(text)
        seen = cls(wanted=wanted, margin=margin, best=_infinite(table["best"]), left=_infinite(table["left"]))
        for name, count in zip(COUNTS, table["counts"], strict=True):
            setattr(seen, name, count)
        seen.found = dict(zip((FITS, RISKY), table["found"], strict=True))
        for pool, rows in ((seen.plans, table["plans"]), (seen.winners, table["winners"])):
            if rows["objective"]:
                pool.offer(np.array(rows["objective"], dtype=np.float64), batch_of(rows, placement))
        return seen


def together(parts: Iterable[Findings], wanted: int, margin: float) -> Findings:
    """What all `parts` have seen."""
    seen = Findings(wanted=wanted, margin=margin)
    for part in parts:
        seen.add(part)
    return seen


def as_text(table: dict[str, Any]) -> str:
    """Plain values as text, for an attribute of a trial."""
    return base64.b85encode(zlib.compress(msgspec.json.encode(table))).decode()


def from_text(text: str) -> dict[str, Any]:
    """What `as_text` made a text of."""
    return msgspec.json.decode(zlib.decompressobj().decompress(base64.b85decode(text), MOST_BYTES))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _columns() -> Iterable[str]:
    return (one.name for one in fields(PlanBatch) if one.name not in ("layouts", "placement"))


def _rows(leaders: Leaders, bar: float) -> dict[str, Any]:
    """The plans that are not above `bar`, column by column."""
    if leaders.batch is None:
        return {"objective": []}
    keep = leaders.objective <= bar
    return {**rows_of(leaders.batch.take(keep)), "objective": leaders.objective[keep].tolist()}


def rows_of(batch: PlanBatch) -> dict[str, Any]:
    """Plans as plain values, column by column."""
    used, layout = np.unique(batch.layout, return_inverse=True)
    columns: dict[str, Any] = {name: getattr(batch, name).tolist() for name in _columns()}
    return columns | {"layout": layout.tolist(), "layouts": [batch.layouts[at] for at in used]}


def batch_of(rows: dict[str, Any], placement: tuple[str, ...] | None) -> PlanBatch:
    """What `rows_of` was made of."""
    columns = {name: np.array(rows[name]) for name in _columns()}
    layouts = tuple(tuple(layers) for layers in rows["layouts"])
    return PlanBatch(**columns, layouts=layouts, placement=placement)
