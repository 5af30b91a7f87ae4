"""Are Python programs that make the Trainer's arguments themselves read as they run?"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import autoplan
from autoplan.base.errors import InputError
from autoplan.frameworks.common.launch import Launch, LaunchContext
from autoplan.frameworks.hf_trainer.program import makes_arguments
from autoplan.frameworks.hf_trainer.read import read, recognises
from autoplan.frameworks.launch_files import read_launch
from autoplan.readers.model import load_model
from damage import damaged
from read_back import matters

QLORA = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

MODEL = "mistralai/Mistral-7B-v0.3"
BATCH = 4

def main():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, quantization_config=quantised, torch_dtype=torch.bfloat16, attn_implementation="flash_attention_2"
    )
    adapters = LoraConfig(r=32, lora_alpha=64, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = SFTConfig(
        output_dir="out", per_device_train_batch_size=BATCH, gradient_accumulation_steps=2 * BATCH,
        gradient_checkpointing=True, bf16=True, max_length=2048, packing=True, optim="paged_adamw_8bit",
    )
    trainer = SFTTrainer(model=model, args=args, train_dataset=load_dataset("x"), peft_config=adapters)
    trainer.train()

main()
"""
PLAIN = """
import argparse, os
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from peft import get_peft_model, prepare_model_for_kbit_training, LoraConfig

parser = argparse.ArgumentParser()
parser.add_argument("--model-name", default="meta-llama/Llama-3.2-1B")
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--packed", action="store_true")
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.model_name, torch_dtype="auto"{load})
{adapt}
settings = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=args.batch_size,
    gradient_accumulation_steps=int(os.environ.get("STEPS", "8")),
    bf16=torch.cuda.is_bf16_supported(),
    fp16=not torch.cuda.is_bf16_supported(),
    {more}
)
Trainer(model=model, args=settings, train_dataset=None).train()
"""


PLACES = {"BATCH": "16"}


def plain(load: str = "", adapt: str = "", more: str = "") -> str:
    return PLAIN.format(load=load, adapt=adapt, more=more)


def of(text: str, devices: int = 8, seq_len: int | None = 1024, **variables: str) -> Launch:
    assert recognises("train.py", text)
    return read(text, LaunchContext(num_devices=devices, seq_len=seq_len, variables=tuple(variables.items())))


def test_a_program_of_trl_is_its_arguments_model_adapters_and_quantisation() -> None:
    launch = of(QLORA, seq_len=None)
    assert (launch.target, launch.framework, launch.model.name) == ("hf-trainer", "transformers", "mistral-7b-v0.3")
    plan, training = launch.plan, launch.training
    assert (plan.dp, plan.micro_batch, plan.num_microbatches, plan.recompute) == (8, 4, 8, "full")
    assert (training.seq_len, training.precision, training.batching) == (2048, "bf16", "packed")
    assert training.optimizer == "adam8bit-bnb"
    tuning = training.finetuning
    assert tuning is not None
    assert (tuning.rank, tuning.alpha, tuning.dropout) == (32, 64, 0.0)  # PEFT's default is no dropout
    assert (tuning.targets, tuning.quantization) == (("q_proj", "v_proj"), "nf4-dq")
    assert matters(launch) == {"fsdp"}  # a config of accelerate launch may shard what is read as copies
    assert dict(launch.options)["per_device_train_batch_size"] == "4"


def test_defaults_of_arguments_and_environment_hold_unless_they_are_stated() -> None:
    plan = of(plain()).plan
    assert (plan.micro_batch, plan.num_microbatches, plan.recompute, plan.precision) == (2, 8, "none", "bf16")
    stated = of(plain(), batch_size="4", STEPS="2", model_name="Qwen/Qwen2.5-0.5B")
    assert (stated.plan.micro_batch, stated.plan.num_microbatches) == (4, 2)
    assert stated.model.name == "qwen2.5-0.5b"
    unknown = QLORA.replace("BATCH = 4", "BATCH = read('x')").replace('["q_proj", "v_proj"]', "find(model)")
    tuned = of(unknown, BATCH="2", lora_target_modules="k_proj,o_proj")
    assert (tuned.plan.micro_batch, tuned.plan.num_microbatches) == (2, 4)
    assert tuned.training.finetuning is not None
    assert tuned.training.finetuning.targets == ("k_proj", "o_proj")


