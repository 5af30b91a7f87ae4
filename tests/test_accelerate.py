"""Does Accelerate accept what is exported for it, refuse what the rules refuse, and is the plan read back?"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import autoplan
from autoplan.base.errors import InputError
from autoplan.frameworks.accelerate.read import read, recognises
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.launch_files import read_launch
from autoplan.launch.targets import exported, job_of
from autoplan.readers.model import load_model
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from damage import damaged
from framework_parsers import ask
from read_back import matters
from test_megatron_lm_export import DEEPSEEK, LLAMA_8B, plan_file_of

FSDP = Framework(name="pytorch-fsdp", rules="fsdp2")


def fsdp(model: ModelSpec = LLAMA_8B, **plan: Any) -> PlanFile:
    return replace(plan_file_of(model, **{"sharding": "zero3", **plan}), framework=FSDP)


PLANS: dict[str, PlanFile] = {
    "one device": fsdp(sharding="none"),
    "copies": fsdp(dp_shard=8, sharding="none", micro_batch=2),
    "sharded": fsdp(dp_shard=16, recompute="full"),
    "kept whole": fsdp(dp_shard=8, sharding="zero2", precision="fp8"),
    "in copies": fsdp(dp_shard=8, dp_replicate=3, global_batch=48),
    "tensors": fsdp(tp=4, dp_shard=6, global_batch=24),
    "context": fsdp(cp=8, dp_shard=2),
    "all": fsdp(tp=2, cp=2, dp_shard=2, dp_replicate=2, precision="fp16"),
    "experts": fsdp(replace(DEEPSEEK, num_mtp_layers=0), dp_shard=64),
}


def text_of(plan_file: PlanFile) -> str:
    (file,) = job_of(plan_file, "accelerate").files
    return file.text


def given_of(plan_file: PlanFile) -> LaunchContext:
    plan = plan_file.best.plan
    batch = (("PER_DEVICE_TRAIN_BATCH_SIZE", str(plan.micro_batch)),)
    steps = (("GRADIENT_ACCUMULATION_STEPS", str(plan.num_microbatches)),)
    is_unsharded = plan.sharding == "none" or plan.dp_shard * plan.cp == 1
    recompute = (("GRADIENT_CHECKPOINTING", str(plan.recompute == "full")),) if is_unsharded else ()
    return LaunchContext(model=plan_file.model, seq_len=plan_file.training.seq_len, variables=batch + steps + recompute)


def assert_read_back(plan_file: PlanFile) -> None:
    text = text_of(plan_file)
    assert recognises("accelerate.yaml", text)
    launch = read(text, given_of(plan_file))
    assert (launch.model, launch.training, launch.plan) == (plan_file.model, plan_file.training, plan_file.best.plan)
    assert launch.unread == ()


@pytest.mark.parametrize("name", PLANS)
def test_a_config_is_read_back_to_its_plan(name: str) -> None:
    assert_read_back(PLANS[name])


@pytest.mark.parametrize("changes", [{}, {"recompute": "full", "sharding": "none"}, {"main_weights": "bf16"}])
def test_an_exported_pair_is_read_together(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan_file = fsdp(dp_shard=8, micro_batch=2, global_batch=64, **changes)
    plan_file = replace(plan_file, training=replace(plan_file.training, optimizer="lion"))
    for written in exported(plan_file, "accelerate", "torchrun"):
        (tmp_path / written.name).write_text(written.text)
    given_ = LaunchContext(model=plan_file.model, seq_len=plan_file.training.seq_len)
    launch = read_launch(tmp_path / "accelerate.yaml", given_)
    assert (launch.training, launch.plan) == (plan_file.training, plan_file.best.plan)
    assert [unread.option for unread in launch.unread if unread.matters] == []


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((1, 3)),
    st.sampled_from(("none", "zero2", "zero3")),
    st.sampled_from(("none", "full")),
    st.sampled_from(("bf16", "fp16", "fp8")),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_whatever_it_runs_is_read_back(
    tp: int, cp: int, shard: int, replicate: int, sharding: str, recompute: str, precision: str, micro: int, steps: int
) -> None:
    if sharding == "none" or shard * cp == 1:  # the split of data parallelism means nothing then
        replicate, sharding = 1, "none"
    try:
        plan_file = fsdp(
            tp=tp,
            cp=cp,
            dp_shard=shard,
            dp_replicate=replicate,
            sharding=sharding,
            recompute=recompute,
            precision=precision,
            micro_batch=micro,
            global_batch=micro * steps * shard * replicate,
        )
        text_of(plan_file)
    except InputError:
        assume(False)
    assert_read_back(plan_file)


REFUSED: dict[str, tuple[PlanFile, str]] = {
    "stages": (fsdp(pp=2), "pp 2: it has no pipelines"),
    "sequence": (fsdp(tp=2, sp=True, dp_shard=4), "no sequence parallelism"),
    "selective": (fsdp(dp_shard=8, recompute="selective"), "recompute 'selective': use"),
    "some layers": (fsdp(dp_shard=8, recompute="full", recompute_num_layers=2), "recompute of 2 layers"),
    "unsharded tensors": (fsdp(tp=2, dp_shard=4, sharding="none"), "tp or cp of states that are not sharded"),
    "context in copies": (fsdp(cp=2, dp_replicate=4), "in copies of dp_shard 1"),
    "narrow": (fsdp(dp_shard=8, precision="mxfp8"), "precision 'mxfp8'"),
    "a broken rule": (fsdp(dp_shard=8, sharding="zero1"), "use 'none' or 'zero2' or 'zero3'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_in_one_line(case: str) -> None:
    plan_file, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        text_of(plan_file)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "duties"),
    [("sharded", []), ("tensors", ["tp_plan='auto'"]), ("all", ["tp_plan='auto'", "maybe_context_parallel"])],
)
def test_what_the_program_must_do_is_said(name: str, duties: list[str]) -> None:
    """Without them each of 4 ranks held half of the model, not a quarter, and nothing complained."""
    job = job_of(PLANS[name], "accelerate")
    for word in ("tp_plan='auto'", "maybe_context_parallel"):
        assert (word in job.files[0].text) == (word in job.variables[0].note) == (word in duties)


def test_hostile_names_stay_inert() -> None:
    line = "x'\"\nnum_processes: 3\r\n$(touch x) \u2028 \\"
    plan_file = fsdp(dp_shard=8)
    assert yaml.safe_load(text_of(replace(plan_file, command=line, versions={line: line}))) == yaml.safe_load(
        text_of(plan_file)
    )


# -- what people run --------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "torch_native_parallelism/configs/cp.yaml": (
        {"cp": 8, "sharding": "zero3", "recompute": "full", "global_batch": 8},
        {"parallelism_config.parallelism_config_cp_comm_strategy"},
    ),
    "torch_native_parallelism/configs/tp_hsdp.yaml": (
        {"tp": 2, "dp_shard": 2, "dp_replicate": 2, "sharding": "zero3", "global_batch": 32},
        {"gradient_checkpointing"},
    ),
    "config_yaml_templates/fsdp.yaml": (
        {"dp_shard": 2, "sharding": "zero3", "global_batch": 16},
        {"fsdp_config.fsdp_version", "gradient_checkpointing"},
    ),
    "config_yaml_templates/multi_gpu.yaml": (
        {"dp_shard": 2, "sharding": "none", "global_batch": 16},
        {"gradient_checkpointing"},
    ),
}


def example(path: str, **given: Any) -> Launch:
    place = os.environ.get("ACCELERATE_DIR")
    if not place or not (Path(place) / "examples").is_dir():
        pytest.skip("ACCELERATE_DIR does not name a checkout of accelerate")
    text = (Path(place) / "examples" / path).read_text()
    assert recognises(Path(path).name, text)
    return read(text, LaunchContext(model=LLAMA_8B, seq_len=4096, variables=BATCH[:2], **given))


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_of_accelerate_is_its_plan(path: str) -> None:
    plan, unread = EXAMPLES[path]
    launch = example(path)
    assert launch.plan == ParallelPlan.derived(**{"micro_batch": 2, "precision": "bf16", **plan})
    assert {option.option for option in launch.unread} == unread


COMMAND = """accelerate launch --use_fsdp --fsdp_version=2 --num_processes 16 --mixed-precision bf16 \\
    --fsdp_reshard_after_forward false --fsdp_activation_checkpointing true --parallelism_config_dp_replicate_size 2 \\
    --parallelism_config_dp_shard_size 8 ${EXTRA:-} \\
    train.py --per_device_train_batch_size 2 --gradient_accumulation_steps=4 --learning_rate 1e-4
