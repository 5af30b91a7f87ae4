"""Command `autoplan new`: a commented file of a cluster, a device or a model, to be filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan import api
from autoplan.cli.complete import words
from autoplan.cli.inputs import check_outputs
from autoplan.cli.options import ForceOption, QuietOption
from autoplan.cli.remarks import print_written

KINDS = ("cluster", "device", "model")


def new(
    kind: Annotated[
        str, typer.Argument(metavar="|".join(KINDS), help="What to describe.", autocompletion=words(KINDS))
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File to write.", show_default="KIND.toml")] = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a commented template file for a cluster, a device or a model.

    The file works as it is, and its comments say what to change: `autoplan search MODEL --cluster FILE`.
    """
    from autoplan.base.files import write_text

    text = api.listing.template(kind)
    path = out or Path(f"{kind}.toml")
    check_outputs(path, force=force)
    write_text(path, text, force=force)
    use = "autoplan search {} --cluster h100-sxm:1x8" if kind == "model" else "autoplan search llama3-8b --cluster {}"
    print_written(path, quiet=quiet, ending=f": {use.format(path)} --global-batch 64 --seq-len 4k")
