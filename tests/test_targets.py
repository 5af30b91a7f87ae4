"""Can every target start what a search for its framework finds, where nothing is shared among devices?"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import autoplan
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import decode
from autoplan.frameworks.common.job import File
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import TARGETS, book_of, facts_of
from autoplan.launch.targets import exported
from autoplan.spec.axes import AXES
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.optimizers import OPTIMIZERS
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from commands import run

PIPELINES = {
    "automodel",
    "fsdp2",
    "megatron-bridge",
    "megatron-lm",
    "ms-swift",
    "maxtext",
    "nanotron",
    "primus",
    "torchtitan",
    "verl",
    "autoplan",
}
WITH_FSDP2 = tuple(to for to in TARGETS if "zero1" not in book_of(load_framework(facts_of(to))).words("sharding"))


@cache
def searched(framework: str, cluster: str, *more: str) -> PlanFile:
    """The answer of a search for a framework, which several targets share."""
    place = ("--cluster", cluster, "--global-batch", "12", "--seq-len", "2048")
    with TemporaryDirectory() as folder:
        done = run(Path(folder), "search", "llama3-8b", *place, "--framework", framework, "-q", "--json", *more)
    assert done.returncode == 0, done.stderr
    return decode(PlanFile, json.loads(done.stdout), "plan.json")


@pytest.mark.parametrize("to", [*TARGETS])
def test_what_is_searched_for_a_target_on_a_lone_device_or_in_a_pipeline_is_started(to: str) -> None:
    # Axolotl holds weights in 16 bits where FSDP makes no fp32 of them.
    more = {"axolotl": ("--fix", "main_weights=bf16"), "verl": ("--to", "verl")}.get(to, ())
    file = searched(facts_of(to), "b300:1x1", *more)
    assert file.best.plan.sharding == "none"
    assert exported(file, to, "torchrun")
    if to in PIPELINES:
        piped = searched(facts_of(to), "h100-sxm:1x4", "--fix", "pp=4", *more)
        assert (piped.best.plan.dp, piped.best.plan.sharding) == (1, "none")
        assert exported(piped, to, "torchrun")


@pytest.mark.parametrize("to", WITH_FSDP2)
def test_gathers_that_wait_are_refused_where_a_target_cannot_be_told(to: str) -> None:
    file = searched(facts_of(to), "h100-sxm:1x4", "--fix", "dp=4", "--forbid", "partial_recompute")
    assert file.best.plan.sharding != "none"
    assert exported(file, to, "torchrun")
    waiting = replace(file, best=replace(file.best, plan=replace(file.best.plan, param_gather_overlap=False)))
    with pytest.raises(InputError, match=r"always gathers ahead|param_gather_overlap off"):
        exported(waiting, to, "torchrun")


OPTIONS = (
    "offload_modules",
    "offload_layers",
    "fp8_attention",
    "fp8_activation_input",
    "cuda_graphs",
    "grad_dtype",
    "narrow_params",
    "main_weights",
    "moment_dtype",
)
CHANGED = [(axis.name, value) for axis in AXES if axis.name in OPTIONS for value in axis.enum or (False, True)]
TUNINGS = (
    FineTuning(rank=8),
    FineTuning(rank=8, targets=("all-linear",), quantization="nf4"),
    FineTuning(rank=8, targets=("linear_qkv",), dora=True),
    FineTuning(rank=8, saved_modules=("lm_head",)),
    FineTuning(frozen=("embed_tokens",)),
)


# (target, precision): how many of the choices below it writes at least.
WRITTEN = {(to, "bf16"): 0 for to in TARGETS} | {
    ("accelerate", "bf16"): 9,
    ("automodel", "bf16"): 2,
    ("axolotl", "bf16"): 8,
    ("deepspeed", "bf16"): 8,
    ("hf-trainer", "bf16"): 8,
    ("llama-factory", "bf16"): 9,
    ("megatron-bridge", "bf16"): 8,
    ("megatron-bridge", "mxfp8"): 12,
    ("megatron-lm", "bf16"): 6,
    ("megatron-lm", "mxfp8"): 9,
    ("ms-swift", "bf16"): 2,
    ("ms-swift", "mxfp8"): 4,
    ("primus", "bf16"): 6,
    ("primus", "mxfp8"): 9,
    ("verl", "bf16"): 2,
}


def settings(files: tuple[File, ...]) -> list[str]:
    """The lines of files that a program reads."""
    return [line for file in files for line in file.text.splitlines() if not line.lstrip().startswith("#")]


@pytest.mark.parametrize(("to", "precision"), WRITTEN)
def test_every_option_of_a_plan_is_written_or_refused(to: str, precision: str) -> None:
    """An option that is dropped would start another plan than was priced."""
    plan = {"micro_batch": 1, "sharding": "zero3" if to in WITH_FSDP2 else "zero1"}
    place = {"cluster": "b200:1x8", "global_batch": 64, "seq_len": 2048, "plan": plan, "precision": precision}
    file = autoplan.estimate("llama3-8b", **place, framework=facts_of(to)).file
    before, written = settings(exported(file, to, "torchrun")), set()

    def write(what: str, changed: PlanFile) -> None:
        try:
            files = exported(changed, to, "torchrun")
        except AutoplanError:
            return
        assert settings(files) != before, f"{to} drops {what}"
        written.add(what)

    for name, value in CHANGED:
        plan_with: ParallelPlan = file.best.plan
        if getattr(plan_with, name) != value:
            plan_with = replace(plan_with, **{name: value})
            write(f"{name}={value}", replace(file, best=replace(file.best, plan=plan_with)))
    trained = [("optimizer", name) for name in OPTIMIZERS if name != "adam"]
    for name, choice in (*trained, *(("finetuning", tuning) for tuning in TUNINGS)):
        write(f"{name}={choice}", replace(file, training=replace(file.training, **{name: choice})))
    assert len(written) >= WRITTEN[to, precision], sorted(written)


@pytest.mark.parametrize("to", ["accelerate", "fsdp2", "deepspeed"])
def test_files_name_the_attention_that_only_a_program_can_take(to: str) -> None:
    plan = {"micro_batch": 1, "sharding": "zero3"}
    place = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 2048, "plan": plan, "attention": "flash1"}
    file = autoplan.estimate("llama3-8b", **place, framework=facts_of(to)).file
    assert "Priced with flash1 attention" in exported(file, to, "torchrun")[0].text
    usual = replace(file, best=replace(file.best, plan=replace(file.best.plan, attention="flash")))
    assert "Priced with" not in exported(usual, to, "torchrun")[0].text
