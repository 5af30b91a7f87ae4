"""Which measurements are worth their time?  Laws of the value of information, and a profile for a plan file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoplan.search.choice import first_of_kinds
from autoplan.search.measurement_value import (
    DATASHEET_SPREAD,
    INTERPOLATED_SPREAD,
    OperationGroup,
    advise_measurements,
    covariance,
    expected_gain,
    expected_probability,
    explained_variance,
    family_of,
    shares_of,
    spread_of_price,
)
from autoplan.search.study import search
from autoplan.spec.measurement import Measurement
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.timing import TimingTable
from commands import run
from search_cases import make

DEVICE = "h100-sxm"
positive = st.floats(1e-3, 1.0)


def group(shape: tuple[int, ...], spread: float = 0.1, operation: str = "gemm", seconds: float = 1.0) -> OperationGroup:
    """The products or another operation of one shape."""
    time = Measurement(operation=operation, shape=shape, dtype="bf16", device=DEVICE, seconds=1e-3)  # type: ignore[arg-type]
    return OperationGroup(
        family=family_of(operation),  # type: ignore[arg-type]
        setting=str(shape),
        times_s=(time,),
        seconds=seconds,
        spread=spread,
        provenance="reference",
    )


# No plan of the searches below has heads of 13.
STRANGE = group((1, 4096, 8, 8, 13, 0), 0.3, "attention")
A, B, C = group((64, 64, 64)), group((128, 64, 64)), group((64, 64), operation="norm")


@example(lead=0.25390625, variance=0.001, more=1.0)  # eight standard deviations out
@example(lead=0.2513039496509774, variance=0.001, more=0.001953125)
@given(lead=st.floats(0.0, 0.5), variance=positive, more=positive)
def test_the_less_is_known_and_the_nearer_two_plans_the_more_is_gained(
    lead: float, variance: float, more: float
) -> None:
    assert expected_gain(lead, 0.0) == 0.0
    assert 0.0 <= expected_gain(lead, variance) <= expected_gain(lead, variance + more)
    assert expected_gain(lead + more, variance) <= expected_gain(lead, variance)


@given(lead=st.floats(0.0, 0.5), learns=positive, stays=positive)
def test_knowing_more_makes_no_choice_less_sure(lead: float, learns: float, stays: float) -> None:
    now = expected_probability(lead, 0.0, learns + stays)
    assert 0.5 <= now <= expected_probability(lead, learns, stays) + 1e-6
    assert expected_probability(lead, learns, 1e-12) == pytest.approx(1.0, abs=2e-2)


@given(share=positive)
def test_what_two_plans_share_equally_teaches_nothing_of_their_order(share: float) -> None:
    spread = covariance([A, C])
    assert explained_variance(np.array([0.0, share]), spread, [0]) == 0.0
    assert explained_variance(np.array([0.0, share]), spread, [1]) == pytest.approx((share * C.spread) ** 2)


@given(st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=3))
def test_measuring_more_never_teaches_less_and_all_of_it_everything(shares: list[float]) -> None:
    unlike, spread = np.array(shares), covariance([A, B, C])
    taught = [explained_variance(unlike, spread, measured) for measured in ([], [0], [0, 1], [0, 1, 2])]
    assert np.all(np.diff(taught) >= -1e-12)
    assert taught[-1] == pytest.approx(float(unlike @ spread @ unlike), abs=1e-12)
    # One size of an operation tells something of another one, nothing of another operation.
    assert explained_variance(np.array([0.0, 1.0, 0.0]), spread, [0]) > 0
    assert explained_variance(np.array([0.0, 0.0, 1.0]), spread, [0, 1]) == 0


@pytest.fixture(scope="module")
def searched() -> tuple[Problem, list[RankedPlan]]:
    problem, space = make(batches=(64,))
    result = search(problem, space)
    return problem, list(first_of_kinds((*result.rivals, *result.ranked)))


def tokens(plan: RankedPlan) -> int:
    return plan.plan.micro_batch * 4096


def products_of(problem: Problem, plans: Sequence[RankedPlan], spread: float = 0.1) -> list[OperationGroup]:
    """The first product of the MLP of every plan's own shape, each once."""
    width = 2 * problem.model.ffn_size
    shapes = dict.fromkeys((tokens(plan), width // plan.plan.tp, problem.model.hidden_size) for plan in plans)
    return [group(shape, spread) for shape in shapes]


def timed(problem: Problem, more: Sequence[Measurement]) -> Problem:
    return replace(problem, timings=TimingTable.of(more)) if more else problem


def test_a_share_is_how_much_longer_a_step_takes_with_the_operation(
    searched: tuple[Problem, list[RankedPlan]],
) -> None:
    problem, plans = searched
    groups = [*products_of(problem, plans[:3]), STRANGE]
    shares = shares_of(problem, plans[:3], groups, lambda more: timed(problem, more))
    own = [groups.index(products_of(problem, [plan])[0]) for plan in plans[:3]]
    for row, at in zip(shares, own, strict=True):
        assert 0.1 < row[at] < 0.8  # the passes of this product, and of products of nearly its shape
    assert not shares[:, -1].any()  # no plan has such a product


def test_only_what_could_swap_plans_is_worth_measuring_and_more_the_less_is_known(
    searched: tuple[Problem, list[RankedPlan]],
) -> None:
    problem, plans = searched
    gains = []
    for spread in (0.0, 0.1, 0.3):
        groups = [*products_of(problem, plans[:4], spread), STRANGE]
        found = advise_measurements(problem, plans[:4], groups, lambda more: timed(problem, more))
        assert all(group.group != STRANGE for group in found.groups)
        gains.append(sum(group.gain for group in found.groups))
        assert found.probability <= found.expected_probability + 1e-6
        assert found.rival is not None
    assert gains[0] == 0.0
    assert gains[1] < gains[2]
    alone = advise_measurements(problem, plans[:1], products_of(problem, plans[:1]), lambda more: timed(problem, more))
    assert (alone.rival, alone.probability, alone.groups) == (None, 1.0, ())


def test_of_equal_gains_the_quicker_measurement_comes_first(searched: tuple[Problem, list[RankedPlan]]) -> None:
    problem, plans = searched
    groups = products_of(problem, plans[:4], 0.3)
    first = advise_measurements(problem, plans[:4], groups, lambda more: timed(problem, more)).groups[0].group
    slow = [replace(group, seconds=1000.0) if group == first else group for group in groups]
    assert (
        advise_measurements(problem, plans[:4], slow, lambda more: timed(problem, more)).groups[0].group.setting
        != first.setting
    )


def test_a_price_is_as_uncertain_as_what_it_rests_on(searched: tuple[Problem, list[RankedPlan]]) -> None:
    problem, _ = searched
    shape = (4096, 4096, 4096)
    spread, provenance = spread_of_price(problem, "gemm", "bf16", shape)
    assert (provenance, 0.02 < spread < DATASHEET_SPREAD) == ("reference", True)
    times = [replace(A.times_s[0], shape=(tokens, 4096, 4096)) for tokens in (4096, 16384)]
    known = timed(problem, times)
    assert spread_of_price(known, "gemm", "bf16", shape) == (0.0, "measured")
    assert spread_of_price(known, "gemm", "bf16", (8192, 4096, 4096)) == (INTERPOLATED_SPREAD, "interpolated")
    device = replace(problem.cluster.device, gemm=replace(problem.cluster.device.gemm, source="not measured"))
    unknown = replace(problem, cluster=replace(problem.cluster, device=device))
    assert spread_of_price(unknown, "gemm", "bf16", shape) == (DATASHEET_SPREAD, "datasheet")


# -- the command ------------------------------------------------------------------------------------------------------

SMALL = """
name = "small"
num_layers = 2
hidden_size = 64
vocab_size = 256
num_heads = 2
ffn_size = 128
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(SMALL)
    made = run(
        tmp_path, "search", "small.toml", "--cluster", "cpu:1x2", "--global-batch", "4", "--seq-len", "32",
        "--framework", "torch", "--quiet",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return tmp_path


def test_a_profile_for_a_plan_says_what_it_will_settle_and_what_it_has(folder: Path) -> None:
    pytest.importorskip("torch")
    flags = ("--for", "plan.json", "--db", "t.db", "--ranks", "2", "--allowance", "0.02s", "--budget", "1s")
    done = run(folder, "profile", *flags, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert "certain that A is faster; expected after" in done.stdout
    assert "datasheet" in done.stdout
    assert "fastest still" in done.stdout or "fastest now" in done.stdout
    assert "certain against its closest rival" in done.stdout


def test_flags_that_the_plan_file_says_are_refused(folder: Path) -> None:
    pytest.importorskip("torch")
    for arguments, says in (
        (("--for", "plan.json", "--tp", "2"), "without --tp: leave them out"),
        (("small.toml", "--for", "plan.json"), "without MODEL: leave them out"),
        (("--for", "small.toml"), "is no plan file"),
    ):
        done = run(folder, "profile", *arguments)
        assert done.returncode == 1
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
