"""Which widths can matrix units multiply in 8 and 4 bits?"""

from __future__ import annotations

import numpy as np

from autoplan.plan import PRECISIONS, PlanBatch
from autoplan.rules import Bools, Rule, Setting
from autoplan.rules.widths import gemm_widths

_BLOCK = np.array([{"mxfp8": 32, "fp8": 16, "nvfp4": 16}.get(precision, 1) for precision in PRECISIONS], dtype=np.int64)


def _aligned_widths(setting: Setting, batch: PlanBatch) -> Bools:
    block = _BLOCK[batch.precision]
    return np.all([width % block == 0 for width in gemm_widths(setting.model, batch.tp, batch.etp)], axis=0)


def _aligned_tokens(setting: Setting, batch: PlanBatch) -> Bools:
    tokens = batch.micro_batch * (setting.training.seq_len // batch.cp)
    return tokens % _BLOCK[batch.precision] == 0


def rules(source: str) -> tuple[Rule, ...]:
    """That the sizes of every product are whole blocks; `source` is where the framework says so."""
    return (
        Rule(
            source=source,
            holds=_aligned_widths,
            says=lambda s, p: (
                f"{p.precision} needs the widths of a rank divisible by {_BLOCK[PRECISIONS.index(p.precision)]}, "
                f"with tp {p.tp} and etp {p.etp} they are not: lower tp or etp, or use bf16"
            ),
        ),
        Rule(
            source=source,
            holds=_aligned_tokens,
            says=lambda s, p: (
                f"{p.precision} needs the {p.micro_batch * (s.training.seq_len // p.cp)} tokens of a micro-batch "
                f"divisible by {_BLOCK[PRECISIONS.index(p.precision)]}: lower cp or use bf16"
            ),
        ),
    )