def test_a_dataclass_of_arguments_has_its_defaults() -> None:
    fields = "@dataclass\nclass Mine:\n    batch_size: int = field(default=4)\n    bf16: bool = True\n"
    text = fields + plain().replace("torch.cuda.is_bf16_supported()", "args.bf16").replace("default=2", "required=True")
    plan = of(text).plan
    assert (plan.micro_batch, plan.precision) == (4, "bf16")


def test_the_code_of_a_notebook_is_read() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# SFTConfig( of a model"]},
        {"cell_type": "code", "source": ["!pip install trl\n", "%load_ext autoreload\n"]},
        {"cell_type": "code", "source": QLORA},
    ]
    text = json.dumps({"cells": cells, "nbformat": 4})
    assert recognises("train.ipynb", text)
    context = LaunchContext(num_devices=8)
    assert read(text, context).plan == read(QLORA, context).plan


@pytest.mark.parametrize(
    ("adapt", "recompute"),
    [
        ("model = prepare_model_for_kbit_training(model)", "full"),
        ("model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)", "none"),
        ("model.gradient_checkpointing_enable()", "full"),
        ("config = AutoConfig.from_pretrained('x')\nconfig.gradient_checkpointing = True", "full"),
        ("config = AutoConfig.from_pretrained('x', gradient_checkpointing=False)", "none"),
    ],
)
def test_recomputation_is_turned_on_beside_the_arguments_too(adapt: str, recompute: str) -> None:
    adapters = "model = get_peft_model(model, LoraConfig(r=8, target_modules='all-linear'))"
    launch = of(plain(load=", load_in_8bit=True", adapt=f"{adapt}\n{adapters}"))
    assert launch.plan.recompute == recompute
    tuning = launch.training.finetuning
    assert tuning is not None
    assert (tuning.rank, tuning.targets, tuning.quantization) == (8, ("all-linear",), "int8")


def test_tables_with_two_stars_and_attributes_set_later_are_read() -> None:
    loads = '**dict(dtype=torch.bfloat16, attn_implementation="eager")'
    text = plain(load=f", {loads}").replace("Trainer(model", "settings.per_device_train_batch_size = 16\nTrainer(model")
    launch = of(text)
    assert (launch.plan.attention, launch.plan.main_weights, launch.plan.micro_batch) == ("unfused", "bf16", 16)
    listed = matters(of(plain(load=", **of_a_file()", more="**others()")))
    assert {"from_pretrained", "**"} <= listed


def test_sharding_of_the_arguments_is_read() -> None:
    launch = of(plain(more='fsdp="full_shard auto_wrap", fsdp_config={"version": 2, "activation_checkpointing": True}'))
    assert (launch.plan.sharding, launch.plan.recompute) == ("zero3", "full")


def test_a_script_of_accelerate_is_read_with_the_program_that_it_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(plain())
    script = tmp_path / "run.sh"
    script.write_text("accelerate launch --multi_gpu --num_processes 4 train.py --batch_size 16\n")
    launch = autoplan.read(script, seq_len=1024).launch
    assert (launch.target, launch.plan.dp, launch.plan.micro_batch) == ("accelerate", 4, 16)
    assert launch.plan.global_batch == 4 * 16 * 8


@pytest.mark.parametrize(
    ("command", "devices"),
    [
        ("torchrun --nproc_per_node 4 code/train.py --batch_size 16", 4),
        ("python3 -m code.train --batch_size=16", 2),
        ('torchrun --nproc_per_node=8 --nnodes=2 code/train.py --packed --batch_size "$BATCH"', 16),
    ],
)
def test_a_script_is_read_with_the_program_that_it_starts(tmp_path: Path, command: str, devices: int) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(plain(more="gradient_checkpointing=args.packed"))
    (script := tmp_path / "run.sh").write_text(f"{command} --of_its_own x\n")
    given = {"devices": 2} if devices == 2 else {}
    launch = autoplan.read(script, seq_len=1024, variables={"batch_size": "16"} | PLACES, **given).launch
    assert (launch.target, launch.model.name) == ("hf-trainer", "llama3.2-1b")
    assert (launch.plan.dp, launch.plan.micro_batch) == (devices, 16)
    assert launch.plan.recompute == ("full" if "--packed" in command else "none")


