"""Predicted memory next to the memory of torch's own tensors, by stage, as text."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from autoplan.base.units import GIB
from autoplan.report.terminal import print_part, print_table
from autoplan.spec.estimate import StageCost
from autoplan.spec.plan_file import PlanFile

# Memory terms of a stage outside of tensors.
_BEYOND_TENSORS = ("fragmentation", "cached", "communicators", "context")


def print_verified(console: Console, file: PlanFile, peak_bytes: Mapping[int, float]) -> None:
    """Print predicted bytes next to those of the memory oracle, which may not cover every stage."""
    rows = []
    for stage in file.stages:
        predicted = tensor_bytes(stage)
        row = [str(stage.stage), f"{predicted / GIB:,.2f}", "-", ""]
        if stage.stage in peak_bytes:
            counted = peak_bytes[stage.stage]
            row[2:] = [f"{counted / GIB:,.2f}", f"{predicted / counted - 1:+.1%}"]
        rows.append(tuple(row))
    console.print("\nallocated by tensors in GiB, counted on torch without data")
    print_table(console, [("stage", False), ("predicted", True), ("oracle", True), ("error", True)], rows)
    if len(peak_bytes) < len(file.stages):
        print_part(console, "stages without a figure were skipped to save time")


def tensor_bytes(stage: StageCost) -> float:
    """Predicted bytes of tensors only."""
    return sum(size for name, size in stage.memory_terms_bytes.items() if name not in _BEYOND_TENSORS)
