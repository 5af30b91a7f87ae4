"""Matrices of blocks with frozen weights and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoplan.cost.kernels.linears import BlockShape, Linear, Split
from autoplan.spec.blocks import Block
from autoplan.spec.finetuning import ALL_LINEAR, MODULES, FineTuning, Target
from autoplan.spec.model import ModelSpec


def is_in(shapes: Mapping[Block, BlockShape], model: ModelSpec, target: Target) -> bool:
    """Return whether a matrix of the model is the target."""
    has_part = target.part not in ("gate", "up") or model.gated_mlp
    return has_part and any(linear.name == target.linear for shape in shapes.values() for linear in shape.linears)


def with_adapters(model: ModelSpec, shape: BlockShape, finetuning: FineTuning) -> BlockShape:
    """Return the block with frozen weights and two matrices per target."""
    linears = []
    for linear in shape.linears:
        frozen = replace(linear, is_frozen=True)
        if linear.name not in NEVER_ADAPTED:
            frozen = replace(frozen, weight_bytes=finetuning.weight_bytes, saves_input=finetuning.saves_inputs)
        linears.append(frozen)
    adapters: list[Linear] = []
    magnitudes = 0
    for linear in shape.linears:
        for part in dict.fromkeys(_targeted_parts(model, linear, finetuning)):
            pair = _adapter(linear, _part(linear, part), part, finetuning.rank or 0)
            adapters += pair
            if finetuning.dora and not linear.is_shared:
                magnitudes += pair[1].copies * pair[1].out_size
    return replace(
        shape,
        linears=(*linears, *adapters),
        is_frozen=True,
        drops_inputs=finetuning.dropout > 0,
        num_magnitudes=magnitudes,
    )


# PEFT's "all-linear" omits the head; routers are plain parameters, not linear modules, in current transformers.
NEVER_ADAPTED = ("router", "shared_gate")


def _targeted_parts(model: ModelSpec, linear: Linear, finetuning: FineTuning) -> list[str]:
    """Return the parts of a block's matrix that get an adapter."""
    if linear.name in NEVER_ADAPTED or (linear.name.startswith("expert_") and not finetuning.adapts_experts):
        return []
    pieces: tuple[str, ...] = {"qkv": ("q", "k", "v"), "kv": ("k", "v")}.get(linear.name, ("",))
    if linear.name.endswith("fc1") and model.gated_mlp:
        pieces = ("gate", "up")
    targeted: list[str] = []
    for name in finetuning.targets:
        if name == ALL_LINEAR:
            targeted += pieces
        for target in MODULES.get(name, ()):
            if target.linear == linear.name and (not target.part or target.part in pieces):
                targeted.append(target.part)
    return targeted


def _part(linear: Linear, part: str) -> Linear:
    """Return the matrix made of a part of another one's outputs."""
    shared = linear.grouped_out_size // 2
    if part == "q":
        return replace(linear, out_size=linear.out_size - 2 * shared, grouped_out_size=0)
    if part in ("k", "v"):
        return replace(linear, out_size=shared, grouped_out_size=shared)
    return replace(linear, out_size=linear.out_size // 2) if part else linear


def _adapter(linear: Linear, part: Linear, name: str, rank: int) -> tuple[Linear, Linear]:
    """Return the two matrices of an adapter: down to the rank, and up from it (arXiv:2106.09685).

    For a column-parallel matrix the first is replicated and the second is column-parallel; for a row-parallel one the
    first is row-parallel and the second replicated.
    """
    first: Split = "replicated" if linear.split == "column" else linear.split
    second: Split = "replicated" if linear.split == "row" else linear.split
    label = ".".join(piece for piece in (linear.name, name) if piece)
    plain = replace(part, has_bias=False, adapts=linear.name)
    return (
        replace(plain, name=f"{label}.lora_a", out_size=rank, split=first, grouped_out_size=0),
        replace(plain, name=f"{label}.lora_b", in_size=rank, split=second),
    )
