"""Which command writes the files that start a plan?"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from autoplan.base.errors import AutoplanError, NoPlanError

if TYPE_CHECKING:
    from autoplan.spec.plan_file import PlanFile


NOT_STARTED = "no framework that is known here starts a plan whose replicas or stages are unlike"


def start_of(file: PlanFile, path: Path, launcher: str = "torchrun") -> str:
    """The command that writes what starts the plan of the file at `path`; an `AutoplanError` says why there is none."""
    from autoplan.frameworks.registry import TARGETS
    from autoplan.launch.targets import job_of

    # What runs today, else what bears the name of its rules, comes before others that take the plan.
    first = (file.today.target if file.today else "", file.framework.rules)
    names = [one.name for one in TARGETS.values() if file.framework.rules in one.rules]
    target = min(names, key=lambda name: first.index(name) if name in first else len(first), default=None)
    if target is None:
        raise NoPlanError(f"no launch files are written for {file.framework.name}")
    job_of(file, target)
    return f"autoplan export {shlex.quote(str(path))} --to {target} --launcher {launcher} --out launch"


def next_step(file: PlanFile, path: Path) -> tuple[str, str]:
    """(label, what to type next), or why no file starts the plan of the file at `path`."""
    try:
        return "next", start_of(file, path)
    except AutoplanError as error:
        return "no launch script", str(error)
