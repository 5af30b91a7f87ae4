"""Launchers, and the files that start a job under each."""

from __future__ import annotations

from collections.abc import Callable

from autoplan.frameworks.common.job import File
from autoplan.launch.kubernetes import jobset_files, pytorchjob_files, trainjob_files
from autoplan.launch.names import Launcher
from autoplan.launch.node_script import node_files
from autoplan.launch.schedulers import mpirun_files, slurm_files
from autoplan.launch.skypilot import skypilot_files
from autoplan.launch.start import Start


def _torchrun_files(start: Start) -> tuple[File, ...]:
    """Return the node script, which the user starts on every node."""
    where = ""
    if start.num_nodes > 1:
        where = " on every node" if start.hosts else " on every node, each with its NODE_RANK"
    how = f"bash THIS_FILE [OPTION ...]{where}; options given there come last and take precedence"
    return node_files(start, how)


_FILES: dict[Launcher, Callable[[Start], tuple[File, ...]]] = {
    "torchrun": _torchrun_files,
    "slurm": slurm_files,
    "mpirun": mpirun_files,
    "trainjob": trainjob_files,
    "jobset": jobset_files,
    "pytorchjob": pytorchjob_files,
    "skypilot": skypilot_files,
}


def launch_files(start: Start) -> tuple[File, ...]:
    """Return the file to start, files started by it, and files that the job reads; manifests contain all of them."""
    return _FILES[start.launcher](start)
