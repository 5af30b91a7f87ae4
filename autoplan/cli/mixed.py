"""What do `search`, `estimate` and `explain` do where a cluster has unlike parts?"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autoplan.base.errors import InputError, NoPlanError
from autoplan.base.values import parse_batches
from autoplan.cli.inputs import OutputFlags
from autoplan.spec.enums import Sharding

if TYPE_CHECKING:
    from autoplan.cli.estimate import EstimateFlags
    from autoplan.spec.mixed_problem import MixedProblem
    from autoplan.spec.mixed_result import MixedResult
    from autoplan.spec.plan_file import MixedPlanFile, SpaceFlags

SHARDINGS = ("zero2", "zero3")  # that may be allowed


def search_parts(problem: MixedProblem, asked: SpaceFlags, output: OutputFlags) -> None:
    """Find the fastest plan of a mixed cluster, print it and write it to a file, and its page."""
    from autoplan.api.plan_files import make_mixed_file
    from autoplan.base.files import encode, write_text
    from autoplan.search.mixed_search import search_mixed

    if asked.narrows:
        raise InputError("--fix and --max do not narrow the plans of a mixed cluster yet: leave them out")
    low, high = parse_batches(asked.global_batch)
    if low != high:
        raise InputError(f"--global-batch {asked.global_batch}: a mixed cluster takes one number, not a range")
    result = search_mixed(problem, low, (Sharding.NONE, Sharding.ZERO1, *_allowed(asked.allow)))
    _check(problem, result)
    file = make_mixed_file(problem, result.ranked, result.certificate)
    text = encode(file)
    write_text(output.out, text, force=output.force)
    _show(file, text, json=output.json)
    if not output.json:
        from autoplan.report.terminal import make_console, print_next_steps

        print_next_steps(make_console(), ("why", f"autoplan explain {shlex.quote(str(output.out))}"))
    if output.page is not None:
        from autoplan.cli.report import write_page

        write_page(file, output.out, output.page, url=None, force=output.force, quiet=output.quiet)
    if output.quiet:
        return
    for part, plan in zip(problem.cluster.parts, result.alone, strict=True):
        if plan and plan.step_s < file.best.step_s:
            print(
                f"autoplan: warning: {part.name} alone is faster, {plan.step_s:.3g} s ({plan.plan.describe()}): "
                "search on that part for its plan",
                file=sys.stderr,
            )
    print(f"wrote {output.out}", file=sys.stderr)


def _allowed(allow: tuple[str, ...]) -> tuple[Sharding, ...]:

    for wish in allow:
        if wish not in SHARDINGS:
            raise InputError(f"--allow {wish}: on a mixed cluster only {' and '.join(SHARDINGS)} may be allowed")
    return tuple(sharding for sharding in Sharding if sharding in allow)


def _check(problem: MixedProblem, result: MixedResult) -> None:
    """Refuse a result without a plan, with the reason."""
    from autoplan.base.units import format_bytes

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
    from autoplan.report.mixed_search import print_mixed
    from autoplan.report.terminal import make_console

    if json:
        typer.echo(text, nl=False)
    else:
        print_mixed(make_console(), file)


def estimate_saved(file: MixedPlanFile, output: EstimateFlags) -> None:
    """Price the plan of a file again, and print it."""
    from autoplan.api.plan_files import make_mixed_file, mixed_problem_of
    from autoplan.base.files import encode, write_text
    from autoplan.cost.mixed.estimate import estimate_mixed

    problem = mixed_problem_of(file)
    again = make_mixed_file(problem, estimate_mixed(problem, [file.best.plan]), None)
    text = encode(again)
    if output.out is not None:
        write_text(output.out, text, force=output.force)
    if output.trace is not None:
        _trace(problem, again, output.trace, force=output.force, quiet=output.quiet)
    if output.memory and not output.json:
        from autoplan.cost.mixed.stages import mixed_stages
        from autoplan.report.mixed_search import print_mixed_answer
        from autoplan.report.terminal import make_console, print_waterfall

        print_mixed_answer(make_console(), again)
        print_waterfall(make_console(), mixed_stages(problem, again.best.plan))
    else:
        _show(again, text, json=output.json)


def explain_saved(file: MixedPlanFile, trace: Path | None, *, force: bool, json: bool, quiet: bool) -> None:
    """Say where time and memory of the plan of a file go, and why others lost."""
    from autoplan.api.plan_files import mixed_problem_of
    from autoplan.base.files import encode
    from autoplan.report.explain import print_mixed_explanation
    from autoplan.report.terminal import make_console
    from autoplan.search.mixed_explanation import explain_mixed

    problem = mixed_problem_of(file)
    found = explain_mixed(problem, file)
    if trace is not None:
        _trace(problem, file, trace, force=force, quiet=quiet)
    if json:
        typer.echo(encode(found), nl=False)
    else:
        print_mixed_explanation(make_console(), file, found)


def _trace(problem: MixedProblem, file: MixedPlanFile, path: Path, *, force: bool, quiet: bool) -> None:
    from autoplan.cli.trace import write_trace
    from autoplan.cost.mixed.stages import mixed_timeline
    from autoplan.report.mixed_search import describe

    plan = file.best.plan
    words = describe(plan, file.cluster.part_names)
    write_trace(mixed_timeline(problem, plan), words, path, force=force, quiet=quiet)
