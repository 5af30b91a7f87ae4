"""Rules on the parts of a layer that Megatron-LM recomputes, offloads or captures in CUDA graphs.

Places are those of `rules`.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common.rules import Rule, all_true
from autoplan.frameworks.common.widths import has_dense_mlp
from autoplan.spec.enums import (
    CudaGraphs,
    Dispatcher,
    OffloadLayers,
    OffloadModules,
    Precision,
    RecomputeModule,
    Sharding,
)
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import FULL, PlanBatch
from autoplan.spec.workload import Workload

_CONFIG = "core/transformer/transformer_config.py"


def missing_modules(model: ModelSpec) -> frozenset[str]:
    """Return the parts of a layer that recomputation may name but the model does not have.

    A norm can only be recomputed if it is a separate module: before latent attention and before experts
    (core/models/gpt/gpt_layer_specs.py).
    """
    moe = model.moe
    missing = set() if model.mla else {"mla_up_proj"}
    missing |= set() if has_dense_mlp(model) else {"mlp"}
    missing |= set() if moe else {"moe", "moe_act"}
    missing |= set() if moe and moe.shared_expert_ffn_size else {"shared_experts"}
    return frozenset(missing | (set() if moe or model.mla else {"layernorm"}))


def _modules_exist(workload: Workload, batch: PlanBatch) -> Bools:
    missing = sum(1 << RecomputeModule(module).code for module in missing_modules(workload.model))
    return batch.recompute_modules & missing == 0


def _missing_from_offload(model: ModelSpec) -> frozenset[str]:
    """Return the parts of a layer that offloading may name but the model does not have."""
    return frozenset() if model.moe else frozenset(("expert_fc1", "moe_act"))


def _offloaded_modules(workload: Workload, batch: PlanBatch) -> Bools:
    missing = _missing_from_offload(workload.model)
    exist = np.array([not word.parts & missing for word in OffloadModules])[batch.offload_modules]
    is_graphed = np.isin(batch.cuda_graphs, (CudaGraphs.ROUTER.code, CudaGraphs.FULL_ITERATION.code))
    return exist & ((batch.offload_modules == 0) | ~is_graphed)


def _offloaded_parts_are_stored(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans do not recompute the parts whose inputs they offload."""
    experts = batch.offloads("expert_fc1") | batch.offloads("moe_act")
    repeats_inputs = (batch.offloads("core_attn") & batch.repeats(RecomputeModule.MLA_UP_PROJ)) | (
        experts & batch.repeats(RecomputeModule.MOE)
    )
    return ~repeats_inputs & ((batch.offload_modules == 0) | (batch.recompute != FULL))


def _offloaded_layers(workload: Workload, batch: PlanBatch) -> Bools:
    divides = np.array([workload.model.num_layers * word.share % 1 == 0 for word in OffloadLayers])
    alone = (batch.pp == 1) & (batch.cuda_graphs == CudaGraphs.NONE.code) & (batch.offload_modules == 0)
    return (batch.offload_layers == 0) | (divides[batch.offload_layers] & alone)


