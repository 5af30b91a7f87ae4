"""Traffic of a step on a terminal: by communicator, and in total on every level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from autoplan.base.units import format_percent, format_volume
from autoplan.report.terminal import print_table

if TYPE_CHECKING:  # the cost model is not needed for a cluster alone
    from autoplan.cost.collectives.traffic import StepTraffic

OPERATION_NAMES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "send_recv": "messages",
}


def print_traffic(console: Console, step: StepTraffic) -> None:
    """Print the bytes per device and step on the links of every level, one direction."""
    console.print()
    console.print(
        f"Traffic of a device of stage {step.stage} per step, exposed or not; on shared links, its share",
        soft_wrap=True,
    )
    names = [level.name for level in step.levels]
    columns = (
        ("communicator", False),
        ("ranks", True),
        ("times", True),
        ("time", True),
        *((name, True) for name in names),
    )
    rows = [
        (
            f"{row.communicator} {OPERATION_NAMES[row.operation]}",
            f"{row.num_ranks:,}",
            f"{row.times:,.6g}",
            format_percent(step.share(row)),
            *(format_volume(moved) if moved else "-" for moved in row.level_bytes),
        )
        for row in step.rows
    ]
    total = ("all", "", "", "", *(format_volume(moved) for moved in step.level_bytes))
    print_table(console, columns, [*rows, total])


def traffic_json(step: StepTraffic) -> dict[str, Any]:
    """Return the traffic of a step in SI units, for JSON."""
    return {
        "stage": step.stage,
        "levels": [
            {"name": level.name, "device_bytes": moved}
            for level, moved in zip(step.levels, step.level_bytes, strict=True)
        ],
        "transfers": [msgspec.to_builtins(row) | {"time_share": step.share(row)} for row in step.rows],
    }
