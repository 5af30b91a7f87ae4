"""Rules on the plans of programs that stand on Accelerate, such as the Trainer of transformers.

What PyTorch's FSDP2 trains, as far as Accelerate offers it: no pipelines, no sequence parallelism.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.frameworks.accelerate.export import LIMITS
from autoplan.frameworks.fsdp2 import rules as fsdp2

RULES = fsdp2.RULES + LIMITS
BOOK = replace(fsdp2.BOOK, rules=RULES, extras=())
