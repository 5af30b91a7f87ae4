"""Is the YAML of LLaMA-Factory read as it starts, with what is not understood, and a plan read back as written?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.launch_files import read_launch
from autoplan.frameworks.llama_factory.read import read, recognises
from autoplan.launch.targets import exported
from autoplan.readers.model import load_model
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.lengths import Lengths
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.preference import Preference
from read_back import check_adapters, matters

LORA = """### model
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
dataset: identity
cutoff_len: 4096
packing: true
output_dir: saves/x
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
"""


def of(*changes: tuple[str, str], more: str = "", devices: int = 8) -> Launch:
    text = LORA
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return read(text + more, LaunchContext(num_devices=devices))


def test_a_configuration_is_read() -> None:
    launch = of()
    assert recognises("lora.yaml", LORA)
    assert (launch.target, launch.framework, launch.model.name) == ("llama-factory", "transformers", "qwen3-8b")
    tuning = launch.training.finetuning
    assert tuning is not None
    assert (tuning.rank, tuning.targets, tuning.quantization) == (16, ("all-linear",), "none")
    plan = launch.plan
    assert (plan.micro_batch, plan.global_batch, plan.dp, plan.sharding) == (2, 2 * 8 * 8, 8, "none")
    # It recomputes unless it is told not to.
    assert (plan.recompute, launch.training.seq_len) == ("full", 4096)
    assert matters(launch) == {"fsdp"}


def test_recomputation_is_its_own_switch() -> None:
    assert of(more="disable_gradient_checkpointing: true\n").plan.recompute == "none"
    # model/model_utils/checkpointing.py does not look at the Trainer's.
    assert of(more="gradient_checkpointing: false\n").plan.recompute == "full"


def test_full_training_quantisation_optimizer_and_sharding() -> None:
    assert of(("finetuning_type: lora", "finetuning_type: full")).training.finetuning is None
    quantised = of(more="quantization_bit: 4\n").training.finetuning
    assert quantised is not None
    assert quantised.quantization == "nf4-dq"
    assert of(more="optim: paged_adamw_8bit\n").training.optimizer == "adam8bit-bnb"
    assert of(more="use_muon: true\n").training.optimizer == "muon"
    assert of(more="fsdp: [full_shard, auto_wrap]\n").plan.sharding == "zero3"


def test_deepspeed_is_read_from_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "examples" / "deepspeed"
    folder.mkdir(parents=True)
    (folder / "z2.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    place = tmp_path / "examples" / "train_full"
    place.mkdir()
    (place / "full.yaml").write_text(f"{LORA}deepspeed: examples/deepspeed/z2.json\n")
    launch = read_launch(place / "full.yaml", LaunchContext(num_devices=16))
    assert (launch.framework, launch.plan.sharding, launch.plan.dp) == ("deepspeed-hf", "zero2", 16)
    assert (launch.plan.recompute, launch.plan.global_batch) == ("full", 2 * 8 * 16)
    assert launch.training.finetuning is not None


@pytest.mark.parametrize(
    ("change", "types"),
    [
        (("bf16: true", "pure_bf16: true"), ("fp32", True)),  # PEFT makes fp32 of adapters, and nothing casts them
        (("bf16: true", "bf16: true\npure_bf16: true"), ("fp32", False)),
        (("finetuning_type: lora", "finetuning_type: full\npure_bf16: true"), ("bf16", False)),
        (("finetuning_type: lora", "finetuning_type: full"), ("fp32", False)),
    ],
)
def test_weights_are_held_as_it_is_told(change: tuple[str, str], types: tuple[str, bool]) -> None:
    plan = of(change).plan
    assert (plan.main_weights, plan.wide_adapters) == types


def test_what_is_not_priced_is_listed_or_refused() -> None:
    launch = of(more="use_galore: true\ngalore_rank: 128\nenable_liger_kernel: true\nmixture_of_depths: convert\n")
    assert {"use_galore", "galore_rank", "enable_liger_kernel", "mixture_of_depths"} <= matters(launch)
    assert "cutoff_len" in matters(of(("packing: true\n", "")))
    assert not {"pissa_init", "val_size"} & matters(of(more="pissa_init: true\nval_size: 0.1\n"))
    for old, new, says in (
        ("stage: sft", "stage: kto", "stage 'kto'"),
        ("finetuning_type: lora", "finetuning_type: oft", "finetuning_type 'oft'"),
        ("bf16: true", "tensor_model_parallel_size: 2", "Megatron-Core"),
        ("bf16: true", "seed: 1", "neither bf16 nor fp16"),
        # More digits than Python prints.
        ("gradient_accumulation_steps: 8", f"gradient_accumulation_steps: 0x{'f' * 4000}", "a number of 4,002 digits"),
        ("Qwen/Qwen3-8B", "my/own", "--model"),
    ):
        with pytest.raises(InputError, match=says):
            of((old, new))


def test_weights_that_are_quantised_before_training_are_listed() -> None:
    text = LORA.replace("Qwen/Qwen3-8B", "some/Qwen3-8B-AWQ")
    launch = read(text, LaunchContext(num_devices=8, model=load_model("qwen3-8b")))
    assert "model_name_or_path" in matters(launch)


def test_words_of_the_command_are_read() -> None:
    text = """#!/bin/bash
CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train \\
    --model_name_or_path Qwen/Qwen3-4B-Instruct-2507 --stage sft --finetuning_type lora --lora_rank 8 \\
    --lora_target all --cutoff_len 2048 --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --bf16
