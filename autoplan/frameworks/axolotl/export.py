"""Export of a plan to the YAML of axolotl (067b021); places are below src/axolotl/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoplan.frameworks.accelerate import options as accelerate
from autoplan.frameworks.accelerate.export import are_sharded, is_quantized, is_sharded, is_unmixed
from autoplan.frameworks.axolotl.options import (
    BATCHINGS,
    KEEPS,
    LENGTH,
    LORA_KERNELS,
    LOSSES,
    MESH,
    NAMES,
    OPTIMIZER_WORDS,
)
from autoplan.frameworks.common.option_table import written
from autoplan.frameworks.common.rules import Rule
from autoplan.frameworks.common.tuning import refused_by_peft
from autoplan.frameworks.hf_trainer.options import ACCUMULATION, MICRO_BATCH, RECOMPUTE, SKIPS, written_attention
from autoplan.frameworks.hf_trainer.write import (
    IN_16_BITS,
    adapters_of,
    all_linear_of_text,
    batching_of,
    written_fsdp,
    written_precision,
    yaml_target,
)
from autoplan.readers.model import hub_name
from autoplan.spec.enums import AttentionKernel, MainWeights, Sharding
from autoplan.spec.finetuning import ALL_LINEAR, FineTuning, text_pattern
from autoplan.spec.lengths import Batching
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.preference import Preference
from autoplan.spec.training import TrainingSpec
from autoplan.spec.workload import Workload

_VALIDATION = "utils/schemas/validation.py"
# Datasets from its examples by objective: the next token, which answer is better (DPO), a score (reward model).
_DATASETS = {
    None: {"path": "tatsu-lab/alpaca", "type": "alpaca"},
    "dpo": {"path": "Intel/orca_dpo_pairs", "type": "chatml.intel", "split": "train"},
    "reward": {"path": "argilla/distilabel-intel-orca-dpo-pairs", "type": "bradley_terry.chat_template"},
}
# Of samples with images (docs/multimodal.qmd).
_OF_IMAGES = {"path": "HuggingFaceH4/llava-instruct-mix-vsft", "type": "chat_template", "split": "train"}
_WITH_IMAGES = {"processor_type": "AutoProcessor", "skip_prepare_dataset": True, "remove_unused_columns": False}


def _table(plan_file: PlanFile) -> dict[str, Any]:
    plan, training = plan_file.best.plan, plan_file.training
    arguments = written((MICRO_BATCH, ACCUMULATION, RECOMPUTE), plan_file)
    tuning = adapters_of(training)
    has_images = plan_file.model.stands_before_text
    dataset = _DATASETS[training.preference.loss if training.preference else None]
    return {
        "base_model": hub_name(plan_file.model),
        **(_WITH_IMAGES if has_images else {}),
        "datasets": [_OF_IMAGES if has_images else dataset],
        **(_preference(training.preference) if training.preference else {}),
        LENGTH: training.seq_len,
        **BATCHINGS[_batching(plan_file)],
        **{NAMES.get(key, key): value for key, value in arguments.items()},
        **written_precision(plan),
        **({"bf16": "full"} if is_unmixed(plan) else {}),
        **({KEEPS: False} if tuning and plan.main_weights == MainWeights.BF16 else {}),
        "attn_implementation": written_attention(plan),
        **{
            key: value
            for name, (plugin, kind) in LOSSES.items()
            for key, value in (("plugins", [plugin]), (name, True))
            if plan.chunked_loss == kind
        },
        NAMES["optim"]: OPTIMIZER_WORDS[training.optimizer],
        "lr_scheduler": "cosine",
        "learning_rate": 2e-4 if tuning else 2e-5,
        **(_adapters(tuning, plan_file.model) if tuning else {}),
        **(_sharding(plan_file) if is_sharded(plan) else {}),
        "output_dir": "./outputs",
    }


def _batching(plan_file: PlanFile) -> Batching:
    """Return how samples form sequences: as planned; if all sequences have one length, in any supported way."""
    training, plan = plan_file.training, plan_file.best.plan
    is_free = training.lengths is None and training.document_len is None and training.preference is None
    is_free = is_free and not plan_file.model.stands_before_text
    splits_packs = plan.cp > 1 and plan.micro_batch > 1
    return "full" if is_free and (plan.attention not in SKIPS or splits_packs) else batching_of(plan_file)


def _preference(preference: Preference) -> dict[str, Any]:
    if preference.loss == "reward":
        return {"reward_model": True, "model_type": "AutoModelForSequenceClassification", "num_labels": 1}
    return {"rl": "dpo", "precompute_ref_log_probs": preference.reference == "none"}


def _adapters(finetuning: FineTuning, model: ModelSpec) -> dict[str, Any]:
    """Return the adapter settings (utils/schemas/peft.py); axolotl's own LoRA kernels are not modelled, so off."""
    targets: list[str] | str = [name for name in finetuning.targets if name != ALL_LINEAR]
    if model.stands_before_text:
        targets = text_pattern(targets)
    in_4bit = finetuning.quantization == "nf4-dq"
    settings = {
        "adapter": "qlora" if in_4bit else "lora",
        "load_in_4bit": in_4bit,
        "load_in_8bit": finetuning.quantization == "int8",
        "lora_r": finetuning.rank,
        "lora_alpha": finetuning.alpha,
        "lora_dropout": finetuning.dropout,
        "lora_target_linear": ALL_LINEAR in finetuning.targets,
        "lora_target_modules": targets or None,
        "lora_modules_to_save": list(finetuning.saved_modules) or None,
        "peft_use_dora": finetuning.dora,
        **dict.fromkeys(LORA_KERNELS, False),
    }
    return {key: value for key, value in settings.items() if value is not None}


