"""Operations whose times are measured: their names, and what the numbers of their shapes are."""

from __future__ import annotations

from typing import Literal

from autoplan.base.errors import InputError

Operation = Literal[
    "gemm", "dgrad", "wgrad",
    "attention", "attention_backward", "latent_attention", "latent_attention_backward",
    "experts", "experts_backward",
    "linear", "linear_backward", "norm_linear", "norm_linear_backward", "mlp", "mlp_backward",
    "overlapped_mlp", "overlapped_mlp_backward", "ring_attention", "ring_attention_backward",
    "routing", "routing_backward", "exchange",
    "norm", "norm_backward", "rope", "swiglu", "swiglu_backward", "cross_entropy", "optimizer",
    "copy_to_host", "copy_from_host",
    "layer", "layer_backward", "layer_backward_selective", "layer_backward_full",
    "layer_input_gradient", "layer_weight_gradient",
    "replicated_layer", "sharded_layer", "resharded_layer",
    "moe_layer", "moe_layer_backward", "moe_layer_backward_selective", "moe_layer_backward_full",
    "moe_layer_input_gradient", "moe_layer_weight_gradient",
    "replicated_moe_layer", "sharded_moe_layer", "resharded_moe_layer",
    "pipeline_actions", "embedding", "head",
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv",
]  # fmt: skip

# Operations whose times rest on the same rates, or that are measured alike.
PRODUCTS: tuple[Operation, ...] = ("gemm", "dgrad", "wgrad")
ATTENTIONS: tuple[Operation, ...] = (
    *("attention", "attention_backward"),
    *("latent_attention", "latent_attention_backward"),
)
EXPERTS: tuple[Operation, ...] = ("experts", "experts_backward")
# Modules that join several of the others, and stand for them: they are measured only where somebody names one.
JOINED_KERNELS: tuple[Operation, ...] = (
    *("linear", "linear_backward", "norm_linear", "norm_linear_backward", "mlp", "mlp_backward"),
    *("overlapped_mlp", "overlapped_mlp_backward", "ring_attention", "ring_attention_backward"),
    *("routing", "routing_backward", "exchange"),
)
STREAMS: tuple[Operation, ...] = (  # through the memory of the device
    *("norm", "norm_backward", "rope", "swiglu", "swiglu_backward", "cross_entropy", "optimizer"),
)
# A profile runs them one by one, as torch does: frameworks fuse them, each in its way, unless they are eager as well.
FUSED: tuple[Operation, ...] = ("rope", "swiglu", "swiglu_backward", "cross_entropy")
HOST_COPIES: tuple[Operation, ...] = ("copy_to_host", "copy_from_host")
LAYERS: tuple[Operation, ...] = ("layer", "layer_backward", "layer_backward_selective", "layer_backward_full")
LAYER_HALVES: tuple[Operation, ...] = ("layer_input_gradient", "layer_weight_gradient")
SHARED_LAYERS: tuple[Operation, ...] = ("replicated_layer", "sharded_layer", "resharded_layer")
# The same units of layers whose feed-forward part is routed experts, in the same order.
MOE_LAYERS: tuple[Operation, ...] = (
    *("moe_layer", "moe_layer_backward", "moe_layer_backward_selective", "moe_layer_backward_full"),
)
MOE_LAYER_HALVES: tuple[Operation, ...] = ("moe_layer_input_gradient", "moe_layer_weight_gradient")
SHARED_MOE_LAYERS: tuple[Operation, ...] = ("replicated_moe_layer", "sharded_moe_layer", "resharded_moe_layer")
COLLECTIVES: tuple[Operation, ...] = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"),
)

# Operations for which a user may name another kernel than torch's, and the operations that it then serves.
GIVEN_KERNELS: dict[Operation, tuple[Operation, ...]] = {
    "gemm": PRODUCTS,
    "attention": ("attention", "attention_backward"),
    "latent_attention": ("latent_attention", "latent_attention_backward"),
    "experts": EXPERTS,
    "norm": ("norm", "norm_backward"),
    "optimizer": ("optimizer",),
    "linear": ("linear", "linear_backward"),
    "norm_linear": ("norm_linear", "norm_linear_backward"),
    "mlp": ("mlp", "mlp_backward"),
    "overlapped_mlp": ("overlapped_mlp", "overlapped_mlp_backward"),
    "ring_attention": ("ring_attention", "ring_attention_backward"),
    "routing": ("routing", "routing_backward"),
    "exchange": ("exchange",),
    "layer": LAYERS[:2],
    "moe_layer": MOE_LAYERS[:2],
}
# Of them, those that run on the ranks of a group together.
GROUPED: tuple[Operation, ...] = (
    *("overlapped_mlp", "overlapped_mlp_backward", "ring_attention", "ring_attention_backward", "exchange"),
)
# Of them, modules that quantise what they multiply themselves, if they run in 8 or 4 bits.
_QUANTISING: tuple[Operation, ...] = ("linear", "norm_linear", "mlp", "experts", "layer", "moe_layer")
QUANTISING: tuple[Operation, ...] = tuple(served for named in _QUANTISING for served in GIVEN_KERNELS[named])

