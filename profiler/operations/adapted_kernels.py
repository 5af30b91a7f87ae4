"""Kernels of libraries that are called in another way than `given_kernels` calls them, made alike."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoplan.base.errors import InputError
from autoplan.profiler.operations.torch_modules import Routing

Adapter = Callable[[Any], Callable[..., Any]]


def _transformer_engine_attention(core: Any) -> Callable[..., Tensor]:
    """Return a function of queries, keys and values by Transformer Engine's module, which is made for their sizes."""

    @functools.cache
    def made(num_heads: int, num_kv_heads: int, key_width: int, value_width: int) -> nn.Module:
        widths = key_width if key_width == value_width else (key_width, value_width)
        module = core(num_heads, widths, num_gqa_groups=num_kv_heads, qkv_format="bshd", attn_mask_type="causal")
        assert isinstance(module, nn.Module)
        return module

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int] | None = None) -> Tensor:
        assert causal
        module = made(q.shape[2], k.shape[2], k.shape[3], v.shape[3])
        output: Tensor = module(q, k, v, window_size=window_size)  # heads side by side
        return output.view(*q.shape[:3], v.shape[3])

    return attend


def _transformer_engine_backend() -> str:
    """Return the backend of the last call of Transformer Engine's attention, as the library notes it."""
    place = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    chosen = getattr(place, "_attention_backends", {})
    for name in ("flash", "fused"):
        if chosen.get(f"use_{name}_attention"):
            return f"{name} {chosen.get(f'{name}_attention_backend') or ''}".strip()
    return "unfused" if chosen.get("use_unfused_attention") else ""


