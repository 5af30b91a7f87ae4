"""`autoplan export`: which files start the run that a plan file describes?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.base.errors import InputError, NoPlanError
from autoplan.cli.complete import words
from autoplan.cli.options import ForceOption
from autoplan.frameworks.registry import TARGETS
from autoplan.launch.names import LAUNCHERS


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    to: Annotated[
        str, typer.Option(metavar="TARGET", help=f"Framework: {', '.join(TARGETS)}.", autocompletion=words(TARGETS))
    ],
    launcher: Annotated[
        str,
        typer.Option(
            metavar="LAUNCHER", help=f"What starts it: {', '.join(LAUNCHERS)}.", autocompletion=words(LAUNCHERS)
        ),
    ] = "torchrun",
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Of the containers, on Kubernetes or with skypilot.")
    ] = None,
    target_version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Of the framework, where several are known.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the files into this folder instead of to stdout.")
    ] = None,
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest", help="Where the target cannot express the plan, write the nearest one that it can; says which."
        ),
    ] = False,
    force: ForceOption = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the files, with their texts without --out.")
    ] = False,
) -> None:
    """Write the files that start a plan."""
    from autoplan.api.plan_files import load_any_plan_file
    from autoplan.base.files import check_folder, write_folder
    from autoplan.base.units import format_bytes
    from autoplan.cli.nearest import startable
    from autoplan.cli.starting import NOT_STARTED
    from autoplan.launch.targets import exported
    from autoplan.spec.plan_file import MixedPlanFile

    if to not in TARGETS:
        raise InputError(f"no target {to!r}: known are {', '.join(TARGETS)}")
    if out is not None:
        check_folder(out, force=force)
    plan_file = load_any_plan_file(plan)
    if isinstance(plan_file, MixedPlanFile):
        raise NoPlanError(f"{plan}: {NOT_STARTED}")
    if plan_file.best.verdict == "oom":
        raise NoPlanError(
            f"{plan}: the plan needs {format_bytes(plan_file.best.memory_bytes)} and would run out of memory: "
            "search for one that fits"
        )
    plan_file = startable(plan_file, to, target_version, or_nearest=nearest)
    files = exported(plan_file, to, launcher, target_version, image)
    if out is not None:
        write_folder(out, {file.name: (file.text, file.executable) for file in files}, force=force)
        typer.echo(f"wrote {', '.join(str(out / file.name) for file in files)}", err=True)
    if json:
        from autoplan.base.files import encode
        from autoplan.cli.outputs import Exported

        texts = {str(out / file.name) if out else file.name: None if out else file.text for file in files}
        typer.echo(encode(Exported(plan=plan_file.best.plan.describe(), files=texts)), nl=False)
    elif out is not None:
        return
    elif len(files) == 1:
        typer.echo(files[0].text, nl=False)
    else:
        raise InputError(f"{len(files)} files start this plan: pass --out FOLDER")
