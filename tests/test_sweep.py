from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

import faulty_ranks
from autoplan.base.processes import CrewError
from autoplan.cli.process import leave_on_sigterm
from autoplan.profiler import sweep
from autoplan.profiler.crew import Crew
from autoplan.profiler.protocol import Hello, Job, Outcome, Task
from autoplan.profiler.record import Fingerprint, Record, Status
from autoplan.profiler.store import open_store
from autoplan.profiler.sweep import Progress, extrapolations, outliers, run
from autoplan.profiler.tasks import RankedTask, ranked_tasks
from autoplan.readers.cluster import load_cluster
from stores import stored_records
from test_tasks import LAB, SCOPE


def test_the_slow_device_and_the_slow_link_are_named() -> None:
    pairs = {(0, 1): 1.0, (2, 3): 1.0, (0, 2): 1.3, (1, 3): 1.0, (0, 4): 9.0, (1, 5): 9.0, (2, 6): 9.1, (3, 7): 12.0}
    hello = replace(LAB, hosts=("a",) * 4 + ("b",) * 4, gemm_s=(1, 1.01, 1, 1, 1.2, 1, 1, 0.99), links_s=pairs)
    assert outliers(hello) == [
        "rank 4 on b: matrix products take 20 % longer than on the others",
        "between rank 0 on a and rank 2 on a: messages take 30 % longer than on the other links",
        "between rank 3 on a and rank 7 on b: messages take 33 % longer than on the other links",
    ]
    assert outliers(replace(LAB, gemm_s=(1.0, 1.2))) == [
        "rank 1 on a: matrix products take 20 % longer than on the others"
    ]
    assert outliers(LAB) == []


def test_what_a_smaller_allocation_cannot_show_is_told() -> None:
    hello = replace(LAB, fingerprint=Fingerprint(device="h100-sxm"), hosts=("a",) * 4 + ("b",) * 4)
    assert extrapolations(hello, load_cluster("h100-sxm:2x4")) == []
    assert extrapolations(hello, load_cluster("h100-sxm:16x8")) == [
        "groups over 3 to 16 nodes are scaled from those over 2 and fewer",
        "groups of 5 to 8 devices of a node are scaled from those of 4 and fewer, and groups that leave it keep the "
        "reference",
    ]
    one_host = replace(hello, hosts=("a",) * 8)
    assert extrapolations(one_host, load_cluster("h100-sxm:16x8")) == [
        "groups over several nodes are not measured on one: they keep the reference"
    ]
    rack = replace(
        hello,
        fingerprint=Fingerprint(device="gb200"),
        devices_per_domain=72,
        hosts=tuple(f"n{at // 4}" for at in range(72)),
    )
    assert (rack.num_domains, rack.ranks_per_domain) == (1, 72)
    assert extrapolations(rack, load_cluster("gb200-nvl72:1x72")) == []
    assert extrapolations(rack, load_cluster("gb200-nvl72:4x72")) == [
        "groups over several link domains are not measured on one: they keep the reference"
    ]
    assert "nothing here applies to it" in extrapolations(hello, load_cluster("b200:2x4"))[0]


pytest.importorskip("torch")

JOB = Job(allowance_s=0.01, limit_s=15.0, compares_devices=False)


def products(*sizes: int) -> list[RankedTask]:
    tasks = [Task(operation="gemm", shape=(m, 32, 32), dtype="fp32", kernel="mm") for m in sizes]
    return [RankedTask(task=task, effect_s=1.0, expected_s=0.1) for task in tasks]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Crew, Hello]]:
    with Crew(JOB, None, 2, faulty_ranks.few_samples) as crew:
        hello = crew.start()
        assert hello is not None
        yield crew, hello


def test_a_sweep_goes_on_after_ranks_are_lost_and_stores_why(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "times.db"))
    planned = products(16, faulty_ranks.DIES, 32, faulty_ranks.REFUSES, 48)
    progress = Progress(total=len(planned))
    with Crew(JOB, None, 2, faulty_ranks.prepare) as crew:
        hello = crew.start()
        assert hello is not None
        run(crew, hello, store, planned, budget_s=1e9, progress=progress, measured_by="ada", visits_spoilt=False)
    records = list(store.records())
    assert [record.shape[0] for record in records] == [16, faulty_ranks.DIES, 32, faulty_ranks.REFUSES, 48]
    assert [record.status == "failed" for record in records] == [False, True, False, True, False]
    assert [record.reason for record in records if record.status == "failed"] == [
        "rank 1 was ended by SIGKILL",
        "rank 1: RuntimeError: no kernel image is available",
    ]
    assert {record.measured_by for record in records} == {"ada"}
    assert progress.num_left == 0
    assert progress.counts()["gemm"]["failed"] == 2
    assert ranked_tasks(replace(SCOPE, only=("gemm",)), hello, store.measured_keys(hello.fingerprint)) != []
    # What failed once is tried again: another time it may run; what failed twice is left alone.
    failures = [record for record in records if record.status == "failed"]
    assert not {record.shape for record in failures} & {key[1] for key in store.measured_keys(hello.fingerprint)}
    store.add([replace(record, conditions={"failed_at": "2026-01-01T00:00:00+00:00"}) for record in failures])
    assert {record.shape for record in failures} <= {key[1] for key in store.measured_keys(hello.fingerprint)}