def _torchtitan_attention(core: Any) -> Callable[..., Tensor]:
    """Return a function of queries, keys and values by one of torchtitan's modules, which have a configuration."""
    module = core(core.Config())

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        output: Tensor = module(q, k, v, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
        return output

    return attend


class WholeExperts(nn.Module):
    """All products of experts and what is between them, in one module; called like a grouped product."""

    runs_narrow = False  # torchtitan quantises experts by another module

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        for weight in experts.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the outputs for inputs sorted by expert."""
        output: Tensor = self.experts(x, torch.tensor(rows, device=x.device))
        return output


def _torchtitan_experts(core: Any) -> Callable[..., WholeExperts]:
    def made(num_experts: int, hidden_size: int, width: int) -> WholeExperts:
        return WholeExperts(core(core.Config(dim=hidden_size, hidden_dim=width, num_experts=num_experts)))

    made.is_whole = True  # type: ignore[attr-defined]
    return made


def _rms_normed(core: Any) -> Callable[..., nn.Module]:
    """Return one of Transformer Engine's modules that begin with a norm: an RMSNorm."""
    return functools.partial(core, normalization="RMSNorm")


def _transformer_engine_mlp(core: Any) -> Callable[..., nn.Module]:
    """Return a function that makes Transformer Engine's RMSNorm and MLP."""

    def make(hidden_size: int, ffn_size: int, **words: Any) -> nn.Module:
        module = core(hidden_size, ffn_size, bias=False, normalization="RMSNorm", activation="swiglu", **words)
        return cast(nn.Module, module)

    return make


def _transformer_engine_userbuffers(core: Any) -> Callable[..., nn.Module]:
    """Return a function that makes the MLP of ranks whose collectives overlap with its products, by userbuffers."""
    engine = importlib.import_module("transformer_engine.pytorch")
    overlaps = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad")  # as Megatron-Core sets them
    buffers: list[tuple[int, ...]] = []  # there is one set of them at a time

    def make(*, tokens: int, hidden_size: int, ffn_size: int, group: Any) -> nn.Module:
        if buffers != [(tokens, hidden_size, group.size())]:
            if buffers:
                engine.destroy_ub()
            engine.initialize_ub([tokens, hidden_size], group.size(), dtype=torch.bfloat16)
            buffers[:] = [(tokens, hidden_size, group.size())]
        split = {"tp_group": group, "tp_size": group.size(), "sequence_parallel": True, "set_parallel_mode": True}
        return _transformer_engine_mlp(core)(
            hidden_size, ffn_size, params_dtype=torch.bfloat16, **split, **dict.fromkeys(overlaps, True)
        )

    return make


def _transformer_engine_routing(permute: Any) -> Callable[..., nn.Module]:
    """Return the routing by Transformer Engine's fused router, permutation and its reverse."""
    engine = sys.modules[permute.__module__.rpartition(".")[0]]
    router = importlib.import_module("transformer_engine.pytorch.router")

    class Fused(Routing):
        def forward(self, x: Tensor) -> Tensor:
            scores, routing_map = router.fused_topk_with_score_function(
                self.gate(x), self.experts_per_token, False, None, None, None, "softmax", None
            )
            num_rows = x.shape[0] * self.experts_per_token
            rows, _, row_ids = permute(x, scores, routing_map, num_rows)
            output: Tensor = engine.moe_unpermute(rows, row_ids, merging_probs=scores, restore_shape=x.shape)
            return output

    return Fused


class _Exchange(nn.Module):
    """Dispatch of tokens to the ranks of their experts by DeepEP, and the combination of what comes back."""

    def __init__(self, buffer: Any, *, hidden_size: int, num_experts: int, experts_per_token: int, group: Any) -> None:
        super().__init__()
        size, width_bytes = group.size(), 2 * hidden_size
        configs = buffer.get_dispatch_config(size), buffer.get_combine_config(size)
        near, far = (
            max(getattr(config, f"get_{kind}_buffer_size_hint")(width_bytes, size) for config in configs)
            for kind in ("nvl", "rdma")
        )
        self.buffer = buffer(group, near, far)
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.chosen: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the sums of the copies of each token."""
        if self.chosen is None:  # balanced, the same in every call
            scores = torch.rand(len(x), self.num_experts, device=x.device)
            self.chosen = scores.topk(self.experts_per_token)[::-1]
        assert self.chosen is not None
        experts, weights = self.chosen
        per_rank, per_node, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(experts, self.num_experts)
        received, _, received_weights, _, handle, _ = self.buffer.dispatch(
            x.detach(),
            topk_idx=experts,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        output: Tensor = self.buffer.combine(received, handle, topk_weights=received_weights)[0]
        return output


def _deep_ep_exchange(buffer: Any) -> Callable[..., nn.Module]:
    return functools.partial(_Exchange, buffer)


class Layer(nn.Module):
    """Layer of a framework as a function of batch, tokens and width.

    `runs_narrow` says that a recipe of Transformer Engine is all that it takes to run it in 8 or 4 bits.
    """

    def __init__(
        self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], *, runs_narrow: bool = False
    ) -> None:
        super().__init__()
        self.layer, self._call, self.runs_narrow = layer, call, runs_narrow

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        return self._call(self.layer, x)


def _torchtitan_layer(core: Any) -> Callable[..., nn.Module]:
    """Return a function that makes torchtitan's block of Llama 3, with attention for packed sequences on a GPU.

    On a CPU torch's own attention runs, as the other does not.
    """
    build = sys.modules[core.__module__.rpartition(".")[0]]._build_llama3_layers  # the only place that builds one
    common = importlib.import_module("torchtitan.models.common")
    attention = importlib.import_module("torchtitan.models.common.attention")

    def make(
        *, seq_len: int, hidden_size: int, ffn_size: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> nn.Module:
        if head_dim * num_heads != hidden_size:
            raise InputError("torchtitan's block of Llama 3 has heads as wide as hidden_size / num_heads")
        (config,) = build(
            n_layers=1,
            dim=hidden_size,
            n_heads=num_heads,
            n_kv_heads=num_kv_heads,
            hidden_dim=ffn_size,
            rope=common.ComplexRoPE.Config(dim=head_dim, max_seq_len=seq_len, theta=5e5),
            attn_backend="varlen",
        )
        if not torch.cuda.is_available():
            config.attention.inner_attention = attention.ScaledDotProductAttention.Config()
        layer: nn.Module = config.build()
        for weight in layer.parameters():
            nn.init.normal_(weight, std=0.02)

        def call(layer: nn.Module, x: Tensor) -> Tensor:
            masks = None
            if x.is_cuda:
                ends = torch.arange(0, x.shape[0] * seq_len + 1, seq_len, dtype=torch.int32, device=x.device)
                masks = attention.VarlenMetadata(ends, ends, seq_len, seq_len)
            output: Tensor = layer(x, masks)
            return output

        return Layer(layer, call)

    return make


def _megatron_layer(core: Any) -> Callable[..., nn.Module]:
    """Return a function that makes Megatron-Core's layer: of Transformer Engine's modules, or its own without a GPU."""
    state = importlib.import_module("megatron.core.parallel_state")
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    config_of = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    built = importlib.import_module("megatron.core.transformer.spec_utils").build_module

    def make(
        *,
        seq_len: int,
        hidden_size: int,
        ffn_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_experts: int | None = None,
        experts_per_token: int = 1,
    ) -> nn.Module:
        if not state.model_parallel_is_initialized():
            state.initialize_model_parallel()
            importlib.import_module("megatron.core.tensor_parallel.random").model_parallel_cuda_manual_seed(1)
        moe = {"num_moe_experts": num_experts, "moe_router_topk": experts_per_token, "moe_ffn_hidden_size": ffn_size}
        config = config_of(
            num_layers=1,
            hidden_size=hidden_size,
            ffn_hidden_size=ffn_size,
            num_attention_heads=num_heads,
            num_query_groups=num_kv_heads,
            kv_channels=head_dim,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=not torch.cuda.is_available(),
            apply_rope_fusion=torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            **(moe | {"moe_grouped_gemm": torch.cuda.is_available()} if num_experts else {}),
        )
        if torch.cuda.is_available():
            spec = specs.get_gpt_layer_with_transformer_engine_spec(num_experts, bool(num_experts))
        else:
            spec = specs.get_gpt_layer_local_spec(num_experts, normalization="RMSNorm")
        layer = built(spec, config=config)
        assert isinstance(layer, core)
        rates = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(float(seq_len)), rates).repeat(1, 2)[:, None, None]
        mask = torch.ones(1, 1, seq_len, seq_len, dtype=torch.bool).triu(1)

        def call(layer: nn.Module, x: Tensor) -> Tensor:
            # Masks of Transformer Engine are causal by themselves; tokens come first.
            own = None if x.is_cuda else mask
            output = layer(x.transpose(0, 1), attention_mask=own, rotary_pos_emb=angles.to(x.device))[0]
            return output.transpose(0, 1)

        # In 8 bits its experts pad what they multiply, which a recipe alone does not tell them to.
        return Layer(layer, call, runs_narrow=torch.cuda.is_available() and not num_experts)

    return make


def _transformer_engine_ring(core: Any) -> Callable[..., Tensor]:
    """Return a function of queries, keys and values by Transformer Engine's attention over the ranks of a group."""
    streams: list[Any] = []

    @functools.cache
    def made(group: Any, num_heads: int, num_kv_heads: int, width: int) -> nn.Module:
        streams.append(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        module = core(num_heads, width, num_gqa_groups=num_kv_heads, qkv_format="bshd", attn_mask_type="causal")
        module.set_context_parallel_group(group, dist.get_process_group_ranks(group), streams[-1], "p2p")
        assert isinstance(module, nn.Module)
        return module

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Any) -> Tensor:
        assert causal
        output: Tensor = made(group, q.shape[2], k.shape[2], k.shape[3])(q, k, v)
        return output.view(*q.shape)

    return attend


# Recipes of Transformer Engine by type (transformer_engine/common/recipe).
RECIPES = {
    "fp8": "Float8CurrentScaling",
    "fp8_delayed": "DelayedScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}


class _Quantised(nn.Module):
    """Module of Transformer Engine, or layer of them, in 8 or 4 bits; later calls find the weights quantised."""

    def __init__(self, module: nn.Module, dtype: str) -> None:
        super().__init__()
        engine, recipes = map(
            importlib.import_module, ("transformer_engine.pytorch", "transformer_engine.common.recipe")
        )
        # Ranks run it as often as each needs to, so that none may wait for the largest numbers of the others.
        words = {"reduce_amax": False} if dtype == "fp8_delayed" else {}
        recipe = getattr(recipes, RECIPES[dtype])(**words)
        self.module, self._is_first = module, True
        self._narrow = functools.partial(engine.autocast, enabled=True, recipe=recipe)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        """Return the output in 16 bits."""
        # Layers of Megatron-Core keep track of the first micro-batch themselves.
        words = {} if isinstance(self.module, Layer) else {"is_first_microbatch": self._is_first}
        with self._narrow():
            output: Tensor = self.module(x, *others, **words)
        self._is_first = False
        return output


def quantised(module: nn.Module, dtype: str) -> nn.Module:
    """Return a module as it runs in a type: Transformer Engine's under its recipe for 8 and 4 bits, others as they are.

    Raises InputError for modules that their library runs in another way in that type.
    """
    if dtype not in RECIPES:
        return module
    if not getattr(module, "runs_narrow", True):
        raise InputError("its library quantises it in another way: name it with --dtypes bf16")
    is_engine = type(module).__module__.startswith("transformer_engine")
    return _Quantised(module, dtype) if is_engine or isinstance(module, Layer) else module


ADAPTERS: dict[str, Adapter] = {
    "transformer_engine.pytorch:DotProductAttention": _transformer_engine_attention,
    "transformer_engine.pytorch:LayerNormLinear": _rms_normed,
    "transformer_engine.pytorch:LayerNormMLP": _transformer_engine_mlp,
    "transformer_engine.pytorch.module:LayerNormMLP": _transformer_engine_userbuffers,
    "transformer_engine.pytorch:moe_permute_with_probs": _transformer_engine_routing,
    "transformer_engine.pytorch.attention:DotProductAttention": _transformer_engine_ring,
    "deep_ep:Buffer": _deep_ep_exchange,
    "megatron.core.transformer.transformer_layer:TransformerLayer": _megatron_layer,
    "torchtitan.models.common.attention:ScaledDotProductAttention": _torchtitan_attention,
    "torchtitan.models.common.moe:GroupedExperts": _torchtitan_experts,
    "torchtitan.models.llama3.model:Llama3TransformerBlock": _torchtitan_layer,
}
# What a library says of the kernel that its last call ran.
BACKENDS: dict[str, Callable[[], str]] = {"transformer_engine.pytorch:DotProductAttention": _transformer_engine_backend}
