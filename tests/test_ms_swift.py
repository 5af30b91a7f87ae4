"""Are scripts of ms-swift read as they start (`megatron sft`, `swift sft`), and a plan read back as written?"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import LaunchContext
from autoplan.frameworks.ms_swift.read import read, recognises
from autoplan.launch.targets import exported
from autoplan.spec.plan_file import PlanFile
from megatron_plans import MATRIX
from read_back import check_price, matters

MEGATRON = """# 2 * 62GiB
NPROC_PER_NODE=8 \\
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
megatron sft \\
    --model Qwen/Qwen3-30B-A3B \\
    --dataset 'some/data#2000' \\
    --tuner_type lora --lora_rank 8 --target_modules all-linear \\
    --tensor_model_parallel_size 2 --sequence_parallel true \\
    --expert_model_parallel_size 4 \\
    --micro_batch_size 2 --global_batch_size 16 \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 \\
    --packing true --max_length 8192 --no_save_optim true {}
"""
TRAINER = """NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 \\
swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type full --torch_dtype bfloat16 \\
    --per_device_train_batch_size 2 --max_length 4096 --packing true {}
"""


def test_a_script_of_megatron_is_read() -> None:
    text = MEGATRON.format("")
    assert recognises("moe.sh", text)
    launch = read(text, LaunchContext())
    assert (launch.target, launch.framework, launch.model.name) == ("ms-swift", "megatron-core", "qwen3-30b-a3b")
    plan = launch.plan
    assert (plan.tp, plan.sp, plan.ep, plan.etp, plan.dp, plan.micro_batch, plan.global_batch) == (
        *(2, True, 4, 1, 4),
        *(2, 16),
    )
    assert (plan.recompute, plan.sharding, launch.training.precision) == ("full", "zero1", "bf16")
    assert launch.training.seq_len == 8192
    tuning = launch.training.finetuning
    assert tuning is not None
    # All linear layers of Megatron-Core are four a layer: q, k and v are one product, and so are gate and up.
    products = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert (tuning.rank, tuning.targets, tuning.dropout) == (8, products, 0.05)
    # Dropout is none, as the models of the hub have it, where Megatron-LM has a tenth.
    assert matters(launch) == set()
    assert launch.training.batching == "packed"
    assert read(text.replace("--packing true", ""), LaunchContext()).training.batching == "unpadded"
    padded = text.replace("--packing true", "--padding_free false")
    assert read(padded, LaunchContext()).training.batching == "padded"


def test_a_search_from_a_script_finds_what_its_arguments_can_say(tmp_path: Path) -> None:
    """Megatron-Core alone would be started with HybridEP, which no argument chooses."""
    (tmp_path / "run.sh").write_text(MEGATRON.format(""))
    place = {"cluster": "h100-sxm:1x8", "fix": {"ep": 4}}
    found = autoplan.search(launch_file=tmp_path / "run.sh", **place)
    assert found.file.best.plan.dispatcher in ("alltoall", "deepep")
    assert found.file.today is not None
    assert not found.file.today.no_options
    elsewhere = autoplan.search(launch_file=tmp_path / "run.sh", framework="megatron-core", **place)
    assert elsewhere.file.best.plan.dispatcher == "hybridep"
    assert found.file.best.step_s >= elsewhere.file.best.step_s


def test_the_number_of_virtual_stages_is_that_of_a_rank() -> None:
    more = "--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 3 --tuner_type full"
    launch = read(MEGATRON.format(more).replace("--expert_model_parallel_size 4", ""), LaunchContext())
    assert (launch.plan.pp, launch.plan.vp, launch.plan.dp) == (2, 3, 2)
    assert launch.training.finetuning is None


def test_a_script_of_the_trainer_is_read() -> None:
    launch = read(TRAINER.format("--deepspeed zero2"), LaunchContext())
    assert (launch.target, launch.framework, launch.model.name) == ("ms-swift", "deepspeed-hf", "qwen2.5-7b")
    plan = launch.plan
    # 16 sequences a step where nothing says the steps of accumulation: 16 / 2 / 4.
    assert (plan.sharding, plan.dp, plan.micro_batch, plan.global_batch) == ("zero2", 4, 2, 16)
    assert (plan.recompute, plan.offload) == ("full", "none")
    offloaded = read(TRAINER.format("--deepspeed zero3_offload --gradient_accumulation_steps 4"), LaunchContext())
    assert (offloaded.plan.sharding, offloaded.plan.offload) == ("zero3", "parameters")
    assert offloaded.plan.global_batch == 2 * 4 * 4
    assert not offloaded.plan.grad_reduce_overlap  # overlap_comm of all files in swift/config
    halves = TRAINER.replace("NPROC_PER_NODE=4", "NPROC_PER_NODE=2").format("--deepspeed zero2")
    assert "CUDA_VISIBLE_DEVICES" in matters(read(halves, LaunchContext())) - matters(launch)
    alone = read(TRAINER.replace("NPROC_PER_NODE=4", "").format("--tuner_type lora"), LaunchContext())
    assert alone.plan.num_devices == 1  # swift/cli/main.py: one process, which spreads the layers over what it sees
    assert "CUDA_VISIBLE_DEVICES" in matters(alone)


def test_adapters_are_the_trainers_default() -> None:
    launch = read(TRAINER.format("--quant_bits 4").replace("--tuner_type full", ""), LaunchContext())
    tuning = launch.training.finetuning
    assert tuning is not None
    assert (tuning.rank, tuning.quantization) == (8, "nf4-dq")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--tuner_type longlora", "tuner_type 'longlora'"),
        ("--task_type seq_cls", "task_type seq_cls"),
        ("--rlhf_type dpo", "rlhf_type"),
        ("--quant_bits 3", "quant_bits 3"),
    ],
)
@pytest.mark.parametrize("script", [MEGATRON, TRAINER])
def test_what_is_not_priced_is_refused(script: str, more: str, says: str) -> None:
    text = script.format(more)
    with pytest.raises(InputError, match=says):
        read(text.replace("--tuner_type full", "--tuner_type lora") if "quant" in more else text, LaunchContext())


def test_what_is_not_known_is_listed() -> None:
    assert matters(read(MEGATRON.format("--frobnicate 3"), LaunchContext())) == {"--frobnicate"}
    assert matters(read(MEGATRON.format("").replace("--packing true", ""), LaunchContext())) == {"--max_length"}
    launch = read(TRAINER.format("--deepspeed zero2 --attn_impl eager --use_galore true"), LaunchContext())
    assert matters(launch) == {"--use_galore"}
    assert launch.plan.attention == "unfused"
    assert matters(read(MEGATRON.format("--attn_impl eager"), LaunchContext())) == {"--attn_impl"}


def test_the_type_of_the_weights_says_the_precision() -> None:
    """swift/arguments/base_args/model_args.py, _init_mixed_precision."""
    launch = read(TRAINER.replace("--torch_dtype bfloat16", "").format("--torch_dtype float16"), LaunchContext())
    assert launch.training.precision == "fp16"


def test_other_ways_to_quantise_are_listed() -> None:
    script = TRAINER.replace("--tuner_type full", "")
    other = read(script.format("--quant_bits 4 --quant_method hqq"), LaunchContext())
    assert "--quant_method" in {unread.option for unread in other.unread if unread.matters}
    plain = read(script.format("--quant_bits 4 --bnb_4bit_use_double_quant false"), LaunchContext()).training.finetuning
    assert plain is not None
    assert plain.quantization == "nf4"


def test_predictions_of_further_tokens_are_those_that_the_script_asks_for() -> None:
    script = MEGATRON.replace("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3").replace("--tuner_type lora", "")
    assert read(script.format(""), LaunchContext()).model.num_mtp_layers == 0
    assert read(script.format("--mtp_num_layers 1"), LaunchContext()).model.num_mtp_layers == 1


# -- export ------------------------------------------------------------------------------------------------------------

PLACE = {"cluster": "h100-sxm:2x8", "global_batch": 64, "seq_len": 4096, "framework": "megatron-core"}
DENSE, EXPERTS, LATENTS = "llama3-8b", "qwen3-30b-a3b", "deepseek-v2-lite"
# Of a dense model, the words behind the program that a person does not choose.
EXPECTED = """    --micro_batch_size 1 --global_batch_size 64
    --tensor_model_parallel_size 2 --sequence_parallel true
    --context_parallel_size 2 --cp_comm_type p2p
    --pipeline_model_parallel_size 2
    --virtual_pipeline_model_parallel_size 2
    --use_distributed_optimizer true
    --overlap_grad_reduce true --overlap_param_gather true
    --recompute_granularity full --recompute_method block --recompute_num_layers 3
    --bf16 true
    --apply_rope_fusion true --cross_entropy_loss_fusion false
