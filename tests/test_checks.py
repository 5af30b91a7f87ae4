"""What is checked of launches in every format, above all conditions: they matter where the launch depends on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.api.launch_files import make_context
from autoplan.frameworks.common.launch import Unread
from autoplan.frameworks.launch_files import read_launch

TRAINING = """
torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $TP --num-layers 4 --hidden-size 1024 \
  --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --bf16 \
  --global-batch-size 8 --vocab-size 32000 --data-path $DATA $EXTRA
"""


def conditions(folder: Path, text: str) -> dict[str, Unread]:
    """Return what is listed of the conditions of a script."""
    path = folder / "train.sh"
    path.write_text(f"TP=2 DATA=a\n{text}{TRAINING}")
    launch = read_launch(path, make_context())
    return {item.option: item for item in launch.unread if "running shell" in item.why}


def test_a_branch_that_changes_the_plan_matters(tmp_path: Path) -> None:
    item = conditions(tmp_path, "if [ -f /etc/large ]; then TP=4; fi\n")["if [ -f /etc/large ]"]
    assert item.matters
    assert "if it holds: tp 4" in item.why


def test_a_branch_that_changes_nothing_priced_does_not_matter(tmp_path: Path) -> None:
    item = conditions(tmp_path, "if [ -f /etc/data ]; then DATA=b; else DATA=c; fi\n")["if [ -f /etc/data ]"]
    assert not item.matters
    assert "the same either way" in item.why


@pytest.mark.parametrize(
    ("script", "condition", "difference"),
    [
        (
            "if [ -d /data ]; then DATA=b; else EXTRA='--recompute-granularity selective'; fi\n",
            "if [ -d /data ]",
            "if it does not hold: recompute 'selective'",
        ),
        ("[[ -d /data ]] && TP=4\n", "[[ -d /data ]] &&", "does not hold: tp 2"),
        ("if [ -f /x ]; then EXTRA=--some-option-of-a-fork; fi\n", "if [ -f /x ]", "--some-option-of-a-fork, not read"),
    ],
)
def test_what_an_undecided_condition_changes_is_listed(
    tmp_path: Path, script: str, condition: str, difference: str
) -> None:
    item = conditions(tmp_path, script)[condition]
    assert item.matters
    assert difference in item.why


def test_every_named_case_of_an_unknown_word_is_tried(tmp_path: Path) -> None:
    found = conditions(tmp_path, "case $SIZE in tiny) DATA=c;; small|middle) TP=1;; large) TP=4;; *) DATA=b;; esac\n")
    assert [item.matters for item in found.values()] == [True, True, False]
    assert "tp 1" in found["case $SIZE in small|middle)"].why
    assert "tp 4" in found["case $SIZE in large)"].why
    assert "the same either way" in found["case $SIZE in tiny)"].why


def test_a_batch_of_no_whole_number_of_micro_batches_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"TP=1 DATA=a\n{TRAINING.replace('--global-batch-size 8', '--global-batch-size 4')}")
    (item,) = (item for item in read_launch(path, make_context()).unread if item.option == "global batch")
    assert item.matters
    assert "micro-batches of 1 on 8 replicas" in item.why


def test_a_script_that_starts_other_runs_too_says_that_the_last_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"DATA=a\nTP=1\n{TRAINING}TP=2\n{TRAINING}")
    launch = read_launch(path, make_context())
    assert launch.plan.tp == 2
    assert any(item.option == "2 commands" and item.matters for item in launch.unread)


def test_a_command_that_is_repeated_is_one_run(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"DATA=a TP=1\n{TRAINING}{TRAINING}")
    assert not any("commands" in item.option for item in read_launch(path, make_context()).unread)


TABLE = """
model_name_or_path: {model}
per_device_train_batch_size: 1
max_length: 2048
bf16: true
gradient_checkpointing: true
{more}
"""


def remarks_on_model(folder: Path, name: str, more: str = "", model: str | None = None) -> dict[str, str]:
    """Return what matters of a table of the Trainer and tells of an encoder or of the checkpoint."""
    path = folder / "sft.yaml"
    path.write_text(TABLE.format(model=name, more=more))
    launch = read_launch(path, make_context(model, devices=8))
    return {item.option: item.why for item in launch.unread if item.matters and "priced" in item.why}


def of_encoders(reasons: dict[str, str]) -> list[str]:
    """Return the options that tell of an encoder which is not priced."""
    return [option for option, why in reasons.items() if "whose encoder is not in the model" in why]


def test_a_checkpoint_with_an_encoder_that_its_preset_leaves_out_is_listed(tmp_path: Path) -> None:
    assert "the encoder of images of this checkpoint" in remarks_on_model(tmp_path, "google/gemma-3-4b-it")["model"]
    assert "model" not in remarks_on_model(tmp_path, "google/gemma-3-1b-it")


def test_a_model_of_images_priced_as_one_of_text_is_listed(tmp_path: Path) -> None:
    found = remarks_on_model(tmp_path, "Qwen/Qwen2.5-VL-3B-Instruct", model="qwen2.5-3b")
    assert "whose encoder is not in the model" in found["model_name_or_path"]
    found = remarks_on_model(tmp_path, "meta-llama/Llama-3.1-8B", "freeze_vision_tower: false")
    assert "whose encoder is not in the model" in found["freeze_vision_tower"]
    assert "model_name_or_path" not in remarks_on_model(tmp_path, "meta-llama/Llama-3.1-8B", "use_vision: false")


@pytest.mark.parametrize(
    "more",
    [
        "dataset_name: HuggingFaceM4/the_video_set",
        "processor: {_target_: transformers.AutoProcessor}",
        "model_revision: internvl3-8b",
        "fsdp_transformer_layer_cls_to_wrap: Qwen2VLDecoderLayer",
    ],
)
def test_images_in_options_that_cost_nothing_are_listed(tmp_path: Path, more: str) -> None:
    assert of_encoders(remarks_on_model(tmp_path, "meta-llama/Llama-3.1-8B", more))


@pytest.mark.parametrize(
    "more",
    ["output_dir: /data/vision/out", "chat_template: \"{% if item['type'] == 'image' %}\"", "run_name: llava-7b"],
)
def test_names_of_runs_and_templates_tell_of_no_images(tmp_path: Path, more: str) -> None:
    assert not of_encoders(remarks_on_model(tmp_path, "google/gemma-3-1b-it", more))
    assert not of_encoders(remarks_on_model(tmp_path, "/data/gemma-3-1b-tuned/checkpoint-9", more, model="gemma3-1b"))


def test_a_variable_of_an_images_loader_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"DATA=a TP=1\nexport MAX_PIXELS=1003520\n{TRAINING}")
    (item,) = (item for item in read_launch(path, make_context()).unread if item.option == "MAX_PIXELS")
    assert item.matters
    assert "whose encoder is not in the model" in item.why


def test_a_quantised_checkpoint_is_listed(tmp_path: Path) -> None:
    assert "quantised" in remarks_on_model(tmp_path, "Qwen/Qwen3-8B-FP8")["model_name_or_path"]


def test_a_program_of_the_same_name_that_is_not_megatrons_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"DATA=a TP=1\n{TRAINING}")
    (tmp_path / "pretrain_gpt.py").write_text("import os\nfrom megatron.training import pretrain\n")
    assert not any(item.option == "pretrain_gpt.py" for item in read_launch(path, make_context()).unread)
    (tmp_path / "pretrain_gpt.py").write_text("from megatron.training import pretrain\nfrom fastgpt import faster\n")
    (item,) = (item for item in read_launch(path, make_context()).unread if item.option == "pretrain_gpt.py")
    assert "imports fastgpt" in item.why
