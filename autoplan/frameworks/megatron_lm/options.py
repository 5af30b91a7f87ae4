"""Option table of Megatron-Core, whose rows all its exporters and readers share.

Keys are Megatron-LM's parsed arguments (d98e8a6, core 0.20), which Primus uses unchanged; an option is its argument
after two dashes.  `BRIDGE` is the notation of Megatron-Bridge (067f987), whose fields are `model.<argument>` unless a
row says otherwise.  Anything else than one field of a plan or model is a `Special`, with its two functions above it.
"""

from __future__ import annotations

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
from autoplan.frameworks.common.options import show
from autoplan.frameworks.megatron_lm.context_options import CONTEXT
from autoplan.frameworks.megatron_lm.model_options import ARCHITECTURE, DROPOUT
from autoplan.frameworks.megatron_lm.notation import graph_scopes, graphs_of
from autoplan.frameworks.megatron_lm.stage_options import LAYOUT
from autoplan.frameworks.megatron_lm.state_options import NARROW_PARAMS, OFFLOAD, SHARDING, STATES
from autoplan.frameworks.megatron_lm.table import (
    BRIDGE,
    DDP,
    DIST,
    TRAIN,
    Line,
    Reading,
    Special,
    flat,
    switches,
    valued,
)
from autoplan.frameworks.megatron_lm.training_options import DATA, PRECISION, TRAINING
from autoplan.spec.enums import (
    CrossEntropyFusion,
    CudaGraphs,
    Dispatcher,
    OffloadLayers,
    OffloadModules,
    RankOrder,
    RecomputeModule,
)
from autoplan.spec.plan_file import PlanFile

# -- the plan ---------------------------------------------------------------------------------------------------------


def _has_experts(file: PlanFile) -> bool:
    return file.model.moe is not None


TP = count("tensor_model_parallel_size", "tp", 1)
PP = count("pipeline_model_parallel_size", "pp", 1)


def _write_recompute(file: PlanFile) -> dict[str, Value]:
    """Write recomputation by parts of a layer, as uniform units of one layer, or as the first layers of every chunk."""
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
        if method == "block" and count is not None:  # the first layers of every chunk; 0 means none
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


def _write_offload_modules(file: PlanFile) -> dict[str, Value]:
    parts = [*filter(None, file.best.plan.offload_modules.split("+"))]
    is_on = file.best.plan.offload_modules != OffloadModules.NONE
    return {"fine_grained_activation_offloading": True, "offload_modules": parts} if is_on else {}


def _read_offload_modules(reading: Reading) -> Fields:
    arguments = reading.arguments
    is_on = arguments.flag("fine_grained_activation_offloading")
    named = frozenset(arguments.words("offload_modules"))
    if not is_on:
        return {}
    # As many of the parts as are priced.
    priced = max((word for word in OffloadModules if word.parts <= named), key=lambda word: len(word.parts))
    if named - priced.parts:
        arguments.remark("offload_modules", f"priced without {', '.join(sorted(named - priced.parts))[:60]}")
    return {"offload_modules": priced}


def _write_offload_layers(file: PlanFile) -> dict[str, Value]:
    share = file.best.plan.offload_layers.share
    return {"cpu_offloading_num_layers": round(share * file.model.num_layers)} if share else {}


def _read_offload_layers(reading: Reading) -> Fields:
    """Read the number of layers; Megatron-Bridge has a switch besides it, which Megatron-LM derives."""
    arguments, model, key = reading.arguments, reading.model, "cpu_offloading_num_layers"
    number, is_on = arguments.count(key, 0, least=0), arguments.flag("cpu_offloading", True)
    if arguments.flag("cpu_offloading_weights"):
        arguments.remark("cpu_offloading_weights", "weights are priced on the device")
    if not (number and is_on and arguments.flag("cpu_offloading_activations", True) and model):
        return {}
    share = number / model.num_layers
    nearest = OffloadLayers.nearest(share)
    if nearest.share != share:
        arguments.remark(key, f"priced as {nearest} of the layers")
    return {"offload_layers": nearest}


# Expert buffers are sized before the token counts are known, by the factors in NVIDIA's recipes (Megatron-Bridge
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
    if graphs == CudaGraphs.FULL_ITERATION:  # the NaN check synchronises with the device
        arguments = {"cuda_graph_impl": "full_iteration", "no_check_for_nan_in_loss_and_grad": True}
        return {**arguments, "te_rng_tracker": True, **(STATIC_EXPERTS if file.model.moe else {})}
    scopes = graph_scopes(graphs, file.model)
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": scopes, "te_rng_tracker": True}


def _read_graphs(reading: Reading) -> Fields:
    """Read the choice of CUDA graphs, from its current names and those before core 0.15."""
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


_BACKENDS = {"deepep": Dispatcher.DEEPEP, "hybridep": Dispatcher.HYBRIDEP}