class ScriptedCrew(Crew):
    """Ranks whose answers are given."""

    def __init__(self, *statuses: Status) -> None:
        super().__init__(JOB, None, 1)
        self.statuses = iter(statuses)
        self.asked: list[int] = []

    def ask(self, message: object) -> Outcome:
        assert isinstance(message, Task)
        self.asked.append(message.shape[0])
        return Outcome(samples_s=(1.0 + len(self.asked),), status=next(self.statuses))


def test_sigterm_waits_until_a_measurement_is_stored(tmp_path: Path) -> None:
    """Even if another thread receives it, such as that of a progress bar."""
    before, over = signal.getsignal(signal.SIGTERM), threading.Event()
    leave_on_sigterm()
    threading.Thread(target=over.wait, daemon=True).start()
    progress = Progress(total=2)
    try:
        with ScriptedCrew("ok", "ok") as crew, open_store(str(tmp_path / "times.db")) as store:

            class Struck:
                measured_keys = store.measured_keys

                def add(self, records: Iterable[Record]) -> None:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.2)
                    store.add(records)

            with pytest.raises(SystemExit):
                run(crew, LAB, Struck(), products(16, 32), budget_s=1e9, progress=progress)
            assert [record.shape[0] for record in store.records()] == [16]
    finally:
        signal.signal(signal.SIGTERM, before)
        over.set()
    assert len(progress.outcomes) == 1


def test_what_was_spoilt_is_visited_again_after_the_rest(tmp_path: Path) -> None:
    planned = products(16, 32, 48, 64)
    statuses: tuple[Status, ...] = ("contaminated", "ok", "unstable", "failed", "ok", "unstable")
    progress = Progress(total=len(planned))
    crew = ScriptedCrew(*statuses)
    with crew, open_store(str(tmp_path / "times.db")) as store:
        run(crew, LAB, store, planned, budget_s=1e9, progress=progress)
        assert crew.asked == [16, 32, 48, 64, 16, 48]
        # Every visit is kept; of a task its settled one counts, else its last.
        assert [record.status for record in store.records()] == list(statuses)
        assert {task.shape[0]: outcome.status for task, outcome in progress.outcomes.items()} == {
            32: "ok",
            64: "failed",
            16: "ok",
            48: "unstable",
        }
    assert progress.num_left == 0
    assert progress.counts() == {"gemm": {"ok": 2, "failed": 1, "unstable": 1}}


def test_rounds_lie_between_the_visits_of_a_task(tmp_path: Path) -> None:
    """What failed is not asked for again, what the last round spoilt is; what was settled before stays so."""
    planned = products(16, 32, 48)
    progress = Progress(total=len(planned))
    crew = ScriptedCrew("ok", "unstable", "failed", "contaminated", "ok", "ok")
    with crew, open_store(str(tmp_path / "times.db")) as store:
        run(crew, LAB, store, planned, budget_s=1e9, progress=progress, num_visits=2)
        assert crew.asked == [16, 32, 48, 16, 32, 16]
        known = {visits: {key[1][0] for key in store.measured_keys(LAB.fingerprint, visits)} for visits in (1, 2, 3)}
    assert known == {1: {16, 32}, 2: {16}, 3: set()}  # 48 failed once, and is tried again another time
    assert progress.num_visits == 6
    assert {task.shape[0]: outcome.status for task, outcome in progress.outcomes.items()} == {
        48: "failed",
        32: "ok",
        16: "ok",
    }


def test_second_visits_end_where_the_machine_is_never_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.profiler.sweep.MIN_AGAIN_S", 0.0)
    monkeypatch.setattr("autoplan.profiler.sweep.time.monotonic", count(step=10.0).__next__)
    planned = products(*range(16, 176, 16))
    crew = ScriptedCrew(*["contaminated"] * 20)
    with crew, open_store(str(tmp_path / "times.db")) as store:
        run(crew, LAB, store, planned, budget_s=1e9, progress=Progress(total=len(planned)))
    assert len(planned) < len(crew.asked) <= 1.4 * len(planned)


