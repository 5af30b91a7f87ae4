"""Flags that describe a run: objectives, tokens, deadlines, budgets, prices and numbers of nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli.options import whole_number

ObjectiveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="step-time, tokens-per-device, cost-per-token, energy-per-token, time-to-tokens, devices, tokens or "
        "memory-headroom; of several (repeatable) all plans that no other beats in every one.",
    ),
]
NodesOption = Annotated[
    str | None,
    typer.Option("--nodes", metavar="N,N|LOW:HIGH", help="Numbers of nodes to try; of a range those that divide well."),
]
MaxNodesOption = Annotated[int | None, whole_number("--max-nodes", "N", "Short for --nodes 1:N.")]
TokensOption = Annotated[str | None, typer.Option("--tokens", metavar="N", help="Tokens to train, such as 15T.")]
DeadlineOption = Annotated[
    str | None, typer.Option("--deadline", metavar="TIME", help="For these tokens, such as 30d.")
]
GpuHoursOption = Annotated[
    str | None, typer.Option("--gpu-hours", metavar="HOURS", help="Device hours that may be spent.")
]
PriceOption = Annotated[
    str | None, typer.Option("--price", metavar="PRICE", help="Of a device and hour, in place of the cluster's.")
]
DeviceMtbfOption = Annotated[
    str | None,
    typer.Option("--device-mtbf", metavar="TIME", help="Mean time between failures of one device; as Llama 3: 2112d."),
]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint-time", metavar="TIME", help="A checkpoint stops the run for; 60s.")
]
RestartOption = Annotated[
    str | None, typer.Option("--restart-time", metavar="TIME", help="From a failure to the first step; 10m.")
]
PueOption = Annotated[
    str | None, typer.Option("--pue", metavar="RATIO", help="Power of the building over that of its nodes; 1.")
]