PARSED = """
from dataclasses import dataclass, field
import torch, transformers
from peft import LoraConfig
from trl import SFTTrainer

@dataclass
class ModelArguments:
    model_name_or_path: str = "meta-llama/Llama-3.2-1B"
    rank: int = 16
    adapts: bool = False
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])

@dataclass
class TrainingArguments(transformers.TrainingArguments):
    model_max_length: int = 512

def main():
    mine, settings = transformers.HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    adapters = None
    if mine.adapts and mine.rank > 0:
        adapters = LoraConfig(r=mine.rank, target_modules=mine.target_modules)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        mine.model_name_or_path, torch_dtype=torch.bfloat16 if settings.bf16 else None
    )
    SFTTrainer(model, args=settings, peft_config=adapters, max_seq_length=settings.model_max_length).train()

main()
"""
COMMAND = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 2 --bf16 True"


def started(folder: Path, words: str = "", program: str = PARSED) -> Launch:
    (folder / "train.py").write_text(program)
    (folder / "run.sh").write_text(f"{COMMAND} {words}\n")
    return autoplan.read(folder / "run.sh").launch


def test_a_program_that_parses_the_arguments_of_its_command_is_followed(tmp_path: Path) -> None:
    launch = started(tmp_path)
    assert (launch.model.name, launch.training.seq_len, launch.training.batching) == ("llama3.2-1b", 512, "padded")
    assert (launch.plan.dp, launch.plan.micro_batch, launch.plan.precision) == (8, 2, "bf16")
    assert not launch.training.has_adapters
    assert "LoraConfig" not in matters(launch)
    tuned = started(tmp_path, "--adapts True --rank 64 --model_max_length 2048 --model_name_or_path Qwen/Qwen2.5-7B")
    assert (tuned.model.name, tuned.training.seq_len) == ("qwen2.5-7b", 2048)
    assert tuned.training.finetuning is not None
    assert (tuned.training.finetuning.rank, tuned.training.finetuning.targets) == (64, ("q_proj", "v_proj"))


def test_adapters_under_a_condition_that_is_not_known_are_listed(tmp_path: Path) -> None:
    launch = started(tmp_path, program=PARSED.replace("if mine.adapts and mine.rank > 0", "if wanted(mine)"))
    assert launch.training.has_adapters
    assert "LoraConfig" in matters(launch)


def test_adapters_of_an_unknown_program_have_the_defaults_of_trl_and_say_so(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{COMMAND} --use_peft --max_seq_length 512 --model_name_or_path gpt2\n")
    assert "--use_peft" in matters(autoplan.read(tmp_path / "run.sh", model="llama3-8b").launch)


@pytest.mark.parametrize(
    "opening",
    [
        "settings_of = argparse.ArgumentParser()\nsettings_of.add_argument('--size', type=int, default=4)\n"
        "def parse():\n    return settings_of.parse_args()\n\nmine = parse()\n",
        "class Mine:\n    size = 4\nmine = Mine()\n",
        "class Mine:\n    size = 4\nmine = Mine\n",
        "@dataclass\nclass Mine:\n    size: int = 4\nmine, _ = HfArgumentParser(Mine).parse_args_into_dataclasses()\n",
        "@dataclass\nclass Mine:\n    size: int = 4\nmine = tyro.cli(Mine)\n",
    ],
)
def test_arguments_are_found_by_what_makes_them(opening: str) -> None:
    text = plain().replace("args = parser.parse_args()\n", opening).replace("args.batch_size", "mine.size")
    text = text.replace("args.model_name", '"meta-llama/Llama-3.2-1B"')
    assert of(text).plan.micro_batch == 4
    assert of(text, size="2").plan.micro_batch == 2
    handed_on = text.replace("\nsettings = Train", "\ndef make(what):\n  return Train").replace(
        "mine.size", "what.size"
    )
    assert of(f"{handed_on}\nmake(mine)\n".replace("args=settings, ", "")).plan.micro_batch == 4


def test_a_launcher_says_how_many_processes_there_are(tmp_path: Path) -> None:
    steps = 'int(os.environ.get("STEPS", "8"))'
    program = plain().replace(steps, '64 // int(os.environ.get("WORLD_SIZE", 1))')
    (tmp_path / "train.py").write_text(program)
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 4 train.py\n")
    assert autoplan.read(tmp_path / "run.sh", seq_len=1024).launch.plan.num_microbatches == 16
    assert of(program).plan.num_microbatches == 8


def test_arguments_of_another_package_are_listed() -> None:
    other = plain().replace("import AutoModelForCausalLM, Trainer, TrainingArguments", "import AutoModelForCausalLM")
    assert "TrainingArguments" in matters(of(f"from engine.train import Trainer, TrainingArguments\n{other}"))
    assert "TrainingArguments" not in matters(of(plain()))


def test_the_loss_in_the_name_of_a_program_holds_where_it_is_followed_too(tmp_path: Path) -> None:
    (tmp_path / "train_rm.py").write_text(PARSED.replace("SFTTrainer", "Trainer"))
    (tmp_path / "run.sh").write_text(COMMAND.replace("train.py", "train_rm.py"))
    with pytest.raises(InputError, match=r"train_rm.py: only training on the next token"):
        autoplan.read(tmp_path / "run.sh")


def test_the_loss_of_a_program_behind_accelerate_holds_without_a_batch_in_its_command(tmp_path: Path) -> None:
    text = PARSED.replace("SFTTrainer(", "DPOTrainer(").replace("import SFTTrainer", "import DPOTrainer")
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "run.sh").write_text("accelerate launch --multi_gpu --num_processes 2 train.py --bf16 --beta 0.1\n")
    given = {"PER_DEVICE_TRAIN_BATCH_SIZE": "1", "GRADIENT_ACCUMULATION_STEPS": "1"}
    preference = autoplan.read(tmp_path / "run.sh", variables=given).launch.training.preference
    assert preference is not None
    assert preference.loss == "dpo"


