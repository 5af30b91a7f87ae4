"""Query for the memory oracle, and the moments of a step that it distinguishes."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan

# (chunk of the rank, running part): a part of a step in which peak memory is linear in the number of layers.
Moment = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Query for the oracle: a plan, and one of its pipeline ranks."""

    model: ModelSpec
    plan: ParallelPlan
    seq_len: int
    stage: int = 0
    fused_norm: bool = True  # as on accelerators; CPU operations keep fp32 copies
