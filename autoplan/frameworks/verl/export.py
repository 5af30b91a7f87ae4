"""Export of a plan to arguments of verl's SFT trainer with its Megatron engine (1dda039); places are below verl/.

The model is a checkpoint on a hub, which Megatron-Bridge converts to Megatron-Core.
"""

from __future__ import annotations

from autoplan.base.errors import refuse
from autoplan.frameworks.common.job import Job, OptionGroup, Target
from autoplan.frameworks.common.option_table import Value
from autoplan.frameworks.common.rules import Rule, check_limits
from autoplan.frameworks.common.shared_rules import USUAL_RANK_ORDER, no_options_but, only
from autoplan.frameworks.hf_trainer.write import adapters_of, start_variables
from autoplan.frameworks.megatron_bridge.tuning import refused_of_fused
from autoplan.frameworks.megatron_lm.export import checked_parts, environment
from autoplan.frameworks.megatron_lm.rules import LIMITS as OF_MEGATRON
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.frameworks.megatron_lm.table import arguments_of, switched_otherwise
from autoplan.frameworks.verl.options import (
    DDP,
    DEFAULTS,
    DTYPE,
    DYNAMIC,
    ELSEWHERE,
    LENGTH,
    OPTIMIZER,
    TRANSFORMER,
    place_of,
)
from autoplan.spec.enums import AttentionKernel, GradType, MainWeights, MomentType, Offload, Precision, Sharding
from autoplan.spec.plan_file import PlanFile

NAME = "verl"
_ENGINE = "workers/engine/megatron/transformer_impl.py"
_DATA = ("data.val_files=null", "data.truncation=right")


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the torchrun job, with verl and Megatron-Core installed."""
    *_, plan_part = checked_parts(plan_file, NAME, RULES, OF_MEGATRON)
    _check(plan_file)
    plan = arguments_of([plan_part], plan_file)
    plan |= switched_otherwise(plan_part.lines, DEFAULTS, plan)
    settings = {place_of(name): value for name, value in plan.items() if name not in ELSEWHERE}
    return Job(
        framework=NAME,
        environment=environment(plan_file),
        variables=start_variables(plan_file),
        program="-m verl.trainer.sft_trainer",
        groups=(
            _group("PLAN", "The plan; what begins with ++ are fields of Megatron-Core.", _plan(settings, plan_file)),
            _group("TUNING", "What is trained, and how samples become sequences.", _tuning(plan_file)),
            _group("TRAINING", "Yours to choose.", _training(plan_file)),
        ),
        replaceable=OptionGroup(
            name="DATA",
            note="~/data/gsm8k of its examples; DATA_ARGS='data.train_files=...' in the environment replaces it.",
            lines=(list(_DATA),),
        ),
        trailing=('model.path="$BASE_MODEL"', 'trainer.total_training_steps="$STEPS"'),
    )


def _group(name: str, note: str, settings: dict[str, Value]) -> OptionGroup:
    return OptionGroup(name=name, note=note, lines=tuple([_word(key, value)] for key, value in settings.items()))


def _word(key: str, value: Value) -> str:
    """Return a setting in Hydra's syntax; keys below an override table may be missing from the config file."""
    prefix = "++" if ".override_" in key else ""
    return f"{prefix}{key}={_written(value)}"


def _written(value: Value) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, str) and not value.replace("_", "").replace("-", "").isalnum():
        return f'"{value}"'
    return "null" if value is None else str(value)


