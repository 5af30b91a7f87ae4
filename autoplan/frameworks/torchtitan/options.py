"""Option table of torchtitan: names in 0.3.0, 0.2.2 and main (b5bcd76), for writing and reading.

Places are below torchtitan/.  Functions that write and read the same options are next to each other.
"""

from __future__ import annotations

from typing import Any

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import (
    Assumed,
    Fields,
    Value,
    count,
    read_fields,
    remark_assumed,
    switch,
    word,
)
from autoplan.frameworks.common.options import Argument, Options, show
from autoplan.frameworks.fsdp2.options import SCHEDULES
from autoplan.spec.enums import Fp8Scaling, MainWeights, Offload, ReduceType, Sharding
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, chunk_layers
from autoplan.spec.plan_file import PlanFile

# Sections that affect neither time nor memory, or that are not part of a plan.
ASIDE = (
    *("hf_assets_path", "dump_folder", "profiler", "profiling", "metrics", "tokenizer", "dataloader"),
    *("lr_scheduler", "checkpoint", "comm", "validator", "validation", "loss"),
)
CONVERTERS = {"fp8": "Float8", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}  # prefixes of class names in 0.3
OLD_CONVERTERS = {"fp8": "float8", "mxfp8": "mx"}  # in 0.2
POLICIES = {"full": "FullAC", "selective": "SelectiveAC"}
# Keys of activation_checkpoint that are read, or cost nothing (0.2.2, config/job_config.py).
POLICY_KEYS = ("mode", "selective_ac_option", "preserve_rng_state", "determinism_check", "debug", "early_stop")

# Keys of the model that are read, or cost nothing; forks have others, which may make it another one.
MODEL_KEYS = (
    *("name", "flavor", "converters", "hf_assets_path", "tokenizer_path", "tokenizer", "print_after_conversion"),
)

# -- batch and sequence -----------------------------------------------------------------------------------------------


def write_batch(plan: ParallelPlan, seq_len: int, version: str) -> dict[str, Any]:
    """Return batch and sequence; a pipeline processes all micro-batches of a replica at once."""
    num_parts = plan.num_microbatches if plan.pp > 1 else 1
    if version == "main":
        return {
            "num_tokens_per_microbatch_per_dp_rank": plan.micro_batch * seq_len,
            "num_tokens_per_train_step": plan.global_batch * seq_len,
            "max_context_length": seq_len,
            "disable_cuda_graphs": True,
        }
    values: dict[str, Any] = {
        "local_batch_size": plan.micro_batch * num_parts,
        "global_batch_size": plan.global_batch,
        "seq_len": seq_len,
    }
    # Pipelines and expert parallelism refuse CUDA graphs (trainer.py:183), which are not modelled.
    return values if version == "0.2" else values | {"disable_cuda_graphs": True}


def read_sequence(training: Options) -> int:
    """Return the length of a sequence."""
    key = "max_context_length" if training.has("max_context_length") else "seq_len"
    return training.count(key, None if training.has("num_tokens_per_train_step") else 2048)


def read_batch(training: Options, parallelism: Options, degrees: dict[str, int]) -> dict[str, int]:
    """Return the sequences per micro-batch and per step."""
    dp, has_pipeline = degrees["dp_replicate"] * degrees["dp_shard"], degrees["pp"] > 1
    if training.has("num_tokens_per_microbatch_per_dp_rank"):  # main
        length = read_sequence(training)
        tokens = training.count("num_tokens_per_microbatch_per_dp_rank")
        num_parts = parallelism.count("num_pp_microbatches", 1) if has_pipeline else 1
        step_tokens = training.count("num_tokens_per_train_step", -1, least=-1)
        step_tokens = step_tokens if step_tokens > 0 else tokens * dp * num_parts
        if tokens % length or step_tokens % length:
            raise InputError(f"micro-batches of {tokens} tokens are no whole sequences of {length}: pack no sequences")
        micro, local, batch = tokens // length, tokens // length * num_parts, step_tokens // length
    else:
        local = training.count("local_batch_size", 8)
        micro = parallelism.count("pipeline_parallel_microbatch_size", 1) if has_pipeline else local
        batch = training.count("global_batch_size", -1, least=-1)
        batch = batch if batch > 0 else local * dp
    parallelism.pass_over("pipeline_parallel_microbatch_size", "num_pp_microbatches")
    if local % micro or batch % (local * dp):
        raise InputError(
            f"a step of {batch} sequences must be a multiple of {local} on {dp} replicas, in parts of {micro}"
        )
    if has_pipeline and batch > local * dp:
        why = "the pipeline empties after so many sequences; read as if it went on to the end of the step"
        training.remark("local_batch_size", why)
    return {"micro_batch": micro, "global_batch": batch}


