"""Are arguments of transformers' Trainer read as they mean, what is not understood listed, and a plan read back?"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.hf_trainer.read import read, recognises
from autoplan.frameworks.launch_files import read_launch
from autoplan.launch.targets import exported
from autoplan.spec.plan_file import PlanFile
from framework_parsers import ask
from read_back import check_price, matters

SCRIPT = """#!/bin/bash
torchrun --nnodes 2 --nproc_per_node 8 run_clm.py \\
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


def test_a_script_without_fsdp_is_read_as_copies_and_says_so() -> None:
    launch = of()
    assert recognises("train.sh", SCRIPT.format(""))
    assert (launch.model.name, launch.training.seq_len, launch.training.precision) == ("llama3.1-8b", 4096, "bf16")
    assert (launch.plan.dp, launch.plan.sharding, launch.plan.recompute) == (16, "none", "full")
    assert (launch.plan.micro_batch, launch.plan.global_batch) == (2, 2 * 4 * 16)
    assert (launch.target, launch.framework) == ("hf-trainer", "transformers")
    assert matters(launch) == {"fsdp"}


def test_recomputation_goes_by_its_name_of_today_and_by_the_former_one() -> None:
    new = read(SCRIPT.format("").replace("--gradient_checkpointing", "--activation_checkpointing"), LaunchContext())
    assert replace(new, options=of().options) == of()


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
    harmless = "--weight_decay 0.1 --shuffle_dataset true --data_num_workers 4"
    launch = of(f"--fsdp --frobnicate 3 --torch_compile true --optim galore_adamw --full_determinism true {harmless}")
    assert matters(launch) == {"--frobnicate", "--torch_compile", "--optim", "--full_determinism"}
    assert launch.training.optimizer == "adam"


@pytest.mark.parametrize(
    ("word", "optimizer"),
    [
        ("adamw_bnb_8bit", "adam8bit-bnb"),
        ("adamw_torch_8bit", "adam8bit"),
        ("adamw_torch_4bit", "adam4bit"),
        ("adafactor", "adafactor"),
        ("sgd", "sgd"),
    ],
)
def test_the_optimizer_is_read(word: str, optimizer: str) -> None:
    assert of(f"--fsdp --optim {word}").training.optimizer == optimizer


def test_thirty_two_bits_and_preferences_are_refused() -> None:
    with pytest.raises(InputError, match="neither bf16 nor fp16"):
        read(SCRIPT.format("").replace("--bf16", ""), LaunchContext())
    with pytest.raises(InputError, match=r"kto\.py: only training on the next token"):
        read(SCRIPT.format("").replace("run_clm.py", "kto.py"), LaunchContext())
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


def test_arguments_in_a_table_of_a_table_are_of_another_program() -> None:
    arguments = '{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}'
    assert recognises("train.json", arguments)
    assert recognises("train.json", arguments.replace("}", ",}"))  # read tells the fault
    assert not recognises("train.json", f'{{"cmd": "sft", "args": {arguments}}}')


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
    script = SCRIPT.format("").replace("run_clm.py", program)
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


@pytest.mark.parametrize("command", ["trl sft", "torchrun --nproc_per_node 16 -m trl.scripts.sft"])
def test_commands_of_trl_are_read_with_its_defaults(command: str) -> None:
    script = f"{command} --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --packing"
    launch = read(script, LaunchContext(num_devices=16))
    assert (launch.training.precision, launch.training.seq_len, launch.plan.recompute) == ("bf16", 1024, "full")
    with pytest.raises(InputError, match=r"grpo\.py: only training on the next token"):
        read(script.replace("sft", "grpo"), LaunchContext(num_devices=16))


def test_what_trl_holds_otherwise_is_listed() -> None:
    script = "trl sft --model_name_or_path Qwen/Qwen3-8B --per_device_train_batch_size 1 --packing --fsdp --bf16 {}"

    def listed(more: str) -> set[str]:
        return matters(read(script.format(more), LaunchContext(num_devices=8)))

    kept = "--gradient_checkpointing false"
    assert listed(f"--loss_type chunked_nll --dtype bfloat16 {kept}") == {"--loss_type"}
    assert listed(f"--loss_type nll --dtype float32 --attn_implementation sdpa {kept}") == set()
    assert listed("--use_peft --dtype bfloat16") == {"gradient_checkpointing"}  # off in older and other programs


