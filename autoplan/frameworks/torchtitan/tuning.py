"""LoRA in torchtitan 0.3: adapters beside linear layers, all other weights frozen (torchtitan/components/lora.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.base.errors import InputError
from autoplan.spec.finetuning import ALL_LINEAR, FineTuning

CONVERTER = "LoRAConverter"
# Of layers with a matrix each for queries, keys and values, by names in PEFT; keys and values share a configuration.
MODULES = {
    "q_proj": "wq",
    "k_proj": "wkv",
    "v_proj": "wkv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


def refused(finetuning: FineTuning) -> str:
    """Describe what torchtitan cannot express of a fine-tuning; empty if it can express all of it."""
    if not finetuning.has_adapters or finetuning.saved_modules or finetuning.dora or finetuning.dropout:
        return str(finetuning) if not finetuning.dropout else f"dropout of adapters, {finetuning.dropout:g}"
    if finetuning.quantization != "none":
        return f"frozen weights in {finetuning.quantization}"
    targets = set(finetuning.targets)
    is_known = targets == {ALL_LINEAR} or targets <= set(MODULES)
    if not is_known or ("k_proj" in targets) != ("v_proj" in targets):
        return f"adapters on {', '.join(finetuning.targets)} (it takes {', '.join(MODULES)}, keys with values)"
    return ""


def converter_of(finetuning: FineTuning) -> dict[str, Any]:
    """Return the arguments of torchtitan's converter."""
    assert finetuning.rank is not None
    assert finetuning.alpha is not None
    targets = MODULES if finetuning.targets == (ALL_LINEAR,) else finetuning.targets
    names = list(dict.fromkeys(MODULES[name] for name in targets))
    return {"rank": finetuning.rank, "alpha": float(finetuning.alpha), "target_modules": names}


def finetuning_of(arguments: Mapping[str, Any]) -> FineTuning:
    """Return the fine-tuning of a converter with these arguments; its defaults are those of the class."""
    names = arguments.get("target_modules")
    if not isinstance(names, list):
        raise InputError("LoRAConverter without target_modules adapts the head too, which is not priced: list them")
    known = [*MODULES.items(), ("qkv_proj", "wqkv")]
    targets = tuple(module for module, name in known if name in names)
    if unknown := sorted(set(map(str, names)) - {name for _, name in known}):
        raise InputError(f"LoRAConverter: adapters on {', '.join(unknown)} are not priced")
    if targets == tuple(MODULES):
        targets = (ALL_LINEAR,)
    rank, alpha = arguments.get("rank", 8), arguments.get("alpha", 16.0)
    if type(rank) is not int or not isinstance(alpha, int | float):
        raise InputError("LoRAConverter: rank and alpha must be numbers")
    return FineTuning(rank=rank, alpha=alpha, targets=targets)
