"""Rules that hold for every framework by arithmetic: on ranks, sequences, heads, experts and layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords, all_true
from autoplan.spec.axes import AXES, shown
from autoplan.spec.axis import Axis
from autoplan.spec.enums import (
    AttentionKernel,
    ContextParallelKind,
    MainWeights,
    MomentType,
    Offload,
    Precision,
    Schedule,
    Sharding,
)
from autoplan.spec.optimizers import TRAITS
from autoplan.spec.plan import (
    ALL_LAYERS,
    DEFAULT_MODULE_BITS,
    FULL,
    MAX_OPERATIONS,
    PP_BEFORE_DP,
    ParallelPlan,
    PlanBatch,
)
from autoplan.spec.workload import Workload


def _encoder(workload: Workload, batch: PlanBatch) -> Bools:
    """Encoders are not split by context or stages, and every rank has whole heads."""
    encoder = workload.model.encoder
    if encoder is None:
        return all_true(batch)
    is_whole = (batch.cp == 1) & ((batch.pp == 1) | (not workload.model.cross_attention))
    return is_whole & (encoder.layers.num_heads % batch.tp == 0)


def _encoder_text(workload: Workload, plan: ParallelPlan) -> str:
    heads = workload.model.encoder.layers.num_heads if workload.model.encoder else 0
    if workload.model.cross_attention:
        degrees, priced = f"cross attention with pp {plan.pp}, cp {plan.cp} and tp {plan.tp}", "pp 1 and cp 1 are"
    else:
        degrees, priced = f"an encoder of images with cp {plan.cp} and tp {plan.tp}", "cp 1 is"
    return f"{degrees}: only {priced} priced, and tp must divide the encoder's {heads} heads"


def _encoder_apart(workload: Workload, batch: PlanBatch) -> Bools:
    """Encoder and text model have whole replicas for each other, and 1F1B (Megatron-Bridge, mimo_config.py)."""
    apart = workload.model.encoder_apart
    if apart is None:
        return all_true(batch)
    samples = batch.micro_batch * batch.dp
    is_shared = (batch.dp % apart.dp == 0) | ((apart.dp % batch.dp == 0) & (samples % apart.dp == 0))
    is_plain = (batch.vp == 1) & (batch.schedule == Schedule.ONE_F_ONE_B.code)
    return is_shared & is_plain


def _experts(workload: Workload, batch: PlanBatch) -> Bools:
    moe = workload.model.moe
    return moe.num_experts % batch.ep == 0 if moe else all_true(batch)


def _expert_grid(workload: Workload, batch: PlanBatch) -> Bools:
    """Experts re-use the ranks of one stage; a model without experts has no such grid."""
    ranks = batch.tp * batch.cp * batch.dp
    return ranks % (batch.ep * batch.etp) == 0 if workload.model.moe else all_true(batch)


def _cp_hierarchy(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans have a whole ring of all-to-alls, with more than one of them."""
    inner = batch.cp_inner
    return (
        (batch.cp == 1)
        | (batch.cp_kind <= ContextParallelKind.ALL_TO_ALL.code)
        | ((inner < batch.cp) & (batch.cp % inner == 0))
    )


def _chunk_count(workload: Workload, batch: PlanBatch) -> Bools:
    """Embedding and head may have a chunk of their own, but every rank has a layer."""
    num_layers = workload.model.num_layers
    return (batch.pp <= num_layers) & (batch.pp * batch.vp <= num_layers + 2)


def _followed(workload: Workload, batch: PlanBatch) -> Bools:
    """Three passes a chunk and micro-batch (forward, input and weight gradients), few enough to follow one by one."""
    passes = 3 * batch.pp * batch.vp * batch.num_microbatches
    return ~batch.splits_backward | (passes <= MAX_OPERATIONS)


def _folded(workload: Workload, batch: PlanBatch) -> Bools:
    """Other expert groups than those of tp x cp would lie across pipelines that come before data parallelism."""
    if not workload.model.moe:
        return all_true(batch)
    return (batch.rank_order != PP_BEFORE_DP) | (batch.pp == 1) | (batch.ep * batch.etp == batch.tp * batch.cp)


