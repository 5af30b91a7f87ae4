"""Option table of Megatron-Core: each row is written by the exporters and read by the readers of all that start it.

Keys are Megatron-LM's parsed arguments (d98e8a6, core 0.20), which Primus takes as they are; an option is its argument
behind two dashes.  `BRIDGE` is the notation of Megatron-Bridge (067f987), whose fields are `model.<argument>` unless a
row says otherwise.  What is not one field of a plan or a model is a `Special`, its pair of functions above its row.
"""

from __future__ import annotations

import re
from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import (
    Assumed,
    Constant,
    Fields,
    Option,
    Value,
    count,
    optional_count,
    switch,
)
from autoplan.frameworks.common.options import Options, show
from autoplan.frameworks.megatron_lm.model_options import ARCHITECTURE, DROPOUT
from autoplan.frameworks.megatron_lm.notation import (
    MOST_LAYERS,
    graph_scopes,
    graphs_of,
    layout_counts,
    pipeline_layout,
)
from autoplan.frameworks.megatron_lm.rules import is_precision_aware
from autoplan.frameworks.megatron_lm.table import (
    BRIDGE,
    Line,
    Reading,
    Special,
    flat,
    switches,
    valued,
)
from autoplan.spec.enums import (
    ContextParallelKind,
    CudaGraphs,
    Dispatcher,
    Fp8Scaling,
    GradType,
    MainWeights,
    MomentType,
    Offload,
    Precision,
    RankOrder,
    RecomputeModule,
    Sharding,
)
from autoplan.spec.plan import ParallelPlan, PlanBatch, chunk_layers, even_chunks
from autoplan.spec.plan_file import PlanFile

TRAIN, DDP, DIST, OPTIMIZER = ({BRIDGE: section} for section in ("train.", "ddp.", "dist.", "optimizer."))
STRATEGIES = {
    "no_shard": Sharding.NONE,
    "optim": Sharding.ZERO1,
    "optim_grads": Sharding.ZERO2,
    "optim_grads_params": Sharding.ZERO3,
}


def uses_megatron_fsdp(plan: ParallelPlan) -> bool:
    """Return whether Megatron-FSDP shards more than the optimizer's states."""
    return plan.sharding in (Sharding.ZERO2, Sharding.ZERO3)


# -- the plan ---------------------------------------------------------------------------------------------------------


def _has_experts(file: PlanFile) -> bool:
    return file.model.moe is not None


TP = count("tensor_model_parallel_size", "tp", 1)
CP = count("context_parallel_size", "cp", 1, when=lambda file: file.best.plan.cp > 1)
PP = count("pipeline_model_parallel_size", "pp", 1)

_CP_KINDS = {ContextParallelKind.RING: "p2p", ContextParallelKind.ALL_TO_ALL: "a2a"}


