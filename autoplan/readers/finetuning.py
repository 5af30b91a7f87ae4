"""Fine-tuning from the command line, PEFT's adapter_config.json, or YAML of axolotl, LLaMA-Factory and TRL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoplan.base.errors import InputError
from autoplan.base.files import decode, is_file, is_folder, parse_yaml, read_table, read_text
from autoplan.base.values import parse_count
from autoplan.readers.preference import of_rl, of_stage
from autoplan.spec.finetuning import (
    ALL_LINEAR,
    BESIDE_TEXT,
    DEFAULT_TARGETS,
    QUANTIZED_BYTES,
    FineTuning,
    Quantization,
    names_in,
)
from autoplan.spec.optimizers import OPTIMIZERS, OptimizerName
from autoplan.spec.preference import LOSSES, Preference, what_several_models_need

ADAPTER_CONFIG = "adapter_config.json"
_OF_ADAPTERS = ("r", "targets", "dropout", "quantize", "train")  # settings of all methods but full
METHODS = ("lora", "dora", "qlora", "qdora", "full")
# Settings of a file that are read here, or that do not affect sizes.
OF_LLAMA_FACTORY = (
    *("finetuning_type", "stage", "lora_rank", "lora_target", "lora_dropout", "use_dora", "quantization_bit"),
    *("double_quantization", "additional_target", "lora_alpha", "quantization_method", "use_rslora"),
)
OF_AXOLOTL = (
    *("adapter", "unfrozen_parameters", "peft_layers_to_transform", "lora_target_modules", "lora_target_linear"),
    *("load_in_4bit", "load_in_8bit", "lora_r", "lora_dropout", "peft_use_dora", "lora_modules_to_save", "lora_alpha"),
    "peft_use_rslora",
)
OF_TRL = (
    *("use_peft", "use_bnb_nested_quant", "lora_r", "lora_target_modules", "lora_dropout", "use_dora", "load_in_4bit"),
    *("load_in_8bit", "lora_modules_to_save", "lora_alpha", "bnb_4bit_quant_type", "lora_task_type", "use_rslora"),
)
# `optim` of TrainingArguments (OptimizerNames); the first name of an optimizer is the one written on export.
OPTIM: dict[str, OptimizerName] = {
    "adamw_torch": "adam",
    "adamw_torch_fused": "adam",
    "adamw_hf": "adam",
    "adamw_apex_fused": "adam",
    "adamw_anyprecision": "adam",
    "adamw_torch_npu_fused": "adam",
    "paged_adamw_32bit": "adam",
    "adamw_torch_8bit": "adam8bit",
    "adamw_bnb_8bit": "adam8bit-bnb",
    "adamw_8bit": "adam8bit-bnb",
    "paged_adamw_8bit": "adam8bit-bnb",
    "adamw_torch_4bit": "adam4bit",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
    "sgd": "sgd",
}
# Optimizers implemented by the programs themselves (axolotl/utils/schemas/enums.py, CustomSupportedOptimizers).
OTHER_OPTIM: dict[str, OptimizerName] = {"muon": "muon", "ao_adamw_8bit": "adam8bit", "ao_adamw_4bit": "adam4bit"}
_OPTIMIZER_KEYS = ("optim", "optimizer")  # of TrainingArguments, of axolotl
PEFT_RANK, PEFT_ALPHA = 8, 8  # defaults of LoraConfig; its r is also that of LLaMA-Factory's lora_rank
TRL_RANK, TRL_ALPHA, TRL_DROPOUT = 16, 32, 0.05  # trl/trainer/model_config.py


def load_finetuning(text: str) -> FineTuning:
    """Return the fine-tuning described by a text: a method with its settings, or the path of a file.

    Examples of methods are "lora:r=16,targets=q_proj+v_proj" and "qlora:r=64,targets=all-linear,quantize=nf4-dq";
    settings are r, targets, dropout, quantize and train (embed_tokens, lm_head), and freeze for "full".  Files are
    PEFT's adapter_config.json, or its folder, and YAML of axolotl, LLaMA-Factory or TRL.
    """
    method, _, settings = text.partition(":")
    if method in METHODS:
        return _from_settings(method, settings)
    path = Path(text)
    if is_folder(path):
        path = path / ADAPTER_CONFIG
    if not is_file(path):
        raise InputError(
            f"--finetune {text[:60]!r}: write {', '.join(METHODS[:3])} or full, with settings such as lora:r=16, "
            f"or the path of {ADAPTER_CONFIG} or a YAML of axolotl, LLaMA-Factory or TRL"
        )
    if path.suffix == ".json":
        return _from_peft(read_table(path), str(path))
    return _from_yaml(_read_yaml(path), str(path))


def optimizer_named(word: str) -> str:
    """Return the optimizer for a name in PyTorch or `transformers`; unknown names are returned unchanged."""
    return {"adamw": "adam", **OPTIM, **OTHER_OPTIM}.get(word, word)


def optimizer_of(finetune: str | Path | FineTuning | None) -> OptimizerName | None:
    """Return the optimizer of a fine-tuning's YAML, or None; raises InputError if it is not priced."""
    path = Path(finetune) if isinstance(finetune, str | Path) else None
    if path is None or path.suffix not in (".yaml", ".yml") or not is_file(path):
        return None
    table = _read_yaml(path)
    for key in _OPTIMIZER_KEYS:
        if (word := table.get(key)) is not None:
            if (optimizer := (OPTIM | OTHER_OPTIM).get(str(word))) is None:
                raise InputError(
                    f"{path}: {key} {str(word)[:30]!r} is not priced: say one that is with --optimizer "
                    f"({', '.join(OPTIMIZERS)})"
                )
            return optimizer
    return None