def test_parameters_of_a_function_that_fire_runs_are_arguments() -> None:
    inner = plain().replace("args.batch_size", "size").replace("args.model_name", '"meta-llama/Llama-3.2-1B"')
    text = (
        "def train(size: int = 4):\n" + "".join(f"    {line}\n" for line in inner.splitlines()) + "fire.Fire(train)\n"
    )
    assert of(text).plan.micro_batch == 4
    assert of(text, size="2").plan.micro_batch == 2


@pytest.mark.parametrize("change", ["BATCH //= 2", "for BATCH in (1, 2): pass", "with read() as BATCH: pass"])
def test_a_name_that_is_set_twice_is_asked_for(change: str) -> None:
    with pytest.raises(InputError, match="per_device_train_batch_size = BATCH cannot be read"):
        of(QLORA.replace("BATCH = 4", f"BATCH = 4\n{change}"))


def test_defaults_of_one_name_that_differ_are_none() -> None:
    second = "parser.add_argument('--batch_size', type=int, default=8)\nargs = parser"
    with pytest.raises(InputError, match=r"per_device_train_batch_size = args.batch_size cannot be read"):
        of(plain().replace("args = parser", second))


def test_branches_that_do_not_run_are_passed_over() -> None:
    branches = "if TUNED:\n    BATCH = 4\nelif not TUNED or OTHER:\n    BATCH = 2\nelse:\n    BATCH = 1"
    assert of(QLORA.replace("BATCH = 4", f"TUNED = False\n{branches}"), seq_len=None).plan.micro_batch == 2


def test_changes_are_named_as_in_the_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(QLORA)
    place: dict[str, Any] = {"cluster": "a100-sxm:1x1", "fix": {"micro_batch": 8, "recompute": "full"}}
    today = autoplan.search(launch_file=tmp_path / "train.py", **place).file.today
    assert today is not None
    changed = {option.option: (option.before, option.after) for option in today.options}
    assert changed == {"per_device_train_batch_size": ("4", "8"), "gradient_accumulation_steps": ("8", "4")}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            QLORA.replace("SFTConfig(", "GRPOConfig(").replace("SFTTrainer(", "GRPOTrainer("),
            "only training on the next",
        ),
        (QLORA.replace("LoraConfig", "VeraConfig"), "adapters of VeraConfig are not priced"),
        (QLORA.replace("BitsAndBytesConfig(", "GPTQConfig("), "quantised with GPTQConfig are not priced"),
        (QLORA + "\nother = SFTConfig(per_device_train_batch_size=1)\n", "the file 2 times .SFTConfig, SFTConfig"),
        (
            QLORA.replace("BATCH = 4", "for BATCH in (1, 2):\n    pass"),
            "per_device_train_batch_size = BATCH cannot be read: pass --set per_device_train_batch_size=VALUE",
        ),
        (
            QLORA.replace("BATCH = 4", "BATCH = 4\nif MODEL:\n    BATCH = 8"),
            "per_device_train_batch_size = BATCH cannot",
        ),
        (
            QLORA.replace('["q_proj", "v_proj"]', "find(model)"),
            r"lora_target_modules = find\(\) cannot be read: pass --set",
        ),
        (QLORA.replace("BATCH = 4", "BATCH = read('x')"), r"per_device_train_batch_size = read.* cannot be read"),
        (QLORA.replace('"mistralai/Mistral-7B-v0.3"', '"someone/model"'), "'someone/model' is not built in"),
    ],
    ids=lambda value: value if len(value) < 60 else "",
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        of(text)
    assert "\n" not in str(error.value)


