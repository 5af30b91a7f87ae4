"""Encoders of images in front of text models: their parameters and operations, and what plans cost with them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_operations import image_excess

import autoplan
from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.kernels.arithmetic import (
    count_parameters,
    count_trained_parameters,
    encoder_parameters,
    model_flops_per_token,
)
from autoplan.frameworks.common.rules import check_legal
from autoplan.frameworks.common.universal_rules import RULES
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.blocks import Block
from autoplan.spec.finetuning import BESIDE_TEXT, FineTuning
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec
from model_specs import QWEN_VL

PLACE: dict[str, Any] = {"cluster": "h100-sxm:1x8", "seq_len": 4096}


@pytest.fixture(scope="module")
def qwen() -> ModelSpec:
    """Qwen2.5-VL-7B."""
    return read_huggingface(QWEN_VL, "qwen2.5-vl-7b")


def test_a_published_config_has_the_parameters_of_its_checkpoint(qwen: ModelSpec) -> None:
    assert count_parameters(qwen) == 8_292_166_656  # model.safetensors.index.json: 16,584,333,312 bytes of bf16
    assert encoder_parameters(qwen) == 676_550_144
    assert qwen.left_out == ""


def test_layers_that_look_at_squares_of_patches_work_less(qwen: ModelSpec) -> None:
    """28 of the 32 layers of Qwen2.5-VL look at 8 x 8 patches of the 5,120 of an image, four at all."""
    assert qwen.encoder is not None
    layers = qwen.encoder.layers
    everywhere = replace(qwen, encoder=replace(qwen.encoder, layers=replace(layers, window=None)))
    assert [layer[0] for layer in layers.layers].count(Block.ATTENTION) == 4
    saved = model_flops_per_token(everywhere, 4096) - model_flops_per_token(qwen, 4096)
    assert saved * 4096 == pytest.approx(3 * 28 * 5120 * (5120 - 64) * 2 * 16 * (80 + 80))
    plan = ParallelPlan(global_batch=16, micro_batch=1, dp_shard=8, sharding="zero3")
    assert _priced(qwen, plan)[0] < _priced(everywhere, plan)[0]


def test_an_encoder_whose_sizes_are_not_in_the_file_is_left_out() -> None:
    table = {**QWEN_VL, "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280}}
    model = read_huggingface(table, "part")
    assert model.encoder is None
    assert model.left_out == "vision_config"
    priced = autoplan.estimate(model, cluster="h100-sxm:1x8", global_batch=8, seq_len=4096, plan={"sharding": "zero3"})
    assert priced.warnings[0] == "part is priced without the vision_config in its config.json"


def test_a_class_of_the_text_model_alone_has_no_encoder(qwen: ModelSpec) -> None:
    model = read_huggingface({**QWEN_VL, "architectures": ["Qwen2_5_VLForCausalLM"]}, "text")
    assert count_parameters(model) == count_parameters(qwen) - encoder_parameters(qwen)
    assert model.left_out == ""


KINDS = (
    *("llava", "llava_next", "llava_onevision", "gemma3", "paligemma", "internvl", "mistral3"),
    *("idefics3", "smolvlm", "llava_next_video", "lighton_ocr", "cosmos3_omni", "cohere2_vision"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("vipllava", "shieldgemma2", "deepseek_vl", "hyperclovax_vision_v2", "exaone4_5", "glm4v", "glm46v", "glmga"),
    *("glm4v_moe", "llama4", "paddleocr_vl", "cosmos3_edge", "qianfan_ocr", "glm_ocr", "lfm2_vl", "kimi_k25"),
    *("aria", "blip-2", "ernie4_5_vl_moe", "fuyu", "git", "got_ocr2", "granite_docling", "idefics2", "instructblip"),
    *("instructblipvideo", "kosmos-2", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "muse_glimmer"),
    *("nemotron_h_omni", "ovis2", "pp_chart2table", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "step3p7"),
    *("video_llama_3", "video_llava", "mllama", "kosmos-2.5", "blip", "idefics"),
    *("janus", "deepseek_vl_hybrid", "unlimited_ocr", "mistral_large4", "lfm3_vl", "dots3_note", "apertus1p5"),
)
# Whose tokenizers are held and not priced.
UNPRICED = {"apertus1p5": "work of vision_config and audio_config", "vibevoice_asr": "work of the tokenizers"}


_LISTS = ("layer_types", "layers_block_type", "cross_attention_layers")  # of layers by number


def _short(transformers: Any, kind: str) -> Any:
    """Return the default configuration of a type, with two layers of text where these are alike."""
    config = transformers.AutoConfig.for_model(kind)
    text = config.get_text_config()
    if not any(isinstance(getattr(text, name, None), list) for name in _LISTS):
        text.num_hidden_layers = 2
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_transformers(kind: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = _short(transformers, kind)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), kind)
    assert count_parameters(spec) == sum(parameter.numel() for parameter in model.parameters())
    assert spec.left_out == UNPRICED.get(kind, "")


def test_tokenizers_of_other_sizes_are_left_out() -> None:
    transformers = pytest.importorskip("transformers")
    table = json.loads(json.dumps(transformers.AutoConfig.for_model("apertus1p5").to_dict(), default=str))
    whole = read_huggingface(table, "apertus")
    table["vision_config"]["channel_multiplier"] = [1, 2, 4]
    text = read_huggingface(table, "apertus")
    assert text.left_out == "vision_config and audio_config"
    assert count_parameters(text) == 8_091_086_912 < count_parameters(whole)


def test_a_file_without_the_sizes_of_a_q_former_has_those_of_its_class() -> None:
    transformers = pytest.importorskip("transformers")
    table = json.loads(json.dumps(transformers.AutoConfig.for_model("blip-2").to_dict(), default=str))
    bare = {"vision_config": {"model_type": "blip_2_vision_model"}, "qformer_config": {"model_type": "blip_2_qformer"}}
    assert read_huggingface(table | bare, "bare") == read_huggingface(table, "bare")


def test_an_encoder_of_gemma_4_has_the_parameters_of_transformers() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model("gemma4", vision_config={"num_hidden_layers": 2})
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), "gemma4")
    assert count_parameters(spec) == sum(parameter.numel() for parameter in model.parameters())
    assert not spec.left_out


HEARING = (
    "qwen2_audio",
    "voxtral",
    "audioflamingo3",
    "musicflamingo",
    "glmasr",
    "moss_transcribe_diarize",
    "qwen3_asr",
    "omniasr",
    "nemo_speechlm",
    "vibevoice_asr",
)
# Positions of 30 s of sound, of other encoders than Whisper's.
POSITIONS = {"qwen3_asr": 390, "nemo_speechlm": 375, "vibevoice_asr": 0}


@pytest.mark.parametrize("kind", HEARING)
def test_parameters_of_models_with_sound_are_those_of_transformers(kind: str) -> None:
    """But for biases of keys, which Whisper's layers have none of."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = _short(transformers, kind)
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), kind)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(spec) == pytest.approx(expected, rel=5e-5)
    assert spec.left_out == UNPRICED.get(kind, "")
    assert (spec.encoder.patches if spec.encoder else 0) == POSITIONS.get(kind, 1500)


