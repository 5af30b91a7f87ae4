"""Optuna study of a search shared by many workers: blocks of cells are queued, claimed and priced once.

A worker claims a block by setting the trial of its first cell from waiting to running, which Optuna allows only one
worker to do; the other cells get their trials with the outcome.  The answer does not depend on which worker prices a
block, when, or on how many workers are lost.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoplan.search.blocks import Block, BlockOutcome, BlockResult, CellOutcome, NextRound, PriceBlock
from autoplan.search.cells import DEGREES, Cell
from autoplan.search.damage import refusing_damage
from autoplan.search.sampler import Axes, Sampling, make_sampler

BEAT_S = 1.0  # interval of a worker's heartbeat
PATIENCE_S = 1.0  # wait for the worker that should queue the next round
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockTrial:
    """Trial of a block's first cell, and the block without cells claimed by earlier trials."""

    trial: FrozenTrial
    block: Block
    first_cell: int


class Ledger:
    """A worker's access to a study of `cells`; `made_here`: no other worker has queued anything yet."""

    def __init__(
        self,
        study: optuna.Study,
        storage: BaseStorage,
        cells: Sequence[Cell],
        *,
        made_here: bool,
        grace_s: float,
    ) -> None:
        self._study, self._storage, self._cells = study, storage, cells
        self._made_here, self._grace_s = made_here, grace_s
        max_degree = max((getattr(cell, axis) for cell in cells for axis in DEGREES), default=1)
        self._distributions: dict[str, BaseDistribution] = {axis: IntDistribution(1, max_degree) for axis in DEGREES}
        self._finished_here: set[int] = set()  # numbers of trials
        self._first_seen_s: dict[Hashable, float] = {}

    def run(self, next_round: NextRound, price: PriceBlock) -> None:
        """Price blocks together with other workers until `next_round`, for any order of its input, is empty."""
        while True:
            trials = self._study.get_trials(deepcopy=False)
            with refusing_damage():
                block_trials, missing = _block_trials(trials)
            self._replace_lost(block_trials)
            if claimed := self._claim(block_trials):
                self._price(claimed, price, _recorded_cells(trials))
            elif any(not block_trial.trial.state.is_finished() for block_trial in block_trials):
                time.sleep(POLL_S)
            elif missing:
                self._enqueue_in_turn(missing, is_own_turn=False)
            else:
                blocks = tuple(next_round(_results(block_trials)))
                if not blocks:
                    return
                self._enqueue_in_turn(blocks, is_own_turn=self._ended_round(block_trials))

    def results(self) -> list[BlockResult]:
        """Return the blocks priced so far by any worker."""
        block_trials, _ = _block_trials(self._study.get_trials(deepcopy=False))
        return _results([block_trial for block_trial in block_trials if block_trial.trial.state.is_finished()])

    def sample(self, sampling: Sampling, first: Sequence[int], price: Callable[[int], BlockOutcome]) -> dict[int, str]:
        """Price `first`, then cells proposed by a sampler, up to its number of trials; return findings by cell."""
        axes = Axes(self._cells)
        # Workers with one seed would propose the same cells.
        self._study.sampler = make_sampler(sampling.name, sampling.seed if self._made_here else None)
        for cell in first if self._made_here else ():
            self._study.enqueue_trial(axes.params(cell))
        while True:
            trials = self._study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state == TrialState.RUNNING and self._waited_s(_sign_of_life(trial)) >= self._grace_s:
                    self._fail(trial)
            with refusing_damage():
                all_cells = range(len(self._cells))
                priced = {
                    all_cells.index(trial.user_attrs["cell"]): trial  # ValueError if there is none
                    for trial in trials
                    if "findings" in trial.user_attrs
                }
            alive = [trial for trial in trials if trial.state not in (TrialState.FAIL, TrialState.WAITING)]
            if len(alive) < sampling.trials:
                self._run_trial(self._study.ask(axes.distributions), axes, priced, price)
            elif any(trial.state == TrialState.RUNNING for trial in alive):
                time.sleep(POLL_S)
            else:
                finished = {cell: trial for cell, trial in priced.items() if trial.state.is_finished()}
                return {cell: trial.user_attrs["findings"] for cell, trial in finished.items()}

    def _run_trial(
        self, trial: optuna.Trial, axes: Axes, priced: Mapping[int, FrozenTrial], price: Callable[[int], BlockOutcome]
    ) -> None:
        cell = axes.cell(trial.params)
        try:
            with self._showing_life(trial._trial_id):
                if cell in priced and priced[cell].state.is_finished():
                    before = priced[cell]
                    outcome = CellOutcome(
                        value=before.value, constraints=before.constraints, attributes={"again": before.number}
                    )
                    self._describe(trial._trial_id, outcome)
                else:
                    block = price(cell)
                    outcome = block.cells[cell]
                    self._describe(trial._trial_id, outcome, cell=cell, findings=block.findings)
                self._end(trial._trial_id, outcome)
        except UpdateFinishedTrialError:
            return
        except BaseException:
            self._fail(trial)
            raise

    def _ended_round(self, block_trials: Sequence[_BlockTrial]) -> bool:
        """Return whether this worker finished the last trial or made the study, so that it queues the next round."""
        if not block_trials:
            return self._made_here
        last = max(
            (block_trial.trial for block_trial in block_trials),
            key=lambda trial: (trial.datetime_complete, trial.number),
        )
        return last.number in self._finished_here

    def _enqueue_in_turn(self, blocks: tuple[Block, ...], *, is_own_turn: bool) -> None:
        if is_own_turn or self._waited_s(blocks) >= PATIENCE_S:
            self._enqueue(blocks)
        else:
            time.sleep(POLL_S)

    def _enqueue(self, blocks: tuple[Block, ...]) -> None:
        """Queue the blocks of a round; each trial names all blocks, in case this worker is lost before the last."""
        round_blocks = [_encoded(block) for block in blocks]
        for block in blocks:
            attributes = {"block": _encoded(block), "round": round_blocks}
            self._study.add_trial(self._trial(block.cells[0], TrialState.WAITING, user_attrs=attributes))

    def _trial(self, cell: int, state: TrialState, **more: Any) -> FrozenTrial:
        params = asdict(self._cells[cell])
        return create_trial(state=state, params=params, distributions=self._distributions, **more)

    def _replace_lost(self, block_trials: Sequence[_BlockTrial]) -> None:
        """Fail the trials of dead workers, queue their blocks again, and fail duplicates."""
        for block_trial in block_trials:
            state = block_trial.trial.state
            if state == TrialState.RUNNING and self._waited_s(_sign_of_life(block_trial.trial)) >= self._grace_s:
                self._requeue(block_trial)
            elif state == TrialState.WAITING and not block_trial.block.cells:
                self._fail(block_trial.trial)

    def _requeue(self, block_trial: _BlockTrial) -> None:
        if self._fail(block_trial.trial):
            self._enqueue((block_trial.block,))

    def _fail(self, trial: FrozenTrial | optuna.Trial) -> bool:
        with suppress(UpdateFinishedTrialError):
            return self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        return False

    def _waited_s(self, key: Hashable) -> float:
        """Return how long ago this worker first saw `key`, by its own clock."""
        now = time.monotonic()
        return now - self._first_seen_s.setdefault(key, now)

    def _claim(self, block_trials: Sequence[_BlockTrial]) -> _BlockTrial | None:
        for block_trial in block_trials:
            if block_trial.trial.state == TrialState.WAITING and block_trial.block.cells:
                with suppress(UpdateFinishedTrialError):
                    if self._storage.set_trial_state_values(block_trial.trial._trial_id, TrialState.RUNNING):
                        return block_trial
        return None

    def _price(
        self, block_trial: _BlockTrial, price: Callable[[Block], BlockOutcome], already: Collection[tuple[int, int]]
    ) -> None:
        """Price a claimed block and record it, unless this worker has been declared dead meanwhile."""
        try:
            with self._showing_life(block_trial.trial._trial_id):
                self._record(block_trial, price(block_trial.block), already)
        except UpdateFinishedTrialError:
            return
        except BaseException:
            self._requeue(block_trial)
            raise
        self._finished_here.add(block_trial.trial.number)

    def _record(self, block_trial: _BlockTrial, outcome: BlockOutcome, already: Collection[tuple[int, int]]) -> None:
        """Record trials of all cells: first the attributes of the claimed trial, then the others, its state last."""
        verdict, first_cell = block_trial.block.verdict, block_trial.first_cell
        outcome_of_first = outcome.cells.get(first_cell, NO_OUTCOME)
        self._describe(block_trial.trial._trial_id, outcome_of_first, findings=outcome.findings)
        for cell, of_cell in outcome.cells.items():
            if cell != first_cell and (verdict, cell) not in already:
                trial = self._trial(
                    cell,
                    _state_of(of_cell),
                    value=of_cell.value,
                    constraints=of_cell.constraints,
                    user_attrs={**of_cell.attributes, "cell": [verdict, cell]},
                )
                self._study.add_trial(trial)
        self._end(block_trial.trial._trial_id, outcome_of_first)

    def _describe(self, trial_id: int, outcome: CellOutcome, **more: Any) -> None:
        for name, value in {**outcome.attributes, **more}.items():
            self._storage.set_trial_user_attr(trial_id, name, value)
        for name, value in outcome.constraints.items():
            optuna.Trial(self._study, trial_id).set_constraint(name, value)

    def _end(self, trial_id: int, outcome: CellOutcome) -> None:
        values = None if outcome.value is None else [outcome.value]
        self._storage.set_trial_state_values(trial_id, _state_of(outcome), values)

    @contextmanager
    def _showing_life(self, trial_id: int) -> Iterator[None]:
        """Send heartbeats for a trial in any storage; Optuna's own heartbeat supports databases only."""
        done = threading.Event()

        def beat() -> None:
            for count in itertools.count():
                if done.wait(BEAT_S):
                    return
                with suppress(UpdateFinishedTrialError):
                    self._storage.set_trial_user_attr(trial_id, "beat", count)

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