def preference_of(
    finetune: str | Path | FineTuning | None, loss: str | None = None, reference: str | None = None
) -> Preference | None:
    """Return the preference loss from options or a YAML, or None; raises InputError if it is not priced."""
    path = Path(finetune) if isinstance(finetune, str | Path) else None
    preference = None
    if path is not None and path.suffix in (".yaml", ".yml") and is_file(path):
        table = _read_yaml(path)
        preference = of_rl(table, str(path)) if "base_model" in table else of_stage(table, str(path))
    if loss is None and reference is None:
        return preference
    if loss is None and preference is None:
        raise InputError(f"--reference {str(reference)[:20]!r} needs a preference loss: give --loss dpo too")
    if loss is not None and (needed := what_several_models_need(loss)):
        raise InputError(f"--loss {loss[:20]!r} is not priced, only {' and '.join(LOSSES)} are{needed}")
    table = {"loss": loss or (preference.loss if preference else None), "reference": reference}
    return decode(Preference, table, "preference loss")


def combined(
    finetune: str | Path | FineTuning | None,
    lora_rank: int | None = None,
    lora_targets: str | None = None,
    quantize: str | None = None,
) -> FineTuning | None:
    """Return the fine-tuning from all options of a problem together; None if none is set."""
    tuning = finetune if finetune is None or isinstance(finetune, FineTuning) else load_finetuning(str(finetune))
    changes: dict[str, Any] = {}
    if lora_rank is not None:
        changes["rank"] = lora_rank
    if lora_targets is not None:
        changes["targets"] = _names(lora_targets)
    if quantize is not None:
        changes["quantization"] = _quantization(quantize, "--quantize")
    if not changes:
        return tuning
    if tuning is None and lora_rank is None:
        flags = [
            flag for flag, value in (("--lora-targets", lora_targets), ("--quantize", quantize)) if value is not None
        ]
        raise InputError(f"{' and '.join(flags)}: give --lora-rank too, or --finetune")
    if tuning is not None and tuning.has_adapters and lora_rank not in (None, tuning.rank):
        raise InputError(f"--finetune says rank {tuning.rank}, --lora-rank {lora_rank}: leave one of them out")
    if tuning is not None and not tuning.has_adapters and "rank" in changes:
        raise InputError("--finetune trains all weights, --lora-rank adapters: leave one of them out")
    return replace(tuning, **changes) if tuning is not None else FineTuning(**changes)


def _names(text: str) -> tuple[str, ...]:
    """Return module names separated by commas or +."""
    return tuple(name.strip() for name in text.replace("+", ",").split(",") if name.strip())


def _quantization(text: str, option: str) -> Quantization:
    for quantization in ("none", *QUANTIZED_BYTES):
        if text == quantization:
            return quantization
    raise InputError(f"{option} {text[:40]!r}: must be one of none, {', '.join(QUANTIZED_BYTES)}")


