"""`autoplan export`: which script starts the run that a plan file describes?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.cli.inputs import ForceOption
from autoplan.errors import InputError, NoPlanError

TARGETS = ("megatron-lm",)
LAUNCHERS = ("torchrun", "slurm")


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    to: Annotated[str, typer.Option(metavar="TARGET", help=f"Framework: {', '.join(TARGETS)}.")],
    launcher: Annotated[str, typer.Option(metavar="LAUNCHER", help=f"{' or '.join(LAUNCHERS)}.")] = "torchrun",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to stdout.")] = None,
    force: ForceOption = False,
) -> None:
    """Print the launch script of a plan."""
    from autoplan.cli.inputs import check_output
    from autoplan.export.megatron_lm import export_megatron_lm
    from autoplan.files import decode, read_table, write_text
    from autoplan.result import PlanFile
    from autoplan.units import format_bytes

    if to not in TARGETS:
        raise InputError(f"no target {to!r}: known are {', '.join(TARGETS)}")
    if out is not None:
        check_output(out, force=force)
    table = read_table(plan)
    if "mixed_schema_version" in table:
        raise NoPlanError(f"{plan}: no framework that is known here starts a plan whose replicas or stages are unlike")
    plan_file = decode(PlanFile, table, str(plan))
    if plan_file.best.verdict == "oom":
        raise NoPlanError(
            f"{plan}: the plan needs {format_bytes(plan_file.best.memory_bytes)} and would run out of memory: "
            "search for one that fits"
        )
    if launcher == "torchrun":
        script = export_megatron_lm(plan_file, "torchrun")
    elif launcher == "slurm":
        script = export_megatron_lm(plan_file, "slurm")
    else:
        raise InputError(f"no launcher {launcher!r}: known are {', '.join(LAUNCHERS)}")
    if out is None:
        typer.echo(script, nl=False)
    else:
        write_text(out, script, force=force, executable=True)
        typer.echo(f"wrote {out}", err=True)