PRODUCT_SIZES = ("m", "n", "k")
ATTENTION_SIZES = ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim", "window")
LATENT_SIZES = ("batch", "seq_len", "num_heads", "qk_head_dim", "v_head_dim")
EXPERTS_SIZES = ("tokens", "hidden_size", "ffn_size", "experts_per_token", "num_experts", "etp", "ep")
LAYER_SIZES = ("batch", "seq_len", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "tp")
SHARED_LAYER_SIZES = (*LAYER_SIZES, "num_devices", "devices_per_domain")
MOE_LAYER_SIZES = (*LAYER_SIZES, "num_experts", "experts_per_token")
SHARED_MOE_LAYER_SIZES = (*MOE_LAYER_SIZES, "num_devices", "devices_per_domain")
END_SIZES = ("tokens", "hidden_size", "vocab_size", "tp")
PIPELINE_SIZES = ("num_micro_batches", "num_devices", "devices_per_domain")
COPY_SIZES = ("buffer_bytes",)
MLP_SIZES = ("tokens", "hidden_size", "ffn_size")
OVERLAPPED_SIZES = (*MLP_SIZES, "num_devices", "devices_per_domain")
RING_SIZES = (*ATTENTION_SIZES[:-1], "num_devices", "devices_per_domain")
ROUTING_SIZES = ("tokens", "hidden_size", "num_experts", "experts_per_token")
EXCHANGE_SIZES = (*ROUTING_SIZES, "num_devices", "devices_per_domain")
GROUP_SIZES = ("num_devices", "devices_per_domain", "num_groups", "buffer_bytes")

NARROW_TYPES = ("fp8", "mxfp8", "nvfp4")
# Those that can be measured: one scale a tensor, for every 32 or 16 numbers, or for tiles of 128 (fp8_scaling blockwise
# of a plan).
NARROW_PRODUCTS = (*NARROW_TYPES, "fp8_block")
# Those of modules: their products have one scale a tensor in both, found in the tensor itself or in earlier ones.
NARROW_MODULES = (*NARROW_PRODUCTS, "fp8_delayed")
RATE_TYPES = {"mxfp8": "fp8", "fp8_block": "fp8", "fp8_delayed": "fp8"}  # at whose rate of the datasheet the others run

