"""Preference losses from the settings of TRL, axolotl and LLaMA-Factory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.base.errors import InputError
from autoplan.spec.preference import Preference, what_several_models_need

# Settings that are read here, or that do not affect sizes.
OF_PREFERENCES = (
    *("rl", "reward_model", "pref_loss", "ref_model", "pref_beta", "pref_ftx", "rl_beta", "simpo_gamma", "beta"),
    *("loss_type", "precompute_ref_log_probs", "reference_free", "label_smoothing", "dpo_label_smoothing"),
)
# Pairwise losses with the same computation as DPO, and whether they need a reference model.
_PAIR_LOSSES = {"dpo": True, "ipo": True, "sigmoid": True, "hinge": True, "orpo": False, "simpo": False}


def _pairs(loss: str, where: str, *, precomputed: bool = False) -> Preference:
    """Return the preference for a pairwise loss, by its name in the programs."""
    if loss not in _PAIR_LOSSES:
        names = ", ".join(_PAIR_LOSSES)
        raise InputError(f"{where} {loss[:20]!r} is not priced: only {names} are{what_several_models_need(loss)}")
    return Preference(reference="none" if precomputed or not _PAIR_LOSSES[loss] else None)


def of_stage(table: Mapping[str, Any], where: str) -> Preference | None:
    """Return the preference of LLaMA-Factory's stage (src/llamafactory/hparams/finetuning_args.py, use_ref_model)."""
    stage = table.get("stage", "sft")
    if stage in ("sft", "pt"):
        return None
    if stage == "rm":
        return Preference(loss="reward")
    if stage != "dpo":
        needed = what_several_models_need(str(stage))
        raise InputError(f"{where}: stage {str(stage)[:20]!r} is not priced: only sft, pt, dpo and rm are{needed}")
    preference = _pairs(str(table.get("pref_loss", "sigmoid")), f"{where}: pref_loss")
    return Preference(reference="copy") if preference.reference is None and table.get("ref_model") else preference


def of_rl(table: Mapping[str, Any], where: str) -> Preference | None:
    """Return the preference of axolotl's rl and reward_model (src/axolotl/utils/schemas/config.py)."""
    if table.get("process_reward_model"):
        raise InputError(f"{where}: process_reward_model is not priced: only reward_model is")
    if table.get("reward_model"):
        return Preference(loss="reward")
    if not table.get("rl"):
        return None
    return _pairs(str(table["rl"]), f"{where}: rl", precomputed=bool(table.get("precompute_ref_log_probs")))


def of_trl_program(program: str, table: Mapping[str, Any], where: str) -> Preference | None:
    """Return the preference of TRL's programs dpo.py and reward.py and their settings (trl/trainer/dpo_config.py)."""
    if program == "reward.py":
        return Preference(loss="reward")
    if program != "dpo.py":
        return None
    loss = table.get("loss_type", "sigmoid")
    if not isinstance(loss, str):
        raise InputError(f"{where}: several of loss_type are not priced: name one")
    precomputed = bool(table.get("precompute_ref_log_probs") or table.get("reference_free"))
    return _pairs(loss, f"{where}: loss_type", precomputed=precomputed)
