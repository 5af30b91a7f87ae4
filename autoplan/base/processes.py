"""Processes of a job: finds this program's place in it, starts its ranks as children, and outlives them.

On one machine the program starts all ranks itself.  Under torchrun, Slurm's srun or MPI it is started once per rank,
reads its place from their variables, and starts that one rank.  In both cases the program next to rank 0 controls the
work and collects the results, so that no result is lost with a rank that crashes, hangs or is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

from autoplan.base.errors import InputError, RunFailedError
from autoplan.base.hostlist import expand_hosts
from autoplan.base.units import cleaned

START_S = 180.0  # for importing torch from a busy file system and for the rendezvous
GRACE_S = 5.0  # for ranks to report errors or disconnect before they are killed
PATIENCE_S = 0.2  # for ranks that no other rank waits for
_HUNG_STATUS = 1  # exit status of faulthandler's watchdog
# Ranks inherit one thread each, set before torch is imported (`closed-loop` 2.1).
# Freed host memory is kept, like that of accelerators: otherwise every step page-faults on the memory that the last one
# returned.
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the maximum in glibc
}
# Defaults: no C++ stack traces of torch for errors that the ranks report themselves, and expandable memory segments.  A
# step of 125 GiB in fixed-size blocks ran out of 140 GiB, with 17 GiB reserved but fragmented.
_USUAL = {"TORCH_CPP_LOG_LEVEL": "FATAL", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_SAME = {"PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")}  # alternative names
_PORT = 29500  # torch's own default
_LOCAL_PORTS = 10_000  # so that Slurm jobs on the same node use different ports


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Place of a rank in the job, and the rendezvous URL for torch.distributed."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    meeting_point: str = ""
    launcher: str = ""  # blank: this program starts all ranks


class CrewError(RunFailedError):
    """Ranks were lost: they crashed, hung or could not connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Last message of a rank."""

    text: str
    is_out_of_memory: bool = False


# The whole work of a rank, given its place and the connection to the program that started it.
Work = Callable[[RankPlace, Connection], None]


def check_torch() -> None:
    """Raise an error on a machine that cannot run ranks."""
    if missing := [name for name in ("torch", "psutil") if importlib.util.find_spec(name) is None]:
        raise InputError(f"this needs {' and '.join(missing)}: pip install 'autoplan[profile]'")


def place_from(variables: Mapping[str, str]) -> RankPlace | None:
    """Return the place that a launcher gave this program; None without a launcher.

    torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.  Open MPI: OMPI_COMM_WORLD_*.  MPICH and Intel MPI
    (hydra): PMI_RANK, PMI_SIZE, MPI_LOCALRANKID.  srun: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; a batch
    script has the first and last of these too, but no step.  MPI comes before Slurm, because its daemons inherit
    Slurm's variables.
    """
    for launcher, rank, size, local in (
        ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ):
        if not all(name in variables for name in (rank, size, local)):
            continue
        try:
            numbers = [int(variables[name]) for name in (rank, size, local)]
        except ValueError:
            raise InputError(f"{launcher}: {rank}, {size} and {local} must be whole numbers") from None
        if not 0 <= numbers[0] < numbers[1]:
            raise InputError(f"{launcher}: {rank} is {numbers[0]}, but {size} is {numbers[1]}")
        return RankPlace(
            rank=numbers[0],
            num_ranks=numbers[1],
            local_rank=numbers[2],
            meeting_point=_meeting_point(launcher, variables),
            launcher=launcher,
        )
    return None


def _meeting_point(launcher: str, variables: Mapping[str, str]) -> str:
    if launcher == "torchrun":
        return "env://"  # torchrun's agent may host the store itself, which torch detects from its variables
    port = variables.get("MASTER_PORT")
    if address := variables.get("MASTER_ADDR"):
        return f"tcp://{address}:{port or _PORT}"
    if launcher == "srun":
        job = int(re.sub(r"\D", "", variables.get("SLURM_JOB_ID", "")) or 0)
        return f"tcp://{_first_host(variables.get('SLURM_STEP_NODELIST', ''))}:{port or _PORT + job % _LOCAL_PORTS}"
    if variables.get("OMPI_COMM_WORLD_LOCAL_SIZE", variables.get("MPI_LOCALNRANKS")) == variables.get(
        "OMPI_COMM_WORLD_SIZE", variables.get("PMI_SIZE")
    ):
        return f"tcp://127.0.0.1:{port or _PORT}"
    raise InputError("mpirun over several nodes: pass MASTER_ADDR=<host of rank 0> on, such as with -x MASTER_ADDR")


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's 'gpu[003-010,012],login1'."""
    try:
        return expand_hosts(nodes)[0]
    except InputError:
        raise InputError(f"SLURM_STEP_NODELIST {nodes!r} names no host: pass MASTER_ADDR=<host of rank 0> on") from None


