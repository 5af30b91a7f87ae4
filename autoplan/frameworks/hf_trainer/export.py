"""Export of a plan to the arguments of TRL's programs (f2cd577), which include those of the Trainer (5.24).

States are sharded by FSDP2, with its section among the arguments, or by DeepSpeed, with a file next to the script.
Places are below trl/.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from autoplan.frameworks.accelerate.export import is_sharded, loads_bf16
from autoplan.frameworks.accelerate.options import OFFLOAD
from autoplan.frameworks.accelerate.rules import RULES
from autoplan.frameworks.common.job import File, Job, Line, OptionGroup, Target
from autoplan.frameworks.common.option_table import Value, written
from autoplan.frameworks.common.shared_rules import only
from autoplan.frameworks.common.tuning import refused_by_lora_config
from autoplan.frameworks.deepspeed import export as deepspeed
from autoplan.frameworks.deepspeed.rules import RULES as OF_DEEPSPEED
from autoplan.frameworks.hf_trainer import write
from autoplan.frameworks.hf_trainer.options import (
    ACCUMULATION,
    BATCHINGS,
    CPU_OFFLOAD,
    LIGER,
    LIGERS_LOSS_ALONE,
    MICRO_BATCH,
    PRECISIONS,
    RECOMPUTE,
    WRITTEN_OPTIM,
    written_attention,
)
from autoplan.frameworks.hf_trainer.write import (
    adapters_of,
    all_linear_of_text,
    batching_of,
    check_expressible,
    start_variables,
    written_fsdp,
    written_precision,
)
from autoplan.spec.enums import ChunkedLoss
from autoplan.spec.finetuning import ALL_LINEAR, FineTuning, text_pattern
from autoplan.spec.lengths import Batching
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.training import TrainingSpec

JSON = "deepspeed.json"
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
# Programs and datasets from its examples by objective: the next token, which answer is better, a score.
_PROGRAMS = {
    None: ("sft", "trl-lib/Capybara"),
    "dpo": ("dpo", "trl-lib/ultrafeedback_binarized"),
    "reward": ("reward", "trl-lib/ultrafeedback_binarized"),
}
_OF_IMAGES = {None: "trl-lib/llava-instruct-mix", "dpo": "HuggingFaceH4/rlaif-v_formatted"}


def job(plan_file: PlanFile, version: str = "") -> Job:
    """Return the job that runs a program of TRL (scripts/)."""
    _check(plan_file)
    program, dataset = _PROGRAMS[loss := _loss(plan_file.training)]
    if plan_file.model.stands_before_text:
        dataset = _OF_IMAGES[loss]
    yours: dict[str, Value] = {
        "learning_rate": "2e-4" if adapters_of(plan_file.training) else "2e-5",
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "report_to": "none",
        "output_dir": "outputs",
    }
    return Job(
        framework="TRL",
        variables=start_variables(plan_file),
        program=f"-m trl.scripts.{program}",
        groups=(
            _group("PLAN", "The plan, and what differs otherwise from how it is priced.", _plan(plan_file)),
            _group("TUNING", "What is trained, and how samples become sequences.", _tuning(plan_file)),
            _group("TRAINING", "Yours to choose.", [yours]),
        ),
        replaceable=OptionGroup(
            name="DATA",
            note="DATA_ARGS='--dataset_name ...' in the environment replaces it.",
            lines=(["--dataset_name", dataset],),
        ),
        trailing=(
            *(('--deepspeed "$HERE/deepspeed.json"',) if _takes_deepspeed(plan_file) else ()),
            '--model_name_or_path "$BASE_MODEL"',
            '--max_steps "$STEPS"',
        ),
        files=_files(plan_file),
    )


def _takes_deepspeed(plan_file: PlanFile) -> bool:
    return plan_file.framework.rules == "deepspeed"


def _files(plan_file: PlanFile) -> tuple[File, ...]:
    if not _takes_deepspeed(plan_file):
        return ()
    table = deepspeed.deepspeed_config(plan_file, deepspeed.TARGET.versions[0])
    return (File(name=JSON, text=json.dumps(table, indent=2) + "\n"),)


def _loss(training: TrainingSpec) -> str | None:
    return training.preference.loss if training.preference else None


def _group(name: str, note: str, tables: list[dict[str, Value]]) -> OptionGroup:
    return OptionGroup(name=name, note=note, lines=tuple(map(_words, filter(None, tables))))


def _words(table: Mapping[str, Value]) -> Line:
    """Return arguments as command-line words; a section is JSON, and a switch without a value has empty text."""
    words: Line = []
    for name, value in table.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(_word(item) for item in values if item != "")]
    return words


def _word(value: Value) -> str:
    return json.dumps(value) if isinstance(value, bool | dict) else str(value)


def _plan(plan_file: PlanFile) -> list[dict[str, Value]]:
    plan, training = plan_file.best.plan, plan_file.training
    recompute = written((RECOMPUTE,), plan_file)
    offload = written((CPU_OFFLOAD,), plan_file)
    shards = not _takes_deepspeed(plan_file) and is_sharded(plan)
    return [
        written((MICRO_BATCH, ACCUMULATION), plan_file),
        _precision(plan_file),
        # FSDP's own recomputation does not gather a layer again (transformers/training_args.py:2796).
        dict.fromkeys(recompute, False) if shards else recompute,
        {"fsdp": "", "fsdp_config": written_fsdp(plan_file, OFFLOAD) | offload} if shards else {},
        {"optim": WRITTEN_OPTIM[training.optimizer]},
        {"attn_implementation": written_attention(plan)},
        {LIGER: True, "liger_kernel_config": LIGERS_LOSS_ALONE} if plan.chunked_loss == ChunkedLoss.LIGER else {},
        {"loss_type": "nll"} if training.preference is None else {},  # other losses keep only a part of the logits
    ]


def _precision(plan_file: PlanFile) -> dict[str, Value]:
    """Return the mixed-precision switches and the data type of the model: TRL's default is fp32."""
    plan = plan_file.best.plan
    if _takes_deepspeed(plan_file):
        switches: dict[str, Value] = {name: kind == plan.precision for name, kind in PRECISIONS.items()}
        is_narrow = False
    else:
        switches, is_narrow = written_precision(plan), loads_bf16(plan)
    if adapters_of(plan_file.training) is not None:
        return switches | {"dtype": DTYPES[plan.precision]}
    return switches | ({"dtype": DTYPES["bf16"]} if is_narrow else {})


