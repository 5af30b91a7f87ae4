"""Which rules hold for a framework?"""

from __future__ import annotations

from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rulebook
from autoplan.frameworks.deepspeed import rules as deepspeed
from autoplan.frameworks.fsdp2 import rules as fsdp2
from autoplan.frameworks.megatron_lm import rules as megatron_lm
from autoplan.frameworks.nanotron import rules as nanotron
from autoplan.frameworks.primus import rules as primus
from autoplan.frameworks.torchtitan import rules as torchtitan
from autoplan.frameworks.trainer import rules as trainer
from autoplan.spec.framework import Framework

BOOKS = {
    "megatron-lm": megatron_lm.BOOK,
    "primus": primus.BOOK,
    "torchtitan": torchtitan.BOOK,
    "nanotron": nanotron.BOOK,
    "deepspeed": deepspeed.BOOK,
    "fsdp2": fsdp2.BOOK,
    "trainer": trainer.BOOK,
    "unknown": universal.BOOK,
}


def book_of(framework: Framework) -> Rulebook:
    """What `framework` admits."""
    return BOOKS[framework.rules]
