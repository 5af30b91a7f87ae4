"""What do `search` and `estimate` do where a cluster has unlike parts?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer

from autoplan.errors import InputError, NoPlanError

if TYPE_CHECKING:
    from autoplan.mixed import MixedProblem
    from autoplan.plan import Sharding
    from autoplan.result import MixedCost, MixedPlanFile, MixedResult

SHARDINGS = ("zero2", "zero3")  # that may be allowed


def search_parts(
    problem: MixedProblem,
    global_batch: str,
    *,
    narrowed: bool,
    allow: list[str],
    out: Path,
    force: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Find the fastest plan of a mixed cluster, print it and write it to `out`."""
    from autoplan.cli.inputs import parse_batches
    from autoplan.cli.planfile import make_mixed_file
    from autoplan.files import encode, write_text
    from search.mixed import search_mixed

    if narrowed:
        raise InputError("--fix and --max do not narrow the plans of a mixed cluster yet: leave them out")
    low, high = parse_batches(global_batch)
    if low != high:
        raise InputError(f"--global-batch {global_batch}: a mixed cluster takes one number, not a range")
    result = search_mixed(problem, low, ("none", "zero1", *_allowed(allow)))
    _check(problem, result)
    file = make_mixed_file(problem, result.ranked, result.certificate)
    text = encode(file)
    write_text(out, text, force=force)
    _show(file, text, json=json)
    if quiet:
        return
    for part, plan in zip(problem.cluster.parts, result.alone, strict=True):
        if plan and plan.step_s < file.best.step_s:
            print(
                f"autoplan: warning: {part.name} alone is faster, {plan.step_s:.3g} s ({plan.plan.describe()}): "
                "search on that part for its plan",
                file=sys.stderr,
            )
    print(f"wrote {out}", file=sys.stderr)


def _allowed(allow: list[str]) -> tuple[Sharding, ...]:
    from autoplan.plan import Sharding

    for wish in allow:
        if wish not in SHARDINGS:
            raise InputError(f"--allow {wish}: on a mixed cluster only {' and '.join(SHARDINGS)} may be allowed")
    return tuple(sharding for sharding in get_args(Sharding) if sharding in allow)


def _check(problem: MixedProblem, result: MixedResult) -> None:
    """Refuse a result without a plan, with the reason."""
    from autoplan.units import format_bytes

    if result.ranked:
        return
    if result.closest is None:
        raise NoPlanError(
            "no plan: the global batch leaves no replica a micro-batch, or cross_vendor_collectives = false leaves no "
            "way to share out the layers; change one of them"
        )
    stages = [stage for kind in result.closest.kinds for stage in kind.stages]
    worst = max(stages, key=lambda stage: stage.oom_z)
    needed = f"{format_bytes(worst.memory_bytes)} of {format_bytes(worst.capacity_bytes)}"
    raise NoPlanError(
        f"no plan fits: the closest needs {needed} on {problem.cluster.parts[worst.part].name}: "
        "use more devices, a shorter sequence or --allow zero3"
    )


def _show(file: MixedPlanFile, text: str, *, json: bool) -> None:
    from autoplan.report.mixed import print_mixed
    from autoplan.report.terminal import make_console

    if json:
        typer.echo(text, nl=False)
    else:
        print_mixed(make_console(), file)


def is_mixed(path: Path) -> bool:
    """Whether a path names a plan file of a mixed cluster."""
    from autoplan.files import read_table

    return path.suffix == ".json" and path.is_file() and "mixed_schema_version" in read_table(path)


def estimate_saved(path: Path, *, json: bool) -> None:
    """Price the plan of a mixed cluster in a plan file again, and print it."""
    from autoplan.cli.planfile import make_mixed_file
    from autoplan.cost.mixed import estimate_mixed
    from autoplan.files import decode, encode, read_table
    from autoplan.mixed import MixedProblem
    from autoplan.result import MixedPlanFile

    saved = decode(MixedPlanFile, read_table(path), str(path))
    problem = MixedProblem(
        model=saved.model,
        training=saved.training,
        cluster=saved.cluster,
        framework=saved.framework,
        calibrations=saved.calibrations,
        reserve_bytes=saved.reserve_bytes,
    )
    costs: tuple[MixedCost, ...] = estimate_mixed(problem, [saved.best.plan])
    file = make_mixed_file(problem, costs, None)
    _show(file, encode(file), json=json)
