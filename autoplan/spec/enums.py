"""Options of a plan that are words: a text in files and messages, a code in arrays of plans."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import TypeVar

from autoplan.base.errors import InputError

Member = TypeVar("Member", bound="CodedEnum")


class CodedEnum(StrEnum):
    """Texts with codes: a member equals its text, and `code` is its place among them, which arrays of plans hold."""

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
    """Return the member of `enum` that `text` names; an `InputError` lists the members where there is none."""
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
    """States that data-parallel ranks share: nothing, the optimizer's, gradients too, weights too."""

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
    """Exchange between context-parallel ranks of what attention needs of other parts of the sequence."""

    RING = "ring"
    ALL_TO_ALL = "all_to_all"


class Dispatcher(CodedEnum):
    """Software that brings tokens to their experts: a copy for each, or one that sends a token to a rank once.

    By Megatron-Core's names (transformer_config.py, moe_token_dispatcher_type and moe_flex_dispatcher_backend).
    """

    ALL_TO_ALL = "alltoall"
    DEEPEP = "deepep"
    HYBRIDEP = "hybridep"


class Offload(CodedEnum):
    """States kept in the host's memory, where the optimizer then runs; `parameters` with their gradients and it."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    ACTIVATIONS = "activations"


class CudaGraphs(CodedEnum):
    """Kernels that are launched as CUDA graphs: each holds all of the one before it, and the last one a whole pass.

    router: the router and the counts of tokens that follow it; attn: attention; layer: dense MLP and Mamba layers too.
    """

    NONE = "none"
    ROUTER = "router"
    ATTENTION = "attn"
    LAYER = "layer"
    FULL_ITERATION = "full_iteration"


class GradType(CodedEnum):
    """Data type in which gradients are added up, kept and reduced.

    fp32 is as the framework has them where nothing else is said.  Of bf16 ones Megatron-Core's optimizer makes an fp32
    copy of its own shard, unless its main gradients are 16 bits wide too (bf16_main).
    """

    FP32 = "fp32"
    BF16 = "bf16"
    BF16_MAIN = "bf16_main"


class ReduceType(CodedEnum):
    """Data type in which gradients travel: that of the framework where nothing else is said, fp32, or 16 bits."""

    USUAL = "usual"
    FP32 = "fp32"
    HALF = "half"


class Fp8Scaling(CodedEnum):
    """Numbers that share a scale in 8-bit products: those of a matrix, or of one of its rows.

    It is found from them as they are; delayed, from those of a matrix in past steps.
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    DELAYED = "delayed"


class MainWeights(CodedEnum):
    """Data type of the weights that the optimizer updates: fp32, what 16-bit weights lack of it, or 16 bits alone."""

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
    """Number format of the matrix products."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    FP32 = "fp32"


NARROW_PRECISIONS = (Precision.FP8, Precision.MXFP8, Precision.NVFP4)


class RankOrder(CodedEnum):
    """Order of axes over ranks: the axis whose groups are closest comes first."""

    DP_BEFORE_PP = "tp-cp-ep-dp-pp"
    PP_BEFORE_DP = "tp-cp-ep-pp-dp"