def _write_dispatcher(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    if file.model.moe is None:
        return {}
    if plan.ep == 1:
        return {"moe_token_dispatcher_type": "alltoall"}
    if plan.dispatcher not in _BACKENDS.values():
        return {"moe_token_dispatcher_type": str(plan.dispatcher)}
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": str(plan.dispatcher)}


def _read_dispatcher(reading: Reading) -> Fields:
    """Read the dispatcher; the flexible one uses DeepEP by default (transformer_config.py)."""
    arguments = reading.arguments
    kind = arguments.text("moe_token_dispatcher_type", "allgather")
    backend = arguments.text("moe_flex_dispatcher_backend", "deepep") or "deepep"
    arguments.flag("moe_enable_deepep")  # required by the flexible dispatcher before core 0.15
    if reading.model is None or reading.model.moe is None or reading.fields.get("ep", 1) == 1:
        return {}
    if kind == "flex":
        if backend not in _BACKENDS:
            option = arguments.name("moe_flex_dispatcher_backend")
            raise InputError(f"{option} {backend[:30]!r} is not one of {', '.join(_BACKENDS)}")
        return {"dispatcher": _BACKENDS[backend]}
    if kind == "allgather":
        return {"dispatcher": Dispatcher.ALL_GATHER}
    if kind != "alltoall":
        arguments.remark("moe_token_dispatcher_type", "priced as all-to-all")
    return {}


def _write_dropping(file: PlanFile) -> dict[str, Value]:
    if not file.best.plan.token_dropping:
        return {}
    training = file.training
    factor = {"moe_expert_capacity_factor": training.capacity_factor}
    return factor | {"moe_pad_expert_input_to_capacity": training.pads_experts}


def _read_dropping(reading: Reading) -> Fields:
    """Read how many tokens experts take; a capacity below 0 means no limit (transformer_config.py)."""
    arguments, key = reading.arguments, "moe_expert_capacity_factor"
    capacity, pads = arguments.value(key), arguments.flag("moe_pad_expert_input_to_capacity")
    if capacity is None or reading.model is None or reading.model.moe is None:
        return {}
    if isinstance(capacity, bool) or not isinstance(capacity, int | float):
        raise InputError(f"{arguments.name(key)} must be a number, got {show(capacity)}")
    if capacity < 0:
        return {}
    reading.training |= {"capacity_factor": float(capacity), "pads_experts": pads}
    return {"token_dropping": True}


def _read_attention_type(reading: Reading) -> Fields:
    return {"fp8_attention": reading.arguments.flag("fp8_dot_product_attention")}


def _write_rope(file: PlanFile) -> dict[str, Value]:
    return {} if file.model.mla is None or file.best.plan.rope_fusion else {"no_rope_fusion": True}


def _read_rope(reading: Reading) -> Fields:
    """Read whether rotations are fused, which the cost model distinguishes only for latent attention."""
    arguments, model, key = reading.arguments, reading.model, "apply_rope_fusion"
    is_fused = arguments.flag(key, True)
    is_priced_fused = model is not None and model.mla is None and model.position_embedding == "rope"
    if not is_fused and arguments.has(key) and is_priced_fused:
        arguments.remark(key, "priced with a fused RoPE")
    return {"rope_fusion": is_fused}


def _write_loss(file: PlanFile) -> dict[str, Value]:
    fusion = file.best.plan.cross_entropy_fusion
    is_fused = fusion != CrossEntropyFusion.UNFUSED
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": str(fusion)} if is_fused else {}


def _read_loss(reading: Reading) -> Fields:
    arguments, words = reading.arguments, ("native", "te")
    kind = arguments.word("cross_entropy_fusion_impl", {word: CrossEntropyFusion(word) for word in words}, "native")
    return {"cross_entropy_fusion": kind} if arguments.flag("cross_entropy_loss_fusion") else {}


def _read_batch(reading: Reading) -> Fields:
    arguments = reading.arguments
    for key in ("rampup_batch_size", "step_batch_size_schedule"):
        if arguments.arguments.get(key) and arguments.value(key):
            arguments.remark(key, "the plan is that of the full batch", matters=False)
    micro_batch, dp = reading.fields["micro_batch"], reading.fields["dp"]
    return {"global_batch": arguments.optional_count("global_batch_size", least=1) or micro_batch * dp}


# fmt: off
PLAN: tuple[Line, ...] = (
    (
        count("micro_batch_size", "micro_batch", 1, names=TRAIN),
        Special("global_batch_size", lambda file: {"global_batch_size": file.best.plan.global_batch}, _read_batch,
                names=TRAIN, companions=valued("rampup_batch_size", "step_batch_size_schedule")),
    ),
    (TP, switch("sequence_parallel", "sp")),
    *CONTEXT,
    (
        PP,
        switch("use_tp_pp_dp_mapping", "rank_order", RankOrder.DP_BEFORE_PP, on=RankOrder.PP_BEFORE_DP,
               off=RankOrder.DP_BEFORE_PP, when=lambda file: file.best.plan.pp > 1, names=DIST),
    ),
    LAYOUT,
    (
        count("expert_model_parallel_size", "ep", 1, when=_has_experts),
        optional_count("expert_tensor_parallel_size", "etp", when=_has_experts),
    ),
    (
        Special("moe_token_dispatcher_type", _write_dispatcher, _read_dispatcher,
                companions=(*valued("moe_flex_dispatcher_backend"), *switches("moe_enable_deepep"))),
    ),
    (
        Special("moe_expert_capacity_factor", _write_dropping, _read_dropping,
                companions=switches("moe_pad_expert_input_to_capacity")),
        switch("moe_router_fusion", "router_fusion", when=_has_experts),
    ),
    (Special("apply_rope_fusion", _write_rope, _read_rope, is_switch=True, is_on=True),),
    (
        Special("cross_entropy_loss_fusion", _write_loss, _read_loss, is_switch=True,
                companions=valued("cross_entropy_fusion_impl")),
        switch("gradient_accumulation_fusion", "gradient_accumulation_fusion", True),
    ),
    *SHARDING,
    (
        switch("overlap_grad_reduce", "grad_reduce_overlap", names=DDP),
        switch("overlap_param_gather", "param_gather_overlap", names=DDP,
               when=lambda file: file.best.plan.sharding != "none"),
        switch("tp_comm_overlap", "tp_overlap", names={BRIDGE: "comm_overlap."}),
        switch("overlap_moe_expert_parallel_comm", "ep_overlap"),
        switch("delay_wgrad_compute", "delay_wgrad"),
        switch("moe_shared_expert_overlap", "shared_expert_overlap", when=_has_experts),
    ),
    (
        Special("cuda_graph_impl", _write_graphs, _read_graphs,
                companions=(*valued("cuda_graph_scope", "cuda_graph_modules", "moe_expert_rank_capacity_factor",
                                "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu"),
                        *switches("enable_cuda_graph", "external_cuda_graph", "use_transformer_engine_op_fuser",
                                  "moe_paged_stash"),
                        Option("te_rng_tracker", names={BRIDGE: "rng."}, is_switch=True),
                        Option("check_for_nan_in_loss_and_grad", names={BRIDGE: "ddp.check_for_nan_in_grad"},
                               is_switch=True))),
    ),
    NARROW_PARAMS,
    # Not command-line options; Megatron-Bridge writes the first in its precision settings.
    (
        Special("fp8_dot_product_attention", lambda file: {}, _read_attention_type, is_switch=True,
                names={BRIDGE: "mixed_precision."}),
        switch("activation_func_fp8_input_store", "fp8_activation_input"),
    ),
    (
        Special("recompute_granularity", _write_recompute, _read_recompute,
                companions=(*valued("recompute_method", "recompute_num_layers", "recompute_modules"),
                        *switches("recompute_activations"))),
    ),
    OFFLOAD,
    (
        Special("fine_grained_activation_offloading", _write_offload_modules, _read_offload_modules, is_switch=True,
                companions=valued("offload_modules")),
        Special("cpu_offloading_num_layers", _write_offload_layers, _read_offload_layers,
                companions=switches("cpu_offloading", "cpu_offloading_activations", "cpu_offloading_weights")),
    ),
    STATES,
)
# fmt: on

# -- options that are not written -------------------------------------------------------------------------------------

# fmt: off
UNWRITTEN: Line = (
    Assumed("outer_dp_sharding_strategy", ("no_shard",), "priced without sharding over the outer replicas", names=DDP),
    Assumed("align_param_gather", names=DDP),
    Assumed("overlap_p2p_comm", (True,), "priced with messages that overlap"),
    Assumed("bias_swiglu_fusion", (True,), "priced with a fused activation"),
    Assumed("empty_unused_memory_level", (0,), "giving cached memory back is not priced"),
    Assumed("nccl_ub", (False,), "registered communication buffers are not priced", names=DDP),
    Assumed("activation_offload_fraction", (1.0,), "priced as all of the parts on the host"),
    Assumed("delta_offload_bytes_across_pp_ranks", (0,), "priced with the same parts of every stage on the host"),
    *(Assumed(key) for key in ("min_offloaded_tensor_size", "fine_grained_offloading_max_inflight_offloads",
                               "delay_offload_until_cuda_graph")),
    Assumed("disable_parameter_transpose_cache", (False,), "8-bit copies of weights are priced as kept"),
    Assumed("dataloader_inter_document_masking", (False,), "priced as one document a sample: pass --document-len"),
    Assumed("rerun_mode", ("disabled", "validate_results"), "steps that run again are not priced",
            names={BRIDGE: "rerun_state_machine."}),
    Constant("train_iters", names=TRAIN),
    Constant("norm_epsilon", names={BRIDGE: "model.layernorm_epsilon"}),
    Constant("use_mcore_models", is_switch=True),
    *(Assumed(key) for key in (  # small effect, or already priced
        "moe_use_legacy_grouped_gemm",
        "masked_softmax_fusion", "bias_gelu_fusion", "bias_dropout_fusion",
        "apply_layernorm_1p", "tp_comm_overlap_cfg", "cuda_graph_warmup_steps",
        "openai_gelu",
    )),
)
# fmt: on

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
