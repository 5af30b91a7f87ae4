"""Search by many processes: the same answer whoever prices what, is killed, stops or comes later."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.frameworks.nanotron.rules import layers_per_stage
from autoplan.search import study
from autoplan.search.blocks import Block, BlockOutcome, BlockResult, CellOutcome
from autoplan.search.findings import KEPT, Findings, NearBest
from autoplan.search.ledger import Ledger
from autoplan.search.ranking import seconds_per_sequence
from autoplan.search.space import Space
from autoplan.search.storage import fingerprint, join_study, opened
from autoplan.search.study import Shared, search
from autoplan.search.workers import worker_processes
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import SearchResult
from stores import postgres_schema
from test_study import DENSE, make

FORK = multiprocessing.get_context("fork")
NAME = "together"
GRACE_S = 3.0  # long beside BEAT_S below, so that a live worker of a busy machine is not taken for dead


searched = partial(search, margin=0.3)  # so that there is more to price than one round


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> tuple[Problem, Space]:
    """A small search in many blocks."""
    monkeypatch.setattr("autoplan.search.study.BLOCK_KINDS", 16)
    monkeypatch.setattr("autoplan.search.ledger.BEAT_S", 0.2)
    monkeypatch.setattr("autoplan.search.ledger.PATIENCE_S", 0.3)
    monkeypatch.setattr("autoplan.search.ledger.POLL_S", 0.05)
    return make(DENSE, "h100-sxm:1x8", batches=(16,))


@pytest.fixture(params=["journal", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "journal") if request.param == "journal" else f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def postgres() -> Iterator[str]:
    with postgres_schema() as url:
        yield url


def trials_of(url: str, name: str = NAME) -> list[FrozenTrial]:
    with opened(url) as storage:
        return optuna.load_study(study_name=name, storage=storage).trials


def check_trials(trials: list[FrozenTrial], result: SearchResult) -> None:
    """Check that every expanded cell has one trial that did not fail, and none is left waiting or running."""
    assert all(trial.state.is_finished() for trial in trials)
    cells = Counter(tuple(trial.params.items()) for trial in trials if trial.state != TrialState.FAIL)
    assert len(cells) == result.certificate.expanded
    assert set(cells.values()) == {1}


def lost(trials: list[FrozenTrial]) -> int:
    """Trials that somebody began and that failed: a round that was queued twice fails before anybody begins it."""
    return sum(trial.state == TrialState.FAIL and trial.datetime_start is not None for trial in trials)


def hang(block: Block, claimed: multiprocessing.synchronize.Semaphore) -> BlockOutcome:
    claimed.release()
    time.sleep(60.0)
    raise AssertionError(f"block {block} was not to be finished")


def test_eight_workers_of_whom_two_are_killed_come_to_one_certificate(
    asked: tuple[Problem, Space], postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = searched(*asked)
    shared = Shared(url=postgres, name=NAME, grace_s=GRACE_S)
    with opened(postgres):
        pass  # what this loads need not be loaded eight times
    claimed, results = FORK.Semaphore(0), FORK.Queue()

    def work() -> None:
        results.put(searched(*asked, shared=shared))

    with monkeypatch.context() as patch:
        patch.setattr("autoplan.search.study.price_block", lambda *args: hang(args[3], claimed))
        victims = [FORK.Process(target=work) for _ in range(2)]
        for victim in victims:
            victim.start()
        for _ in victims:
            assert claimed.acquire(timeout=20.0)
    others = [FORK.Process(target=work) for _ in range(6)]
    for other in others:
        other.start()
    for victim in victims:
        assert victim.pid
        os.kill(victim.pid, signal.SIGKILL)
    assert [results.get(timeout=40.0) for _ in others] == [expected] * len(others)
    for process in (*victims, *others):
        process.join()
    trials = trials_of(postgres)
    check_trials(trials, expected)
    assert lost(trials) >= len(victims)


def run_until(target: Callable[[], object], claimed: multiprocessing.synchronize.Semaphore) -> None:
    """`target` in a process of its own, which is killed once it has claimed a block that it does not finish."""
    victim = FORK.Process(target=target)
    victim.start()
    assert claimed.acquire(timeout=20.0)
    assert victim.pid
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()


def test_a_search_resumes_after_its_only_process_was_killed(
    asked: tuple[Problem, Space], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, shared = searched(*asked), Shared(url=url, name=NAME, grace_s=GRACE_S)
    price_block, priced, claimed = study.price_block, [], FORK.Semaphore(0)

    def price_two(*args: Any) -> BlockOutcome:
        priced.append(args[3])
        return price_block(*args) if len(priced) <= 2 else hang(args[3], claimed)

    with monkeypatch.context() as patch:
        patch.setattr("autoplan.search.study.price_block", price_two)
        run_until(lambda: searched(*asked, shared=shared), claimed)
    left = [trial.state for trial in trials_of(url)]
    assert left.count(TrialState.RUNNING) == 1
    assert searched(*asked, shared=shared) == expected
    trials = trials_of(url)
    check_trials(trials, expected)
    assert lost(trials) == 1
    done_before = sum(state == TrialState.COMPLETE for state in left)
    assert done_before > 0, "what the killed one had told is kept"


def test_a_front_is_the_same_for_any_number_of_workers_of_whom_one_is_killed(
    asked: tuple[Problem, Space], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoplan.search.study.FIRST_KINDS", 32)
    front = partial(search, measures=("time", "memory"))
    expected = front(*asked)
    shared = Shared(url=str(tmp_path / "journal"), name=NAME, grace_s=GRACE_S)
    assert front(*asked, shared=replace(shared, name="alone")) == expected
    price_block, claimed = study.price_block, FORK.Semaphore(0)

    def price_first(*args: Any) -> BlockOutcome:
        return price_block(*args) if args[3].round == 1 else hang(args[3], claimed)

    with monkeypatch.context() as patch:
        patch.setattr("autoplan.search.study.price_block", price_first)
        run_until(lambda: front(*asked, shared=shared), claimed)
    with worker_processes(lambda: front(*asked, shared=shared), 2):
        assert front(*asked, shared=shared) == expected
    trials = trials_of(shared.url)
    check_trials(trials, expected)
    assert lost(trials) == 1
    assert len({trial.user_attrs["block"]["round"] for trial in trials if "block" in trial.user_attrs}) > 1


def test_one_and_three_workers_come_to_the_same_answer(asked: tuple[Problem, Space], url: str) -> None:
    expected = searched(*asked)
    alone, many = Shared(url=url, name="alone"), Shared(url=url, name=NAME)
    assert searched(*asked, shared=alone) == expected
    with worker_processes(lambda: searched(*asked, shared=many), 2):
        assert searched(*asked, shared=many) == expected
    check_trials(trials_of(url), expected)
    check_trials(trials_of(url, "alone"), expected)


def test_an_interrupted_search_resumes_and_prices_the_rest_only(
    asked: tuple[Problem, Space], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while the third block is priced; then a second run, and a third that has nothing left to do."""
    expected, shared = searched(*asked), Shared(url=url, name=NAME)
    price_block, priced, stop_at = study.price_block, [], 2

    def counting(*args: Any) -> BlockOutcome:
        if len(priced) == stop_at:
            signal.raise_signal(signal.SIGINT)
        priced.append(args[3])
        return price_block(*args)

    monkeypatch.setattr(study, "price_block", counting)
    with pytest.raises(KeyboardInterrupt):
        searched(*asked, shared=shared)
    assert all(trial.state != TrialState.RUNNING for trial in trials_of(url))
    stop_at = -1
    assert searched(*asked, shared=shared) == expected
    assert len(set(priced)) == len(priced) > 2
    check_trials(trials_of(url), expected)
    count = len(priced)
    assert searched(*asked, shared=shared) == expected
    assert len(priced) == count


