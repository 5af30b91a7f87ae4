"""How is it trained?  What stays fixed while plans vary: sequence length, precision and optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoplan.units import check_count

Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Attention = Literal["flash", "flash1", "flash2", "megatron-fused", "unfused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """The training run around the plan.  `precision` is that of the matrix products; lengths are in tokens."""

    seq_len: int
    precision: Precision = "bf16"
    attention: Attention = "flash"
    fused_norm: bool | None = None  # None: what the framework does
    optimizer: Literal["adam"] = "adam"

    def __post_init__(self) -> None:
        check_count("seq_len", self.seq_len, most=10**8)
