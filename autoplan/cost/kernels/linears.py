"""Matrices of a model's blocks: their sizes, how ranks split them, and their parameter counts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

ADDED = "added_"  # name prefix of matrices beyond those usual for a kind of block

Split = Literal["column", "row", "replicated", "expert_column", "expert_row"]


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight matrix of `in_size` x `out_size`, and how tensor parallelism splits it.

    A `column` matrix is split along its outputs, a `row` matrix along its inputs, a `replicated` one not at all; an
    `expert` matrix exists once per expert and is distributed by expert parallelism.  `grouped_out_size` of the outputs
    are keys and values, which are split into at most `num_groups` pieces.
    """

    name: str
    in_size: int
    out_size: int
    split: Split
    _: KW_ONLY
    has_bias: bool = False
    copies: int = 1
    grouped_out_size: int = 0
    num_groups: int = 1
    is_frozen: bool = False  # no weight gradient
    weight_bytes: float | None = None  # of a quantised frozen weight
    saves_input: bool = False  # the inputs are kept although no gradient needs them
    reads_encoder: bool = False  # multiplies encoder positions instead of decoder tokens
    is_shared: bool = False  # its weights are part of another matrix of the block
    adapts: str = ""  # for an adapter, the name of the frozen matrix that it adapts

    @property
    def is_expert(self) -> bool:
        """Return whether the matrix belongs to a routed expert."""
        return self.split.startswith("expert")

    @property
    def num_weights(self) -> int:
        """Number of weights in all copies, without biases."""
        return self.copies * self.in_size * self.out_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters in all copies, with biases; 0 if shared."""
        return 0 if self.is_shared else self.copies * (self.in_size + self.has_bias) * self.out_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Matrices of one block, and its other parameters (norms, sinks, convolution)."""

    linears: tuple[Linear, ...]
    num_norm_parameters: int  # replicated on every tensor-parallel rank
    num_other_parameters: int = 0  # cut by tensor parallelism
    is_frozen: bool = False  # except for its adapters
    drops_inputs: bool = False  # adapters take what dropout leaves of the inputs
    num_magnitudes: int = 0  # trained beside adapters, cut by tensor parallelism: one for each output (DoRA)

    @property
    def num_parameters(self) -> int:
        """Number of elements of the block."""
        return (
            sum(linear.num_parameters for linear in self.linears)
            + self.num_norm_parameters
            + self.num_other_parameters
            + self.num_magnitudes
        )

    def keeps_input(self, name: str) -> bool:
        """Return whether the gradient of any weight needs what enters the matrix of that name.

        A frozen matrix needs its weights alone for the gradient of its inputs; an adapter beside it needs the inputs,
        or what dropout leaves of them.
        """
        adapts = "" if self.drops_inputs else name
        return any(
            (linear.name == name and (not linear.is_frozen or linear.saves_input))
            or (linear.adapts and linear.adapts == adapts)
            for linear in self.linears
        )
