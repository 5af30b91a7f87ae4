"""Blocks of cells that are priced together, in rounds: each round knows the results of the previous one.

The result of a block depends only on the block, so the answer does not depend on who prices it, or when.
`search.ledger` shares the blocks of a round among many workers; here one process prices them one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from autoplan.search.space import Cell

CELL_AXES = tuple(field.name for field in fields(Cell))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Cells that are priced together, by their indices in the space."""

    verdict: int  # of the plans that are searched for
    round: int  # blocks of one round know the results of all earlier rounds
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """Outcome of one cell; `value` is None where no plan in it had a chance."""

    value: float | None
    constraints: dict[str, float]  # feasible at 0 or less
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOutcome:
    """Outcome of a block: `findings`, packed, is all that the answer needs; `cells` is for those who watch a study."""

    findings: str
    cells: dict[int, CellOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """A block that was priced, and its packed findings."""

    block: Block
    findings: str


NextRound = Callable[[list[BlockResult]], Sequence[Block]]  # empty: there is nothing left to price
PriceBlock = Callable[[Block], BlockOutcome]


class LocalRounds:
    """Prices rounds of blocks in this process."""

    def __init__(self) -> None:
        self._results: list[BlockResult] = []

    def results(self) -> list[BlockResult]:
        """Return what has been priced by now."""
        return self._results

    def run(self, next_round: NextRound, price: PriceBlock) -> None:
        """Price blocks until the next round is empty."""
        while blocks := next_round(self._results):
            self._results += [BlockResult(block=block, findings=price(block).findings) for block in blocks]
