"""Order of the chunks of a pipeline: in the model, and on the stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from autoplan.spec.axes import V_SHAPED
from autoplan.spec.enums import Schedule

Values = TypeVar("Values")


def in_turn(rounds: Iterable[tuple[Values, ...]], schedule: Schedule) -> list[tuple[Values, ...]]:
    """Return values of the chunks of all stages, round by round, in the order of the model from that of the stages.

    Or the reverse: every other round of a V runs from the last stage to the first.
    """
    return [values[::-1] if schedule in V_SHAPED and at % 2 else values for at, values in enumerate(rounds)]


def chunks_of_stages(chunks: Sequence[Values], pp: int, schedule: Schedule) -> list[tuple[Values, ...]]:
    """Return the values of the chunks of every stage, from those of all chunks in model order."""
    rounds = (tuple(chunks[first : first + pp]) for first in range(0, len(chunks), pp))
    return list(zip(*in_turn(rounds, schedule), strict=True))