def test_a_study_of_another_problem_is_refused(asked: tuple[Problem, Space], tmp_path: Path) -> None:
    problem, space = asked
    shared = Shared(url=str(tmp_path / "journal"), name=NAME)
    search(problem, space, shared=shared)
    with pytest.raises(
        InputError, match=r"study together belongs to another problem \(problem .*: give another --study"
    ):
        search(replace(problem, reserve_bytes=1.0), space, shared=shared)
    with pytest.raises(InputError, match=r"margin 0\.05, here 0\.1"):
        search(problem, space, shared=shared, margin=0.1)
    with pytest.raises(InputError, match=r"--study 'a b'"):
        search(problem, space, shared=replace(shared, name="a b"))


def test_a_study_that_something_else_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.search.storage.IDENTITY_PATIENCE_S", 0.2)
    with opened(str(tmp_path / "journal")) as storage:
        optuna.create_study(study_name=NAME, storage=storage)
    with (
        opened(str(tmp_path / "journal")) as storage,
        pytest.raises(InputError, match="was not made by this command"),
    ):
        join_study(storage, NAME, {"problem": "0"})


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql://ada:s3cret@127.0.0.1:1/x", r"--storage postgresql://ada@127\.0\.0\.1:1/x: .*refused"),
        ("postgresql://ada:s3cret@p@h/x", "percent-encoded"),
        ("nosuch://ada:s3cret@h/x", "nosuch"),
        ("/nowhere/there", "No such file"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_told_in_one_line(
    url: str, says: str, asked: tuple[Problem, Space], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoplan.search.storage.OPENING_PAUSE_S", 0.01)
    with pytest.raises(InputError, match=says) as caught:
        searched(*asked, shared=Shared(url=url, name=NAME))
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_journal_that_was_cut_goes_on_and_what_is_none_is_left_alone(
    asked: tuple[Problem, Space], tmp_path: Path
) -> None:
    problem, space = asked
    path = tmp_path / "journal"
    shared = Shared(url=str(path), name=NAME)
    answer = search(problem, space, shared=shared)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])  # the disk was full, or the power went
    assert search(problem, space, shared=shared).ranked == answer.ranked
    assert search(problem, space, shared=shared).ranked == answer.ranked  # what was written since can be read
    for text, says in (
        (b"notes of mine", "is not the journal"),
        (b"notes\nof mine\n", "is not the journal"),
        (whole[:50] + b"\n" + whole, "is damaged"),
    ):
        path.write_bytes(text)
        with pytest.raises(InputError, match=says):
            search(problem, space, shared=shared)
        assert path.read_bytes() == text