def _linear_attention(workload: Workload, batch: PlanBatch) -> Bools:
    net = workload.model.linear_attention
    return (batch.cp == 1) & (net.num_key_heads % batch.tp == 0) if net else all_true(batch)


def _skipping(workload: Workload, batch: PlanBatch) -> Bools:
    """Attention that stores its scores computes those of all positions."""
    if not workload.training.skips_documents:
        return all_true(batch)
    return ~np.array([kernel.stores_scores for kernel in AttentionKernel])[batch.attention]


def _adams_types(workload: Workload, batch: PlanBatch) -> Bools:
    """Types of main weights and moments are those of an Adam that Megatron-Core fuses, and that on the host is one.

    Any optimizer updates weights of bf16 where these are all that there is.
    """
    if workload.training.optimizer == "adam":
        return all_true(batch)
    are_plain = batch.moment_dtype == MomentType.FP32.code
    are_plain &= np.isin(batch.main_weights, (MainWeights.FP32.code, MainWeights.BF16.code))
    return are_plain & (batch.offload == Offload.NONE.code)


def _of_adam(plan: ParallelPlan) -> str:
    plain = {"moment_dtype": MomentType.FP32, "main_weights": MainWeights.FP32, "offload": Offload.NONE}
    chosen = {name: getattr(plan, name) for name in plain}
    return " and ".join(f"{name} {value}" for name, value in chosen.items() if value != plain[name])


def _whole_matrices(workload: Workload, batch: PlanBatch) -> Bools:
    if not TRAITS[workload.training.optimizer].orthogonalises:
        return all_true(batch)
    return batch.sharding != Sharding.ZERO3.code