def _from_settings(method: str, settings: str) -> FineTuning:
    table: dict[str, Any] = {}
    earlier: set[str] = set()
    if method != "full":
        table = {"rank": PEFT_RANK, "dora": "dora" in method}
    if method.startswith("q"):
        table |= {"targets": (ALL_LINEAR,), "quantization": "nf4-dq"}  # as in QLoRA (arXiv:2305.14314)
    for setting in settings.split(",") if settings else ():
        name, sign, value = setting.partition("=")
        name = name.strip()
        where = f"--finetune {method}:{name}"
        if not sign:
            raise InputError(f"{where}: write NAME=VALUE, such as r=16")
        if name in earlier:
            raise InputError(f"{where} is given twice: leave one of them out")
        earlier.add(name)
        if method == "full" and name in _OF_ADAPTERS:
            raise InputError(f"{where} needs adapters, and full has none: leave it out, or write lora")
        if name == "r":
            table["rank"] = parse_count(value, where)
        elif name == "targets":
            table["targets"] = _names(value)
        elif name == "dropout":
            table["dropout"] = _number(value, where)
        elif name == "quantize":
            table["quantization"] = _quantization(value, where)
        elif name == "train":
            table["saved_modules"] = _names(value)
        elif name == "freeze":
            table["frozen"] = _names(value)
        else:
            raise InputError(f"{where}: settings are r, targets, dropout, quantize, train and freeze")
    return FineTuning(**table)


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{where}={text[:20]!r}: must be a number") from None


# -- files ------------------------------------------------------------------------------------------------------------


def _read_yaml(path: Path) -> dict[str, Any]:
    table = parse_yaml(read_text(path), path)
    if not isinstance(table, dict):
        raise InputError(f"{path}: must hold a table of settings")
    return table


def _decoded(table: dict[str, Any], where: str) -> FineTuning:
    """Decode the fine-tuning from a table of fields, ignoring those that are None."""
    return decode(FineTuning, {key: value for key, value in table.items() if value is not None}, where)


def _list(value: Any, where: str) -> list[str] | None:
    if value is None or value == []:
        return None
    if isinstance(value, str):
        return list(names_in(value) or _names(value))
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where}: must be a list of names of modules")
    return value