def test_a_deepspeed_file_without_the_section_of_the_precision_gets_it() -> None:
    """As accelerate/utils/dataclasses.py adds bf16 to a file that has fp16 on auto alone."""
    zero = '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}}'
    script = (
        "deepspeed --num_gpus 2 train.py --model_name_or_path Qwen/Qwen3-8B --bf16 --max_length 2048 "
        f"--per_device_train_batch_size 1 --deepspeed '{zero}'\n"
    )
    assert read(script, LaunchContext()).training.precision == "bf16"


def test_a_module_that_torchrun_starts_is_a_program() -> None:
    script = (
        "python -m torch.distributed.run --nproc_per_node 4 -m training.lm --model_name_or_path Qwen/Qwen3-8B --bf16 "
        "--max_length 2048 --per_device_train_batch_size 2\n"
    )
    assert read(script, LaunchContext()).plan.global_batch == 8
    within = "python job.py --gpus 4 -- " + script.replace("2\n", '2 --fsdp full_shard --fsdp_config "{}"\n')
    launch = read(within.format('{\\"xla\\": true, \\"xla_fsdp_grad_ckpt\\": true}'), LaunchContext())
    assert (launch.plan.num_devices, launch.plan.recompute) == (4, "full")


@pytest.mark.parametrize(("setting", "version"), [("export XLA_USE_SPMD=1", 1), ("true", 2)])
def test_a_batch_that_all_devices_share_is_listed(setting: str, version: int) -> None:
    script = (
        f"{setting}\npython run_clm.py --model_name_or_path Qwen/Qwen3-8B --bf16 --block_size 2048 --fsdp full_shard "
        f"""--per_device_train_batch_size 64 --fsdp_config '{{"xla_fsdp_v2": {str(version == 2).lower()}}}'\n"""
    )
    launch = read(script, LaunchContext(num_devices=64))
    assert any("shared by all devices" in row.why and row.matters for row in launch.unread)


def test_a_script_that_sources_another_that_is_missing_says_so() -> None:
    script = (
        "source settings.env\ntorchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen3-8B --bf16 "
        "--max_length 2048 --per_device_train_batch_size 1 --fsdp full_shard\n"
    )
    assert "source settings.env" in matters(read(script, LaunchContext()))


# -- export ------------------------------------------------------------------------------------------------------------

PLACE = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 4096, "framework": "transformers"}
HF_DEEPSPEED = {"framework": "deepspeed-hf"}
EXPECTED = """    --per_device_train_batch_size 2 --gradient_accumulation_steps 4
    --bf16 true --fp16 false
    --gradient_checkpointing false
    --fsdp --fsdp_config '{"version": 2, "reshard_after_forward": true, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", \
"activation_checkpointing": true, "cpu_ram_efficient_loading": false, "state_dict_type": "SHARDED_STATE_DICT", \
"cpu_offload": true}'
    --optim adamw_torch
    --attn_implementation flash_attention_2
    --loss_type nll
""".replace("\\\n", "")
EXPORTED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"sharding": "zero3", "recompute": "full", "offload": "parameters", "micro_batch": 2}, {}),
    ({"sharding": "none", "recompute": "full"}, {}),
    ({"sharding": "zero2"}, {"finetune": "qlora:r=64,dropout=0.05", "optimizer": "adam8bit"}),
    ({"sharding": "none"}, {"finetune": "lora:r=8,targets=q_proj+v_proj,quantize=int8,train=lm_head"}),
    ({"sharding": "zero3", "recompute": "full"}, {"finetune": "dora:r=16", "precision": "fp16"}),
    ({"sharding": "zero3"}, {"attention": "unfused"}),
    ({"sharding": "none", "main_weights": "bf16"}, {}),
    ({"sharding": "zero3", "main_weights": "bf16"}, {}),
    ({"sharding": "zero2", "wide_adapters": True}, {"finetune": "lora:r=8"}),
    ({"sharding": "zero1", "recompute": "full"}, {"optimizer": "lion", **HF_DEEPSPEED}),
    ({"sharding": "zero3", "offload": "parameters"}, HF_DEEPSPEED),
    ({"sharding": "zero2"}, {"precision": "fp16", "finetune": "lora:r=8", **HF_DEEPSPEED}),
    ({"sharding": "zero3"}, {"loss": "dpo"}),
    ({"sharding": "zero3"}, {"loss": "dpo", "reference": "none"}),
    ({"sharding": "none"}, {"loss": "reward", "finetune": "lora:r=8"}),
]
# Names beside those of the Trainer that TRL's programs take (trl/trainer/{model,sft,dpo,reward}_config.py, scripts).
OF_TRL = """
    model_name_or_path dataset_name max_length packing packing_strategy padding_free loss_type precompute_ref_log_probs
    attn_implementation dtype use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save
    lora_task_type use_dora load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage
"""