def test_the_default_name_is_that_of_the_problem(asked: tuple[Problem, Space], tmp_path: Path) -> None:
    problem, space = asked
    shared = Shared(url=str(tmp_path / "journal"))
    first, other = (
        search(problem, space, shared=shared),
        search(replace(problem, reserve_bytes=1e9), space, shared=shared),
    )
    assert first == search(problem, space, shared=shared)
    assert other == search(replace(problem, reserve_bytes=1e9), space, shared=shared)
    with opened(shared.url) as storage:
        assert len(optuna.get_all_study_names(storage)) == 2


def test_fingerprints_tell_problems_apart_and_processes_agree(asked: tuple[Problem, Space]) -> None:
    problem, space = asked
    with FORK.Pool(1) as pool:
        assert pool.apply(fingerprint, ((problem, space.limits),)) == fingerprint((problem, space.limits))
    others = [replace(problem, reserve_bytes=1.0), replace(problem, model=replace(DENSE, num_layers=23))]
    assert len({fingerprint((item, space)) for item in (problem, *others)}) == 3
    assert fingerprint((problem, space)) != fingerprint((problem, replace(space, rules=space.rules[1:])))
    # Of a framework that cuts the model in a way of its own.
    cut = replace(space.limits, split=layers_per_stage)
    with FORK.Pool(1) as pool:
        assert pool.apply(fingerprint, (cut,)) == fingerprint(cut) != fingerprint(space.limits)


def test_findings_survive_as_text() -> None:
    problem, space = make(DENSE, "h100-sxm:1x8", batches=(16,))
    batch, _ = space.plans(space.cells())
    objective = seconds_per_sequence(estimate(problem, batch))
    incumbents = NearBest(0.2)
    findings = Findings(incumbents, counts=Counter(expanded=3, bounded=7, priced=len(batch)))
    incumbents.offer(objective[:, None], batch)
    incumbents.skip(np.array([[3.0], [2.0]]))
    findings.winners.offer(objective[:5], batch.take(np.arange(5)))
    copy = NearBest(0.2)
    unpacked = Findings(copy)
    unpacked.add_packed(findings.packed(), None)
    near = int((objective <= incumbents.bar).sum())
    assert 1 < near < len(batch)
    assert (len(copy.plans), len(unpacked.winners)) == (min(near, KEPT), 5)
    assert copy.plans.objective.tolist() == incumbents.plans.objective[:near].tolist()
    for kept, other in ((copy.plans, incumbents.plans), (unpacked.winners, findings.winners)):
        assert kept.batch is not None
        assert other.batch is not None
        assert [kept.batch.plan(at) for at in range(len(kept))] == [other.batch.plan(at) for at in range(len(kept))]
    assert (copy.best, copy.least_skipped) == (objective.min(), 2.0)
    assert unpacked.counts == findings.counts
    assert len(findings.packed()) < 2**16