def _graphs_exist(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans can capture their CUDA graphs; the sizes of expert inputs are only known on the device.

    HybridEP and the fused experts of Transformer Engine, used with mxfp8, do not need these sizes on the host
    (docs/user-guide/features/paged_stash.md; Megatron-Bridge 067f987, NVTE_CUTEDSL_FUSED_GROUPED_MLP).  The fused ones
    are whole and gated (core/transformer/moe/experts.py:382); those of squared ReLUs came on 2026-05-29, and recipes
    of such models capture parts of layers alone (Megatron-Bridge 067f987, perf_recipes/nemotronh).
    """
    if workload.model.moe:
        is_fused = (batch.etp == 1) & workload.model.gated_mlp
        is_static = is_fused & (batch.dispatcher == Dispatcher.HYBRIDEP.code)
        is_static &= batch.precision == Precision.MXFP8.code
        return (batch.cuda_graphs != CudaGraphs.FULL_ITERATION.code) | (is_static & (batch.ep > 1))
    return batch.cuda_graphs != CudaGraphs.ROUTER.code


def _is_graphed_in_part(batch: PlanBatch) -> Bools:
    return (batch.cuda_graphs > CudaGraphs.NONE.code) & (batch.cuda_graphs < CudaGraphs.FULL_ITERATION.code)


def _graphs_recompute(workload: Workload, batch: PlanBatch) -> Bools:
    return ~_is_graphed_in_part(batch) | ((batch.recompute != FULL) & ~batch.repeats(RecomputeModule.MOE))


def _graphs_overlap(workload: Workload, batch: PlanBatch) -> Bools:
    if not has_dense_mlp(workload.model):
        return all_true(batch)
    return ~batch.ep_overlap | (batch.cuda_graphs != CudaGraphs.LAYER.code)


def _delayed_gradients(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans can delay weight gradients: graphs that hold some must find them at one address."""
    has_bias = workload.model.mlp_bias or workload.model.qkv_bias
    in_graphs = batch.gradient_accumulation_fusion & (not has_bias)
    return ~batch.delay_wgrad | (batch.ep_overlap & (~_is_graphed_in_part(batch) | in_graphs))


RULES: tuple[Rule, ...] = (
    Rule(
        source="core/transformer/transformer_layer.py:473",
        holds=_modules_exist,
        text=lambda s, p: (
            f"{s.model.name} has no {' and no '.join(sorted(missing_modules(s.model) & set(p.recompute_modules)))} to "
            "recompute: leave it out of recompute_modules"
        ),
    ),
    Rule(
        source=f"{_CONFIG}:2127",
        holds=_offloaded_modules,
        text=lambda s, p: (
            f"offload_modules {p.offload_modules} needs these parts in the model, and cuda_graphs none, attn or layer, "
            f"it is {p.cuda_graphs}: leave offload_modules out"
        ),
    ),
    Rule(
        source=f"{_CONFIG}:2165",
        holds=_offloaded_parts_are_stored,
        text=lambda s, p: (
            f"offload_modules {p.offload_modules} with parts that are recomputed, recompute is {p.recompute!r}: leave "
            "one of them out"
        ),
    ),
    Rule(
        source=f"{_CONFIG}:1884",
        holds=_offloaded_layers,
        text=lambda s, p: (
            f"offload_layers {p.offload_layers} needs pp 1, no CUDA graphs, no offload_modules and a share of the "
            f"{s.model.num_layers} layers without remainder: leave offload_layers out"
        ),
    ),
    Rule(
        source=f"{_CONFIG}:1896",
        holds=lambda s, b: (b.offload_layers == 0) | (b.recompute == 0),
        text=lambda s, p: f"offload_layers {p.offload_layers} needs recompute none, it is {p.recompute}",
    ),
    Rule(
        source=f"{_CONFIG}:2820",
        holds=_graphs_exist,
        text=lambda s, p: (
            f"cuda_graphs {p.cuda_graphs} with {'experts' if s.model.moe else 'a model without experts'}: use "
            + ("mxfp8, dispatcher hybridep and etp 1 with gated experts, or layer" if s.model.moe else "attn or layer")
        ),
    ),
    Rule(
        source="core/distributed/fsdp/mcore_fsdp_adapter.py:182",
        holds=lambda s, b: ~_is_graphed_in_part(b) | (b.sharding < Sharding.ZERO2.code),
        text=lambda s, p: f"cuda_graphs {p.cuda_graphs} with {p.sharding}: use zero1, or no graphs",
    ),
    Rule(
        source=f"{_CONFIG}:2832",
        holds=_graphs_recompute,
        text=lambda s, p: (
            f"cuda_graphs {p.cuda_graphs} cannot contain fully recomputed layers or experts, recompute is "
            f"{p.recompute!r}: use none"
        ),
    ),
    Rule(
        source=f"{_CONFIG}:3065",
        holds=_graphs_overlap,
        text=lambda s, p: "cuda_graphs layer holds dense MLPs, which ep_overlap does not support: use attn",
    ),
    Rule(
        source=f"{_CONFIG}:3074",
        holds=_delayed_gradients,
        text=lambda s, p: (
            f"delay_wgrad needs ep_overlap, and with cuda_graphs {p.cuda_graphs} gradient_accumulation_fusion and "
            "attention without a bias: leave delay_wgrad out"
        ),
    ),
)