def plan_file(plan: dict[str, Any], **about: Any) -> PlanFile:
    return autoplan.estimate("llama3-8b", **PLACE | about, plan={"micro_batch": 1} | plan).file


def write(file: PlanFile, folder: Path) -> Path:
    for written in exported(file, "hf-trainer", "torchrun"):
        (folder / written.name).write_text(written.text)
    return folder / "launch.sh"


def arrays(script: str) -> str:
    """The options of a script, as it has them."""
    names = ("PLAN", "TUNING", "TRAINING", "DATA")
    return "".join(script.partition(f"\n{name}=(\n")[2].partition(")\n")[0] for name in names)


def test_a_plan_is_written_word_by_word(tmp_path: Path) -> None:
    script = write(plan_file(EXPORTED[0][0]), tmp_path).read_text()
    assert arrays(script).startswith(EXPECTED)
    assert "-m trl.scripts.sft \\\n" in script
    assert "BASE_MODEL=${BASE_MODEL:-meta-llama/Meta-Llama-3-8B}" in script


@pytest.mark.parametrize(("plan", "about"), EXPORTED, ids=str)
def test_a_plan_is_read_back_with_its_price(tmp_path: Path, plan: dict[str, Any], about: dict[str, str]) -> None:
    file = plan_file(plan, **about)
    launch = read_launch(write(file, tmp_path), LaunchContext())
    assert launch.plan == file.best.plan
    assert launch.framework == file.framework.name
    is_padded = "loss" in about or "attention" in about
    assert matters(launch) - {"fsdp"} == ({"--max_length"} if is_padded else set())
    if is_padded:
        assert launch.training == replace(file.training, batching="padded")
    else:
        check_price(file, launch, PLACE | about)


@pytest.mark.parametrize("batching", ["packed", "joined", "padded", "unpadded"])
def test_samples_become_sequences_as_they_were_priced(tmp_path: Path, batching: str) -> None:
    file = plan_file({"sharding": "zero3"}, lengths="512:3,2048:1", batching=batching)
    assert read_launch(write(file, tmp_path), LaunchContext()).training.batching == batching


def test_transformers_takes_the_words_as_they_are_meant(tmp_path: Path) -> None:
    files, questions = [plan_file(plan, **about) for plan, about in EXPORTED], []
    for at, file in enumerate(files):
        (tmp_path / str(at)).mkdir()
        script = write(file, tmp_path / str(at)).read_text()
        words = shlex.split(arrays(script), comments=True)
        if "--deepspeed" in script:
            words += ["--deepspeed", str(tmp_path / str(at) / "deepspeed.json")]
        program = script.partition("-m trl.scripts.")[2].split()[0]
        questions.append({"program": program, "words": words, "ranks": file.best.plan.num_devices})
    for file, answer in zip(files, ask("trainer_parser.py", questions), strict=True):
        plan, values = file.best.plan, answer["values"]
        assert {name.removeprefix("--") for name in answer["others"]} <= set(OF_TRL.split())
        assert (values["per_device_train_batch_size"], values["gradient_accumulation_steps"]) == (
            plan.micro_batch,
            plan.num_microbatches,
        )
        # FSDP makes fp32 of what it shards under mixed precision, and adapters multiply in fp32 without it.
        is_mixed = not plan.wide_adapters and (plan.main_weights != "bf16" or plan.sharding == "none")
        assert (values["bf16"], values["fp16"]) == (
            is_mixed and plan.precision == "bf16",
            is_mixed and plan.precision == "fp16",
        )
        recomputes = values["gradient_checkpointing"] or values.get("checkpoints", False)
        assert recomputes == (plan.recompute == "full")
        if file.framework.name == "deepspeed-hf":
            assert values["deepspeed"]["zero_optimization"]["stage"] == int(plan.sharding[-1])
            assert values["mismatches"] == []
        elif plan.sharding == "none":
            assert not values["fsdp"]
        else:
            assert (values["reshards"], values["offloads"]) == (
                plan.sharding == "zero3",
                plan.offload == "parameters",
            )