def _sharding(plan_file: PlanFile) -> dict[str, Any]:
    """Return the mesh and the FSDP2 section; recomputation is set by gradient_checkpointing, not here."""
    degrees = {key: degree for key, degree in written(MESH, plan_file).items() if degree > 1}
    config = written_fsdp(plan_file, accelerate.RECOMPUTE)
    return {**degrees, "fsdp_version": config.pop("version"), "fsdp_config": config}


# -- what the target does not support ---------------------------------------------------------------------------------


def _is_dpo(training: TrainingSpec) -> bool:
    return training.preference is not None and training.preference.loss == "dpo"


def _is_packed(workload: Workload) -> bool:
    """Return whether the sample lengths are known and samples are packed."""
    training = workload.training
    is_known = training.lengths is not None and training.batching == "packed"
    return is_known or training.document_len is not None


LIMITS = (
    IN_16_BITS,
    Rule(
        source="utils/config/__init__.py:192",
        holds=lambda s, b: (b.main_weights == MainWeights.BF16.code) | s.training.has_adapters | are_sharded(b),
        text=lambda s, p: (
            f"main_weights {p.main_weights} with sharding {p.sharding} over dp_shard {p.dp_shard}: it holds in 16 bits "
            "what FSDP does not shard, plan with main_weights bf16"
        ),
    ),
    Rule(
        source=f"{_VALIDATION}:1655",
        holds=lambda s, b: (b.cp == 1) | (b.attention != AttentionKernel.UNFUSED.code),
        text=lambda s, p: f"cp {p.cp} with unfused attention: use flash",
    ),
    Rule(
        source=f"{_VALIDATION}:1661",
        holds=lambda s, b: (b.cp == 1) | (b.micro_batch == 1) | (not _is_packed(s)),
        text=lambda s, p: f"cp {p.cp} with packed samples and micro_batch {p.micro_batch}: use micro_batch 1",
    ),
    Rule(
        source=f"{_VALIDATION}:1078",
        holds=lambda s, b: (b.sharding == Sharding.NONE.code) | (not _is_dpo(s.training)) | (not is_quantized(s)),
        text=lambda s, p: f"{p.sharding} of quantised weights trained by preferences: use sharding none",
    ),
)


def _refusals(training: TrainingSpec, model: ModelSpec) -> Iterator[tuple[bool, str]]:
    preference = training.preference
    yield model.stands_before_text and preference is not None, "preferences of samples with images"
    yield all_linear_of_text(training, model)
    yield (
        adapters_of(training) is not None and preference is not None and preference.reference == "copy",
        "a copy as the reference of adapters: plan with reference base",
    )
    yield (  # core/builders/rl.py does not pass padding options on
        _is_dpo(training) and training.lengths is not None and training.batching != "padded",
        f"batching {training.batching} of preferences: plan with padded",
    )


def _refused_tuning(finetuning: FineTuning) -> str:
    """Describe what the YAML cannot express of a fine-tuning; constants are always quantised (loaders/model.py:718)."""
    if finetuning.quantization == "nf4":
        return "weights in nf4 without double quantisation (it takes nf4-dq)"
    return refused_by_peft(finetuning)


TARGET = yaml_target(
    "axolotl",
    "axolotl",
    program="-m axolotl.cli.train",  # as `axolotl train --launcher torchrun` does (cli/utils/train.py:207)
    words='--base_model "$BASE_MODEL" --max_steps "$STEPS"',
    yours="datasets, learning_rate and whatever else does not affect the time or memory of a step.",
    table=_table,
    limits=LIMITS,
    batchings=BATCHINGS,
    refusals=_refusals,
    refused_tuning=_refused_tuning,
    optimizers=OPTIMIZER_WORDS,
)
