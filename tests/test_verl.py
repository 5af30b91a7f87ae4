"""Are scripts of verl read as they start, and a plan for its SFT trainer read back as written?"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoplan
from autoplan.base.errors import AutoplanError, InputError
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.verl.read import read, recognises
from autoplan.launch.targets import exported
from autoplan.spec.plan import chunk_layers
from autoplan.spec.plan_file import PlanFile
from read_back import check_price, matters

PLACE = {"cluster": "h100-sxm:2x8", "global_batch": 64, "seq_len": 4096, "framework": "megatron-core"}
DENSE, EXPERTS = "llama3-8b", "qwen3-30b-a3b"
EXPORTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DENSE, {"tp": 4, "pp": 2, "vp": 2, "schedule": "interleaved", "recompute": "core_attn+mlp"}, {}),
    (DENSE, {"cp": 2, "sharding": "zero1", "recompute": "full", "micro_batch": 2}, {}),
    (DENSE, {"cp": 2, "cp_kind": "all_to_all", "sharding": "none", "tp": 4}, {"cluster": "h100-sxm:1x8"}),
    (DENSE, {"pp": 2, "layers_per_chunk": [15, 17], "recompute": "full:4"}, {}),
    (DENSE, {"pp": 2, "vp": 2, "schedule": "interleaved", "layers_per_chunk": [7, 9, 9, 7]}, {}),
    (DENSE, {"main_weights": "remainders", "moment_dtype": "bf16", "grad_dtype": "bf16_main"}, {}),
    (DENSE, {"sharding": "zero1", "offload": "optimizer"}, {}),
    (DENSE, {"tp": 2}, {"precision": "fp16"}),
    (DENSE, {"tp": 2}, {"finetune": "lora:r=16,targets=linear_qkv+linear_fc1"}),
    (DENSE, {"tp": 2}, {"finetune": "dora:r=8,targets=linear_qkv"}),
    (EXPERTS, {"ep": 8, "sharding": "zero1", "recompute": "full"}, {}),
    (EXPERTS, {"ep": 4, "tp": 2, "etp": 2, "pp": 2, "dispatcher": "deepep"}, {}),
    ("deepseek-v3", {"ep": 8, "pp": 8, "recompute": "full"}, {"cluster": "h100-sxm:16x8", "global_batch": 256}),
]


def plan_file(model: str, plan: dict[str, Any], **about: Any) -> PlanFile:
    return autoplan.estimate(model, **PLACE | about, plan={"micro_batch": 1} | plan).file


def script_of(file: PlanFile) -> str:
    return exported(file, "verl", "torchrun")[0].text


@pytest.mark.parametrize(("model", "plan", "about"), EXPORTED, ids=str)
def test_a_plan_is_read_back_with_its_price(model: str, plan: dict[str, Any], about: dict[str, Any]) -> None:
    file = plan_file(model, plan, **about)
    script = script_of(file)
    assert recognises("launch.sh", script)
    launch = read(script, LaunchContext())
    layers = [chunk_layers(each, file.model.num_layers) for each in (launch.plan, file.best.plan)]
    assert layers[0] == layers[1]
    assert replace(launch.plan, layers_per_chunk=file.best.plan.layers_per_chunk) == file.best.plan
    assert matters(launch) == set()
    assert launch.training.batching == "unpadded"
    check_price(file, replace(launch, training=replace(launch.training, batching="packed")), PLACE | about)


def words_of(script: str) -> list[str]:
    """The settings in the arrays of a script, without their quotes."""
    lines = re.findall(r"^    (\S.*)$", script.partition("PLAN=(")[2].partition("DATA_ARGS")[0], re.MULTILINE)
    return [line.strip("'") for line in lines if "=" in line]


def test_a_plan_is_written_word_by_word() -> None:
    script = script_of(plan_file(*EXPORTED[0][:2]))
    assert words_of(script)[:13] == [
        *("engine=megatron", "optim=megatron", "engine.dtype=bfloat16"),
        *("data.micro_batch_size_per_gpu=1", "data.train_batch_size=64"),
        *("engine.tensor_model_parallel_size=4", "engine.sequence_parallel=True"),
        *("engine.pipeline_model_parallel_size=2", "engine.virtual_pipeline_model_parallel_size=2"),
        *("engine.use_distributed_optimizer=True", "++engine.override_ddp_config.overlap_grad_reduce=True"),
        "++engine.override_ddp_config.overlap_param_gather=True",
        "++engine.override_transformer_config.recompute_granularity=selective",
    ]
    assert "++engine.override_transformer_config.recompute_modules=[core_attn,mlp]" in words_of(script)
    assert "-m verl.trainer.sft_trainer \\\n" in script
    assert 'model.path="$BASE_MODEL" trainer.total_training_steps="$STEPS" "$@"' in script


def test_its_own_files_have_every_setting() -> None:
    """Hydra refuses a key that its files have not, unless it is added by a plus."""
    folder = Path(os.environ.get("VERL_DIR", "/nowhere")) / "verl" / "trainer" / "config"
    if not folder.is_dir():
        pytest.skip("VERL_DIR does not name a checkout of verl")
    files = {"engine": "engine/megatron", "optim": "optim/megatron", "model": "model/hf_model"}
    table = yaml.safe_load((folder / "sft_trainer_engine.yaml").read_text())
    table |= {section: yaml.safe_load((folder / f"{name}.yaml").read_text()) for section, name in files.items()}
    for model, plan, about in EXPORTED:
        for word in words_of(script_of(plan_file(model, plan, **about))):
            path = word.partition("=")[0]
            inside = table
            for key in path.lstrip("+").split("."):
                assert isinstance(inside, dict), word
                if path.startswith("++") and key not in inside:
                    break
                inside = inside[key]


SFT = """torchrun --nnodes=$NODES --nproc_per_node=8 -m verl.trainer.sft_trainer \\
    data.train_files=x.parquet data.train_batch_size=128 data.micro_batch_size_per_gpu=2 data.use_dynamic_bsz=False \\
    data.max_length=2048 model.path=Qwen/Qwen3-30B-A3B engine=megatron optim=megatron optim.lr=1e-5 \\
    engine.tensor_model_parallel_size=2 engine.expert_model_parallel_size=4 engine.expert_tensor_parallel_size=1 \\
    +engine.override_transformer_config.recompute_granularity=full \\
    +engine.override_transformer_config.recompute_method=uniform \\
    +engine.override_transformer_config.recompute_num_layers=1 {}
