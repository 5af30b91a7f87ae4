"""Is a plan file that contradicts itself refused?"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autoplan.base.errors import InputError
from autoplan.base.files import decode
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.search.ranking import ranked
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.plan_file import MIXED_FILE_VERSION, PLAN_FILE_VERSION, MixedPlanFile, PlanFile
from problems import problem_for


def table() -> dict[str, Any]:
    """A plan file as it is read: lists and dictionaries."""
    problem = problem_for("llama3-8b", "h100-sxm:1x8")
    plan = ParallelPlan(global_batch=16, micro_batch=1, tp=4, sp=True, dp_shard=2, sharding="zero1")
    best, *_ = ranked(problem, estimate(problem, PlanBatch.of([plan], problem.model.num_layers)), [0])
    file = PlanFile(
        schema_version=PLAN_FILE_VERSION,
        versions={},
        command="",
        model=problem.model,
        training=problem.training,
        cluster=problem.cluster,
        framework=problem.framework,
        calibration=problem.calibration,
        reserve_bytes=0.0,
        best=best,
        stages=stage_costs(problem, plan),
        alternatives=(best,),
        certificate=None,
    )
    found: dict[str, Any] = msgspec.to_builtins(file)
    return found


def test_a_plan_file_that_agrees_with_itself_is_read() -> None:
    assert decode(PlanFile, msgspec.json.decode(msgspec.json.encode(table())), "plan.json").best.verdict == "fits"


def test_the_version_of_a_file_is_looked_at_before_its_keys() -> None:
    """Plans of mixed clusters had other keys in version 2, and files of a later autoplan may have more."""
    with pytest.raises(InputError, match=rf"plan.json: schema_version is 99, this autoplan reads {PLAN_FILE_VERSION}$"):
        decode(PlanFile, {"schema_version": 99, "more": 1}, "plan.json")
    older = {"mixed_schema_version": 2, "command": "autoplan search x", "best": {"plan": {"sharding": "zero1"}}}
    reads = f"mixed_schema_version is 2, this autoplan reads {MIXED_FILE_VERSION}"
    with pytest.raises(InputError, match=f"{reads}: make the file again with autoplan search x"):
        decode(MixedPlanFile, older, "plan.json")


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        ("best", "verdict", "maybe", r"best.verdict must be one of fits, .*, got 'maybe'"),
        ("best", "step_s", -1.0, "step_s must be a positive finite number, got -1"),
        ("best", "step_s", 0.0, "step_s must be a positive finite number, got 0"),
        ("best", "low_s", 1e9, "step_s .* must be inside its interval"),
        ("best", "memory_bytes", -5.0, "memory_bytes must be a positive finite number, got -5"),
        ("best", "mfu", 0.0, "mfu must be a positive"),
        ("best", "tokens_per_s_per_device", -2.0, "tokens_per_s_per_device must be a positive"),
        ("best", "oom_probability", 1.5, "oom_probability must be in"),
        ("stages", "forward_s", -1.0, "forward_s must be finite and not negative"),
        ("stages", "memory_bytes", -1.0, "memory_bytes must be finite and not negative"),
        ("alternatives", "step_s", 0.0, "step_s must be a positive"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(place: str, key: str, value: Any, says: str) -> None:
    file = msgspec.json.decode(msgspec.json.encode(table()))
    (file[place] if place == "best" else file[place][0])[key] = value
    with pytest.raises(InputError, match=says):
        decode(PlanFile, file, "plan.json")


@pytest.mark.parametrize("place", ["best", "alternatives"])
def test_a_plan_in_another_precision_than_the_training_is_refused(place: str) -> None:
    file = msgspec.json.decode(msgspec.json.encode(table()))
    (file[place] if place == "best" else file[place][0])["plan"]["precision"] = "fp8"
    with pytest.raises(InputError, match=rf"{place}.*plan\.precision is fp8, training\.precision bf16"):
        decode(PlanFile, file, "plan.json")


@pytest.mark.parametrize("place", ["best", "alternatives"])
def test_a_plan_without_a_micro_batch_is_refused(place: str) -> None:
    file = msgspec.json.decode(msgspec.json.encode(table()))
    (file[place] if place == "best" else file[place][0])["plan"]["global_batch"] = 1
    with pytest.raises(InputError, match="global_batch 1 is less than micro_batch 1 x dp 2"):
        decode(PlanFile, file, "plan.json")
