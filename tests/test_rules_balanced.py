"""The cut into stages of equal parameters, by hand and against every other cut."""

from itertools import combinations

import pytest

from autoplan.model import ModelSpec
from autoplan.rules.balanced import balanced_layers

LAYER = 4 * 64 * 64 + 3 * 256 * 64  # parameters, less the norms


def model(num_layers: int, vocab_size: int) -> ModelSpec:
    return ModelSpec(
        name="cut",
        num_layers=num_layers,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        ffn_size=256,
        vocab_size=vocab_size,
    )


def test_tables_worth_two_layers_take_the_place_of_two() -> None:
    """44 layers' worth on four stages: 11 each, of which the first and the last hold nine."""
    assert balanced_layers(model(40, 2 * LAYER // 64), 4) == (9, 11, 11, 9)


def test_a_light_table_goes_with_as_many_layers_as_the_fullest_stage_has() -> None:
    assert balanced_layers(model(8, 64), 2) == (4, 4)


def test_stages_that_would_be_empty_are_filled_evenly() -> None:
    assert balanced_layers(model(8, 64), 7) == (1, 1, 1, 2, 1, 1, 1)


@pytest.mark.parametrize("vocab_size", [64, 1500, 4000, 9000])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_no_other_cut_has_fewer_parameters_on_its_fullest_stage(vocab_size: int, pp: int) -> None:
    units = [64 * vocab_size, *[LAYER] * 9, 64 * vocab_size]

    def fullest(ends: tuple[int, ...]) -> int:
        return max(sum(units[start:stop]) for start, stop in zip((0, *ends), (*ends, len(units)), strict=True))

    stages = balanced_layers(model(9, vocab_size), pp)
    own = tuple(1 + sum(stages[: stage + 1]) for stage in range(pp - 1))
    assert fullest(own) == min(fullest(ends) for ends in combinations(range(1, len(units)), pp - 1))