STATES = word(  # gradients and moments have the data type of the weights
    "dtype",
    "main_weights",
    MainWeights.FP32,
    {"float32": MainWeights.FP32, "bfloat16": MainWeights.BF16},
    when=lambda file: file.best.plan.main_weights != MainWeights.FP32,
)
REDUCTION = word(
    "mixed_precision_reduce",
    "reduce_dtype",
    ReduceType.USUAL,
    {"float32": ReduceType.USUAL, "bfloat16": ReduceType.HALF},
    when=lambda file: file.best.plan.reduce_dtype != ReduceType.USUAL,
)
SCALING = word(  # for linear layers in 0.2; 0.3 only has the last one
    "recipe_name",
    "fp8_scaling",
    Fp8Scaling.TENSORWISE,
    {"tensorwise": Fp8Scaling.TENSORWISE, "rowwise": Fp8Scaling.ROWWISE, "rowwise_with_gw_hp": Fp8Scaling.ROWWISE},
)
OFFLOAD = switch(
    "enable_cpu_offload",
    "offload",
    Offload.NONE,
    on=Offload.PARAMETERS,
    off=Offload.NONE,
    when=lambda file: file.best.plan.offload != Offload.NONE,
)
# Options that plans do not have.
_ASSUMED = (
    Assumed("mixed_precision_param", ("bfloat16",), "products are priced in 16 bits"),
    Assumed("disable_cuda_graphs", (True,), "no prediction knows CUDA graphs"),
)
_OPTIMIZER = (
    Assumed("name", ("Adam", "AdamW"), "priced as AdamW"),
    Assumed("implementation", ("fused",), "one fused update is priced"),
    Assumed("early_step_in_backward", (False,), "priced without it"),
)
_BALANCER = "context_parallel_load_balancer"
_CONTEXT = (
    Assumed(_BALANCER, ("headtail", "ptrr"), "ranks are priced with equal shares of causal attention"),
    Assumed("context_parallel_rotate_method", ("allgather",), "priced as with allgather"),
)
_PARALLELISM = (Assumed("spmd_backend", ("spmd_types",), "hosts are priced as with the default"),)
_DEBUGGING = (
    Assumed("deterministic", (False,), "deterministic kernels are not priced"),
    Assumed("batch_invariant", (False,), "kernels and sums in a fixed order are not priced"),
    Assumed("detect_anomaly", (False,), "checks of all gradients are not priced"),
    Assumed("spmd_typechecking", (False,), "checks of types are not priced"),
)
_COMPILATION = (Assumed("backend", ("inductor",), "priced as compiled by inductor"),)


def remark_own_settings(options: Options) -> None:
    """Remark on settings of forks and of programs that use torchtitan."""
    model, experimental, job = (options.inside(name) for name in ("model", "experimental", "job"))
    model.pass_over(*MODEL_KEYS)
    if model.is_other("norm_type", "rmsnorm"):
        model.remark("norm_type", "the norms of the model are priced as torchtitan's own")
    experimental.pass_over("custom_import")
    for section, module in ((experimental, "custom_args_module"), (job, "custom_config_module")):
        if section.value(module):
            section.remark(module, "a program's own settings are not read")
    job.pass_over(*job.arguments)


def read_assumed(options: Options) -> None:
    """Remark on options that plans do not have, if they differ from the assumed value."""
    training, optimizer, debugging = (options.inside(name) for name in ("training", "optimizer", "debug"))
    remark_assumed(_ASSUMED, training)
    remark_assumed(_OPTIMIZER, optimizer)
    remark_assumed(_DEBUGGING, debugging)
    debugging.pass_over(*debugging.arguments)
    remark_assumed(_COMPILATION, options.inside("compile"))
    if (replacements := options.inside("override")).value("imports"):
        replacements.remark("imports", "what they put in the place of modules is not read")
    replacements.pass_over(*replacements.arguments)
    optimizer.pass_over("lr", "eps", "beta1", "beta2", "weight_decay")
    training.pass_over(
        "steps",
        "warmup_steps",
        "max_norm",
        "gc_freq",
        "gc_debug",
        "dataset",
        "dataset_path",
        "seq_len",
        "max_context_length",
    )


