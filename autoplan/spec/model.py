"""Shape of the model: a transformer, dense or mixture of experts, or a Mamba hybrid."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from autoplan.base.errors import InputError
from autoplan.base.units import check_count, check_name, check_not_negative, check_positive
from autoplan.spec.blocks import (
    ATTENTION_BLOCKS,
    ENCODER_BLOCKS,
    MAX_LAYERS,
    MAX_SIZE,
    PATTERN_SYMBOLS,
    Addition,
    Block,
    Experts,
    LatentAttention,
    LinearAttention,
    Mamba,
    WindowAttention,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Layers over an image's patches before a text model, or over a source text or sound before a decoder."""

    layers: ModelSpec
    # Of one image or source, over all of which its attention looks; 0: as many as the decoder has tokens.
    patches: int
    image_tokens: int  # of the text model, that one image becomes; 0 of what a decoder reads by cross attention
    # `layers` embeds by a matrix as many numbers of a patch, by a table as many tokens, or by the decoder's table.
    embedding: Literal["matrix", "table", "shared"] = "matrix"
    projector: tuple[tuple[int, int], ...] = ()  # (inputs, outputs) of the matrices between, on every image token
    num_other_parameters: int = 0  # positions, class tokens; norms and biases of projector and embedding
    images: float = 1.0  # in a sample, or their mean
    sound: bool = False  # the images are pieces of sound

    def __post_init__(self) -> None:
        check_count("encoder.patches", self.patches, at_least=0, at_most=MAX_SIZE)
        check_count("encoder.image_tokens", self.image_tokens, at_least=0, at_most=MAX_SIZE)
        check_count("encoder.num_other_parameters", self.num_other_parameters, at_least=0, at_most=10**13)
        check_positive("encoder.images", self.images, at_most=10**5)
        for at, sizes in enumerate(self.projector):
            for size in sizes:
                check_count(f"encoder.projector[{at}]", size, at_most=MAX_SIZE)
        if strange := {block for layer in self.layers.layers for block in layer} - set(ENCODER_BLOCKS):
            raise InputError(
                f"encoder.layers may be made of attention, convolution, mlp and moe, not of {min(strange)}"
            )
        if self.layers.encoder is not None:
            raise InputError("encoder.layers must have no encoder of their own")

    @property
    def output_size(self) -> int:
        """Width of what leaves it."""
        return self.projector[-1][1] if self.projector else self.layers.hidden_size

    def positions(self, seq_len: float) -> float:
        """Positions of one image or source beside a decoder's `seq_len` tokens."""
        return self.patches or seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderApart:
    """An encoder of images on ranks of its own, `tp` x `dp` beside those of the text model.

    Its ranks are the first stage of every pipeline, with a tensor-parallel degree and replicas of their own.
    Source: Megatron-Bridge 0.4, models/mimo/mimo_config.py, ModuleParallelismConfig.
    """

    encoder: Encoder
    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        check_count("encoder_apart.tp", self.tp, at_most=1024)
        check_count("encoder_apart.dp", self.dp, at_most=10**6)
        heads = self.encoder.layers.num_heads
        if self.tp & (self.tp - 1) or heads % self.tp:
            raise InputError(
                f"encoder_apart.tp must be a power of two that divides the {heads} heads of the encoder, got {self.tp}"
            )

    @property
    def num_devices(self) -> int:
        """Ranks of the encoder."""
        return self.tp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Architecture of a language model, decoder or encoder; sizes count elements, `ffn_size` is one matrix's width."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int  # as published; frameworks pad it
    embedding_size: int | None = None  # of the token table, where matrices bring it to the layers' width and back
    num_heads: int
    num_kv_heads: int | None = None  # None: one per head (MHA)
    head_dim: int | None = None  # None: hidden_size / num_heads
    value_head_dim: int | None = None  # None: as wide as heads of queries and keys
    ffn_size: int = 0  # dense MLP; 0 only where every layer is MoE
    matrix_groups: int = 1  # blocks of which all matrices but that behind attention are made (SqueezeBERT)
    low_rank: int = 0  # width between the two matrices that stand for each one of attention and MLP (FinGPT-HPC)
    gated_mlp: bool = True
    squared_relu: bool = False  # between two matrices of an MLP without a gate
    clamped_activation: bool = False  # both halves of a gated MLP's first matrix are limited before their product
    mlp_bias: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    attention_sinks: bool = False
    # Queries that share keys and values: 2 where a token is also predicted without seeing itself (XLNet), by distance.
    attention_streams: int = 1
    attention_output_gate: bool = False  # as wide as the queries, on the output of softmax attention
    qk_norm: Literal["none", "head", "full"] = "none"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    # Bytes an element that a norm without a kernel for it keeps in 16-bit training beyond Llama's, or beyond torch's
    # layer norm: 2 of what it has normalised, in fp32 (Gemma), of its input beside an fp32 copy (T5), or of that copy
    # alone (OLMo); 10 of a layer norm that is written out in fp32 (Cohere).
    norm_extra_bytes: int = 0
    # The same where its weights are frozen, beyond Llama's fp32 copy: 2 of its input (T5), 4 of a difference (Cohere).
    norm_extra_frozen_bytes: int = 0
    narrow_softmax: bool = False  # written out, attention has its softmax in 16 bits, not in fp32 (BERT, T5)
    norm_bias: bool = True  # of a layernorm; an rmsnorm has none
    norm_weights: bool = True  # False: norms scale nothing (OLMo)
    final_norm: bool = True  # behind the last layer
    shared_layers: bool = False  # one layer's weights are those of all (ALBERT)
    shared_norm: bool = False  # attention and MLP of a layer read what one norm makes, side by side (GPT-J)
    norms_per_block: int = 1  # 2 where the output of each block is normalised too (Gemma)
    embedding_norm: bool = False
    bidirectional: bool = False  # attention looks at both sides, as in an encoder
    token_types: int = 0  # rows of a table that is added to the embedding (BERT's segments)
    head_transform: bool = False  # a square matrix with a bias, and a norm, in front of the head (BERT)
    head_bias: bool = False
    activation_parameters: int = 0  # trained numbers of each MLP's activation (xIELU)
    # As wide as an MLP that its activation keeps without a kernel of its own, beside its output: none of a ReLU; a mask
    # of booleans is half of one.
    activation_tensors: float = 1.0
    # relative: a bias of attention by distance, from a table as wide as the heads
    position_embedding: Literal["rope", "learned", "relative", "alibi", "none"] = "rope"
    relative_in_layers: bool = False  # every layer has such a table of its own
    # Only a part of queries and keys turns: torch joins it with the rest, in an order for which it copies the output
    # of attention.
    partial_rope: bool = False
    rope_base: float = 10000.0
    max_positions: int = 0  # rows of a table of learned or relative positions
    tied_embeddings: bool = False
    # Tokens that a windowed layer sees, the last ones, or where it is bidirectional those of a block; None: all.
    window: int | None = None
    window_attention: WindowAttention | None = None
    # With a window or linear attention, layer i sees all where (i + 1 + offset) % interval == 0; 0: never.
    full_attention_interval: int = 0
    full_attention_offset: int = 0
    layer_pattern: str | None = None  # one symbol of PATTERN_SYMBOLS a layer, for hybrids
    short_conv_kernel: int = 0  # tokens of a convolution block
    short_conv_gates: int = 2  # of a convolution block, beside what it convolves
    num_mtp_layers: int = 0  # multi-token prediction
    shares_mtp_layer: bool = False  # all predictions run one layer, again and again
    mla: LatentAttention | None = None
    moe: Experts | None = None
    mamba: Mamba | None = None
    linear_attention: LinearAttention | None = None
    encoder: Encoder | None = None  # of images, or of what a decoder attends to, in front of the first layer
    encoder_apart: EncoderApart | None = None  # of images, on ranks of its own instead
    cross_attention: bool = False  # every layer attends to what the encoder makes, or those that a pattern says
    # Cross attention is part of each layer's attention, with its matrices and in one softmax (T5Gemma 2).
    merged_attention: bool = False
    additions: tuple[Addition, ...] = ()
    left_out: str = ""  # what of its config.json these sizes do not hold, such as vision_config
    checkpoint: str = field(default="", compare=False)  # name on the Hugging Face hub, where it was called so
    aliases: tuple[str, ...] = ()  # other names under which published tables list it
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("name", self.name)
        for name, (at_least, at_most) in _COUNTS.items():
            if (count := getattr(self, name)) is not None:
                check_count(name, count, at_least=at_least, at_most=at_most)
        check_count("matrix_groups", self.matrix_groups, at_most=self.hidden_size)
        check_positive("rope_base", self.rope_base)
        check_not_negative("activation_tensors", self.activation_tensors)
        if self.embedding_size is not None and not (self.head_transform and self.tied_embeddings):
            raise InputError("embedding_size needs head_transform, which brings its width back, and tied_embeddings")
        if self.shared_layers and (self.moe or len(set(self.layers)) > 1 or self.num_mtp_layers):
            raise InputError("shared_layers needs layers that are alike, without moe and num_mtp_layers")
        if self.low_rank and (self.moe or self.mla or self.linear_attention or self.layer_pattern or self.any_encoder):
            raise InputError("low_rank goes with plain attention and dense MLPs alone")
        if self.num_kv_heads is not None:
            check_count("num_kv_heads", self.num_kv_heads, at_most=self.num_heads)
            if self.num_heads % self.num_kv_heads:
                raise InputError(
                    f"num_heads ({self.num_heads}) must be divisible by num_kv_heads ({self.num_kv_heads})"
                )
        if self.head_dim is None and self.mla is None and self.hidden_size % self.num_heads:
            raise InputError(
                f"hidden_size ({self.hidden_size}) must be divisible by num_heads ({self.num_heads}), or give head_dim"
            )
        if self.bidirectional and (self.linear_attention or "M" in (self.layer_pattern or "")):
            raise InputError("bidirectional attention goes with neither linear_attention nor M in layer_pattern")
        if self.linear_attention and self.layer_pattern is None and self.window is not None:
            raise InputError("linear_attention goes with window in a layer_pattern (L and W) only")
        if self.position_embedding in ("learned", "relative") and not self.max_positions:
            raise InputError(f"position_embedding = {self.position_embedding!r} needs max_positions")
        if self.window_attention is not None:
            _windowed(self)  # whose sizes are checked as the model's are
        self._check_cross_attention()
        self._check_pattern()
        blocks = {block for layer in self.layers for block in layer}
        if Block.MLP in blocks and not self.ffn_size:
            raise InputError("ffn_size must be given: some layers have a dense MLP")

    def _check_cross_attention(self) -> None:
        encoder = self.encoder
        if self.cross_attention:
            is_elsewhere = self.layer_pattern is not None and ("X" in self.layer_pattern) == self.merged_attention
            if encoder is None or is_elsewhere or self.mla is not None or self.num_mtp_layers:
                raise InputError(
                    "cross_attention needs an encoder table, no mla or num_mtp_layers, and X in a layer_pattern, or "
                    "merged_attention and no X"
                )
            if (self.qk_norm != "none" and not self.merged_attention) or self.attention_output_gate:
                raise InputError(
                    "cross_attention goes with neither attention_output_gate nor, unless merged_attention, qk_norm"
                )
            if encoder.image_tokens:
                raise InputError("encoder.image_tokens must be 0 with cross_attention: no token of the decoder is its")
        elif self.merged_attention:
            raise InputError("merged_attention needs cross_attention")
        elif (encoder := self.any_encoder) is not None and not (encoder.patches and encoder.image_tokens):
            raise InputError("encoder.patches and encoder.image_tokens may be 0 with cross_attention only")
        if self.encoder_apart is not None and self.encoder is not None:
            raise InputError("encoder and encoder_apart are one encoder: leave one of them out")

    def _check_pattern(self) -> None:
        if self.layer_pattern is None:
            if self.mamba is not None:
                raise InputError("a mamba table needs layer_pattern, one symbol a layer")
            return
        if len(self.layer_pattern) != self.num_layers:
            raise InputError(f"layer_pattern has {len(self.layer_pattern)} symbols, num_layers is {self.num_layers}")
        if unknown := set(self.layer_pattern) - set(PATTERN_SYMBOLS):
            raise InputError(f"layer_pattern knows only {' '.join(PATTERN_SYMBOLS)}, got {sorted(unknown)}")
        if "M" in self.layer_pattern and self.mamba is None:
            raise InputError("layer_pattern has Mamba layers: give the mamba table")
        needs = {"C": "short_conv_kernel", "W": "window", "L": "linear_attention", "X": "cross_attention"}
        for symbol, size in needs.items():
            if symbol in self.layer_pattern and not getattr(self, size):
                raise InputError(f"layer_pattern has the symbol {symbol}: give {size}")
        if "E" in self.layer_pattern and self.moe is None:
            raise InputError("layer_pattern has MoE layers: give the moe table")

    @property
    def unusual_parts(self) -> tuple[str, ...]:
        """Parts beside those of Llama and GPT, in words, that programs for these do not know."""
        parts = {
            "different kinds of layers (layer_pattern)": self.layer_pattern is not None,
            "linear attention": self.linear_attention is not None,
            "bidirectional attention": self.bidirectional,
            "relative positions": self.position_embedding == "relative",
            "a gate on the output of attention": self.attention_output_gate,
            "an offset of the full-attention layers": self.full_attention_offset > 0,
            "a second norm, after every block": self.norms_per_block != 1,
            "parallel attention and MLP after one norm": self.shared_norm,
            "norms without weights": not self.norm_weights,
            "no norm after the last layer": not self.final_norm,
            "a norm of the embedding": self.embedding_norm,
            "an embedding of token types": self.token_types > 0,
            "a matrix before the head": self.head_transform,
            "a bias of the head": self.head_bias,
            "a trained activation": self.activation_parameters > 0,
            "layers that share their weights": self.shared_layers,
            "an embedding narrower than the layers": self.embedding_size is not None,
            "short convolutions": self.short_conv_kernel > 0,
            "low-rank time steps of Mamba": self.mamba is not None and self.mamba.dt_rank > 0,
            "two attention streams": self.attention_streams > 1,
            "an encoder (plan with --framework transformers)": self.any_encoder is not None,
            "matrices of blocks": self.matrix_groups > 1,
            "matrices of low rank": self.low_rank > 0,
            "heads of another size in layers with a window": self.window_attention is not None,
            "values narrower than keys": self.value_head_dim is not None,
            "parts of its own in its blocks (additions)": bool(self.additions),
        }
        return tuple(words for words, is_there in parts.items() if is_there)

    @property
    def any_encoder(self) -> Encoder | None:
        """The encoder, on whichever ranks."""
        return self.encoder_apart.encoder if self.encoder_apart else self.encoder

    @property
    def stands_before_text(self) -> bool:
        """Whether an encoder makes tokens for a text model, of images or sound."""
        return self.any_encoder is not None and not self.cross_attention

    @property
    def writes_out_norms(self) -> bool:
        """Whether norms are several operations where no kernel fuses them, unlike torch's layer norm."""
        return self.norm == "rmsnorm" or self.norm_extra_bytes > 0

    @property
    def table_width(self) -> int:
        """Width of the token table."""
        return self.embedding_size or self.hidden_size

    @property
    def kv_heads(self) -> int:
        """Key/value heads: as many as heads unless grouped."""
        return self.num_kv_heads or self.num_heads

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        if self.mla:
            return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def v_head_dim(self) -> int:
        """Width of a value head."""
        return self.mla.v_head_dim if self.mla else self.value_head_dim or self.qk_head_dim

    def with_images(self, images: float) -> ModelSpec:
        """Return the model with so many images in a sample."""
        assert self.any_encoder is not None
        return self.with_encoder(replace(self.any_encoder, images=images))

    def with_encoder(self, encoder: Encoder) -> ModelSpec:
        """Return the model with another encoder on the same ranks."""
        if self.encoder_apart is not None:
            return replace(self, encoder_apart=replace(self.encoder_apart, encoder=encoder))
        return replace(self, encoder=encoder)

    def reads_encoder(self, block: Block) -> bool:
        """Return whether a block attends to what the encoder makes."""
        return block is Block.CROSS_ATTENTION or (self.merged_attention and block in ATTENTION_BLOCKS)

    def attending(self, block: Block) -> ModelSpec:
        """Return the model with the sizes of attention that it has in a block."""
        return _windowed(self) if self.window_attention and block is Block.WINDOW_ATTENTION else self

    @property
    def layers(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of each layer, in order."""
        return _layers(self)

    @property
    def num_held_mtp_layers(self) -> int:
        """Prediction layers that have parameters of their own."""
        return min(self.num_mtp_layers, 1) if self.shares_mtp_layer else self.num_mtp_layers

    @property
    def layer_kinds(self) -> tuple[tuple[Block, ...], ...]:
        """The layers that differ, in the order in which they first appear."""
        return _layer_kinds(self)

    @property
    def mtp_layer(self) -> tuple[Block, ...]:
        """The blocks of one multi-token prediction layer: those of the last layer.

        The layers of a hybrid have one block each; its prediction layer has two (`mtp_hybrid_override_pattern = "*E"`
        in the configs of Nemotron 3).
        """
        if self.layer_pattern is None:
            return self.layers[-1]
        return (Block.ATTENTION, Block.MOE if "E" in self.layer_pattern else Block.MLP)


# The least and the most that there may be of each, where it is given.
_COUNTS: dict[str, tuple[int, int]] = {
    "num_layers": (1, MAX_LAYERS),
    "vocab_size": (2, 10**8),
    **dict.fromkeys(("hidden_size", "num_heads", "embedding_size", "head_dim"), (1, MAX_SIZE)),
    **dict.fromkeys(("ffn_size", "low_rank"), (0, MAX_SIZE)),
    **dict.fromkeys(("norms_per_block", "attention_streams"), (1, 2)),
    **dict.fromkeys(("norm_extra_bytes", "norm_extra_frozen_bytes"), (0, 20)),
    **dict.fromkeys(("full_attention_interval", "full_attention_offset"), (0, MAX_LAYERS)),
    **dict.fromkeys(("short_conv_kernel", "token_types", "activation_parameters"), (0, 10**4)),
    "short_conv_gates": (0, 10),
    "num_mtp_layers": (0, 64),
    "max_positions": (0, 10**9),
    "window": (1, 10**9),
}


@lru_cache(maxsize=256)
def _windowed(model: ModelSpec) -> ModelSpec:
    own = model.window_attention
    assert own is not None
    return replace(
        model,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        value_head_dim=own.v_head_dim,
        attention_sinks=own.attention_sinks,
        mla=own.mla,
        window_attention=None,
    )


@lru_cache(maxsize=256)
def _layers(model: ModelSpec) -> tuple[tuple[Block, ...], ...]:
    if model.layer_pattern is not None:
        return tuple((PATTERN_SYMBOLS[symbol],) for symbol in model.layer_pattern)
    cross = (Block.CROSS_ATTENTION,) if model.cross_attention and not model.merged_attention else ()
    return tuple((_attention_of(model, at), *cross, _ffn_of(model, at)) for at in range(model.num_layers))


@lru_cache(maxsize=256)
def _layer_kinds(model: ModelSpec) -> tuple[tuple[Block, ...], ...]:
    return tuple(dict.fromkeys(model.layers))


def _attention_of(model: ModelSpec, layer: int) -> Block:
    if model.window is None and model.linear_attention is None:
        return Block.ATTENTION
    interval = model.full_attention_interval
    if interval and (layer + 1 + model.full_attention_offset) % interval == 0:
        return Block.ATTENTION
    return Block.LINEAR_ATTENTION if model.linear_attention else Block.WINDOW_ATTENTION


def _ffn_of(model: ModelSpec, layer: int) -> Block:
    return Block.MOE if model.moe is not None and model.moe.has_layer(layer) else Block.MLP
