"""What do the flags that describe a run mean?  Objectives, tokens, deadlines, budgets, prices and numbers of nodes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError
from autoplan.base.values import parse_duration, parse_numbers, parse_positive, parse_tokens
from autoplan.cli.options import whole_number

if TYPE_CHECKING:
    from autoplan.search.objectives import Run
    from autoplan.search.sizes import SizeSearchResult
    from autoplan.search.space import Space
    from autoplan.search.study import Shared
    from autoplan.spec.problem import Problem

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """The flags that describe a run, as typed."""

    objectives: list[str] = field(default_factory=list)
    nodes: str | None = None
    max_nodes: int | None = None
    tokens: str | None = None
    deadline: str | None = None
    gpu_hours: str | None = None
    price: str | None = None
    device_mtbf: str | None = None
    checkpoint_time: str | None = None
    restart_time: str | None = None
    pue: str | None = None

    @property
    def are_given(self) -> bool:
        """Whether one of them was typed."""
        return any(getattr(self, one.name) not in (None, []) for one in fields(self))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Numbers of nodes of '4,8,16', or those of '8:64' that divide well."""
    from autoplan.search.sizes import size_grid
    from autoplan.topology.cluster import MAX_DEVICES

    low, sign, high = text.partition(":")
    if not sign:
        return parse_numbers(text, "--nodes")
    ends = [int(part) if re.fullmatch(r"[1-9][0-9]{0,8}", part.strip()) else 0 for part in (low, high)]
    if not 0 < ends[0] <= ends[1] <= MAX_DEVICES:
        raise InputError(f"--nodes {text!r}: write whole numbers from 1 to {MAX_DEVICES}, the lower one first: 8:64")
    return size_grid(*ends)


def make_run(flags: RunFlags) -> Run:
    """The run that the flags describe."""
    from autoplan.cost.goodput import Reliability
    from autoplan.search.objectives import Run

    times = {
        "device_mtbf_s": flags.device_mtbf,
        "checkpoint_s": flags.checkpoint_time,
        "restart_s": flags.restart_time,
    }
    return Run(
        reliability=Reliability(**{name: parse_duration(text) for name, text in times.items() if text is not None}),
        tokens=None if flags.tokens is None else parse_tokens(flags.tokens),
        deadline_s=None if flags.deadline is None else parse_duration(flags.deadline),
        device_hours=None if flags.gpu_hours is None else parse_positive(flags.gpu_hours, "--gpu-hours"),
        power_usage_effectiveness=1.0 if flags.pue is None else parse_positive(flags.pue, "--pue"),
    )


def priced(problem: Problem, price: str | None) -> Problem:
    """The problem with a price of its devices."""
    if price is None:
        return problem
    return replace(problem, cluster=replace(problem.cluster, price_per_device_hour=parse_positive(price, "--price")))


def resized(problem: Problem, num_nodes: int) -> Problem:
    """The problem on another number of the same nodes."""
    cluster = problem.cluster
    if num_nodes == cluster.num_nodes:
        return problem
    if cluster.nodes or cluster.faults:
        raise InputError(
            f"{cluster.name} lists its nodes or their faults, so that {num_nodes} nodes of it can be any of them: "
            f"give --nodes {cluster.num_nodes}, or a cluster file for each size"
        )
    return replace(problem, cluster=replace(cluster, num_nodes=num_nodes))


def search_run(
    problem: Problem,
    flags: RunFlags,
    make: Callable[[Problem], Space],
    progress: Callable[[int, int | None], None] | None = None,
    *,
    shared: Shared | None = None,
) -> SizeSearchResult:
    """The best plans for a run, of all numbers of nodes that may be used.

    Where a budget, a deadline or the number of devices is asked for and no numbers are given, all up to the cluster's
    are tried.
    """
    from autoplan.search.objectives import default_objective, find_objectives
    from autoplan.search.sizes import search_sizes, size_grid

    run = make_run(flags)
    objectives = find_objectives(flags.objectives or [default_objective(run)])
    problem = priced(problem, flags.price)
    if flags.nodes is not None and flags.max_nodes is not None:
        raise InputError("--nodes and --max-nodes say the same: leave one of them out")
    if flags.max_nodes is not None:
        sizes = parse_sizes(f"1:{flags.max_nodes}")
    elif flags.nodes is not None:
        sizes = parse_sizes(flags.nodes)
    elif run.deadline_s or run.device_hours or any(one.name == "devices" for one in objectives):
        cluster = problem.cluster
        is_listed = bool(cluster.nodes or cluster.faults)
        sizes = (cluster.num_nodes,) if is_listed else size_grid(1, cluster.num_nodes)
    else:
        sizes = (problem.cluster.num_nodes,)

    def made(num_nodes: int) -> tuple[Problem, Space]:
        mine = resized(problem, num_nodes)
        return mine, make(mine)

    return search_sizes(sizes, made, objectives, run, progress, shared=shared)