NO_OUTCOME = CellOutcome(value=None, constraints={}, attributes={})


def _state_of(outcome: CellOutcome) -> TrialState:
    """Return the state of a trial: pruned if the cell has no value."""
    return TrialState.PRUNED if outcome.value is None else TrialState.COMPLETE


def _sign_of_life(trial: FrozenTrial) -> Hashable:
    """Return a value that keeps changing while the worker of a trial is alive."""
    return trial.number, trial.user_attrs.get("beat")


def _encoded(block: Block) -> dict[str, Any]:
    return {"verdict": block.verdict, "round": block.round, "cells": list(block.cells)}


def _decoded(block: Mapping[str, Any]) -> Block:
    return Block(verdict=block["verdict"], round=block["round"], cells=tuple(block["cells"]))


def _results(block_trials: Iterable[_BlockTrial]) -> list[BlockResult]:
    with refusing_damage():
        return [
            BlockResult(block=block_trial.block, findings=block_trial.trial.user_attrs["findings"])
            for block_trial in block_trials
        ]


def _block_trials(trials: Iterable[FrozenTrial]) -> tuple[list[_BlockTrial], tuple[Block, ...]]:
    """Return the block trials that did not fail, and the blocks of their rounds without such a trial.

    Workers that were declared dead may queue blocks twice or partly; a cell belongs to the first trial that names it.
    """
    block_trials: list[_BlockTrial] = []
    earlier_cells: set[tuple[int, int]] = set()
    blocks: dict[Block, None] = {}
    for trial in trials:
        if "block" not in trial.user_attrs:
            continue
        blocks |= dict.fromkeys(_decoded(block) for block in trial.user_attrs["round"])
        if trial.state != TrialState.FAIL:
            block = _decoded(trial.user_attrs["block"])
            block_trials.append(
                _BlockTrial(trial=trial, first_cell=block.cells[0], block=_without(block, earlier_cells))
            )
            earlier_cells.update((block.verdict, cell) for cell in block.cells)
    missing = (_without(block, earlier_cells) for block in blocks)
    return block_trials, tuple(block for block in missing if block.cells)


def _without(block: Block, earlier_cells: Collection[tuple[int, int]]) -> Block:
    return replace(block, cells=tuple(cell for cell in block.cells if (block.verdict, cell) not in earlier_cells))


def _recorded_cells(trials: Iterable[FrozenTrial]) -> set[tuple[int, int]]:
    """Return (verdict, cell) of the trials recorded for blocks, including those of lost workers."""
    return {tuple(trial.user_attrs["cell"]) for trial in trials if "cell" in trial.user_attrs}