def _plan(settings: dict[str, Value], plan_file: PlanFile) -> dict[str, Value]:
    """Return the settings of the plan, including those whose default would be another plan."""
    plan, model = plan_file.best.plan, plan_file.model
    overlap = f"{DDP}.overlap_param_gather"
    written: dict[str, Value] = {
        "engine": "megatron",
        "optim": "megatron",
        DTYPE: "float16" if plan.precision == Precision.FP16 else "bfloat16",
        **settings,
        "engine.sequence_parallel": plan.sp,
    }
    if plan.vp > 1:  # required in addition to a layout
        written["engine.virtual_pipeline_model_parallel_size"] = plan.vp
    if overlap in settings:  # set separately for DDP and the optimizer (utils/megatron_utils.py:1694)
        written[f"{OPTIMIZER}.overlap_param_gather"] = settings[overlap]
    if model.moe is not None:
        written |= {f"{TRANSFORMER}.moe_grouped_gemm": True, f"{TRANSFORMER}.moe_permute_fusion": True}
    if model.num_mtp_layers:
        written |= {"model.mtp.enable": True, "model.mtp.enable_train": True}
    return written


def _tuning(plan_file: PlanFile) -> dict[str, Value]:
    table: dict[str, Value] = {LENGTH: plan_file.training.seq_len, DYNAMIC: False, "data.pad_mode": "no_padding"}
    if (tuning := adapters_of(plan_file.training)) is not None:
        table |= {"model.lora.rank": tuning.rank or 0, "model.lora.alpha": tuning.alpha or 0}
        table |= {"model.lora.type": "dora" if tuning.dora else "lora", "model.lora.dropout": tuning.dropout}
        table["model.lora.target_modules"] = list(tuning.targets)
    return table


def _training(plan_file: PlanFile) -> dict[str, Value]:
    rate = "1e-4" if adapters_of(plan_file.training) else "1e-5"
    return {"optim.lr": rate, "trainer.logger": ["console"], "trainer.test_freq": -1, "trainer.save_freq": -1}


# -- what the target does not support ---------------------------------------------------------------------------------

_TAKEN = (
    *("dispatcher", "offload_percent", "rope_fusion", "gradient_accumulation_fusion"),
    *("grad_dtype", "main_weights", "moment_dtype"),
)
LIMITS = (
    USUAL_RANK_ORDER,
    only("precision", Precision.BF16, Precision.FP16, why="use bf16 or fp16", source="workers/config/engine.py"),
    only("sharding", Sharding.NONE, Sharding.ZERO1, why="use none or zero1", source=_ENGINE),
    only("offload", Offload.NONE, Offload.OPTIMIZER, why="use optimizer", source=_ENGINE),
    # The data type of main weights in the precision-aware optimizer is fixed (utils/megatron/optimizer.py:185).
    only("main_weights", MainWeights.FP32, MainWeights.REMAINDERS, why="use fp32", source=_ENGINE),
    only("moment_dtype", MomentType.FP32, MomentType.BF16, why="use bf16", source="workers/config/optimizer.py"),
    only("grad_dtype", GradType.FP32, GradType.BF16_MAIN, why="use fp32 or bf16_main", source=_ENGINE),
    only("attention", AttentionKernel.FLASH, why="plan with flash", source=_ENGINE),
    only("tp_overlap", False, why="leave it out", source=_ENGINE),
    *no_options_but(_TAKEN, "megatron-lm", _ENGINE),
    Rule(
        source=_ENGINE,
        holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding == Sharding.NONE.code),
        text=lambda s, p: f"dp_replicate {p.dp_replicate} with {p.sharding}: shard over all replicas",
    ),
)


def _check(plan_file: PlanFile) -> None:
    model, training = plan_file.model, plan_file.training
    check_limits(LIMITS, model, training, plan_file.best.plan, f"{NAME} has no option for")
    refusals = (
        (model.attention_sinks, f"attention sinks of model {model.name!r}"),
        (
            training.lengths is not None and training.batching != "unpadded",
            f"batching {training.batching}: plan with --batching unpadded",
        ),
        (training.document_len is not None, "documents packed into a sequence: plan with --lengths"),
    )
    refuse(refusals, f"{NAME} cannot express ")


TARGET = Target(
    name=NAME,
    title=NAME,
    rules=("megatron-lm", "unknown"),
    job=job,
    limits=(*RULES, *OF_MEGATRON, *LIMITS),
    refused_tuning=refused_of_fused,
)
