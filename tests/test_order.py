"""Does every rank run the published order of its schedule, and is what it keeps alive counted right?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.pipeline.closed_forms import in_flight_chunks
from autoplan.cost.pipeline.order import (
    Operation,
    PipelineShape,
    chunks_of_ranks,
    live_chunks,
    microbatch_group,
    rank_orders,
)
from autoplan.spec.enums import Schedule
from pipeline_oracle import (
    TORCH,
    Action,
    cases,
    gpipe,
    interleaved,
    most_alive,
    one_forward_one_backward,
    torch_actions,
)


def actions(orders: tuple[tuple[Operation, ...], ...]) -> list[list[Action]]:
    """Our orders in the oracle's words."""
    ranks = []
    for order in orders:
        rank: list[Action] = []
        joins = False
        for operation in order:
            step = (operation.kind, operation.microbatch, operation.chunk)
            rank[-1:] = [(*rank[-1], step)] if joins else [*rank[-1:], (step,)]
            joins = operation.joined
        ranks.append(rank)
    return ranks


# -- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "schedule", "v"), TORCH)
def test_orders_are_those_of_torch(name: str, schedule: Schedule, v: int) -> None:
    compared = 0
    for p, m in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8, 10, 12, 24)):
        expected = torch_actions(name, p, v, m)
        if expected is not None:
            assert actions(rank_orders(PipelineShape(schedule, p, v, m))) == expected, (p, m)
            compared += 1
    assert compared > 15


@pytest.mark.parametrize("p", [1, 2, 4, 5])
def test_orders_are_those_of_megatron(p: int) -> None:
    for m in (1, 2, 4, 9):
        assert actions(rank_orders(PipelineShape("gpipe", p, 1, m))) == gpipe(p, m)
        assert actions(rank_orders(PipelineShape("1f1b", p, 1, m))) == one_forward_one_backward(p, m)
        assert rank_orders(PipelineShape("interleaved", p, 1, m)) == rank_orders(PipelineShape("1f1b", p, 1, m))
        for v in (2, 4):
            assert actions(rank_orders(PipelineShape("interleaved", p, v, m * p))) == interleaved(p, v, m * p)
            assert actions(rank_orders(PipelineShape("interleaved", p, v, m * p + 3), group=p + 1)) == interleaved(
                p, v, m * p + 3, p + 1
            )


@pytest.mark.parametrize(("schedule", "p", "v", "m"), cases((1, 2, 4), (1, 3, 8, 11)))
def test_every_pass_of_every_chunk_runs_once_on_its_rank(schedule: Schedule, p: int, v: int, m: int) -> None:
    for chunks, order in zip(
        chunks_of_ranks(schedule, p, v).tolist(), rank_orders(PipelineShape(schedule, p, v, m)), strict=True
    ):
        runs = [(o.kind if o.kind in "FW" else "I", o.chunk, o.microbatch) for o in order]
        runs += [("W", o.chunk, o.microbatch) for o in order if o.kind == "B"]
        assert sorted(runs) == sorted(itertools.product("FIW", chunks, range(m)))
        for operation, after in itertools.pairwise(order):
            if operation.joined:
                assert (operation.kind, after.kind, after.joined) == ("F", "B", False)
                assert {operation.chunk, after.chunk} == set(chunks)


def test_the_orders_of_zb_h1_for_four_stages_are_those_of_the_paper() -> None:
    """arXiv:2401.10241, figure 2: the first rank never waits with a weight gradient, the last one keeps three."""
    kinds = ["".join(operation.kind for operation in order) for order in rank_orders(PipelineShape("zb-h1", 4, 1, 8))]
    assert kinds[0] == "FFF" + "FIW" * 5 + "IW" * 3
    assert kinds[3] == "FI" * 3 + "FIW" * 5 + "WWW"


def test_chunks_go_round_or_come_back() -> None:
    assert chunks_of_ranks("interleaved", 3, 2).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert chunks_of_ranks("zb-v", 3, 2).tolist() == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize(("p", "m", "group"), [(4, 8, 4), (4, 9, 5), (4, 10, 5), (4, 11, 6), (4, 3, 3), (1, 5, 1)])
def test_worked_groups_of_microbatches(p: int, m: int, group: int) -> None:
    assert microbatch_group(p, m) == group


@given(st.integers(1, 32), st.integers(1, 200))
def test_the_last_group_of_microbatches_fills_the_pipeline_if_any_does(p: int, m: int) -> None:
    group = microbatch_group(p, m)
    assert group >= min(p, m)
    assert m % group == 0 or m % group >= p


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m", "words"),
    [
        ("zb-v", 4, 1, 8, "needs vp 2, vp is 1"),
        ("dualpipe-v", 4, 2, 7, "at least 2 pp = 8 micro-batches, there are 7"),
        ("1f1b", 4, 2, 8, "needs vp 1, vp is 2: use interleaved"),
    ],
)
def test_a_combination_without_an_order_is_refused(schedule: Schedule, p: int, v: int, m: int, words: str) -> None:
    for function in (rank_orders, live_chunks):
        with pytest.raises(InputError, match=words):
            function(PipelineShape(schedule, p, v, m))


# -- live activations -------------------------------------------------------------------------------------------------


