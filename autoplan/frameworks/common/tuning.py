"""Files of PEFT that carry a fine-tuning beside a launch file, for programs that hold a model of transformers."""

from __future__ import annotations

import json
from typing import Any

from autoplan.frameworks.common.job import File
from autoplan.frameworks.common.rules import Rule
from autoplan.spec.enums import MainWeights
from autoplan.spec.finetuning import ALL_LINEAR, BESIDE_TEXT, DEFAULT_TARGETS, FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile

ADAPTERS, QUANTIZED = "adapter_config.json", "quantization_config.json"
# Where nothing keeps PEFT from it.
ADAPTERS_IN_FP32 = Rule(
    source="peft/tuners/tuners_utils.py autocast_adapter_dtype",
    holds=lambda s, b: (b.main_weights == MainWeights.FP32.code) | (not s.training.has_adapters),
    text=lambda s, p: f"main_weights {p.main_weights} of adapters: PEFT makes fp32 of them, leave it out",
)


def refused_by_peft(finetuning: FineTuning) -> str:
    """Say what of a fine-tuning the files of PEFT cannot carry; empty where they carry all of it."""
    if finetuning.frozen:
        return f"a frozen {' and '.join(finetuning.frozen)} beside trained weights"
    return _refused_weights(finetuning)


def _refused_weights(finetuning: FineTuning) -> str:
    is_own = finetuning.quantization == "int4"
    return "weights in int4 (GPTQ and AWQ checkpoints have their own settings)" if is_own else ""


def refused_of_own_programs(finetuning: FineTuning) -> str:
    """Say what PEFT's LoraConfig cannot carry to a program of the user, which freezes parts itself."""
    return refused_targets(finetuning) or _refused_weights(finetuning)


def refused_targets(finetuning: FineTuning) -> str:
    """Say which modules with adapters are named beside all-linear; empty where none is."""
    if len(finetuning.targets) > 1 and ALL_LINEAR in finetuning.targets:
        return f"adapters on {', '.join(finetuning.targets)} ({ALL_LINEAR} stands alone)"
    return ""


def refused_by_lora_config(finetuning: FineTuning) -> str:
    """Say what of a fine-tuning PEFT's LoraConfig cannot carry, which expands all-linear where it stands alone.

    `_maybe_include_all_linear_layers` of peft/tuners/tuners_utils.py looks for a text that says so, not in lists.
    """
    return refused_targets(finetuning) or refused_by_peft(finetuning)


def peft_files(plan_file: PlanFile) -> tuple[File, ...]:
    """The files of a fine-tuning, none where all weights are trained."""
    finetuning = plan_file.training.finetuning
    if finetuning is None or not finetuning.has_adapters:
        return ()
    files = [File(name=ADAPTERS, text=json.dumps(_adapters(finetuning, plan_file.model), indent=2) + "\n")]
    if quantized := _quantized(finetuning, plan_file.best.plan.precision):
        files.append(File(name=QUANTIZED, text=json.dumps(quantized, indent=2) + "\n"))
    return tuple(files)


def peft_duties(plan_file: PlanFile) -> list[str]:
    """Duties of the program that reads the files, or freezes parts of its model."""
    if (finetuning := plan_file.training.finetuning) is not None and finetuning.frozen:
        return [f"freezes {' and '.join(finetuning.frozen)} (requires_grad_(False))"]
    names = [file.name for file in peft_files(plan_file)]
    loads = (
        [f"loads its model in the format of {QUANTIZED} (BitsAndBytesConfig.from_dict)"] if QUANTIZED in names else []
    )
    return (
        [*loads, f"puts the adapters of {ADAPTERS} on it (get_peft_model, LoraConfig.from_pretrained)"] if names else []
    )


def _adapters(finetuning: FineTuning, model: ModelSpec) -> dict[str, Any]:
    """PEFT's LoraConfig (peft/tuners/lora/config.py)."""
    targets: list[str] | None = list(finetuning.targets)
    if targets == list(DEFAULT_TARGETS) and (model.bidirectional or model.position_embedding == "relative"):
        targets = None  # whose modules have other names (T5, BERT): PEFT takes those that it knows
    return {
        "peft_type": "LORA",
        "task_type": _task_type(model),
        "r": finetuning.rank,
        "lora_alpha": finetuning.alpha,
        "lora_dropout": finetuning.dropout,
        "target_modules": ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        "exclude_modules": BESIDE_TEXT if model.stands_before_text else None,
        "use_dora": finetuning.dora,
        "modules_to_save": list(finetuning.saved_modules) or None,
        "bias": "none",
    }


def _task_type(model: ModelSpec) -> str | None:
    """Return PEFT's class of a model (peft/mapping.py); None is the one that takes any input, such as sound."""
    if model.cross_attention:
        return "SEQ_2_SEQ_LM" if model.encoder and model.encoder.embedding != "matrix" else None
    return None if model.bidirectional else "CAUSAL_LM"


def _quantized(finetuning: FineTuning, precision: str) -> dict[str, Any]:
    """BitsAndBytesConfig of transformers (transformers/utils/quantization_config.py)."""
    if finetuning.quantization == "int8":
        return {"quant_method": "bitsandbytes", "load_in_8bit": True}
    if finetuning.quantization not in ("nf4", "nf4-dq"):
        return {}
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(precision, "bfloat16")
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": finetuning.quantization == "nf4-dq",
        "bnb_4bit_compute_dtype": dtype,
        # Sharding mixes quantised weights with others of the type of the products (FSDP with QLoRA).
        "bnb_4bit_quant_storage": dtype,
    }
