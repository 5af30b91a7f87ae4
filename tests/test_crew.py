"""Real ranks, on gloo: they measure, and they crash, hang, lie and are killed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

import faulty_ranks
from stores import stored_records

pytest.importorskip("torch")

from autoplan.base.errors import InputError
from autoplan.base.processes import Children, CrewError, RankPlace, place_from
from autoplan.cli.process import leave_on_sigterm
from autoplan.profiler.crew import Crew
from autoplan.profiler.protocol import BESIDE, PRODUCTS_S, Hello, Job, Outcome, Task
from autoplan.profiler.record import Fingerprint
from autoplan.spec.operations import COLLECTIVES, Operation

# Which of the two timers speaks first, the barrier's or the watchdog's, depends on how busy the machine is.
HUNG = r"Rank.*\b1\b.*failed to pass|did not end within 6 s"
JOB = Job(allowance_s=0.01, limit_s=6.0, compares_devices=False)


def gemm(m: int = 32) -> Task:
    return Task(operation="gemm", shape=(m, 32, 32), dtype="fp32", kernel="mm")


def collective(operation: Operation, *shape: int, kernel: str = "gloo") -> Task:
    return Task(operation=operation, shape=shape, dtype="fp32", kernel=kernel)


def is_measured(outcome: Outcome) -> bool:
    return outcome.status in ("ok", "unstable", "contaminated") and len(outcome.samples_s) > 0


@pytest.fixture(scope="module")
def four() -> Iterator[tuple[Crew, Hello]]:
    with Crew(Job(allowance_s=0.01, compares_devices=True), None, 4, faulty_ranks.few_samples) as crew:
        hello = crew.start()
        assert hello is not None
        yield crew, hello


def test_ranks_say_where_and_what_they_are(four: tuple[Crew, Hello]) -> None:
    _, hello = four
    assert (len(hello.hosts), hello.num_nodes, hello.ranks_per_node) == (4, 1, 4)
    assert (hello.device_type, hello.fingerprint.device, hello.dtypes) == ("cpu", "cpu", ("fp32",))
    assert hello.kernels["gemm", "fp32"] == "mm"
    assert hello.kernels["all_reduce", "fp32"] == "gloo"
    assert len(hello.gemm_s) == 4
    assert sorted(hello.links_s) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert all(seconds > 0 for seconds in (*hello.gemm_s, *hello.links_s.values()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"power_cap_w": 500}, "power_cap_w is 700 for rank 0 on a and 500 for rank 1 on b: profile each kind"),
        ({"clock_mhz": 1410}, "clock_mhz is 1980 for rank 0 on a and 1410"),
        ({"nics": ()}, "nics is 'infiniband 400 Gb/s' for rank 0 on a and 'none' for rank 1 on b"),
        ({"power_cap_w": 690, "clock_mhz": 0}, ""),  # as cards of one kind differ, and not known
    ],
)
def test_ranks_with_other_caps_or_nics_are_refused(change: dict[str, Any], said: str) -> None:
    from autoplan.profiler.worker import _check_alike

    first = Fingerprint(device="h100-sxm", power_cap_w=700, clock_mhz=1980, nics=("infiniband 400 Gb/s",))
    with pytest.raises(InputError, match=re.escape(said)) if said else nullcontext():
        _check_alike(first, replace(first, **change), "rank 0 on a", "rank 1 on b")


def test_a_rank_out_of_memory_explains_those_that_were_aborted_for_want_of_it() -> None:
    with (
        Children(faulty_ranks.fill_or_abort, None, 3, limit_s=30.0) as ranks,
        pytest.raises(CrewError, match=r"^rank 1 out of memory: 1 GiB$") as caught,
    ):
        ranks.start()
    assert caught.value.is_out_of_memory


@pytest.mark.parametrize("operation", sorted(COLLECTIVES))
@pytest.mark.parametrize("num_groups", [1, 2])
def test_collectives_run_in_one_group_and_in_all_siblings(
    four: tuple[Crew, Hello], operation: Operation, num_groups: int
) -> None:
    crew, _ = four
    assert is_measured(crew.ask(collective(operation, 2, 2, num_groups, 4096)))


def test_a_collective_runs_over_all_ranks_and_beside_products(four: tuple[Crew, Hello]) -> None:
    crew, _ = four
    assert is_measured(crew.ask(collective("all_reduce", 4, 4, 1, 1000)))
    beside = crew.ask(collective("all_gather", 2, 2, 1, 4096, kernel="gloo" + BESIDE))
    assert is_measured(beside)
    assert float(beside.conditions[PRODUCTS_S]) > 0  # without it nobody could tell what the overlap cost


@pytest.mark.parametrize(
    ("operation", "shape", "clock"),
    [
        ("layer", (1, 16, 32, 48, 2, 2, 16, 2), ""),  # two groups of two side by side
        ("layer_weight_gradient", (1, 16, 32, 48, 2, 2, 16, 1), "cpu time"),
        ("replicated_layer", (1, 16, 32, 48, 2, 2, 16, 1, 1, 1), "cpu time"),
        ("sharded_layer", (1, 16, 32, 48, 2, 2, 16, 1, 4, 4), ""),
        ("resharded_layer", (1, 16, 32, 48, 2, 2, 16, 2, 2, 2), ""),
        ("head", (16, 32, 48, 2), ""),
    ],
)
def test_units_of_the_trainer_run_over_ranks(
    four: tuple[Crew, Hello], operation: Operation, shape: tuple[int, ...], clock: str
) -> None:
    crew, hello = four
    kernel = hello.kernels[operation, "fp32"]
    outcome = crew.ask(Task(operation=operation, shape=shape, dtype="bf16", kernel=kernel))
    assert is_measured(outcome)
    # Ranks that wait for each other are timed by the clock on the wall.
    assert outcome.conditions.get("clock", "") == clock


def test_a_pipeline_runs_over_ranks_and_its_host_work_is_timed_by_the_hosts_own_clock(four: tuple[Crew, Hello]) -> None:
    crew, hello = four
    kernel = hello.kernels["pipeline_actions", "fp32"]
    few, many = (
        crew.ask(Task(operation="pipeline_actions", shape=(micro_batches, 4, 4), dtype="fp32", kernel=kernel))
        for micro_batches in (4, 16)
    )
    assert is_measured(few)
    assert is_measured(many)
    assert few.conditions["clock"] == many.conditions["clock"] == "cpu time"
    # Every micro-batch brings two actions: four times as many take far longer, whatever else a step costs.
    assert min(many.samples_s) > 1.5 * min(few.samples_s)


def test_running_out_of_memory_is_an_outcome(four: tuple[Crew, Hello]) -> None:
    crew, _ = four
    outcome = crew.ask(Task(operation="gemm", shape=(2**40, 32, 2**10), dtype="fp32", kernel="mm"))
    assert outcome.status == "failed"
    assert outcome.reason.startswith("rank 0: out of memory")
    assert is_measured(crew.ask(gemm()))  # nobody is lost


def test_groups_that_do_not_fit_fail_and_harm_nobody(four: tuple[Crew, Hello]) -> None:
    crew, _ = four
    outcome = crew.ask(collective("all_reduce", 3, 3, 1, 4096))
    assert outcome.status == "failed"
    assert "do not fit" in outcome.reason
    assert is_measured(crew.ask(gemm()))


@pytest.fixture(scope="module")
def faulty_crew() -> Iterator[Crew]:
    with Crew(JOB, None, 2, faulty_ranks.prepare) as crew:
        yield crew


@pytest.fixture
def faulty(faulty_crew: Crew) -> Crew:
    """Two ranks that live when a test begins."""
    if not faulty_crew.pids:
        faulty_crew.start()
    return faulty_crew


def assert_lost(crew: Crew, task: Task, says: str) -> None:
    """Check that ranks end when one is lost, and `says` is why."""
    pids = crew.pids
    try:
        with pytest.raises(CrewError, match=says):
            crew.ask(task)
    finally:
        crew.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_kernel_that_fails_on_one_rank_is_an_outcome(faulty: Crew) -> None:
    outcome = faulty.ask(gemm(faulty_ranks.REFUSES))
    assert (outcome.status, outcome.samples_s) == ("failed", ())
    assert outcome.reason == "rank 1: RuntimeError: no kernel image is available"
    assert is_measured(faulty.ask(gemm()))


def test_garbage_from_a_rank_is_an_outcome(faulty: Crew) -> None:
    outcome = faulty.ask(gemm(faulty_ranks.LIES))
    assert (outcome.status, outcome.reason) == ("failed", "rank 1 returned no times but 'garbage'")
    assert is_measured(faulty.ask(gemm()))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (faulty_ranks.EXITS, "rank 1 exited with status 7"),
        (faulty_ranks.DIES, "rank 1 was ended by SIGKILL"),
        (faulty_ranks.HANGS, HUNG),
        (faulty_ranks.HANGS_INSIDE, HUNG),
    ],
)
def test_a_rank_that_is_lost_is_named_and_the_others_come_again(faulty: Crew, fault: int, says: str) -> None:
    assert_lost(faulty, gemm(fault), says)
    faulty.start()
    assert is_measured(faulty.ask(gemm()))


def stop_process(pid: int) -> None:
    """Until it has stopped: on a busy machine it goes on for a while after the signal, and may meet the others."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + 10.0
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED and time.monotonic() < until:
        time.sleep(0.01)