def most(schedule: Schedule, p: int, v: int, m: int) -> list[int]:
    """Peak number of live chunks on every rank, of whichever kind."""
    counts: list[int] = live_chunks(PipelineShape(schedule, p, v, m)).sum(axis=2).max(axis=1).tolist()
    return counts


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m", "expected"),
    [
        ("gpipe", 4, 1, 8, [8, 8, 8, 8]),
        ("1f1b", 4, 1, 8, [4, 3, 2, 1]),
        ("interleaved", 4, 2, 8, [11, 9, 7, 5]),
        ("interleaved", 4, 2, 4, [8, 8, 7, 5]),
        ("interleaved", 8, 4, 32, list(range(39, 24, -2))),
        ("interleaved", 16, 6, 96, list(range(111, 80, -2))),
        ("zb-h1", 4, 1, 8, [4] * 4),
        ("zb-v", 8, 2, 32, [16] * 8),
        ("dualpipe-v", 8, 2, 32, [17] * 8),
    ],
)
def test_published_counts_of_live_chunks(schedule: Schedule, p: int, v: int, m: int, expected: list[int]) -> None:
    """`modelling` B4; the READMEs of zero-bubble and DualPipe for the last three."""
    assert most(schedule, p, v, m) == expected


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 60))
def test_closed_forms_of_live_chunks_are_the_largest_count(p: int, v: int, m: int) -> None:
    def closed(chunks: int, microbatches: int, *, is_gpipe: bool = False) -> list[int]:
        counts = in_flight_chunks(p, np.array([chunks]), np.array([microbatches]), gpipe=np.array([is_gpipe]))
        listed: list[int] = counts[0].tolist()
        return listed

    assert most("gpipe", p, 1, m) == closed(1, m, is_gpipe=True)
    assert most("1f1b", p, 1, m) == closed(1, m)
    assert most("interleaved", p, v, m * p) == closed(v, m * p)
    assert most("zb-h1", p, 1, m) == [min(m, p)] * p
    assert most("zb-v", p, 2, m + 2 * p - 2) == [2 * p] * p
    assert most("dualpipe-v", p, 2, m + 2 * p - 1) == [2 * p + 1] * p


@pytest.mark.parametrize(("schedule", "p", "v", "m"), cases((1, 2, 4, 5), (1, 3, 8, 10, 27)))
def test_peak_bytes_are_exact_for_chunks_of_any_size(schedule: Schedule, p: int, v: int, m: int) -> None:
    """Counted along the whole order, also where the count itself stops at fewer micro-batches."""
    chunks = chunks_of_ranks(schedule, p, v)
    orders = actions(rank_orders(PipelineShape(schedule, p, v, m)))
    live = live_chunks(PipelineShape(schedule, p, v, m))
    for skew in (1.0, 8.0):
        sizes = np.random.default_rng(0).uniform(0.1, 1.0, p * v) ** skew
        for rank, order in enumerate(orders):
            peak = most_alive(order, dict(enumerate(sizes.tolist())), released="BW")
            assert float((live[rank] @ sizes[chunks[rank]]).max()) == pytest.approx(peak), rank


@pytest.mark.parametrize(("schedule", "v"), [("zb-h1", 1), ("zb-h1", 2), ("zb-v", 2), ("dualpipe-v", 2)])
@pytest.mark.parametrize("m", [8, 27])
def test_chunks_between_their_two_gradients_count_with_those_alive(schedule: Schedule, v: int, m: int) -> None:
    """Exactly, whatever either weighs."""
    p = 4
    chunks, live = chunks_of_ranks(schedule, p, v), live_chunks(PipelineShape(schedule, p, v, m), waiting=True)
    alive, waiting = np.random.default_rng(m).uniform(0.1, 1.0, (2, p * v))
    for rank, order in enumerate(rank_orders(PipelineShape(schedule, p, v, m))):
        weights = {"F": alive, "B": -alive, "I": waiting, "W": -(alive + waiting)}
        peak = max(itertools.accumulate(float(weights[operation.kind][operation.chunk]) for operation in order))
        sizes = np.concatenate([alive[chunks[rank]], waiting[chunks[rank]]])
        assert float((live[rank] @ sizes).max()) == pytest.approx(peak)


@pytest.mark.parametrize("schedule", Schedule)
def test_live_chunks_do_not_dominate_one_another_and_cannot_be_changed(schedule: Schedule) -> None:
    v = 1 if schedule in ("gpipe", "1f1b") else 2
    live = live_chunks(PipelineShape(schedule, 6, v, 24))
    for rows in live:
        distinct = np.unique(rows, axis=0)
        for counts, other in itertools.permutations(distinct, 2):
            assert (counts > other).any()
    with pytest.raises(ValueError, match="read-only"):
        live[0, 0, 0] = 0


def test_live_chunks_of_many_microbatches_are_those_of_a_few() -> None:
    for schedule, v, few in (("1f1b", 1, 32), ("interleaved", 4, 32), ("zb-h1", 1, 32), ("zb-v", 2, 32)):
        many = live_chunks(PipelineShape(schedule, 8, v, 8000))  # type: ignore[arg-type]
        assert np.array_equal(many, live_chunks(PipelineShape(schedule, 8, v, few)))  # type: ignore[arg-type]
    assert live_chunks(PipelineShape("gpipe", 2, 1, 10**9)).tolist() == [[[10**9]], [[10**9]]]
