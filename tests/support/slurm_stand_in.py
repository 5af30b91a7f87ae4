"""Does what sbatch, squeue, scancel and srun do for trials: a Slurm of two slots, for machines without one.

Jobs are files in a folder; whoever asks moves them on.  A file `down` there stands for a slurmctld that is gone.
"""

from __future__ import annotations

import contextlib
import getopt
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLOTS = 2
CONTROLLER = "Unable to contact slurm controller (connect failure)"


def jobs(folder: Path) -> dict[int, dict[str, object]]:
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.job"))}


def keep(folder: Path, number: int, job: dict[str, object]) -> None:
    new = folder / f"{number}.new"
    new.write_text(json.dumps(job))
    new.rename(folder / f"{number}.job")


def kill(job: dict[str, object]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(str(job["pid"])), signal.SIGKILL)


def move_on(folder: Path) -> None:
    """Let what has ended end, end what has run for too long, and start what there is room for."""
    known = jobs(folder)
    for number, job in known.items():
        status = folder / f"{number}.status"
        if job["state"] == "RUNNING" and status.exists() and status.read_text():
            job["state"] = "COMPLETED" if status.read_text() == "0\n" else "FAILED"
            keep(folder, number, job)
        elif job["state"] == "RUNNING" and time.time() > float(str(job["until"])):
            kill(job)
            keep(folder, number, {**job, "state": "TIMEOUT"})
    known = jobs(folder)
    running = [job["name"] for job in known.values() if job["state"] == "RUNNING"]
    for number, job in known.items():
        if job["state"] != "PENDING" or len(running) >= SLOTS or job["name"] in running:
            continue
        with Path(str(job["output"])).open("wb") as output:
            started = subprocess.Popen(
                ["/bin/bash", "-c", '"$@"; echo $? >"$0"', str(folder / f"{number}.status"), *job["command"]],  # type: ignore[misc]
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "SLURM_JOB_ID": str(number)},
            )
        running.append(job["name"])
        keep(
            folder, number, {**job, "state": "RUNNING", "pid": started.pid, "until": time.time() + float(str(job["s"]))}
        )


def sbatch(folder: Path, words: list[str]) -> None:
    names = ["parsable", "no-requeue", "job-name=", "dependency=", "time=", "output=", "ntasks=", "partition="]
    given, command = getopt.getopt(words, "", names)
    options = dict(given)
    if "--partition" in options:
        sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
    hours, minutes, seconds = options["--time"].split(":")
    number = max([0, *jobs(folder)]) + 1
    keep(
        folder,
        number,
        {
            "name": options["--job-name"],
            "output": options["--output"],
            "s": int(hours) * 3600 + int(minutes) * 60 + int(seconds),
            "command": ["/bin/bash", *command],
            "state": "PENDING",
        },
    )
    print(number)


def squeue(folder: Path, words: list[str]) -> None:
    given, _ = getopt.getopt(words, "", ["user=", "name=", "states=", "noheader", "format="])
    names = dict(given)["--name"].split(",")
    for number, job in jobs(folder).items():
        if job["name"] in names:
            why = "NonZeroExitCode" if job["state"] == "FAILED" else "None"
            print(f"{job['name']}|{number}|{job['state']}|{why}")


def scancel(folder: Path, words: list[str]) -> None:
    given, _ = getopt.getopt(words, "", ["user=", "name="])
    for number, job in jobs(folder).items():
        if job["name"] == dict(given)["--name"] and job["state"] in ("PENDING", "RUNNING"):
            if job["state"] == "RUNNING":
                kill(job)
            keep(folder, number, {**job, "state": "CANCELLED"})


def scontrol(folder: Path, words: list[str]) -> None:
    command = jobs(folder)[int(words[2])]["command"]
    print(f"   Command={' '.join(command[1:])}")  # type: ignore[index]


def srun(folder: Path, words: list[str]) -> None:
    command = next(at for at, word in enumerate(words) if not word.startswith("--"))
    os.execvp(words[command], words[command:])


def sacct(folder: Path) -> None:
    """The accounting is what a test has written into a file; where that is not to be read, its daemon is gone."""
    accounting = folder / "accounting"
    if not accounting.exists():
        sys.exit("Slurm accounting storage is disabled")
    if not accounting.read_text():
        sys.exit("sacct: error: Problem talking to the database: Connection refused")
    print(accounting.read_text(), end="")


def main(program: str, folder: Path, words: list[str]) -> None:
    if program == "srun":
        srun(folder, words)
    if (folder / "down").exists():
        sys.exit(f"{program}: error: {CONTROLLER}")
    if program == "sacct":
        sacct(folder)
        return
    move_on(folder)
    try:
        {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol}[program](folder, words)
    except getopt.GetoptError as error:
        sys.exit(f"{program}: {error}")
    move_on(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