"""


def test_a_script_of_the_sft_trainer_is_read() -> None:
    launch = read("NODES=2\n" + SFT.format(""), LaunchContext())
    plan = launch.plan
    assert (plan.tp, plan.sp, plan.ep, plan.etp, plan.dp, plan.micro_batch, plan.global_batch) == (
        2,
        True,
        4,
        1,
        8,
        2,
        128,
    )
    assert (plan.recompute, plan.sharding, launch.training.seq_len) == ("full", "zero1", 2048)
    assert not plan.grad_reduce_overlap  # unless DDP is told
    assert matters(launch) == set()


def test_micro_batches_of_tokens_and_what_goes_to_the_host_are_listed() -> None:
    script = SFT.replace("$NODES", "1").replace("data.use_dynamic_bsz=False", "data.max_token_len_per_gpu=6144")
    launch = read(script.format("engine.param_offload=True"), LaunchContext())
    assert launch.plan.micro_batch == 3
    assert matters(launch) == {"data.use_dynamic_bsz", "engine.param_offload"}


@pytest.mark.parametrize(
    ("setting", "usual", "other"),
    [
        ("model.use_fused_kernels", "False", "True"),
        ("+engine.override_transformer_config.bias_activation_fusion", "True", "False"),
        ("+engine.override_transformer_config.deallocate_pipeline_outputs", "True", "False"),
    ],
)
def test_settings_that_no_plan_has_are_listed_where_they_differ(setting: str, usual: str, other: str) -> None:
    script = "NODES=2\n" + SFT
    assert matters(read(script.format(f"{setting}={usual}"), LaunchContext())) == set()
    assert matters(read(script.format(f"{setting}={other}"), LaunchContext())) == {setting.removeprefix("+")}


def test_an_actor_has_micro_batches_of_samples_unless_it_is_told() -> None:
    """use_dynamic_bsz is off by default in config/actor/actor.yaml, and on in sft_trainer_engine.yaml."""
    script = """python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml data.train_batch_size=256 \\
        data.max_prompt_length=1024 data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 trainer.nnodes=1 trainer.n_gpus_per_node=8 {}
    """
    launch = read(script.format(""), LaunchContext())
    assert launch.plan.micro_batch == 4
    assert matters(launch) == set()
    dynamic = read(script.format("actor_rollout_ref.actor.use_dynamic_bsz=True"), LaunchContext())
    assert dynamic.plan.micro_batch == 16384 // 1536
    assert matters(dynamic) == {"actor_rollout_ref.actor.use_dynamic_bsz"}


def test_fsdp_of_megatron_shards_everything() -> None:
    """Megatron-Bridge's create_ddp_config gives use_megatron_fsdp the strategy optim_grads_params."""
    script = """python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml data.train_batch_size=256 \\
        data.max_prompt_length=1024 data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
        trainer.nnodes=1 trainer.n_gpus_per_node=8 {}
    """
    plain = read(script.format(""), LaunchContext())
    sharded = read(script.format("actor_rollout_ref.actor.megatron.use_megatron_fsdp=True"), LaunchContext())
    assert (plain.plan.sharding, sharded.plan.sharding) == ("zero1", "zero3")


