"""Terminal output of `autoplan replan`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from autoplan.base.units import counted, format_bytes, format_days, format_percent, format_seconds
from autoplan.report.terminal import print_lines
from autoplan.spec.replan_summary import PlanFigures, ReplanSummary


def print_replan(console: Console, summary: ReplanSummary) -> None:
    """Print the previous plan, the same layout and the best plan on the remaining nodes, and the cost of switching."""
    print_lines(console, _lines(summary))


def _lines(summary: ReplanSummary) -> Iterator[tuple[str, str]]:
    yield "before", f"{_described(summary.before)} on {counted(summary.nodes_before, 'node')}"
    yield "now", f"{_described(summary.after)} on {summary.nodes_used} of {summary.nodes_left} nodes"
    devices = summary.after.num_devices / summary.before.num_devices
    yield "kept", f"{100 * summary.kept_share:.1f} % of the throughput, on {100 * devices:.1f} % of the devices"
    if summary.usable_replicas < 1:
        lost = summary.nodes_before - summary.nodes_left
        spares = counted(lost, "spare node") if lost else "as many spare devices"
        yield (
            "no replan",
            f"{format_percent(summary.usable_replicas)} of the devices train on if whole replicas stop, "
            f"{format_percent(summary.usable_tensor_groups)} with unequal tensor-parallel degrees, all with {spares}",
        )
    same = summary.same_layout
    if same is None:
        yield "same layout", "no fewer replicas on equal nodes divide the batch, fit and are accepted by the framework"
    elif same.plan != summary.after.plan:
        share = 100 * (same.step_s / summary.after.step_s - 1)
        yield "same layout", f"{_described(same)} on {same.num_devices} devices: {share:.1f} % slower"
    cut = "resharded for the new degrees" if summary.cuts_anew else "used as it is"
    read = "" if summary.load_s is None else f", read in {format_seconds(summary.load_s)}"
    yield "checkpoint", f"{format_bytes(summary.checkpoint_bytes)}, {cut}{read}"
    if summary.checkpoint_interval_s is not None:
        yield "", f"optimal interval {format_days(summary.checkpoint_interval_s)} (Daly)"


def _described(figures: PlanFigures) -> str:
    return f"{figures.plan}: {format_seconds(figures.step_s)} per step"
