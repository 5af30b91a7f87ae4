"""Names that a word may stand for."""

from __future__ import annotations

import pytest

from autoplan.base.names import close_names, suggestion
from autoplan.frameworks.registry import TARGETS, facts_files, names_of
from autoplan.readers.cluster import preset_clusters
from autoplan.readers.model import preset_models

FRAMEWORKS = tuple(dict.fromkeys(name for facts in facts_files() for name in names_of(facts)))


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        ("h100-smx", preset_clusters(), ["h100-sxm"]),
        ("h1000", preset_clusters(), ["h100-sxm", "h100-pcie"]),
        ("nvl72", preset_clusters(), ["gb200-nvl72", "gb300-nvl72"]),
        ("llama4", preset_models(), ["llama4-scout", "llama4-maverick"]),
        ("kimi", preset_models(), ["kimi-k2"]),
        ("megatron-brigde", FRAMEWORKS, ["megatron-bridge"]),
        ("titan", FRAMEWORKS, ["torchtitan"]),
        ("swift", TARGETS, ["ms-swift"]),
    ],
)
def test_a_part_of_a_name_or_a_misspelling_is_understood(word: str, names: tuple[str, ...], meant: list[str]) -> None:
    assert [name for name in close_names(word, names) if name in meant] == meant


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("tpu", preset_clusters()),
        ("bert", preset_models()),
        ("glm-4.5", preset_models()),
        ("falcon-7b", preset_models()),
        ("x", preset_models()),
        ("jax", FRAMEWORKS),
        ("colossalai", FRAMEWORKS),
        ("", FRAMEWORKS),
    ],
)
def test_what_is_like_no_name_is_taken_for_none(word: str, names: tuple[str, ...]) -> None:
    assert close_names(word, names) == []
    assert suggestion(word, names, "a list has them") == "a list has them"