# -- degrees and sharding ---------------------------------------------------------------------------------------------

_MESH = (
    count("tensor_parallel_degree", "tp", 1),
    count("context_parallel_degree", "cp", 1),
    count("pipeline_parallel_degree", "pp", 1),
)
_COPIES = count("data_parallel_replicate_degree", "dp_replicate", 1)
_EXPERTS = count("expert_parallel_degree", "ep", 1)
_SHARDS, _RESHARD = "data_parallel_shard_degree", "fsdp_reshard_after_forward"
# Known options without a modelled cost.
_PARALLELISM_ASIDE = (
    *("context_parallel_ptrr_mask_key", "pipeline_parallel_expert_parallel_overlap", "expert_tensor_parallel_degree"),
)


def write_parallelism(plan_file: PlanFile, version: str) -> dict[str, Value]:
    """Return the section of degrees, sharding and pipeline."""
    plan = plan_file.best.plan
    is_sharded = plan.sharding != Sharding.NONE
    values: dict[str, Value] = {
        _COPIES.key: plan.dp_replicate if is_sharded else plan.dp,
        _SHARDS: plan.dp_shard if is_sharded else 1,
        _RESHARD: "never" if plan.sharding == Sharding.ZERO2 else "default",
    }
    values |= {row.key: row.value(plan_file) for row in (*_MESH, _EXPERTS)}
    if version != "0.2" and plan.tp > 1:
        values["enable_sequence_parallel"] = plan.sp
    if version == "0.2" and plan.tp_overlap:
        values["enable_async_tensor_parallel"] = True
    return values | (_write_pipeline(plan, plan_file.model.num_layers, version) if plan.pp > 1 else {})


def read_degrees(parallelism: Options, num_devices: int | None) -> dict[str, int]:
    """Return the degree of every axis; a shard degree of -1 means all remaining devices."""
    degrees: Fields = read_fields((*_MESH, _COPIES, _EXPERTS), parallelism)
    other_ranks = degrees["tp"] * degrees["cp"] * degrees["pp"] * degrees["dp_replicate"]
    shard = parallelism.count(_SHARDS, -1, least=-1)
    if shard < 1:
        if num_devices is None:
            raise InputError("data_parallel_shard_degree takes what is left of the devices: pass --devices")
        if num_devices % other_ranks:
            raise InputError(f"{num_devices} devices do not divide into tp x cp x pp x dp_replicate = {other_ranks}")
        shard = num_devices // other_ranks
    elif num_devices is not None and shard * other_ranks != num_devices:
        raise InputError(f"the degrees need {shard * other_ranks} devices, there are {num_devices}")
    return degrees | {"dp_shard": shard}


def read_sharding(parallelism: Options, degrees: dict[str, int], model: ModelSpec) -> Fields:
    """Return the degrees of a plan and what is sharded over them."""
    tp, cp, ep = degrees["tp"], degrees["cp"], degrees["ep"]
    replicate, shard = degrees["dp_replicate"], degrees["dp_shard"]
    policy = parallelism.word(_RESHARD, {word: word for word in ("default", "always", "never")}, "default")
    is_sharded = shard * cp > 1
    sharding = "none" if not is_sharded else "zero2" if policy == "never" and degrees["pp"] == 1 else "zero3"
    if policy == "always" and degrees["pp"] > 1 and is_sharded:
        why = "weights are gathered for every micro-batch, but priced as once per step"
        parallelism.remark(_RESHARD, why)
    sp = parallelism.flag("enable_sequence_parallel", True)
    if not model.moe and ep > 1:
        parallelism.remark(_EXPERTS.key, "no experts", matters=False)
        ep = 1
    etp = parallelism.count("expert_tensor_parallel_degree", 1) if ep > 1 else tp
    if parallelism.is_other("expert_parallel_comm_backend", "standard"):
        parallelism.remark("expert_parallel_comm_backend", "priced as all-to-all")
    if cp > 1:
        if parallelism.is_null(_BALANCER):  # which is none of torch's
            parallelism.arguments[_BALANCER] = Argument(parallelism.name(_BALANCER), "none", _BALANCER, "none")
        remark_assumed(_CONTEXT, parallelism)
    remark_assumed(_PARALLELISM, parallelism)
    parallelism.pass_over(*_PARALLELISM_ASIDE, *(option.key for option in _CONTEXT))
    return {
        "tp": tp,
        "sp": sp and tp > 1,
        "cp": cp,
        "ep": ep,
        "etp": etp if model.moe else 1,
        "dp_replicate": replicate if is_sharded else 1,
        "dp_shard": shard if is_sharded else shard * replicate,
        "sharding": sharding,
    }


