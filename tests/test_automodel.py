"""Are recipes of NeMo AutoModel read as they start, what is not understood listed, and a plan read back as written?"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoplan
from autoplan.base.errors import InputError
from autoplan.frameworks.automodel.read import read, recognises
from autoplan.frameworks.automodel.rules import BOOK
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.common.rules import broken
from autoplan.launch.targets import exported
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.workload import Workload
from framework_parsers import ask
from read_back import check_price, matters

RECIPE: dict[str, Any] = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "step_scheduler": {"global_batch_size": 512, "local_batch_size": 4},
    "distributed": {"strategy": "fsdp2", "dp_size": "none", "tp_size": 2, "cp_size": 1, "sequence_parallel": True},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B",
        "backend": {"rms_norm": "te"},
    },
    "packed_sequence": {"packed_sequence_size": 4096},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
}


def of(devices: int | None = 16, **sections: dict[str, Any] | str) -> Launch:
    recipe = copy.deepcopy(RECIPE)
    for name, section in sections.items():
        before = recipe.get(name, {})
        recipe[name] = before | section if isinstance(section, dict) and isinstance(before, dict) else section
    text = yaml.safe_dump(recipe)
    assert recognises("recipe.yaml", text)
    return read(text, LaunchContext(num_devices=devices))


def test_a_recipe_is_read() -> None:
    launch = of(distributed={"ep_size": 8, "activation_checkpointing": True})
    assert (launch.target, launch.framework, launch.model.name) == ("automodel", "nemo-automodel", "qwen3-30b-a3b")
    plan = launch.plan
    # Layers with experts stay gathered unless they are told otherwise.
    assert (plan.tp, plan.sp, plan.ep, plan.dp_shard, plan.sharding) == (2, True, 8, 8, "zero2")
    assert (plan.micro_batch, plan.global_batch, plan.recompute) == (4, 512, "full")
    assert launch.training.seq_len == 4096
    assert matters(launch) == set()


@pytest.mark.parametrize("is_table", [False, True])
def test_a_recipe_is_named_by_its_place_too(is_table: bool) -> None:
    """The command takes both, beside the bare name (docs/breaking-changes.md)."""
    place = f"nemo_automodel.recipes.llm.train_ft.{RECIPE['recipe']}"
    launch, named = of(), of(recipe={"_target_": place} if is_table else place)
    assert (named.plan, named.training, matters(named)) == (launch.plan, launch.training, matters(launch))


def test_copies_and_whole_parameters() -> None:
    launch = of(distributed={"strategy": "ddp", "mp_policy": {"reduce_dtype": "bfloat16"}})
    assert (launch.plan.sharding, launch.plan.reduce_dtype, matters(launch)) == ("none", "usual", set())
    wide = of(distributed={"strategy": "ddp"}, model={"torch_dtype": "float32"})
    assert matters(wide) == {"distributed.strategy"}
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
    assert (plain.vp, plain.schedule, plain.micro_batch, plain.sharding) == (1, "1f1b", 1, "zero3")
    silent = of(distributed={"pp_size": 4, "pipeline": {}}).plan
    assert (silent.vp, silent.schedule) == (1, "1f1b")


@pytest.mark.parametrize(
    ("sections", "sharding", "is_listed"),
    [
        ({"ep_size": 8, "reshard_after_forward": True}, "zero3", False),
        ({"ep_size": 8, "moe": {"reshard_after_forward": True}}, "zero3", False),
        ({"ep_size": 8, "moe": {"reshard_after_forward": True}, "reshard_after_forward": False}, "zero2", False),
        ({"moe": {"reshard_after_forward": False}}, "zero3", False),
        # A pipeline keeps weights gathered, which is what its ZeRO-3 is priced as.
        ({"pp_size": 2, "pipeline": {}}, "zero3", False),
        ({"pp_size": 2, "pipeline": {}, "reshard_after_forward": True}, "zero3", True),
    ],
)
def test_layers_stay_gathered_as_the_recipe_says(sections: dict[str, Any], sharding: str, is_listed: bool) -> None:
    launch = of(distributed=sections, step_scheduler={"global_batch_size": 32})
    assert launch.plan.sharding == sharding
    assert ("distributed.reshard_after_forward" in matters(launch)) == is_listed


def test_reduction_host_and_partial_recomputation_are_read() -> None:
    launch = of(
        distributed={
            "activation_checkpointing": "selective",
            "mp_policy": {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "reduce_dtype": "bfloat16"},
            "offload_policy": {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"},
        }
    )
    assert (launch.plan.recompute, launch.plan.reduce_dtype, launch.plan.offload) == ("selective", "half", "parameters")
    assert matters(launch) == set()
    kept = of(distributed={"reshard_after_forward": False, "offload_policy": {"_target_": "x"}})
    assert (kept.plan.offload, matters(kept)) == ("none", {"distributed.offload_policy"})


def test_deepseek_predicts_the_next_token_alone() -> None:
    launch = of(model={"pretrained_model_name_or_path": "deepseek-ai/DeepSeek-V3"})
    assert (launch.model.name, launch.model.num_mtp_layers) == ("deepseek-v3", 0)


def test_the_first_stages_have_the_layers_that_are_left_over() -> None:
    pipeline = {"pp_schedule": "1f1b", "layers_per_stage": 10}  # 5 stages of the 48 layers
    assert of(10, distributed={"pp_size": 5, "tp_size": 1, "pipeline": pipeline}).plan.layers_per_chunk == (
        *(10, 10, 10),
        *(9, 9),
    )


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
        (
            {"recipe": {"_target_": "nemo_automodel.recipes.vlm.finetune.FinetuneRecipeForVLM"}},
            "recipe FinetuneRecipeForV",
        ),
        (
            {"model": {"_target_": "nemo_automodel.NeMoAutoModelForImageTextToText.from_pretrained"}},
            "NeMoAutoModelForImageTextToText: only",
        ),
        ({"distributed": {"dp_size": 4}}, "dp_size is 4, 16 devices leave 8: pass --devices 8"),
        ({"distributed": {"strategy": "magic"}}, "strategy 'magic'"),
        ({"model": {"config": {"num_hidden_layers": 2}}}, "num_hidden_layers changes the model"),
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
        model={"backend": {"attn": "sdpa", "linear": "te", "rope_fusion": False}},
        optimizer={"_target_": "flashoptim.FlashAdam3"},
        distributed={"enable_compile": True, "frobnicate": 1},
        dllm={"x": 1},
        loss_fn={"_target_": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy"},
    )
    assert matters(launch) == {
        "loss_fn._target_",
        *(
            "model.backend.attn",
            "model.backend.rms_norm",
            "model.backend.rope_fusion",
            "optimizer._target_",
            "distributed.enable_compile",
            "distributed.frobnicate",
        ),
        "dllm",
    }


@pytest.mark.parametrize(("word", "dispatcher"), [(None, "deepep"), ("deepep", "deepep"), ("torch", "allgather")])
def test_tokens_go_by_the_dispatcher_of_the_backend(word: str | None, dispatcher: str) -> None:
    backend = {"backend": {"rms_norm": "te", "dispatcher": word}} if word else {}
    launch = of(distributed={"ep_size": 8}, model=backend)
    assert launch.plan.dispatcher == dispatcher
    workload = Workload(model=launch.model, training=launch.training, num_devices=16)
    assert not broken(BOOK.rules, workload, launch.plan)
    assert matters(launch) == ({"model.backend.dispatcher"} if word == "torch" else set())


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ({"load_in_4bit": True}, "nf4-dq"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": False}, "nf4"),
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


@pytest.mark.parametrize(("is_on", "unread"), [(False, set()), (True, {"compile.enabled"})])
def test_a_model_that_is_compiled_is_listed(is_on: bool, unread: set[str]) -> None:
    assert matters(of(compile={"enabled": is_on, "mode": "default", "backend": None})) == unread


def test_scales_that_are_not_priced_are_listed() -> None:
    assert (
        matters(of(fp8={"enabled": True, "recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": True})) == set()
    )
    assert matters(of(fp8={"enabled": True, "recipe_name": "rowwise"})) == {"fp8.recipe_name"}
    assert matters(of(distributed={"defer_fsdp_grad_sync": False})) >= {"distributed.defer_fsdp_grad_sync"}


@pytest.mark.parametrize(("rounding", "chunks"), [("up", 3), ("down", 2)])
def test_stages_are_rounded_as_the_recipe_says(rounding: str, chunks: int) -> None:
    pipeline = {"pp_schedule": "interleaved1f1b", "layers_per_stage": 5}  # 10 stages of the 48 layers
    sizes: dict[str, Any] = {"pp_size": 4, "pipeline": {**pipeline, "round_virtual_stages_to_pp_multiple": rounding}}
    assert of(distributed=sizes).plan.vp == chunks
    with pytest.raises(InputError, match="makes 10 stages"):
        of(distributed={"pp_size": 4, "pipeline": pipeline})


# -- export ------------------------------------------------------------------------------------------------------------

PLACE = {"cluster": "h100-sxm:2x8", "global_batch": 64, "seq_len": 4096, "framework": "nemo-automodel"}
DENSE, EXPERTS = "llama3-8b", "qwen3-30b-a3b"
EXPORTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"tp": 2, "sharding": "zero3", "recompute": "full", "micro_batch": 2}, {}),
    (DENSE, {"tp": 2, "sp": False, "cp": 2, "sharding": "zero2", "reduce_dtype": "half"}, {}),
    (DENSE, {"sharding": "zero3", "dp_replicate": 2, "recompute": "selective"}, {}),
    (DENSE, {"sharding": "zero3", "offload": "parameters", "main_weights": "fp32"}, {"precision": "fp8"}),
    (DENSE, {"pp": 2, "sharding": "zero3", "tp": 2, "micro_batch": 2}, {}),
    (DENSE, {"pp": 4, "vp": 2, "schedule": "interleaved", "sharding": "zero3"}, {}),
    (DENSE, {"pp": 2, "vp": 2, "schedule": "zb-v", "sharding": "zero3"}, {}),
    (DENSE, {"pp": 2, "layers_per_chunk": [15, 17], "sharding": "zero3"}, {}),
    (DENSE, {"tp": 8, "pp": 2, "sharding": "none"}, {}),
    (DENSE, {"sharding": "none"}, {"finetune": "dora:r=16,targets=all-linear"}),
    (DENSE, {"sharding": "zero3"}, {"finetune": "lora:r=8,targets=q_proj+v_proj,quantize=nf4"}),
    (EXPERTS, {"ep": 8, "dispatcher": "deepep", "sharding": "zero2"}, {}),
    (EXPERTS, {"ep": 8, "dispatcher": "hybridep", "sharding": "zero3", "pp": 2, "cp": 2}, {}),
    ("gpt-oss-20b", {"ep": 16, "dispatcher": "deepep", "sharding": "zero3"}, {}),
]
# Classes that take the sections, by the place of each in nemo_automodel, with their fields at 36044ad.
CLASSES = {
    "distributed": """strategy tp_size cp_size pp_size ep_size dp_replicate_size sequence_parallel mp_policy
        offload_policy activation_checkpointing reshard_after_forward pipeline""",
    "pipeline": "pp_schedule pp_microbatch_size layers_per_stage module_fqns_per_model_part",
    "backend": "_target_ attn linear rms_norm experts dispatcher",
    "mp_policy": "_target_ param_dtype reduce_dtype output_dtype",
    "peft": "_target_ target_modules dim alpha dropout use_dora lora_dtype",
    "fp8": "enabled recipe_name enable_fsdp_float8_all_gather",
    "quantization": "load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant",
    "step_scheduler": "global_batch_size local_batch_size",
}


def plan_file(model: str, plan: dict[str, Any], **about: Any) -> PlanFile:
    return autoplan.estimate(model, **PLACE | about, plan={"micro_batch": 1} | plan).file


def yaml_of(file: PlanFile) -> str:
    return next(written.text for written in exported(file, "automodel", "torchrun") if written.name == "automodel.yaml")


@pytest.mark.parametrize(("model", "plan", "about"), EXPORTED, ids=str)
def test_a_plan_is_read_back_with_its_price(model: str, plan: dict[str, Any], about: dict[str, Any]) -> None:
    file = plan_file(model, plan, **about)
    text = yaml_of(file)
    assert recognises("automodel.yaml", text)
    launch = read(text, LaunchContext(num_devices=16))
    assert launch.plan == file.best.plan
    assert matters(launch) == set()
    check_price(file, launch, PLACE | about)


@pytest.mark.parametrize(("model", "plan", "about"), EXPORTED, ids=str)
def test_sections_have_no_key_that_their_classes_lack(model: str, plan: dict[str, Any], about: dict[str, Any]) -> None:
    table = yaml.safe_load(yaml_of(plan_file(model, plan, **about)))
    inside = {**table, **table["distributed"], "backend": table["model"]["backend"]}
    for name, fields in CLASSES.items():
        assert set(inside.get(name) or {}) <= set(fields.split()), name


def test_its_own_classes_take_the_recipes_as_they_are_meant() -> None:
    folder = Path(os.environ.get("AUTOMODEL_DIR", "/nowhere"))
    if not (folder / "nemo_automodel" / "recipes").is_dir():
        pytest.skip("AUTOMODEL_DIR does not name a checkout of NeMo AutoModel")
    files = [plan_file(model, plan, **about) for model, plan, about in EXPORTED]
    questions = [{"text": yaml_of(file), "world": 16} for file in files]
    for file, answer in zip(files, ask("automodel_parser.py", questions), strict=True):
        plan = file.best.plan
        assert "error" not in answer, answer
        is_piped, is_sharded = plan.pp > 1, plan.sharding != "none"
        degrees = {"pp": plan.pp, "dp_replicate": plan.dp_replicate, "cp": plan.cp, "tp": plan.tp}
        ddp = plan.dp > 1 and not is_sharded
        assert answer["strategy"] == ("DDPConfig" if ddp else "FSDP2Config")
        assert answer["sizes"] == ({} if ddp else degrees | {"dp_shard": plan.dp_shard})
        assert answer["experts"] == ({"ep_shard": 16 // plan.pp // plan.ep, "ep": plan.ep} if plan.ep > 1 else {})
        assert answer["recompute"] == {"none": False, "full": True, "selective": "selective"}[plan.recompute]
        assert answer["reshards"] == (plan.sharding == "zero3" and not is_piped if is_sharded else None)
        assert answer["reduces"].endswith("None" if ddp else "bfloat16" if plan.reduce_dtype == "half" else "float32")
        assert answer["offloads"] == (plan.offload == "parameters")
        assert answer["rounds"] == (1 if is_piped else plan.num_microbatches)
        assert answer["layers_per_stage"] == (file.model.num_layers // (plan.pp * plan.vp) if is_piped else None)
        assert plan.ep == 1 or answer["dispatcher"] == plan.dispatcher


def test_the_command_starts_its_program_with_what_a_person_chooses() -> None:
    script = exported(plan_file(*EXPORTED[0][:2]), "automodel", "torchrun")[0].text
    assert '-m nemo_automodel.cli.app \\\n    "$HERE/automodel.yaml"' in script
    assert '--model.pretrained_model_name_or_path "$BASE_MODEL" --step_scheduler.max_steps "$STEPS"' in script


@pytest.mark.parametrize("batching", ["packed", "padded"])
def test_samples_become_sequences_as_they_were_priced(batching: str) -> None:
    file = plan_file(DENSE, {"sharding": "zero3"}, lengths="512:3,2048:1", batching=batching)
    launch = read(yaml_of(file), LaunchContext(num_devices=16))
    assert (launch.training.batching, launch.training.seq_len) == (batching, 4096)


@pytest.mark.parametrize(
    ("model", "plan", "about", "says"),
    [
        (
            EXPERTS,
            {"tp": 2, "etp": 1, "ep": 8, "dispatcher": "deepep", "sharding": "zero3"},
            {},
            "tp 2 of qwen3-30b-a3b",
        ),
        ("gemma2-9b", {"tp": 2, "sharding": "zero3"}, {}, "tp 2 of gemma2-9b: it splits Llama"),
        ("gpt-oss-20b", {"pp": 2, "sharding": "zero3"}, {}, "pp 2 and cp 1 of gpt-oss-20b"),
        (EXPERTS, {"ep": 8, "sharding": "zero3"}, {}, "dispatcher 'alltoall': it has none, use allgather"),
        (EXPERTS, {"sharding": "zero3"}, {"precision": "fp8"}, "precision 'fp8' of experts"),
        (DENSE, {"sharding": "zero3"}, {"precision": "mxfp8", "cluster": "b200:2x8"}, "precision 'mxfp8'"),
        (DENSE, {"pp": 2, "schedule": "zb-h1", "sharding": "zero3"}, {}, "schedule 'zb-h1': use 1f1b"),
        (DENSE, {"pp": 12, "sharding": "none"}, {"cluster": "h100-sxm:12x1"}, "32 layers in 12 chunks, which no"),
        (DENSE, {"tp": 2, "sharding": "none"}, {}, "unsharded states of 8 replicas with tp"),
        (DENSE, {"sharding": "zero3"}, {"attention": "unfused"}, "attention 'unfused'"),
        (DENSE, {"sharding": "zero3"}, {"finetune": "lora:r=8,train=lm_head"}, "lm_head apart from other weights"),
        (EXPERTS, {"sharding": "zero3"}, {"finetune": "lora:r=8"}, "adapters of qwen3-30b-a3b, which has experts"),
        (DENSE, {"sharding": "zero3"}, {"optimizer": "lion"}, "Lion"),
        ("deepseek-v3", {"ep": 16, "dispatcher": "deepep", "sharding": "zero3"}, {}, "for multi-token prediction"),
    ],
    ids=str,
)
def test_what_it_cannot_be_told_is_named(model: str, plan: dict[str, Any], about: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        yaml_of(plan_file(model, plan, **about))


@pytest.mark.parametrize("target", ["automodel", "axolotl", "hf-trainer", "llama-factory"])
def test_programs_of_causal_models_refuse_a_masked_one(target: str) -> None:
    model = replace(autoplan.load_model("llama3-8b"), bidirectional=True)
    framework = "nemo-automodel" if target == "automodel" else "transformers"
    place = {"cluster": "h100-sxm:1x8", "seq_len": 4096, "global_batch": 16, "framework": framework}
    file = autoplan.estimate(model, **place, plan={"sharding": "zero3"}).file
    with pytest.raises(InputError, match="bidirectional attention: its program trains causal models"):
        exported(file, target, "torchrun")


def test_norms_are_eager_unless_the_backend_says_otherwise() -> None:
    assert matters(of(model={"backend": {}})) == {"model.backend.rms_norm"}


@pytest.mark.parametrize(
    ("peft", "adapts_experts"),
    [
        ({"match_all_linear": True}, False),
        ({"exclude_modules": ["*.lm_head"]}, False),
        ({"target_modules": ["*_proj"]}, False),
        ({"target_modules": ["*_proj", "*.experts"]}, True),
    ],
)
def test_experts_get_adapters_from_a_pattern_of_their_name_alone(peft: dict[str, Any], adapts_experts: bool) -> None:
    """They are one module of plain parameters, no linear ones (components/_peft/module_matcher.py)."""
    launch = of(peft={"dim": 16} | peft)
    assert launch.training.finetuning is not None
    assert launch.training.finetuning.targets == ("all-linear",)
    assert launch.training.finetuning.targets_experts == adapts_experts
    # Those on everything reach the head, whose copy of the logits is not priced.
    assert ("peft.match_all_linear" in matters(launch)) == ("match_all_linear" in peft)


@pytest.mark.parametrize(
    ("backend", "moe", "listed"),
    [
        ({"enable_fsdp_optimizations": True}, {}, {"model.backend.enable_fsdp_optimizations"}),
        ({}, {"wrap_outer_model": False}, {"distributed.moe.wrap_outer_model"}),
        ({}, {}, set()),
        ({"experts": "torch"}, {}, {"model.backend.experts"}),
        ({}, {"lm_head_precision": "float32"}, {"distributed.moe.lm_head_precision"}),
    ],
)
def test_shards_of_experts_between_micro_batches_are_listed(
    backend: dict[str, Any], moe: dict[str, Any], listed: set[str]
) -> None:
    launch = of(distributed={"ep_size": 8, "moe": moe}, model={"backend": {"rms_norm": "te"} | backend})
    assert matters(launch) == listed


def test_documents_that_fill_sequences_are_not_said_to_be_padded() -> None:
    section = {"_target_": "nemo_automodel.components.datasets.llm.megatron_dataset.MegatronPretraining"}
    launch = of(packed_sequence={"packed_sequence_size": 0}, dataset=section | {"seq_length": 2048})
    assert (launch.training.seq_len, launch.training.batching, matters(launch)) == (2048, "joined", set())
