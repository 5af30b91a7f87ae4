"""Enumerated options of a plan: a text in files and messages, a code in arrays of plans."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import TypeVar

from autoplan.base.errors import InputError

Member = TypeVar("Member", bound="CodedEnum")


class CodedEnum(StrEnum):
    """Enumeration of texts with codes: a member equals its text, and `code` is its index, used in arrays of plans."""

    code: int

    def __new__(cls, text: str) -> CodedEnum:
        """Return a member numbered in the order of the definitions."""
        member = str.__new__(cls, text)
        member._value_ = text
        member.code = len(cls.__members__)
        return member

    def __repr__(self) -> str:
        return repr(self.value)  # as it stands in messages


@cache
def members(enum: type[Member]) -> tuple[Member, ...]:
    """Return the members of `enum` in the order of their codes."""
    return tuple(enum)


def enum_value(name: str, enum: type[Member], text: str) -> Member:
    """Return the member of `enum` named `text`; an `InputError` lists the valid members."""
    if isinstance(text, enum):
        return text
    try:
        return enum(text)
    except ValueError:
        raise InputError(f"{name} must be one of {', '.join(enum)}, got {str(text)[:60]!r}") from None


class Schedule(CodedEnum):
    """Order of the passes of a pipeline."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipe-v"


class Sharding(CodedEnum):
    """States sharded over data-parallel ranks: none, optimizer, plus gradients, plus weights."""

    NONE = "none"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


class Recompute(CodedEnum):
    """Activations that the backward pass computes again."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class RecomputeModule(CodedEnum):
    """Parts of a layer that selective recomputation may repeat, by Megatron-Core's names (transformer_config.py)."""

    CORE_ATTN = "core_attn"
    LAYERNORM = "layernorm"
    MLA_UP_PROJ = "mla_up_proj"
    MLP = "mlp"
    MOE = "moe"
    MOE_ACT = "moe_act"
    SHARED_EXPERTS = "shared_experts"


class ContextParallelKind(CodedEnum):
    """Ways in which context-parallel ranks exchange what attention needs from the other parts of a sequence.

    a2a+p2p:N: all-to-all among N neighbouring ranks, over heads, and a ring over the groups of N (Transformer Engine's
    hierarchical context parallelism).
    """

    RING = "ring"
    ALL_TO_ALL = "all_to_all"
    HIERARCHICAL_2 = "a2a+p2p:2"
    HIERARCHICAL_4 = "a2a+p2p:4"
    HIERARCHICAL_8 = "a2a+p2p:8"

    @property
    def is_hierarchical(self) -> bool:
        """Return whether there are both all-to-alls and a ring."""
        return ":" in self

    @property
    def inner(self) -> int:
        """Ranks of an all-to-all in a hierarchy; 0: all context-parallel ranks."""
        return {"ring": 1, "all_to_all": 0}.get(self) or int(self.partition(":")[2] or 0)

    def fits(self, cp: int) -> bool:
        """Return whether it exists with this many context-parallel ranks."""
        return not self.is_hierarchical or (cp > self.inner and cp % self.inner == 0)


class Dispatcher(CodedEnum):
    """Token dispatcher: it sends a copy per expert, or each token once to the ranks of its experts, or to all ranks.

    By Megatron-Core's names (transformer_config.py, moe_token_dispatcher_type and moe_flex_dispatcher_backend).
    """

    ALL_TO_ALL = "alltoall"
    DEEPEP = "deepep"
    HYBRIDEP = "hybridep"
    ALL_GATHER = "allgather"


