"""Rules on the plans of programs built on Accelerate, such as the Trainer of transformers.

They are the rules of PyTorch's FSDP2, restricted to what Accelerate offers: no pipelines, no sequence parallelism.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.frameworks.accelerate.export import LIMITS
from autoplan.frameworks.common.rules import Rule, SupportedWords
from autoplan.frameworks.fsdp2 import rules as fsdp2
from autoplan.spec.axes import offered
from autoplan.spec.enums import ChunkedLoss, MainWeights

EXTRAS = offered("accelerate")

LOSSES = SupportedWords(
    axis="chunked_loss",
    words=(ChunkedLoss.NONE, ChunkedLoss.LIGER, ChunkedLoss.CUT),
    source="transformers integrations/liger.py; axolotl integrations/cut_cross_entropy",
)
RULES = (
    *fsdp2.rules_offering(*EXTRAS, "reduce_dtype"),
    *LIMITS,
    LOSSES.rule(),
    Rule(
        source="axolotl integrations/liger/args.py:108",
        holds=lambda s, b: (b.chunked_loss != ChunkedLoss.LIGER.code) | (b.tp == 1),
        text=lambda s, p: f"chunked_loss liger with tp {p.tp}: use cut, or leave it out",
    ),
    Rule(
        source="trl trainer/dpo_trainer.py, whose loss takes the logits",
        holds=lambda s, b: (b.chunked_loss == 0) | (s.training.preference is None),
        text=lambda s, p: f"chunked_loss {p.chunked_loss} with pairs of answers: leave it out",
    ),
    Rule(
        source="peft/tuners/tuners_utils.py autocast_adapter_dtype",
        holds=lambda s, b: ~b.wide_adapters | (s.training.has_adapters & (b.main_weights == MainWeights.FP32.code)),
        text=lambda s, p: "wide_adapters needs adapters, and main_weights fp32: leave it out",
    ),
)
BOOK = replace(fsdp2.BOOK, rules=RULES, extras=EXTRAS, supported=(*fsdp2.BOOK.supported, LOSSES))
