"""Preference training: losses over two answers to one prompt, a chosen and a rejected one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from autoplan.base.errors import InputError

# dpo: probabilities of both answers, over those of a reference.  reward: a score of each, instead of logits.
Loss = Literal["dpo", "reward"]
# copy: another model without gradients.  base: the model without its adapters.  none: its probabilities are worked out
# before, or the loss needs none.
Reference = Literal["copy", "base", "none"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
REFERENCES: tuple[Reference, ...] = get_args(Reference)


# Objectives whose actor learns from what it generates, beside models that judge it.
_SEVERAL_MODELS = re.compile(
    r"(?<![a-z])(ppo|grpo|gspo|sapo|rloo|reinforce|nash|xpo|online_\w+)(?![a-z])", re.IGNORECASE
)


def what_several_models_need(objective: str) -> str:
    """Say what a price of several models at once would need, after a colon; empty for an objective of one model."""
    if not _SEVERAL_MODELS.search(objective):
        return ""
    return (
        ": of several models at once it would need the tokens generated in a step, and devices and layout of actor, "
        "critic, reward and rollout; the update of the actor alone is priced without it"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A loss over pairs of sequences."""

    loss: Loss = "dpo"
    reference: Reference | None = None  # None: the base of adapters, else a copy

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise InputError(f"preference.loss must be one of {', '.join(LOSSES)}, got {str(self.loss)[:20]!r}")
        if self.reference not in (None, *REFERENCES):
            raise InputError(
                f"preference.reference must be one of {', '.join(REFERENCES)}, got {str(self.reference)[:20]!r}"
            )
        if self.loss == "reward" and self.reference not in (None, "none"):
            raise InputError("a reward model has no reference: leave it out")

    def with_reference(self, *, has_adapters: bool) -> Preference:
        """Return the preference with the reference that its program takes unless it is told another one."""
        if self.reference == "base" and not has_adapters:
            raise InputError("reference base needs adapters: give --lora-rank, or reference copy or none")
        if self.reference is not None:
            return self
        usual: Reference = "base" if has_adapters else "copy"
        return Preference(loss=self.loss, reference="none" if self.loss == "reward" else usual)

    def __str__(self) -> str:
        if self.loss == "reward":
            return "reward model, two sequences per sample with one score each"
        against = {"copy": "a frozen copy of the model", "base": "the model without its adapters"}
        reference = against.get(self.reference or "", "")
        return f"preferences (DPO), two sequences per sample{f', against {reference}' if reference else ''}"
