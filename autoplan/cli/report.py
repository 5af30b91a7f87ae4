"""`autoplan report`: one HTML page that shows the answer of a search, why it is so, and what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan import api
from autoplan.cli.files import write_page
from autoplan.cli.inputs import check_outputs, whole_url
from autoplan.cli.options import DbOption, ForceOption, PlanArgument, QuietOption


def report(
    context: typer.Context,
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the page is written.")] = Path("report.html"),
    url: DbOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write one self-contained HTML page of a plan file: it loads nothing, and can be mailed or put on a wiki.

    What the file does not hold is searched and priced again: plans that none beats in time and memory, the best plans
    on fewer and more nodes, and the numbers that the answer hangs on.
    """
    check_outputs(out, force=force)
    result = api.plan_result.load_any_plan(plan, db=whole_url(context, url))
    write_page(result, plan, out, force=force, quiet=quiet)
