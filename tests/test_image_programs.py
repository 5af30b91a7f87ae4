"""Do programs of transformers' models train those with images or sound, as the plan says?"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import autoplan
from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.registry import READERS
from autoplan.launch.targets import exported
from autoplan.readers.finetuning import of_axolotl
from autoplan.readers.huggingface import read_huggingface
from autoplan.spec.finetuning import BESIDE_TEXT, FineTuning, names_in, text_pattern
from autoplan.spec.lengths import Lengths
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.preference import Preference
from model_specs import QWEN_VL
from read_back import check_price, matters

PLACE: dict[str, Any] = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 2048, "framework": "transformers"}
FILES = {"hf-trainer": "launch.sh", "llama-factory": "llama_factory.yaml", "axolotl": "axolotl.yaml"}
QWEN = read_huggingface(QWEN_VL, "qwen2.5-vl-7b")
assert QWEN.encoder is not None
SOUND = replace(QWEN, name="sound", encoder=replace(QWEN.encoder, sound=True))


def priced(model: ModelSpec = QWEN, **options: Any) -> PlanFile:
    return autoplan.estimate(model, **PLACE, plan={"micro_batch": 1, "sharding": "zero3"}, **options).file


def written(file: PlanFile, target: str) -> str:
    return next(item.text for item in exported(file, target, "torchrun") if item.name == FILES[target])


def read_back(file: PlanFile, target: str) -> Launch:
    context = LaunchContext(model=file.model, num_devices=file.best.plan.num_devices, variables=(("BASE_MODEL", "x"),))
    return READERS[target].read(written(file, target), context)


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize("tuning", [None, "lora:r=16,targets=q_proj+v_proj"])
def test_training_with_images_is_read_back_with_the_price_of_the_plan(target: str, tuning: str | None) -> None:
    file = priced(**({"finetune": tuning} if tuning else {}))
    launch = read_back(file, target)
    assert not {"skip_prepare_dataset", "lora_target_modules", "lora_target", "finetuning_type"} & matters(launch)
    check_price(replace(file, training=replace(file.training, batching=launch.training.batching)), launch, PLACE)
    assert launch.training.batching == "padded"


def test_llama_factory_freezes_what_stands_before_the_text_model_by_default() -> None:
    frozen = priced(finetune="full:freeze=encoder")
    assert "freeze_vision_tower: true" in written(frozen, "llama-factory")
    assert read_back(frozen, "llama-factory").training.finetuning == FineTuning(frozen=("encoder",))
    text = re.sub("freeze_.*\n", "", written(priced(), "llama-factory"))
    by_default = READERS["llama-factory"].read(text, LaunchContext(model=QWEN, num_devices=8))
    assert by_default.training.finetuning == FineTuning(frozen=("encoder",))
    context = LaunchContext(model=QWEN, num_devices=8)
    with pytest.raises(InputError, match="freeze_language_model"):
        READERS["llama-factory"].read(text + "freeze_language_model: true\n", context)


def test_adapters_of_the_programs_are_in_the_text_model_alone() -> None:
    pattern = text_pattern(("q_proj", "v_proj"))
    assert re.fullmatch(pattern, "model.language_model.layers.0.self_attn.q_proj")
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layers.0.self_attn.q_proj")
    assert not re.fullmatch(pattern, "model.language_model.layers.0.self_attn.k_proj")
    assert names_in(pattern) == ("q_proj", "v_proj")
    assert names_in(BESIDE_TEXT) == names_in("q_proj,v_proj") == ()


def test_the_pattern_of_axolotls_examples_is_read() -> None:
    """The pattern of examples/qwen2_5-vl/lora-7b.yaml (067b021)."""
    pattern = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"
    tuning = of_axolotl({"adapter": "lora", "lora_r": 32, "lora_target_modules": pattern}, "lora-7b.yaml")
    assert tuning.targets == tuple(f"{name}_proj" for name in ("up", "down", "gate", "q", "k", "v", "o"))


@pytest.mark.parametrize(
    ("target", "model", "training", "says"),
    [
        (
            "hf-trainer",
            QWEN,
            {"finetuning": FineTuning(rank=8, targets=("all-linear",))},
            "all-linear of the text model",
        ),
        ("axolotl", QWEN, {"finetuning": FineTuning(rank=8, targets=("all-linear",))}, "all-linear of the text model"),
        ("axolotl", QWEN, {"preference": Preference(reference="copy")}, "preferences of samples with images"),
        ("hf-trainer", QWEN, {"preference": Preference(loss="reward")}, "a reward model of images"),
        ("hf-trainer", QWEN, {"preference": Preference(reference="none")}, "reference none"),
        ("hf-trainer", QWEN, {"lengths": Lengths(histogram=((512, 3),)), "batching": "packed"}, "plan with padded"),
        ("llama-factory", QWEN, {"document_len": 256}, "plan with padded"),
        ("llama-factory", SOUND, {"preference": Preference(reference="copy")}, "preferences on sound"),
        ("hf-trainer", SOUND, {}, "an encoder of sound"),
        ("axolotl", SOUND, {}, "an encoder of sound"),
    ],
)
def test_what_a_program_does_not_train_with_images_or_sound_is_refused(
    target: str, model: ModelSpec, training: dict[str, Any], says: str
) -> None:
    file = priced(model)
    with pytest.raises(InputError, match=says):
        exported(replace(file, training=replace(file.training, **training)), target, "torchrun")


def test_sound_is_trained_with_llama_factory() -> None:
    assert "dataset: mllm_audio_demo" in written(priced(SOUND), "llama-factory")
