"""`autoplan explain`: where does the time of a plan go, what binds it, and why did others lose?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan.base.errors import InputError
from autoplan.cli.options import DbOption, ForceOption, QuietOption, TraceOption

if TYPE_CHECKING:
    from autoplan.spec.explanation import Versus
    from autoplan.spec.plan import ParallelPlan
    from autoplan.spec.problem import Problem


def explain(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json, whose best plan is explained.")],
    against: Annotated[
        str | None,
        typer.Option(
            "--versus", metavar="PLAN|CHANGES", help="Another plan.json, or changes of this one such as tp=4,pp=8."
        ),
    ] = None,
    trace: TraceOption = None,
    url: DbOption = None,
    force: ForceOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Say where time and memory of a plan go, what binds it, what faster plans would need, and why others lost.

    Looks at all plans that differ in one or two choices, legal or not; where the parts of a cluster are unlike, at
    plans with one change of sharding, recomputation, micro-batches or layers.
    """
    from autoplan.api.plan_files import load_any_plan_file, problem_of
    from autoplan.base.files import encode
    from autoplan.cli.inputs import check_output, whole_url
    from autoplan.cli.trace import write_trace
    from autoplan.cost.timeline import timeline
    from autoplan.search.explain import explain as explained
    from autoplan.spec.plan_file import MixedPlanFile

    if trace is not None:
        check_output(trace, force=force)
    file = load_any_plan_file(plan)
    if isinstance(file, MixedPlanFile):
        from autoplan.cli.mixed import explain_saved

        if against is not None:
            raise InputError("--versus is not there for mixed clusters yet: leave it out")
        explain_saved(file, trace, force=force, json=json, quiet=quiet)
        return
    db = whole_url(context, url)
    problem, best = problem_of(file, db), file.best.plan
    found = explained(problem, file, _versus(problem, best, against, db) if against is not None else None)
    if trace is not None:
        write_trace(timeline(problem, best), best.describe(), trace, force=force, quiet=quiet)
    if json:
        typer.echo(encode(found), nl=False)
        return
    from autoplan.report.explain import print_explanation
    from autoplan.report.terminal import make_console
    from autoplan.spec.axes import LABELS

    print_explanation(make_console(), file, found, LABELS, str(plan))


def _versus(problem: Problem, best: ParallelPlan, against: str, url: str | None) -> Versus:
    """The other plan: of a file with its own problem, or this one with changes."""
    from autoplan.api.plan_files import read_plan
    from autoplan.base.files import is_file
    from autoplan.search.explain import changed, versus

    path = Path(against)
    if is_file(path):
        theirs, other, _ = read_plan(path, url)
        return versus(problem, best, against, other, theirs)
    return versus(problem, best, against, changed(problem, best, against), problem)