# -- pipelines --------------------------------------------------------------------------------------------------------

# Names in torch, read in any case: with one stage per rank, and with several.
_ONE_STAGE = ("1f1b", "gpipe", "zb-h1")
_SINGLE = {word.casefold(): name for name, word in SCHEDULES.items() if name in _ONE_STAGE}
_MULTI = {word.casefold(): name for name, word in SCHEDULES.items() if name not in _ONE_STAGE}


def _write_pipeline(plan: ParallelPlan, num_layers: int, version: str) -> dict[str, Value]:
    values: dict[str, Value] = {"pipeline_parallel_schedule": SCHEDULES[plan.schedule]}
    if version == "main":
        values["num_pp_microbatches"] = plan.num_microbatches
    else:
        values["pipeline_parallel_microbatch_size"] = plan.micro_batch
    head = "output" if version == "0.2" else "lm_head"
    return values | {"module_fqns_per_model_part": stages(chunk_layers(plan, num_layers), head)}


def read_pipeline(parallelism: Options, pp: int, num_layers: int) -> Fields:
    """Return the schedule, the chunks per rank and their layers."""
    word = str(parallelism.value("pipeline_parallel_schedule") or "1F1B").casefold()
    parts = parallelism.value("module_fqns_per_model_part")
    per_stage = "pipeline_parallel_layers_per_stage"
    stage_layers = parallelism.optional_count(per_stage, least=1)
    first = parallelism.count("pipeline_parallel_first_stage_less_layers", 1, least=0)
    last = parallelism.count("pipeline_parallel_last_stage_less_layers", 1, least=0)
    if parallelism.value("pipeline_parallel_schedule_csv"):
        raise InputError("a schedule of a CSV file is not priced")
    if pp == 1:
        return {}
    if word not in _SINGLE | _MULTI:
        raise InputError(f"pipeline schedule {show(word)} is not priced: known are {', '.join(_SINGLE | _MULTI)}")
    if parts is not None:
        counts = counted_layers(parts, num_layers)
    else:
        num_stages = pp * (1 if word in ("1f1b", "gpipe") else 2)
        if stage_layers is not None:
            num_stages = -(-(num_layers + first + last) // stage_layers)
        counts = spread(num_stages, num_layers, first, last)
    if len(counts) % pp:
        raise InputError(f"{len(counts)} stages do not divide over {pp} ranks of the pipeline")
    vp = len(counts) // pp
    table = _SINGLE if vp == 1 else _MULTI
    if word not in table:
        raise InputError(f"pipeline schedule {word!r} with {vp} stages a rank is not priced")
    uneven = counts if len(set(counts)) > 1 else None
    return {"pp": pp, "vp": vp, "schedule": table[word], "layers_per_chunk": uneven}


def stages(counts: tuple[int, ...], head: str) -> list[list[str]]:
    """Return the modules of every stage in order: (1, 2) is [[tok_embeddings, layers.0], [layers.1, layers.2, ...]]."""
    names, first = [], 0
    for num_layers in counts:
        names.append([f"layers.{layer}" for layer in range(first, first + num_layers)])
        first += num_layers
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", head]
    return names


def spread(num_stages: int, num_layers: int, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """Return the layers of every stage as torchtitan distributes them; `first` and `last` weigh embedding and head.

    Source: _generate_llm_fqn_per_model_part in distributed/pipeline_parallel.py of 0.3.0.
    """
    base, remainder = divmod(num_layers + first + last, num_stages)
    if base < max(first, last, 1):
        raise InputError(f"{num_layers} layers do not fill {num_stages} stages of a pipeline")
    counts = [base + (stage < remainder) for stage in range(num_stages)]
    counts[0] -= first
    counts[-1] -= last
    return tuple(counts)


def counted_layers(parts: Any, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers in every listed stage; layers must be in order."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts) or not parts:
        raise InputError("module_fqns_per_model_part must be a list of lists of names")
    names = [[name for name in part if str(name).startswith("layers.")] for part in parts]
    if [name for part in names for name in part] != [f"layers.{layer}" for layer in range(num_layers)]:
        raise InputError(f"module_fqns_per_model_part must list the {num_layers} layers in order, each once")
    return tuple(map(len, names))
