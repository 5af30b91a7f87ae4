"""Which rules hold for a framework?"""

from __future__ import annotations

from autoplan.framework import Framework
from autoplan.rules import (
    Rulebook,
    deepspeed,
    fsdp2,
    megatron_lm,
    nanotron,
    primus,
    torchtitan,
    trainer,
    universal,
)

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
