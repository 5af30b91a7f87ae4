"""Are the arguments of transformers' Trainer read as they mean, and what is not understood listed?"""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.hf_trainer.read import read, recognises
from autoplan.frameworks.launch_files import read_launch

SCRIPT = """#!/bin/bash
torchrun --nnodes 2 --nproc_per_node 8 train.py \\
    --model_name_or_path meta-llama/Llama-3.1-8B-Instruct \\
    --max_length 4096 --packing true \\
    --per_device_train_batch_size 2 \\
    --gradient_accumulation_steps 4 \\
    --bf16 --learning_rate 2e-5 --gradient_checkpointing \\
    --output_dir out {}
"""
ZERO3 = """{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "overlap_comm": true},
"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto"}"""


def of(more: str = "", **given: object) -> Launch:
    return read(SCRIPT.format(more), LaunchContext(**given))  # type: ignore[arg-type]


def matters(launch: Launch) -> set[str]:
    return {unread.option for unread in launch.unread if unread.matters}


def test_a_script_without_fsdp_is_read_as_copies_and_says_so() -> None:
    launch = of()
    assert recognises("train.sh", SCRIPT.format(""))
    assert (launch.model.name, launch.training.seq_len, launch.training.precision) == ("llama3.1-8b", 4096, "bf16")
    assert (launch.plan.dp, launch.plan.sharding, launch.plan.recompute) == (16, "none", "full")
    assert (launch.plan.micro_batch, launch.plan.global_batch) == (2, 2 * 4 * 16)
    assert (launch.target, launch.framework) == ("hf-trainer", "transformers")
    assert matters(launch) == {"fsdp"}


@pytest.mark.parametrize(
    ("words", "sharding", "recompute"),
    [
        ("--fsdp 'full_shard auto_wrap'", "zero3", "full"),
        ("--fsdp shard_grad_op", "zero2", "full"),
        ("--fsdp no_shard", "none", "full"),
        ("--fsdp", "zero3", "full"),
        ("""--fsdp --fsdp_config '{"reshard_after_forward": false}'""", "zero2", "full"),
        ("""--fsdp --fsdp_config '{"fsdp_version": 2, "fsdp_reshard_after_forward": true}'""", "zero3", "full"),
        ("""--fsdp --fsdp_config '{"version": 1, "reshard_after_forward": "shard_grad_op"}'""", "zero2", "full"),
        ("--fsdp full_shard --gradient_checkpointing false", "zero3", "none"),
        (
            """--fsdp --gradient_checkpointing false --fsdp_config '{"activation_checkpointing": true}'""",
            "zero3",
            "full",
        ),
    ],
)
def test_fsdp_is_read_as_the_trainer_takes_it(words: str, sharding: str, recompute: str) -> None:
    launch = of(words)
    assert (launch.plan.sharding, launch.plan.recompute, launch.plan.dp) == (sharding, recompute, 16)


def test_states_on_the_host_are_read_and_remarked_where_passes_do_not_fetch_them() -> None:
    for words in ("--fsdp 'full_shard offload'", """--fsdp --fsdp_config '{"cpu_offload": true}'"""):
        assert of(words).plan.offload == "parameters"
    partly = of("--fsdp 'shard_grad_op offload'")
    assert (partly.plan.sharding, partly.plan.offload) == ("zero2", "none")
    assert "--fsdp" in matters(partly)
    assert "fsdp_config.cpu_offload" in matters(of("""--fsdp shard_grad_op --fsdp_config '{"cpu_offload": true}'"""))


def test_copies_of_shards_are_refused() -> None:
    with pytest.raises(InputError, match="hybrid_shard"):
        of("--fsdp hybrid_shard")


def test_a_deepspeed_file_beside_the_script_is_filled_in(tmp_path: Path) -> None:
    (tmp_path / "zero3.json").write_text(ZERO3)
    (tmp_path / "train.sh").write_text(SCRIPT.format("--deepspeed zero3.json"))
    launch = read_launch(tmp_path / "train.sh", LaunchContext())
    assert (launch.target, launch.framework) == ("hf-trainer", "deepspeed-hf")
    plan = launch.plan
    assert (plan.sharding, plan.dp, plan.micro_batch, plan.global_batch) == ("zero3", 16, 2, 128)
    assert (plan.recompute, launch.training.precision) == ("full", "bf16")
    assert ("zero_optimization.stage", "3") in launch.options


def test_a_deepspeed_file_with_another_batch_is_refused_as_the_trainer_does(tmp_path: Path) -> None:
    text = ZERO3.replace('"train_micro_batch_size_per_gpu": "auto"', '"train_micro_batch_size_per_gpu": 4')
    (tmp_path / "zero3.json").write_text(text)
    (tmp_path / "train.sh").write_text(SCRIPT.format("--deepspeed zero3.json"))
    with pytest.raises(InputError, match=r"per_device_train_batch_size is 2.*4.*make them equal"):
        read_launch(tmp_path / "train.sh", LaunchContext())


def test_a_deepspeed_file_that_is_not_at_hand_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"'ds\.json', which is not at hand"):
        of("--deepspeed ds.json")


def test_options_that_are_not_known_are_listed_and_harmless_ones_do_not_matter() -> None:
    launch = of("--fsdp --frobnicate 3 --torch_compile true --optim galore_adamw --weight_decay 0.1")
    assert matters(launch) == {"--frobnicate", "--torch_compile", "--optim"}
    assert launch.training.optimizer == "adam"