"""
EXPECTED_OF_EXPERTS = """    --micro_batch_size 2 --global_batch_size 64
    --tensor_model_parallel_size 1
    --pipeline_model_parallel_size 1
    --expert_model_parallel_size 8 --expert_tensor_parallel_size 1
    --moe_token_dispatcher_type flex
    --overlap_grad_reduce true
    --bf16 true
    --moe_grouped_gemm true --moe_permute_fusion true --moe_enable_deepep true
    --recompute_granularity none
    --apply_rope_fusion true --cross_entropy_loss_fusion false --use_distributed_optimizer false
"""
# Arguments of a plan that it has (swift/megatron/arguments/megatron_args.py, MegatronArguments).
ARGUMENTS = """
    micro_batch_size global_batch_size recompute_granularity recompute_method recompute_num_layers recompute_modules
    apply_rope_fusion gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl attention_backend
    use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    use_distributed_optimizer use_megatron_fsdp data_parallel_sharding_strategy tensor_model_parallel_size
    pipeline_model_parallel_size sequence_parallel context_parallel_size cp_comm_type tp_comm_overlap
    overlap_grad_reduce overlap_param_gather virtual_pipeline_model_parallel_size pipeline_model_parallel_layout
    expert_model_parallel_size expert_tensor_parallel_size fp8_format fp8_recipe fp8_param_gather fp4_format fp4_recipe
    fp4_param_gather fp16 bf16 accumulate_allreduce_grads_in_fp32 moe_token_dispatcher_type moe_enable_deepep
    moe_grouped_gemm moe_permute_fusion moe_expert_capacity_factor moe_pad_expert_input_to_capacity mtp_num_layers
