"""Rules on the plans of NeMo AutoModel: those of torchtitan, whose building blocks it uses, its dispatchers and DDP."""

from __future__ import annotations

from dataclasses import replace

from autoplan.frameworks.common.rules import Rule
from autoplan.frameworks.torchtitan import rules as torchtitan
from autoplan.spec.axes import offered
from autoplan.spec.enums import MainWeights, ReduceType, Sharding

EXTRAS = offered("automodel")  # its dispatchers: components/models/common/utils.py:301
# Copies are DDP's, which knows no types: products take that of the weights, and reductions that of the gradients.
COPIES_HAVE_ONE_TYPE = Rule(
    source="components/distributed/ddp.py, DDPManager.parallelize",
    holds=lambda s, b: (
        (b.sharding != Sharding.NONE.code)
        | (b.dp == 1)
        | ((b.reduce_dtype == ReduceType.USUAL.code) & (b.main_weights == MainWeights.BF16.code))
    ),
    text=lambda s, p: (
        f"unsharded with {p.main_weights} main weights and reduce_dtype {p.reduce_dtype}: its DDP computes and reduces "
        "in the type of the weights: use main_weights bf16 and reduce_dtype usual, or shard them (zero2, zero3)"
    ),
)
RULES = (*torchtitan.rules_offering(*EXTRAS), COPIES_HAVE_ONE_TYPE)
BOOK = replace(torchtitan.BOOK, rules=RULES, extras=EXTRAS)
