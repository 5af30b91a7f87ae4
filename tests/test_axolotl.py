"""Is the YAML of axolotl read as it starts, what is not understood listed, and what is written of a plan read back?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

import autoplan
from autoplan.base.errors import InputError, NoPlanError
from autoplan.frameworks.axolotl.read import read, recognises
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.launch.targets import exported
from autoplan.readers.model import find_preset
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.lengths import Batching, Lengths
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.preference import Preference
from read_back import check_adapters, matters

FULL: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3.1-8B",
    "sequence_len": 8192,
    "sample_packing": True,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "optimizer": "adamw_torch_fused",
    "bf16": "auto",
    "gradient_checkpointing": True,
    "datasets": [{"path": "x", "type": "alpaca"}],
}
COSTLESS = {"loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 3}
FSDP2 = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True, "offload_params": False}}


def of(devices: int = 16, **settings: Any) -> Launch:
    return read(yaml.safe_dump(FULL | settings), LaunchContext(num_devices=devices))


def test_a_configuration_is_read() -> None:
    launch = of(**FSDP2, **COSTLESS)
    assert recognises("fft.yml", yaml.safe_dump(FULL))
    assert (launch.target, launch.framework, launch.model.name) == ("axolotl", "transformers", "llama3.1-8b")
    plan = launch.plan
    assert (plan.micro_batch, plan.global_batch, plan.dp_shard, plan.sharding) == (1, 128, 16, "zero3")
    assert (plan.recompute, launch.training.seq_len, launch.training.precision) == ("full", 8192, "bf16")
    assert matters(launch) == set()
    assert ("micro_batch_size", "1") in launch.options


@pytest.mark.parametrize(
    ("devices", "mesh", "degrees"),
    [  # as utils/distributed.py, _get_parallel_config_kwargs, fills them in
        (16, {"dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2}, (2, 4, 2, 1)),
        (16, {"tensor_parallel_size": 4}, (1, 4, 4, 1)),
        (16, {"context_parallel_size": 2}, (1, 8, 1, 2)),
        (16, {"dp_shard_size": 4}, (4, 4, 1, 1)),
        (16, {"dp_replicate_size": 2}, (2, 8, 1, 1)),
        (8, {"dp_shard_size": 1}, (1, 8, 1, 1)),
    ],
)
def test_the_mesh_is_filled_in(devices: int, mesh: dict[str, int], degrees: tuple[int, ...]) -> None:
    plan = of(devices, **FSDP2, **mesh).plan
    assert (plan.dp_replicate, plan.dp_shard, plan.tp, plan.cp) == degrees
    assert plan.global_batch == 8 * plan.dp


def test_a_mesh_that_does_not_fill_the_devices_is_refused() -> None:
    with pytest.raises(InputError, match="need 12 devices, there are 16"):
        of(16, **FSDP2, tensor_parallel_size=3, dp_replicate_size=2, dp_shard_size=2)


def test_adapters_optimizer_and_length_are_read() -> None:
    launch = of(adapter="qlora", lora_r=64, lora_target_linear=True, optimizer="paged_adamw_8bit", sequence_len=2048)
    tuning = launch.training.finetuning
    assert tuning is not None
    assert (tuning.rank, tuning.targets, tuning.quantization) == (64, ("all-linear",), "nf4-dq")
    assert (launch.training.optimizer, launch.training.seq_len) == ("adam8bit-bnb", 2048)
    assert launch.plan.sharding == "none"
    assert of(optimizer="muon").training.optimizer == "muon"
    assert of(fp16=True).training.precision == "fp16"


def test_what_changes_a_step_and_is_not_priced_is_listed() -> None:
    settings = {
        "liger_rms_norm": True,
        "plugins": ["axolotl.integrations.diff_transformer.DifferentialTransformerPlugin"],
        "gradient_checkpointing": "offload",
        "qat": {"weight_dtype": "int4"},
        "torch_compile": True,
    }
    assert matters(of(**FSDP2, **settings)) == {*settings}
    assert "sequence_len" in matters(of(**FSDP2, sample_packing=False))


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({"plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]}, "cut"),
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, "none"),
        (
            {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True},
            "liger",
        ),
    ],
)
def test_losses_in_pieces_are_read_from_plugins(settings: dict[str, Any], loss: str) -> None:
    launch = of(**FSDP2, **settings)
    assert launch.plan.chunked_loss == loss
    assert matters(launch) == set()


def test_what_cannot_be_frozen_is_listed() -> None:
    assert "unfrozen_parameters" in matters(of(adapter="lora", unfrozen_parameters=["^lm_head.*"]))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rl": "kto"}, "rl 'kto' is not priced"),
        ({"expert_parallel_size": 2}, "expert_parallel_size"),
        ({"adapter": "llama-adapter"}, "adapter"),
        ({"bf16": False}, "neither bf16 nor fp16"),
        ({"deepspeed": "deepspeed_configs/zero3.json"}, "not at hand"),
        ({"micro_batch_size": -1}, "micro_batch_size"),
    ],
)
def test_what_is_not_priced_at_all_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        of(**settings)


@pytest.mark.parametrize(
    ("settings", "types"),
    [  # accelerate makes fp32 of what FSDP shards, PEFT of adapters, unless they are told otherwise
        ({}, ("bf16", False)),
        (FSDP2, ("fp32", False)),
        (FSDP2 | {"bf16": "full"}, ("bf16", False)),
        ({"adapter": "lora"}, ("fp32", False)),
        ({"adapter": "lora", "bf16": "full"}, ("fp32", True)),
        ({"adapter": "lora", "peft_autocast_adapter_dtype": False}, ("bf16", False)),
    ],
)
def test_weights_are_held_as_it_is_told(settings: dict[str, Any], types: tuple[str, bool]) -> None:
    plan = of(**settings).plan
    assert (plan.main_weights, plan.wide_adapters) == types


def test_fsdp_without_a_version_is_the_first() -> None:
    launch = of(fsdp_config={"reshard_after_forward": "SHARD_GRAD_OP"})
    assert "fsdp_config.version" in matters(launch)
    assert launch.plan.sharding == "zero2"


def test_a_batch_of_a_device_stands_for_its_accumulation() -> None:
    table = {key: value for key, value in FULL.items() if key != "gradient_accumulation_steps"}
    text = yaml.safe_dump(table | FSDP2 | {"micro_batch_size": 2, "batch_size": 8})
    plan = read(text, LaunchContext(num_devices=16)).plan
    assert (plan.num_microbatches, plan.global_batch) == (4, 128)


def test_pairs_are_padded_to_the_longest_and_rewards_to_the_whole_length() -> None:
    assert of(rl="dpo", sample_packing=False, pad_to_sequence_len=True).training.batching == "padded"
    assert of(reward_model=True, sample_packing=False).training.batching == "full"


def test_words_of_axolotl_mean_what_they_say_there() -> None:
    assert of(gradient_checkpointing="false").plan.recompute == "none"
    silent = yaml.safe_dump({key: value for key, value in (FULL | FSDP2).items() if key != "micro_batch_size"})
    assert read(silent, LaunchContext(num_devices=16)).plan.micro_batch == 1


EXPORTED = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 4096, "framework": "transformers"}
TUNINGS = ("qlora:r=64,dropout=0.05", "lora:r=8,targets=q_proj+all-linear,quantize=int8", "dora:r=16,train=lm_head")


def yaml_of(file: PlanFile) -> str:
    return next(written.text for written in exported(file, "axolotl", "torchrun") if written.name == "axolotl.yaml")


def read_back(file: PlanFile) -> Launch:
    return read(yaml_of(file), LaunchContext(num_devices=file.best.plan.num_devices))


@pytest.mark.parametrize("tuning", TUNINGS)
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_adapters_are_read_back_with_the_price_of_the_plan(tuning: str, sharding: str) -> None:
    check_adapters(read_back, EXPORTED, tuning, sharding)


@pytest.mark.parametrize(
    "about",
    [{}, {"reference": "none"}, {"finetune": "lora"}, {"loss": "reward"}, {"loss": "reward", "finetune": "qlora:r=8"}],
    ids=str,
)
def test_preferences_are_read_back(about: dict[str, str]) -> None:
    plan = {"micro_batch": 1, "sharding": "zero3"}
    file = autoplan.estimate("llama3-8b", **EXPORTED, plan=plan, **({"loss": "dpo"} | about)).file
    launch = read_back(file)
    assert launch.training == replace(file.training, batching="padded")
    assert launch.training.preference is not None


@pytest.mark.parametrize("batching", ["packed", "full", "padded"])
def test_batching_is_read_back(batching: Batching) -> None:
    lengths = Lengths(histogram=((512, 3), (2048, 1)))
    plan = {"micro_batch": 2, "sharding": "zero3"}
    file = autoplan.estimate("llama3-8b", **EXPORTED, plan=plan, lengths=lengths, batching=batching).file
    assert read_back(file).training.batching == batching


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"finetuning": FineTuning(rank=8, quantization="nf4")}, "nf4 without double"),
        ({"finetuning": FineTuning(frozen=("embed_tokens",))}, "embed_tokens"),
        ({"fused_norm": True}, "fused_norm"),
        ({"lengths": Lengths(histogram=((512, 3),)), "batching": "joined"}, "batching joined"),
        ({"finetuning": FineTuning(rank=8), "preference": Preference(reference="copy")}, "reference base"),
        ({"finetuning": FineTuning(rank=8, quantization="int8"), "preference": Preference()}, "by preferences"),
        (
            {"lengths": Lengths(histogram=((512, 3),)), "batching": "full", "preference": Preference()},
            "batching full of preferences",
        ),
    ],
)
def test_what_its_yaml_cannot_express_is_refused(training: dict[str, Any], says: str) -> None:
    file = autoplan.estimate("llama3-8b", **EXPORTED, plan={"micro_batch": 1, "sharding": "zero3"}).file
    with pytest.raises(InputError, match=says):
        exported(replace(file, training=replace(file.training, **training)), "axolotl", "torchrun")


def test_a_model_of_no_name_on_the_hub_is_asked_for() -> None:
    plan = {"micro_batch": 1, "sharding": "zero3"}
    file = autoplan.estimate("llama3-8b", **EXPORTED, plan=plan).file
    assert "BASE_MODEL:-meta-llama/Meta-Llama-3-8B}" in exported(file, "axolotl", "torchrun")[0].text
    changed = replace(file, model=replace(file.model, num_layers=30))
    assert "BASE_MODEL:?must be set" in exported(changed, "axolotl", "torchrun")[0].text
    assert yaml.safe_load(yaml_of(changed))["base_model"] is None


def test_checkpoint_and_scale_of_adapters_stay_those_of_the_file() -> None:
    named = {"base_model": "meta-llama/Meta-Llama-3-8B-Instruct", "adapter": "lora", "lora_r": 32}
    for alpha, written_alpha in ((16, 16), (None, 64)):
        launch = of(8, **named, lora_alpha=alpha)
        about = {**EXPORTED, "finetune": launch.training.finetuning}
        file = autoplan.estimate(launch.model, **about, plan={"micro_batch": 1, "recompute": "full"}).file
        settings = yaml.safe_load(yaml_of(file))
        assert (settings["base_model"], settings["lora_alpha"]) == (named["base_model"], written_alpha)
        assert find_preset(named["base_model"]) == find_preset("llama3-8b")  # a name is no other architecture


def test_cut_cross_entropy_goes_with_tensor_parallelism_and_ligers_does_not() -> None:
    plan = {"tp": 2, "micro_batch": 1, "sharding": "zero3"}
    cut = autoplan.estimate("llama3-8b", **EXPORTED, plan={**plan, "chunked_loss": "cut"}).file
    assert "CutCrossEntropyPlugin" in yaml_of(cut)
    with pytest.raises(NoPlanError, match="liger with tp 2"):
        autoplan.estimate("llama3-8b", **EXPORTED, plan={**plan, "chunked_loss": "liger"})
