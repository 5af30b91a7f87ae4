"""Rules on the plans that DeepSpeed accepts.

Places are files and lines of DeepSpeed edaa722 (0.19.6), below deepspeed/.  Tensor parallelism is AutoTP, or Megatron's
with its mpu passed to DeepSpeed; context parallelism is Ulysses; expert parallelism is AutoEP.
"""

from __future__ import annotations

from autoplan.base.arrays import Bools
from autoplan.frameworks.common import shared_rules as shared
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords, all_true
from autoplan.frameworks.common.widths import kv_groups
from autoplan.spec.axes import offered
from autoplan.spec.enums import ContextParallelKind, GradType, MainWeights, MomentType, Offload, Precision, Sharding
from autoplan.spec.plan import PlanBatch
from autoplan.spec.workload import Workload

_ENGINE = "runtime/engine.py"
_PIPE = "runtime/pipe"
_ULYSSES = "runtime/sequence_parallel/ulysses_sp.py"
_FOLDING = "module_inject/auto_ep_folding.py"

NONE, ZERO2, ZERO3 = (Sharding(word).code for word in ("none", "zero2", "zero3"))


# -- context parallelism ----------------------------------------------------------------------------------------------


def _cp_heads(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans give a rank whole heads; KV heads are copied if there are fewer of them than ranks."""
    groups = kv_groups(workload.model)
    keys = (groups % batch.cp == 0) | (batch.cp % groups == 0)
    return (workload.model.num_heads % batch.cp == 0) & keys


# -- experts ----------------------------------------------------------------------------------------------------------


def _sharded_experts(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans combine no sharded experts with AutoTP, Ulysses or MiCS."""
    if not workload.model.moe:
        return all_true(batch)
    return (batch.sharding != ZERO3) | (batch.ep == 1) | (batch.tp * batch.cp * batch.dp_replicate == 1)


# -- sharding ---------------------------------------------------------------------------------------------------------


def _compressed_states(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans have the groups of ZeRO++, which are counted over all ranks, or need none."""
    has_none = ~batch.quantized_gathers & ~batch.quantized_reductions & (batch.secondary_shard == 1)
    is_alone = (batch.sharding == ZERO3) & (batch.dp_shard == batch.num_devices) & (batch.ep == 1)
    return has_none | (is_alone & (batch.dp_shard % batch.secondary_shard == 0))


# -- data types of the states -----------------------------------------------------------------------------------------


def _narrow_states(workload: Workload, batch: PlanBatch) -> Bools:
    is_narrow = batch.main_weights == MainWeights.BF16.code
    is_bf16 = (batch.precision == Precision.BF16.code) & (batch.grad_dtype != GradType.FP32.code)
    return ~is_narrow | (is_bf16 & (batch.sharding != NONE) & (batch.offload == Offload.NONE.code))


SUPPORTED = (
    SupportedWords(axis="main_weights", words=("fp32", "bf16"), source="runtime/precision_config.py"),
    SupportedWords(axis="grad_dtype", words=("bf16", "fp32"), source=f"{_ENGINE} get_data_types"),
    SupportedWords(axis="moment_dtype", words=("fp32", "bf16"), source="runtime/precision_config.py"),
    SupportedWords(axis="reduce_dtype", words=("usual", "fp32"), source=f"{_ENGINE} communication_data_type"),
    SupportedWords(axis="schedule", words=("1f1b",), source=f"{_PIPE}/schedule.py:189"),
    SupportedWords(axis="cp_kind", words=(ContextParallelKind.ALL_TO_ALL,), source=f"{_ULYSSES}:145"),
    SupportedWords(
        axis="recompute", words=("none", "full"), source="runtime/activation_checkpointing/checkpointing.py"
    ),
    SupportedWords(axis="precision", words=("bf16", "fp16"), source=f"{_ENGINE}:2011"),
)

EXTRAS = offered("deepspeed")

RULES: tuple[Rule, ...] = (
    *universal.RULES,
    *universal.options_of_others(*EXTRAS),
    universal.ALL_OR_NONE,
    *(words.rule() for words in SUPPORTED),
    shared.no_interleaving(f"{_PIPE}/schedule.py:189"),
    Rule(
        source=f"{_PIPE}/engine.py:76",
        holds=lambda s, b: (b.pp == 1) | (b.sharding < ZERO2),
        text=lambda s, p: f"{p.sharding} needs pp 1, pp is {p.pp}: use zero1",
    ),
    Rule(
        source=f"{_PIPE}/topology.py:244",
        # The process grid of a pipeline has the axes pipe, data and model.
        holds=lambda s, b: (b.pp == 1) | (b.cp == 1),
        text=lambda s, p: f"cp {p.cp} needs pp 1, pp is {p.pp}: lower one of them",
    ),
    Rule(
        source=f"{_ULYSSES}:697",
        holds=lambda s, b: s.training.seq_len % b.cp == 0,
        text=lambda s, p: f"seq_len {s.training.seq_len} must be divisible by cp {p.cp}: lower cp",
    ),
    Rule(
        source=f"{_ULYSSES}:145",
        holds=_cp_heads,
        text=lambda s, p: (
            f"num_heads {s.model.num_heads} must be divisible by cp {p.cp}, and num_kv_heads {kv_groups(s.model)} be a "
            "multiple or a divisor of it: lower cp"
        ),
    ),
    Rule(
        source="runtime/sequence_parallel/parallel_state_sp.py:33",
        # Ulysses divides the world into sequence and data groups, which leaves no ranks for tp.
        holds=lambda s, b: (b.cp == 1) | (b.tp == 1),
        text=lambda s, p: f"cp {p.cp} with tp {p.tp}: Ulysses knows no tensor parallelism, set one to 1",
    ),
    shared.only("sp", False, why="AutoTP keeps whole sequences, leave it out", source="module_inject/auto_tp.py"),
    shared.whole_experts(f"{_FOLDING}:214"),
    Rule(
        source=f"{_FOLDING}:206",
        holds=lambda s, b: (b.ep == 1) | (b.tp == 1) | ((b.pp == 1) & (b.offload == Offload.NONE.code)),
        text=lambda s, p: (
            f"ep {p.ep} with tp {p.tp} needs pp 1 and nothing on the host, pp is {p.pp} and offload {p.offload}: "
            "set tp 1"
        ),
    ),
    Rule(
        source=f"{_ENGINE}:1895",
        holds=_sharded_experts,
        text=lambda s, p: (
            f"zero3 with ep {p.ep} needs tp, cp and dp_replicate 1, they are {p.tp}, {p.cp} and {p.dp_replicate}: "
            "use zero2"
        ),
    ),
    Rule(
        source=f"{_ENGINE}:2468",
        # mics_shard_size belongs to stage 3, up to 0.19.6: 0.19.7 removed it (export asks for the version).
        holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding == NONE) | (b.sharding == ZERO3),
        text=lambda s, p: f"{p.sharding} shards over all replicas, dp_replicate is {p.dp_replicate}: set it to 1",
    ),
    Rule(
        source=f"{_ENGINE}:1986",
        holds=lambda s, b: (b.offload == Offload.NONE.code) | (b.sharding != NONE),
        text=lambda s, p: "offload 'optimizer' needs ZeRO, sharding is none: use zero1, zero2 or zero3",
    ),
    Rule(
        source="runtime/zero/stage3.py subgroup_to_device",
        holds=lambda s, b: (b.offload_percent == 100) | ((b.sharding == ZERO3) & (b.offload == Offload.OPTIMIZER.code)),
        text=lambda s, p: (
            f"offload_percent {p.offload_percent} needs zero3 and offload optimizer, they are {p.sharding} and "
            f"{p.offload}: leave it out"
        ),
    ),
    Rule(
        source="runtime/comm/coalesced_collectives.py all_to_all_quant_reduce, utils/groups.py",
        holds=_compressed_states,
        text=lambda s, p: (
            "quantized_gathers, quantized_reductions and secondary_shard, a divisor of the devices, need zero3 over "
            f"all of them and ep 1: {p.sharding} is over {p.dp_shard} of {p.num_devices}, secondary_shard "
            f"{p.secondary_shard}, ep {p.ep}: leave them out"
        ),
    ),
    Rule(
        source="runtime/config.py _do_error_check",
        # Only an optimizer on the host has fp32 moments with bf16 weights, which is not modelled.
        holds=lambda s, b: (b.main_weights == MainWeights.BF16.code) == (b.moment_dtype == MomentType.BF16.code),
        text=lambda s, p: (
            f"main_weights {p.main_weights} with moment_dtype {p.moment_dtype}: use bf16 of both, or fp32"
        ),
    ),
    Rule(
        source="runtime/config.py _do_error_check",
        holds=_narrow_states,
        text=lambda s, p: (
            f"main_weights bf16 need precision bf16, ZeRO, an optimizer on the device and grad_dtype bf16, they are "
            f"{p.precision}, {p.sharding}, offload {p.offload} and {p.grad_dtype}: use fp32"
        ),
    ),
)

BOOK = Rulebook(rules=RULES, supported=SUPPORTED, extras=EXTRAS)
