"""Can every target start what a search for its framework finds, where nothing is shared among devices?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.base.files import decode
from autoplan.frameworks.registry import TARGETS, facts_for
from autoplan.launch.targets import exported
from autoplan.spec.plan_file import PlanFile
from commands import run

PIPELINES = {"fsdp2", "megatron-bridge", "megatron-lm", "nanotron", "primus", "torchtitan", "autoplan"}


def searched(folder: Path, to: str, cluster: str, *more: str) -> PlanFile:
    """The answer of a search for what `to` starts."""
    framework = facts_for(TARGETS[to].rules[0])
    place = ("--cluster", cluster, "--global-batch", "12", "--seq-len", "2048")
    done = run(folder, "search", "llama3-8b", *place, "--framework", framework, "-q", "--json", *more)
    assert done.returncode == 0, done.stderr
    return decode(PlanFile, json.loads(done.stdout), "plan.json")


@pytest.mark.parametrize("to", [*TARGETS])
def test_what_is_searched_for_a_target_on_a_lone_device_or_in_a_pipeline_is_started(tmp_path: Path, to: str) -> None:
    file = searched(tmp_path, to, "b300:1x1")
    assert file.best.plan.sharding == "none"
    assert exported(file, to, "torchrun")
    if to in PIPELINES:
        piped = searched(tmp_path, to, "h100-sxm:1x4", "--fix", "pp=4", "--force")
        assert (piped.best.plan.dp, piped.best.plan.sharding) == (1, "none")
        assert exported(piped, to, "torchrun")


@pytest.mark.parametrize("to", ["accelerate", "fsdp2", "torchtitan"])
def test_gathers_that_wait_are_refused_where_a_target_cannot_be_told(tmp_path: Path, to: str) -> None:
    file = searched(tmp_path, to, "h100-sxm:1x4", "--fix", "dp=4", "--forbid", "partial_recompute")
    assert file.best.plan.sharding != "none"
    assert exported(file, to, "torchrun")
    waiting = replace(file, best=replace(file.best, plan=replace(file.best.plan, param_gather_overlap=False)))
    with pytest.raises(InputError, match=r"always gathers ahead|traffic that is not overlapped"):
        exported(waiting, to, "torchrun")
