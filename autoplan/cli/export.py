"""Command `autoplan export`: writes the files that start the run of a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import autoplan
from autoplan import api
from autoplan.base.errors import InputError
from autoplan.cli.complete import targets, words
from autoplan.cli.options import ForceOption, PlanArgument
from autoplan.cli.remarks import print_warnings
from autoplan.frameworks.registry import TARGETS, find_target
from autoplan.launch.names import DEFAULT_LAUNCHER, LAUNCHERS

ToOption = Annotated[
    str,
    typer.Option(
        metavar="TARGET",
        help=f"Framework, NAME or NAME@VERSION: {', '.join(TARGETS)}.",
        autocompletion=targets,
    ),
]
LauncherOption = Annotated[
    str,
    typer.Option(metavar="LAUNCHER", help=f"Launcher: {', '.join(LAUNCHERS)}.", autocompletion=words(LAUNCHERS)),
]
ImageOption = Annotated[
    str | None, typer.Option(metavar="IMAGE", help="Container image, on Kubernetes or with skypilot.")
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Write the files to this folder instead of stdout.")
]
NearestOption = Annotated[
    bool,
    typer.Option(
        "--nearest", help="If the target cannot express the plan, write the nearest one that it can, and say which."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: the files, and without --out their texts.")]


def export(
    plan: PlanArgument,
    to: ToOption,
    launcher: LauncherOption = DEFAULT_LAUNCHER,
    image: ImageOption = None,
    out: OutOption = None,
    nearest: NearestOption = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Write the launch files of a plan."""
    from autoplan.base.files import encode

    find_target(to)
    exported = autoplan.export(plan, to=to, launcher=launcher, image=image, nearest=nearest)
    print_warnings(exported.warnings)
    if out is not None:
        typer.echo(f"wrote {', '.join(map(str, exported.save(out, force=force)))}", err=True)
    if json and out is not None:
        written: dict[str, str | None] = {str(out / name): None for name in exported.texts}
        typer.echo(encode(api.export.Exported(plan=exported.plan, files=written)), nl=False)
    elif json:
        typer.echo(exported.to_json(), nl=False)
    elif out is not None:
        return
    elif len(exported.files) == 1:
        typer.echo(exported.files[0].text, nl=False)
    else:
        raise InputError(f"this plan needs {len(exported.files)} launch files: pass --out FOLDER")