def _local_places(num_ranks: int, meeting_file: Path) -> list[RankPlace]:
    """Return the places of ranks that all run here and use a file for the rendezvous."""
    url = f"file://{meeting_file}"
    return [RankPlace(rank=rank, num_ranks=num_ranks, local_rank=rank, meeting_point=url) for rank in range(num_ranks)]


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL` for 9; most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Children:
    """Ranks started by this program, as a context manager that ends them on exit.

    `work` must be picklable and imports torch itself; an answer may take `limit_s`, the first one `START_S` more.
    Modules in `preload` are imported once for all ranks.
    """

    def __init__(
        self,
        work: Work,
        place: RankPlace | None,
        num_ranks: int,
        *,
        limit_s: float,
        preload: Sequence[str] = ("torch",),
    ) -> None:
        self._work, self._place, self._num_ranks, self._limit_s = work, place, num_ranks, limit_s
        self._preload = list(preload)
        self._processes: list[BaseProcess] = []
        self._lines: list[Connection] = []
        self._starts = 0
        try:
            self._folder = tempfile.mkdtemp(prefix="autoplan-ranks-")
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"ranks have no shared temporary folder: {reason}; set TMPDIR to one with space") from None

    @property
    def leads(self) -> bool:
        """Return whether rank 0 is among the ranks, so that this program controls the work."""
        return self._place is None or self._place.rank == 0

    @property
    def _answer_s(self) -> float:
        return self._limit_s + 2 * GRACE_S

    @property
    def can_restart(self) -> bool:
        """Return whether lost ranks can be started again: all of them must be children of this program."""
        return self._place is None

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the ranks, by rank."""
        return [process.pid or 0 for process in self._processes]

    def start(self) -> Any:
        """Start the ranks and return the first answer of rank 0; None if rank 0 is not here."""
        self._starts += 1
        if self._place and self.leads:
            _check_port(self._place.meeting_point)
        places = (
            [self._place]
            if self._place
            else _local_places(self._num_ranks, Path(self._folder) / f"meeting-{self._starts}")
        )
        context = _server(self._preload)
        for place in places:
            own_end, child_end = context.Pipe()
            process = context.Process(
                target=_be_rank, args=(place, self._work, child_end), name=f"rank {place.rank}", daemon=True
            )
            with undisturbed():  # so that every started rank is recorded and will be ended
                process.start()
                self._processes.append(process)
                self._lines.append(own_end)
            child_end.close()
        if not self.leads:
            return None
        return self._answer(START_S + self._answer_s)

    def ask(self, message: object) -> Any:
        """Send `message` and return rank 0's answer, after the work of all ranks."""
        try:
            self._lines[0].send(message)
        except OSError:
            raise self._lost() from None
        return self.answer()

    def answer(self) -> Any:
        """Wait for the next message of rank 0."""
        return self._answer(self._answer_s)

    def follow(self) -> None:
        """Wait until the rank that was started here ends; raises an error unless it succeeds."""
        self._processes[0].join()
        if self._processes[0].exitcode:
            raise self._lost()

    def _answer(self, limit_s: float) -> Any:
        line = self._lines[0]
        end = time.monotonic() + limit_s
        while True:
            ready = wait([line, *(process.sentinel for process in self._processes)], max(end - time.monotonic(), 0))
            if line in ready:
                with contextlib.suppress(EOFError, OSError):
                    answer = line.recv()
                    if not isinstance(answer, Fault):
                        return answer
                    raise self._lost(answer)
                raise self._lost()
            if ready:
                raise self._lost()
            if time.monotonic() >= end:
                raise CrewError(f"no answer within {limit_s:.0f} s")

    def _lost(self, first: Fault | None = None) -> CrewError:
        """Return the reason why ranks were lost: memory, or the killed rank that others missed (NCCL aborts those)."""
        words = {} if first is None else {0: first}
        killed: dict[int, str] = {}
        # Other ranks may know the cause better than the first one that reports.
        end = time.monotonic() + (GRACE_S / 5 if words else GRACE_S)
        while time.monotonic() < end:
            for at, (process, line) in enumerate(zip(self._processes, self._lines, strict=True)):
                with contextlib.suppress(EOFError, OSError):
                    while at not in words and line.poll():
                        if isinstance(message := line.recv(), Fault):
                            words[at] = message
                code = process.exitcode
                if code is not None and code < 0:
                    killed[at] = f"was ended by {signal_name(-code)}"
                elif code == _HUNG_STATUS and at not in words:
                    killed[at] = f"did not end within {self._limit_s:.0f} s"
                elif code is not None and at not in words:
                    killed[at] = f"exited with status {code} without a message"
            if killed:
                break
            time.sleep(0.05)
        offset = self._place.rank if self._place else 0
        full = {at: fault.text for at, fault in words.items() if fault.is_out_of_memory}
        causes = full or killed or {at: fault.text for at, fault in words.items()}
        return CrewError(
            cleaned("; ".join(f"rank {offset + at} {text}" for at, text in sorted(causes.items()))),
            is_out_of_memory=bool(full),
        )

    def stop(self, patience_s: float = PATIENCE_S) -> None:
        """End the ranks: those waiting for a task immediately, others after `patience_s`, however busy."""
        with undisturbed():
            for line in self._lines:
                line.close()  # a rank that waits for the next task then ends by itself
            for process in self._processes:
                process.join(patience_s)
                if process.is_alive():
                    process.kill()  # also works if it is stopped or stuck in a driver
                process.join()
                process.close()
            self._processes, self._lines = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # Rank 0 tells the ranks of other programs to end; if it is killed too early, they end with an error.
        self.stop(GRACE_S if self._place and error is None else PATIENCE_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def _check_port(meeting_point: str) -> None:
    """Raise an error, before any rank waits, if rank 0 could not listen at its port."""
    if not meeting_point.startswith("tcp://"):
        return
    port = int(meeting_point.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise InputError(
            f"ranks cannot meet at port {port} of this host: {reason}; set MASTER_PORT to another"
        ) from None


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block; processes started inside ignore Ctrl-C permanently.

    If this thread blocks a signal, another thread receives it and Python still runs the handler in the main thread, so
    the handler is delayed too.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handlers: dict[int, Any] = {}
    received: list[int] = []
    if threading.current_thread() is threading.main_thread():
        handlers = {n: handler for n in (signal.SIGINT, signal.SIGTERM) if (handler := signal.getsignal(n)) is not None}
    for number in handlers:
        signal.signal(number, lambda received_number, _: received.append(received_number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


def _server(preload: list[str]) -> ForkServerContext:
    """Start the fork server of the ranks: torch is imported once, without touching a device, as CUDA requires."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    before = {name: os.environ.get(name) for name in (*_VARIABLES, *_USUAL)}
    resource_tracker.ensure_running()  # if started later, it would unblock Ctrl-C
    try:
        os.environ.update(_VARIABLES)
        for name, value in _USUAL.items():
            if not any(variable in os.environ for variable in _SAME.get(name, ())):
                os.environ.setdefault(name, value)
        with undisturbed():
            forkserver.ensure_running()
    finally:
        for name, former in before.items():
            if former is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = former
    return context


def _be_rank(place: RankPlace, work: Work, line: Connection) -> None:
    """Run a rank, from start to end, in its own process."""
    gc.freeze()  # preloaded modules are no garbage: scanning torch takes half a second every time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal, but only the program reacts
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_program, daemon=True).start()
    os.dup2(2, 1)  # results use standard output, to which libraries such as NCCL would write too
    if not place.launcher:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name may not resolve
    try:
        work(place, line)
    except ImportError as error:
        line.send(Fault(text=f"cannot start: {error}"))
        os._exit(2)


def _end_with_program() -> None:
    """End this rank if the program that started it is gone, as it may wait for ranks that will never come."""
    program = multiprocessing.parent_process()
    assert program is not None
    program.join()
    os._exit(2)