@pytest.mark.parametrize("config", ["--config-name='gsm8k_multiturn_megatron_grpo'", "--config-name ours.yaml"])
def test_a_configuration_of_its_own_is_listed(config: str) -> None:
    script = f"""python3 -m verl.trainer.main_ppo {config} data.train_batch_size=256 \\
        data.max_prompt_length=1024 data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 trainer.nnodes=1 trainer.n_gpus_per_node=8
    """
    assert matters(read(script, LaunchContext())) == {"--config-name"}


def test_the_update_of_an_actor_is_read_and_the_rest_left_alone() -> None:
    script = """python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \\
        data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=3072 \\
        actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
        actor_rollout_ref.actor.use_dynamic_bsz=False actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 actor_rollout_ref.rollout.n=4 \\
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \\
        trainer.nnodes=2 trainer.n_gpus_per_node=8
    """
    assert recognises("run.sh", script)
    launch = read(script, LaunchContext())
    plan = launch.plan
    assert (plan.tp, plan.pp, plan.dp, plan.micro_batch, plan.global_batch) == (2, 2, 4, 2, 128)
    assert (launch.model.name, launch.training.seq_len) == ("qwen3-8b", 4096)
    assert matters(launch) == set()
    assert any("left alone" in unread.why for unread in launch.unread)


def test_a_search_from_an_actors_script_lists_its_changes_as_settings_of_the_actor(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    script = f"""python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml \\
        data.max_prompt_length=1024 data.max_response_length=2048 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
        {actor}.ppo_micro_batch_size_per_gpu=2 {actor}.use_dynamic_bsz=False \\
        {actor}.megatron.tensor_model_parallel_size=8 trainer.nnodes=1 trainer.n_gpus_per_node=8
    """
    (tmp_path / "run.sh").write_text(script)
    file = autoplan.search(cluster="h100-sxm:1x8", launch_file=tmp_path / "run.sh", fix={"tp": 4}).file
    assert file.today is not None
    assert file.space is not None
    assert file.space.to == "verl"
    changed = {option.option: (option.before, option.after) for option in file.today.options}
    assert changed[f"{actor}.megatron.tensor_model_parallel_size"] == ("8", "4")
    assert all(name.startswith(actor) for name in changed)


def test_another_engine_is_refused() -> None:
    script = SFT.replace("$NODES", "1").replace("engine=megatron", "engine=fsdp").format("")
    with pytest.raises(InputError, match="engine 'fsdp' is not read"):
        read(script, LaunchContext())


def test_adapters_of_another_kind_are_refused() -> None:
    script = SFT.replace("$NODES", "1").format("model.lora.rank=8 model.lora.type=canonical_lora")
    with pytest.raises(InputError, match="'canonical_lora' is not priced"):
        read(script, LaunchContext())


@pytest.mark.parametrize(
    ("model", "plan", "about", "says"),
    [
        (DENSE, {"sharding": "zero3"}, {}, "sharding 'zero3'"),
        (
            DENSE,
            {"tp": 2, "tp_overlap": True, "grad_dtype": "fp32", "cross_entropy_fusion": "unfused"},
            {"framework": "nemo"},
            "tp_overlap",
        ),
        (DENSE, {"cross_entropy_fusion": "native"}, {}, "cross_entropy_fusion"),
        (DENSE, {}, {"precision": "fp8"}, "precision 'fp8'"),
        (DENSE, {"pp": 2, "rank_order": "tp-cp-ep-pp-dp"}, {}, "rank_order"),
        (DENSE, {"cuda_graphs": "attn"}, {}, "cuda_graphs"),
        (DENSE, {"main_weights": "fp16"}, {}, "main_weights"),
        (DENSE, {}, {"attention": "unfused"}, "attention 'unfused'"),
        (DENSE, {}, {"lengths": "512:3,2048:1", "batching": "padded"}, "batching padded"),
        (DENSE, {}, {"finetune": "lora:r=8,targets=q_proj"}, "adapters on q_proj"),
        (DENSE, {}, {"optimizer": "lion"}, "Lion"),
        ("gpt-oss-20b", {"ep": 8}, {}, "attention sinks"),
    ],
    ids=str,
)
def test_what_it_cannot_be_told_is_named(model: str, plan: dict[str, Any], about: dict[str, Any], says: str) -> None:
    with pytest.raises(AutoplanError, match=says):
        script_of(plan_file(model, plan, **about))
