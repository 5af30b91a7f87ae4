"""Question to the memory oracle, and how it tells the moments of a step apart."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan

# (chunk of the rank, what runs there): a part of a step at whose ends memory is linear in the layers.
Moment = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Question to the oracle: a plan, and one of its pipeline ranks."""

    model: ModelSpec
    plan: ParallelPlan
    seq_len: int
    stage: int = 0
    fused_norm: bool = True  # as accelerators have it; the host's operations keep fp32 copies
