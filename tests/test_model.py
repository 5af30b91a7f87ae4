"""Do the shipped models have their published sizes, and does every way to name a model lead to it?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.cost.kernels.arithmetic import count_parameters, model_flops_per_token
from autoplan.cost.kernels.block_shapes import block_shapes
from autoplan.readers.model import find_preset, load_model, preset_models
from autoplan.spec.blocks import Block, Experts, Mamba
from autoplan.spec.model import ModelSpec

EXAMPLE = Path(__file__).parent.parent / "examples" / "llama3-70b" / "config.json"

# Parameters to the unit: `modelling` A1, or the model card; transformers 5.23 builds each Hugging Face one as large.
EXACT = {
    "gpt3-175b": 174_615_846_912,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.2": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "bloom-176b": 176_247_271_424,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mpt-7b": 6_649_286_656,
}
EXACT_ACTIVE = {"mixtral-8x7b": 12_879_925_248, "deepseek-v3": 37_552_282_624}

# Billions of parameters as the papers and model cards state them.
PUBLISHED_BILLIONS = {
    "moonlight-16b": 16.0,
    "megatron-1t": 1008.0,
    "llama-7b": 6.7,
    "llama-13b": 13.0,
    "llama3.1-8b": 8.03,
    "llama3.1-70b": 70.6,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-4b": 4.0,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.0,
    "qwen3-next-80b-a3b": 80.0,
    "mixtral-8x22b": 141.0,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236.0,
    "kimi-k2": 1030.0,
    "hy3": 295.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "gemma3-4b": 3.88,
    "gemma3-12b": 11.77,
    "gemma3-27b": 27.0,
    "nemotron3-8b": 8.54,  # marketed 8
    "nemotron3-22b": 21.3,  # marketed 22
    "nemotron4-15b": 15.6,
    "nemotron4-340b": 341.0,
    "nemotron-h-56b": 56.3,
    "nemotron3-nano": 31.6,
    "nemotron3.5-lightning": 31.6,
    "nemotron3-super": 120.6,
    "nemotron3-ultra": 550.0,
    "llama4-scout": 107.8,  # 109 with the vision tower
    "llama4-maverick": 400.0,
    "olmo2-7b": 7.3,
    "olmo2-13b": 13.7,
    "olmo2-32b": 32.2,
    "yi-34b": 34.4,
    "mpt-30b": 29.96,
    "dbrx": 131.6,
    "phi-4": 14.66,
    "internlm-7b": 7.3,
    "internlm-20b": 20.1,
}
# With both embeddings, as `active` counts them; gpt-oss states 5.1 and 3.6 without one of them.
ACTIVE_BILLIONS = {
    "mixtral-8x22b": 39.0,
    "deepseek-v2": 21.4,
    "dbrx": 36.0,
    "kimi-k2": 32.9,
    "hy3": 21.0,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0,
    "gpt-oss-20b": 3.6 + 0.58,
    "gpt-oss-120b": 5.13 + 0.58,
    "nemotron3-nano": 3.6,
    "nemotron3-super": 12.7,
    "nemotron3-ultra": 55.5,
    "llama4-maverick": 17.2,
    "llama4-scout": 17.2,
}


@pytest.mark.parametrize("preset", preset_models())
def test_a_preset_loads_under_its_id_and_names_its_sources(preset: str) -> None:
    model = load_model(preset)
    assert model.name == preset
    assert model.sources
    assert block_shapes(model)
    assert model_flops_per_token(model, 4096) > 0


def test_every_preset_has_a_published_size_to_compare_with() -> None:
    assert sorted([*EXACT, *PUBLISHED_BILLIONS]) == list(preset_models())


@pytest.mark.parametrize("preset", EXACT)
def test_parameters_are_the_published_number_to_the_unit(preset: str) -> None:
    assert count_parameters(load_model(preset)) == EXACT[preset]


@pytest.mark.parametrize("preset", EXACT_ACTIVE)
def test_active_parameters_are_the_published_number_to_the_unit(preset: str) -> None:
    assert count_parameters(load_model(preset), active=True) == EXACT_ACTIVE[preset]


@pytest.mark.parametrize("preset", PUBLISHED_BILLIONS)
def test_parameters_round_to_the_published_size(preset: str) -> None:
    assert count_parameters(load_model(preset)) / 1e9 == pytest.approx(PUBLISHED_BILLIONS[preset], rel=0.0125)


@pytest.mark.parametrize("preset", ACTIVE_BILLIONS)
def test_active_parameters_are_within_two_hundredths_of_the_published_size(preset: str) -> None:
    assert count_parameters(load_model(preset), active=True) / 1e9 == pytest.approx(ACTIVE_BILLIONS[preset], rel=0.02)


def test_the_prediction_layer_completes_the_published_checkpoints() -> None:
    # DeepSeek-V3's model card: 685 B in the files, of which 14 B belong to the prediction module with copies of both
    # embeddings (2 x 129280 x 7168 = 1.85 B); the bfloat16 files of Nemotron 3 Ultra hold 1,121 GB.
    deepseek = load_model("deepseek-v3")
    embeddings = 2 * deepseek.vocab_size * deepseek.hidden_size
    assert (count_parameters(deepseek, with_mtp=True) + embeddings) / 1e9 == pytest.approx(684.5, abs=0.1)
    assert 2 * count_parameters(load_model("nemotron3-ultra"), with_mtp=True) / 1e9 == pytest.approx(1121, abs=0.5)


def test_the_prediction_layer_of_a_hybrid_has_attention_and_experts() -> None:
    assert load_model("nemotron3-super").mtp_layer == (Block.ATTENTION, Block.MOE)
    assert load_model("deepseek-v3").mtp_layer == (Block.ATTENTION, Block.MOE)
    assert load_model("llama3-8b").mtp_layer == (Block.ATTENTION, Block.MLP)


def test_a_layernorm_without_bias_has_one_vector() -> None:
    spec = ModelSpec(name="x", num_layers=1, hidden_size=8, vocab_size=10, num_heads=2, ffn_size=16, norm="layernorm")
    plain = ModelSpec(
        name="x",
        num_layers=1,
        hidden_size=8,
        vocab_size=10,
        num_heads=2,
        ffn_size=16,
        norm="layernorm",
        norm_bias=False,
    )
    assert count_parameters(spec) - count_parameters(plain) == 3 * 8


def test_a_hand_counted_hybrid() -> None:
    model = ModelSpec(
        name="x",
        num_layers=3,
        hidden_size=8,
        vocab_size=10,
        num_heads=2,
        head_dim=4,
        gated_mlp=False,
        layer_pattern="M*E",
        mamba=Mamba(num_heads=2, head_dim=4, state_size=3, num_groups=1),
        moe=Experts(num_experts=2, experts_per_token=1, expert_ffn_size=5, latent_size=4),
    )
    # inner 8, convolved 8 + 2 * 3 = 14: in 8 x (8 + 14 + 2), convolution 14 x (4 + 1), A, D and dt 2 each, norm 8, out
    mamba = 8 * 24 + 14 * 5 + 3 * 2 + 8 + 8 * 8 + 8
    attention = 8 * 3 * 8 + 8 * 8 + 8
    moe = 8 * 2 + 8 * 4 + 4 * 8 + 2 * (4 * 5 + 5 * 4) + 8
    assert count_parameters(model) == mamba + attention + moe + 2 * 10 * 8 + 8


def test_no_name_leads_to_two_presets() -> None:
    names = [alias.casefold() for preset in preset_models() for alias in load_model(preset).aliases]
    names += preset_models()
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("LLaMA-13B", "llama-13b"),
        ("llama3-405b", "llama3.1-405b"),
        ("LLAMA 3 70B", "llama3-70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("Llama-2-70b-chat-hf", "llama2-70b"),
        ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek_v3", "deepseek-v3"),
        ("Nemotron_3_Nano", "nemotron3-nano"),
        ("nemotron_3_ULTRA", "nemotron3-ultra"),
        ("Nemotron-H 56B (hybrid Mamba)", "nemotron-h-56b"),
        ("meta-llama/Meta-Llama-3-70B", "llama3-70b"),
        ("DeepSeekV3", "deepseek-v3"),
    ],
)
def test_an_alias_in_any_case_leads_to_its_preset(name: str, preset: str) -> None:
    assert load_model(name) == load_model(preset)


def test_a_hugging_face_file_or_its_folder_is_named_by_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "config.json")
    model = load_model(str(folder))
    assert model.name == "my model"
    assert model == load_model(str(folder / "config.json"))
    assert count_parameters(model) == count_parameters(load_model("llama3-70b"))
    other = tmp_path / "other.json"
    shutil.copy(EXAMPLE, other)
    assert load_model(str(other)).name == "other"


def test_a_toml_file_of_ones_own_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nnum_layers = 2\nhidden_size = 8\nvocab_size = 16\nnum_heads = 2\nffn_size = 32\n')
    assert load_model(str(path)).name == "mine"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("num_layers = true", ["num_layers", "bool"]),
        ("num_layers = 1e30", ["num_layers", "float"]),
        ('num_layers = "two"', ["num_layers", "'two'"]),
        ("num_layers = -2", ["num_layers", "-2"]),
        ("num_layers = 2\nrope_base = nan", ["rope_base", "nan"]),
        ("num_layers = 2\nnum_kv_heads = 3", ["num_kv_heads", "3"]),
        ("num_layers = 2\nlayers = 3", ["'layers'", "num_layers?"]),
        ("", ["num_layers"]),
        ("num_layers = ", ["not valid TOML"]),
    ],
)
def test_a_wrong_toml_file_is_refused_in_one_line_with_its_path(tmp_path: Path, line: str, parts: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nhidden_size = 8\nvocab_size = 16\nnum_heads = 4\nffn_size = 32\n{line}\n')
    with pytest.raises(InputError) as caught:
        load_model(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_wrong_hugging_face_file_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(EXAMPLE.read_text()), "num_hidden_layers": "80"}))
    with pytest.raises(InputError, match=r"config\.json: num_hidden_layers must be a whole number .* got '80'$"):
        load_model(str(tmp_path))


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder without config"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("text", ["lama3-70b", "llama3_70"])
def test_an_unknown_name_gets_the_closest_ones(text: str) -> None:
    with pytest.raises(InputError, match=r"did you mean .*llama3-70b"):
        load_model(text)


@pytest.mark.parametrize("text", ["", "!!!", "x" * 5000, "a\0b", "missing.toml", "missing/config.json"])
def test_no_name_ends_in_anything_but_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("DeepSeekV3 (w/o MTP)", "deepseek-v3"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("llama3_1_70b", "llama3.1-70b"),
        ("Mistral 7B", "mistral-7b"),
        ("/hub/models--Qwen--Qwen2.5-72B-Instruct/snapshots/5d8e171e5ee60e8c", "qwen2.5-72b"),
        ("~/.cache/huggingface/hub/models--meta-llama--Llama-3.1-8B", "llama3.1-8b"),
        ("/hub/models--nobody--nothing/snapshots/5d8e171e", None),
        ("no such model", None),
        ("", None),
        ("(w/ MTP)", None),
    ],
)
def test_names_are_compared_without_case_separators_publishers_and_tuning(name: str, preset: str | None) -> None:
    found = find_preset(name)
    assert (found.name if found else None) == preset


def test_the_first_known_name_counts() -> None:
    found = find_preset("none", "llama3-8b", "llama3-70b")
    assert found is not None
    assert found.name == "llama3-8b"


def test_every_preset_is_found_under_all_its_names_in_other_spellings() -> None:
    for preset in preset_models():
        for name in (preset, *load_model(preset).aliases):
            for spelling in (name, name.upper(), name.replace("-", " "), name.replace("-", ""), f"{name}-Instruct"):
                found = find_preset(spelling)
                assert found is not None, spelling
                assert found.name == preset, spelling
