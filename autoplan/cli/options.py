"""Flags shared by several commands: names, help and completion; `inputs` interprets them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.units import check_count
from autoplan.base.values import parse_count
from autoplan.cli.complete import clusters, frameworks, presets, words
from autoplan.cli.remarks import hide_remarks
from autoplan.frameworks.registry import TARGETS

RUNS_HELP = (
    "CSV table of runs with the columns id, framework, gpu, num_gpus, model, seq_len, global_batch, micro_batch, tp, "
    "pp, dp, sharding, recompute, status (ok or oom) and step_time_s; blank cells take defaults."
)


def whole_number(
    flag: str, metavar: str, help_: str, *, show_default: bool | str = True, at_least: int | None = None
) -> Any:  # typer.Option is untyped
    """Return an option for a whole number; anything else is a one-line error that names the flag.

    `show_default` describes the absence of an optional flag; `at_least` is a limit that no call of the API checks.

    The error is not a ValueError, which typer would turn into its own message of several lines.
    """

    def parse(text: str) -> int:
        try:
            count = parse_count(str(text), flag)  # a default is a number already
            if at_least is not None:
                check_count(flag, count, at_least=at_least)
            return count
        except InputError as error:
            raise AutoplanError(str(error)) from None

    return typer.Option(flag, metavar=metavar, help=help_, parser=parse, show_default=show_default)


MODEL: Any = typer.Argument(
    metavar="MODEL",
    help="Preset (llama3-70b), name on the Hugging Face hub, config.json or folder, or TOML file.",
    autocompletion=presets("models"),
)
ModelArgument = Annotated[str, MODEL]
OptionalModelArgument = Annotated[str | None, MODEL]
ClusterOption = Annotated[
    str,
    typer.Option(
        metavar="CLUSTER",
        help="Preset with a size (h100-sxm:16x8 = 16 nodes of 8), a cluster.toml, local (this machine), or several "
        "joined by +.",
        autocompletion=clusters,
    ),
]
OtherClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="CLUSTER", help="As for search.", autocompletion=clusters)
]
GlobalBatchOption = Annotated[int | None, whole_number("--global-batch", "N", "Sequences per step.")]
SEQ_LEN = whole_number("--seq-len", "TOKENS", "Sequence length; 8k is 8,192.")
SeqLenOption = Annotated[int, SEQ_LEN]
OptionalSeqLenOption = Annotated[int | None, SEQ_LEN]
FixOption = Annotated[
    list[str] | None,
    typer.Option("--fix", metavar="AXIS=VALUE", help="Consider only plans with this value (repeatable)."),
]
MaxOption = Annotated[
    list[str] | None,
    typer.Option("--max", metavar="AXIS=VALUE", help="Limit an axis, or raise its default limit (repeatable)."),
]
ForbidOption = Annotated[
    list[str] | None,
    typer.Option(
        "--forbid",
        metavar="CHOICE",
        help="Exclude uneven_stages, partial_recompute, partial_sharding, partial_offload, every value of an axis but "
        "its default (offload, cp), or one value such as schedule=zb-v or tp=8 (repeatable).",
    ),
]
FrameworkOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="Framework, NAME or NAME@VERSION, or TOML file.", autocompletion=frameworks),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|db",
        help="Your own calibration instead of the shipped one: a file, or fitted to the runs in the database.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Shell variable for a launch file (repeatable)."),
]
AsOption = Annotated[
    str | None,
    typer.Option(
        "--as", metavar="TARGET", help="Format of a launch file, if it is ambiguous.", autocompletion=words(TARGETS)
    ),
]
CommandOption = Annotated[bool, typer.Option("--command", help="Run PROGRAM, and read step times from its output.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", callback=hide_remarks, help="No progress bar and no warnings on stderr.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PlanJsonOption = Annotated[bool, typer.Option("--json", help="Print the plan file instead of tables.")]
LogToOption = Annotated[
    str | None,
    typer.Option("--log-to", metavar="TRACKER", help="Also log to wandb, mlflow or tensorboard (in the folder runs)."),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Also write one step as a Chrome trace for ui.perfetto.dev, with the ranks of each stage."
    ),
]
DbOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="SQLite file, or postgresql://user@host/name (password: PGPASSWORD or ~/.pgpass). Default: AUTOPLAN_DB, "
        "or a file in your user data folder.",
    ),
]
