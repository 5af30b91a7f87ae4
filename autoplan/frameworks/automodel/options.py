"""Option table of NeMo AutoModel's YAML (36044ad), for writing and reading."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Assumed, Option, Row, count, optional_count, switch, word
from autoplan.spec.enums import Dispatcher, MainWeights, Recompute, ReduceType, Schedule

# Section `distributed`; dp_size is the number of devices divided by the other degrees.
DEGREES: tuple[Row, ...] = (
    count("tp_size", "tp", 1),
    count("cp_size", "cp", 1),
    count("pp_size", "pp", 1),
    count("ep_size", "ep", 1),
    optional_count("dp_replicate_size", "dp_replicate"),
    switch("sequence_parallel", "sp"),
)
# Selective recomputation keeps the same as torchtitan (components/distributed/activation_checkpointing.py:141).
RECOMPUTE = word(
    "activation_checkpointing",
    "recompute",
    Recompute.NONE,
    {False: Recompute.NONE, True: Recompute.FULL, "full": Recompute.FULL, "selective": Recompute.SELECTIVE},
)
# Section `mp_policy`; gradients are reduced in fp32 by default.
REDUCTION = word(
    "reduce_dtype", "reduce_dtype", ReduceType.USUAL, {"float32": ReduceType.USUAL, "bfloat16": ReduceType.HALF}
)
OFFLOAD = "offload_policy"
ADAPTER_DTYPE = "bfloat16"
DISTRIBUTED: tuple[Option, ...] = (
    Assumed("enable_async_tensor_parallel", (False, None), "priced without it"),
    Assumed("enable_compile", (False, None), "priced as not compiled"),
    Assumed("use_hf_tp_plan", (False, None), "priced with its own plan"),
    Assumed("defer_fsdp_grad_sync", (True, None), "gradients are priced as reduced once a step"),
    Assumed("defer_rs_grad_accum", (True, None), "gradients are priced as reduced once a step"),
)
# Section `compile` (components/utils/compile_utils.py).
COMPILATION: tuple[Option, ...] = (Assumed("enabled", (False, None), "priced as not compiled"),)
# Section `fp8`: what is priced of torchao's scales (components/quantization/fp8.py).
SCALES: tuple[Option, ...] = (
    Assumed("recipe_name", ("tensorwise", None), "one scale a matrix is priced"),
    Assumed("enable_fsdp_float8_all_gather", (True,), "weights are priced as gathered in 8 bits"),
    Assumed("emulate", (False, None), "products in 8 bits are priced"),
)
DISTRIBUTED_COSTLESS = (
    *("strategy", "dp_size", "backend", "patch_is_packed_sequence", "timeout_minutes", "enable_fsdp2_prefetch"),
)
# Values of `model.backend.dispatcher`; the default is deepep, as in its recipes.
DISPATCHERS = {"deepep": Dispatcher.DEEPEP, "hybridep": Dispatcher.HYBRIDEP, "torch": Dispatcher.ALL_GATHER}
# Values of `pp_schedule`, in lower case.
SCHEDULES = {
    "1f1b": Schedule.ONE_F_ONE_B,
    "interleaved1f1b": Schedule.INTERLEAVED,
    "gpipe": Schedule.GPIPE,
    "interleavedzerobubble": Schedule.ZB_H1,
    "zbvzerobubble": Schedule.ZB_V,
    "dualpipev": Schedule.DUALPIPE_V,
}
SCHEDULE_WORDS = {schedule: word for word, schedule in SCHEDULES.items()}
# Section `model`.
MAIN_WEIGHTS = word(
    "torch_dtype",
    "main_weights",
    MainWeights.BF16,
    {
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "auto"), MainWeights.BF16),
        **dict.fromkeys(("fp32", "float32", "torch.float32"), MainWeights.FP32),
    },
)
STAGES, HEAD = "module_fqns_per_model_part", "lm_head"
PIPELINE_COSTLESS = (
    *("scale_grads_in_schedule", "patch_inner_model", "patch_causal_lm_model"),
    *("pp_seq_len", "pp_batch_size", "dtype"),
)
# Whole sections that affect neither time nor memory of a step.
COSTLESS = (
    *("seed", "benchmark", "dist_env", "rng", "checkpoint", "dataloader", "validation_dataset", "ci", "wandb"),
    *("validation_dataloader", "lr_scheduler", "processor", "mlflow", "comet", "logger", "nvtx", "tokenizer", "slurm"),
    *("clip_grad_norm", "moe_metrics", "skypilot"),
)
