"""Are layers, micro-batches and states shared out as well as any enumeration finds?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.search.balance import even_shares, min_max_layers, split_microbatches

seconds = st.integers(1, 20).map(float)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, total), parts - 1)
    return [tuple(np.diff([0, *cut, total]).tolist()) for cut in cuts]


def slowest(layer_s: np.ndarray, extra_s: np.ndarray, layers: tuple[int, ...]) -> float:
    begins = np.cumsum([0, *layers])
    return max(extra_s[stage] + layer_s[stage, begins[stage] : begins[stage + 1]].sum() for stage in range(len(layers)))


@settings(max_examples=60)
@given(st.data())
def test_layers_are_cut_as_well_as_the_best_of_all_cuts(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 4))
    num_layers = data.draw(st.integers(stages, 9))
    row = st.lists(seconds, min_size=num_layers, max_size=num_layers)
    layer_s = np.array(data.draw(st.lists(row, min_size=stages, max_size=stages)))
    extra_s = np.array(data.draw(st.lists(seconds, min_size=stages, max_size=stages)))
    most = np.array(data.draw(st.lists(st.integers(0, 9), min_size=stages, max_size=stages)))
    fitting = [cut for cut in compositions(num_layers, stages) if all(np.array(cut) <= most)]
    found = min_max_layers(layer_s, extra_s, most)
    if not fitting:
        assert found is None
        return
    assert found in fitting
    assert slowest(layer_s, extra_s, found) == pytest.approx(min(slowest(layer_s, extra_s, cut) for cut in fitting))


def test_a_head_of_two_layers_takes_two_layers_from_the_last_stage() -> None:
    assert min_max_layers(np.ones((4, 14)), np.array([0.0, 0, 0, 2]), np.full(4, 14)) == (4, 4, 4, 2)


def test_stages_without_influence_on_the_slowest_are_alike() -> None:
    assert min_max_layers(np.ones((3, 9)), np.array([0.0, 0, 9]), np.full(3, 9)) == (4, 4, 1)


@settings(max_examples=60)
@given(st.data())
def test_microbatches_are_split_as_well_as_the_best_of_all_splits(data: st.DataObject) -> None:
    kinds = data.draw(st.integers(1, 3))
    counts = data.draw(st.lists(st.integers(1, 3), min_size=kinds, max_size=kinds))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=kinds, max_size=kinds))
    batch = data.draw(st.integers(1, 24))
    steps = st.lists(seconds, min_size=24, max_size=24).map(lambda values: np.cumsum(values))
    time_s = data.draw(st.lists(steps, min_size=kinds, max_size=kinds))

    def worst(split: tuple[int, ...]) -> float:
        return max(times[-(-many // count) - 1] for times, many, count in zip(time_s, split, counts, strict=True))

    ranges = [range(count, batch + 1) for count in counts]
    whole = [
        split for split in itertools.product(*ranges) if sum(np.multiply(split, sizes)) == batch and max(split) <= 24
    ]
    found = split_microbatches(time_s, counts, sizes, batch)
    if not whole:
        assert found is None
        return
    assert found in whole
    assert worst(found) == min(worst(split) for split in whole)


def test_replicas_of_speed_one_and_one_half_share_a_batch_two_to_one() -> None:
    """S46 (a): an equal split has 2.0 of the ideal throughput of 3.0."""
    fast, slow = np.arange(1, 61.0), 2 * np.arange(1, 61.0)
    split = split_microbatches([fast, slow], [2, 2], [1, 1], 60)
    assert split == (40, 20)
    assert 60 / fast[40 // 2 - 1] == 3.0
    uneven = split_microbatches([fast, slow], [2, 2], [1, 1], 59)
    assert uneven is not None
    assert 59 / max(fast[-(-uneven[0] // 2) - 1], slow[-(-uneven[1] // 2) - 1]) >= 2.9


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4)), min_size=1, max_size=4))
def test_shares_add_up_and_stay_below_their_bounds(kinds: list[tuple[float, int]]) -> None:
    most, counts = [bound for bound, _ in kinds], [count for _, count in kinds]
    shares = even_shares(most, counts)
    if sum(np.multiply(most, counts)) < 1:
        assert shares is None
        return
    assert shares is not None
    assert sum(np.multiply(shares, counts)) == pytest.approx(1, abs=1e-12)
    free = {share for share, bound in zip(shares, most, strict=True) if share < bound}
    assert all(share <= bound for share, bound in zip(shares, most, strict=True))
    assert len(free) <= 1
    assert not free or max(shares) == pytest.approx(max(free))
