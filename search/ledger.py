"""Who prices which cells?  A study that many workers share: blocks of cells are put up, claimed and told once.

A block is claimed by the trial of its first cell, which Optuna lets one worker turn from waiting to running; the other
cells get their trials with the outcome.  What a block comes to depends on the block alone, so that the answer does not
depend on who prices it, when, or how often a worker is lost on the way.  Blocks are put up in rounds: what one round
found is known to the next.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autoplan.search.sampler import Axes, Sampling, make_sampler
from autoplan.search.space import Cell

AXES = tuple(field.name for field in fields(Cell))
BEAT_S = 1.0  # a worker says so often that it is alive
GRACE_S = 8.0  # one that has not for so long is taken for dead; were it not, its blocks would be priced twice
PATIENCE_S = 1.0  # for the worker whose turn it is to put up the next round
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Cells that are priced together, by their indices in the space, and what was known when they were put up."""

    wanted: int  # the verdict of the plans looked for
    best: float  # seconds per sequence of the best plan so far
    cells: tuple[int, ...]
    round: int = 0  # of those that are put up together, where what was known cannot be told by `best`


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """What the trial of a cell says; `value` is None where no plan in it had a chance."""

    value: float | None
    constraints: dict[str, float]  # feasible at 0 or less
    attributes: dict[str, Any]

    @property
    def state(self) -> TrialState:
        """A cell without a value is pruned."""
        return TrialState.PRUNED if self.value is None else TrialState.COMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOutcome:
    """What a block came to: `found` is all that the answer needs, `cells` is told trial by trial."""

    found: str
    cells: dict[int, CellOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A block and what was found in it."""

    block: Block
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The trial of the first cell of a block, and the block; an earlier trial that names a cell keeps it."""

    trial: FrozenTrial
    block: Block
    own: int  # its cell


class Ledger:
    """One worker's hand in a study of `cells`; `made_here`: nobody else has put anything up yet."""

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
        most = max((getattr(cell, axis) for cell in cells for axis in AXES), default=1)
        self._distributions: dict[str, BaseDistribution] = {axis: IntDistribution(1, most) for axis in AXES}
        self._told: set[int] = set()  # numbers of the trials that this worker told
        self._since: dict[Hashable, float] = {}

    def settle(
        self, next_round: Callable[[list[Told]], Sequence[Block]], price: Callable[[Block], BlockOutcome]
    ) -> list[Told]:
        """Price blocks beside the other workers until the next round is empty; all that was told by anyone.

        `next_round` must not depend on the order of what it is given.
        """
        while True:
            trials = self._study.get_trials(deepcopy=False)
            heads, missing = _live(trials)
            self._bury(heads)
            if head := self._claim(heads):
                self._price(head, price, _cells_told(trials))
            elif any(not one.trial.state.is_finished() for one in heads):
                time.sleep(POLL_S)
            elif missing:
                self._put_up_in_turn(missing, is_mine=False)
            else:
                told = _told(heads)
                blocks = tuple(next_round(told))
                if not blocks:
                    return told
                self._put_up_in_turn(blocks, is_mine=self._ended_round(heads))

    def told(self) -> list[Told]:
        """All that was told by now, by anyone."""
        heads, _ = _live(self._study.get_trials(deepcopy=False))
        return _told([one for one in heads if one.trial.state.is_finished()])

    def sample(self, sampling: Sampling, first: Sequence[int], price: Callable[[int], BlockOutcome]) -> dict[int, str]:
        """Price `first` and then the cells that a sampler proposes, to so many trials in all: what was found in each.

        A cell that was proposed before is told again without being priced.
        """
        axes = Axes(self._cells)
        # Workers with one seed would propose the same cells.
        self._study.sampler = make_sampler(sampling.name, sampling.seed if self._made_here else None)
        for cell in first if self._made_here else ():
            self._study.enqueue_trial(axes.params(cell))
        while True:
            trials = self._study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state == TrialState.RUNNING and self._waited_s(_beat(trial)) >= self._grace_s:
                    self._fail(trial)
            known = {one.user_attrs["cell"]: one for one in trials if "found" in one.user_attrs}
            alive = [one for one in trials if one.state not in (TrialState.FAIL, TrialState.WAITING)]
            if len(alive) < sampling.trials:
                self._try(self._study.ask(axes.distributions), axes, known, price)
            elif any(one.state == TrialState.RUNNING for one in alive):
                time.sleep(POLL_S)
            else:
                return {cell: one.user_attrs["found"] for cell, one in known.items() if one.state.is_finished()}

    def _try(
        self, trial: optuna.Trial, axes: Axes, known: Mapping[int, FrozenTrial], price: Callable[[int], BlockOutcome]
    ) -> None:
        """One trial of a sampler."""
        cell = axes.cell(trial.params)
        try:
            with self._beating(trial._trial_id):
                if cell in known and known[cell].state.is_finished():
                    one = known[cell]
                    outcome = CellOutcome(
                        value=one.value, constraints=one.constraints, attributes={"again": one.number}
                    )
                    self._describe(trial._trial_id, outcome)
                else:
                    priced = price(cell)
                    outcome = priced.cells[cell]
                    self._describe(trial._trial_id, outcome, cell=cell, found=priced.found)
                self._end(trial._trial_id, outcome)
        except UpdateFinishedTrialError:
            return
        except BaseException:
            self._fail(trial)
            raise

    def _ended_round(self, heads: Sequence[_Head]) -> bool:
        """Whether it was this worker who told the last trial, or made the study: one worker puts up the next round."""
        if not heads:
            return self._made_here
        last = max((one.trial for one in heads), key=lambda trial: (trial.datetime_complete, trial.number))
        return last.number in self._told

    def _put_up_in_turn(self, blocks: tuple[Block, ...], *, is_mine: bool) -> None:
        if is_mine or self._waited_s(blocks) >= PATIENCE_S:
            self._put_up(blocks)
        else:
            time.sleep(POLL_S)

    def _put_up(self, blocks: tuple[Block, ...]) -> None:
        """Blocks of a round for whoever claims them; each names all, should this worker be lost before the last."""
        together = [_encoded(block) for block in blocks]
        for block in blocks:
            attributes = {"block": _encoded(block), "round": together}
            self._study.add_trial(self._trial(block.cells[0], TrialState.WAITING, user_attrs=attributes))

    def _trial(self, cell: int, state: TrialState, **more: Any) -> FrozenTrial:
        params = asdict(self._cells[cell])
        return create_trial(state=state, params=params, distributions=self._distributions, **more)

    def _bury(self, heads: Sequence[_Head]) -> None:
        """Fail the trials of workers that are dead, put their blocks up again, and fail what was put up twice."""
        for head in heads:
            state = head.trial.state
            if state == TrialState.RUNNING and self._waited_s(_beat(head.trial)) >= self._grace_s:
                self._give_up(head)
            elif state == TrialState.WAITING and not head.block.cells:
                self._fail(head.trial)

    def _give_up(self, head: _Head) -> None:
        if self._fail(head.trial):
            self._put_up((head.block,))

    def _fail(self, trial: FrozenTrial | optuna.Trial) -> bool:
        with suppress(UpdateFinishedTrialError):
            return self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        return False

    def _waited_s(self, key: Hashable) -> float:
        """Since this worker first saw it, by its own clock."""
        now = time.monotonic()
        return now - self._since.setdefault(key, now)

    def _claim(self, heads: Sequence[_Head]) -> _Head | None:
        for head in heads:
            if head.trial.state == TrialState.WAITING and head.block.cells:
                with suppress(UpdateFinishedTrialError):
                    if self._storage.set_trial_state_values(head.trial._trial_id, TrialState.RUNNING):
                        return head
        return None

    def _price(self, head: _Head, price: Callable[[Block], BlockOutcome], already: Collection[tuple[int, int]]) -> None:
        """Price a claimed block and tell it, unless this worker was taken for dead meanwhile."""
        try:
            with self._beating(head.trial._trial_id):
                self._tell(head, price(head.block), already)
        except UpdateFinishedTrialError:
            return
        except BaseException:
            self._give_up(head)
            raise
        self._told.add(head.trial.number)

    def _tell(self, head: _Head, outcome: BlockOutcome, already: Collection[tuple[int, int]]) -> None:
        """The trials of all cells; with the state of the head's own, which comes last, the block is done.

        First its attributes, which it takes only as long as this worker holds it.
        """
        wanted, own = head.block.wanted, outcome.cells.get(head.own, NOTHING)
        self._describe(head.trial._trial_id, own, found=outcome.found)
        for cell, one in outcome.cells.items():
            if cell != head.own and (wanted, cell) not in already:
                attributes = {**one.attributes, "cell": [wanted, cell]}
                trial = self._trial(
                    cell, one.state, value=one.value, constraints=one.constraints, user_attrs=attributes
                )
                self._study.add_trial(trial)
        self._end(head.trial._trial_id, own)

    def _describe(self, trial_id: int, outcome: CellOutcome, **more: Any) -> None:
        for name, value in {**outcome.attributes, **more}.items():
            self._storage.set_trial_user_attr(trial_id, name, value)
        for name, value in outcome.constraints.items():
            optuna.Trial(self._study, trial_id).set_constraint(name, value)

    def _end(self, trial_id: int, outcome: CellOutcome) -> None:
        values = None if outcome.value is None else [outcome.value]
        self._storage.set_trial_state_values(trial_id, outcome.state, values)

    @contextmanager
    def _beating(self, trial_id: int) -> Iterator[None]:
        """Show that the worker of a trial lives, in whatever storage: Optuna's own heartbeat is for databases only."""
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


NOTHING = CellOutcome(value=None, constraints={}, attributes={})


def _beat(trial: FrozenTrial) -> Hashable:
    """Changes as long as the worker of a trial lives."""
    return trial.number, trial.user_attrs.get("beat")


def _encoded(block: Block) -> dict[str, Any]:
    best = block.best if math.isfinite(block.best) else None
    return {"wanted": block.wanted, "best": best, "cells": list(block.cells), "round": block.round}


def _decoded(block: dict[str, Any]) -> Block:
    best = math.inf if block["best"] is None else block["best"]
    return Block(wanted=block["wanted"], best=best, cells=tuple(block["cells"]), round=block["round"])


def _told(heads: Iterable[_Head]) -> list[Told]:
    return [Told(block=one.block, found=one.trial.user_attrs["found"]) for one in heads]


def _live(trials: Iterable[FrozenTrial]) -> tuple[list[_Head], tuple[Block, ...]]:
    """(heads that did not fail, blocks of their rounds that no head stands for).

    Blocks may be put up twice, and in part, by workers that were taken for dead: a cell belongs to the first that
    names it.
    """
    heads: list[_Head] = []
    named: set[tuple[int, int]] = set()
    rounds: dict[Block, None] = {}
    for trial in trials:
        if "block" not in trial.user_attrs:
            continue
        rounds |= dict.fromkeys(_decoded(one) for one in trial.user_attrs["round"])
        if trial.state != TrialState.FAIL:
            block = _decoded(trial.user_attrs["block"])
            heads.append(_Head(trial=trial, own=block.cells[0], block=_without(block, named)))
            named.update((block.wanted, cell) for cell in block.cells)
    left = (_without(block, named) for block in rounds)
    return heads, tuple(block for block in left if block.cells)


def _without(block: Block, named: Collection[tuple[int, int]]) -> Block:
    return replace(block, cells=tuple(cell for cell in block.cells if (block.wanted, cell) not in named))


def _cells_told(trials: Iterable[FrozenTrial]) -> set[tuple[int, int]]:
    """(verdict wanted, cell) of the trials that a block adds: some may be there from a worker that was lost."""
    return {tuple(trial.user_attrs["cell"]) for trial in trials if "cell" in trial.user_attrs}