"""


def test_a_command_line_is_read_like_a_config() -> None:
    assert recognises("run.sh", COMMAND)
    launch = read(COMMAND, LaunchContext(model=LLAMA_8B, seq_len=4096))
    assert launch.plan == ParallelPlan(
        dp_replicate=2, dp_shard=8, sharding="zero2", recompute="full", micro_batch=2, global_batch=128
    )
    assert {left_out.option for left_out in launch.unread} == {"--learning_rate", "train.py"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--use_fsdp", "--config_file my.yaml"), "read that file"),
        (("--use_fsdp", ""), "names none of --use_fsdp"),
        (("16", "$N"), "give it with --set NAME=VALUE"),
    ],
)
def test_a_command_line_that_says_too_little_is_refused(change: tuple[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        read(COMMAND.replace(*change), LaunchContext(model=LLAMA_8B, seq_len=4096))


# As in examples/accelerate_configs/deepspeed_zero3.yaml of TRL.
DEEPSPEED_CONFIG = """
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 1
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
downcast_bf16: 'no'
mixed_precision: bf16
num_processes: 8
"""
BATCH = (("PER_DEVICE_TRAIN_BATCH_SIZE", "2"), ("GRADIENT_ACCUMULATION_STEPS", "4"), ("GRADIENT_CHECKPOINTING", "true"))


def test_a_config_with_deepspeed_is_the_configuration_that_accelerate_makes_of_it() -> None:
    launch = read(DEEPSPEED_CONFIG, LaunchContext(model=LLAMA_8B, seq_len=4096, variables=BATCH))
    assert launch.plan == ParallelPlan.derived(
        dp_shard=8,
        sharding="zero3",
        offload="optimizer",
        recompute="full",
        micro_batch=2,
        global_batch=64,
        grad_reduce_overlap=True,
        param_gather_overlap=True,
        grad_dtype="bf16",
    )
    assert launch.framework == "deepspeed-zero"
    assert [item.option for item in launch.unread if item.matters] == ["zero_optimization.offload_optimizer.pin_memory"]


def test_a_command_line_with_deepspeed_is_read_like_its_config() -> None:
    command = "accelerate launch --use_deepspeed --zero_stage 2 --mixed_precision no --num_processes 8 train.py "
    options = "--bf16 --per_device_train_batch_size 2 --gradient_accumulation_steps 4"
    launch = read(command + options, LaunchContext(model=LLAMA_8B, seq_len=4096))
    assert (launch.plan.sharding, launch.plan.precision, launch.plan.global_batch) == ("zero2", "bf16", 64)


def test_the_file_of_a_command_is_read_where_it_lies_beside_or_above(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "configs" / "ds.yaml").write_text(DEEPSPEED_CONFIG)
    command = "accelerate launch --config_file configs/ds.yaml --num_processes 16 sft.py"
    context = LaunchContext(model=LLAMA_8B, seq_len=4096, variables=BATCH, folder=tmp_path / "examples")
    assert read(command, context).plan.num_devices == 16
    assert read(command.replace("configs/", "../configs/"), context).plan.num_devices == 16
    for elsewhere in ("/etc/passwd", "configs/../configs/ds.yaml"):
        with pytest.raises(InputError, match="read that file"):
            read(command.replace("configs/ds.yaml", elsewhere), context)


WRONG: dict[str, tuple[dict[str, Any], LaunchContext, str]] = {
    "no model": ({}, LaunchContext(seq_len=4096), "pass --model"),
    "no sequence": ({}, LaunchContext(model=LLAMA_8B), "pass --seq-len"),
    "no batch": ({}, LaunchContext(model=LLAMA_8B, seq_len=4096), "pass --set PER_DEVICE_TRAIN_BATCH_SIZE=N"),
    "a kind": (
        {"distributed_type": "XLA"},
        given_of(PLANS["sharded"]),
        "must be FSDP or MULTI_GPU or NO or DEEPSPEED",
    ),
    "a precision": (
        {"mixed_precision": "fp4"},
        given_of(PLANS["sharded"]),
        "must be bf16 or fp16 or fp8",
    ),
    "no precision": (
        {"mixed_precision": "no"},
        given_of(PLANS["sharded"]),
        "pass --set BF16=true",
    ),
    "all that is missing": (
        {"mixed_precision": "no", "num_processes": None},
        LaunchContext(),
        "pass --model, --seq-len, --devices, --set PER_DEVICE_TRAIN_BATCH_SIZE=N, "
        "--set GRADIENT_ACCUMULATION_STEPS=N, --set BF16=true",
    ),
    "a file of DeepSpeed": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "zero3.json"}},
        given_of(PLANS["sharded"]),
        "the plan is in 'zero3.json', which is not at hand",
    ),
    "devices": ({"num_processes": 24}, given_of(PLANS["sharded"]), "needs 16 devices, there are 24"),
    "open devices": ({"num_processes": -1}, given_of(PLANS["sharded"]), "pass --devices"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_said_in_one_line(case: str) -> None:
    change, given, says = WRONG[case]
    text = yaml.safe_dump(yaml.safe_load(text_of(PLANS["sharded"])) | change)
    with pytest.raises(InputError) as error:
        read(text, given)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=40, deadline=None)
@given(damaged([text_of(PLANS["all"]), text_of(PLANS["copies"]), COMMAND]))
def test_a_damaged_file_is_read_or_refused(text: str) -> None:
    with suppress(InputError):
        assert read(text, given_of(PLANS["all"])).plan.num_devices >= 1


# -- Accelerate itself ------------------------------------------------------------------------------------------------

# One defect each of the config of the plan in copies: the section, the key, its value.
MUTATIONS: dict[str, tuple[str, str, Any]] = {
    "a key": ("", "num_procs", 8),
    "a key of FSDP": ("fsdp_config", "fsdp_reshard", True),
    "a word": ("", "mixed_precision", "bf17"),
    "devices": ("", "num_processes", 16),
    "degrees": ("parallelism_config", "parallelism_config_tp_size", 3),
    "nothing to shard": ("parallelism_config", "parallelism_config_dp_shard_size", 1),
    "an old version": ("fsdp_config", "fsdp_version", 3),
}


def mutated(name: str) -> str:
    section, key, value = MUTATIONS[name]
    table = yaml.safe_load(text_of(PLANS["in copies"]))
    (table[section] if section else table)[key] = value
    return yaml.safe_dump(table)


@pytest.fixture(scope="module")
def answered() -> dict[str, Any]:
    """Answers of the installed Accelerate, by question."""
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    questions = {f"plan {name}": text_of(plan_file) for name, plan_file in PLANS.items()}
    questions |= {f"bad {name}": mutated(name) for name in MUTATIONS}
    return dict(zip(questions, ask("accelerate_parser.py", list(questions.values())), strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_accelerate_accepts_the_plan_and_sets_the_same_environment(name: str, answered: dict[str, Any]) -> None:
    answer, plan = answered[f"plan {name}"], PLANS[name].best.plan
    assert "error" not in answer, answer["error"]
    assert answer["processes"] == plan.num_devices
    if plan.sharding != "none":
        sizes = {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "tp": plan.tp, "cp": plan.cp, "sp": 1}
        assert answer["sizes"] == sizes
        assert (answer["reshards"], answer["checkpoints"]) == (plan.sharding == "zero3", plan.recompute == "full")
    ours = {variable.name: variable.value for variable in job_of(PLANS[name], "accelerate").environment}
    assert ours.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") == str(plan.num_microbatches)
    assert {key: answer["environment"].get(key) for key in ours} == ours


@pytest.mark.parametrize("name", MUTATIONS)
def test_accelerate_refuses_what_is_wrong(name: str, answered: dict[str, Any]) -> None:
    assert "error" in answered[f"bad {name}"]


def test_a_program_may_recompute_though_fsdp_does_not() -> None:
    given_ = LaunchContext(model=LLAMA_8B, seq_len=4096, variables=BATCH[:2])
    text = FSDP_CONFIG.replace("true}", "true, fsdp_activation_checkpointing: false}")
    assert "gradient_checkpointing" in [item.option for item in read(text, given_).unread]


def test_a_config_of_copies_asks_whether_the_program_recomputes() -> None:
    given_ = replace(given_of(PLANS["copies"]), variables=BATCH[:2])
    (asked,) = read(text_of(PLANS["copies"]), given_).unread
    assert asked.option == "gradient_checkpointing"
    assert "--set GRADIENT_CHECKPOINTING=true" in asked.why


def test_a_config_that_is_silent_of_recomputation_asks_too() -> None:
    given_ = LaunchContext(model=LLAMA_8B, seq_len=4096, variables=BATCH[:2])
    assert [item.option for item in read(FSDP_CONFIG, given_).unread] == ["gradient_checkpointing"]


def test_copies_that_recompute_leave_it_to_the_program() -> None:
    job = job_of(fsdp(dp_shard=8, sharding="none", recompute="full"), "accelerate")
    assert job.replaceable is not None
    assert ["--gradient_checkpointing", "true"] in job.replaceable.lines
    assert "# It recomputes every layer" in job.files[0].text
    sharded = job_of(fsdp(dp_shard=8, recompute="full"), "accelerate")
    assert sharded.replaceable is not None
    assert ["--gradient_checkpointing", "true"] not in sharded.replaceable.lines


def test_the_trainers_recomputation_is_read() -> None:
    text = (
        "accelerate launch --multi_gpu --num_processes 8 --mixed_precision bf16 train.py --gradient_checkpointing true"
    )
    assert read(text, given_of(fsdp(dp_shard=8))).plan.recompute == "full"
    assert read(text.replace("true", "false"), given_of(fsdp(dp_shard=8))).plan.recompute == "none"


def test_a_file_that_the_program_reads_is_listed() -> None:
    options = "--use_fsdp --num_processes 2 --fsdp_version 2 --mixed_precision bf16"
    text = f"accelerate launch {options} src/train.py lora.yaml"
    assert recognises("train.sh", text)
    launch = read(text, given_of(fsdp(dp_shard=2)))
    assert [unread.option for unread in launch.unread if unread.matters] == ["lora.yaml", "train.py"]


SFT = """accelerate launch --config_file fsdp.yaml trl/scripts/sft.py {}\\
    --model_name_or_path Qwen/Qwen2.5-7B --dataset_name trl-lib/Capybara --per_device_train_batch_size 2 \\
    --max_length 4096 --packing --optim adamw_8bit --use_peft --lora_r 8
