"""Measuring rank: joins the others, then runs the tasks of rank 0 until there are no more.

A rank is a child of the started program (`launch`).  Messages between ranks use gloo on the host, even if devices use
NCCL.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoplan.base.errors import InputError
from autoplan.base.processes import GRACE_S, START_S, Fault, RankPlace
from autoplan.base.units import cleaned
from autoplan.profiler.machine.environment import fingerprint
from autoplan.profiler.machine.sensors import Sensors
from autoplan.profiler.operations import attention, collectives, kernels, trainer_units
from autoplan.profiler.operations.given_kernels import GivenKernel, check_runs, given_kernels
from autoplan.profiler.operations.inputs import DTYPES, BesideRun, InputFactory, Run, StagedRun
from autoplan.profiler.protocol import BESIDE, PRODUCTS_S, Hello, Job, Outcome, Task, ranks_in_domain, rules_for
from autoplan.profiler.record import SETTINGS, Fingerprint, settings_differ
from autoplan.profiler.timer import measure, synchronise
from autoplan.spec.operations import COLLECTIVES, GIVEN_KERNELS, GROUPED, Operation
from autoplan.trainer.device import describe
from autoplan.trainer.device import join as join_ranks

CHECK_SIZE = {"cpu": 512, "cuda": 8192}  # size of the GEMM that compares devices
CHECK_BYTES = {"cpu": 2**22, "cuda": 2**28}  # size of the message that compares links
CHECK_REPEATS = 10
IDLE_S = 3600.0  # maximum wait of a rank for the next task
# Settings of NCCL and RCCL made by the user; their own choices are not reported.
NCCL_SETTINGS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NVLS_ENABLE")


@dataclass(kw_only=True)
class Ranks:
    """The ranks of this job, from the view of one of them."""

    rank: int
    hosts: list[str]  # host of every rank
    device: torch.device
    sensors: Sensors
    groups: collectives.Groups
    grids: trainer_units.Grids
    control: dist.ProcessGroup  # gloo, on the host
    given: dict[Operation, GivenKernel]  # kernels named by the user
    until: float = math.inf  # deadline of the current task, by the monotonic clock
    decider: int = 0  # rank whose times apply to all ranks in the current task; not an idle one

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, by rank, on every rank."""
        self.meet()
        brought: list[Any] = [None] * len(self.hosts)
        dist.all_gather_object(brought, value, group=self.control)
        return brought

    def decide(self, value: float) -> float:
        """Return the deciding rank's value on every rank."""
        return float(self.share(value, self.decider))

    def share(self, value: object, source: int = 0) -> Any:
        """Return the object of one rank on every rank."""
        box = [value]
        dist.broadcast_object_list(box, source, group=self.control)
        return box[0]

    def meet(self) -> None:
        """Wait for all ranks, for less time than the watchdogs, so that rank 0 can name missing ranks."""
        left_s = min(max(self.until - time.monotonic(), 1.0), IDLE_S)
        dist.monitored_barrier(self.control, datetime.timedelta(seconds=left_s), wait_all_ranks=True)


