"""Names of the launchers, importable by the command-line help without anything else."""

from __future__ import annotations

from typing import Literal, get_args

Launcher = Literal["torchrun", "slurm", "mpirun", "trainjob", "jobset", "pytorchjob", "skypilot"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
DEFAULT_LAUNCHER: Launcher = "torchrun"