"""


def test_the_file_that_fsdp_names_is_read(tmp_path: Path) -> None:
    launch = read(TRAINER.format("--fsdp fsdp2"), LaunchContext())
    assert (launch.plan.sharding, launch.plan.recompute, launch.plan.offload) == ("zero3", "full", "none")
    table = {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"reshard_after_forward": True}}
    (tmp_path / "mine.json").write_text(json.dumps(table))
    script = TRAINER.format("--fsdp conf/../mine.json --gradient_checkpointing false")
    with pytest.raises(InputError, match=r"the plan is in 'conf/../mine.json', which is not at hand"):
        read(script, LaunchContext(folder=tmp_path))
    launch = read(script.replace("conf/../", "./"), LaunchContext(folder=tmp_path))
    assert (launch.plan.sharding, launch.plan.recompute, launch.plan.offload) == ("zero3", "none", "parameters")


def plan_file(model: str, plan: dict[str, Any], **about: Any) -> PlanFile:
    return autoplan.estimate(model, **PLACE | about, plan={"micro_batch": 1} | plan).file


def script_of(file: PlanFile) -> str:
    return exported(file, "ms-swift", "torchrun")[0].text


def array(script: str, name: str) -> str:
    """The lines of an array of a script."""
    return script.partition(f"{name}=(\n")[2].partition(")\n")[0]


def test_a_plan_is_written_word_by_word() -> None:
    plan = {"tp": 2, "cp": 2, "pp": 2, "vp": 2, "schedule": "interleaved", "recompute": "full:3"}
    script = script_of(plan_file(DENSE, plan))
    assert array(script, "PLAN") == EXPECTED
    assert array(script, "TUNING") == "    --tuner_type full\n    --max_length 4096 --packing true\n"
    assert "BASE_MODEL=${BASE_MODEL:-meta-llama/Meta-Llama-3-8B}" in script
    assert '    -m swift.cli._megatron.sft \\\n    "${PLAN[@]}" "${TUNING[@]}"' in script
    assert '--model "$BASE_MODEL" --train_iters "$STEPS" "$@"\n' in script


def test_what_its_defaults_mean_otherwise_is_written() -> None:
    plan = {"ep": 8, "dispatcher": "deepep", "sharding": "none", "micro_batch": 2}
    file = plan_file(EXPERTS, plan, cluster="h100-sxm:1x8")
    assert array(script_of(file), "PLAN") == EXPECTED_OF_EXPERTS


def test_no_argument_is_written_that_it_has_not() -> None:
    num_written = 0
    for file in MATRIX.values():
        with contextlib.suppress(InputError):
            names = re.findall(r"(?<!\S)--(\w+)", array(script_of(file), "PLAN"))
            assert set(names) <= set(ARGUMENTS.split())
            num_written += 1
    assert num_written > len(MATRIX) // 2


def test_adapters_are_written_on_the_products_of_megatron_core() -> None:
    file = plan_file(DENSE, {"tp": 2}, finetune="lora:r=16,targets=linear_qkv+linear_fc1")
    assert array(script_of(file), "TUNING") == (
        "    --tuner_type lora --lora_rank 16 --lora_alpha 32 --lora_dropout 0.0\n"
        "    --target_modules linear_qkv linear_fc1\n"
        "    --max_length 4096 --packing true\n"
    )


def test_megatron_fsdp_is_given_several_queues() -> None:
    script = script_of(plan_file(DENSE, {"sharding": "zero3", "gradient_accumulation_fusion": False}))
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32 " in script
    assert "--use_megatron_fsdp true --data_parallel_sharding_strategy optim_grads_params" in script
    assert "--gradient_accumulation_fusion false" in script


@pytest.mark.parametrize(
    ("model", "plan", "about"),
    [
        (DENSE, {"tp": 2, "pp": 2}, {}),
        (DENSE, {"tp": 2, "sp": False, "recompute": "selective"}, {"precision": "fp16"}),
        (DENSE, {"pp": 2, "layers_per_chunk": [15, 17]}, {}),
        (DENSE, {"sharding": "zero3", "recompute": "full"}, {}),
        (DENSE, {"cp": 2, "cp_kind": "all_to_all", "tp": 2}, {}),
        (DENSE, {"main_weights": "remainders", "moment_dtype": "bf16", "grad_dtype": "bf16_main"}, {}),
        (DENSE, {"narrow_params": True}, {"precision": "fp8"}),
        (DENSE, {"tp": 2}, {"finetune": "lora:r=16,targets=linear_qkv+linear_fc1"}),
        (DENSE, {}, {"precision": "nvfp4", "cluster": "b200:2x8"}),
        (EXPERTS, {"ep": 8, "tp": 2, "etp": 2, "recompute": "layernorm+moe_act"}, {}),
        (EXPERTS, {"ep": 8, "token_dropping": True}, {}),
        (LATENTS, {"ep": 8, "rope_fusion": True}, {}),
        (LATENTS, {"ep": 8, "pp": 2, "recompute": "mla_up_proj"}, {}),
        ("gpt-oss-20b", {"ep": 8}, {}),
        ("deepseek-v3", {"ep": 8, "pp": 2}, {}),
    ],
    ids=str,
)
def test_a_plan_is_read_back_with_its_price(model: str, plan: dict[str, Any], about: dict[str, Any]) -> None:
    file = plan_file(model, plan, **about)
    script = script_of(file)
    launch = read(script, LaunchContext())
    assert replace(launch.plan, layers_per_chunk=None) == replace(file.best.plan, layers_per_chunk=None)
    assert matters(launch) == set()
    check_price(file, launch, PLACE | about)


def test_a_model_of_ones_own_is_named_by_the_environment() -> None:
    file = plan_file(DENSE, {"tp": 2})
    file = replace(file, model=replace(file.model, name="mine", num_layers=30))
    script = script_of(file)
    assert "BASE_MODEL=${BASE_MODEL:?" in script
    assert read(script, LaunchContext(model=file.model)).plan == file.best.plan


@pytest.mark.parametrize("batching", ["packed", "unpadded", "padded"])
def test_samples_become_sequences_as_they_were_priced(batching: str) -> None:
    file = plan_file(DENSE, {"tp": 2}, lengths="512:3,2048:1", batching=batching)
    assert read(script_of(file), LaunchContext()).training.batching == batching


@pytest.mark.parametrize(
    ("plan", "about", "says"),
    [
        ({"cuda_graphs": "layer"}, {}, "has no option for cuda_graphs 'layer': leave it out"),
        ({"rank_order": "tp-cp-ep-pp-dp", "pp": 2}, {}, "no option for rank_order"),
        ({"offload": "optimizer"}, {}, "no option for offload 'optimizer'"),
        ({"dp_replicate": 2}, {}, "no option for dp_replicate 2 with zero1: shard over all"),
        ({"grad_dtype": "bf16"}, {}, "no option for grad_dtype 'bf16'"),
        ({"narrow_params": True}, {"precision": "mxfp8", "cluster": "b200:2x8"}, "no option for narrow_params"),
        ({}, {"attention": "unfused"}, "attention 'unfused'"),
        ({}, {"lengths": "512:3,2048:1", "batching": "joined"}, "cannot express batching joined: plan with packed"),
        ({}, {"finetune": "dora:r=8,targets=linear_qkv"}, "cannot express DoRA"),
        ({}, {"finetune": "lora:r=8"}, "adapters on q_proj, v_proj .it takes linear_qkv"),
    ],
    ids=str,
)
def test_what_it_cannot_be_told_is_named(plan: dict[str, Any], about: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        script_of(plan_file(DENSE, plan, **about))


def test_models_that_a_checkpoint_does_not_tell_it_are_refused() -> None:
    with pytest.raises(InputError, match="cannot express learned positions of model 'gpt3-175b'"):
        script_of(plan_file("gpt3-175b", {"tp": 8, "pp": 2}, seq_len=2048))
    file = plan_file(DENSE, {"tp": 2})
    with pytest.raises(InputError, match="cannot express the window of model"):
        script_of(replace(file, model=replace(file.model, name="mine", window=128)))
