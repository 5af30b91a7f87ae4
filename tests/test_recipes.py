from __future__ import annotations

import pytest

from autoplan.frameworks.presets import load_framework
from autoplan.runs.recipes import Recipe, nearest_recipe, recipe_called, recipes


def test_every_recipe_names_facts_that_are_shipped() -> None:
    for recipe in recipes():
        assert load_framework(recipe.framework).name == recipe.framework


def test_a_name_that_no_recipe_knows_has_none() -> None:
    assert recipe_called("Whale", "2021") is None


@pytest.mark.parametrize(
    ("called", "year", "name"),
    [
        ("Sailor (Megatron-DeepSpeed based)", "2025", "sailor"),
        ("YaFSDP", "2024", "pytorch-fsdp"),
        ("PaddleNLP 2023-11", "2023", "eager"),
        ("DeepSpeed ZeRO-3 (HF)", "2026", "deepspeed-hf"),
        ("DeepSpeed ZeRO-3", "2023", "deepspeed-hf"),
        ("DeepSpeed ZeRO-3", "2021", "deepspeed-2021"),
        ("MaxText", "2025", "maxtext"),
        ("Alpa (JAX/XLA)", "2021", "alpa"),
        ("OneFlow LiBai 0.2.0", "2022", "oneflow"),
    ],
)
def test_what_was_not_measured_is_priced_as_its_kin(called: str, year: str, name: str) -> None:
    found = recipe_called(called, year)
    assert found is not None
    assert (found.framework, found.is_similar) == (name, True)


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NeMo AutoModel 26.02", "nemo-automodel"),
        ("Pax + Transformer Engine", "xla"),
        ("MaxText without PGLE", "xla"),
        ("FlagScale 0.8", "megatron-core"),
        ("LitGPT", "pytorch-fsdp"),
        ("Lightning Fabric (LitGPT)", "pytorch-fsdp"),
        ("Axolotl (DeepSpeed)", "deepspeed-hf"),
        ("Axolotl (FSDP2)", "pytorch-fsdp"),
        ("ColossalAI Gemini", "deepspeed-hf"),
        ("Colossal-AI", "eager"),
        ("veScale", "torchtitan-0.2"),
        ("OLMo-core", "torchtitan-0.2"),
        ("FairScale FSDP", "pytorch-fsdp"),
        ("torchtune", "pytorch-fsdp"),
        ("MindSpeed-LLM", "megatron-core"),
        ("Trainer of ours on torchtitan", "torchtitan"),
        ("HF Trainer + DeepSpeed ZeRO-3", "deepspeed-zero"),
    ],
)
def test_later_frameworks_are_kin_of_what_they_do(called: str, name: str) -> None:
    found = recipe_called(called, "2026")
    assert found is not None
    assert (found.framework, found.is_similar) == (name, True)


@pytest.mark.parametrize(
    ("sharding", "year", "name"),
    [
        ("zero3", "2025", "pytorch-fsdp"),
        ("zero1", "2025", "eager"),
        ("", "?", "eager"),
        ("none", "2021", "megatron-lm-2021"),
    ],
)
def test_a_framework_of_no_name_is_told_by_its_sharding_and_year(sharding: str, year: str, name: str) -> None:
    found = nearest_recipe(sharding, year)
    assert (found.framework, found.is_similar) == (name, True)


