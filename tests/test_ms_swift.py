"""Are scripts of ms-swift read as they start: `megatron sft` on Megatron-Core, `swift sft` on the Trainer?"""

from __future__ import annotations

import pytest

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.ms_swift.read import read, recognises

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


def matters(launch: Launch) -> set[str]:
    return {unread.option for unread in launch.unread if unread.matters}


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
    assert (tuning.rank, tuning.targets, tuning.dropout) == (8, ("all-linear",), 0.05)
    # Dropout is none, as the models of the hub have it, where Megatron-LM has a tenth.
    assert matters(launch) == set()
    assert launch.training.batching == "packed"
    assert read(text.replace("--packing true", ""), LaunchContext()).training.batching == "unpadded"
    padded = text.replace("--packing true", "--padding_free false")
    assert read(padded, LaunchContext()).training.batching == "padded"


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
    assert matters(launch) == {"--attn_impl", "--use_galore"}


def test_other_ways_to_quantise_are_listed() -> None:
    script = TRAINER.replace("--tuner_type full", "")
    other = read(script.format("--quant_bits 4 --quant_method hqq"), LaunchContext())
    assert "--quant_method" in {unread.option for unread in other.unread if unread.matters}
    plain = read(script.format("--quant_bits 4 --bnb_4bit_use_double_quant false"), LaunchContext()).training.finetuning
    assert plain is not None
    assert plain.quantization == "nf4"
