"""Rules on the plans that the built-in trainer runs.

They are the rules of plain PyTorch, without what the trainer does not implement.  ZeRO-1 is `fully_shard` with one
reduction of the gradients per step; DistributedDataParallel, which is wrong under several of these plans, is never
used.  Places are functions of this project.
"""

from __future__ import annotations

from autoplan.base.errors import InputError, refuse
from autoplan.frameworks.common import shared_rules as shared
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords
from autoplan.frameworks.fsdp2.rules import PIPELINE_RULES
from autoplan.spec.enums import Offload, RecomputeModule, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.training import TrainingSpec

_PARALLEL = "autoplan/trainer/parallel.py"
_TRANSFORMER = "autoplan/trainer/transformer.py"
DECLINES = "the built-in trainer does not run the plan"
_KNOWN_PARTS = sum(1 << RecomputeModule(name).code for name in ("core_attn", "mlp", "moe"))

SUPPORTED = (
    SupportedWords(axis="offload", words=(Offload.NONE,), source=f"{_PARALLEL} share"),
    SupportedWords(axis="precision", words=("bf16", "fp32"), source=f"{_PARALLEL} DTYPES"),
)

RULES: tuple[Rule, ...] = (
    *universal.RULES,
    *universal.options_of_others("ep_overlap"),
    *(words.rule() for words in SUPPORTED),
    *PIPELINE_RULES,
    shared.tied_needs_one_stage(f"{_TRANSFORMER} Transformer.tie"),
    shared.whole_kv_heads(f"{_PARALLEL} _cut"),
    shared.sp_needs_tp(f"{_PARALLEL} _cut"),
    shared.whole_sequence(f"{_PARALLEL} _cut"),
    Rule(
        source=f"{_PARALLEL} _cut",
        holds=lambda s, b: s.model.vocab_size % b.tp == 0,
        text=lambda s, p: f"vocab_size {s.model.vocab_size} must be divisible by tp {p.tp}: lower tp",
    ),
    Rule(
        source=f"{_PARALLEL} _cut",
        holds=lambda s, b: s.model.ffn_size % b.tp == 0,
        text=lambda s, p: f"ffn_size {s.model.ffn_size} must be divisible by tp {p.tp}: lower tp",
    ),
    shared.only("cp", 1, why="attention sees whole sequences, set cp 1", source=f"{_TRANSFORMER} Attention"),
    Rule(
        source=f"{_TRANSFORMER} MoE",
        holds=lambda s, b: (b.ep == 1) & (b.etp == 1),
        text=lambda s, p: f"ep {p.ep} and etp {p.etp}: every rank holds all experts, set both to 1",
    ),
    Rule(
        source=f"{_PARALLEL} share",
        holds=lambda s, b: (b.pp == 1) | (b.sharding != Sharding.ZERO2.code),
        text=lambda s, p: f"zero2 with pp {p.pp} is what zero1 is: a stage reduces once a step; use zero1",
    ),
    Rule(
        source=f"{_PARALLEL} _cut",
        holds=lambda s, b: ~(b.tp_overlap | b.ep_overlap),
        text=lambda s, p: "tp_overlap and ep_overlap need kernels of their own: leave them out",
    ),
    Rule(
        source=f"{_PARALLEL} _recompute",
        holds=lambda s, b: (b.recompute_modules & ~_KNOWN_PARTS) == 0,
        text=lambda s, p: f"recompute of {' and '.join(p.recompute_modules)}: it repeats core_attn, mlp and moe alone",
    ),
)

BOOK = Rulebook(
    rules=RULES,
    supported=SUPPORTED,
    repeats_parts=True,
    repeats_some_layers=True,
)


def check_training(training: TrainingSpec) -> None:
    """Raise an error for unsupported training: only all weights, with Adam, on sequences of equal length."""
    finetuning = training.finetuning
    if finetuning is not None and (finetuning.has_adapters or finetuning.frozen):
        raise InputError(f"the built-in trainer trains all weights, not {finetuning}: use your own program")
    if training.preference is not None:
        raise InputError("the built-in trainer has no preference losses: use your own program")
    if training.lengths is not None:
        raise InputError("the built-in trainer needs sequences of equal length: use your own program")
    if training.optimizer != "adam":
        raise InputError(f"the built-in trainer has Adam, not {training.optimizer}: use your own program")


def check_model(model: ModelSpec) -> None:
    """Raise an error for models that the trainer's transformer does not implement."""
    refusals = (
        *((True, part) for part in model.unusual_parts),
        (model.mla is not None, "latent attention"),
        (model.num_mtp_layers > 0, "layers for multi-token prediction"),
        (model.position_embedding == "alibi", "positions by ALiBi"),
        (model.attention_sinks, "attention sinks"),
        (model.qk_norm == "full", "a norm over all queries and keys"),
        (model.moe is not None and model.moe.latent_size is not None, "experts in a latent space"),
    )
    refuse(refusals, "the built-in trainer does not support ", f" of model {model.name!r}: run a --command")
