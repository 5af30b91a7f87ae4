"""A process that answers command lines of one checkout, each in a child of its own that keeps no state.

usage: python -P benchmarks/answer_server.py CHECKOUT

It answers the commands that come as lines of JSON on standard input, with a line of JSON each (`Server`).
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

LIMIT_S = 600  # for one command

# Commands that load what commands load; only the modules are kept of them.
WARM_UP = (
    "search qwen2.5-0.5b --cluster h100-sxm:1x8 --global-batch 32 --seq-len 2048 --why",
    "search qwen2.5-0.5b --cluster h100-sxm:1x8+a100-sxm:1x8 --global-batch 32 --seq-len 2048 --out mixed.json --json",
    "export plan.json --to megatron-lm --out launch",
    "read launch/launch.sh --json",
    "estimate --from launch/launch.sh --cluster h100-sxm:1x8",
    "explain plan.json",
    "report plan.json",
    "compare qwen2.5-0.5b --cluster h100-sxm:1x8 --global-batch 32 --seq-len 2048",
)
ENVIRONMENT = {
    "COLUMNS": "80",
    "LANG": "C.UTF-8",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TERM": "dumb",
    "TZ": "UTC",
}


def as_text(path: Path) -> str:
    """Return the text of a file, or the hash of one that is none."""
    data = path.read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"{len(data)} bytes with SHA-256 {hashlib.sha256(data).hexdigest()}"


def run_command(arguments: list[str]) -> int:
    """Run the command line in this process; return its exit status, 70 where it failed with a traceback."""
    from autoplan.cli import main

    sys.argv = ["autoplan", *arguments]
    try:
        main()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except Exception as error:
        print(f"traceback: {type(error).__name__}: {error}", file=sys.stderr)
        return 70
    return 0


def in_child(folder: Path, stdout: Path, stderr: Path, arguments: list[str]) -> int:
    """Run a command in a child of this process, which so keeps no state of it; return its exit status."""
    child = os.fork()
    if child == 0:
        status = 71
        try:
            os.chdir(folder)
            for number, path in ((1, stdout), (2, stderr)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            status = run_command(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)
    return _wait(child)


def _wait(child: int) -> int:
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def load_modules() -> None:
    """Import what commands import, so that no child has to; a child of this process finds out what that is."""
    with tempfile.TemporaryDirectory() as name:
        listed = Path(name) / "modules"
        child = os.fork()
        if child == 0:
            try:
                os.chdir(name)
                for number in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
                for command in WARM_UP:
                    run_command(command.split())
                listed.write_text("\n".join(sys.modules))
            finally:
                os._exit(0)
        _wait(child)
        modules = listed.read_text().splitlines() if listed.exists() else []
    for module in modules:
        if module not in sys.modules:
            with suppress(Exception):
                importlib.import_module(module)


def serve(checkout: Path) -> None:
    """Answer the commands that come as lines of JSON, with a line of JSON each."""
    import autoplan

    if not Path(autoplan.__file__).resolve().is_relative_to(checkout.resolve()):
        sys.exit(f"{autoplan.__file__} is not of {checkout}")
    # Keep the pipe to ourselves: what a module prints when it is loaded would break it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load_modules()
    gc.freeze()
    for line in sys.stdin:
        task = json.loads(line)
        status = in_child(Path(task["folder"]), Path(task["stdout"]), Path(task["stderr"]), task["arguments"])
        print(json.dumps(status), file=answers, flush=True)


class Server:
    """A process of a checkout that answers commands one after another."""

    def __init__(self, checkout: Path, scratch: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AUTOPLAN", "XDG"))}
        home = {"PYTHONPATH": str(checkout), "HOME": str(scratch), "AUTOPLAN_DB": str(scratch / "timings.db")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(checkout)],
            env={**kept, **ENVIRONMENT, **home},
            cwd=scratch,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._scratch = scratch

    def run(self, folder: Path, arguments: list[str]) -> tuple[int, str, str]:
        """Run a command in a folder; return its exit status, its output and its errors."""
        stdout, stderr = self._scratch / "stdout", self._scratch / "stderr"
        task = {"folder": str(folder), "stdout": str(stdout), "stderr": str(stderr), "arguments": arguments}
        process = self._process
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that answers ended: {process.wait()}")
        return json.loads(answer), as_text(stdout), as_text(stderr)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