def test_operations_are_those_that_torch_counts() -> None:
    """A small LLaVA on one image of 17 x 17 patches and 27 tokens of text."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, image_size=238, patch_size=14
    )
    text = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=511,
        image_seq_length=289,
        vision_feature_layer=-1,  # before the last layer, its default, that one has no backward pass
        attn_implementation="eager",
    )
    model = transformers.LlavaForConditionalGeneration(config)
    tokens = torch.tensor([[511] * 289 + list(range(27))])
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=tokens, pixel_values=torch.randn(1, 3, 238, 238), labels=tokens).loss
        loss.backward()
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), "small")
    # Eager attention computes both halves of the causal square.
    causal = 3 * 2 * (316 / 2) * 2 * 128 * 2
    ours = 316 * (model_flops_per_token(spec, 316) + causal)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    "kind",
    ["qwen2_vl", "paddleocr_vl", "internvl", "got_ocr2", "minicpmv4_6", "minicpm_ocr", "cohere2_vision", "kosmos-2.5"],
)
def test_operations_of_encoding_an_image_are_those_that_torch_counts(kind: str) -> None:
    """A grid of 24 x 24 patches, or an image of the config's size."""
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoModelForImageTextToText
    excess = image_excess(kind, lambda config: auto.from_config(config, attn_implementation="eager").eval())
    assert excess == pytest.approx(0.0, abs=0.005)


def test_what_is_exported_puts_adapters_into_the_text_model_alone() -> None:
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    config = _short(transformers, "llava")
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
        lora = peft.LoraConfig(r=8, target_modules="all-linear", exclude_modules=BESIDE_TEXT)
        model = peft.get_peft_model(model, lora)
    spec = read_huggingface(json.loads(json.dumps(config.to_dict(), default=str)), "llava")
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert count_trained_parameters(spec, FineTuning(rank=8, targets=("all-linear",))) == trained


def _priced(model: ModelSpec, plan: ParallelPlan, **options: Any) -> tuple[float, float]:
    problem = make_problem(model, cluster="h100-sxm:1x8", seq_len=4096, framework="transformers", **options)
    result = estimate(problem, PlanBatch.of([plan], model.num_layers))
    return float(result.step_s[0]), float(result.memory_bytes[0])


def test_a_frozen_encoder_costs_less_and_none_least(qwen: ModelSpec) -> None:
    plan = ParallelPlan(global_batch=16, micro_batch=1, dp_shard=8, sharding="zero3")
    trained = _priced(qwen, plan)
    frozen = _priced(qwen, plan, finetune=FineTuning(frozen=("vision_tower",)))
    none = _priced(replace(qwen, encoder=None), plan)
    assert trained[0] > frozen[0] > none[0]
    assert trained[1] > frozen[1] > none[1]
    # A third of its work is left, beside the text model's: its backward pass takes twice its forward pass or so.
    assert 0.2 < (frozen[0] - none[0]) / (trained[0] - none[0]) < 0.45