# -- the ledger, with blocks that are priced at once -------------------------------------------------------------------

ROUNDS = ((0, 1), (2,)), ((3, 4),)


def next_round(results: list[BlockResult]) -> tuple[Block, ...]:
    done = sum(len(result.block.cells) for result in results)
    at = {0: 0, 3: 1}.get(done)
    return () if at is None else tuple(Block(verdict=0, round=at, cells=cells) for cells in ROUNDS[at])


def outcome(block: Block) -> BlockOutcome:
    cell = CellOutcome(value=1.0, constraints={"memory": -1.0}, attributes={})
    return BlockOutcome(findings=str(block.cells), cells=dict.fromkeys(block.cells, cell))


def ledger_on(storage: optuna.storages.BaseStorage, space: Space, **more: float) -> Ledger:
    study, made_here = join_study(storage, NAME, {})
    return Ledger(study, storage, space.cells(), made_here=made_here, grace_s=more.get("grace_s", 30.0))


def found(ledger: Ledger, price: Callable[[Block], BlockOutcome] = outcome) -> list[str]:
    ledger.run(next_round, price)
    return sorted(result.findings for result in ledger.results())


EVERYTHING = ["(0, 1)", "(2,)", "(3, 4)"]


def test_a_worker_that_was_lost_while_it_put_up_a_round_is_replaced(asked: tuple[Problem, Space]) -> None:
    storage, space = optuna.storages.InMemoryStorage(), asked[1]
    first = ledger_on(storage, space)
    first._study.add_trial(
        first._trial(
            0,
            TrialState.WAITING,
            user_attrs={
                "block": {"verdict": 0, "round": 0, "cells": [0, 1]},
                "round": [{"verdict": 0, "round": 0, "cells": cells} for cells in ([0, 1], [2])],
            },
        )
    )
    assert found(ledger_on(storage, space)) == EVERYTHING


def test_what_is_put_up_twice_is_priced_once(asked: tuple[Problem, Space]) -> None:
    storage, space = optuna.storages.InMemoryStorage(), asked[1]
    ledgers = [ledger_on(storage, space), ledger_on(storage, space)]
    for ledger in ledgers:
        ledger._enqueue(next_round([]))
    priced: list[Block] = []
    price: Callable[[Block], BlockOutcome] = lambda block: priced.append(block) or outcome(block)  # noqa: E731
    assert found(ledgers[0], price) == EVERYTHING
    assert found(ledgers[1], price) == EVERYTHING
    assert len(priced) == len(EVERYTHING)


def test_one_that_was_wrongly_taken_for_dead_does_no_harm(asked: tuple[Problem, Space]) -> None:
    storage, space = optuna.storages.InMemoryStorage(), asked[1]
    slow, fast = ledger_on(storage, space), ledger_on(storage, space, grace_s=0.1)
    may_go_on, claimed = threading.Event(), threading.Event()

    def slowly(block: Block) -> BlockOutcome:
        claimed.set()
        assert may_go_on.wait(10.0)
        return outcome(block)

    results: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoplan.search.ledger.BEAT_S", 30.0)  # so that it says nothing
        thread = threading.Thread(target=lambda: results.append(found(slow, slowly)))
        thread.start()
        assert claimed.wait(10.0)
        assert found(fast) == EVERYTHING
        may_go_on.set()
        thread.join()
    assert results == [EVERYTHING]
    assert Counter(trial.state for trial in fast._study.trials) == {TrialState.COMPLETE: 5, TrialState.FAIL: 1}


def _waits(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(600)


def _works(folder: Path) -> None:
    with worker_processes(partial(_waits, folder), 2):
        time.sleep(600)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_first(tmp_path: Path, kind: signal.Signals) -> None:
    first = FORK.Process(target=_works, args=(tmp_path,))
    first.start()
    assert first.pid is not None
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    os.kill(first.pid, kind)
    wait_until(lambda: not any(_runs(int(path.name)) for path in tmp_path.iterdir()))
    first.join()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_ends_the_other_workers_even_before_they_run(tmp_path: Path) -> None:
    usual = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # as the command line has it
    try:
        for _ in range(5):
            with pytest.raises(InputError, match="wrong"), worker_processes(partial(_waits, tmp_path), 1):
                raise InputError("wrong")
    finally:
        signal.signal(signal.SIGTERM, usual)