def _write_cp_kind(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    return {"cp_comm_type": _CP_KINDS[plan.cp_kind]} if plan.cp > 1 else {}


def _read_cp_kind(reading: Reading) -> Fields:
    kinds, cp = set(reading.arguments.words("cp_comm_type", ("p2p",))), reading.fields["cp"]
    if kinds == {"a2a"} and cp > 1:
        return {"cp_kind": ContextParallelKind.ALL_TO_ALL}
    if cp > 1 and kinds - {"p2p"}:
        reading.arguments.remark("cp_comm_type", "priced as ring attention")
    return {}


def _write_stages(file: PlanFile) -> dict[str, Value]:
    plan, model = file.best.plan, file.model
    counts = chunk_layers(plan, model.num_layers)
    if len(set(counts)) > 1:
        return {"pipeline_model_parallel_layout": pipeline_layout(counts, model.num_mtp_layers)}
    return {"num_virtual_stages_per_pipeline_rank": plan.vp} if plan.vp > 1 else {}


def _read_stages(reading: Reading) -> Fields:
    """Read the chunks of a rank, and the layers of every chunk where they are not spread evenly."""
    arguments, pp = reading.arguments, reading.fields["pp"]
    assert reading.model is not None
    num_layers = reading.model.num_layers
    layout = arguments.value("pipeline_model_parallel_layout")
    per_chunk = arguments.optional_count("num_layers_per_virtual_pipeline_stage")
    chunks = arguments.optional_count("num_virtual_stages_per_pipeline_rank") or arguments.optional_count(
        "virtual_pipeline_model_parallel_size"
    )
    first, last = (arguments.optional_count(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    embeds = arguments.flag("account_for_embedding_in_pipeline_split")
    loses = arguments.flag("account_for_loss_in_pipeline_split")
    if layout is not None:
        counts, option = layout_counts(layout), arguments.name("pipeline_model_parallel_layout")
        if len(counts) % pp:
            raise InputError(f"{option} has {len(counts)} stages, pp is {pp}")
        if sum(counts) != num_layers:
            raise InputError(f"{option} has {sum(counts)} layers, the model {num_layers}")
        return _stages(len(counts) // pp, counts)
    if pp == 1:
        return {}
    if per_chunk:
        chunks = max(num_layers // pp // per_chunk, 1)
    vp = chunks or 1
    if not 1 <= vp * pp <= 10 * MOST_LAYERS:
        raise InputError(f"pp {pp} x {vp} chunks are more than {10 * MOST_LAYERS:,}")
    if first is None and last is None and arguments.is_partial and (num_layers + embeds + loses) % (pp * vp):
        arguments.remark(
            "pipeline_model_parallel_size", f"{num_layers} layers are spread as evenly as {pp * vp} chunks go"
        )
        return _stages(vp, list(even_chunks(num_layers, pp * vp)))
    if first is None and last is None:
        return _stages(vp, _even_counts(num_layers, pp * vp, embeds=embeds, loses=loses))
    ends = (first or 0) + (last or 0)
    middle = pp - (first is not None) - (last is not None)
    layers_per_stage = (num_layers - ends) // middle if middle > 0 else 0
    stages = [
        *([first] if first is not None else []),
        *[layers_per_stage] * middle,
        *([last] if last is not None else []),
    ]
    if sum(stages) != num_layers or len(stages) != pp or any(count % vp for count in stages):
        raise InputError(
            f"{num_layers} layers do not spread over {pp} stages of {vp} chunks with {first} and {last} at the ends"
        )
    return _stages(vp, [count // vp for _ in range(vp) for count in stages])


def _even_counts(num_layers: int, num_chunks: int, *, embeds: bool, loses: bool) -> list[int]:
    """Return the layers of every chunk where embedding and loss may count as a layer each."""
    num_counted = num_layers + embeds + loses
    if num_counted % num_chunks:
        counted = ", embedding or loss counted," if embeds or loses else ""
        raise InputError(
            f"{num_counted} layers{counted} do not spread evenly over {num_chunks} chunks, which Megatron refuses"
        )
    counts = [num_counted // num_chunks] * num_chunks
    counts[0] -= embeds
    counts[-1] -= loses
    return counts


def _stages(vp: int, counts: list[int]) -> Fields:
    """Return chunks of a rank and layers of every chunk as a plan holds them: none where they are spread evenly."""
    is_even = tuple(counts) == even_chunks(sum(counts), len(counts))
    return {"vp": vp, "layers_per_chunk": None if is_even else tuple(counts)}


def _write_sharding(file: PlanFile) -> dict[str, Value]:
    sharding = file.best.plan.sharding
    if sharding == "none":
        return {}
    words: dict[str, Value] = {"use_distributed_optimizer": True}
    if uses_megatron_fsdp(file.best.plan):
        strategy = next(word for word, kind in STRATEGIES.items() if kind == sharding)
        words |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    return words


def _read_sharding(reading: Reading) -> Fields:
    arguments = reading.arguments
    distributed = arguments.flag("use_distributed_optimizer")
    fsdp, torch_fsdp = arguments.flag("use_megatron_fsdp"), arguments.flag("use_torch_fsdp2")
    strategy = arguments.text("data_parallel_sharding_strategy", "no_shard") or ""
    if torch_fsdp:
        arguments.remark("use_torch_fsdp2", "priced as Megatron-FSDP")
        return {"sharding": Sharding.ZERO3}
    if not fsdp:
        return {"sharding": Sharding.ZERO1 if distributed else Sharding.NONE}
    if strategy not in STRATEGIES:
        option = arguments.name("data_parallel_sharding_strategy")
        raise InputError(f"{option} {strategy[:30]!r} is not one of {', '.join(STRATEGIES)}")
    return {"sharding": STRATEGIES[strategy]}


def _write_copies(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    is_split = plan.sharding != "none" and plan.dp_replicate > 1
    return {"num_distributed_optimizer_instances": plan.dp_replicate} if is_split else {}


def _read_copies(reading: Reading) -> Fields:
    """Read how many copies of the sharded states there are among the replicas of the model."""
    arguments, key = reading.arguments, "num_distributed_optimizer_instances"
    dp = reading.fields.pop("dp")
    copies = dp if reading.fields["sharding"] == Sharding.NONE else arguments.count(key, 1)
    if copies < 1 or dp % copies:
        raise InputError(f"{arguments.name(key)} {copies} does not divide dp {dp}")
    return {"dp_replicate": copies, "dp_shard": dp // copies}


def _write_recompute(file: PlanFile) -> dict[str, Value]:
    """Write the parts of a layer; or uniform units of one layer; or the first layers of every chunk."""
    plan = file.best.plan
    if plan.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(map(str, plan.recompute_modules))}
    if plan.recompute == "none":
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform" if plan.recompute_num_layers is None else "block",
        "recompute_num_layers": plan.recompute_num_layers or 1,
    }


def _read_recompute(reading: Reading) -> Fields:
    arguments = reading.arguments
    kind, method = arguments.text("recompute_granularity"), arguments.text("recompute_method")
    count = arguments.optional_count("recompute_num_layers")
    modules = arguments.words("recompute_modules", ("core_attn",))
    if arguments.flag("recompute_activations"):
        kind = "selective"
    if kind == "full":
        if method == "block" and count is not None:  # the first layers of every chunk: of 0, none
            return {"recompute": "full", "recompute_num_layers": count} if count else {}
        if (count or 1) > 1:
            arguments.remark("recompute_num_layers", "units of several layers keep less than is priced")
        return {"recompute": "full"}
    if kind == "selective":
        priced = tuple(module for module in RecomputeModule if module in modules)
        if set(modules) - set(priced):
            arguments.remark("recompute_modules", f"without {', '.join(sorted(set(modules) - set(priced)))[:60]}")
        if priced:
            return {"recompute": "selective", "recompute_modules": priced}
    elif kind not in (None, "None", "none"):
        raise InputError(f"{arguments.name('recompute_granularity')} {kind[:30]!r} is neither full nor selective")
    return {}


def _write_offload(file: PlanFile) -> dict[str, Value]:
    keys = ("optimizer_cpu_offload", "use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d")
    return dict.fromkeys(keys, True) if file.best.plan.offload == "optimizer" else {}


# Buffers of experts are sized before their tokens are known, by the factors of NVIDIA's recipes (Megatron-Bridge
# 067f987, perf_recipes/deepseek/common.py).
STATIC_EXPERTS: dict[str, Value] = {
    "use_transformer_engine_op_fuser": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash": True,
    "moe_paged_stash_buffer_size_factor_cuda": 1.2,
}


def _write_graphs(file: PlanFile) -> dict[str, Value]:
    graphs = file.best.plan.cuda_graphs
    if graphs == CudaGraphs.NONE:
        return {}
    if graphs == CudaGraphs.FULL_ITERATION:  # what looks for NaN waits for the device
        arguments = {"cuda_graph_impl": "full_iteration", "no_check_for_nan_in_loss_and_grad": True}
        return {**arguments, "te_rng_tracker": True, **(STATIC_EXPERTS if file.model.moe else {})}
    scopes = graph_scopes(graphs, file.model)
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scopes, "te_rng_tracker": True}


def _read_graphs(reading: Reading) -> Fields:
    """Read what is launched as CUDA graphs, by the names of today and those of before core 0.15."""
    arguments, model = reading.arguments, reading.model
    assert model is not None
    kind = str(arguments.text("cuda_graph_impl", "none"))
    if arguments.flag("enable_cuda_graph"):
        kind = "local"
    if arguments.flag("external_cuda_graph"):
        kind = "transformer_engine"
    names = [*arguments.words("cuda_graph_scope"), *arguments.words("cuda_graph_modules")]
    scopes = {name.rpartition(".")[2] for word in names for name in word.split(",")} - {"", "None"}
    if kind == "full_iteration" or (kind != "none" and "full_iteration" in scopes):
        arguments.pass_over(*STATIC_EXPERTS, "moe_paged_stash_buffer_size_factor_cpu")
        return {"cuda_graphs": CudaGraphs.FULL_ITERATION}
    if kind in ("none", "None"):
        return {}
    graphs = CudaGraphs.LAYER if scopes <= {"full"} else graphs_of(scopes, model)
    if scopes - set(graph_scopes(graphs, model)) - {"full"}:
        arguments.remark(
            "cuda_graph_scope", f"priced as graphs of {' and '.join(graph_scopes(graphs, model)) or 'none'}"
        )
    return {"cuda_graphs": graphs}


def _write_narrow_params(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    if not plan.narrow_params:
        return {}
    if plan.precision == Precision.NVFP4:
        return {"fp4_param_gather": True}
    # Scales of blocks are made of what was gathered, in the buffer of the gradients.
    reuse = {"reuse_grad_buf_for_mxfp8_param_ag": True} if plan.precision == Precision.MXFP8 else {}
    return {"fp8_param_gather": True, **reuse}


def _read_narrow_params(reading: Reading) -> Fields:
    arguments = reading.arguments
    is_fp4 = reading.fields["precision"] == Precision.NVFP4
    gathers = [arguments.flag("fp8_param_gather"), arguments.flag("fp4_param_gather")]
    arguments.flag("reuse_grad_buf_for_mxfp8_param_ag")
    return {"narrow_params": gathers[is_fp4]}


def _write_states(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    types: dict[str, Value] = {}
    if plan.grad_dtype == GradType.FP32 and plan.precision == Precision.FP16:
        types["accumulate_allreduce_grads_in_fp32"] = True
    if plan.grad_dtype != GradType.FP32 and plan.precision != Precision.FP16:
        types["grad_reduce_in_bf16"] = True
    if plan.grad_dtype == GradType.BF16_MAIN:
        types["main_grads_dtype"] = "bf16"
    if plan.main_weights == MainWeights.FP16:
        types["main_params_dtype"] = "fp16"
    if plan.moment_dtype != MomentType.FP32:
        types |= dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), str(plan.moment_dtype))
    is_aware = is_precision_aware(PlanBatch.of([plan], file.model.num_layers))[0]
    return ({"use_precision_aware_optimizer": True} if is_aware else {}) | types


_MOMENTS: dict[str, MomentType] = {"fp32": MomentType.FP32, "bf16": MomentType.BF16, "fp8": MomentType.FP8}
_MOMENTS["fp16"] = MomentType.BF16  # as many bytes
_TORCH_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


def _dtype(arguments: Options, key: str, *allowed: str) -> str:
    """Return the data type that an option names, as Megatron-LM or torch calls it; fp32 where the file is silent."""
    name = str(arguments.text(key) or "fp32").removeprefix("torch.")
    name = _TORCH_TYPES.get(name, name)
    if name not in allowed:
        raise InputError(f"{arguments.name(key)} {name[:30]!r} is not one of {', '.join(allowed)}")
    return name


def _read_states(reading: Reading) -> Fields:
    """Read the types of gradients, main weights and moments, which only the precision-aware optimizer takes."""
    arguments, fields = reading.arguments, reading.fields
    is_half = fields["precision"] == Precision.FP16
    accumulates = arguments.flag("accumulate_allreduce_grads_in_fp32", not is_half)
    halves = arguments.flag("grad_reduce_in_bf16", is_half and not accumulates)
    grads = _dtype(arguments, "main_grads_dtype", "fp32", "bf16")
    weights = _dtype(arguments, "main_params_dtype", "fp32", "fp16")
    moments = [_dtype(arguments, key, *_MOMENTS) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    is_aware = arguments.flag("use_precision_aware_optimizer") and fields.get("offload") != Offload.OPTIMIZER
    keeps_remainders = arguments.flag("store_param_remainders", True)
    states: Fields = {"grad_dtype": GradType.BF16 if halves else GradType.FP32}
    if not is_aware:
        return states
    if grads == "bf16":
        states["grad_dtype"] = GradType.BF16_MAIN
    if weights == "fp16":
        states["main_weights"] = MainWeights.FP16
    elif fields["precision"] == Precision.BF16:
        states["main_weights"] = MainWeights.REMAINDERS
        if not keeps_remainders:
            arguments.remark("store_param_remainders", "main weights are priced as remainders")
    if moments[0] != moments[1]:
        arguments.remark("exp_avg_sq_dtype", f"both moments are priced as {moments[0]}", default="fp32")
    return states | {"moment_dtype": _MOMENTS[moments[0]]}


def _read_offload(reading: Reading) -> Fields:
    arguments = reading.arguments
    if not arguments.flag("optimizer_cpu_offload"):
        return {}
    if arguments.number("optimizer_offload_fraction", 1.0) != 1.0:
        arguments.remark("optimizer_offload_fraction", "priced as the whole optimizer on the host")
    if not arguments.flag("overlap_cpu_optimizer_d2h_h2d"):
        arguments.remark("overlap_cpu_optimizer_d2h_h2d", "copies to the host are priced as overlapped", default="off")
    return {"offload": Offload.OPTIMIZER}


_BACKENDS = {"deepep": Dispatcher.DEEPEP, "hybridep": Dispatcher.HYBRIDEP}


def _write_dispatcher(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    if file.model.moe is None:
        return {}
    if plan.ep == 1 or plan.dispatcher == Dispatcher.ALL_TO_ALL:
        return {"moe_token_dispatcher_type": "alltoall"}
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": str(plan.dispatcher)}


def _read_dispatcher(reading: Reading) -> Fields:
    """Read the dispatcher; the flexible one takes DeepEP unless it is told otherwise (transformer_config.py)."""
    arguments = reading.arguments
    kind = arguments.text("moe_token_dispatcher_type", "allgather")
    backend = arguments.text("moe_flex_dispatcher_backend", "deepep") or "deepep"
    arguments.flag("moe_enable_deepep")  # that of before core 0.15, which the flexible dispatcher asked for
    if reading.model is None or reading.model.moe is None or reading.fields.get("ep", 1) == 1:
        return {}
    if kind == "flex":
        if backend not in _BACKENDS:
            option = arguments.name("moe_flex_dispatcher_backend")
            raise InputError(f"{option} {backend[:30]!r} is not one of {', '.join(_BACKENDS)}")
        return {"dispatcher": _BACKENDS[backend]}
    if kind != "alltoall":
        arguments.remark("moe_token_dispatcher_type", "priced as all-to-all")
    return {}


def _write_dropping(file: PlanFile) -> dict[str, Value]:
    if not file.best.plan.token_dropping:
        return {}
    return {"moe_expert_capacity_factor": "1.0", "moe_pad_expert_input_to_capacity": True}


def _read_dropping(reading: Reading) -> Fields:
    """Read whether experts take a fixed number of tokens; a capacity below 0 is none (transformer_config.py)."""
    arguments, key = reading.arguments, "moe_expert_capacity_factor"
    capacity, pads = arguments.value(key), arguments.flag("moe_pad_expert_input_to_capacity")
    if capacity is None or reading.model is None or reading.model.moe is None:
        return {}
    if isinstance(capacity, bool) or not isinstance(capacity, int | float):
        raise InputError(f"{arguments.name(key)} must be a number, got {show(capacity)}")
    if capacity < 0:
        return {}
    if not pads:
        arguments.remark(key, "priced without a capacity: experts are not padded to it, and shapes still change")
        return {}
    if capacity != 1.0:
        arguments.remark(key, "priced with a capacity factor of 1")
    return {"token_dropping": True}


def _read_attention_type(reading: Reading) -> Fields:
    return {"fp8_attention": reading.arguments.flag("fp8_dot_product_attention")}


def _write_rope(file: PlanFile) -> dict[str, Value]:
    return {} if file.model.mla is None or file.best.plan.rope_fusion else {"no_rope_fusion": True}


def _read_rope(reading: Reading) -> Fields:
    """Read whether rotations are fused, which is priced of latent attention alone."""
    arguments, model, key = reading.arguments, reading.model, "apply_rope_fusion"
    is_fused = arguments.flag(key, True)
    is_priced_fused = model is not None and model.mla is None and model.position_embedding == "rope"
    if not is_fused and arguments.has(key) and is_priced_fused:
        arguments.remark(key, "priced with a fused RoPE")
    return {"rope_fusion": is_fused}


def _read_batch(reading: Reading) -> Fields:
    arguments = reading.arguments
    for key in ("rampup_batch_size", "step_batch_size_schedule"):
        if arguments.arguments.get(key) and arguments.value(key):
            arguments.remark(key, "the plan is that of the full batch", matters=False)
    micro_batch, dp = reading.fields["micro_batch"], reading.fields["dp"]
    return {"global_batch": arguments.optional_count("global_batch_size") or micro_batch * dp}


_STAGES = (
    Option("num_virtual_stages_per_pipeline_rank", names={BRIDGE: "model.virtual_pipeline_model_parallel_size"}),
    Option("decoder_first_pipeline_num_layers", names={BRIDGE: "model.num_layers_in_first_pipeline_stage"}),
    Option("decoder_last_pipeline_num_layers", names={BRIDGE: "model.num_layers_in_last_pipeline_stage"}),
    *valued("num_layers_per_virtual_pipeline_stage"),
    *switches("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)

# fmt: off
PLAN: tuple[Line, ...] = (
    (
        count("micro_batch_size", "micro_batch", 1, names=TRAIN),
        Special("global_batch_size", lambda file: {"global_batch_size": file.best.plan.global_batch}, _read_batch,
                names=TRAIN, beside=valued("rampup_batch_size", "step_batch_size_schedule")),
    ),
    (TP, switch("sequence_parallel", "sp")),
    (CP, Special("cp_comm_type", _write_cp_kind, _read_cp_kind)),
    (
        PP,
        switch("use_tp_pp_dp_mapping", "rank_order", RankOrder.DP_BEFORE_PP, on=RankOrder.PP_BEFORE_DP,
               off=RankOrder.DP_BEFORE_PP, when=lambda file: file.best.plan.pp > 1, names=DIST),
    ),
    (Special("pipeline_model_parallel_layout", _write_stages, _read_stages, beside=_STAGES),),
    (
        count("expert_model_parallel_size", "ep", 1, when=_has_experts),
        optional_count("expert_tensor_parallel_size", "etp", when=_has_experts),
    ),
    (
        Special("moe_token_dispatcher_type", _write_dispatcher, _read_dispatcher,
                beside=(*valued("moe_flex_dispatcher_backend"), *switches("moe_enable_deepep"))),
    ),
    (
        Special("moe_expert_capacity_factor", _write_dropping, _read_dropping,
                beside=switches("moe_pad_expert_input_to_capacity")),
        switch("moe_router_fusion", "router_fusion", when=_has_experts),
    ),
    (Special("apply_rope_fusion", _write_rope, _read_rope, is_switch=True),),
    (
        Special("use_distributed_optimizer", _write_sharding, _read_sharding, names=DDP, is_switch=True,
                beside=(Option("use_megatron_fsdp", names=DDP, is_switch=True),
                        Option("use_torch_fsdp2", names=DIST, is_switch=True),
                        Option("data_parallel_sharding_strategy", names=DDP))),
    ),
    (
        Constant("ckpt_format", lambda file: "fsdp_dtensor" if uses_megatron_fsdp(file.best.plan) else None,
                 names={BRIDGE: "checkpoint."}),
        Assumed("no_gradient_accumulation_fusion", write=lambda file: uses_megatron_fsdp(file.best.plan)),
    ),
    # The model need not fit on one device.
    (Assumed("init_model_with_meta_device", write=lambda file: file.best.plan.sharding == "zero3", is_switch=True),),
    (Special("num_distributed_optimizer_instances", _write_copies, _read_copies, names=DDP),),
    (
        switch("overlap_grad_reduce", "grad_reduce_overlap", names=DDP),
        switch("overlap_param_gather", "param_gather_overlap", names=DDP,
               when=lambda file: file.best.plan.sharding != "none"),
        switch("tp_comm_overlap", "tp_overlap", names={BRIDGE: "comm_overlap."}),
        switch("overlap_moe_expert_parallel_comm", "ep_overlap"),
    ),
    (
        Special("cuda_graph_impl", _write_graphs, _read_graphs,
                beside=(*valued("cuda_graph_scope", "cuda_graph_modules", "moe_expert_rank_capacity_factor",
                                "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu"),
                        *switches("enable_cuda_graph", "external_cuda_graph", "use_transformer_engine_op_fuser",
                                  "moe_paged_stash"),
                        Option("te_rng_tracker", names={BRIDGE: "rng."}, is_switch=True),
                        Option("check_for_nan_in_loss_and_grad", names={BRIDGE: "ddp.check_for_nan_in_grad"},
                               is_switch=True))),
    ),
    (
        Special("fp8_param_gather", _write_narrow_params, _read_narrow_params, is_switch=True,
                names={BRIDGE: "mixed_precision."},
                beside=(Option("fp4_param_gather", names={BRIDGE: "mixed_precision."}, is_switch=True),
                        Option("reuse_grad_buf_for_mxfp8_param_ag", names={BRIDGE: "mixed_precision."},
                               is_switch=True))),
    ),
    # Without an option in the command line: Megatron-Bridge writes it among its precisions.
    (
        Special("fp8_dot_product_attention", lambda file: {}, _read_attention_type, is_switch=True,
                names={BRIDGE: "mixed_precision."}),
    ),
    (
        Special("recompute_granularity", _write_recompute, _read_recompute,
                beside=(*valued("recompute_method", "recompute_num_layers", "recompute_modules"),
                        *switches("recompute_activations"))),
    ),
    (
        Special("optimizer_cpu_offload", _write_offload, _read_offload, names=OPTIMIZER, is_switch=True,
                beside=(Option("overlap_cpu_optimizer_d2h_h2d", names=OPTIMIZER, is_switch=True),
                        Option("optimizer_offload_fraction", names=OPTIMIZER))),
    ),
    (
        Special("use_precision_aware_optimizer", _write_states, _read_states, names=OPTIMIZER, is_switch=True,
                beside=(*(Option(key, names=OPTIMIZER) for key in (
                            "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
                        )),
                        Option("store_param_remainders", names=OPTIMIZER, is_switch=True),
                        *switches("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"))),
    ),
)
# fmt: on

# -- training ---------------------------------------------------------------------------------------------------------

_PRECISIONS: dict[Precision, dict[str, Value]] = {
    Precision.FP16: {"fp16": True},
    Precision.BF16: {"bf16": True},
    Precision.FP8: {"bf16": True, "fp8_format": "hybrid"},
    Precision.MXFP8: {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    Precision.NVFP4: {"bf16": True, "fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}


def _write_precision(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    scales = {"fp8_recipe": str(plan.fp8_scaling)} if plan.precision == Precision.FP8 else {}
    return _PRECISIONS[plan.precision] | scales


def read_scaling(arguments: Options) -> Fp8Scaling:
    """Return what the matrices of 8-bit products have a scale for."""
    is_delayed = arguments.text("fp8_recipe", "delayed") == "delayed"
    return Fp8Scaling.DELAYED if is_delayed else Fp8Scaling.TENSORWISE


def read_precision(arguments: Options) -> Precision:
    """Return the format of the matrix products."""
    bf16, fp16 = arguments.flag("bf16"), arguments.flag("fp16")
    fp8, fp4 = arguments.text("fp8"), arguments.text("fp4")
    recipe = arguments.text("fp8_recipe", "delayed")
    arguments.understood.add("fp4_recipe")
    if fp4 and fp4 != "None":
        return Precision.NVFP4
    if fp8 and fp8 != "None":
        if recipe == "mxfp8":
            return Precision.MXFP8
        if recipe not in ("tensorwise", "delayed"):
            arguments.remark("fp8_recipe", "priced with one scale a tensor")
        return Precision.FP8
    if not bf16 and not fp16:
        raise InputError("neither bf16 nor fp16 is on: training in 32 bits is not priced")
    return Precision.FP16 if fp16 else Precision.BF16


def _write_attention_backend(file: PlanFile) -> dict[str, Value]:
    return {"attention_backend": "unfused"} if file.training.attention == "unfused" else {}


def read_attention(arguments: Options) -> Any:
    """Return the kernel of attention, by its name among those of a training."""
    backend = str(arguments.text("attention_backend", "auto")).rpartition(".")[2]
    takes_flash, layers = arguments.flag("use_flash_attn"), arguments.text("transformer_impl")
    # Attention of Megatron-Core itself is not fused (core/models/gpt/gpt_layer_specs.py, get_gpt_layer_local_spec).
    is_local = layers == "local" and backend == "auto" and not takes_flash
    return "unfused" if backend in ("unfused", "local") or is_local else "flash"


# fmt: off
PRECISION: tuple[Line, ...] = (
    (Special("bf16", _write_precision, is_switch=True,
             beside=(*switches("fp16"), *valued("fp8", "fp8_recipe", "fp4", "fp4_recipe"))),),
    (Special("attention_backend", _write_attention_backend, beside=switches("use_flash_attn")),),
)
# fmt: on

# fmt: off
TRAINING: tuple[Line, ...] = (
    (
        Constant("lr", "3e-4"), Constant("min_lr", "3e-5"), Constant("lr_decay_style", "cosine"),
        Constant("clip_grad", "1.0"),
    ),
    (
        Constant("optimizer", lambda file: file.training.optimizer, names=OPTIMIZER),
        Constant("adam_beta1", "0.9"), Constant("adam_beta2", "0.95"),
    ),
    (Constant("weight_decay", "0.1"), Constant("init_method_std", "0.02")),
    (Constant("eval_iters", "0"), Constant("log_interval", "1"), Constant("log_throughput", True, is_switch=True)),
)
DATA: tuple[Line, ...] = (
    (Constant("mock_data", True, is_switch=True),),
    (Constant("tokenizer_type", "NullTokenizer"),),
)
# fmt: on

FUSED_LOSS_BYTES = 4.0  # of a logit: a loss that works in place keeps less

# -- options that are not written -------------------------------------------------------------------------------------

# fmt: off
UNWRITTEN: Line = (
    Assumed("moe_shared_expert_overlap", (False,), "the overlap of shared experts is not priced"),
    Assumed("outer_dp_sharding_strategy", ("no_shard",), "priced without sharding over the outer replicas", names=DDP),
    Assumed("align_param_gather", names=DDP),
    Assumed("overlap_p2p_comm", (True,), "priced with messages that overlap"),
    Assumed("cross_entropy_loss_fusion", (False,), "priced as the framework's usual loss"),
    Assumed("bias_swiglu_fusion", (True,), "priced with a fused activation"),
    Assumed("empty_unused_memory_level", (0,), "giving cached memory back is not priced"),
    Assumed("nccl_ub", (False,), "registered communication buffers are not priced", names=DDP),
    Assumed("fine_grained_activation_offloading", (False,), "activations on the host are not priced"),
    Assumed("cpu_offloading_num_layers", (0,), "activations on the host are not priced"),
    Assumed("delay_wgrad_compute", (False,), "the delay of weight gradients is not priced"),
    Constant("train_iters", names=TRAIN),
    Constant("norm_epsilon", names={BRIDGE: "model.layernorm_epsilon"}),
    Constant("use_mcore_models", is_switch=True),
    *(Assumed(key) for key in (  # whose effect is small, or priced
        "moe_use_legacy_grouped_gemm", "gradient_accumulation_fusion", "cross_entropy_fusion_impl",
        "masked_softmax_fusion", "bias_gelu_fusion", "bias_dropout_fusion", "calculate_per_token_loss",
        "apply_layernorm_1p", "tp_comm_overlap_cfg", "cuda_graph_warmup_steps",
        "openai_gelu",
    )),
)
# fmt: on

# Options that change neither the time of a step nor its memory, or little that is a person's own to choose.
HARMLESS = re.compile(
    r"(min_|decoupled_|decoupled_min_|head_)?lr(_|$)|adam_|sgd_|weight_decay|start_weight|end_weight|clip_grad|override_opt|use_checkpoint"
    r"|save|load|no_save|no_load|ckpt|dist_ckpt|auto_detect_ckpt|async_save|use_persistent_ckpt|finetune|pretrained"
    r"|exit_on_missing|log_|logging|tensorboard|wandb|mlflow|one_logger|enable_one_logger|timing_log|seed$|data_|mock_data"
    r"|train_(iters|samples|data)|valid_data|test_data|per_split|num_dataset|dataloader|num_workers|split$|mmap_bin|eod_mask"
    r"|reset_(position|attention)|create_attention_mask|tokenizer|vocab_file|merge_file|tiktoken|trust_remote"
    r"|init_method|perform_initialization|eval_|exit_|distributed_(timeout|backend)|loss_scale|initial_loss|min_loss|hysteresis"
    r"|rerun|error_injection|check_for|norm_epsilon|layernorm_epsilon|use_mcore_models|deprecated_use_mcore|transformer_impl"
    r"|manual_gc|profile|use_pytorch_profiler|rotary_(percent|interleaved|scaling)|rope_type|rope_scaling|mscale|use_rope|yarn"
    r"|moe_(aux_loss|z_loss|router_(load|score|topk_scaling|dtype|num_groups|group_topk|pre_|enable|bias|force))"
    r"|moe_per_layer|mtp_loss|attention_softmax_in|enable_experimental|accumulate_allreduce|add_position_embedding|add_class"
    r"|fp8_(amax|margin|interval)|te_rng|use_te_rng|glu_linear|enable_gpt_oss"
    r"|auto_continue|skip_train|comment|no_persist|stderr_sink|disable_(tensorboard|wandb|mlflow|last_saving)|debug|env_vars|dump"
)

# -- all of them ------------------------------------------------------------------------------------------------------

OPTIONS: tuple[Option, ...] = tuple(
    flat(option for line in (*ARCHITECTURE, DROPOUT, *PLAN, *PRECISION, *TRAINING, *DATA, UNWRITTEN) for option in line)
)
# Options that describe the model, and those that take no value.
MODEL_KEYS = frozenset(
    option.key for line in ARCHITECTURE for option in flat(line) if not isinstance(option, Assumed | Constant)
)
SWITCHES = frozenset(option.key for option in OPTIONS if option.is_switch)
BRIDGE_FIELDS = {option.key: option.name(BRIDGE) for option in OPTIONS if BRIDGE in option.names}
