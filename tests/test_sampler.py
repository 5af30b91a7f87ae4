"""Optuna's samplers over cells: every proposal is a cell, none is priced twice, only what is proven is called so."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError, NoPlanError
from autoplan.report.answer import proof_line
from autoplan.search.findings import FITS
from autoplan.search.frontier import Frontier
from autoplan.search.sampler import FREE_AXES, SAMPLERS, WARM_CELLS, Axes, Sampling
from autoplan.search.space import Space
from autoplan.search.storage import opened
from autoplan.search.study import Shared, search
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import SearchResult
from test_study import MOE, make

CELLS = make(MOE)[1].cells()


def test_every_cell_has_a_proposal_of_its_own() -> None:
    axes = Axes(CELLS)
    assert [axes.cell(axes.params(at)) for at in range(len(CELLS))] == list(range(len(CELLS)))


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 1.0), min_size=len(FREE_AXES), max_size=len(FREE_AXES)))
def test_every_proposal_is_a_cell(places: list[float]) -> None:
    assert 0 <= Axes(CELLS).cell(dict(zip(FREE_AXES, places, strict=True))) < len(CELLS)


@pytest.fixture(scope="module")
def proven_search() -> tuple[Problem, Space, SearchResult]:
    problem, space = make(MOE, "h100-sxm:1x8", batches=(16,))
    return problem, space, search(problem, space)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "gp"])
def test_a_sampler_finds_what_its_cells_hold_and_proves_nothing(
    proven_search: tuple[Problem, Space, SearchResult], name: str
) -> None:
    problem, space, proven = proven_search
    sampled = search(problem, space, sampling=Sampling(name=name, trials=6))
    assert proven.certificate.proven
    assert 0 < sampled.certificate.expanded <= 6 < sampled.certificate.cells
    assert sampled.ranked[0].step_s >= proven.ranked[0].step_s
    assert sampled.certificate.least_left is not None
    assert sampled.certificate.proven == (sampled.certificate.least_left >= 1.0)
    assert sampled.ranked[0].step_s * min(sampled.certificate.least_left, 1.0) <= proven.ranked[0].step_s


def test_all_cells_seen_are_a_proof() -> None:
    problem, space = make(MOE, "h100-sxm:1x8", batches=(16,), fix=("pp=1", "cp=1", "etp=1"))
    proven = search(problem, space)
    seen = search(problem, space, sampling=Sampling(name="random", trials=40 * len(space.cells()), warm=False))
    assert seen.certificate.expanded == seen.certificate.cells
    assert seen.certificate.proven
    assert seen.ranked == proven.ranked


def test_a_warm_start_begins_with_the_least_bounds_and_proposals_are_told_once(tmp_path: Path) -> None:
    problem, space = make(MOE, "h100-sxm:1x8", batches=(16,), fix=("pp=1",))
    shared = Shared(url=str(tmp_path / "journal"), name="warm")
    sampling = Sampling(name="random", trials=12)
    first = search(problem, space, shared=shared, sampling=sampling)
    assert search(problem, space, shared=shared, sampling=sampling) == first
    with opened(shared.url) as storage:
        trials = optuna.load_study(study_name="warm", storage=storage).trials
    assert len(trials) == sampling.trials
    cells = [trial.user_attrs["cell"] for trial in trials if "cell" in trial.user_attrs]
    assert len(set(cells)) == len(cells) == first.certificate.expanded
    assert all(
        trials[trial.user_attrs["again"]].value == trial.value for trial in trials if "again" in trial.user_attrs
    )
    frontier = Frontier.of(problem, space)
    usable = frontier.usable(FITS)
    bounds = frontier.cell_bounds(frontier.owner[usable], frontier.bounds[usable])[:, 0]
    started = [bounds[trial.user_attrs["cell"]] for trial in trials[:WARM_CELLS]]
    assert started == sorted(bounds)[:WARM_CELLS]
    # What a trial tells is the bound of the best kind of its cell, closer than that of all of the cell at once.
    assert all(trial.user_attrs["bound"] >= bounds[trial.user_attrs["cell"]] for trial in trials[:WARM_CELLS])


def test_what_is_not_proven_is_not_called_so() -> None:
    problem, space = make(MOE)
    line = proof_line(search(problem, space, sampling=Sampling(name="random", trials=3)).certificate)
    assert line.startswith("not proven: best of ")
    assert "another plan may be up to" in line


def test_nothing_found_and_unknown_names_are_told() -> None:
    problem, space = make(MOE, reserve_bytes=78e9)
    with pytest.raises(NoPlanError, match=r"none of the .* cells that tpe proposed holds a plan that fits"):
        search(problem, space, sampling=Sampling(name="tpe", trials=2))
    with pytest.raises(InputError, match="sampler 'genetic' is unknown: use bound, tpe"):
        Sampling(name="genetic", trials=2)
    with pytest.raises(InputError, match="at least 1"):
        Sampling(name="tpe", trials=0)
