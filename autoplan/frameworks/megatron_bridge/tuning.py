"""Fine-tuning in Megatron-Bridge: its LoRA, CanonicalLoRA and DoRA (src/megatron/bridge/peft of 0191fc5)."""

from __future__ import annotations

from autoplan.frameworks.common.tuning import ALPHA_PER_RANK
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


def refused(finetuning: FineTuning) -> str:
    """Describe what Megatron-Bridge cannot express of a fine-tuning; empty if it can express all of it."""
    if finetuning.frozen or finetuning.saved_modules:
        ends = (*finetuning.frozen, *finetuning.saved_modules)
        return f"{' and '.join(ends)} apart from other weights"
    if finetuning.quantization != "none":
        return f"frozen weights in {finetuning.quantization}"
    if not _has_names(finetuning):
        names = FUSED if finetuning.dora else (*FUSED, *CANONICAL)
        return f"adapters on {', '.join(finetuning.targets)} (it takes {', '.join(names)})"
    return ""


def _has_names(finetuning: FineTuning) -> bool:
    targets = set(finetuning.targets)
    return targets <= set(FUSED) or (not finetuning.dora and (targets <= set(CANONICAL) or targets == {ALL_LINEAR}))


def peft_lines(finetuning: FineTuning) -> tuple[str, ...]:
    """(import, assignment) of the adapters in a recipe."""
    is_fused = set(finetuning.targets) <= set(FUSED)
    kind, module = ("DoRA", "dora") if finetuning.dora else ("LoRA", "lora")
    names = list(finetuning.targets)
    if not is_fused:
        kind, module = "CanonicalLoRA", "canonical_lora"
        names = list(CANONICAL.values()) if names == [ALL_LINEAR] else [CANONICAL[name] for name in names]
    rank = finetuning.rank or 0
    arguments = f"target_modules={names!r}, dim={rank}, alpha={ALPHA_PER_RANK * rank}, dropout={finetuning.dropout!r}"
    return f"from megatron.bridge.peft.{module} import {kind}", f"cfg.peft = {kind}({arguments})"
