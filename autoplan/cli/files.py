"""Further files that commands write for a plan: a trace of one step, an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autoplan import api
from autoplan.cli.progress import progress_bar
from autoplan.cli.remarks import print_written

if TYPE_CHECKING:
    from autoplan.api.plan_result import PlanResult
    from autoplan.api.results import MixedPlanResult


def write_trace(result: PlanResult | MixedPlanResult, path: Path, *, force: bool, quiet: bool) -> None:
    """Write one step of the best plan as a Chrome trace."""
    from autoplan.base.files import write_text

    write_text(path, result.trace(), force=force)
    print_written(path, quiet=quiet, ending=": open it in ui.perfetto.dev")


def write_page(result: PlanResult | MixedPlanResult, path: Path, out: Path, *, force: bool, quiet: bool) -> None:
    """Write the page of a result with its plan file at `path` to the file `out`."""
    from autoplan.base.files import write_text

    with progress_bar(quiet=quiet, doing="preparing the page", unit="parts") as advance:
        page = api.page.page_of(result, path, advance)
    write_text(out, page, force=force)
    print_written(out, quiet=quiet)