# What the numbers of a shape are, by operation.  A matrix of k inputs and n outputs meets m tokens: `gemm` forward,
# `dgrad` and `wgrad` backward, the latter added to an fp32 buffer.  `attention` is causal, over `batch` sequences,
# over the last `window` tokens, itself among them, or over all where it is 0; `latent_attention` is causal too, with
# values narrower than keys and as many heads of both.  `experts` are all routed experts of one rank, both products and
# the activation between, for the `tokens` of all ranks that share them.  `rope` (of queries and keys) and
# `cross_entropy` are both ways together, `optimizer` is one Adam step.  Copies are between a device and pinned memory
# of its host, on all devices of the host at once.  A group of a collective has `devices_per_domain` members in each
# scale-up domain that it touches, and `num_groups` such groups work at once in these domains; its buffer is the whole
# one: what an all-gather ends with, a reduce-scatter begins with.
#
# `linear` is a matrix with the quantisation of what it multiplies, `norm_linear` has an RMSNorm before it, `mlp` is an
# RMSNorm and both matrices with SwiGLU between them; those of an `overlapped_mlp` are split over `num_devices`, which
# gather its `tokens` and sum its outputs while they multiply.  `ring_attention` is that of one rank with its part of
# `seq_len`.  `routing` is the router, the sorting of tokens by expert, and their weighted sum in the former order;
# `exchange` sends each token of a rank to the ranks of its experts, once to each, and brings the outputs back.
#
# The others are units of the built-in trainer, with all that its host does for them; of other frameworks, layers that
# somebody names.  `layer` is the forward pass of a whole gated transformer layer over tp ranks, collectives included,
# its weights there, its gradients not reduced.  Its backward pass finds all that it needs kept, or first runs the core
# of the attention (`_selective`) or the layer (`_full`) again; `layer_input_gradient` and `layer_weight_gradient` are
# its halves where a schedule splits it.  A layer whose states `num_devices` replicas share is both passes of a
# micro-batch that begins and ends a step: it gathers the weights, or casts them, and reduces the gradients, one among
# others that compute meanwhile.  `replicated_layer` shards nothing, also on one device, `sharded_layer` keeps what it
# gathered for the backward pass, `resharded_layer` gathers it again.  A `moe_layer` has routed experts of `ffn_size`
# each in place of the feed-forward part, all of them on every rank; its units are named alike.  `embedding` and `head`
# (the last norm and the loss with it) are both ways.  `pipeline_actions` is what the 2 x num_micro_batches passes of
# one stage take of the host beyond computation and messages.
SHAPES: dict[Operation, tuple[str, ...]] = {
    **dict.fromkeys(PRODUCTS, PRODUCT_SIZES),
    **dict.fromkeys(("attention", "attention_backward"), ATTENTION_SIZES),
    **dict.fromkeys(("latent_attention", "latent_attention_backward"), LATENT_SIZES),
    **dict.fromkeys(EXPERTS, EXPERTS_SIZES),
    **dict.fromkeys(("linear", "linear_backward", "norm_linear", "norm_linear_backward"), PRODUCT_SIZES),
    **dict.fromkeys(("mlp", "mlp_backward"), MLP_SIZES),
    **dict.fromkeys(("overlapped_mlp", "overlapped_mlp_backward"), OVERLAPPED_SIZES),
    **dict.fromkeys(("ring_attention", "ring_attention_backward"), RING_SIZES),
    **dict.fromkeys(("routing", "routing_backward"), ROUTING_SIZES),
    "exchange": EXCHANGE_SIZES,
    **dict.fromkeys(("norm", "norm_backward"), ("tokens", "hidden_size")),
    "rope": ("tokens", "num_heads", "head_dim"),
    **dict.fromkeys(("swiglu", "swiglu_backward"), ("tokens", "ffn_size")),
    "cross_entropy": ("tokens", "vocab_size"),
    "optimizer": ("num_parameters",),
    **dict.fromkeys(HOST_COPIES, COPY_SIZES),
    **dict.fromkeys((*LAYERS, *LAYER_HALVES), LAYER_SIZES),
    **dict.fromkeys(SHARED_LAYERS, SHARED_LAYER_SIZES),
    **dict.fromkeys((*MOE_LAYERS, *MOE_LAYER_HALVES), MOE_LAYER_SIZES),
    **dict.fromkeys(SHARED_MOE_LAYERS, SHARED_MOE_LAYER_SIZES),
    "pipeline_actions": PIPELINE_SIZES,
    **dict.fromkeys(("embedding", "head"), END_SIZES),
    **dict.fromkeys(COLLECTIVES, GROUP_SIZES),
}


# What the built-in trainer does and no sum of the others stands for.
TRAINER_UNITS: frozenset[Operation] = frozenset(
    (
        *(*LAYERS, *LAYER_HALVES, *SHARED_LAYERS),
        *(*MOE_LAYERS, *MOE_LAYER_HALVES, *SHARED_MOE_LAYERS),
        *("embedding", "head", "pipeline_actions"),
    )
)


def devices_together(operation: Operation, shape: tuple[int, ...]) -> int:
    """Return how many devices an operation runs on together: what links them decides how long it takes, if several."""
    sizes = dict(zip(SHAPES[operation], shape, strict=True))
    # Experts are those of one rank, whatever the degrees that make them so few.
    return sizes.get("tp", 1) * sizes.get("num_devices", 1)


def check_shape(operation: str, shape: tuple[int, ...]) -> None:
    """Refuse an operation or a shape that `SHAPES` does not know."""
    names = SHAPES.get(operation)  # type: ignore[call-overload]
    if names is None:
        raise InputError(f"operation {operation!r} is unknown; known are {', '.join(SHAPES)}")
    if len(shape) == len(names) and min(shape) > 0 and max(shape) < 2**63:
        return  # at once, as there may be hundreds of thousands
    # A window of 0 is none.
    if len(shape) != len(names) or not all(
        (name != "window") <= size < 2**63 for name, size in zip(names, shape, strict=True)
    ):
        raise InputError(f"{operation} needs {', '.join(names)}, all positive, got {shape}")