@pytest.mark.parametrize(
    ("plan", "about", "says"),
    [
        ({"tp": 2, "sharding": "zero3"}, {}, "cannot express tp 2 and cp 1: no argument sets a mesh"),
        ({"sharding": "zero3", "dp_replicate": 2}, {}, "cannot express dp_replicate 2: no argument sets a mesh"),
        ({"sharding": "zero3"}, {"finetune": "lora:r=8,quantize=int8"}, "zero3 of weights in int8: use nf4"),
        ({}, {"finetune": "lora:r=8,targets=q_proj"}, "adapters on q_proj alone"),
        ({}, {"finetune": "lora:r=8,targets=q_proj+all-linear"}, "all-linear stands alone"),
        ({}, {"finetune": "full:freeze=embed_tokens"}, "a frozen embed_tokens"),
        ({}, {"precision": "fp8"}, "precision 'fp8'"),
        ({}, {"attention": "flash1"}, "attention 'flash1'"),
        ({}, {"optimizer": "muon"}, "Muon"),
        ({"sharding": "zero1"}, HF_DEEPSPEED | {"optimizer": "adam4bit"}, "optimizer 'adam4bit' with DeepSpeed"),
        ({"sharding": "zero3", "tp": 2}, HF_DEEPSPEED, "tp 2 and cp 1: no argument sets a mesh"),
        ({}, {"loss": "reward", "lengths": "512:3,2048:1", "batching": "unpadded"}, "batching unpadded of preferences"),
    ],
    ids=str,
)
def test_what_its_arguments_cannot_express_is_refused(
    tmp_path: Path, plan: dict[str, Any], about: dict[str, str], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        write(plan_file({"sharding": "none"} | plan, **about), tmp_path)


def test_options_of_a_script_and_of_the_file_of_deepspeed_that_it_names_are_compared(tmp_path: Path) -> None:
    """The exported script names a file, too, which it is read with."""
    stage = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": stage}))
    words = "--model_name_or_path mistralai/Mistral-7B-Instruct-v0.3 --per_device_train_batch_size 4 --bf16 True"
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\ndeepspeed --num_gpus 8 train.py --deepspeed ds.json {words}\n")
    today = autoplan.search(cluster="a100-sxm:1x8", seq_len=2048, launch_file=tmp_path / "run.sh").file.today
    assert today is not None
    assert not today.no_options
    changed = {option.option: option.after for option in today.options}
    assert changed["zero_optimization.offload_optimizer.device"] is None
    assert "--bf16" not in changed


def test_words_of_a_program_of_its_own_are_listed() -> None:
    """scripts/interactive_ppo.sh of HALOs, without the words that it shares with others."""
    command = (
        "torchrun --nproc-per-node 8 launch.py ++model.batch_size=8 loss=sft --model_name_or_path Qwen/Qwen2.5-7B "
        "--per_device_train_batch_size 1 --max_length 2048 --gradient_checkpointing true --bf16 true --fsdp full_shard "
        "--gradient_accumulation_steps 1"
    )
    assert {"++model.batch_size", "loss"} <= {
        item.option for item in read(command, LaunchContext()).unread if item.matters
    }


def test_a_program_of_rewards_by_another_name_is_refused() -> None:
    """train/scripts/run_rm.sh of BELLE."""
    with pytest.raises(InputError, match=r"rm_train\.py: only training on the next token"):
        read(
            "torchrun --nproc-per-node 8 src/rm_train.py --per_device_train_batch_size 1 --seq_length 512 --bf16 true "
            "--model_name_or_path Qwen/Qwen2.5-7B",
            LaunchContext(),
        )


def test_blocks_of_a_program_of_trl_are_padded_samples() -> None:
    script = SCRIPT.replace("--max_length 4096 --packing true", "--block_size 4096")
    assert read(script.replace("run_clm.py", "sft.py").format(""), LaunchContext()).training.batching == "padded"
    assert read(script.format(""), LaunchContext()).training.batching == "joined"


def test_a_program_that_trains_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="do_train is off"):
        of("--do_train false --do_eval")
    assert of("--do_train").plan == of().plan


def test_the_record_of_a_run_is_no_script() -> None:
    record = "args:\n  - --per_device_train_batch_size\n  - 2\nper_device_train_batch_size:\n  value: 2\nbf16: true\n"
    with pytest.raises(InputError, match="per_device_train_batch_size must be a whole number"):
        read(f"model_name_or_path: llama3-8b\n{record}", LaunchContext(seq_len=1024, num_devices=8))


def test_adapters_that_nothing_turns_on_are_listed() -> None:
    table = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 1, "lora_r": 16, "bf16": True}
    context = LaunchContext(num_devices=8)
    assert "lora_r" in matters(read(json.dumps(table), context))
    assert "lora_r" not in matters(read(json.dumps(table | {"use_peft": False}), context))


def test_a_program_that_is_not_read_may_set_more_than_its_command() -> None:
    assert "finetune.py" in matters(read(SCRIPT.replace("run_clm.py", "src/finetune.py").format(""), LaunchContext()))
    assert not any(name.endswith(".py") for name in matters(of()))
