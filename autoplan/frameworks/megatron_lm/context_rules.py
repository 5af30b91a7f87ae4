"""Rules on context parallelism in Megatron-LM, whose attention is Transformer Engine's.

Places are those of `rules`; in Transformer Engine they are function names.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common.rules import Rule, all_true
from autoplan.frameworks.common.widths import kv_groups
from autoplan.spec.enums import ContextParallelKind, CudaGraphs, Sharding
from autoplan.spec.plan import PlanBatch
from autoplan.spec.workload import Workload

_ARGUMENTS = "training/arguments.py"
_ATTENTION = "TransformerEngine attention/dot_product_attention/context_parallel.py"

RING = ContextParallelKind.RING.code
ALL_TO_ALL = ContextParallelKind.ALL_TO_ALL.code


def _cp_heads(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans give every rank the same number of query and KV heads, since all-to-all moves whole heads."""
    heads = workload.model.num_heads // batch.tp
    kv_heads = np.maximum(kv_groups(workload.model) // batch.tp, 1)
    return (heads % batch.cp_inner == 0) & (kv_heads % batch.cp_inner == 0)


def _cp_latent(workload: Workload, batch: PlanBatch) -> Bools:
    model = workload.model
    if model.qk_head_dim == model.v_head_dim:
        return all_true(batch)
    return (batch.cp == 1) | (batch.cp_kind == RING)


def _cp_window(workload: Workload, batch: PlanBatch) -> Bools:
    model = workload.model
    if model.window is None and not model.attention_sinks:
        return all_true(batch)
    return (batch.cp == 1) | (batch.cp_kind == ALL_TO_ALL)


def _dynamic_cp(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans run the scheduler of samples; ranks make as many passes as they have samples."""
    model = workload.model
    takes_samples = model.mla is None and model.mamba is None and model.linear_attention is None
    is_power = (batch.cp & (batch.cp - 1)) == 0
    has_groups = batch.cp_kind <= ALL_TO_ALL  # the groups of a hierarchy are those of cp
    alone = (batch.pp == 1) & (batch.ep == 1) & (batch.micro_batch == 1) & (batch.cuda_graphs == CudaGraphs.NONE.code)
    return ~batch.dynamic_cp | (takes_samples & has_groups & (batch.cp > 1) & is_power & alone)


RULES: tuple[Rule, ...] = (
    Rule(
        source=f"{_ARGUMENTS}:1335",
        holds=lambda s, b: (b.cp == 1) | (s.training.seq_len % (2 * b.cp) == 0),
        text=lambda s, p: f"seq_len {s.training.seq_len} must be divisible by 2 x cp {p.cp}: lower cp",
    ),
    Rule(
        source=f"{_ATTENTION} AttnFuncWithCPAndQKVOA2A",
        holds=_cp_heads,
        text=lambda s, p: (
            f"cp {p.cp} with {p.cp_kind} needs the heads of a rank ({s.model.num_heads} over tp {p.tp}, and "
            f"{kv_groups(s.model)} for keys) divisible by {p.cp_kind.inner or 'cp'}: use ring or lower cp"
        ),
    ),
    Rule(
        source=f"{_ATTENTION} attn_forward_func_with_cp",
        holds=_cp_latent,
        text=lambda s, p: (
            f"cp {p.cp} with {p.cp_kind} needs value heads as wide as query heads, they are {s.model.v_head_dim} and "
            f"{s.model.qk_head_dim}: use ring"
        ),
    ),
    Rule(
        source=f"{_ATTENTION} attn_forward_func_with_cp",
        holds=_cp_window,
        text=lambda s, p: f"cp {p.cp} with {p.cp_kind} supports neither windows nor attention sinks: use all_to_all",
    ),
    Rule(
        source="core/pipeline_parallel/hybrid_cp_schedule.py:477",
        holds=_dynamic_cp,
        text=lambda s, p: (
            "dynamic_cp needs softmax attention by ring or all_to_all, cp a power of two above 1, pp 1, ep 1, "
            f"micro_batch 1 and no CUDA graphs, got {p.cp_kind}, cp {p.cp} pp {p.pp} ep {p.ep}, micro_batch "
            f"{p.micro_batch} and cuda_graphs {p.cuda_graphs}: leave it out"
        ),
    ),
    Rule(
        source=f"{_ARGUMENTS}:1447",
        holds=lambda s, b: ~b.dynamic_cp | (b.sharding < Sharding.ZERO2.code),
        text=lambda s, p: f"dynamic_cp with {p.sharding} (Megatron-FSDP): use zero1",
    ),
)
