"""Names of the launchers, for the help of the command line, which imports nothing else."""

from __future__ import annotations

from typing import Literal, get_args

Launcher = Literal["torchrun", "slurm", "mpirun", "trainjob", "jobset", "pytorchjob", "skypilot"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
