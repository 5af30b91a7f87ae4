from __future__ import annotations

import pytest

from autoplan.frameworks.presets import load_framework
from autoplan.runs.recipes import recipe_called, recipes


def test_every_recipe_names_facts_that_are_shipped() -> None:
    for recipe in recipes():
        assert load_framework(recipe.framework).name == recipe.framework


def test_a_name_that_no_recipe_knows_has_none() -> None:
    assert recipe_called("Alpa (JAX/XLA)", "2021") is None


@pytest.mark.parametrize(
    ("called", "year", "name"),
    [
        ("NeMo 24.07/Megatron-Core", "2024", "nemo-24.07"),
        ("NeMo/Megatron-Core", "2025", "nemo-25.04"),
        ("Megatron-Core r0.8.0", "2024", "megatron-core-0.8"),
        ("Megatron-Bridge/Megatron-Core 25.09", "2025", "nemo-25.09"),
        ("Megatron-Core", "2024", "megatron-core"),
        ("Megatron-Core", "2025", "nemo"),
        ("Megatron-Bridge/Megatron-Core 26.08", "2026", "nemo-26.06"),
        ("Megatron-Bridge/Megatron-Core 26.04", "2026", "nemo"),
        ("torchtitan (FSDP2)", "2024", "torchtitan-0.1"),
        ("torchtitan (FSDP2)", "2025", "torchtitan"),
        ("nanotron", "2025", "nanotron-bench2"),
        ("nanotron", "2026", "nanotron"),
    ],
)
def test_versions_are_told_apart_by_their_names(called: str, year: str, name: str) -> None:
    found = recipe_called(called, year)
    assert found is not None
    assert found.framework == name


@pytest.mark.parametrize(("device", "name"), [("a100-sxm-40", "llm-foundry-0.0"), ("a100-sxm-80", "llm-foundry")])
def test_versions_are_told_apart_by_what_they_ran_on(device: str, name: str) -> None:
    found = recipe_called("Composer/PyTorch FSDP1", "2023", device)
    assert found is not None
    assert found.framework == name