def test_a_rank_that_is_stopped_from_outside_is_named(faulty: Crew) -> None:
    stop_process(faulty.pids[1])
    assert_lost(faulty, gemm(), HUNG)


def test_a_leading_rank_that_is_stopped_is_found_by_its_silence(faulty: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.base.processes.GRACE_S", 1.0)
    stop_process(faulty.pids[0])
    assert_lost(faulty, gemm(), "no answer within")


def test_the_first_answer_may_take_as_long_as_the_caller_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to start comes on top of it."""
    monkeypatch.setattr("autoplan.base.processes.START_S", 0.0)
    monkeypatch.setattr("autoplan.base.processes.GRACE_S", 0.0)
    work = functools.partial(faulty_ranks.answer_late, after_s=1.0)
    with Children(work, None, 1, limit_s=60.0) as children:
        assert children.start() == "late"
    with Children(work, None, 1, limit_s=0.1) as children, pytest.raises(CrewError, match="no answer within"):
        children.start()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_ranks_are_started_or_ended_leaves_none_behind(
    number: signal.Signals, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[BaseProcess] = []

    def interrupted(process: BaseProcess) -> None:
        start(process)
        started.append(process)
        os.kill(os.getpid(), number)
        time.sleep(0.2)

    before = signal.getsignal(signal.SIGTERM)
    leave_on_sigterm()
    # Another thread, which does not block the signal, takes it meanwhile.
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    start = ForkServerProcess.start
    monkeypatch.setattr(ForkServerProcess, "start", interrupted)
    work = functools.partial(faulty_ranks.answer_late, after_s=600.0)
    try:
        with pytest.raises(error), Children(work, None, 2, limit_s=60.0) as ranks:
            ranks.start()
    finally:
        signal.signal(signal.SIGTERM, before)
        over.set()
    (rank,) = started  # the second was not begun any more
    with pytest.raises(ValueError, match="closed"):  # ended, and waited for
        rank.is_alive()


def test_ctrl_c_does_not_reach_what_ranks_are_forked_from(tmp_path: Path) -> None:
    """It loads torch for seconds, and would tell of an interrupt in all its words."""
    waiting_rank = functools.partial(faulty_ranks.end_late, after_s=0.0, mark=str(tmp_path / "ended"))
    with Children(waiting_rank, None, 1, limit_s=60.0) as ranks:
        ranks.start()
        server = psutil.Process(ranks.pids[0]).ppid()
        status = Path(f"/proc/{server}/status").read_text()
    blocked, ignored = (int(status.split(f"{name}:")[1].split()[0], 16) for name in ("SigBlk", "SigIgn"))
    assert blocked & ignored & 1 << (signal.SIGINT - 1)


def test_a_rank_ends_with_its_program_whatever_it_does(tmp_path: Path) -> None:
    program = (
        "import functools; from autoplan.base.processes import Children, RankPlace; from faulty_ranks import end_late\n"
        f"work = functools.partial(end_late, after_s=600.0, mark={str(tmp_path / 'ended')!r})\n"
        "ranks = Children(work, None, 1, limit_s=600.0)\nranks.start()\nprint(*ranks.pids, flush=True)\nranks.answer()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as started_here:
        assert started_here.stdout is not None
        rank = psutil.Process(int(started_here.stdout.readline()))
        started_here.kill()
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.wait(timeout=60)


def test_a_leading_rank_may_end_in_its_own_time_unless_something_is_wrong(tmp_path: Path) -> None:
    """Ranks that other programs started hear from it that there is no more to do."""
    place = RankPlace(rank=0, num_ranks=2, local_rank=0, meeting_point="env://", launcher="torchrun")

    def end(name: str, error: type[BaseException] | None) -> bool:
        work = functools.partial(faulty_ranks.end_late, after_s=1.0, mark=str(tmp_path / name))
        children = Children(work, place, 2, limit_s=60.0)
        assert children.start() == "here"
        children.__exit__(error)
        return (tmp_path / name).exists()

    assert end("well", None)
    assert not end("interrupted", KeyboardInterrupt)


PLACES = [
    (
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"},
        RankPlace(rank=3, num_ranks=8, local_rank=1, meeting_point="env://", launcher="torchrun"),
    ),
    (
        {
            "SLURM_PROCID": "9",
            "SLURM_STEP_NUM_TASKS": "16",
            "SLURM_LOCALID": "1",
            "SLURM_STEP_NODELIST": "gpu[007-009,12],login1",
            "SLURM_JOB_ID": "1234567",
        },
        RankPlace(rank=9, num_ranks=16, local_rank=1, meeting_point="tcp://gpu007:34067", launcher="srun"),
    ),
    (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            # Of the daemon that Slurm started for mpirun:
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_LOCALID": "0",
        },
        RankPlace(rank=1, num_ranks=2, local_rank=1, meeting_point="tcp://127.0.0.1:29500", launcher="mpirun"),
    ),
    (
        {
            "PMI_RANK": "5",
            "PMI_SIZE": "8",
            "MPI_LOCALRANKID": "1",
            "MPI_LOCALNRANKS": "4",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "7000",
        },
        RankPlace(rank=5, num_ranks=8, local_rank=1, meeting_point="tcp://10.0.0.1:7000", launcher="mpirun"),
    ),
    # A batch script is no rank: Slurm gives it a process id but no step.
    ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("variables", "expected"), PLACES)
def test_a_rank_reads_its_place_from_its_launcher(variables: dict[str, str], expected: RankPlace | None) -> None:
    assert place_from(variables) == expected


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("a1,b2", "a1"), ("gpu[03-10]", "gpu03"), ("r[1,5]-c", "r1-c"), ("dgx-[001]", "dgx-001")],
)
def test_the_first_host_of_a_step_is_where_ranks_meet(nodes: str, first: str) -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": nodes}
    place = place_from(variables)
    assert place is not None
    assert place.meeting_point == f"tcp://{first}:29500"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "must be whole numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is 2, but WORLD_SIZE is 2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "8", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}, "pass MASTER_ADDR"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}, "names no host"),
    ],
)
def test_a_place_that_cannot_be_is_refused(variables: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        place_from(variables)


# What each rank's program does under a launcher: the same file as in `autoplan profile`, without the command line.
PROGRAM = """
import os, sys
from autoplan.base.processes import place_from
from autoplan.profiler.crew import Crew
from autoplan.profiler.protocol import Job, Task
from autoplan.profiler.store import open_store
from autoplan.profiler.sweep import Progress, run
from autoplan.profiler.tasks import RankedTask

if __name__ == "__main__":
    place = place_from(os.environ)
    with Crew(Job(allowance_s=0.01, limit_s=30.0, compares_devices=False), place, place.num_ranks) as crew:
        hello = crew.start()
        if not crew.leads:
            crew.follow()
            sys.exit()
        tasks = [
            Task(operation="gemm", shape=(32, 32, 32), dtype="fp32", kernel="mm"),
            Task(operation="all_reduce", shape=(2, 2, 1, 4096), dtype="fp32", kernel="gloo"),
        ]
        planned = [RankedTask(task=task, effect_s=1.0, expected_s=1.0) for task in tasks]
        store, progress = open_store(sys.argv[1]), Progress(total=2)
        run(crew, hello, store, planned, budget_s=1e9, progress=progress, visits_spoilt=False)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def environment(**variables: str) -> dict[str, str]:
    tests = Path(__file__).parent
    folders = [str(tests.parent), str(tests), str(tests / "support")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), **variables}


