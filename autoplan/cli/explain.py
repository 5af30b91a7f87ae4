"""Command `autoplan explain`: shows where the time of a plan goes, what binds it, and why others lost."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import autoplan
from autoplan import api, report
from autoplan.base.errors import InputError
from autoplan.base.files import encode
from autoplan.cli.files import write_trace
from autoplan.cli.inputs import check_outputs, url_with_password
from autoplan.cli.options import DbOption, ForceOption, JsonOption, QuietOption, TraceOption

if TYPE_CHECKING:
    from autoplan.api.explain import ExplainResult, MixedExplainResult
    from autoplan.api.plan_result import PlanResult
    from autoplan.api.results import MixedPlanResult


PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json; its best plan is explained.")]
AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--versus", metavar="PLAN|CHANGES", help="Another plan.json, or changes to this one such as tp=4,pp=8."
    ),
]
TimingsOption = Annotated[
    bool,
    typer.Option(
        "--timings",
        help="Show the records behind each term: host, day, author, load, torch, driver; and what was not measured.",
    ),
]
MarkdownOption = Annotated[
    bool, typer.Option("--markdown", help="Print a block of Markdown, for a pull request, instead of tables.")
]


def explain(
    context: typer.Context,
    plan: PlanArgument,
    against: AgainstOption = None,
    timings: TimingsOption = False,
    trace: TraceOption = None,
    url: DbOption = None,
    force: ForceOption = False,
    markdown: MarkdownOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show where a plan's time and memory go, what limits it, what faster plans would need, and why others lost.

    Compares with all plans that differ in one or two choices, legal or not; on a mixed cluster, with plans that
    differ in sharding, recomputation, micro-batches or layers.
    """
    from autoplan.spec.axes import LABELS

    check_outputs(trace, force=force)
    if timings and (markdown or against is not None or trace is not None):
        raise InputError(
            "--timings prints the records behind a plan's time: leave --versus, --markdown and --trace out"
        )
    saved = api.plan_result.load_any_plan(plan, db=url_with_password(context, url))
    if markdown:
        if isinstance(saved, api.results.MixedPlanResult) or against is not None or json:
            raise InputError("--markdown prints one plan of equal nodes: leave --versus and --json out")
        label, step = api.export.next_step(saved.file, plan)
        typer.echo(report.markdown.markdown(saved.file, [step] if label == "next" else []), nl=False)
        return
    if timings:
        _print_timings(saved, plan, url_with_password(context, url), json=json)
        return
    explained: ExplainResult | MixedExplainResult
    if isinstance(saved, api.results.MixedPlanResult):
        if against is not None:
            raise InputError("--versus does not support mixed clusters yet: leave it out")
        explained = api.explain.explain_mixed(saved)
    else:
        explained = autoplan.explain(saved, versus=against, db=url_with_password(context, url))
    if trace is not None:
        write_trace(saved, trace, force=force, quiet=quiet)
    console = report.terminal.make_console()
    if json:
        typer.echo(explained.to_json(), nl=False)
    elif isinstance(explained, api.explain.MixedExplainResult):
        report.explain.print_mixed_explanation(console, explained.explained.file, explained.explanation)
    else:
        report.explain.print_explanation(console, explained.explained.file, explained.explanation, LABELS, str(plan))


def _print_timings(saved: PlanResult | MixedPlanResult, path: Path, url: str | None, *, json: bool) -> None:
    if not isinstance(saved, api.plan_result.PlanResult):
        raise InputError("--timings lists the records behind a plan of equal nodes: name a plan on one of the parts")
    sources = api.record_facts.step_sources(saved, url)
    if json:
        typer.echo(encode(sources), nl=False)
    else:
        report.timing_sources.print_step_sources(
            report.terminal.make_console(), saved.file, sources, shlex.quote(str(path))
        )
