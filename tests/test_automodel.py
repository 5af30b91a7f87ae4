"""Are recipes of NeMo AutoModel read as they start, and what is not understood listed?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from autoplan.base.errors import InputError
from autoplan.frameworks.automodel.read import read, recognises
from autoplan.frameworks.common.launch import Launch, LaunchContext

RECIPE: dict[str, Any] = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "step_scheduler": {"global_batch_size": 512, "local_batch_size": 4},
    "distributed": {"strategy": "fsdp2", "dp_size": "none", "tp_size": 2, "cp_size": 1, "sequence_parallel": True},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B",
    },
    "packed_sequence": {"packed_sequence_size": 4096},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
}


def of(devices: int | None = 16, **sections: dict[str, Any] | str) -> Launch:
    recipe = copy.deepcopy(RECIPE)
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section} if isinstance(section, dict) else section
    text = yaml.safe_dump(recipe)
    assert recognises("recipe.yaml", text)
    return read(text, LaunchContext(num_devices=devices))


def matters(launch: Launch) -> set[str]:
    return {unread.option for unread in launch.unread if unread.matters}


def test_a_recipe_is_read() -> None:
    launch = of(distributed={"ep_size": 8, "activation_checkpointing": True})
    assert (launch.target, launch.framework, launch.model.name) == ("automodel", "nemo-automodel", "qwen3-30b-a3b")
    plan = launch.plan
    assert (plan.tp, plan.sp, plan.ep, plan.dp_shard, plan.sharding) == (2, True, 8, 8, "zero3")
    assert (plan.micro_batch, plan.global_batch, plan.recompute) == (4, 512, "full")
    assert launch.training.seq_len == 4096
    assert matters(launch) == set()


def test_copies_and_whole_parameters() -> None:
    assert of(distributed={"strategy": "ddp"}).plan.sharding == "none"
    copies = of(distributed={"dp_replicate_size": 2}).plan
    assert (copies.dp_replicate, copies.dp_shard) == (2, 4)
    assert of(distributed={"reshard_after_forward": False}).plan.sharding == "zero2"


def test_pipelines_are_read() -> None:
    pipeline = {"pp_schedule": "interleaved1f1b", "pp_microbatch_size": 2, "layers_per_stage": 6}
    launch = of(distributed={"pp_size": 4, "pipeline": pipeline}, step_scheduler={"local_batch_size": 16})
    # 48 layers in 8 stages, two on each of 4 ranks.
    assert (launch.plan.pp, launch.plan.vp, launch.plan.schedule, launch.plan.micro_batch) == (4, 2, "interleaved", 2)
    # 512 sequences on 2 replicas in batches of 16: 16 pipelines one after the other, priced as one.
    assert matters(launch) == {"step_scheduler.global_batch_size"}
    plain = of(distributed={"pp_size": 4, "pipeline": {"pp_schedule": "1f1b"}}).plan
    assert (plain.vp, plain.schedule, plain.micro_batch, plain.sharding) == (1, "1f1b", 1, "zero2")


def test_adapters_are_read() -> None:
    tuning = of(peft={"dim": 16, "target_modules": "*_proj", "use_dora": True}).training.finetuning
    assert tuning is not None
    assert (tuning.rank, tuning.targets, tuning.dora) == (16, ("all-linear",), True)
    tuning = of(peft={"dim": 8, "target_modules": ["*.q_proj", "*v_proj*"]}).training.finetuning
    assert tuning is not None
    assert tuning.targets == ("q_proj", "v_proj")
    tuning = of(peft={"match_all_linear": True, "target_modules": []}).training.finetuning
    assert tuning is not None
    assert tuning.targets == ("all-linear",)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"recipe": "KnowledgeDistillationRecipeForNextTokenPrediction"}, "recipe Knowledge"),
        ({"recipe": "FinetuneRecipeForVLM"}, "recipe FinetuneRecipeForVLM"),
        ({"distributed": {"dp_size": 4}}, "dp_size is 4, 16 devices leave 8: pass --devices 8"),
        ({"distributed": {"strategy": "magic"}}, "strategy 'magic'"),
        ({"model": {"config": {"num_hidden_layers": 2}}}, "num_hidden_layers makes another model"),
        ({"packed_sequence": {"packed_sequence_size": 0}}, "--seq-len"),
    ],
)
def test_what_cannot_be_read_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        of(**sections)


@pytest.mark.parametrize(("target", "is_listed"), [("x.MockIterableDataset", False), ("x.Squad", True)])
def test_the_length_of_a_dataset_is_the_most_unless_it_is_made_up(target: str, is_listed: bool) -> None:
    dataset = {"_target_": target, "seq_length": 2048}
    launch = of(packed_sequence={"packed_sequence_size": 0}, dataset=dataset)
    assert launch.training.seq_len == 2048
    assert matters(launch) == ({"dataset.seq_length"} if is_listed else set())


def test_what_is_not_known_is_listed() -> None:
    launch = of(
        model={"backend": {"attn": "sdpa", "linear": "te"}},
        optimizer={"_target_": "flashoptim.FlashAdam3"},
        distributed={"enable_compile": True, "frobnicate": 1},
        dllm={"x": 1},
        loss_fn={"_target_": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy"},
    )
    assert matters(launch) == {
        "loss_fn._target_",
        *("model.backend.attn", "optimizer._target_", "distributed.enable_compile", "distributed.frobnicate"),
        "dllm",
    }


@pytest.mark.parametrize(("word", "dispatcher"), [(None, "deepep"), ("deepep", "deepep"), ("torch", "alltoall")])
def test_tokens_go_by_the_dispatcher_of_the_backend(word: str | None, dispatcher: str) -> None:
    backend = {"backend": {"dispatcher": word}} if word else {}
    launch = of(distributed={"ep_size": 8}, model=backend)
    assert launch.plan.dispatcher == dispatcher
    assert matters(launch) == set()


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ({"load_in_4bit": True}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "nf4-dq"),
        ({"load_in_8bit": True}, "int8"),
    ],
)
def test_quantised_weights_are_read(quantization: dict[str, Any], kind: str) -> None:
    finetuning = of(peft={"dim": 8, "match_all_linear": True}, quantization=quantization).training.finetuning
    assert finetuning is not None
    assert finetuning.quantization == kind


def test_types_that_are_not_priced_are_listed() -> None:
    launch = of(model={"torch_dtype": "float32"}, optimizer={"exp_avg_dtype": "torch.bfloat16"})
    assert matters(launch) == {"optimizer.exp_avg_dtype"}
    assert (launch.plan.main_weights, of().plan.main_weights) == ("fp32", "bf16")


@pytest.mark.parametrize(("rounding", "chunks"), [("up", 3), ("down", 2)])
def test_stages_are_rounded_as_the_recipe_says(rounding: str, chunks: int) -> None:
    pipeline = {"pp_schedule": "interleaved1f1b", "layers_per_stage": 5}  # 10 stages of the 48 layers
    sizes: dict[str, Any] = {"pp_size": 4, "pipeline": {**pipeline, "round_virtual_stages_to_pp_multiple": rounding}}
    assert of(distributed=sizes).plan.vp == chunks
    with pytest.raises(InputError, match="makes 10 stages"):
        of(distributed={"pp_size": 4, "pipeline": pipeline})
