"""Optimizers: bytes of their moments for each parameter, and what their step does beyond reading and writing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

OptimizerName = Literal["adam", "adam8bit", "adam8bit-bnb", "adam4bit", "adafactor", "lion", "sgd", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)

ADAM_MOMENT_BYTES = 8.0  # two of fp32
EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """State that one optimizer keeps beside weights and gradients.

    `factored_bytes` are kept for each row and column of a matrix.  One that `orthogonalises` does so to the momenta of
    the layers' matrices; embedding, head and norms have Adam's moments then.
    """

    title: str
    moment_bytes: float
    factored_bytes: float = 0.0
    orthogonalises: bool = False


TRAITS: Mapping[OptimizerName, Optimizer] = {
    "adam": Optimizer(title="Adam", moment_bytes=ADAM_MOMENT_BYTES),
    # Moments of 8 bits with an fp32 scale for every 256 (torchao 0.7 optim/subclass_8bit.py; bitsandbytes 0.45
    # optim/optimizer.py, Optimizer2State), or of 4 bits with one for every 128 (torchao optim/subclass_4bit.py).
    "adam8bit": Optimizer(title="Adam with 8-bit moments", moment_bytes=EIGHT_BIT_MOMENTS),
    "adam8bit-bnb": Optimizer(title="Adam of bitsandbytes with 8-bit moments", moment_bytes=EIGHT_BIT_MOMENTS),
    "adam4bit": Optimizer(title="Adam with 4-bit moments", moment_bytes=2 * (0.5 + 4 / 128)),
    # Means over rows and over columns instead of second moments, no first ones (arXiv:1804.04235; transformers
    # optimization.py, Adafactor with beta1=None).
    "adafactor": Optimizer(title="Adafactor", moment_bytes=0.0, factored_bytes=4.0),
    "lion": Optimizer(title="Lion", moment_bytes=4.0),  # one momentum (arXiv:2302.06675)
    "sgd": Optimizer(title="SGD with momentum", moment_bytes=4.0),
    # One momentum, made orthogonal by 5 steps of Newton-Schulz (arXiv:2502.16982; torch 2.9 optim/_muon.py).
    "muon": Optimizer(title="Muon", moment_bytes=4.0, orthogonalises=True),
}
NEWTON_SCHULZ_STEPS = 5

# Data-parallel ranks that share states put the matrices together that lie across them: a quarter more than what Adam
# sends at most (arXiv:2502.16982, section 2.3).
GATHERED_MOMENTA_SHARE = 0.25
