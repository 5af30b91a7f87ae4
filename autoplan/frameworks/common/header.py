"""Header of exported files: the prediction of the plan, its interval and its origin."""

from __future__ import annotations

import re

from autoplan.base.units import format_bytes, format_percent, format_seconds
from autoplan.spec.enums import AttentionKernel
from autoplan.spec.lengths import Batching
from autoplan.spec.plan_file import PlanFile

# How samples become sequences, with what programs call it.
BATCHING_TEXTS: dict[Batching, str] = {
    "packed": "packed, each with attention of its own (packing of TRL, sample_packing of axolotl, neat_packing of "
    "LLaMA-Factory, packed sequences of Megatron-Bridge)",
    "joined": 'joined and cut, attention over all of a sequence (packing_strategy "wrapped" of TRL, packing of '
    "LLaMA-Factory)",
    "padded": "padded to the longest of a micro-batch",
    "full": "padded to the whole length (pad_to_sequence_len of axolotl, pad_to_max_length of Megatron-Bridge)",
    "unpadded": "behind one another without padding (padding_free of TRL, variable sequence lengths of Megatron-LM)",
}


def comment(text: str) -> str:
    """`text` as one line that cannot leave its comment: anything that is not printable becomes a question mark."""
    return "# " + "".join(character if character.isprintable() else "?" for character in text)


def is_exported(text: str) -> bool:
    """Return whether a file has the header of an export, whose program does what its options say."""
    return re.search(r"^# Predicted: .* per step \(90 % interval", text, re.MULTILINE) is not None


def header(plan_file: PlanFile, framework: str) -> list[str]:
    """The lines of comment above a file for `framework`."""
    best, cluster = plan_file.best, plan_file.cluster
    made_by = " ".join(f"{name} {version}" for name, version in plan_file.versions.items())
    lines = [
        f"{plan_file.model.name} with {framework} on {plan_file.num_devices} x {cluster.device.name}"
        f" (cluster {cluster.name}), {best.plan.global_batch} sequences of {plan_file.training.seq_len} tokens a step",
        f"Plan: {best.plan.describe()}",
        f"Predicted: {format_seconds(best.step_s)} per step (90 % interval {format_seconds(best.low_s)} to"
        f" {format_seconds(best.high_s)}), {best.tokens_per_s_per_device:,.0f} tokens/s per device,"
        f" MFU {format_percent(best.mfu)}",
        f"Memory: {format_bytes(best.memory_bytes)} on the fullest device, headroom"
        f" {format_bytes(best.memory_headroom_bytes)}, risk of running out {format_percent(best.oom_probability)}",
        f"Priced as {plan_file.framework.name}, calibration {plan_file.calibration.name}, by {made_by}",
        f"Made from: {plan_file.command}",
    ]
    if (attention := best.plan.attention) != AttentionKernel.FLASH:
        lines.append(f"Priced with {attention} attention, which your program must use unless an option below sets it")
    if (imbalance := plan_file.training.expert_imbalance) > 1.0:
        lines.append(f"Priced with {imbalance:g} times the mean of tokens on the busiest rank of experts")
    if (loss := plan_file.training.balancing_loss) > 1.0:
        lines.append(f"Priced with experts as uneven as a balancing loss of {loss:g} says")
    if (fused := plan_file.training.fused_norm) is not None:
        norms = "norms in one kernel" if fused else "norms of several kernels"
        lines.append(f"Priced with {norms}, which your program must use unless an option below sets it")
    if documents := plan_file.training.document_len:
        lines.append(
            f"Sequences are priced as packed from documents of {documents:,} tokens, each with attention of its own: "
            "data and attention mask are yours to set so"
        )
    if preference := plan_file.training.preference:
        lines.append(f"Priced for {preference}, which your program must use")
    if lengths := plan_file.training.lengths:
        lines.append(
            f"Samples have {lengths.mean:,.0f} tokens on average ({lengths.source}) and are priced as "
            f"{BATCHING_TEXTS[plan_file.training.batching]}: yours to set so"
        )
    return [comment(line) for line in lines]
