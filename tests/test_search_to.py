"""A search for a target of export: its plans are those that the target can express."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_problems import draw_plans

import autoplan
from autoplan.api.plan_files import make_plan_file
from autoplan.api.problem import make_problem, make_space
from autoplan.base.errors import InputError
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import TARGETS, facts_of, facts_of_version, rules_for, usual_target
from autoplan.launch.targets import job_of
from autoplan.search.study import search
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import SpaceFlags
from commands import run

NODE, NODES = "h100-sxm:1x8", "h100-sxm:2x8"
# Every version on several nodes, and every target on one.
PLACES = [(to, NODES) for target in TARGETS.values() for to in target.spellings]
PLACES += [(target.spellings[0], NODE) for target in TARGETS.values()]


@pytest.mark.parametrize(("to", "cluster"), PLACES)
def test_every_plan_of_the_space_can_be_exported(to: str, cluster: str) -> None:
    framework = facts_of(to.partition("@")[0])
    model = "qwen3-30b-a3b" if to.startswith(("megatron-lm", "torchtitan")) and cluster == NODES else "llama3.1-8b"
    problem = make_problem(model, cluster=cluster, framework=framework, seq_len=4096, precision="bf16")
    space = make_space(problem, 32, to=to)
    result = search(problem, space)
    flags = SpaceFlags(global_batch="32", to=to)
    file = make_plan_file(problem, result.rivals, result.certificate, space=flags)
    job_of(file, to)
    plans = draw_plans(space, space.cells(), np.random.default_rng(4), 50)
    assert len(plans) >= 40
    for at in range(len(plans)):
        job_of(replace(file, best=replace(file.best, plan=plans.plan(at))), to)


def test_the_answer_for_accelerate_has_no_pipeline_and_is_the_best_of_those() -> None:
    about = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 4096}
    free = autoplan.search("llama3-8b", framework="pytorch-fsdp", prefer="fastest", **about)  # type: ignore[arg-type]
    found = autoplan.search("llama3-8b", to="accelerate", prefer="fastest", **about)  # type: ignore[arg-type]
    assert found.plan.pp == 1
    assert found.file.framework.name == "pytorch-fsdp"
    assert found.file.space is not None
    assert found.file.space.to == "accelerate"
    assert found.file.best.step_s >= free.file.best.step_s
    assert found.export("accelerate").files


@pytest.mark.parametrize("framework", ["axolotl", "hf-trainer", "llama-factory", "ms-swift"])
def test_a_framework_that_shares_its_facts_is_searched_for_what_it_starts(framework: str) -> None:
    about = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 4096}
    found = autoplan.search("llama3-8b", framework=framework, **about)  # type: ignore[arg-type]
    assert found.file.space is not None
    assert (found.file.space.to, found.file.framework.name) == (framework, facts_of(framework))
    assert found.export(framework).files


@pytest.mark.parametrize(
    ("framework", "plan", "able", "unable"),
    [
        # MiCS, zero3 over some of the replicas, was removed after 0.19.6.
        ("deepspeed-zero", {"sharding": "zero3", "dp_replicate": 2, "dp_shard": 8}, "deepspeed@0.19.6", "deepspeed"),
        ("torchtitan", {"sharding": "zero3", "tp": 2, "dp_shard": 8}, "torchtitan", "torchtitan@0.2"),
    ],
)
def test_a_version_of_a_target_takes_other_plans(framework: str, plan: dict[str, Any], able: str, unable: str) -> None:
    problem = make_problem("llama3.1-8b", cluster="h100-sxm:2x8", framework=framework, seq_len=4096, precision="bf16")
    made = ParallelPlan.derived(global_batch=64, micro_batch=1, precision="bf16", **plan)
    assert not broken(rules_for(problem.framework, able), problem.workload, made)
    assert broken(rules_for(problem.framework, unable), problem.workload, made)


def test_a_version_that_does_not_exist_is_told_those_that_do() -> None:
    about = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 4096}
    with pytest.raises(
        InputError, match=r"no version '0\.9' of torchtitan: known are torchtitan@0\.3, torchtitan@0\.2"
    ):
        autoplan.search("llama3-8b", to="torchtitan@0.9", **about)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no version '1' of nanotron: leave the version out"):
        autoplan.search("llama3-8b", to="nanotron@1", **about)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no version '0\.17' of megatron-lm: .* searched with --to megatron-lm@0\.17"):
        autoplan.search("llama3-8b", framework="megatron-lm@0.17", **about)  # type: ignore[arg-type]


def test_a_version_of_a_target_is_planned_with_its_own_facts() -> None:
    """torchtitan 0.2 runs torch's own attention, later versions FlexAttention, which is slower."""
    assert [facts_of_version(to) for to in ("torchtitan", "torchtitan@main", "torchtitan@0.2", "megatron-lm@0.13")] == [
        "torchtitan", "torchtitan", "torchtitan-0.2", "megatron-core",
    ]  # fmt: skip
    about = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 4096}
    found = autoplan.search("llama3-8b", to="torchtitan@0.2", **about)  # type: ignore[arg-type]
    assert found.file.framework.name == "torchtitan-0.2"
    assert "where version" not in found.export("torchtitan@0.2").files[0].text


def test_what_a_target_cannot_be_told_of_a_model_is_one_line_before_anything_is_written(tmp_path: Path) -> None:
    words = ("--cluster", "h100-sxm:1x8", "--global-batch", "64", "--seq-len", "2048")
    done = run(tmp_path, "search", "gemma2-9b", "--to", "megatron-lm", *words)
    assert done.returncode == 1
    assert "cannot express a second norm, after every block" in done.stderr
    assert not (tmp_path / "plan.json").exists()


def test_a_target_of_another_framework_is_refused() -> None:
    with pytest.raises(InputError, match="not for torchtitan: search with --framework torchtitan"):
        autoplan.search(
            "llama3-8b",
            cluster="h100-sxm:1x8",
            global_batch=64,
            seq_len=4096,
            to="torchtitan",
            framework="megatron-core",
        )


@pytest.mark.parametrize(
    ("name", "usual"),
    [("trl", "hf-trainer"), ("nemo-automodel", "automodel"), ("megatron-core@0.14", "megatron-lm@0.14"), ("x", "x")],
)
def test_a_target_may_be_called_as_its_facts_or_a_program_that_it_starts(name: str, usual: str) -> None:
    assert usual_target(name) == usual