def _tuning(plan_file: PlanFile) -> list[dict[str, Value]]:
    training = plan_file.training
    batching = {} if training.preference and batching_of(plan_file) == "padded" else BATCHINGS[batching_of(plan_file)]
    sequences: dict[str, Value] = {"max_length": training.seq_len, **batching}
    if training.preference and training.preference.loss == "dpo" and training.preference.reference == "none":
        sequences["precompute_ref_log_probs"] = True
    if (tuning := adapters_of(training)) is None:
        return [sequences]
    return [sequences, *_adapters(tuning, training, plan_file.model)]


def _adapters(tuning: FineTuning, training: TrainingSpec, model: ModelSpec) -> list[dict[str, Value]]:
    """Return the adapter arguments (trainer/model_config.py)."""
    rank = tuning.rank or 0
    tables: list[dict[str, Value]] = [
        {"use_peft": True, "lora_r": rank, "lora_alpha": tuning.alpha, "lora_dropout": tuning.dropout},
        {"lora_target_modules": [text_pattern(tuning.targets)] if model.stands_before_text else list(tuning.targets)},
        {"lora_modules_to_save": list(tuning.saved_modules)} if tuning.saved_modules else {},
        {"use_dora": True} if tuning.dora else {},
        {"lora_task_type": "SEQ_CLS"} if _loss(training) == "reward" else {},
    ]
    if tuning.quantization == "int8":
        tables.append({"load_in_8bit": True})
    elif tuning.quantization != "none":
        doubled = tuning.quantization == "nf4-dq"
        tables.append({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": doubled})
        tables.append({"bnb_4bit_quant_storage": DTYPES[training.precision]})
    return tables


# -- what the target does not support ---------------------------------------------------------------------------------


_LOSSES = only(
    "chunked_loss", ChunkedLoss.NONE, ChunkedLoss.LIGER, why="use liger", source="transformers integrations/liger.py"
)
LIMITS = (*write.LIMITS, *deepspeed.LIMITS, _LOSSES)


def _check(plan_file: PlanFile) -> None:
    training = plan_file.training
    preference, batching = training.preference, batching_of(plan_file)
    takes_deepspeed = _takes_deepspeed(plan_file)
    has_images = plan_file.model.stands_before_text
    refusals = (
        (has_images and preference is not None and preference.loss == "reward", "a reward model of images"),
        (
            has_images and preference is not None and preference.reference == "none",
            "reference none of preferences with images: plan with reference copy or base",
        ),
        all_linear_of_text(training, plan_file.model),
        (
            adapters_of(training) is not None and preference is not None and preference.reference == "copy",
            "a copy as the reference of adapters: plan with reference base",
        ),
        (
            preference is not None and training.lengths is not None and not _pads(preference.loss, batching),
            f"batching {batching} of preferences: plan with padded",
        ),
        (
            takes_deepspeed and training.optimizer not in deepspeed.TARGET.optimizers,
            f"optimizer {training.optimizer!r} with DeepSpeed: take one of {', '.join(deepspeed.TARGET.optimizers)}",
        ),
    )
    rules = OF_DEEPSPEED if takes_deepspeed else RULES
    check_expressible(plan_file, "the Trainer", LIMITS, BATCHINGS, refusals, rules=rules)


def _pads(loss: str, batching: Batching) -> bool:
    """Return whether a program supports this batching of pairs; rewards are padded (trainer/reward_config.py)."""
    return batching == "padded" or (loss == "dpo" and batching == "unpadded")


def _refused_tuning(finetuning: FineTuning) -> str:
    """Describe what the arguments cannot express of a fine-tuning; empty if they express all of it."""
    if len(finetuning.targets) == 1 and finetuning.targets != (ALL_LINEAR,):
        return f"adapters on {finetuning.targets[0]} alone (PEFT takes a single name for a pattern: name two or more)"
    return refused_by_lora_config(finetuning)


TARGET = Target(
    name="hf-trainer",
    title="the Trainer of transformers",
    rules=("accelerate", "deepspeed"),
    job=job,
    limits=LIMITS,
    refused_tuning=_refused_tuning,
    optimizers=tuple(WRITTEN_OPTIM),
)