def test_ranks_that_are_lost_again_and_again_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MAX_RESTARTS", 1)
    store = open_store(str(tmp_path / "times.db"))
    planned = products(*[faulty_ranks.EXITS] * 9)
    with Crew(JOB, None, 2, faulty_ranks.prepare) as crew:
        hello = crew.start()
        assert hello is not None
        with pytest.raises(CrewError, match="stored as failed; run the same command again for the rest"):
            run(crew, hello, store, planned, budget_s=1e9, progress=Progress(total=len(planned)))
    # The first and a restart, both alike except for their moments.
    lost = list(store.records())
    assert 1 <= len(lost) <= 2
    assert all("rank 1 exited with status 7" in record.reason for record in lost)


def test_a_budget_ends_a_sweep_before_it_is_exceeded(tmp_path: Path, pair: tuple[Crew, Hello]) -> None:
    crew, hello = pair
    store = open_store(str(tmp_path / "times.db"))
    progress = Progress(total=3)
    long = replace(products(32)[0], task=replace(products(32)[0].task, operation="dgrad"), expected_s=1e6)
    run(crew, hello, store, [products(16)[0], long, products(48)[0]], budget_s=1e3, progress=progress)
    assert [record.shape for record in store.records()][:2] == [(16, 32, 32), (48, 32, 32)]
    assert progress.num_left == 1


def test_a_budget_is_kept_on_a_link_that_is_slower_than_expected(tmp_path: Path) -> None:
    """Three warm-up calls, one for their number and five samples of the first alone took 9 s."""
    store = open_store(str(tmp_path / "times.db"))
    sends = [
        RankedTask(
            task=Task(operation="all_reduce", shape=(2, 2, 1, 1024 * size), dtype="fp32", kernel="gloo"),
            effect_s=1.0,
            expected_s=0.01,
        )
        for size in range(1, 5)
    ]
    progress = Progress(total=len(sends))
    with Crew(JOB, None, 2, faulty_ranks.slow_link) as crew:
        hello = crew.start()
        assert hello is not None
        run(crew, hello, store, sends, budget_s=2.5, progress=progress, visits_spoilt=False)
    assert progress.elapsed_s < 6.0
    (first,) = store.records()
    assert (first.status == "ok", len(first.samples_s) < 3) == (False, True)
    assert progress.num_left == 3


PROGRAM = """
import sys
from autoplan.spec.model import (ModelSpec)
from autoplan.frameworks.presets import load_framework
from autoplan.profiler.crew import Crew
from autoplan.profiler.protocol import Job
from autoplan.profiler.store import open_store
from autoplan.profiler.sweep import Progress, run
from autoplan.profiler.tasks import ranked_tasks
from test_tasks import SCOPE

if __name__ == "__main__":
    with Crew(Job(allowance_s=0.01, limit_s=15.0, compares_devices=False), None, 2) as crew:
        store, hello = open_store(sys.argv[1]), crew.start()
        planned = ranked_tasks(SCOPE, hello, store.measured_keys(hello.fingerprint))
        print(len(planned), *crew.pids, flush=True)
        run(crew, hello, store, planned, budget_s=1e9, progress=Progress(total=len(planned)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_sweep_keeps_what_it_measured_and_measures_only_the_rest(
    tmp_path: Path, number: signal.Signals, pair: tuple[Crew, Hello]
) -> None:
    program, path = tmp_path / "program.py", tmp_path / "times.db"
    program.write_text(PROGRAM)
    tests = Path(__file__).parent
    folders = [str(tests.parent), str(tests), str(tests / "support")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(program), str(path)]
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert first.stdout is not None
    total, *pids = map(int, first.stdout.readline().split())
    while len(stored_records(path)) < 3:
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(number)
    first.communicate(timeout=60)
    stored = stored_records(path)
    assert len({record.key for record in stored}) == len(stored) >= 3
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # no rank is left behind, even by SIGKILL
        assert time.monotonic() < end
        time.sleep(0.1)
    store, (crew, hello) = open_store(str(path)), pair
    planned = ranked_tasks(SCOPE, hello, store.measured_keys(hello.fingerprint))
    # What other load spoilt, or what did not settle, is worth another try.
    num_known = sum(record.status in ("ok", "failed") for record in stored)
    assert len(planned) == total - num_known
    run(crew, hello, store, planned[:2], budget_s=1e9, progress=Progress(total=len(planned)), visits_spoilt=False)
    again = stored_records(path)
    assert again[: len(stored)] == stored
    assert len(again) == len(stored) + 2
