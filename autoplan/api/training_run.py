"""Searches for a whole run: objectives, tokens, deadlines, budgets, prices and node counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypedDict

from autoplan.api.results import Progress
from autoplan.base.errors import InputError
from autoplan.base.values import parse_count, parse_duration, parse_numbers, parse_positive, parse_tokens
from autoplan.cost.goodput import Reliability
from autoplan.search.objectives import Objective, Run, default_objective, find_objectives
from autoplan.search.sizes import SizeSearchResult, search_sizes, size_grid
from autoplan.search.space import Space
from autoplan.search.study import Shared
from autoplan.spec.mixed_problem import MixedProblem
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import MAX_DEVICES


class RunOptions(TypedDict, total=False):
    """Options of the planned run; times are seconds, or texts such as "30d" and "10m"."""

    objectives: Sequence[str]  # step-time, cost-per-token, ...; of several, all plans that no other beats in every one
    nodes: Sequence[int] | str | None  # numbers of nodes to try; of a range, "8:64", those that divide well
    tokens: float | str | None  # to train, such as "15T"
    deadline: float | str | None  # for these tokens
    gpu_hours: float | str | None  # device hours that may be spent
    price: float | str | None  # of a device and hour, instead of the cluster's; by part: "h100-sxm=3,a100-sxm=1.5"
    device_mtbf: float | str | None  # mean time between failures of one device
    checkpoint_time: float | str | None  # that a checkpoint stops the run for
    restart_time: float | str | None  # from a failure to the first step
    pue: float | str | None  # power of the building over that of its nodes


def make_run(options: RunOptions) -> Run:
    """Return the run that the options describe."""
    seconds = {
        "device_mtbf_s": _seconds(options.get("device_mtbf")),
        "checkpoint_s": _seconds(options.get("checkpoint_time")),
        "restart_s": _seconds(options.get("restart_time")),
    }
    return Run(
        reliability=Reliability(**{field: value for field, value in seconds.items() if value is not None}),
        tokens=_number(options.get("tokens"), parse_tokens),
        deadline_s=_seconds(options.get("deadline")),
        device_hours=_positive(options.get("gpu_hours"), "--gpu-hours"),
        power_usage_effectiveness=_positive(options.get("pue"), "--pue") or 1.0,
    )


def _seconds(value: float | str | None) -> float | None:
    return _number(value, parse_duration)


def _positive(value: float | str | None, flag: str) -> float | None:
    return _number(value, lambda text: parse_positive(text, flag))


def _number(value: float | str | None, parse: Callable[[str], float]) -> float | None:
    return parse(value) if isinstance(value, str) else value


def parse_sizes(nodes: Sequence[int] | str) -> tuple[int, ...]:
    """Return node counts: a list such as '4,8,16', or those in a range such as '8:64' that divide well."""
    if not isinstance(nodes, str):
        return tuple(dict.fromkeys(nodes))
    low, sign, high = nodes.partition(":")
    if not sign:
        return parse_numbers(nodes, "--nodes")
    ends = [
        parse_count(part, "--nodes") if re.fullmatch(r"\s*[0-9]{1,9}[kKmM]?\s*", part) else 0 for part in (low, high)
    ]
    if not 0 < ends[0] <= ends[1] <= MAX_DEVICES:
        raise InputError(f"--nodes {nodes!r}: write whole numbers from 1 to {MAX_DEVICES}, the lower one first: 8:64")
    return size_grid(*ends)


def priced(problem: Problem, price: float | str | None) -> Problem:
    """Return the problem with a price of its devices."""
    if price is None:
        return problem
    return replace(problem, cluster=replace(problem.cluster, price_per_device_hour=_positive(price, "--price")))


def priced_parts(problem: MixedProblem, price: float | str | None) -> MixedProblem:
    """Return the problem with prices of its devices: one of all, or a text such as 'h100-sxm=3,a100-sxm=1.5'."""
    if price is None:
        return problem
    names = problem.cluster.part_names
    items = [text.rpartition("=") for text in str(price).split(",")]
    if unknown := [name for name, sign, _ in items if sign and name.strip() not in names]:
        raise InputError(f"--price {price}: {unknown[0]!r} is not a part: they are {', '.join(names)}")
    priced_names = [name.strip() for name, _, _ in items]
    if twice := sorted({name for name in priced_names if priced_names.count(name) > 1}):
        raise InputError(f"--price {price}: {twice[0] or 'every part'} has two prices: write PART=PRICE for each part")
    prices = {name.strip(): _positive(value, "--price") for name, _, value in items}
    parts = [
        replace(part, price_per_device_hour=prices.get(name, prices.get("", part.price_per_device_hour)))
        for name, part in zip(names, problem.cluster.parts, strict=True)
    ]
    return replace(problem, cluster=replace(problem.cluster, parts=tuple(parts)))


def objectives_of(options: RunOptions, run: Run, training: TrainingSpec) -> tuple[Objective, ...]:
    """Return the objectives that the options name, or the default one of the run."""
    objectives = find_objectives(options.get("objectives") or [default_objective(run)])
    if training.input_rates and any(objective.measure == "energy" for objective in objectives):
        raise InputError("--objective energy-per-token ranks steps that wait for no samples: leave --input-rate out")
    return objectives


def resized(problem: Problem, num_nodes: int) -> Problem:
    """Return the problem on another number of the same nodes."""
    cluster = problem.cluster
    if num_nodes == cluster.num_nodes:
        return problem
    if cluster.nodes or cluster.faults:
        raise InputError(
            f"{cluster.name} lists its nodes or their faults, so which {num_nodes} of them to use is unknown: "
            f"give --nodes {cluster.num_nodes}, or a cluster file for each size"
        )
    return replace(problem, cluster=replace(cluster, num_nodes=num_nodes))


def search_run(
    problem: Problem,
    options: RunOptions,
    make_space: Callable[[Problem], Space],
    progress: Progress | None = None,
    *,
    barred: Collection[str] = (),
    shared: Shared | None = None,
    is_simple: bool = True,
) -> SizeSearchResult:
    """Return the best plans for a run over all allowed node counts.

    For a budget, a deadline or the number of devices without node counts, all counts up to the size of the cluster are
    tried.  `barred` are the axes and values that the user excluded; `is_simple` prefers simple plans (`search_sizes`).
    """
    run = make_run(options)
    objectives = objectives_of(options, run, problem.training)
    problem = priced(problem, options.get("price"))
    nodes = options.get("nodes")
    if nodes is not None:
        sizes = parse_sizes(nodes)
    elif run.deadline_s or run.device_hours or any(objective.name == "devices" for objective in objectives):
        cluster = problem.cluster
        is_listed = bool(cluster.nodes or cluster.faults)
        sizes = (cluster.num_nodes,) if is_listed else size_grid(1, cluster.num_nodes)
    else:
        sizes = (problem.cluster.num_nodes,)

    def sized(num_nodes: int) -> tuple[Problem, Space]:
        smaller = resized(problem, num_nodes)
        return smaller, make_space(smaller)

    return search_sizes(sizes, sized, objectives, run, progress, barred=barred, shared=shared, is_simple=is_simple)
