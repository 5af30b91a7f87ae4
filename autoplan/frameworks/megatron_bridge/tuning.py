"""Fine-tuning in Megatron-Bridge: its LoRA, CanonicalLoRA and DoRA (src/megatron/bridge/peft of 0191fc5)."""

from __future__ import annotations

from autoplan.spec.finetuning import ALL_LINEAR, FineTuning

FUSED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Targets whose weights are fused into one matrix in Megatron-Core, by their names in PEFT.
CANONICAL = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "down_proj": "linear_fc2",
}


def refused_of_fused(finetuning: FineTuning) -> str:
    """Describe what a target with LoRA and DoRA on fused matrices alone cannot express; empty if it can express all."""
    weights = _refused_weights(finetuning)
    return weights if weights or _is_fused(finetuning) else _adapters_on(finetuning, FUSED)


def refused(finetuning: FineTuning) -> str:
    """Describe what Megatron-Bridge cannot express of a fine-tuning; empty if it can express all of it."""
    weights = _refused_weights(finetuning)
    names = FUSED if finetuning.dora else (*FUSED, *CANONICAL)
    return weights if weights or _has_names(finetuning) else _adapters_on(finetuning, names)


def _refused_weights(finetuning: FineTuning) -> str:
    """Describe frozen or quantised weights that Megatron-Core's layers cannot hold; empty if there are none."""
    if ends := (*finetuning.frozen, *finetuning.saved_modules):
        return f"{' and '.join(ends)} apart from other weights"
    return "" if finetuning.quantization == "none" else f"frozen weights in {finetuning.quantization}"


def _adapters_on(finetuning: FineTuning, names: tuple[str, ...]) -> str:
    return f"adapters on {', '.join(finetuning.targets)} (it takes {', '.join(names)})"


def _is_fused(finetuning: FineTuning) -> bool:
    return set(finetuning.targets) <= set(FUSED)


def _has_names(finetuning: FineTuning) -> bool:
    targets = set(finetuning.targets)
    return _is_fused(finetuning) or (not finetuning.dora and (targets <= set(CANONICAL) or targets == {ALL_LINEAR}))


def peft_lines(finetuning: FineTuning) -> tuple[str, ...]:
    """(import, assignment) of the adapters in a recipe."""
    kind, module = ("DoRA", "dora") if finetuning.dora else ("LoRA", "lora")
    names = list(finetuning.targets)
    if not _is_fused(finetuning):
        kind, module = "CanonicalLoRA", "canonical_lora"
        names = list(CANONICAL.values()) if names == [ALL_LINEAR] else [CANONICAL[name] for name in names]
    rank = finetuning.rank or 0
    arguments = f"target_modules={names!r}, dim={rank}, alpha={finetuning.alpha}, dropout={finetuning.dropout!r}"
    return f"from megatron.bridge.peft.{module} import {kind}", f"cfg.peft = {kind}({arguments})"