def test_images_cost_what_they_are(qwen: ModelSpec) -> None:
    plan = ParallelPlan(global_batch=16, micro_batch=1, dp_shard=8, sharding="zero3")
    none, single, three = (
        _priced(replace(qwen, encoder=None), plan),
        _priced(qwen, plan, images=1),
        _priced(qwen, plan, images=3),
    )
    assert three[0] > single[0] > none[0]
    assert three[1] > single[1] > none[1]


def test_the_encoder_stands_on_the_first_stage(qwen: ModelSpec) -> None:
    plan = ParallelPlan(global_batch=16, micro_batch=1, pp=4, dp_shard=2)
    with_encoder, without = (
        stage_costs(make_problem(model, cluster="h100-sxm:1x8", seq_len=4096), plan)
        for model in (qwen, replace(qwen, encoder=None))
    )
    assert with_encoder[0].forward_s > without[0].forward_s
    assert with_encoder[0].memory_bytes > without[0].memory_bytes
    assert [stage.forward_s for stage in with_encoder[1:]] == [stage.forward_s for stage in without[1:]]


def test_samples_of_different_lengths_have_their_images_each(qwen: ModelSpec) -> None:
    """A sample is a sequence: its image takes as long whatever its length, and ranks wait for longer texts alone."""
    plan = {"micro_batch": 1, "sharding": "zero3"}
    given = {"framework": "transformers", **PLACE, "plan": plan, "global_batch": 16}
    alike, same, uneven = (
        autoplan.estimate(model, **given, **options).file.best
        for model, options in (
            (qwen, {}),
            (qwen, {"lengths": "4k:1", "batching": "padded"}),
            (qwen, {"lengths": "2k:3,4k:1", "batching": "padded"}),
        )
    )
    assert same.step_s == pytest.approx(alike.step_s, rel=1e-6)
    assert uneven.step_s < same.step_s
    text_alone = replace(qwen, encoder=None)
    waits, waits_alone = (
        autoplan.estimate(model, **given, lengths="2k:3,4k:1", batching="padded").file.best.terms_s["uneven_lengths"]
        for model in (qwen, text_alone)
    )
    assert 0 < waits == pytest.approx(waits_alone, rel=0.01)


def test_lengths_of_texts_have_the_tokens_of_their_images_beside_them(qwen: ModelSpec, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "a" * 396}) + "\n" + json.dumps({"num_tokens": 900}) + "\n")
    problem = make_problem(qwen, **PLACE, lengths=str(data), batching="padded", image_tokens=500, images=2)
    assert problem.training.lengths is not None
    assert problem.training.lengths.histogram == ((900, 1), (1103, 1))
    assert problem.training.lengths.source == "data.jsonl, 4 bytes a token beside 1,000 of images"


def test_lengths_of_an_encoder_decoder_are_those_of_its_decoder() -> None:
    table = {"model_type": "t5", "is_encoder_decoder": True, "d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 8}
    model = read_huggingface({**table, "num_layers": 6, "vocab_size": 32128}, "t5")
    given = {"cluster": "h100-sxm:1x8", "seq_len": 512, "lengths": "128:3,512:1", "batching": "padded"}
    with pytest.raises(InputError, match="are those of the decoder of t5: pass --encoder-len"):
        make_problem(model, **given)
    assert make_problem(model, **given, encoder_len=1024).encoder_len == 1024


def test_what_cannot_be_priced_is_refused(qwen: ModelSpec) -> None:
    with pytest.raises(InputError, match="no room for 4 x 1280 = 5120 tokens of images"):
        make_problem(qwen, cluster="h100-sxm:1x8", seq_len=4096, images=4)
    with pytest.raises(InputError, match="need a model with images"):
        make_problem("llama3-8b", cluster="h100-sxm:1x8", seq_len=4096, images=1)
    of_lengths = {"cluster": "h100-sxm:1x8", "seq_len": 4096, "lengths": "2k:3,4k:1"}
    with pytest.raises(InputError, match="one to a sequence, not packed: pass --batching padded, full or unpadded"):
        make_problem(qwen, **of_lengths)
    with pytest.raises(InputError, match="--images that differ are not priced: give one number"):
        make_problem(qwen, **of_lengths, batching="padded", images="1:1,2:1", image_tokens=100)
    with pytest.raises(InputError, match="is priced without the work of vision_config in its config"):
        make_problem(replace(qwen, encoder=None, left_out="work of vision_config"), **PLACE, images=2)
    with pytest.raises(InputError, match=r"finetuning\.saved_modules may contain"):
        FineTuning(rank=8, saved_modules=("visual",))


def test_images_are_not_cut_by_context_parallelism_nor_their_heads_by_many_ranks(qwen: ModelSpec) -> None:
    training = TrainingSpec(seq_len=4096)
    refusal = "an encoder of images with cp 2 and tp 1: only cp 1 is priced, and tp must divide the encoder's 16 heads"
    with pytest.raises(InputError, match=refusal):
        check_legal(RULES, qwen, training, ParallelPlan(global_batch=16, micro_batch=1, cp=2, dp_shard=4), "any")
