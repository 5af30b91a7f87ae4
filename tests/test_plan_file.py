"""Is a plan file that contradicts itself refused?"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autoplan.base.errors import InputError
from autoplan.base.files import decode
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.readers.model import load_model
from autoplan.search.ranking import ranked
from autoplan.spec.framework import GROUPS
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.plan_file import PLAN_FILE_VERSION, MixedPlanFile, PlanFile, SpaceFlags
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec


def table() -> dict[str, Any]:
    """A plan file as it is read: lists and dictionaries."""
    problem = Problem(
        model=load_model("llama3-8b"),
        training=TrainingSpec(seq_len=4096),
        cluster=load_cluster("h100-sxm:1x8"),
        framework=load_framework("megatron-core"),
    )
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
    says = "mixed_schema_version is 2, this autoplan reads 3: make the file again with autoplan search x"
    with pytest.raises(InputError, match=says):
        decode(MixedPlanFile, older, "plan.json")


def test_a_plan_file_of_version_2_is_read_whose_traits_stand_in_no_groups() -> None:
    file = msgspec.json.decode(msgspec.json.encode(table()))
    today = decode(PlanFile, file, "plan.json")
    traits = [file["framework"].pop(group) for group in GROUPS]
    file["framework"] |= {name: value for group in traits for name, value in group.items()}
    older = decode(PlanFile, file | {"schema_version": 2}, "plan.json")
    assert older.framework == today.framework


def test_what_was_a_trait_in_version_5_is_a_choice_of_the_plans() -> None:
    file = msgspec.json.decode(msgspec.json.encode(table())) | {"schema_version": 5}
    file["training"] |= {"attention": "flash-fp8"}
    file["framework"]["experts"] |= {"drops_tokens": True, "fused_router": True, "narrow_attention": []}
    file["framework"]["kernels"] |= {"fused_latent_rope": True}
    read = decode(PlanFile, file, "plan.json")
    assert read.training.attention == "flash"
    for priced in (read.best, *read.alternatives):
        assert not priced.plan.fp8_attention  # of products in 16 bits
        assert not priced.plan.token_dropping  # of a model without experts and latents
        assert not priced.plan.router_fusion
        assert not priced.plan.rope_fusion
    file["model"]["moe"] = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 1024}
    read = decode(PlanFile, file, "plan.json")
    assert read.best.plan.token_dropping
    assert read.best.plan.dispatcher == "alltoall"
    assert read.best.plan.router_fusion
    narrow = msgspec.json.decode(msgspec.json.encode(file).replace(b'"precision":"bf16"', b'"precision":"fp8"'))
    assert decode(PlanFile, narrow, "plan.json").best.plan.fp8_attention


def test_dropout_was_a_trait_in_version_6_and_is_a_choice_of_the_plans() -> None:
    file = msgspec.json.decode(msgspec.json.encode(table())) | {"schema_version": 6}
    file["framework"]["kernels"] |= {"gpt_dropout": True}
    assert not decode(PlanFile, file, "plan.json").best.plan.dropout  # of a model that is no GPT
    file["framework"]["kernels"] |= {"dropout": True}
    read = decode(PlanFile, file, "plan.json")
    assert all(priced.plan.dropout for priced in (read.best, *read.alternatives))
    assert read.framework.choice("dropout") is True


def test_scales_of_rows_were_a_trait_in_version_7_and_are_a_choice_of_the_plans() -> None:
    file = msgspec.json.decode(msgspec.json.encode(table()).replace(b'"precision":"bf16"', b'"precision":"fp8"'))
    file |= {"schema_version": 7}
    file["framework"]["kernels"] |= {"narrow_gemm_share": 1.0}
    assert decode(PlanFile, file, "plan.json").best.plan.fp8_scaling == "delayed"
    file["framework"]["kernels"] |= {"scales_by_own_largest": True}
    assert decode(PlanFile, file, "plan.json").best.plan.fp8_scaling == "tensorwise"
    file["framework"]["kernels"] |= {"narrow_gemm_share": 0.8}
    read = decode(PlanFile, file, "plan.json")
    assert all(priced.plan.fp8_scaling == "rowwise" for priced in (read.best, *read.alternatives))
    assert (read.framework.choice("fp8_scaling"), read.framework.kernels.rowwise_gemm_share) == ("rowwise", 0.8)


@pytest.mark.parametrize(("num_publishers", "spread"), [(0, 0.2), (7, None)])
def test_a_plan_file_of_version_4_is_read_whose_calibration_counts_publishers(
    num_publishers: int, spread: float | None
) -> None:
    file = msgspec.json.decode(msgspec.json.encode(table()))
    file["calibration"] |= {"num_publishers": num_publishers, "time_spread": 0.2, "exposed_share": 0.4}
    calibration = decode(PlanFile, file | {"schema_version": 4}, "plan.json").calibration
    # Runs of the cluster itself keep their spread; published ones have the general spreads today.
    assert calibration.time_spread == spread
    assert calibration.exposed_share == (0.4 if spread else 1.0)


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        ("best", "verdict", "maybe", "Invalid enum value 'maybe'"),
        ("best", "step_s", -1.0, "step_s must be a positive finite number, got -1"),
        ("best", "step_s", 0.0, "step_s must be a positive finite number, got 0"),
        ("best", "low_s", 1e9, "step_s .* must lie in its interval"),
        ("best", "memory_bytes", -5.0, "memory_bytes must be a positive finite number, got -5"),
        ("best", "mfu", 0.0, "mfu must be a positive"),
        ("best", "tokens_per_s_per_device", -2.0, "tokens_per_s_per_device must be a positive"),
        ("best", "oom_probability", 1.5, "oom_probability must lie in"),
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


def test_flags_of_a_search_of_before_forbid_what_it_left_out() -> None:
    flags = decode(SpaceFlags, {"global_batch": "64", "fix": ["tp=2"], "allow": ["zero3", "tp-overlap"]}, "plan.json")
    assert flags.fix == ("tp=2",)
    assert set(flags.forbid) == {
        *("sharding=zero2", "ep_overlap", "offload"),
        *("partial_recompute", "uneven_stages", "partial_sharding"),
    }
    assert decode(SpaceFlags, {"global_batch": "64"}, "plan.json").forbid == ()
