"""Rules on the plans that MaxText e591f30 (2026-08) runs on GPUs; places are below src/maxtext/.

Weights are sharded by logical_axis_rules in configs/base.yml: "embed" over fsdp, context and expert.  Ranks are
numbered along the axes of the mesh, the last axis fastest.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common import shared_rules as shared
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords, all_true
from autoplan.frameworks.maxtext.options import NAMED
from autoplan.spec.axes import offered
from autoplan.spec.enums import ContextParallelKind, Fp8Scaling, Precision, Schedule, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import SELECTIVE, PlanBatch
from autoplan.spec.workload import Workload

_TYPES, _BASE = "configs/types.py", "configs/base.yml"
GPIPE, ZERO1, ZERO3 = Schedule.GPIPE.code, Sharding.ZERO1.code, Sharding.ZERO3.code
NAMED_BITS = [sum(1 << module.code for module in modules) for modules in NAMED]


def is_plain(model: ModelSpec) -> bool:
    """Return whether recomputation policies name all tensors that the layers keep."""
    return model.moe is None and model.mla is None


def _named_parts(workload: Workload, batch: PlanBatch) -> Bools:
    is_named = np.isin(batch.recompute_modules, NAMED_BITS) if is_plain(workload.model) else ~all_true(batch)
    return (batch.recompute != SELECTIVE) | is_named


def _experts_on_shards(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans keep experts on sharded ranks: their axis is innermost and also shards other weights."""
    is_near = (batch.tp * batch.cp == 1) & (batch.sharding == ZERO3) & (batch.dp_shard % batch.ep == 0)
    return (batch.ep == 1) | is_near


def _even_stages(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans have identical stages: no dense layers before the MoE layers, no multi-token prediction."""
    model = workload.model
    if (model.moe is not None and model.moe.num_dense_layers) or model.num_mtp_layers:
        return batch.pp == 1
    return (batch.pp == 1) | (model.num_layers % batch.pp == 0)


SUPPORTED = (
    # A loop over micro-batches, whose backward passes autodiff runs after all forward passes.
    SupportedWords(axis="schedule", words=("1f1b", "gpipe"), source="layers/pipeline.py"),
    SupportedWords(axis="sharding", words=("none", "zero1", "zero3"), source=f"{_TYPES}:1206"),
    SupportedWords(axis="cp_kind", words=(ContextParallelKind.RING,), source="layers/attention_op.py:1387"),
    # Optimizer states on the host are copied to the device for the update, which is not modelled.
    SupportedWords(axis="offload", words=("none",), source="trainers/pre_train/train.py"),
    SupportedWords(axis="precision", words=("bf16", "fp8", "mxfp8"), source=f"{_TYPES}:83"),
    SupportedWords(axis="fp8_scaling", words=("tensorwise", "delayed"), source=f"{_TYPES}:83"),
)
EXTRAS = offered("maxtext")

RULES: tuple[Rule, ...] = (
    *universal.RULES,
    *universal.options_of_others(*EXTRAS),
    universal.ALL_OR_NONE,
    *(words.rule() for words in SUPPORTED),
    Rule(
        source="layers/pipeline.py",
        holds=lambda s, b: (b.schedule == GPIPE) == (b.pp > 1),
        text=lambda s, p: f"schedule {p.schedule!r} with pp {p.pp}: pipelines run gpipe, one stage 1f1b",
    ),
    shared.no_interleaving("layers/pipeline.py"),  # gpipe with repeats is not modelled
    Rule(
        source=f"{_TYPES}:3612",
        holds=lambda s, b: (b.pp == 1) | (b.num_microbatches % b.pp == 0),
        text=lambda s, p: f"the {p.num_microbatches} micro-batches must be divisible by pp {p.pp}: lower micro_batch",
    ),
    Rule(
        source=f"{_TYPES}:3580",
        holds=_even_stages,
        text=lambda s, p: (
            f"pp {p.pp} of {s.model.name} must divide its {s.model.num_layers} layers, which must be alike: set pp 1"
        ),
    ),
    Rule(
        source=f"{_TYPES}:3598",
        holds=lambda s, b: np.array([len(set(layers)) == 1 for layers in b.layouts], dtype=np.bool_)[b.layout],
        text=lambda s, p: "stages of unlike numbers of layers: leave layers_per_chunk out",
    ),
    Rule(
        source="layers/decoders.py:346",
        holds=_named_parts,
        text=lambda s, p: (
            f"recompute of {'+'.join(p.recompute_modules)} of {s.model.name}: no policy repeats these alone, "
            "use none or full"
        ),
    ),
    shared.whole_kv_heads(f"{_BASE}:564"),
    shared.SCALING_NEEDS_FP8,
    shared.sp_needs_tp(f"{_BASE}:597"),
    shared.whole_sequence(f"{_BASE}:597"),
    Rule(
        source=f"{_BASE}:605",
        holds=lambda s, b: (b.cp == 1) | (b.sharding == ZERO3),
        text=lambda s, p: f"cp {p.cp} with {p.sharding}: weights are sharded over its ranks, use zero3",
    ),
    Rule(
        source=f"{_BASE}:605",
        holds=lambda s, b: (b.sharding != ZERO3) | (b.dp_shard * b.cp > 1),
        text=lambda s, p: f"{p.sharding} over one rank has nothing to shard: use none, or a larger dp_shard",
    ),
    Rule(
        source=f"{_TYPES}:1206",
        holds=lambda s, b: (b.sharding != ZERO1) | ((b.dp_replicate == 1) & (b.dp > 1)),
        text=lambda s, p: f"zero1 shards over all replicas, dp_replicate is {p.dp_replicate} of {p.dp}: set it to 1",
    ),
    Rule(
        source=f"{_BASE}:585",
        holds=_experts_on_shards,
        text=lambda s, p: f"ep {p.ep} needs zero3 over a multiple of it, tp 1 and cp 1: lower ep",
    ),
    Rule(
        source=f"{_BASE}:586",
        holds=lambda s, b: b.etp == b.tp if s.model.moe else all_true(b),
        text=lambda s, p: f"etp {p.etp} with tp {p.tp}: experts are split as all else, set etp to {p.tp}",
    ),
    Rule(
        source=f"{_TYPES}:3882",
        holds=lambda s, b: (
            (b.precision != Precision.FP8.code)
            | (b.fp8_scaling != Fp8Scaling.DELAYED.code)
            | (b.pp > 1)
            | (b.num_microbatches == 1)
        ),
        text=lambda s, p: "fp8 with delayed scales does not add up gradients: use fp8_scaling tensorwise",
    ),
)
BOOK = Rulebook(rules=RULES, supported=SUPPORTED, extras=EXTRAS, repeats_parts=True)