def _refuse(table: Mapping[str, Any], keys: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raise an error for settings that change the training and are not priced; `keys` has the harmless values."""
    for key, harmless in keys.items():
        if (value := table.get(key)) is not None and value not in harmless:
            raise InputError(f"{where}: {key} {str(value)[:40]!r} is not priced: leave it out")


def _from_peft(table: dict[str, Any], where: str) -> FineTuning:
    """Return the fine-tuning of PEFT's LoraConfig (peft/tuners/lora/config.py)."""
    if "peft_type" not in table:
        raise InputError(f"{where}: holds no peft_type, as PEFT's {ADAPTER_CONFIG} does")
    if table["peft_type"] != "LORA":
        raise InputError(f"{where}: peft_type {str(table['peft_type'])[:30]!r} is not priced: only LORA is")
    nothing: tuple[Any, ...] = ([], {}, "", False)
    keys = ("layers_to_transform", "rank_pattern", "target_parameters", "trainable_token_indices", "exclude_modules")
    # Adapters are priced in the text model, not beside it.
    _refuse(
        table, dict.fromkeys(keys, nothing) | {"bias": ("none",), "exclude_modules": (*nothing, BESIDE_TEXT)}, where
    )
    targets = table.get("target_modules")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise InputError(f"{where}: target_modules is a pattern, which is not read: list the modules, or {ALL_LINEAR}")
    return _decoded(
        {
            "rank": table.get("r", PEFT_RANK),
            "alpha": table.get("lora_alpha", PEFT_ALPHA),
            "targets": _list(targets, f"{where}: target_modules") or list(DEFAULT_TARGETS),
            "dropout": table.get("lora_dropout"),
            "dora": table.get("use_dora"),
            "saved_modules": _list(table.get("modules_to_save"), f"{where}: modules_to_save"),
        },
        where,
    )


def _from_yaml(table: dict[str, Any], where: str) -> FineTuning:
    if "finetuning_type" in table or "stage" in table:
        return of_llama_factory(table, where)
    if "base_model" in table or "adapter" in table:
        return of_axolotl(table, where)
    if "model_name_or_path" in table or "use_peft" in table:
        return of_trl(table, where)
    raise InputError(
        f"{where}: neither of axolotl (base_model), of LLaMA-Factory (finetuning_type) nor of TRL (model_name_or_path)"
    )


def _loaded_in(table: Mapping[str, Any], four: Quantization | None, where: str) -> Quantization | None:
    """Return the number format of the weights from load_in_4bit (`four` if set) and load_in_8bit."""
    if four and table.get("load_in_8bit"):
        raise InputError(f"{where}: load_in_8bit together with 4-bit weights: leave one of them out")
    return "int8" if table.get("load_in_8bit") else four


def of_axolotl(table: Mapping[str, Any], where: str) -> FineTuning:
    """Return the fine-tuning of axolotl (src/axolotl/utils/schemas/peft.py, loaders/model.py: double quantisation)."""
    adapter = table.get("adapter")
    if adapter in (None, "", False):
        _refuse(table, {"unfrozen_parameters": ([],)}, where)
        return FineTuning()
    if adapter not in ("lora", "qlora"):
        raise InputError(f"{where}: adapter {str(adapter)[:30]!r} is not priced: only lora and qlora are")
    _refuse(table, {"peft_layers_to_transform": ([],)}, where)
    targets = _list(table.get("lora_target_modules"), f"{where}: lora_target_modules") or []
    if table.get("lora_target_linear"):
        targets = [*targets, ALL_LINEAR]
    is_4bit = table.get("load_in_4bit", adapter == "qlora")
    return _decoded(
        {
            "rank": table.get("lora_r", PEFT_RANK),
            "alpha": table.get("lora_alpha"),
            "targets": targets or list(DEFAULT_TARGETS),
            "dropout": table.get("lora_dropout"),
            "dora": table.get("peft_use_dora"),
            "quantization": _loaded_in(table, "nf4-dq" if is_4bit else None, where),
            "saved_modules": _list(table.get("lora_modules_to_save"), f"{where}: lora_modules_to_save"),
        },
        where,
    )


def of_llama_factory(table: Mapping[str, Any], where: str) -> FineTuning:
    """Return the fine-tuning of LLaMA-Factory (src/llamafactory/hparams/finetuning_args.py and model_args.py)."""
    kind = table.get("finetuning_type", "lora")
    of_stage(table, where)  # raises an error for unpriced stages
    if kind == "full":
        return FineTuning()
    if kind != "lora":
        raise InputError(f"{where}: finetuning_type {str(kind)[:20]!r} is not priced: only lora and full are")
    bits = table.get("quantization_bit")
    if bits not in (None, 4, 8):
        raise InputError(f"{where}: quantization_bit {bits} is not priced: only 4 and 8 are")
    four = "nf4-dq" if table.get("double_quantization", True) else "nf4"
    target = table.get("lora_target", "all")
    return _decoded(
        {
            "rank": table.get("lora_rank", PEFT_RANK),
            "alpha": table.get("lora_alpha"),
            "targets": [ALL_LINEAR] if target == "all" else _list(target, f"{where}: lora_target"),
            "dropout": table.get("lora_dropout"),
            "dora": table.get("use_dora"),
            "quantization": {4: four, 8: "int8"}.get(bits or 0),
            "saved_modules": _list(table.get("additional_target"), f"{where}: additional_target"),
        },
        where,
    )


def of_trl(table: Mapping[str, Any], where: str) -> FineTuning:
    """Return the fine-tuning of TRL's ModelConfig (trl/trainer/model_config.py)."""
    if not table.get("use_peft"):
        return FineTuning()
    four: Quantization = "nf4-dq" if table.get("use_bnb_nested_quant") else "nf4"
    return _decoded(
        {
            "rank": table.get("lora_r", TRL_RANK),
            "alpha": table.get("lora_alpha", TRL_ALPHA),
            "targets": _list(table.get("lora_target_modules"), f"{where}: lora_target_modules")
            or list(DEFAULT_TARGETS),
            "dropout": table.get("lora_dropout", TRL_DROPOUT),
            "dora": table.get("use_dora"),
            "quantization": _loaded_in(table, four if table.get("load_in_4bit") else None, where),
            "saved_modules": _list(table.get("lora_modules_to_save"), f"{where}: lora_modules_to_save"),
        },
        where,
    )
