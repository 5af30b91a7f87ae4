"""Blocks of cells that are priced together, in rounds: each round uses the results of earlier ones.

The result of a block depends only on the block, so the answer does not depend on which worker prices it, or when.
`search.ledger` distributes the blocks of a round over many workers; this module prices them one after another in one
process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Cells that are priced together, by their indices in the space."""

    verdict: int  # of the plans being searched for
    round: int  # blocks of a round use the results of all earlier rounds
    cells: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """Outcome of one cell; `value` is None if all its plans were ruled out."""

    value: float | None
    constraints: dict[str, float]  # feasible at 0 or less
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOutcome:
    """Outcome of a block: packed `findings` are all the answer needs; `cells` is for observers of the study."""

    findings: str
    cells: dict[int, CellOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """A priced block and its packed findings."""

    block: Block
    findings: str


NextRound = Callable[[list[BlockResult]], Sequence[Block]]  # empty: nothing is left to price
PriceBlock = Callable[[Block], BlockOutcome]


class LocalRounds:
    """Prices rounds of blocks in this process."""

    def __init__(self) -> None:
        self._results: list[BlockResult] = []

    def results(self) -> list[BlockResult]:
        """Return the blocks priced so far."""
        return self._results

    def run(self, next_round: NextRound, price: PriceBlock) -> None:
        """Price blocks until the next round is empty."""
        while blocks := next_round(self._results):
            self._results += [BlockResult(block=block, findings=price(block).findings) for block in blocks]
