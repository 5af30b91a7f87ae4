"""Times of a forward pass and its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Rows


@dataclass(frozen=True, slots=True)
class Pass(Rows):
    """Seconds of the forward and of the backward pass of something, an element per plan."""

    forward_s: Floats
    backward_s: Floats

    @classmethod
    def none(cls, num_plans: int) -> Pass:
        """Passes that take no time."""
        return cls(np.zeros(num_plans), np.zeros(num_plans))

    @property
    def total_s(self) -> Floats:
        """Both passes."""
        return self.forward_s + self.backward_s

    def plus(self, added: Pass) -> Pass:
        """Passes of both."""
        return Pass(self.forward_s + added.forward_s, self.backward_s + added.backward_s)

    def longer(self, forward_s: Floats | float, backward_s: Floats | float) -> Pass:
        """Passes that take so many seconds longer, of every plan."""
        return Pass(self.forward_s + forward_s, self.backward_s + backward_s)

    def times(self, forward: Floats | float, backward: Floats | float) -> Pass:
        """Passes that take so many times as long."""
        return Pass(forward * self.forward_s, backward * self.backward_s)

    def scaled(self, factor: Floats | float) -> Pass:
        """Passes that both take so many times as long."""
        return self.times(factor, factor)

    def less(self, removed: Pass) -> Pass:
        """Passes without those of the other."""
        return Pass(self.forward_s - removed.forward_s, self.backward_s - removed.backward_s)

    def otherwise(self, where: Bools, replacement: Pass) -> Pass:
        """Return these passes, with those of `replacement` in their place where `where` holds."""
        return Pass(
            np.where(where, replacement.forward_s, self.forward_s),
            np.where(where, replacement.backward_s, self.backward_s),
        )


class SplitPass(NamedTuple):
    """Seconds of a forward pass, and of a backward pass by what it makes: of a matrix these are its three products."""

    forward_s: Floats
    input_gradient_s: Floats
    weight_gradient_s: Floats

    @property
    def backward_s(self) -> Floats:
        """Both gradients."""
        return self.input_gradient_s + self.weight_gradient_s

    @property
    def joined(self) -> Pass:
        """The passes as they are where no schedule takes them apart."""
        return Pass(self.forward_s, self.backward_s)

    def plus(self, added: SplitPass) -> SplitPass:
        """Passes of both."""
        return SplitPass(*map(np.add, self, added))

    def scaled(self, factor: float) -> SplitPass:
        """Passes that all take so many times as long."""
        return SplitPass(*(factor * seconds for seconds in self))

    def times(self, forward: Floats, backward: Floats) -> SplitPass:
        """Passes that take so many times as long."""
        return SplitPass(forward * self.forward_s, backward * self.input_gradient_s, backward * self.weight_gradient_s)


@dataclass(frozen=True, slots=True)
class Ends(Rows):
    """Passes in front of the layers (embedding) and behind them (head and loss)."""

    embedding: Pass
    head: Pass

    def plus(self, added: Ends) -> Ends:
        """Passes of both."""
        return Ends(self.embedding.plus(added.embedding), self.head.plus(added.head))