"""
FSDP_CONFIG = """distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}
mixed_precision: bf16
num_processes: 8
"""


def test_a_command_in_the_text_of_another_and_a_file_by_its_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP_CONFIG)
    command = SFT.format("").replace("fsdp.yaml", "/cluster/configs/fsdp.yaml").replace("\\\n", "")
    launch = read(f'CMD="{command}"\nsrun bash -c "$CMD" 2>&1\n', LaunchContext(folder=tmp_path))
    assert (launch.model.name, launch.plan.sharding, launch.plan.num_devices) == ("qwen2.5-7b", "zero3", 8)


def test_a_deepspeed_file_that_a_command_names_is_read(tmp_path: Path) -> None:
    zero = '{"zero_optimization": {"stage": 3, "overlap_comm": false}, "bf16": {"enabled": "auto"}}'
    (tmp_path / "zero.conf").write_text(zero)
    command = (
        "python job.py --num_nodes 2 -- accelerate launch --use_deepspeed --deepspeed_config_file zero.conf "
        "--mixed_precision bf16 --num_processes 4 train.py --model_name_or_path Qwen/Qwen2.5-7B --max_length 2048 "
        "--per_device_train_batch_size 2"
    )
    launch = read(command, LaunchContext(folder=tmp_path))
    plan = launch.plan
    assert (plan.sharding, plan.dp, plan.global_batch, plan.grad_reduce_overlap) == ("zero3", 4, 8, False)
    assert "--num_nodes" in matters(launch)  # job.py may start all of it twice
    with pytest.raises(InputError, match="trains no model"):
        read(command.replace("train.py", "evaluate.py"), LaunchContext(folder=tmp_path))


def test_a_program_of_llama_factory_has_its_adapters_and_recomputes(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP_CONFIG)
    (tmp_path / "lora.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: lora\nlora_target: all\nbf16: true\n"
        "quantization_bit: 4\ncutoff_len: 1024\nper_device_train_batch_size: 2\n"
    )
    launch = read("accelerate launch --config_file fsdp.yaml src/train.py lora.yaml", LaunchContext(folder=tmp_path))
    assert launch.training.finetuning is not None
    assert (launch.training.finetuning.quantization, launch.plan.recompute) == ("nf4-dq", "full")


def test_words_behind_a_file_of_llama_factory_change_it(tmp_path: Path) -> None:
    """src/train.py FILE KEY=VALUE merges the words over the file (hparams/parser.py, read_args)."""
    (tmp_path / "fsdp.yaml").write_text(FSDP_CONFIG)
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\nfinetuning_type: full\nbf16: true\ncutoff_len: 1024\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
    )
    command = (
        "accelerate launch --config_file fsdp.yaml --main_process_port $((29500 + RANDOM)) src/train.py sft.yaml "
        'per_device_train_batch_size=4 gradient_accumulation_steps=1 cutoff_len="$LENGTH" '
        """'lr_scheduler_kwargs={"min_lr_rate": 0.1}'"""
    )
    context = LaunchContext(folder=tmp_path, variables=(("LENGTH", "2048"),))
    launch = read(command, context)
    plan = launch.plan
    assert (plan.micro_batch, plan.num_microbatches, launch.training.seq_len) == (4, 1, 2048)
    with pytest.raises(InputError, match="pass --set LENGTH=VALUE"):
        read(command, LaunchContext(folder=tmp_path))


def test_what_the_program_is_told_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP_CONFIG)
    launch = read(SFT.format(""), LaunchContext(folder=tmp_path))
    assert launch.framework == "transformers"
    assert launch.model.name == "qwen2.5-7b"
    assert (launch.training.seq_len, launch.training.optimizer, launch.training.batching) == (
        4096,
        "adam8bit-bnb",
        "packed",
    )
    assert launch.training.finetuning is not None
    assert launch.training.finetuning.has_adapters
    # TRL recomputes unless it is told otherwise; accumulation is 1 by default.
    assert (launch.plan.global_batch, launch.plan.recompute, launch.plan.sharding) == (16, "full", "zero3")
    longer = read(SFT.format(""), LaunchContext(folder=tmp_path, seq_len=512, model=LLAMA_8B))
    assert (longer.training.seq_len, longer.model) == (512, LLAMA_8B)


def test_arguments_in_a_file_of_the_program_are_read(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP_CONFIG)
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: mistralai/Mistral-7B-v0.1\nmax_length: 2048\nper_device_train_batch_size: 4\n"
    )
    command = "accelerate launch --config_file fsdp.yaml run_sft.py sft.yaml --gradient_accumulation_steps 2"
    launch = read(command, LaunchContext(folder=tmp_path))
    assert (launch.model.name, launch.training.seq_len) == ("mistral-7b", 2048)
    assert (launch.plan.micro_batch, launch.plan.global_batch) == (4, 64)


def test_a_program_of_ones_own_says_model_and_length_too() -> None:
    command = (
        "accelerate launch --multi_gpu --num_processes 8 --mixed_precision bf16 train.py "
        "--model meta-llama/Meta-Llama-3-8B --seq_len 2048"
    )
    batch = (("PER_DEVICE_TRAIN_BATCH_SIZE", "2"), ("GRADIENT_ACCUMULATION_STEPS", "1"))
    launch = read(command, LaunchContext(variables=batch))
    assert (launch.model.name, launch.training.seq_len, launch.framework) == ("llama3-8b", 2048, "pytorch-fsdp")


def test_options_that_a_command_abbreviates_are_the_programs() -> None:
    """argparse takes every beginning that one option alone has."""
    command = (
        "accelerate launch --multi_gpu --num_processes 8 --mixed_precision bf16 train.py --model_name_or_path "
        "Qwen/Qwen2.5-7B {batch} {steps} --max_seq_length 4096"
    )
    whole = {"batch": "--per_device_train_batch_size 4", "steps": "--gradient_accumulation_steps 2"}
    short = {"batch": "--per_device_train_batch 4", "steps": "--gradient_accumulation 2"}
    launch, abbreviated = (read(command.format(**words), LaunchContext()) for words in (whole, short))
    assert (abbreviated.plan.micro_batch, abbreviated.plan.global_batch) == (4, 64)
    assert abbreviated.plan == launch.plan
    assert matters(abbreviated) == matters(launch)


def test_a_program_that_is_not_known_is_listed() -> None:
    given = ("PER_DEVICE_TRAIN_BATCH_SIZE", "1"), ("GRADIENT_ACCUMULATION_STEPS", "1"), ("BF16", "true")
    context = LaunchContext(model=load_model("llama3-8b"), seq_len=4096, variables=given)
    launch = read("accelerate launch --multi_gpu --num_processes 8 \\\n", context)
    assert "accelerate launch" in matters(launch)


def test_a_module_behind_the_launcher_is_the_program() -> None:
    script = "accelerate launch --multi_gpu --num_processes 8 --module trainers.dpo_diffusion --epochs 2\n"
    with pytest.raises(InputError, match=r"trainers.dpo_diffusion: only training on the next token"):
        read(script, LaunchContext(model=load_model("llama3-8b"), seq_len=4096))


def test_a_configuration_of_axolotl_behind_the_launcher_is_named() -> None:
    script = "accelerate launch --multi_gpu --num_processes 8 -m axolotl.cli.train full.yaml\n"
    with pytest.raises(InputError, match=r"starts axolotl.cli.train with 'full.yaml', which has the plan: read that"):
        read(script, LaunchContext(model=load_model("llama3-8b"), seq_len=4096))


@pytest.mark.parametrize("program", ["swift/cli/sft.py", "-m swift.cli.sft"])
def test_a_program_of_ms_swift_behind_the_launcher_is_refused(program: str) -> None:
    """Its length and batch size are other than TRL's, whose program is called sft.py as well."""
    script = f"accelerate launch --multi_gpu --num_processes 4 {program} --model Qwen/Qwen2.5-7B-Instruct\n"
    with pytest.raises(InputError, match=r"swift.cli.sft\S* is of ms-swift, whose defaults are its own"):
        read(script, LaunchContext(model=load_model("llama3-8b"), seq_len=4096))