@pytest.mark.parametrize(
    ("word", "optimizer"),
    [("adamw_bnb_8bit", "adam8bit"), ("adamw_torch_4bit", "adam4bit"), ("adafactor", "adafactor"), ("sgd", "sgd")],
)
def test_the_optimizer_is_read(word: str, optimizer: str) -> None:
    assert of(f"--fsdp --optim {word}").training.optimizer == optimizer


def test_thirty_two_bits_and_preferences_are_refused() -> None:
    with pytest.raises(InputError, match="neither bf16 nor fp16"):
        read(SCRIPT.format("").replace("--bf16", ""), LaunchContext())
    with pytest.raises(InputError, match=r"kto\.py: only training on the next token"):
        read(SCRIPT.format("").replace("train.py", "kto.py"), LaunchContext())
    with pytest.raises(InputError, match="beta"):
        of("--beta 0.1")


def test_sequences_that_are_not_packed_are_remarked() -> None:
    text = SCRIPT.format("--fsdp").replace("--packing true", "")
    assert matters(read(text, LaunchContext())) == {"--max_length"}
    launch = read(text, LaunchContext(seq_len=700))
    assert (launch.training.seq_len, matters(launch)) == (700, set())


TRL = """model_name_or_path: Qwen/Qwen3-8B
per_device_train_batch_size: 1
use_peft: true
lora_r: 32
lora_target_modules: [q_proj, v_proj]
packing: true
"""


def test_yaml_of_trl_has_the_defaults_of_trl() -> None:
    assert recognises("sft.yaml", TRL)
    launch = read(TRL, LaunchContext(num_devices=4))
    assert (launch.training.precision, launch.training.seq_len, launch.plan.recompute) == ("bf16", 1024, "full")
    tuning = launch.training.finetuning
    assert tuning is not None
    assert (tuning.rank, tuning.targets, tuning.dropout) == (32, ("q_proj", "v_proj"), 0.05)


def test_the_model_the_devices_and_the_length_are_asked_for() -> None:
    text = "#!/bin/bash\npython train.py --per_device_train_batch_size 1 --bf16 true"
    for more, flag in (("", "--model"), (" --model_name_or_path some/other", "--model")):
        with pytest.raises(InputError, match=flag):
            read(text + more, LaunchContext())
    with pytest.raises(InputError, match="--seq-len"):
        read(f"{text} --model_name_or_path Qwen/Qwen3-8B", LaunchContext())
    with pytest.raises(InputError, match="--devices"):
        read(TRL, LaunchContext())


def started_by(command: str) -> Launch:
    script = SCRIPT.format("").replace("torchrun --nnodes 2 --nproc_per_node 8", command)
    return read(script.replace("#!/bin/bash", "export CUDA_VISIBLE_DEVICES=0,1"), LaunchContext())


def test_a_launcher_says_more_than_the_devices_it_sees() -> None:
    assert started_by("torchrun --nproc_per_node 1").plan.num_devices == 1
    assert started_by("deepspeed --num_gpus 2").plan.num_devices == 2
    assert started_by("deepspeed --include localhost:0,2").plan.num_devices == 2
    assert started_by("deepspeed --include=worker-0:0,1@worker-1:2,3").plan.num_devices == 4
    for alone in ("python", "python3", "/usr/bin/python3.11"):
        with pytest.raises(InputError, match="pass --devices"):
            started_by(alone)


def test_adapters_of_a_program_of_its_own_are_not_left_out_silently() -> None:
    for option in ("--lora_r 8", "--load_in_4bit True", "--lora_rank 8", "--use_lora True"):
        assert option.split()[0] in matters(of(option))
    assert "--lora_r" not in matters(of("--use_peft --lora_r 8"))


def test_switches_that_are_off_cost_nothing() -> None:
    switches = "--fsdp --torch_compile False --group_by_length false --use_liger_kernel False"
    assert matters(of(switches)) == set()
    assert "torch_compile" in {name.lstrip("-") for name in matters(of("--fsdp --torch_compile True"))}


def test_what_the_trainer_ignores_or_refuses() -> None:
    assert of("""--fsdp_config '{"reshard_after_forward": true}'""").plan.sharding == "none"
    assert of("--deepspeed false").plan.sharding == "none"
    with pytest.raises(InputError, match="fsdp 'ful_shard' is not one of"):
        of("--fsdp ful_shard")
    with pytest.raises(InputError, match="both on"):
        of("--fp16")


@pytest.mark.parametrize(
    ("program", "is_priced"), [("train_support.py", True), ("export_model.py", True), ("run_dpo.py", False)]
)
def test_losses_are_told_by_whole_words(program: str, is_priced: bool) -> None:
    script = SCRIPT.format("").replace("train.py", program)
    if is_priced:
        assert read(script, LaunchContext()).plan.dp == 16
    else:
        with pytest.raises(InputError, match="only training on the next token"):
            read(script, LaunchContext())


def test_a_table_of_a_plain_program_recomputes_only_if_it_says_so() -> None:
    plain = """{"model_name_or_path": "meta-llama/Llama-3.1-8B", "per_device_train_batch_size": 1, "bf16": true,
    "block_size": 2048}"""
    assert read(plain, LaunchContext(num_devices=8)).plan.recompute == "none"
    assert read(plain.replace("block_size", "max_length"), LaunchContext(num_devices=8)).plan.recompute == "full"
