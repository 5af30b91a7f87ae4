"""What a program does beside its arguments is listed."""

from __future__ import annotations

from pathlib import Path

from autoplan.api.launch_files import make_context
from autoplan.frameworks.common.launch import Unread
from autoplan.frameworks.launch_files import read_launch

PROGRAM = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from parts.kernels import faster
{before}
model = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B", torch_dtype=torch.bfloat16)
{after}
arguments = TrainingArguments(output_dir="out", per_device_train_batch_size=2, bf16=True)
{trainer}(model=model, args=arguments).train()
"""


def listed(folder: Path, *, before: str = "", after: str = "", trainer: str = "Trainer") -> dict[str, str]:
    """Return the reasons by option of what matters and is not read of a program."""
    return {item.option: item.why for item in unread_of(folder, before=before, after=after, trainer=trainer)}


def unread_of(folder: Path, *, before: str = "", after: str = "", trainer: str = "Trainer") -> list[Unread]:
    """Return what matters and is not read of a program."""
    path = folder / "train.py"
    path.write_text(PROGRAM.format(before=before, after=after, trainer=trainer))
    launch = read_launch(path, make_context(devices=8, seq_len=2048))
    return [item for item in launch.unread if item.matters and item.option != "fsdp"]


def test_a_plain_program_lists_nothing(tmp_path: Path) -> None:
    assert listed(tmp_path) == {}


def test_frozen_weights_and_compiled_models_are_listed(tmp_path: Path) -> None:
    after = "for weight in model.parameters():\n    weight.requires_grad = False\nmodel = torch.compile(model)"
    found = listed(tmp_path, after=after)
    assert "priced as trained" in found["requires_grad"]
    assert found["compile()"] == "priced as not compiled"


def test_weights_that_stay_trained_are_not_listed(tmp_path: Path) -> None:
    assert listed(tmp_path, after="model.requires_grad_(True)\nmodel.lm_head.weight.requires_grad = True") == {}


def test_a_statement_of_several_lines_is_listed_once(tmp_path: Path) -> None:
    (item,) = unread_of(tmp_path, after="\n".join(f"model.part{at}.requires_grad_(False)" for at in range(5)))
    assert (item.option, item.value) == ("requires_grad_()", "lines 7, 8, 9, ...")


def test_functions_of_other_libraries_are_not_listed(tmp_path: Path) -> None:
    after = "import gc, multiprocessing, re\ngc.freeze()\nmultiprocessing.freeze_support()\nre.compile('a')"
    assert listed(tmp_path, after=after) == {}


def test_adapters_freeze_the_other_weights_as_is_priced(tmp_path: Path) -> None:
    after = "model.requires_grad_(False)\nfrom peft import LoraConfig, get_peft_model\n"
    after += "model = get_peft_model(model, LoraConfig(r=8, task_type='CAUSAL_LM'))"
    assert "requires_grad_()" not in listed(tmp_path, after=after)


def test_a_trainer_of_its_own_is_listed_by_what_it_replaces(tmp_path: Path) -> None:
    before = "class Own(Trainer):\n    def compute_loss(self, model, inputs):\n        return 0\n"
    assert "loss of its own" in listed(tmp_path, before=before, trainer="Own")["Own.compute_loss"]


def test_another_file_of_the_program_is_listed_where_it_decides_about_a_step(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "kernels.py").write_text("def faster(model):\n    model.gradient_checkpointing_enable()\n")
    assert "not read" in listed(tmp_path)["parts.kernels"]


def test_a_program_that_prepares_images_is_listed(tmp_path: Path) -> None:
    for before in ("from PIL import Image", "tokenizer = transformers.AutoProcessor.from_pretrained('a/b')"):
        (item,) = unread_of(tmp_path, before=before)
        assert "whose encoder is not in the model" in item.why
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "kernels.py").write_text("from .pictures import prepare\n")
    (tmp_path / "parts" / "pictures.py").write_text("def prepare(sample):\n    return sample['pixel_values']\n")
    assert listed(tmp_path)["pixel_values"].endswith("whose encoder is not in the model that is priced")


def test_files_that_other_files_of_a_program_import_are_looked_at(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "kernels.py").write_text("from . import deep\n# LoraConfig() in a comment\n")
    (tmp_path / "parts" / "deep.py").write_text(
        "def made(model):\n    return fully_shard(get_peft_model(model, lora))\n"
    )
    (item,) = unread_of(tmp_path)
    assert (item.option, item.value) == ("parts.deep", "fully_shard(), get_peft_model")
