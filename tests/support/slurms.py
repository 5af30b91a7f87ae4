"""Slurms to run trials on: a real one of one node with two slots, and a stand-in where none is installed."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "slurm_stand_in.py"
PROGRAMS = ("sbatch", "squeue", "scancel", "sacct", "scontrol", "srun")

# Nothing but Slurm itself: no munge, no accounting, no cgroups; all of it as the user who runs the tests.
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=1,bf_interval=1
MessageTimeout=3
KillWait=1
ReturnToService=2
GresTypes=gpu
NodeName={host} Gres=gpu:8 NodeAddr=127.0.0.1 CPUs=2 RealMemory=500 State=UNKNOWN
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class StandIn:
    """Programs with the names of Slurm's in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.state, self.bin = folder / "state", folder / "bin"
        self.state.mkdir()
        self.bin.mkdir()
        for name in PROGRAMS:
            command = f'exec "{sys.executable}" -I -S "{STAND_IN}" {name} "{self.state}" "$@"'
            write_program(self.bin / name, command)
        self.environment = {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def stop(self) -> None:
        """The controller is gone; what runs goes on."""
        (self.state / "down").touch()

    def go_on(self) -> None:
        (self.state / "down").unlink()

    def clear(self) -> None:
        """Nothing runs any more, and nothing is known."""
        for path in self.state.glob("*.job"):
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.killpg(json.loads(path.read_text())["pid"], signal.SIGKILL)
        for path in self.state.iterdir():
            path.unlink()

    def end(self) -> None:
        self.clear()


class RealSlurm:
    """slurmctld and slurmd with a configuration, ports and folders of their own."""

    def __init__(self, folder: Path) -> None:
        path = f"{os.environ['PATH']}:/usr/sbin"
        for tool in ("sbatch", "slurmctld", "slurmd"):
            if not shutil.which(tool, path=path):
                pytest.skip(f"{tool} is not installed (Debian: slurm-wlm)")
        self._folder, self.bin = folder, folder / "bin"
        for name in ("state", "spool", "bin"):
            (folder / name).mkdir()
        host = socket.gethostname().split(".")[0]
        text = SLURM_CONF.format(host=host, ports=_free_ports(), user=getpass.getuser(), folder=folder)
        (folder / "slurm.conf").write_text(text)
        for number in range(8):  # devices need a file each
            (folder / f"gpu{number}").symlink_to("/dev/null")
        (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={folder}/gpu[0-7]\n")
        self.environment = {"PATH": f"{self.bin}:{path}", "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._start("slurmctld", "-i")
        self._start("slurmd")
        for _ in range(60):
            said = subprocess.run(
                ["sinfo", "--noheader", "--format=%T"], env=self._variables, capture_output=True, text=True, check=False
            )
            if said.stdout.strip() == "idle":
                return
            time.sleep(0.25)
        self.end()
        pytest.skip(f"no Slurm starts here: {(folder / 'slurmd.log').read_text()[-300:]}")

    @property
    def _variables(self) -> dict[str, str]:
        return {**os.environ, **self.environment}

    def _start(self, daemon: str, *options: str) -> None:
        with (self._folder / f"{daemon}.log").open("ab") as log:
            self._daemons[daemon] = subprocess.Popen(
                [shutil.which(daemon, path=self.environment["PATH"]) or daemon, "-D", *options],
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        """Kill slurmctld, once it has saved that jobs have started: it does so every five minutes, and on changes."""
        saved, now = self._folder / "state" / "job_state", time.time()
        listed = subprocess.run(
            ["squeue", "--noheader", "--format=%A"], env=self._variables, capture_output=True, text=True
        )
        for job in listed.stdout.split():
            subprocess.run(["scontrol", "update", f"JobId={job}", "Comment=save"], env=self._variables, check=True)
        for _ in range(100):
            if saved.exists() and saved.stat().st_mtime > now:
                break
            time.sleep(0.1)
        self._daemons["slurmctld"].kill()
        self._daemons["slurmctld"].wait()

    def go_on(self) -> None:
        self._start("slurmctld")

    def clear(self) -> None:
        """Nothing runs any more."""
        for command in (["scancel", f"--user={getpass.getuser()}"], ["squeue", "--noheader"]):
            for _ in range(20):
                left = subprocess.run(command, env=self._variables, capture_output=True, check=False)
                if not left.stdout or left.returncode:
                    break
                time.sleep(0.2)

    def end(self) -> None:
        self.clear()
        for daemon in self._daemons.values():
            daemon.terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first_socket, socket.socket() as other:
        first_socket.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return first_socket.getsockname()[1], other.getsockname()[1]


def write_program(path: Path, lines: str) -> None:
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)


def slurms(kind: str, folder: Path) -> Iterator[StandIn | RealSlurm]:
    """A Slurm of that kind, ended at the end."""
    made = RealSlurm(folder) if kind == "Slurm" else StandIn(folder)
    try:
        yield made
    finally:
        made.end()