# Not among `RULES`: where a framework lacks the option, that is the reason to give.
KNOWN_SAMPLES = Rule(
    holds=lambda s, b: ~b.dynamic_cp | s.training.separates_samples,
    text=lambda s, p: "dynamic_cp needs the lengths of samples, packed or unpadded: pass --lengths, or leave it out",
)
RULES: tuple[Rule, ...] = (
    Rule(
        holds=_skipping,
        text=lambda s, p: (
            f"attention {p.attention} cannot skip other documents or samples: use flash, or batching joined or padded"
        ),
    ),
    Rule(
        holds=_adams_types,
        text=lambda s, p: f"{_of_adam(p)} needs Adam, the optimizer is {s.training.optimizer}: leave one of them out",
    ),
    Rule(
        holds=lambda s, b: (b.offload != Offload.PARAMETERS.code) | ((b.sharding == Sharding.ZERO3.code) & (b.pp == 1)),
        text=lambda s, p: f"offload 'parameters' with {p.sharding} and pp {p.pp} is not priced: use zero3 and pp 1",
    ),
    Rule(
        holds=_whole_matrices,
        text=lambda s, p: f"muon with {p.sharding} is not priced: use zero1",
    ),
    Rule(
        holds=lambda s, b: b.num_devices == s.num_devices,
        text=lambda s, p: (
            f"tp {p.tp} x cp {p.cp} x pp {p.pp} x dp {p.dp} needs {p.num_devices} devices, there are {s.num_devices}: "
            "change one degree"
        ),
    ),
    Rule(
        # Require a whole number of micro-batches a replica, at least one.
        holds=lambda s, b: (b.num_microbatches >= 1) & (b.global_batch % (b.micro_batch * b.dp) == 0),
        text=lambda s, p: (
            f"global_batch {p.global_batch} must be divisible by micro_batch {p.micro_batch} x dp {p.dp}: "
            "change one of them"
        ),
    ),
    Rule(
        holds=lambda s, b: s.model.num_heads % b.tp == 0,
        text=lambda s, p: f"num_heads {s.model.num_heads} must be divisible by tp {p.tp}: lower tp",
    ),
    Rule(
        holds=_cp_hierarchy,
        text=lambda s, p: (
            f"cp_kind {p.cp_kind} needs a cp above {p.cp_kind.inner} and a multiple of it, cp is {p.cp}: use all_to_all"
        ),
    ),
    Rule(
        holds=_encoder,
        text=_encoder_text,
    ),
    Rule(
        holds=_encoder_apart,
        text=lambda s, p: (
            f"an encoder on ranks of its own with {p.schedule}, vp {p.vp}, dp {p.dp} and micro_batch {p.micro_batch}: "
            "use 1f1b with vp 1, and a dp of which the encoder's dp "
            f"{s.model.encoder_apart.dp if s.model.encoder_apart else 1} is a divisor"
        ),
    ),
    Rule(
        holds=lambda s, b: (b.pp == 1) | (not s.model.shared_layers),
        text=lambda s, p: f"layers that share their weights with pp {p.pp}: only pp 1 is priced",
    ),
    Rule(
        holds=lambda s, b: (b.tp == 1) | (not s.model.low_rank),
        text=lambda s, p: f"matrices of low rank with tp {p.tp}: only tp 1 is priced",
    ),
    Rule(
        holds=lambda s, b: (b.tp == 1) | (s.model.mamba is None or not s.model.mamba.dt_rank),
        text=lambda s, p: f"scans of Mamba-1 with tp {p.tp}: only tp 1 is priced",
    ),
    Rule(
        holds=lambda s, b: (b.cp == 1) | (not s.model.short_conv_kernel),
        text=lambda s, p: f"convolutions with cp {p.cp}: only cp 1 is priced",
    ),
    Rule(
        holds=lambda s, b: ((b.tp == 1) & (b.cp == 1)) | (s.model.window_attention is None),
        text=lambda s, p: f"heads of two sizes with tp {p.tp} and cp {p.cp}: only tp 1 and cp 1 are priced",
    ),
    Rule(
        holds=_linear_attention,
        text=lambda s, p: (
            f"linear attention with cp {p.cp} and tp {p.tp}: only cp 1 is priced, and tp must divide its "
            f"{s.model.linear_attention.num_key_heads if s.model.linear_attention else 0} key heads"
        ),
    ),
    Rule(
        holds=lambda s, b: all_true(b) if s.model.moe else (b.ep == 1) & (b.etp == 1),
        text=lambda s, p: f"ep {p.ep} and etp {p.etp} need a model with experts: set both to 1",
    ),
    Rule(
        holds=_experts,
        text=lambda s, p: (
            f"num_experts {s.model.moe.num_experts if s.model.moe else 0} must be divisible by ep {p.ep}: lower ep"
        ),
    ),
    Rule(
        holds=_expert_grid,
        text=lambda s, p: (
            f"the {p.tp * p.cp * p.dp} devices of a stage must be divisible by etp {p.etp} x ep {p.ep}: lower ep or etp"
        ),
    ),
    Rule(
        holds=_chunk_count,
        text=lambda s, p: (
            f"pp {p.pp} x vp {p.vp} chunks exceed the {s.model.num_layers} layers, of which every rank has one, "
            "with embedding and head: lower pp or vp"
        ),
    ),
    Rule(
        # Single plans of fewer micro-batches cannot be made at all.
        holds=lambda s, b: (b.schedule != Schedule.DUALPIPE_V.code) | (b.num_microbatches >= 2 * b.pp),
        text=lambda s, p: f"dualpipe-v needs 2 pp micro-batches, there are {p.num_microbatches}: use zb-v or lower pp",
    ),
    Rule(
        holds=_followed,
        text=lambda s, p: (
            f"{p.schedule} with pp {p.pp}, vp {p.vp} and {p.num_microbatches} micro-batches has more than the "
            f"{MAX_OPERATIONS} passes that are priced: raise micro_batch, or use 1f1b or interleaved"
        ),
    ),
)


def _no_parts(origin: str) -> Rule:
    return Rule(
        holds=lambda s, b: (b.recompute_modules & ~DEFAULT_MODULE_BITS) == 0,
        text=lambda s, p: f"recompute of {' and '.join(p.recompute_modules)} is known {origin} only: use none or full",
    )


def _all_or_none(origin: str) -> Rule:
    return Rule(
        holds=lambda s, b: (b.recompute != FULL) | (b.recompute_num_layers == ALL_LAYERS),
        text=lambda s, p: (
            f"recompute of {p.recompute_num_layers} layers of a chunk is known {origin} only: use none or full"
        ),
    )


