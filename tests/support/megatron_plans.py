"""Plans for everything that starts Megatron-Core: a matrix for the frameworks' own parsers, and any for round trips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from autoplan.api.plan_files import make_mixed_file
from autoplan.api.unlike_nodes import node_ranges
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.primus.rules import RULES as PRIMUS_RULES
from autoplan.readers.cluster import load_cluster
from autoplan.spec.blocks import Experts, LatentAttention
from autoplan.spec.enums import ContextParallelKind, RankOrder, RecomputeModule
from autoplan.spec.framework import Framework
from autoplan.spec.mixed_problem import MixedStage, ReplicaKind
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, even_chunks
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.workload import Workload
from mixed_cases import plan_of, problem_of, replicas
from test_megatron_lm_export import DEEPSEEK, GPT3, GPT_OSS, LLAMA_8B, cluster_of, plan_file_of

MIXTRAL = replace(
    LLAMA_8B,
    name="mixtral-8x7b",
    vocab_size=32000,
    ffn_size=0,
    rope_base=1000000.0,
    moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=14336),
)
QWEN_MOE = replace(
    LLAMA_8B,
    name="qwen-moe",
    num_layers=24,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128 * 2,
    ffn_size=5632,
    qk_norm="head",
    moe=Experts(
        num_experts=64,
        experts_per_token=8,
        expert_ffn_size=1408,
        shared_expert_ffn_size=5632,
        shared_expert_gate=True,
        num_dense_layers=1,
    ),
)
LATENT = replace(
    DEEPSEEK,
    name="latent",
    num_layers=27,
    hidden_size=2048,
    num_heads=16,
    ffn_size=10944,
    num_mtp_layers=0,
    mla=LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    moe=Experts(
        num_experts=64, experts_per_token=6, expert_ffn_size=1408, shared_expert_ffn_size=2816, num_dense_layers=1
    ),
)
SMALL_GPT = replace(GPT3, name="gpt-small", num_layers=24, hidden_size=2048, num_heads=16, ffn_size=8192)

SPLIT = {"grad_reduce_overlap": False, "param_gather_overlap": False}
UNSHARDED = {"sharding": "none", "param_gather_overlap": False}


def unlike(model: ModelSpec, *kinds: ReplicaKind, **common: Any) -> PlanFile:
    """A plan over 8 H100 and 16 A100, as the A100 start it."""
    problem = problem_of(load_cluster("h100-sxm:1x8"), load_cluster("a100-sxm:2x8"), model=model, seq_len=4096)
    costs = estimate_mixed(problem, [plan_of(kinds=kinds, **common)])
    ranges = node_ranges(problem, make_mixed_file(problem, costs, None, command="a test"), "megatron-lm")
    return next(nodes.plan_file for nodes in ranges if nodes.part == "a100-sxm")


DEEP = tuple(
    MixedStage(part=part, tp=2, layers=6 * size, chunks=(size,) * 6) for part, size in ((1, 1), (1, 1), (0, 3))
)

# Dense, experts and latent attention; even, uneven and interleaved stages, context parallelism, replicated shards.
MATRIX: dict[str, PlanFile] = {
    "dense, one device a replica": plan_file_of(LLAMA_8B, dp_replicate=8, **UNSHARDED),
    "dense, tp": plan_file_of(LLAMA_8B, tp=4, sp=True, dp_shard=2, tp_overlap=True),
    "dense, tp without sp": plan_file_of(LLAMA_8B, tp=2, dp_shard=4, precision="fp16"),
    "dense, stages": plan_file_of(LLAMA_8B, tp=2, sp=True, pp=4, dp_shard=2, micro_batch=2),
    "dense, uneven stages": plan_file_of(LLAMA_8B, pp=4, dp_shard=2, layers_per_chunk=(7, 9, 9, 7)),
    "dense, stages that do not divide": plan_file_of(LLAMA_8B, pp=3, tp=2, sp=True, dp_shard=4, global_batch=64),
    "dense, interleaved": plan_file_of(LLAMA_8B, pp=4, vp=4, schedule="interleaved", tp=2, sp=True, dp_shard=2),
    "dense, uneven chunks": plan_file_of(
        LLAMA_8B, pp=4, vp=2, schedule="interleaved", dp_shard=2, layers_per_chunk=(3, 4, 4, 4, 4, 4, 5, 4)
    ),
    "dense, ring": plan_file_of(LLAMA_8B, seq_len=32768, cp=4, tp=2, sp=True, dp_shard=2),
    "dense, all to all": plan_file_of(LLAMA_8B, seq_len=32768, cp=4, cp_kind="all_to_all", tp=2, sp=True, dp_shard=4),
    "dense, all to all in a ring": plan_file_of(LLAMA_8B, seq_len=32768, cp=8, cp_kind="a2a+p2p:4", dp_shard=2),
    "dense, shards replicated": plan_file_of(LLAMA_8B, tp=2, sp=True, dp_replicate=4, dp_shard=8),
    "dense, pipelines first": plan_file_of(
        LLAMA_8B, tp=4, sp=True, pp=2, dp_shard=4, rank_order=RankOrder.PP_BEFORE_DP
    ),
    "dense, zero2": plan_file_of(LLAMA_8B, tp=2, sp=True, dp_shard=8, sharding="zero2"),
    "dense, zero3": plan_file_of(LLAMA_8B, dp_shard=16, sharding="zero3"),
    "dense, replicated zero3": plan_file_of(LLAMA_8B, dp_replicate=4, dp_shard=8, sharding="zero3"),
    "dense, host": plan_file_of(LLAMA_8B, dp_shard=8, offload="optimizer"),
    "dense, graphs of layers": plan_file_of(LLAMA_8B, pp=2, dp_shard=4, cuda_graphs="layer"),
    "dense, one graph": plan_file_of(LLAMA_8B, dp_shard=8, cuda_graphs="full_iteration"),
    "experts, graphs of layers": plan_file_of(MIXTRAL, ep=8, dp_shard=8, cuda_graphs="layer"),
    "dense, fp8 weights": plan_file_of(LLAMA_8B, dp_shard=64, precision="fp8", narrow_params=True),
    "dense, 16-bit gradients": plan_file_of(LLAMA_8B, dp_shard=8, grad_dtype="bf16"),
    "dense, remainders": plan_file_of(LLAMA_8B, dp_shard=8, main_weights="remainders"),
    "dense, 16-bit states": plan_file_of(
        LLAMA_8B, dp_shard=8, grad_dtype="bf16_main", main_weights="remainders", moment_dtype="bf16"
    ),
    "dense, narrow states": plan_file_of(LLAMA_8B, dp_shard=8, main_weights="fp16", moment_dtype="fp8"),
    "dense, fp8 with 16-bit moments": plan_file_of(LLAMA_8B, dp_shard=64, precision="fp8", moment_dtype="bf16"),
    "dense, full recompute": plan_file_of(LLAMA_8B, pp=2, dp_shard=4, recompute="full"),
    "dense, some layers": plan_file_of(LLAMA_8B, pp=2, dp_shard=4, recompute="full", recompute_num_layers=5),
    "dense, fp8": plan_file_of(LLAMA_8B, dp_shard=64, precision="fp8"),
    "dense, no overlap": plan_file_of(LLAMA_8B, dp_shard=8, grad_reduce_overlap=False, param_gather_overlap=False),
    "gpt": plan_file_of(SMALL_GPT, seq_len=2048, tp=8, sp=True, pp=4, vp=3, schedule="interleaved", dp_shard=2),
    "gpt, unfused": plan_file_of(SMALL_GPT, seq_len=2048, attention="unfused", dp_shard=8, recompute="selective"),
    "experts": plan_file_of(MIXTRAL, ep=8, dp_shard=8),
    "experts, HybridEP": replace(
        plan_file_of(MIXTRAL, ep=8, dp_shard=8, dispatcher="hybridep"),
        framework=Framework(name="nemo").changed(bytes_per_logit=2.0, bytes_per_reduced_grad=2.0),
    ),
    "experts, DeepEP": plan_file_of(MIXTRAL, ep=8, dp_shard=8, dispatcher="deepep"),
    "experts, dropped tokens": plan_file_of(MIXTRAL, ep=8, dp_shard=8, token_dropping=True),
    "experts, fused router": plan_file_of(MIXTRAL, ep=8, dp_shard=8, router_fusion=True),
    "latent, fused RoPE": plan_file_of(LATENT, tp=2, sp=True, ep=8, dp_shard=8, rope_fusion=True),
    "experts, tensors": plan_file_of(MIXTRAL, tp=2, sp=True, ep=4, etp=2, dp_shard=8, pp=2),
    "experts, overlap": plan_file_of(
        MIXTRAL, pp=4, vp=2, schedule="interleaved", ep=8, dp_shard=16, ep_overlap=True, recompute="selective"
    ),
    "experts, parts": plan_file_of(
        QWEN_MOE, ep=8, dp_shard=32, recompute="selective", recompute_modules=("layernorm", "moe_act")
    ),
    "experts, shared": plan_file_of(QWEN_MOE, tp=2, sp=True, pp=3, ep=16, dp_shard=16),
    "experts, context": plan_file_of(QWEN_MOE, seq_len=16384, cp=2, ep=8, dp_shard=8),
    "experts, replicated": plan_file_of(QWEN_MOE, ep=4, dp_replicate=2, dp_shard=8),
    "windows": plan_file_of(GPT_OSS, ep=8, dp_shard=8, pp=2),
    "latent": plan_file_of(LATENT, tp=2, sp=True, ep=8, dp_shard=8),
    "latent, uneven": plan_file_of(LATENT, pp=4, ep=8, dp_shard=8, layers_per_chunk=(6, 7, 7, 7)),
    "latent, uneven chunks": plan_file_of(
        LATENT, pp=2, vp=2, schedule="interleaved", ep=8, dp_shard=8, layers_per_chunk=(6, 7, 8, 6)
    ),
    "latent, parts": plan_file_of(
        LATENT, ep=8, dp_shard=16, recompute="selective", recompute_modules=("mla_up_proj", "moe_act", "layernorm")
    ),
    "latent, predictions": plan_file_of(DEEPSEEK, tp=4, sp=True, pp=8, ep=8, dp_shard=4, precision="fp8"),
    "unlike stages": unlike(LLAMA_8B, replicas(4, 8, (1, 2, 6), (1, 2, 7), (0, 2, 19)), sharding="zero1"),
    "unlike stages, interleaved": unlike(
        replace(LLAMA_8B, num_layers=30), ReplicaKind(count=4, num_microbatches=9, stages=DEEP), sharding="zero1"
    ),
    "unlike stages, context": unlike(
        LLAMA_8B, replicas(4, 8, (1, 1, 6), (1, 1, 7), (0, 1, 19)), cp=2, sharding="zero1"
    ),
    "unlike stages, experts": unlike(MIXTRAL, replicas(4, 8, (1, 2, 6), (1, 2, 7), (0, 2, 19)), ep=4, sharding="zero1"),
    "unlike replicas": unlike(
        LLAMA_8B, replicas(4, 8, (0, 2, 32)), replicas(8, 8, (1, 2, 32)), sharding="zero1", recompute="full"
    ),
}

# What only Primus runs.
ZERO_BUBBLE: dict[str, PlanFile] = {
    "zb-h1": plan_file_of(LLAMA_8B, pp=4, dp_shard=2, schedule="zb-h1", **SPLIT),
    "zb-h1, uneven": plan_file_of(LLAMA_8B, pp=4, schedule="zb-h1", layers_per_chunk=(7, 9, 9, 7), **SPLIT),
    "zb-v": plan_file_of(LLAMA_8B, pp=4, vp=2, tp=2, sp=True, schedule="zb-v", **SPLIT),
    "zb-v, uneven": plan_file_of(
        LLAMA_8B, pp=4, vp=2, schedule="zb-v", layers_per_chunk=(3, 4, 4, 4, 4, 4, 5, 4), **SPLIT
    ),
    "zb-v, experts": plan_file_of(MIXTRAL, pp=2, vp=2, ep=8, dp_shard=8, schedule="zb-v", **SPLIT),
}

# One defect each, and whether the frameworks refuse it before they build the model; where they do not, what does.
DEFECTS: dict[str, tuple[PlanFile, bool]] = {
    "batch": (plan_file_of(LLAMA_8B, dp_shard=8, global_batch=63), True),
    "heads": (plan_file_of(LLAMA_8B, tp=3, sp=True, dp_shard=2, seq_len=4098), True),
    "kv heads": (
        plan_file_of(replace(LLAMA_8B, hidden_size=4608, num_heads=36, num_kv_heads=6), tp=4, sp=True, dp_shard=2),
        True,
    ),
    "sequence": (plan_file_of(LLAMA_8B, seq_len=4100, cp=4, dp_shard=2), True),
    "number of experts": (plan_file_of(MIXTRAL, ep=3, dp_shard=3, global_batch=240), True),
    "expert grid": (plan_file_of(MIXTRAL, ep=8, etp=2, dp_shard=8), True),
    "copies of experts": (plan_file_of(MIXTRAL, ep=8, dp_replicate=2, dp_shard=4), True),
    "order of experts": (plan_file_of(MIXTRAL, pp=2, ep=4, dp_shard=4, rank_order=RankOrder.PP_BEFORE_DP), True),
    "gather without reduce": (plan_file_of(LLAMA_8B, dp_shard=8, grad_reduce_overlap=False), True),
    "overlap without sp": (plan_file_of(LLAMA_8B, tp=4, dp_shard=2, tp_overlap=True), True),
    "expert overlap alone": (plan_file_of(MIXTRAL, dp_shard=8, ep_overlap=True), True),
    "expert overlap recomputed": (plan_file_of(MIXTRAL, ep=8, dp_shard=8, ep_overlap=True, recompute="full"), True),
    "expert overlap in stages": (plan_file_of(MIXTRAL, pp=2, ep=8, dp_shard=8, ep_overlap=True), True),
    "no such part": (
        plan_file_of(LLAMA_8B, dp_shard=8, recompute="selective", recompute_modules=("mla_up_proj",)),
        True,
    ),
    "expert bias": (plan_file_of(GPT_OSS, tp=2, sp=True, etp=2, ep=2, dp_shard=4), True),
    "graphs of recomputed layers": (
        plan_file_of(LLAMA_8B, dp_shard=8, cuda_graphs="layer", recompute="full"),
        True,
    ),
    # core/optimizer/__init__.py, when the optimizer is made
    "moments of whole copies": (
        plan_file_of(
            LLAMA_8B,
            dp_replicate=8,
            sharding="none",
            param_gather_overlap=False,
            main_weights="remainders",
            moment_dtype="bf16",
        ),
        False,
    ),
    # core/pipeline_parallel/schedules.py, when the first step runs
    "micro-batches of a group": (
        plan_file_of(LLAMA_8B, pp=4, vp=2, schedule="interleaved", dp_shard=2, global_batch=12),
        False,
    ),
    # core/transformer/moe/moe_layer.py, in the first forward pass
    "experts without sp": (plan_file_of(MIXTRAL, tp=2, ep=4, dp_shard=4), False),
    # Transformer Engine, in the first forward pass
    "ring with windows": (plan_file_of(GPT_OSS, cp=2, dp_shard=4), False),
    # core/distributed/fsdp, when the model is wrapped
    "zero3 in stages": (plan_file_of(LLAMA_8B, pp=2, dp_shard=4, sharding="zero3"), False),
    # core/fp8_utils.py, in the first product
    "fp8 tokens": (plan_file_of(LLAMA_8B, seq_len=4104, dp_shard=8, precision="fp8"), False),
}


# -- any plan ---------------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Models that pretrain_gpt.py can be told, in the one form in which they are read."""
    heads = draw(st.sampled_from([8, 12, 16]))
    latent = draw(st.booleans())
    bias = not latent and draw(st.booleans())
    num_layers = draw(st.integers(2, 13))
    dense = draw(st.integers(0, num_layers - 1))
    moe = draw(st.booleans())
    learned = draw(st.booleans())
    window = draw(st.sampled_from([None, None, 128]))
    head_dim = draw(st.sampled_from([None, 96]))
    mla = LatentAttention(
        kv_lora_rank=draw(st.sampled_from([256, 512])),
        q_lora_rank=draw(st.sampled_from([None, 768])),
        qk_nope_head_dim=draw(st.sampled_from([64, 128])),
        qk_rope_head_dim=32,
        v_head_dim=draw(st.sampled_from([64, 128])),
    )
    experts = Experts(
        num_experts=draw(st.sampled_from([4, 8, 64])),
        experts_per_token=draw(st.sampled_from([1, 2, 4])),
        expert_ffn_size=768,
        shared_expert_ffn_size=draw(st.sampled_from([0, 1536])),
        router_bias=bias,
        num_dense_layers=dense,
    )
    return ModelSpec(
        name="any",
        num_layers=num_layers,
        hidden_size=heads * 64,
        vocab_size=draw(st.integers(1000, 200000)),
        num_heads=heads,
        num_kv_heads=None if latent else draw(st.sampled_from([None, 4])),
        head_dim=None if latent else head_dim,
        ffn_size=0 if moe and not dense else draw(st.sampled_from([1024, 3072])),
        gated_mlp=draw(st.booleans()),
        mlp_bias=bias,
        attention_output_bias=bias,
        qkv_bias=bias or (not latent and draw(st.booleans())),
        attention_sinks=draw(st.booleans()),
        qk_norm="none" if latent else draw(st.sampled_from(["none", "head"])),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        position_embedding="learned" if learned else draw(st.sampled_from(["rope", "none"])),
        rope_base=10000.0 if learned else draw(st.sampled_from([10000.0, 500000.0])),
        max_positions=4096 if learned else 0,
        tied_embeddings=draw(st.booleans()),
        window=window,
        full_attention_interval=draw(st.sampled_from([0, 2])) if window else 0,
        num_mtp_layers=0 if learned else draw(st.sampled_from([0, 0, 1])),
        mla=mla if latent else None,
        moe=experts if moe else None,
    )