def join(place: RankPlace, job: Job) -> Ranks:
    """Take a device, join the other ranks, and return them."""
    device = join_ranks(place, job.limit_s)
    torch.manual_seed(place.rank)
    control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=IDLE_S))
    assert control is not None
    host = cleaned(socket.gethostname())
    hosts: list[Any] = [None] * place.num_ranks
    dist.all_gather_object(hosts, host, group=control)
    nodes = list(dict.fromkeys(hosts))
    per_node = place.num_ranks // len(nodes)
    if hosts != [node for node in nodes for _ in range(per_node)]:
        raise InputError(f"ranks must fill the nodes one after the other, equally many on each, got {hosts}")
    in_domain = ranks_in_domain(place.num_ranks, per_node, job.devices_per_domain)
    return Ranks(
        rank=place.rank,
        hosts=hosts,
        device=device,
        sensors=Sensors(device, host),
        groups=collectives.Groups(place.rank, place.num_ranks // in_domain, in_domain),
        grids=trainer_units.Grids(place.num_ranks, per_node, device),
        control=control,
        given=given_kernels(job.kernels, job.layer_kernels),
    )


def greet(ranks: Ranks, job: Job) -> Hello:
    """Return the first message of the ranks, the same on each, which describes the available operations and devices."""
    device, hosts = ranks.device, ranks.hosts
    num_nodes = len(set(hosts))
    machine = fingerprint(device, num_hosts=num_nodes, devices_here=len(hosts) // num_nodes)
    for rank, peer_machine in enumerate(ranks.gather(machine)):
        _check_alike(machine, peer_machine, f"rank 0 on {hosts[0]}", f"rank {rank} on {hosts[rank]}")
    dtypes = job.dtypes or (_default_dtype(device),)
    implementations: dict[tuple[Operation, str], str] = {}
    windowed: dict[tuple[Operation, str], str] = {}
    if ranks.rank == 0:
        for dtype in dtypes:
            for operation in kernels.KERNELS:
                implementations[operation, dtype] = kernels.implementation(operation, dtype, device)
                windowed[operation, dtype] = kernels.implementation_windowed(operation, dtype, device)
            if dtype in DTYPES:
                library = " ".join([machine.collectives.partition(" ")[0], *_settings()])
                implementations |= dict.fromkeys([(operation, dtype) for operation in COLLECTIVES], library)
            if job.layer_kernels == trainer_units.KERNEL:
                implementations |= {
                    (operation, dtype): trainer_units.implementation(operation, dtype)
                    for operation in trainer_units.UNITS
                }
            given = {operation: kernel for operation, kernel in ranks.given.items() if kernel.runs(operation, dtype)}
            check_runs(given, dtype, device)
            implementations |= {(operation, dtype): kernel.name for operation, kernel in given.items()}
            windowed |= {
                (operation, dtype): kernel.name
                for operation, kernel in given.items()
                if operation in GIVEN_KERNELS["attention"] and kernel.takes_windows
            }
    gemm_s, links_s = _compared(ranks) if job.compares_devices else ([], {})
    return Hello(
        fingerprint=machine,
        device_type=device.type,
        hosts=tuple(hosts),
        dtypes=dtypes,
        kernels=ranks.share({operation: kernel for operation, kernel in implementations.items() if kernel}),
        windowed=ranks.share({operation: kernel for operation, kernel in windowed.items() if kernel}),
        gemm_s=tuple(gemm_s),
        links_s=links_s,
        devices_per_domain=job.devices_per_domain,
    )


def _check_alike(first: Fingerprint, second: Fingerprint, where_first: str, where_second: str) -> None:
    """Raise an error if ranks differ in what a fingerprint describes."""
    for name in ("device", "driver", "runtime", "torch", "collectives", "nics", *SETTINGS):
        first_value, second_value = getattr(first, name), getattr(second, name)
        if settings_differ(first_value, second_value) if name in SETTINGS else first_value != second_value:
            raise InputError(
                f"{name} is {_written(first_value)} for {where_first} and {_written(second_value)} for {where_second}: "
                "profile each kind of node by itself"
            )


def _written(value: str | int | tuple[str, ...]) -> str:
    return repr(", ".join(value) or "none") if isinstance(value, tuple) else repr(value)


def _default_dtype(device: torch.device) -> str:
    if device.type == "cpu":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def _compared(ranks: Ranks) -> tuple[list[float], dict[tuple[int, int], float]]:
    """Return (seconds of one GEMM on every rank, seconds of one message between pairs of ranks), measured at once.

    Each rank exchanges messages at distances of 1, 2, 4 ..., so that every NIC and the links of every device are used.
    """
    device, size = ranks.device, CHECK_SIZE[ranks.device.type]
    factory = InputFactory(device=device, dtype=_default_dtype(device))
    x, y, out = factory.normal(size, size), factory.normal(size, size), factory.zeros(size, size)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    gemm_s = ranks.gather(_least_s(lambda: torch.mm(x, y, out=out), device, clock))
    message = torch.zeros(CHECK_BYTES[device.type], dtype=torch.uint8, device=device)
    links_s: dict[tuple[int, int], float] = {}
    distance = 1
    while distance < len(ranks.hosts):
        partner = ranks.rank ^ distance
        rank_s = 0.0
        if partner < len(ranks.hosts):
            move = functools.partial(dist.send if ranks.rank < partner else dist.recv, message, partner)
            rank_s = _least_s(move, device, time.perf_counter)
        for rank, seconds in enumerate(ranks.gather(rank_s)):
            if rank < rank ^ distance < len(ranks.hosts):
                links_s[rank, rank ^ distance] = seconds
        distance *= 2
    return gemm_s, links_s


def _least_s(run: Run, device: torch.device, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(CHECK_REPEATS):
        began = clock()
        run()
        synchronise(device)
        times.append(clock() - began)
    return min(times)  # other load only adds to it


def prepare(task: Task, ranks: Ranks) -> Run | StagedRun | None:
    """Build the call for `task` on this rank (None if idle), allocate its memory, and run its kernels once."""
    factory = InputFactory(device=ranks.device, dtype=task.dtype, kernel=task.kernel)
    if task.kernel.endswith(BESIDE):
        return collectives.build_beside_gemm(task.operation, task.shape, factory, ranks.groups, ranks.decide)
    if task.partners:
        return collectives.build_pair(task.partners, task.shape[3], factory)
    if task.operation in COLLECTIVES:
        return collectives.build(task.operation, task.shape, factory, ranks.groups)
    given = ranks.given.get(task.operation)
    run: Run | StagedRun
    if given is not None and given.name == task.kernel:
        group = ranks.groups.of_neighbours(*task.shape[-2:]) if task.operation in GROUPED else None
        run = given.build(task.operation, task.shape, factory, group)
    elif task.operation in trainer_units.UNITS:
        return trainer_units.build(task.operation, task.shape, factory, ranks.grids)
    else:
        run = kernels.build(task.operation, task.shape, factory)
    run()
    synchronise(ranks.device)
    return run


Prepare = Callable[[Task, Ranks], Run | StagedRun | None]


def perform(task: Task, ranks: Ranks, job: Job, prepare: Prepare) -> Outcome:
    """Measure one task together with the other ranks; failures before they synchronise become an outcome."""
    began, run, trouble, backend = time.monotonic(), None, "", ""
    ranks.decider = next((rank for rank, partner in enumerate(task.partners) if rank != partner), 0)
    try:
        run = prepare(task, ranks)
        if (given := ranks.given.get(task.operation)) and given.name == task.kernel:
            backend = given.backend()
        elif task.operation in attention.OPERATIONS and callable(run):
            backend = attention.backend_of(run)
    except Exception as error:
        trouble = describe(error)
    troubles = ranks.gather(trouble)
    products_s = ranks.gather(run.products_s if isinstance(run, BesideRun) else 0.0)
    if any(troubles):
        del run
        _free(ranks.device)
        rank, text = next((rank, text) for rank, text in enumerate(troubles) if text)
        return Outcome(status="failed", reason=f"rank {rank}: {text}")
    # Only the host's own time for a pipeline counts, without waits for other stages.
    meets = trainer_units.meets(task.operation, task.shape) if task.operation in trainer_units.UNITS else False
    needs_all = meets or task.operation in COLLECTIVES or task.operation in GROUPED
    rules = rules_for(ranks.device.type, task.mode, allowance_s=job.allowance_s)
    outcome = measure(
        run,
        team=ranks,
        device=ranks.device,
        sensors=ranks.sensors,
        rules=rules.of_pairs() if task.partners else rules,
        is_collective=needs_all,
        counts_host=task.operation in trainer_units.UNITS,
        left_s=task.left_s - (time.monotonic() - began),
    )
    del run
    _free(ranks.device)
    settings = dict(setting.split("=", 1) for setting in _settings()) if needs_all else {}
    if backend:
        settings["backend"] = backend
    if any(products_s):
        settings[PRODUCTS_S] = f"{max(products_s):.4g}"
    return replace(outcome, conditions={**outcome.conditions, **settings})


def _settings() -> list[str]:
    """Return the user's settings of the collective library, which are recorded as a separate kernel."""
    return [f"{name}={cleaned(os.environ[name])}" for name in NCCL_SETTINGS if name in os.environ]


def _free(device: torch.device) -> None:
    """Free memory, and raise an error if the device no longer works."""
    gc.collect()
    if device.type != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)


def serve(place: RankPlace, job: Job, line: Connection, prepare_task: Prepare | None) -> None:
    """Serve as a rank until there are no more tasks, or the ranks fail as a group."""
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process lives
    try:
        # A watchdog in a separate thread ends this process even if a driver call never returns.
        faulthandler.dump_traceback_later(START_S, exit=True, file=nowhere)
        ranks = join(place, job)
        hello = greet(ranks, job)
        if ranks.rank == 0:
            line.send(hello)
        while True:
            faulthandler.cancel_dump_traceback_later()
            task = _received(line) if ranks.rank == 0 else None
            ranks.until = time.monotonic() + job.limit_s if ranks.rank == 0 else math.inf
            ranks.meet()
            task = ranks.share(task)
            if task is None:
                break
            ranks.until = time.monotonic() + job.limit_s
            faulthandler.dump_traceback_later(job.limit_s + GRACE_S, exit=True, file=nowhere)
            outcome = perform(task, ranks, job, prepare_task or prepare)
            if ranks.rank == 0:
                line.send(outcome)
        # No rank disconnects before all have received the end: gloo may report a connection closed right after its last
        # message as an error.  After that the order does not matter.
        with contextlib.suppress(RuntimeError):
            ranks.meet()
    except Exception as error:
        with contextlib.suppress(OSError):
            line.send(Fault(text=describe(error)))
        os._exit(2)  # a normal exit would wait for groups that no longer answer
    os._exit(0)


def _received(line: Connection) -> object:
    try:
        return line.recv()
    except (EOFError, OSError):  # the program has ended
        return None
