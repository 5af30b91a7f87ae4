"""`autoplan report`: one HTML page that shows the answer of a search, why it is so, and what to do next."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan import api
from autoplan.cli.files import write_page
from autoplan.cli.inputs import check_outputs, check_untyped, url_with_password
from autoplan.cli.options import DbOption, ForceOption, PlanArgument, QuietOption
from autoplan.cli.process import leave_on_sigterm

if TYPE_CHECKING:
    from autoplan.api.plan_result import PlanResult
    from autoplan.api.results import MixedPlanResult


def report(
    context: typer.Context,
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="HTML file to write.")] = Path("report.html"),
    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Serve an interactive page to a browser on this machine, instead of writing a file."
        ),
    ] = False,
    url: DbOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a self-contained HTML page of a plan file, to mail or to put on a wiki.

    It computes what the file does not contain: the Pareto front of time and memory, the best plans on fewer and more
    nodes, and the sensitivity of the answer.  With --serve nothing is searched: each change on the page prices one
    plan.
    """
    if serve:
        check_untyped(
            context, {"out", "force"}, "--serve shows the page in a browser", or_else=", and save the page from there"
        )
        return _serve(api.plan_result.load_any_plan(plan, db=url_with_password(context, url)))
    check_outputs(out, force=force)
    result = api.plan_result.load_any_plan(plan, db=url_with_password(context, url))
    write_page(result, plan, out, force=force, quiet=quiet)


def _serve(result: PlanResult | MixedPlanResult) -> None:
    """Serve the page until the program is interrupted, which is not a failure."""
    leave_on_sigterm()
    with api.serving.PageServer(result) as server, contextlib.suppress(KeyboardInterrupt):
        print(f"{server.address} shows the plan until Ctrl-C", flush=True)
        server.serve_forever()
