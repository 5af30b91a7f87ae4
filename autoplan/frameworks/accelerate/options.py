"""Option table of `accelerate launch` 1.15.0, whose options have the same names as the keys of its config file."""

from __future__ import annotations

from autoplan.frameworks.common.option_table import Assumed, Constant, Option, count, switch, word
from autoplan.spec.enums import Offload, Precision, Recompute, Sharding

PRECISION = word(
    "mixed_precision", "precision", None, {str(kind): kind for kind in map(Precision, ("bf16", "fp16", "fp8"))}
)

# Section `fsdp_config`.  FSDP1 has a strategy (a word or a number) instead of the switch.
STRATEGIES = {"FULL_SHARD": Sharding.ZERO3, "SHARD_GRAD_OP": Sharding.ZERO2, "NO_SHARD": Sharding.NONE}
RESHARD = word(
    "fsdp_reshard_after_forward",
    "sharding",
    Sharding.ZERO3,
    {True: Sharding.ZERO3, False: Sharding.ZERO2} | STRATEGIES,
)
FSDP1 = word(
    "fsdp_sharding_strategy", "sharding", Sharding.ZERO3, STRATEGIES | dict(enumerate(STRATEGIES.values(), start=1))
)
RECOMPUTE = switch("fsdp_activation_checkpointing", "recompute", Recompute.NONE, on=Recompute.FULL, off=Recompute.NONE)
OFFLOAD = switch("fsdp_offload_params", "offload", Offload.NONE, on=Offload.PARAMETERS, off=Offload.NONE)
FSDP: tuple[Option, ...] = (
    Constant("fsdp_version", 2),
    RESHARD,
    Constant("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    RECOMPUTE,
    OFFLOAD,
    Constant("fsdp_cpu_ram_efficient_loading", False),
    Constant("fsdp_state_dict_type", "SHARDED_STATE_DICT"),
)
FSDP_COSTLESS = (
    *("fsdp_transformer_layer_cls_to_wrap", "fsdp_cpu_ram_efficient_loading"),
    *("fsdp_state_dict_type", "fsdp_sync_module_states", "fsdp_use_orig_params", "fsdp_version"),
)

# Section `parallelism_config`.
MESH = tuple(count(f"parallelism_config_{axis}_size", axis, 1) for axis in ("dp_replicate", "dp_shard", "tp", "cp"))
CP_KIND = "parallelism_config_cp_comm_strategy"
PARALLELISM: tuple[Option, ...] = (
    *MESH,
    # Keys and values travel around the ring, as the cost model assumes.
    Constant(CP_KIND, lambda file: "alltoall" if file.best.plan.cp > 1 else None),
)
PARALLELISM_COSTLESS = (*("parallelism_config_cp_backend", "parallelism_config_sp_backend"),)
# Options that no plan has, and the values that are priced; `None` is written for a key without one.
ASSUMED: tuple[Option, ...] = (
    Assumed("use_cpu", (False, None), "priced on the device"),
    Assumed("debug", (False, None), "shapes are checked at every collective; not priced"),
)
WRAPPING: tuple[Option, ...] = (
    Assumed("fsdp_auto_wrap_policy", ("TRANSFORMER_BASED_WRAP", 1, None), "units of one layer each are priced"),
)
COSTLESS = (
    *("compute_environment", "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_process_ip"),
    *("main_process_port", "main_training_function", "num_machines", "rdzv_backend", "same_network"),
    *("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "gpu_ids", "fp8_config", "tpu_name", "tpu_zone"),
    *(
        "rdzv_conf",
        "max_restarts",
        "monitor_interval",
        "role",
        "tee",
        "log_dir",
        "quiet",
        "num_cpu_threads_per_process",
    ),
)