def test_a_program_whose_loss_is_not_priced_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP_CONFIG)
    with pytest.raises(InputError, match=r"grpo\.py: only training on the next token"):
        read(SFT.format("").replace("sft.py", "grpo.py"), LaunchContext(folder=tmp_path))


def test_options_of_a_config_and_of_the_trainer_that_it_starts_are_compared(tmp_path: Path) -> None:
    """The Trainer refuses its own recomputation beside that of the config (transformers/trainer.py), which sets it."""
    config = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8}
    config["fsdp_config"] = {"fsdp_version": 2, "fsdp_reshard_after_forward": True}
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(config))
    words = "--model_name_or_path Qwen/Qwen2.5-7B --max_length 4096 --packing --bf16 --gradient_checkpointing"
    batch = "--per_device_train_batch_size 2 --gradient_accumulation_steps 8"
    command = f"accelerate launch --config_file fsdp.yaml sft.py {words} {batch}"
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    found = autoplan.search(cluster="a100-sxm:1x8", launch_file=tmp_path / "run.sh").file
    assert found.today is not None
    plan = found.best.plan
    assert (plan.sharding, plan.recompute) == ("zero2", "none")
    assert {option.option: (option.before, option.after) for option in found.today.options} == {
        "--per_device_train_batch_size": ("2", str(plan.micro_batch)),
        "--gradient_accumulation_steps": ("8", str(plan.num_microbatches)),
        "--gradient_checkpointing": ("", None),
        "fsdp_config.fsdp_activation_checkpointing": (None, "False"),
        "fsdp_config.fsdp_reshard_after_forward": ("True", "False"),
    }