class Offload(CodedEnum):
    """States offloaded to host memory: the optimizer, which then runs there, or also parameters and gradients."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"


class OffloadModules(CodedEnum):
    """Parts of a layer whose inputs wait in host memory for the backward pass.

    By Megatron-Core's names (transformer_config.py, offload_modules).
    """

    NONE = "none"
    CORE_ATTN = "core_attn"
    ATTENTION = "core_attn+attn_proj"
    EXPERT_FC1 = "expert_fc1"
    MOE_ACT = "moe_act"
    EXPERTS = "expert_fc1+moe_act"
    ALL = "core_attn+attn_proj+expert_fc1+moe_act"

    @property
    def parts(self) -> frozenset[str]:
        """Names of the parts."""
        return frozenset() if self is OffloadModules.NONE else frozenset(self.split("+"))


class OffloadLayers(CodedEnum):
    """Share of the layers all of whose activations wait in host memory (model_parallel_config.py, cpu_offloading)."""

    NONE = "none"
    QUARTER = "1/4"
    HALF = "1/2"
    THREE_QUARTERS = "3/4"

    @property
    def share(self) -> float:
        """The share as a number."""
        return 0.25 * self.code

    @classmethod
    def nearest(cls, share: float) -> OffloadLayers:
        """Return the share that is nearest to a number."""
        return min(cls, key=lambda word: abs(word.share - share))


class CudaGraphs(CodedEnum):
    """Scope of CUDA graphs: each includes the previous one, and the last one a whole pass.

    router: the router and the counts of tokens that follow it; attn: attention; layer: dense MLP and Mamba layers too.
    """

    NONE = "none"
    ROUTER = "router"
    ATTENTION = "attn"
    LAYER = "layer"
    FULL_ITERATION = "full_iteration"


class GradType(CodedEnum):
    """Data type in which gradients are accumulated, stored and reduced.

    fp32 stands for the framework's default.  With bf16, Megatron-Core's optimizer makes an fp32 copy of its own shard,
    unless its main gradients are also 16 bits wide (bf16_main).
    """

    FP32 = "fp32"
    BF16 = "bf16"
    BF16_MAIN = "bf16_main"


class ReduceType(CodedEnum):
    """Data type of gradients in communication: the framework's default, fp32, or 16 bits."""

    USUAL = "usual"
    FP32 = "fp32"
    HALF = "half"


class Fp8Scaling(CodedEnum):
    """Granularity of the scales in 8-bit GEMMs: per matrix, per row, or per block of 128 elements.

    Scales come from the current values or, if delayed, from those of past steps.  Blocks are 1 x 128 in activations and
    gradients and 128 x 128 in weights.
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    DELAYED = "delayed"
    BLOCKWISE = "blockwise"


class CrossEntropyFusion(CodedEnum):
    """Kernels of the cross entropy, by Megatron-Core's names (model_parallel_config.py, cross_entropy_fusion_impl).

    unfused: the framework's own operations; native: Megatron-Core's, compiled by torch; te: Transformer Engine's
    kernel, which writes the gradients over the logits.
    """

    UNFUSED = "unfused"
    NATIVE = "native"
    TE = "te"


class AttentionKernel(CodedEnum):
    """Kernel of the attention core.

    flash: the fused kernel that the framework takes; flash1 to flash3, cudnn (Transformer Engine's fused backend) and
    flex (torch's FlexAttention) name it.  megatron-fused and unfused store their scores, the first with a kernel that
    scales, masks and normalises them.
    """

    FLASH = "flash"
    FLASH1 = "flash1"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    CUDNN = "cudnn"
    FLEX = "flex"
    MEGATRON_FUSED = "megatron-fused"
    UNFUSED = "unfused"

    @property
    def stores_scores(self) -> bool:
        """Return whether scores are stored, instead of computed again."""
        return self in (AttentionKernel.MEGATRON_FUSED, AttentionKernel.UNFUSED)


class ChunkedLoss(CodedEnum):
    """Pieces of a micro-batch in which head and loss are computed, so that its logits never stand all at once.

    chunks: 8 pieces (torchtitan's ChunkedLossWrapper); liger: pieces of as many logits as the hidden states have
    elements, with the gradients of the head in the forward pass (Liger's fused linear cross entropy); cut: one kernel
    that stores no logits and computes them again for the gradients (cut cross entropy).
    """

    NONE = "none"
    CHUNKS = "chunks"
    LIGER = "liger"
    CUT = "cut"


class MainWeights(CodedEnum):
    """Data type of the weights that the optimizer updates: fp32, its remainders beyond 16 bits, or 16 bits only."""

    FP32 = "fp32"
    REMAINDERS = "remainders"
    FP16 = "fp16"
    BF16 = "bf16"


class MomentType(CodedEnum):
    """Data type of Adam's two moments."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"


class Precision(CodedEnum):
    """Data type of the GEMMs."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    FP32 = "fp32"


NARROW_PRECISIONS = (Precision.FP8, Precision.MXFP8, Precision.NVFP4)


class RankOrder(CodedEnum):
    """Order of axes over ranks, innermost first."""

    DP_BEFORE_PP = "tp-cp-ep-dp-pp"
    PP_BEFORE_DP = "tp-cp-ep-pp-dp"
