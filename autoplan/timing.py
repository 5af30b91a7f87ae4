"""How far are the model's rates from this cluster and framework, and how far may a prediction be off?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoplan.errors import InputError
from autoplan.units import check_positive

Operation = Literal["gemm", "attention", "experts", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

# What the numbers of a shape are, by operation.  A GEMM multiplies m x k by k x n.  `attention` is a causal forward
# pass over `batch` sequences, with a window of 0 for none.  `experts` is the forward pass of all routed experts of
# one rank.  The buffer of a collective is the whole one: what an all-gather ends with, a reduce-scatter begins with.
SHAPES: dict[Operation, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention": ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window"),
    "experts": ("tokens", "hidden_size", "ffn_size", "experts_per_token", "num_experts", "etp", "ep"),
    "all_reduce": ("num_devices", "buffer_bytes"),
    "all_gather": ("num_devices", "buffer_bytes"),
    "reduce_scatter": ("num_devices", "buffer_bytes"),
    "all_to_all": ("num_devices", "buffer_bytes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How long one operation of one shape took on one device: the numbers of `shape` are those that `SHAPES` names."""

    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    device: str
    seconds: float
    kernel: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        names = SHAPES[self.operation]
        if len(self.shape) != len(names) or any(size < 0 for size in self.shape):
            raise InputError(f"{self.operation} needs {', '.join(names)}, none negative, got {self.shape}")
        check_positive("seconds", self.seconds, most=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Multiplicative factors on the time of each component, and the residual spread that remains.

    A factor of 1 is the reference model.  The spreads are standard deviations of log(measured / predicted); the 90 %
    interval of a step time is exp(+-1.645 time_spread) around the prediction, and the probability of running out of
    memory follows from `memory_spread`.
    """

    name: str = "reference"
    gemm: float = 1.0
    attention: float = 1.0
    memory_bound: float = 1.0
    host: float = 1.0
    scale_up: float = 1.0  # collectives inside the scale-up domain
    scale_out: float = 1.0  # collectives over the network
    # Without calibration: covers nine tenths of the runs of a published source, in the mean over sources
    # (benchmarks/results); and between the .02 of a known framework and the .08 of an unknown one (`modelling` G3).
    time_spread: float = 0.25
    memory_spread: float = 0.06
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("gemm", "attention", "memory_bound", "host", "scale_up", "scale_out"):
            check_positive(name, getattr(self, name), most=100.0)
        for name in ("time_spread", "memory_spread"):
            check_positive(name, getattr(self, name), most=5.0)
