"""Comparisons of clusters and node counts: the best plan of each, with throughput, cost and energy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, cast

from autoplan.api.options import ProblemOptions, check_names
from autoplan.api.problem import limit_texts, make_problem, make_space
from autoplan.api.results import Progress, Result, Table, unmeasured_text
from autoplan.api.training_run import RunOptions, make_run, parse_sizes, priced, resized
from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.files import encode
from autoplan.base.units import format_seconds
from autoplan.report.compare import Compared, draw_rates
from autoplan.search.objectives import Run, find_objectives
from autoplan.search.sizes import search_sizes
from autoplan.search.space import Space
from autoplan.spec.model import ModelSpec
from autoplan.spec.problem import Problem
from autoplan.spec.run_report import SizeOutcome


class CompareOptions(ProblemOptions, RunOptions, total=False):
    """Options of a comparison: those of the problem and of the planned run; `price` becomes `prices`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareResult(Result):
    """The best plans of clusters and node counts, in the given order."""

    outcomes: tuple[Compared, ...]
    warnings: tuple[str, ...] = ()  # devices that nobody measured

    @property
    def headline(self) -> str:
        """The fastest of all."""
        planned = [(row.outcome.best, row) for row in self.outcomes if row.outcome.best]
        best, row = max(planned, key=lambda pair: pair[0].figures.tokens_per_s)
        step = format_seconds(best.plan.step_s)
        return f"{row.cluster}, {best.num_nodes} nodes: {best.plan.plan.describe()}: {step} per step"

    def table(self) -> Table:
        """Return one row for each cluster and size: times in seconds, energy in joules, None where there is no plan."""
        figures = ("num_devices", "tokens_per_s", "goodput", "cost_per_token", "energy_per_token_j", "run_s", "cost")
        return Table.of(
            {"cluster": row.cluster, "num_nodes": row.outcome.num_nodes}
            | {"plan": best.plan.plan.describe() if (best := row.outcome.best) else None}
            | {"step_s": best.plan.step_s if best else None}
            | {name: getattr(best.figures, name) if best else None for name in figures}
            for row in self.outcomes
        )

    def to_json(self) -> str:
        """Return the comparison as JSON."""
        return encode(self.outcomes)

    def draw(self) -> str:
        """Return an SVG of rates by size."""
        return draw_rates(self.outcomes)


def compare(
    model: str | Path | ModelSpec,
    *,
    clusters: Sequence[str],
    global_batch: int | str,
    seq_len: int,
    prices: Mapping[str, float | str] | None = None,
    fix: Iterable[str] | Mapping[str, Any] = (),
    at_most: Iterable[str] | Mapping[str, Any] = (),
    forbid: Iterable[str] = (),
    progress: Progress | None = None,
    **options: Unpack[CompareOptions],
) -> CompareResult:
    """Compare the best plans of several clusters and node counts (`nodes`), each chosen and proven as by `search`.

    `prices` maps a cluster to the price of a device per hour, "" being all others; the other arguments are as for
    `search`.

    Raises InputError for arguments that cannot be used, NoPlanError if no cluster has a plan.
    """
    check_names(options, CompareOptions, "compare")
    given_options = {name: value for name, value in options.items() if name in ProblemOptions.__annotations__}
    problem_options = cast("ProblemOptions", given_options)
    run = make_run(cast("RunOptions", {name: options.get(name) for name in RunOptions.__annotations__}))
    if repeated := next((name for name in clusters if clusters.count(name) > 1), None):
        raise InputError(f"--cluster {repeated} is given twice")
    costs = prices or {}

    def space_of(sized: Problem) -> Space:
        return make_space(sized, global_batch, fix=limit_texts(fix), at_most=limit_texts(at_most), forbid=forbid)

    problems = {
        name: priced(
            make_problem(model, cluster=name, seq_len=seq_len, **problem_options),
            costs.get(name, costs.get("", options.get("price"))),
        )
        for name in clusters
    }
    nodes = options.get("nodes")
    places = [
        (name, size)
        for name, problem in problems.items()
        for size in (parse_sizes(nodes) if nodes is not None else (problem.cluster.num_nodes,))
    ]
    outcomes = []
    for done, (name, size) in enumerate(places, 1):
        outcomes.append(Compared(cluster=name, outcome=fastest(problems[name], size, space_of, run)))
        if progress:
            progress(done, len(places))
    if all(row.outcome.best is None for row in outcomes):
        raise NoPlanError(
            f"none of these clusters and sizes has a plan; {outcomes[-1].cluster}: {outcomes[-1].outcome.why}"
        )
    warnings = tuple(dict.fromkeys(filter(None, map(unmeasured_text, problems.values()))))
    return CompareResult(outcomes=tuple(outcomes), warnings=warnings)


def fastest(problem: Problem, num_nodes: int, space_of: Callable[[Problem], Space], run: Run) -> SizeOutcome:
    """Return the simplest plan that is about as fast as the fastest on this many nodes, or why there is none."""
    smaller = resized(problem, num_nodes)
    try:
        step_time = find_objectives(["step-time"])
        chosen = search_sizes((num_nodes,), lambda _: (smaller, space_of(smaller)), step_time, run, is_simple=True)
    except NoPlanError as error:
        return SizeOutcome(num_nodes=num_nodes, best=None, least=None, why=str(error).partition(";")[0])
    return chosen.report.sizes[0]
