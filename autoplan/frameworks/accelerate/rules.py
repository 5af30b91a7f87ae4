"""Rules on the plans of programs built on Accelerate, such as the Trainer of transformers.

They are the rules of PyTorch's FSDP2, restricted to what Accelerate offers: no pipelines, no sequence parallelism.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.frameworks.accelerate.export import LIMITS
from autoplan.frameworks.common.rules import Rule
from autoplan.frameworks.fsdp2 import rules as fsdp2
from autoplan.spec.axes import offered
from autoplan.spec.enums import MainWeights

EXTRAS = offered("accelerate")

RULES = (
    *fsdp2.rules_offering(*EXTRAS, "reduce_dtype"),
    *LIMITS,
    Rule(
        source="peft/tuners/tuners_utils.py autocast_adapter_dtype",
        holds=lambda s, b: ~b.wide_adapters | (s.training.has_adapters & (b.main_weights == MainWeights.FP32.code)),
        text=lambda s, p: "wide_adapters needs adapters, and main_weights fp32: leave it out",
    ),
)
BOOK = replace(fsdp2.BOOK, rules=RULES, extras=EXTRAS)