@pytest.mark.parametrize(
    ("called", "year", "name"),
    [
        ("NeMo 24.07/Megatron-Core", "2024", "nemo-24.07"),
        ("NeMo 24.07 or older: NeMo 23.04 (MLPerf v3.0)", "2023", "nemo-23.06"),
        ("NeMo 24.07 or older: NeMo 23.09 (MLPerf v3.1)", "2023", "nemo-24.07"),
        ("NeMo 24.07 or older: NeMo Megatron 22.08", "2022", "megatron-lm-2022"),
        ("Megatron-LM", "2021", "megatron-lm-2021"),
        ("Megatron-LM (2021)", "2021", "megatron-lm-2021.07"),
        ("Megatron-LM/DeepSpeed (vTrain validation)", "2023", "megatron-lm-2021.07"),
        ("NeMo/Megatron-Core", "2025", "nemo-25.04"),
        ("Megatron-Core r0.8.0", "2024", "megatron-core-0.8"),
        ("Megatron-Bridge/Megatron-Core 25.09", "2025", "nemo-25.09"),
        ("Megatron-Core", "2024", "megatron-core"),
        ("Megatron-Core", "2025", "nemo"),
        ("Megatron-Bridge/Megatron-Core 26.08", "2026", "nemo-26.06"),
        ("Megatron-Bridge/Megatron-Core 26.04", "2026", "nemo"),
        ("torchtitan (FSDP2)", "2024", "torchtitan-0.1"),
        ("torchtitan (FSDP2)", "2025", "torchtitan-0.2"),
        ("NeMo AutoModel (FSDP2)", "2025", "nemo-automodel"),
        ("nanotron", "2025", "nanotron"),
        ("nanotron", "2026", "nanotron"),
        ("DeepSpeed ZeRO-3 (torch 2.13, ds 0.19.2)", "2026", "deepspeed-zero"),
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


@pytest.mark.parametrize(
    ("release", "device", "dispatcher"),
    [
        ("25.11", "b200-180", "alltoall"),
        ("25.11", "h100-sxm-80", "alltoall"),
        ("25.11", "gb300-288", "hybridep"),
        ("26.02", "b200-180", "hybridep"),
        ("25.09", "h100-sxm-80", "deepep"),
    ],
)
def test_recipes_of_a_container_name_a_dispatcher_for_some_devices(release: str, device: str, dispatcher: str) -> None:
    found = recipe_called(f"Megatron-Bridge/Megatron-Core {release}", "2025", device)
    assert found is not None
    assert found.dispatcher == dispatcher


def test_the_trainer_of_flash_attention_has_a_loss_that_works_in_place() -> None:
    trainer = recipe_called("flash-attention training (PyTorch Lightning)", "2022")
    assert trainer is not None
    software = trainer.software()
    assert software.memory.bytes_per_logit == 2.0
    assert software.kernels.bytes_moved_per_logit < load_framework("pytorch-fsdp").kernels.bytes_moved_per_logit / 8


def test_runs_of_torchtitan_on_a100_were_not_compiled() -> None:
    """train_configs/ had compile = false when docs/performance.md had its table of A100 (1ea476e to 4d88a8a)."""
    found = recipe_called("torchtitan (FSDP2)", "2024", "a100-sxm-80")
    assert found is not None
    assert found.framework == "torchtitan-eager"


def test_what_a_published_sweep_did_is_no_trait_of_the_software() -> None:
    """The branch that the sweep of 2025 ran polls the messages of its pipelines; nanotron itself does not."""
    sweep, release = recipe_called("nanotron", "2025"), recipe_called("nanotron", "2026")
    assert sweep is not None
    assert release is not None
    release_build, bare = load_framework("nanotron"), sweep.software()
    assert release.software() == release_build
    assert release_build.network.message_poll_s == bare.network.message_poll_s == 0.0
    polling = bare.changed(message_poll_s=0.46)
    assert sweep.builds(bare, 16, 8) == (bare, None)
    assert sweep.builds(bare, 32, 8) == (bare, polling)  # no column tells them apart
    assert sweep.builds(bare, 64, 8) == sweep.builds(bare, 16, 32) == (polling, None)
    assert release.builds(release_build, 64, 32) == (release_build, None)


def test_a_build_is_in_doubt_on_all_nodes_unless_its_recipe_says_otherwise() -> None:
    usual = load_framework("nanotron")
    recipe = Recipe(names=("mine",), framework="nanotron", doubted={"message_poll_s": 0.46})
    assert recipe.builds(usual, 1, 1) == recipe.builds(usual, 64, 32) == (usual, usual.changed(message_poll_s=0.46))
