"""Times of a forward pass and its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Rows


@dataclass(frozen=True, slots=True)
class Pass(Rows):
    """Seconds of a forward pass and its backward pass, one element per plan."""

    forward_s: Floats
    backward_s: Floats

    @classmethod
    def none(cls, num_plans: int) -> Pass:
        """Passes that take no time."""
        return cls(np.zeros(num_plans), np.zeros(num_plans))

    @property
    def total_s(self) -> Floats:
        """Sum of both passes."""
        return self.forward_s + self.backward_s

    def plus(self, added: Pass) -> Pass:
        """Passes of both."""
        return Pass(self.forward_s + added.forward_s, self.backward_s + added.backward_s)

    def longer(self, forward_s: Floats | float, backward_s: Floats | float) -> Pass:
        """Return the passes lengthened by these seconds."""
        return Pass(self.forward_s + forward_s, self.backward_s + backward_s)

    def times(self, forward: Floats | float, backward: Floats | float) -> Pass:
        """Passes that take so many times as long."""
        return Pass(forward * self.forward_s, backward * self.backward_s)

    def scaled(self, factor: Floats | float) -> Pass:
        """Return both passes multiplied by the factor."""
        return self.times(factor, factor)

    def less(self, removed: Pass) -> Pass:
        """Return the difference to other passes."""
        return Pass(self.forward_s - removed.forward_s, self.backward_s - removed.backward_s)

    def otherwise(self, where: Bools, replacement: Pass) -> Pass:
        """Return these passes, replaced by `replacement` at `where`."""
        return Pass(
            np.where(where, replacement.forward_s, self.forward_s),
            np.where(where, replacement.backward_s, self.backward_s),
        )


class SplitPass(NamedTuple):
    """Seconds of a forward pass and of both halves of its backward pass: for a matrix, its three products."""

    forward_s: Floats
    input_gradient_s: Floats
    weight_gradient_s: Floats

    @property
    def backward_s(self) -> Floats:
        """Sum of both gradients."""
        return self.input_gradient_s + self.weight_gradient_s

    @property
    def joined(self) -> Pass:
        """Return the passes with an unsplit backward pass."""
        return Pass(self.forward_s, self.backward_s)

    def plus(self, added: SplitPass) -> SplitPass:
        """Passes of both."""
        return SplitPass(*map(np.add, self, added))

    def scaled(self, factor: float) -> SplitPass:
        """Return all passes multiplied by the factor."""
        return SplitPass(*(factor * seconds for seconds in self))

    def times(self, forward: Floats, backward: Floats) -> SplitPass:
        """Passes that take so many times as long."""
        return SplitPass(forward * self.forward_s, backward * self.input_gradient_s, backward * self.weight_gradient_s)


@dataclass(frozen=True, slots=True)
class Ends(Rows):
    """Passes before the layers (embedding) and after them (head and loss)."""

    embedding: Pass
    head: Pass

    def plus(self, added: Ends) -> Ends:
        """Passes of both."""
        return Ends(self.embedding.plus(added.embedding), self.head.plus(added.head))
