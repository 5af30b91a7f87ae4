"""Export of a plan to the arguments of `megatron sft` of ms-swift (3602360); places are below swift/megatron/ there.

Arguments have Megatron-LM's names, and switches have explicit values.  The model is a checkpoint on a hub.
"""

from __future__ import annotations

from autoplan.base.errors import refuse
from autoplan.frameworks.common.job import EnvironmentVariable, Job, Line, OptionGroup, Target
from autoplan.frameworks.common.option_table import Value
from autoplan.frameworks.common.rules import Rule, check_limits
from autoplan.frameworks.common.shared_rules import no_options_but, only
from autoplan.frameworks.hf_trainer.write import adapters_of, start_variables
from autoplan.frameworks.megatron_bridge.tuning import refused_of_fused
from autoplan.frameworks.megatron_lm.export import checked_parts, environment
from autoplan.frameworks.megatron_lm.rules import LIMITS as OF_MEGATRON
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.frameworks.megatron_lm.table import Part, arguments_of, switched_otherwise
from autoplan.frameworks.ms_swift.options import BATCHINGS, MEGATRON_DEFAULTS, MEGATRON_NAMES, NOT_ITS, WRITTEN_NAMES
from autoplan.spec.enums import (
    AttentionKernel,
    CodedEnum,
    ContextParallelKind,
    Dispatcher,
    GradType,
    Offload,
    Precision,
    RankOrder,
    Sharding,
)
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.lengths import Batching
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.training import TrainingSpec

