"""Blocks that the layers of a model are made of, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autoplan.base.errors import InputError
from autoplan.base.units import check_count

MAX_SIZE = 10**7  # of a width; the widest model published has 25,600
MAX_LAYERS = 10**4


class Block(StrEnum):
    """The kinds of block that layers are made of; a transformer layer is an attention block and an MLP or MoE block."""

    ATTENTION = "attention"
    WINDOW_ATTENTION = "window_attention"
    LINEAR_ATTENTION = "linear_attention"
    CROSS_ATTENTION = "cross_attention"  # of a decoder to what its encoder makes
    MAMBA = "mamba"
    CONVOLUTION = "convolution"  # over few tokens, between two gates (LFM2)
    MLP = "mlp"
    MOE = "moe"
    # Of an encoder in front of a text model or a decoder, whose layers have sizes of their own
    ENCODER_ATTENTION = "encoder_attention"
    ENCODER_WINDOW_ATTENTION = "encoder_window_attention"
    ENCODER_MLP = "encoder_mlp"
    ENCODER_MOE = "encoder_moe"
    ENCODER_CONVOLUTION = "encoder_convolution"


# Blocks with softmax attention.
ATTENTION_BLOCKS = (Block.ATTENTION, Block.WINDOW_ATTENTION, Block.CROSS_ATTENTION)

# Blocks of an encoder's layers by what they are in a model of these layers alone.
ENCODER_BLOCKS = {
    Block.ATTENTION: Block.ENCODER_ATTENTION,
    Block.WINDOW_ATTENTION: Block.ENCODER_WINDOW_ATTENTION,
    Block.MLP: Block.ENCODER_MLP,
    Block.MOE: Block.ENCODER_MOE,
    Block.CONVOLUTION: Block.ENCODER_CONVOLUTION,
}

# Symbols of `layer_pattern`: * M - E are those of Megatron-Core's hybrid models.
PATTERN_SYMBOLS = {
    "*": Block.ATTENTION,
    "M": Block.MAMBA,
    "C": Block.CONVOLUTION,
    "W": Block.WINDOW_ATTENTION,
    "L": Block.LINEAR_ATTENTION,
    "X": Block.CROSS_ATTENTION,
    "-": Block.MLP,
    "E": Block.MOE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank queries and keys/values."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: the query projection has full rank

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check_count(f"mla.{name}", getattr(self, name), at_most=MAX_SIZE)
        if self.q_lora_rank is not None:
            check_count("mla.q_lora_rank", self.q_lora_rank, at_most=MAX_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The MoE block: a router, routed experts of which each token visits a few, and shared experts that all visit."""

    num_experts: int
    experts_per_token: int
    expert_ffn_size: int  # width of one routed expert
    shared_expert_ffn_size: int = 0  # summed width of all shared experts
    shared_expert_gate: bool = False
    router_bias: bool = False
    num_dense_layers: int = 0  # the first layers keep a dense MLP
    interval: int = 1  # layer i is MoE where (i + 1 + offset) % interval == 0
    offset: int = 0
    latent_size: int | None = None  # routed experts work in a narrower latent space

    def __post_init__(self) -> None:
        check_count("moe.num_experts", self.num_experts, at_least=2, at_most=10**5)
        check_count("moe.experts_per_token", self.experts_per_token, at_most=self.num_experts)
        check_count("moe.expert_ffn_size", self.expert_ffn_size, at_most=MAX_SIZE)
        check_count("moe.shared_expert_ffn_size", self.shared_expert_ffn_size, at_least=0, at_most=MAX_SIZE)
        check_count("moe.num_dense_layers", self.num_dense_layers, at_least=0, at_most=MAX_LAYERS)
        check_count("moe.interval", self.interval, at_most=MAX_LAYERS)
        check_count("moe.offset", self.offset, at_least=0, at_most=MAX_LAYERS)
        if self.latent_size is not None:
            check_count("moe.latent_size", self.latent_size, at_most=MAX_SIZE)

    def has_layer(self, at: int) -> bool:
        """Return whether the layer of that number, from 0, has experts."""
        return at >= self.num_dense_layers and (at + 1 + self.offset) % self.interval == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba:
    """The Mamba-2 block (arXiv:2405.21060), or Mamba-1 (arXiv:2312.00752), whose heads are one wide."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    dt_rank: int = 0  # of Mamba-1, which makes time steps and addresses of what is convolved; 0: Mamba-2

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "conv_kernel"):
            check_count(f"mamba.{name}", getattr(self, name), at_most=MAX_SIZE)
        check_count("mamba.dt_rank", self.dt_rank, at_least=0, at_most=MAX_SIZE)

    @property
    def inner_size(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: of Mamba-2 with the addresses of the states."""
        return self.inner_size + (0 if self.dt_rank else 2 * self.num_groups * self.state_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """A gated delta net (arXiv:2412.06464): heads with a state of key x value width instead of a cache.

    Gates have a `gate_rank` in Kimi delta attention (arXiv:2510.26692), whose key channels decay one by one.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4
    gate_rank: int = 0
    head_gates: int = 2  # numbers a head that a token makes and the weights hold: decay and step

    def __post_init__(self) -> None:
        check_count("linear_attention.gate_rank", self.gate_rank, at_least=0, at_most=MAX_SIZE)
        check_count("linear_attention.conv_kernel", self.conv_kernel, at_least=0, at_most=MAX_SIZE)
        check_count("linear_attention.head_gates", self.head_gates, at_least=0, at_most=2)
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
            check_count(f"linear_attention.{name}", getattr(self, name), at_most=MAX_SIZE)
        if self.num_value_heads % self.num_key_heads:
            raise InputError(
                f"linear_attention.num_value_heads ({self.num_value_heads}) must be divisible by "
                f"num_key_heads ({self.num_key_heads})"
            )

    @property
    def key_width(self) -> int:
        """Width of all queries, and of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution over queries, keys and values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAttention:
    """Sizes of attention in the layers with a window, where they are not those of the layers that see all."""

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    attention_sinks: bool = False
    mla: LatentAttention | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Parts that every block of a kind, or the model at its ends, has beside those of the kind."""

    block: str  # a Block, or "ends"
    matrices: tuple[tuple[int, int], ...] = ()  # (inputs, outputs) of each, which every token meets
    num_parameters: int = 0  # beside them: biases, norms, tables; below 0 of what the kind has and this model has not
    score_width: int = 0  # summed widths of what is multiplied for every pair of positions

    def __post_init__(self) -> None:
        if self.block not in (*Block, "ends"):
            raise InputError(f"additions.block must be ends or one of {', '.join(Block)}, got {self.block!r}")
        for sizes in self.matrices:
            for size in sizes:
                check_count(f"additions.{self.block}.matrices", size, at_most=MAX_SIZE)
        check_count("additions.score_width", self.score_width, at_least=0, at_most=MAX_SIZE)

    @property
    def size(self) -> int:
        """Elements of all of it."""
        return sum(inputs * outputs for inputs, outputs in self.matrices) + self.num_parameters