def test_what_is_read_in_part_is_listed() -> None:
    launch = of(
        QLORA.replace("import torch\n", "import torch, unsloth\n").replace("r=32", "r=32, rank_pattern={'q': 4}")
    )
    assert {"unsloth", "rank_pattern"} <= matters(launch)


@settings(max_examples=100, deadline=None)
@given(text=damaged([QLORA, plain()]))
def test_a_damaged_program_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InputError):
        assert read(text, LaunchContext(num_devices=8, seq_len=1024)).plan.num_devices == 8


def test_a_program_that_only_evaluates_is_refused() -> None:
    assert of(plain()).plan.dp == 8
    with pytest.raises(InputError, match="evaluates and never calls train"):
        of(plain().replace(".train()", ".evaluate()"))


def script_in_a_folder(path: Path, root: str) -> Path:
    """Write a script that starts a program in `root`: one that trains in the folder above, beside it another."""
    (path / "scripts").mkdir()
    (path / "scripts" / "train.py").write_text("print('trains nothing')")
    (path / "train.py").write_text(plain(more="gradient_checkpointing=True,"))
    script = path / "scripts" / "run.sh"
    script.write_text(f'ROOT={root}\ntorchrun --nproc_per_node 2 "$ROOT/train.py" --batch_size 4\n')
    return script


def test_a_program_in_a_folder_relative_to_the_script_is_found(tmp_path: Path) -> None:
    script = script_in_a_folder(tmp_path, '"$(cd "$(dirname "${BASH_SOURCE[0]}")"/.. && pwd)"')
    launch = read_launch(script, LaunchContext(seq_len=1024, variables=(("BF16", "true"),)))
    assert (launch.plan.micro_batch, launch.plan.recompute, launch.plan.dp) == (4, "full", 2)


def test_of_a_program_in_an_unknown_folder_the_nearest_of_its_name_is_taken(tmp_path: Path) -> None:
    script = script_in_a_folder(tmp_path, "$PROJECT_ROOT")
    context = LaunchContext(seq_len=1024, variables=(("BF16", "true"),))
    with pytest.raises(InputError, match=r"starts \$PROJECT_ROOT/train\.py, which is not known here"):
        read_launch(script, context)
    (tmp_path / "scripts" / "train.py").unlink()
    assert read_launch(script, context).plan.recompute == "full"


def test_a_program_with_an_absolute_path_is_looked_for_beside_the_script_alone(tmp_path: Path) -> None:
    script = script_in_a_folder(tmp_path, "/some/where/of/mine")
    (tmp_path / "scripts" / "train.py").unlink()
    with pytest.raises(InputError, match=r"starts /some/where/of/mine/train\.py, which is not known here"):
        read_launch(script, LaunchContext(seq_len=1024))


def test_a_program_that_makes_arguments_beside_its_command_is_listed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(plain(more="gradient_checkpointing=True,"))
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node 2 train.py --per_device_train_batch_size 4 --bf16 true\n")
    launch = read_launch(script, LaunchContext(seq_len=1024, model=load_model("llama3-8b")))
    assert "train.py" in matters(launch)


@pytest.mark.parametrize(("imports", "is_of_trl"), [("import trl\n", True), ("from mine import Trainer\n", False)])
def test_a_program_with_a_name_of_trl_is_its_own(tmp_path: Path, imports: str, is_of_trl: bool) -> None:
    (tmp_path / "sft.py").write_text(f"{imports}parser.parse_args()\n")
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node 2 sft.py --per_device_train_batch_size 4 --bf16 true\n")
    model = load_model("llama3-8b")
    if is_of_trl:
        assert read_launch(script, LaunchContext(model=model)).training.seq_len == 1024
        return
    with pytest.raises(InputError, match="length"):
        read_launch(script, LaunchContext(model=model))
    assert "sft.py" in matters(read_launch(script, LaunchContext(model=model, seq_len=512)))


@pytest.mark.parametrize(("bases", "is_made"), [("", False), ("(Mine)", False), ("(trl.SFTConfig)", True)])
def test_classes_that_the_file_defines_are_not_those_of_trl(bases: str, is_made: bool) -> None:
    text = f"class SFTConfig{bases}:\n    pass\n\n\nconfig = SFTConfig(per_device_train_batch_size=2)\n"
    assert makes_arguments(text) is is_made
