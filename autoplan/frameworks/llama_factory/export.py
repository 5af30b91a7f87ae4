"""Export of a plan to the YAML of LLaMA-Factory (ff6d4d1); places are below src/llamafactory/."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autoplan.frameworks.accelerate.export import is_sharded, loads_bf16
from autoplan.frameworks.accelerate.options import OFFLOAD, RECOMPUTE
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.shared_rules import only
from autoplan.frameworks.common.tuning import refused_by_peft
from autoplan.frameworks.hf_trainer.options import ACCUMULATION, MICRO_BATCH
from autoplan.frameworks.hf_trainer.write import (
    LIMITS,
    adapters_of,
    batching_of,
    written_fsdp,
    written_precision,
    yaml_target,
)
from autoplan.frameworks.llama_factory.options import (
    BATCHINGS,
    FREEZES,
    KERNEL_WORDS,
    LENGTH,
    NO_RECOMPUTE,
    OPTIMIZER_SETTINGS,
    PURE,
)
from autoplan.readers.model import hub_name
from autoplan.spec.enums import ChunkedLoss, Offload, Sharding
from autoplan.spec.finetuning import ALL_LINEAR, ENCODER, FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.training import TrainingSpec

# Stage from its examples by objective (the next token, which answer is better, a score), and datasets of text, images
# and sound.
_STAGES = {
    None: ("sft", "alpaca_en_demo", "mllm_demo", "mllm_audio_demo"),
    "dpo": ("dpo", "dpo_en_demo", "rlhf_v", ""),
    "reward": ("rm", "dpo_en_demo", "rlhf_v", ""),
}


def _table(plan_file: PlanFile) -> dict[str, Any]:
    plan, training = plan_file.best.plan, plan_file.training
    stage, *datasets = _STAGES[training.preference.loss if training.preference else None]
    encoder = plan_file.model.any_encoder
    dataset = datasets[0 if encoder is None else 2 if encoder.sound else 1]
    tuning = adapters_of(training)
    freezes = training.finetuning is not None and not training.finetuning.trains(ENCODER)
    return {
        "model_name_or_path": hub_name(plan_file.model),
        "stage": stage,
        "do_train": True,
        **(_adapters(tuning) if tuning else {"finetuning_type": "full"}),
        **(dict.fromkeys(FREEZES, freezes) if encoder else {}),
        "dataset": dataset,
        "dataset_dir": "REMOTE:llamafactory/demo_data",
        LENGTH: training.seq_len,
        **BATCHINGS[batching_of(plan_file)],
        **written((MICRO_BATCH, ACCUMULATION, NO_RECOMPUTE), plan_file),
        **written_precision(plan),
        **({PURE: True} if loads_bf16(plan) else {}),
        "flash_attn": KERNEL_WORDS[plan.attention],
        **OPTIMIZER_SETTINGS[training.optimizer],
        "lr_scheduler_type": "cosine",
        "learning_rate": 2e-4 if tuning else 2e-5,
        **(_sharding(plan_file) if is_sharded(plan) else {}),
        "logging_steps": 1,
        "report_to": "none",
        "output_dir": "outputs",
    }


def _adapters(finetuning: FineTuning) -> dict[str, Any]:
    """Return the adapter settings (hparams/finetuning_args.py, hparams/model_args.py); "all" includes other names."""
    bits = {"none": None, "int8": 8}.get(finetuning.quantization, 4)
    settings = {
        "finetuning_type": "lora",
        "lora_rank": finetuning.rank,
        "lora_alpha": finetuning.alpha,
        "lora_dropout": finetuning.dropout,
        "lora_target": "all" if ALL_LINEAR in finetuning.targets else ",".join(finetuning.targets),
        "additional_target": ",".join(finetuning.saved_modules) or None,
        "use_dora": finetuning.dora,
        "quantization_bit": bits,
        "quantization_method": "bnb" if bits else None,
        "double_quantization": finetuning.quantization == "nf4-dq" if bits == 4 else None,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _sharding(plan_file: PlanFile) -> dict[str, Any]:
    """Return the FSDP2 settings, as accelerate launch would set them (recomputation: model_utils/checkpointing.py)."""
    plan = plan_file.best.plan
    strategy = "full_shard" if plan.sharding == Sharding.ZERO3 else "shard_grad_op"
    words = [strategy, "auto_wrap", *(["offload"] if plan.offload == Offload.PARAMETERS else [])]
    # Before transformers 5 the key for offloading is another one, with the same value.
    section = written_fsdp(plan_file, RECOMPUTE, OFFLOAD)
    return {"fsdp": " ".join(words), "fsdp_config": section, "use_reentrant_gc": False}


def _refusals(training: TrainingSpec, model: ModelSpec) -> Iterator[tuple[bool, str]]:
    yield (
        training.preference is not None and model.any_encoder is not None and model.any_encoder.sound,
        "preferences on sound, of which it has no data",
    )
    preference, runs = training.preference, "copy" if adapters_of(training) is None else "base"
    yield (  # train/trainer_utils.py:136
        preference is not None and preference.loss == "dpo" and preference.reference != runs,
        f"a reference {preference and preference.reference}: plan with reference {runs}",
    )


def _refused_tuning(finetuning: FineTuning) -> str:
    """Describe what the YAML cannot express of a fine-tuning; what stands before the text model may be frozen."""
    return refused_by_peft(replace(finetuning, frozen=tuple(end for end in finetuning.frozen if end != ENCODER)))


_NO_PIECES = only(
    "chunked_loss",
    ChunkedLoss.NONE,
    why="its enable_liger_kernel replaces norms and activations, too: leave it out",
    source="model/model_utils/liger_kernel.py",
)
TARGET = yaml_target(
    "llama-factory",
    "LLaMA-Factory",
    program="-m llamafactory.launcher",  # as `llamafactory-cli train` does (launcher.py:85)
    words='model_name_or_path="$BASE_MODEL" max_steps="$STEPS"',
    yours="data, template, learning_rate and whatever else does not affect the time or memory of a step.",
    table=_table,
    limits=(*LIMITS, _NO_PIECES, only("attention", *KERNEL_WORDS, why="plan with flash2")),
    batchings=BATCHINGS,
    refusals=_refusals,
    refused_tuning=_refused_tuning,
    takes_sound=True,
    optimizers=OPTIMIZER_SETTINGS,
)