# Data types of gradients, main weights and moments, by whether there are 16-bit weights that lack remainders.
STATES: dict[bool, list[dict[str, Any]]] = {
    False: [
        {},
        {"grad_dtype": "bf16"},
        {"grad_dtype": "bf16_main", "moment_dtype": "bf16"},
        {"main_weights": "fp16", "moment_dtype": "fp8"},
    ],
    True: [
        {},
        {"grad_dtype": "bf16"},
        {"grad_dtype": "bf16_main", "main_weights": "remainders"},
        {"main_weights": "remainders", "moment_dtype": "bf16"},
        {"main_weights": "fp16", "moment_dtype": "fp8"},
    ],
}


@st.composite
def plan_files(draw: st.DrawFn, *, zero_bubble: bool = False) -> PlanFile:
    """Plan files whose plan Megatron-LM (or Primus) admits, in the one form in which plans are read."""
    model = draw(models())
    if model.position_embedding == "none":
        model = replace(model, rope_base=10000.0)
    schedules = ["1f1b", "interleaved"] + (["zb-h1", "zb-v"] if zero_bubble else [])
    pp = draw(st.sampled_from([1, 1, 2, 4]))
    schedule = draw(st.sampled_from(schedules)) if pp > 1 else "1f1b"
    vp = {"interleaved": 2, "zb-v": 2}.get(schedule, 1)
    tp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([1, 1, 2]))
    dp = draw(st.sampled_from([1, 2, 4, 8]))
    moe = model.moe is not None
    sharding = draw(st.sampled_from(["none", "zero1", "zero1", "zero2", "zero3"]))
    copies = dp if sharding == "none" else draw(st.sampled_from([count for count in (1, 2) if dp % count == 0]))
    overlaps = schedule in ("1f1b", "interleaved") and draw(st.booleans())
    layers: tuple[int, ...] | None = None
    if pp > 1 and draw(st.booleans()):
        chunks = pp * vp
        cuts = sorted(draw(st.lists(st.integers(0, model.num_layers), min_size=chunks - 1, max_size=chunks - 1)))
        layers = tuple(b - a for a, b in zip([0, *cuts], [*cuts, model.num_layers], strict=True))
        layers = None if layers == even_chunks(model.num_layers, chunks) else layers
    recompute: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"recompute": "full"},
                {"recompute": "full", "recompute_num_layers": 1},
                {"recompute": "selective"},
                {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")},
                {"recompute": "selective", "recompute_modules": RecomputeModule},
            ]
        )
    )
    precision = draw(st.sampled_from(["bf16", "fp16", "fp8"]))
    plan = ParallelPlan(
        **draw(st.sampled_from(STATES[precision == "bf16"])),
        narrow_params=precision == "fp8" and sharding != "none" and draw(st.booleans()),
        token_dropping=moe and draw(st.booleans()),
        router_fusion=moe and draw(st.booleans()),
        rope_fusion=model.mla is not None and draw(st.booleans()),
        cuda_graphs=draw(st.sampled_from(["none", "none", "layer", "full_iteration"])),
        global_batch=dp * draw(st.sampled_from([12, 24])) * 2,
        micro_batch=draw(st.sampled_from([1, 2])),
        tp=tp,
        sp=tp > 1 and draw(st.booleans()),
        cp=cp,
        cp_kind=draw(st.sampled_from(ContextParallelKind)) if cp > 1 else "ring",
        pp=pp,
        vp=vp,
        schedule=schedule,
        layers_per_chunk=layers,
        ep=draw(st.sampled_from([1, 2, 4])) if moe else 1,
        etp=draw(st.sampled_from([1, 2])) if moe else 1,
        dp_replicate=copies,
        dp_shard=dp // copies,
        sharding=sharding,
        precision=precision,
        offload=draw(st.sampled_from(["none", "none", "optimizer"])),
        tp_overlap=draw(st.booleans()),
        grad_reduce_overlap=overlaps,
        param_gather_overlap=overlaps and sharding != "none",
        ep_overlap=moe and draw(st.booleans()),
        rank_order=draw(st.sampled_from(RankOrder)) if pp > 1 else RankOrder.DP_BEFORE_PP,
        attention=draw(st.sampled_from(["flash", "flash2", "cudnn", "unfused"])),
        **recompute,
    )
    file = plan_file_of(model, cluster_of(-(-plan.num_devices // 8)), **_fields(plan))
    workload = Workload(model=model, training=file.training, num_devices=plan.num_devices)
    from hypothesis import assume

    assume(not broken(PRIMUS_RULES, workload, plan))
    return replace(file, framework=Framework(name="megatron-core"))


def _fields(plan: ParallelPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}