def _even_chunks(workload: Workload, batch: PlanBatch) -> Bools:
    are_even = np.array([len(set(layers)) == 1 for layers in batch.layouts], dtype=np.bool_)
    return are_even[batch.layout]


# Where a framework recomputes no parts of a layer by their names, and where it recomputes every layer or none.
NO_PARTS = _no_parts("of Megatron-LM")
ALL_OR_NONE = _all_or_none("of Megatron-LM and plain PyTorch")

# Where a framework could do without mixed precision, and is not priced so.
NO_FP32 = Rule(
    holds=lambda s, b: b.precision != Precision.FP32.code,
    text=lambda s, p: f"precision {p.precision!r} is known of the built-in trainer only: use bf16",
)

# Where a framework's own rules are not written down.
FOLDED = Rule(
    holds=_folded,
    text=lambda s, p: (
        f"rank_order {p.rank_order} needs ep {p.ep} x etp {p.etp} to be tp {p.tp} x cp {p.cp}: "
        "change ep or leave rank_order out"
    ),
)
# Of all plans that can be priced, by whatever framework.
PRICED_RULES: tuple[Rule, ...] = (*RULES, KNOWN_SAMPLES)
RULES_ALONE: tuple[Rule, ...] = (*PRICED_RULES, FOLDED, NO_FP32)
BOOK = Rulebook(rules=RULES_ALONE, repeats_some_layers=True)


# Of Megatron-Core up to 0.16 (2026-02), which asserts that there are no virtual stages.
ONE_CHUNK_OF_MAMBA = Rule(
    source="core/ssm/mamba_block.py:217 of core_v0.14.0, MambaStack",
    holds=lambda s, b: (b.vp == 1) | (s.model.mamba is None),
    text=lambda s, p: f"vp {p.vp} of a model with Mamba layers: later versions interleave their chunks, set vp 1",
)


def options_of_others(*offered: str) -> tuple[Rule, ...]:
    """Return rules against options that few frameworks have, for one that has, or itself refuses, those `offered`."""
    return tuple(_option_of_others(axis) for axis in AXES if axis.offered_by and axis.name not in offered)


def options_lacked(axes: Collection[str]) -> tuple[Rule, ...]:
    """Return rules against options that this version of a framework does not have."""
    origin = "of other versions"
    special = {
        # Of states that are not sharded every replica has a copy.
        "dp_replicate": Rule(
            holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding == Sharding.NONE.code),
            text=lambda s, p: f"dp_replicate {p.dp_replicate} with {p.sharding} is known {origin} only: leave it out",
        ),
        "recompute_modules": _no_parts(origin),
        "recompute_num_layers": _all_or_none(origin),
        "layers_per_chunk": Rule(
            holds=_even_chunks,
            text=lambda s, p: (
                f"{s.model.num_layers} layers in {p.pp * p.vp} chunks: unequal chunks are known {origin} only: "
                "choose pp x vp that divides the layers"
            ),
        ),
    }
    return tuple(special.get(axis.name) or _option_of_others(axis, origin) for axis in AXES if axis.name in axes)


def words_left(book: Rulebook, lacks: Iterable[tuple[str, str]]) -> tuple[SupportedWords, ...]:
    """Return the words that are left of axes of which this version lacks some, given as (axis, word)."""
    lacked: dict[str, set[str]] = {}
    for axis, word in lacks:
        lacked.setdefault(axis, set()).add(word)
    return tuple(
        SupportedWords(
            axis=axis, words=tuple(word for word in book.words(axis) if word not in words), source="in this version"
        )
        for axis, words in lacked.items()
    )


def _option_of_others(axis: Axis, origin: str = "") -> Rule:
    plain = axis.code(axis.default)
    whose = origin or f"of {' and '.join(axis.offered_by)}"

    def text(workload: Workload, plan: ParallelPlan) -> str:
        value = getattr(plan, axis.name)
        said = "" if value is True else f" {shown(value)}"
        return f"{axis.name}{said} is known {whose} only: leave it out"

    return Rule(holds=lambda s, b: getattr(b, axis.name) == plain, text=text)