NAME = "ms-swift"
_ARGUMENTS = "arguments/megatron_args.py"
_NAMES = {name: swift_name for swift_name, name in MEGATRON_NAMES.items()} | WRITTEN_NAMES
_TRAINING: tuple[dict[str, Value], ...] = (
    {"weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0},
    {"eval_iters": 0, "logging_steps": 1, "no_save_optim": True, "no_save_rng": True},
)


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job of `megatron sft` on every node (swift/cli/main.py), with an installed ms-swift."""
    *_, plan_part = checked_parts(plan_file, NAME, RULES, OF_MEGATRON)
    _check(plan_file)
    data = [["--use_hf", "true", "--dataset", "yahma/alpaca-cleaned"]]
    return Job(
        framework=NAME,
        environment=_environment(plan_file),
        variables=start_variables(plan_file),
        program="-m swift.cli._megatron.sft",
        groups=(
            _group("PLAN", "The plan, and what differs otherwise from how it is priced.", _plan(plan_part, plan_file)),
            _group("TUNING", "What is trained, and how samples become sequences.", _tuning(plan_file)),
            _group("TRAINING", "Yours to choose.", [_learning_rates(plan_file), *_TRAINING]),
        ),
        replaceable=OptionGroup(
            name="DATA", note="DATA_ARGS='--dataset ...' in the environment replaces it.", lines=tuple(data)
        ),
        trailing=('--model "$BASE_MODEL"', '--train_iters "$STEPS"'),
    )


def _group(name: str, note: str, tables: list[dict[str, Value]]) -> OptionGroup:
    return OptionGroup(name=name, note=note, lines=tuple(_words(table) for table in tables if table))


def _words(table: dict[str, Value]) -> Line:
    words: Line = []
    for name, value in table.items():
        values = value if isinstance(value, list) else [str(value).lower() if isinstance(value, bool) else value]
        words += [f"--{_NAMES.get(name, name)}", *map(str, values)]
    return words


def _plan(part: Part, plan_file: PlanFile) -> list[dict[str, Value]]:
    """Return the arguments of the plan, line by line, including those whose default would be another plan."""
    lines = [arguments_of([Part(part.name, part.note, (line,))], plan_file) for line in part.lines]
    tables = [{name: value for name, value in line.items() if name not in NOT_ITS} for line in lines]
    written = {name for table in tables for name in table}
    silent: dict[str, Value] = {} if "recompute_granularity" in written else {"recompute_granularity": "none"}
    switches = switched_otherwise(part.lines, MEGATRON_DEFAULTS, arguments_of([part], plan_file))
    return [*tables, _layers(plan_file), silent, switches]


def _layers(plan_file: PlanFile) -> dict[str, Value]:
    """Return what Megatron-LM's exporter writes with the model, and the layers that a checkpoint does not define."""
    model, table = plan_file.model, dict[str, Value]()
    if model.moe is not None:
        table |= {"moe_grouped_gemm": True, "moe_permute_fusion": True}
    if plan_file.best.plan.dispatcher == Dispatcher.DEEPEP:
        table["moe_enable_deepep"] = True
    if model.attention_sinks:  # model/utils.py:17
        table["attention_backend"] = "fused"
    if model.num_mtp_layers:
        table["mtp_num_layers"] = model.num_mtp_layers
    return table


def _batching(training: TrainingSpec) -> Batching:
    """Return how samples form sequences: as planned, or packed if all sequences have one length."""
    return training.batching if training.lengths is not None else "packed"


def _tuning(plan_file: PlanFile) -> list[dict[str, Value]]:
    training = plan_file.training
    sequences = {"max_length": training.seq_len, **BATCHINGS[_batching(training)]}
    if (tuning := adapters_of(training)) is None:
        return [{"tuner_type": "full"}, sequences]
    scale: dict[str, Value] = {"lora_rank": tuning.rank or 0, "lora_alpha": tuning.alpha or 0}
    adapters = {"tuner_type": "lora", **scale}
    return [adapters | {"lora_dropout": tuning.dropout}, {"target_modules": list(tuning.targets)}, sequences]


def _learning_rates(plan_file: PlanFile) -> dict[str, Value]:
    lr, min_lr = ("1e-4", "1e-5") if adapters_of(plan_file.training) else ("1e-5", "1e-6")
    return {"lr": lr, "min_lr": min_lr, "lr_decay_style": "cosine"}


def _environment(plan_file: PlanFile) -> tuple[EnvironmentVariable, ...]:
    """Return the variables of Megatron-LM; the default of one hardware queue is refused by Megatron-FSDP."""
    return tuple(
        EnvironmentVariable(name=variable.name, value=variable.value or "32", note=variable.note)
        for variable in environment(plan_file)
    )


# -- what the target does not support ---------------------------------------------------------------------------------


def _only(axis: str, *words: CodedEnum) -> Rule:
    """Return the rule that an option has one of the values that can be written."""
    return only(axis, *words, why=f"use {' or '.join(map(repr, words))}", source=_ARGUMENTS)


_TAKEN = (
    *(
        "dispatcher",
        "shared_expert_overlap",
        "rope_fusion",
        "gradient_accumulation_fusion",
        "cross_entropy_fusion",
        "token_dropping",
    ),
    *("fp8_scaling", "narrow_params", "grad_dtype", "main_weights", "moment_dtype"),
)
LIMITS = (
    _only("dispatcher", Dispatcher.ALL_TO_ALL, Dispatcher.DEEPEP),
    _only("rank_order", RankOrder.DP_BEFORE_PP),
    _only("cp_kind", ContextParallelKind.RING, ContextParallelKind.ALL_TO_ALL),
    _only("offload", Offload.NONE),
    *no_options_but(_TAKEN, "megatron-lm", _ARGUMENTS),
    Rule(
        source="utils/megatron_lm_utils.py:70",
        holds=lambda s, b: (b.dp_replicate == 1) | (b.sharding == Sharding.NONE.code),
        text=lambda s, p: f"dp_replicate {p.dp_replicate} with {p.sharding}: shard over all replicas",
    ),
    Rule(
        source=f"{_ARGUMENTS}:1116",
        holds=lambda s, b: (b.grad_dtype != GradType.BF16.code) | (b.precision == Precision.FP16.code),
        text=lambda s, p: f"grad_dtype {p.grad_dtype!r} with precision {p.precision!r}: use fp32 or bf16_main",
    ),
    Rule(
        source=_ARGUMENTS,
        holds=lambda s, b: ~b.narrow_params | (b.precision != Precision.MXFP8.code),
        text=lambda s, p: f"narrow_params with precision {p.precision!r}: plan without them",
    ),
    Rule(
        source="model/utils.py:31",
        holds=lambda s, b: (b.attention != AttentionKernel.UNFUSED.code) | (_batching(s.training) == "padded"),
        text=lambda s, p: "attention 'unfused' of samples without padding: plan with flash",
    ),
)


def _check(plan_file: PlanFile) -> None:
    model, training = plan_file.model, plan_file.training
    check_limits(LIMITS, model, training, plan_file.best.plan, f"{NAME} has no option for")
    refusals = (
        *_refusals_of_model(model),
        (
            training.lengths is not None and training.batching not in BATCHINGS,
            f"batching {training.batching}: plan with {', '.join(BATCHINGS)}",
        ),
    )
    refuse(refusals, f"{NAME} cannot express ")


def _refusals_of_model(model: ModelSpec) -> tuple[tuple[bool, str], ...]:
    """Return the model parts that mcore-bridge (f020e47) does not read (src/mcore_bridge/config/parser.py)."""
    is_gpt_oss = model.clamped_activation
    return (
        (model.position_embedding != "rope", f"{model.position_embedding} positions of model {model.name!r}"),
        (model.norm != "rmsnorm", f"a norm other than RMSNorm of model {model.name!r}"),
        (not model.gated_mlp, f"an MLP without gate of model {model.name!r}"),
        (model.window is not None and not is_gpt_oss, f"the window of model {model.name!r}"),
    )


def _refused_tuning(finetuning: FineTuning) -> str:
    """Describe what the target cannot express of a fine-tuning; empty if it can express all of it."""
    return refused_of_fused(finetuning) or ("DoRA" if finetuning.dora else "")


TARGET = Target(
    name=NAME,
    title=NAME,
    rules=("megatron-lm", "unknown"),
    job=job,
    limits=(*RULES, *OF_MEGATRON, *LIMITS),
    refused_tuning=_refused_tuning,
)