"""
    assert recognises("train.sh", text)
    launch = read(text, LaunchContext())
    assert (launch.model.name, launch.plan.dp, launch.plan.global_batch) == ("qwen3-4b", 4, 32)


def test_the_file_of_a_command_is_read_with_the_words_behind_it(tmp_path: Path) -> None:
    (tmp_path / "lora.yaml").write_text(LORA)
    script = "CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli {} {}.yaml per_device_train_batch_size=3\n"
    assert recognises("train.sh", script.format("train", "lora"))
    launch = read(script.format("train", "lora"), LaunchContext(folder=tmp_path))
    assert (launch.plan.micro_batch, launch.plan.num_devices) == (3, 2)
    assert launch.training == of(devices=2).training
    assert not recognises("export.sh", script.format("export", "lora"))
    with pytest.raises(InputError, match=r"missing\.yaml', which is not at hand"):
        read(script.format("train", "missing"), LaunchContext(folder=tmp_path))


def test_adapters_on_all_matrices_of_experts_are_listed() -> None:
    """PEFT finds linear modules; the experts of gpt-oss are plain parameters."""
    assert "adapters" in matters(of(("Qwen/Qwen3-8B", "openai/gpt-oss-20b")))
    assert "adapters" not in matters(of())


def test_packing_is_what_the_file_says_of_it() -> None:
    assert "cutoff_len" in matters(of(("stage: sft", "stage: pt"), more="packing: false\n"))
    neat = matters(of(more="neat_packing: true\n"))
    assert "cutoff_len" not in neat


EXPORTED = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 4096, "framework": "transformers"}
FOUR_BITS = ("qlora:r=64,dropout=0.05", "lora:r=8,quantize=nf4,train=lm_head")


def test_fsdp2_recomputes_without_reentry() -> None:
    plan = {"micro_batch": 1, "sharding": "zero3", "recompute": "full"}
    file = autoplan.estimate("llama3-8b", **EXPORTED, plan=plan).file
    text = next(item.text for item in exported(file, "llama-factory", "torchrun") if item.name == "llama_factory.yaml")
    assert "use_reentrant_gc: false" in text
    assert matters(read_back(file)) == set()


def test_parameters_on_the_host_are_a_word_that_all_versions_of_the_trainer_know() -> None:
    file = autoplan.estimate(
        "llama3-8b", **EXPORTED, plan={"micro_batch": 1, "sharding": "zero3", "offload": "parameters"}
    ).file
    written = next(item.text for item in exported(file, "llama-factory", "torchrun") if item.name.endswith(".yaml"))
    assert "fsdp: full_shard auto_wrap offload\n" in written
    assert "offload_params" not in written
    assert read_back(file).plan.offload == "parameters"


def read_back(file: PlanFile) -> Launch:
    files = {written.name: written.text for written in exported(file, "llama-factory", "torchrun")}
    return read(files["llama_factory.yaml"], LaunchContext(num_devices=file.best.plan.num_devices))


@pytest.mark.parametrize(
    ("tuning", "sharding"),
    [
        *((tuning, sharding) for tuning in (*FOUR_BITS, "dora:r=16") for sharding in ("none", "zero2", "zero3")),
        ("lora:r=8,quantize=int8", "none"),
    ],
)
def test_adapters_are_read_back_with_the_price_of_the_plan(tuning: str, sharding: str) -> None:
    check_adapters(read_back, EXPORTED, tuning, sharding)


@pytest.mark.parametrize(
    "about",
    [
        {"loss": "dpo"},
        {"loss": "dpo", "finetune": "lora"},
        {"loss": "reward"},
        {"lengths": "512:3,2048:1", "batching": "joined"},
        {"optimizer": "lion"},
        {"attention": "unfused"},
        {"precision": "fp16"},
    ],
    ids=str,
)
def test_training_is_read_back(about: dict[str, str]) -> None:
    file = autoplan.estimate("llama3-8b", **EXPORTED, plan={"micro_batch": 1, "sharding": "zero3"}, **about).file
    # Pairs are not packed, nor are samples where attention cannot skip others.
    batching = "padded" if {"loss", "attention"} & about.keys() else file.training.batching
    assert read_back(file).training == replace(file.training, lengths=None, batching=batching)


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"finetuning": FineTuning(rank=8, quantization="int8")}, "zero3 of weights in int8"),
        ({"finetuning": FineTuning(frozen=("embed_tokens",))}, "embed_tokens"),
        ({"fused_norm": True}, "fused_norm"),
        ({"lengths": Lengths(histogram=((512, 3),)), "batching": "full"}, "batching full"),
        ({"preference": Preference(reference="none")}, "plan with reference copy"),
    ],
)
def test_what_its_yaml_cannot_express_is_refused(training: dict[str, Any], says: str) -> None:
    file = autoplan.estimate("llama3-8b", **EXPORTED, plan={"micro_batch": 1, "sharding": "zero3"}).file
    with pytest.raises(InputError, match=says):
        exported(replace(file, training=replace(file.training, **training)), "llama-factory", "torchrun")


def test_a_number_of_thousands_of_digits_is_no_switch() -> None:
    """Found by benchmarks/fuzz.py: Python does not print such a number."""
    with pytest.raises(InputError, match="a number of 5,002 digits"):
        of(more=f"disable_gradient_checkpointing: 0x{'f' * 5000}\n")


def test_a_configuration_in_json_is_recognised() -> None:
    table = {"model_name_or_path": "Qwen/Qwen2.5-7B", "finetuning_type": "lora", "cutoff_len": 512, "bf16": True}
    text = json.dumps(table | {"per_device_train_batch_size": 1, "stage": "sft"})
    assert recognises("train.json", text)
    launch = read(text, LaunchContext(num_devices=8))
    assert launch.training.has_adapters
    assert launch.training.seq_len == 512
