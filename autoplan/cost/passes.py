"""Times of a forward pass and its backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Seconds of the forward and of the backward pass of something, an element per plan."""

    forward_s: Floats
    backward_s: Floats

    @classmethod
    def none(cls, num_plans: int) -> Pass:
        """Passes that take no time."""
        return cls(forward_s=np.zeros(num_plans), backward_s=np.zeros(num_plans))

    @property
    def total_s(self) -> Floats:
        """Both passes."""
        return self.forward_s + self.backward_s

    def take(self, which: Ints | slice) -> Pass:
        """Passes of the plans at the given indices."""
        return Pass(forward_s=self.forward_s[which], backward_s=self.backward_s[which])

    def plus(self, other: Pass) -> Pass:
        """Passes of both."""
        return Pass(forward_s=self.forward_s + other.forward_s, backward_s=self.backward_s + other.backward_s)

    def times(self, forward: Floats | float, backward: Floats | float) -> Pass:
        """Passes that take so many times as long."""
        return Pass(forward_s=forward * self.forward_s, backward_s=backward * self.backward_s)

    def less(self, other: Pass) -> Pass:
        """Passes without those of the other."""
        return Pass(forward_s=self.forward_s - other.forward_s, backward_s=self.backward_s - other.backward_s)

    def otherwise(self, where: Bools, other: Pass) -> Pass:
        """Return these passes, with those of `other` in their place where `where` holds."""
        return Pass(
            forward_s=np.where(where, other.forward_s, self.forward_s),
            backward_s=np.where(where, other.backward_s, self.backward_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """Passes in front of the layers (embedding) and behind them (head and loss)."""

    embedding: Pass
    head: Pass

    def take(self, which: Ints | slice) -> Ends:
        """Ends of the plans at the given indices."""
        return Ends(embedding=self.embedding.take(which), head=self.head.take(which))

    def plus(self, other: Ends) -> Ends:
        """Passes of both."""
        return Ends(embedding=self.embedding.plus(other.embedding), head=self.head.plus(other.head))