def test_torchrun_starts_the_program_of_each_rank(program: Path, tmp_path: Path) -> None:
    store = tmp_path / "times.db"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    subprocess.run([*torchrun, str(program), str(store)], env=environment(), check=True, timeout=300)
    assert [record.operation for record in stored_records(store)] == ["gemm", "all_reduce"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def slurm(rank: int, port: int) -> dict[str, str]:
    return environment(
        SLURM_PROCID=str(rank),
        SLURM_STEP_NUM_TASKS="2",
        SLURM_LOCALID=str(rank),
        SLURM_STEP_NODELIST="localhost",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def test_srun_starts_the_program_of_each_rank(program: Path, tmp_path: Path) -> None:
    store, port = tmp_path / "times.db", free_port()
    command = [sys.executable, str(program), str(store)]
    ranks = [subprocess.Popen(command, env=slurm(rank, port)) for rank in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    assert len(stored_records(store)) == 2


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_under_a_launcher_a_killed_rank_ends_all_and_is_stored(program: Path, tmp_path: Path) -> None:
    """Nobody can start the rank again: both programs end with an error, and what was measured is kept."""
    store, port = tmp_path / "times.db", free_port()
    program.write_text(PROGRAM.replace("tasks = [", "tasks = 50 * ["))
    command = [sys.executable, str(program), str(store)]
    ranks = [subprocess.Popen(command, env=slurm(rank, port), stderr=subprocess.PIPE, text=True) for rank in range(2)]
    end = time.monotonic() + 240
    while not stored_records(store):
        assert time.monotonic() < end
        time.sleep(0.1)
    server = children(ranks[1].pid)[-1]
    (rank,) = children(server)
    os.kill(rank, signal.SIGKILL)
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "stored as failed; run the same command again for the rest" in errors[0]
    assert "rank 1 was ended by SIGKILL" in errors[1]
    records = stored_records(store)
    assert records[-1].status == "failed"
    assert all(record.status != "failed" for record in records[:-1])
