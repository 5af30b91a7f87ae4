"""Does everything that a plan is made of follow the one table of its axes?"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from autoplan.base.errors import InputError
from autoplan.base.files import decode, encode
from autoplan.cli.flags import SHARED, plan_flags
from autoplan.readers.model import load_model
from autoplan.search.axes import axes_of
from autoplan.search.explain import TYPED
from autoplan.search.flags import ELSEWHERE, FORBIDDEN_COUNTS, with_flags
from autoplan.search.limits import Limits
from autoplan.spec.axes import AXES, AXIS, COLUMNS, LABELS, SEARCHED, shown
from autoplan.spec.axis import Axis, Kind
from autoplan.spec.derived_values import derived_values
from autoplan.spec.enums import Offload, Precision, RecomputeModule
from autoplan.spec.plan import ParallelPlan, PlanBatch, check_priced

LAYERS = 32
# A plan in which every axis means something.
BUSY = ParallelPlan(
    global_batch=64, tp=2, sp=True, cp=2, pp=2, vp=2, schedule="interleaved", ep=2, etp=2, dp_replicate=2, dp_shard=2
)
FIELDS = tuple(axis for axis in AXES if axis.name != "dp")
# What a description leaves to the model, the training or the list of nodes, or tells of a plan only where it is wrong.
UNTOLD = {"precision", "placement", "global_batch", "grad_reduce_overlap", "param_gather_overlap"}


def other(axis: Axis) -> Any:
    """Another value of an axis than that of `BUSY`, with which the plan exists and is priced."""
    match axis.name:
        case "layers_per_chunk":
            return {"layers_per_chunk": (7, 8, 8, 9)}
        case "recompute_modules":
            return {"recompute": "selective", "recompute_modules": (RecomputeModule.MLP,)}
        case "recompute_num_layers":
            return {"recompute": "full", "recompute_num_layers": 3}
        case "placement":
            return {"placement": ("b", "a")}
        case "vp" | "schedule":
            return {"vp": 1, "schedule": "1f1b"}
        case "offload":
            return {"offload": Offload.OPTIMIZER}
        case "offload_percent":
            return {"offload": Offload.OPTIMIZER, "offload_percent": 57}
        case name:
            value = getattr(BUSY, name)
            if axis.kind is Kind.FLAG:
                return {name: not value}
            if axis.enum:
                return {name: next(word for word in axis.enum if word != value)}
            return {name: 2 * value}


def is_called(axis: Axis) -> Any:
    return axis.name


@pytest.mark.parametrize("axis", FIELDS, ids=is_called)
def test_an_axis_is_a_field_of_a_plan_with_its_default_and_a_column_of_a_batch(axis: Axis) -> None:
    field = next(field for field in dataclasses.fields(ParallelPlan) if field.name == axis.name)
    assert axis.name == "global_batch" or field.default == axis.default
    if axis.is_column:
        assert axis.name in {field.name for field in dataclasses.fields(PlanBatch)}


def test_every_field_of_a_plan_is_an_axis() -> None:
    assert {field.name for field in dataclasses.fields(ParallelPlan)} == {axis.name for axis in FIELDS}
    compound_fields = {"recompute_modules", "recompute_num_layers", "layout", "layouts", "placement"}
    assert {field.name for field in dataclasses.fields(PlanBatch)} == {axis.name for axis in COLUMNS} | compound_fields
    assert len(AXIS) == len(AXES)


@pytest.mark.parametrize("axis", FIELDS, ids=is_called)
def test_a_value_comes_back_from_a_plan_file_and_from_a_batch(axis: Axis) -> None:
    plan = dataclasses.replace(BUSY, **other(axis))
    check_priced(plan)
    text = encode(plan)
    assert axis.name in json.loads(text)
    assert decode(ParallelPlan, json.loads(text), "plan") == plan
    assert PlanBatch.of([BUSY if axis.name != "placement" else plan, plan], LAYERS).plan(1) == plan


@pytest.mark.parametrize("axis", [axis for axis in FIELDS if axis.name not in UNTOLD], ids=is_called)
def test_a_value_that_is_not_the_default_is_told(axis: Axis) -> None:
    plain = dataclasses.replace(BUSY, offload=Offload.OPTIMIZER if axis.name == "offload_percent" else Offload.NONE)
    assert dataclasses.replace(plain, **other(axis)).describe() != plain.describe()


@pytest.mark.parametrize("axis", AXES, ids=is_called)
def test_an_axis_can_be_fixed_or_it_is_said_where_else(axis: Axis) -> None:
    limits = Limits(global_batches=(64,))
    text = {Kind.COUNT: "2", Kind.FLAG: "on"}.get(axis.kind) or str(next(iter(axis.enum or ("",))))
    if axis.elsewhere:
        with pytest.raises(InputError, match="not an axis of the search: "):
            with_flags(limits, fix=[f"{axis.name}={text or 'x'}"], at_most=[], forbid=[])
        assert ELSEWHERE[axis.name] == axis.elsewhere
        return
    fixed = with_flags(limits, fix=[f"{axis.name.replace('_', '-')}={text}"], at_most=[], forbid=[])
    assert fixed.fixes(axis.name) or axis.name == "recompute" or fixed.of(axis.name) == (axis.parse(text, ""),)
    if axis.kind is Kind.COUNT:
        assert with_flags(limits, fix=[], at_most=[f"{axis.name}=2"], forbid=[]).admits(axis.name, 2)


@pytest.mark.parametrize("axis", SEARCHED, ids=is_called)
def test_what_is_searched_are_values_of_which_any_but_the_last_can_be_forbidden(axis: Axis) -> None:
    limits = Limits(global_batches=(64,)).where(**{axis.name: axis.searched})
    assert len(set(axis.searched)) == len(axis.searched)
    assert all(axis.value(axis.code(value)) == value for value in axis.searched)
    if axis.kind is Kind.FLAG:
        assert with_flags(limits, fix=[], at_most=[], forbid=[axis.name]).of(axis.name) == (False,)
        return
    all_but_one = [f"{axis.name}={value}" for value in axis.searched[1:]]
    assert with_flags(limits, fix=[], at_most=[], forbid=all_but_one).of(axis.name) == axis.searched[:1]
    with pytest.raises(InputError, match=f"no other value of {axis.name} is left"):
        with_flags(limits, fix=[], at_most=[], forbid=[f"{axis.name}={value}" for value in axis.searched])


@pytest.mark.parametrize("axis", SEARCHED, ids=is_called)
def test_forbidding_an_axis_keeps_its_plain_value_and_forbidding_a_value_the_others(axis: Axis) -> None:
    limits = Limits(global_batches=(64,)).where(**{axis.name: axis.searched})
    (plain,) = with_flags(limits, fix=[], at_most=[], forbid=[axis.name.replace("_", "-")]).of(axis.name)
    default = False if axis.kind is Kind.FLAG else axis.default
    assert plain == (default if default in axis.searched else axis.searched[0])
    for value in axis.searched:
        left = with_flags(limits, fix=[], at_most=[], forbid=[f"{axis.name}={shown(value)}"]).of(axis.name)
        assert left == tuple(other for other in axis.searched if other != value)


COUNTED = [AXIS[name] for name in FORBIDDEN_COUNTS]


@pytest.mark.parametrize("axis", COUNTED, ids=is_called)
def test_forbidding_a_count_leaves_1_and_forbidding_a_value_of_it_the_others(axis: Axis) -> None:
    limits = Limits(global_batches=(64,), upper_bounds=((axis.name, 16),))
    alone = with_flags(limits, fix=[], at_most=[], forbid=[axis.name])
    assert [value for value in range(1, 17) if alone.admits(axis.name, value)] == [1]
    others = with_flags(limits, fix=[], at_most=[], forbid=[f"{axis.name}=8", f"{axis.name}=1"])
    assert [value for value in range(1, 17) if not others.admits(axis.name, value)] == [1, 8]
    assert f"{axis.name} not 8" in others.describe(load_model("llama3-8b"))
    with pytest.raises(InputError, match=f"no other value of {axis.name} is left: leave it out"):
        with_flags(limits, fix=[f"{axis.name}=8"], at_most=[], forbid=[axis.name])
    with pytest.raises(InputError, match=f"no other value of {axis.name} is left: leave it out"):
        with_flags(limits, fix=[f"{axis.name}=8"], at_most=[], forbid=[f"{axis.name}=8"])


def test_recomputation_is_forbidden_like_other_axes() -> None:
    limits = Limits(global_batches=(64,), recomputes=("none", "full", "full:2", "mlp"))
    assert with_flags(limits, fix=[], at_most=[], forbid=["recompute"]).recomputes == ("none",)
    assert with_flags(limits, fix=[], at_most=[], forbid=["recompute=full"]).recomputes == ("none", "mlp")


@pytest.mark.parametrize(
    ("fix", "forbid"),
    [
        ("offload=optimizer", ["offload"]),
        ("dropout=on", ["dropout"]),
        ("sharding=zero3", ["sharding"]),
        ("sp=on", ["sp"]),
        ("sp=off", ["SP=off"]),
        ("tp=8", ["sp=on", "sp=off"]),
    ],
)
def test_what_is_fixed_cannot_be_forbidden(fix: str, forbid: list[str]) -> None:
    axis = forbid[0].partition("=")[0].lower()
    with pytest.raises(InputError, match=f"no other value of {axis} is left: leave it out"):
        with_flags(Limits(global_batches=(64,)), fix=[fix], at_most=[], forbid=forbid)


def test_what_is_no_axis_is_not_forbidden_and_names_are_told_without_their_values() -> None:
    limits = Limits(global_batches=(64,))
    with pytest.raises(InputError, match="precision=bf16: not an axis of the search: use --precision"):
        with_flags(limits, fix=[], at_most=[], forbid=["precision=bf16"])
    with pytest.raises(
        InputError, match=r"unknown; known: partial_recompute, .*recompute, or a value of one of these"
    ) as refused:
        with_flags(limits, fix=[], at_most=[], forbid=["dp_shard=2"])
    assert "schedule=" not in str(refused.value)


def test_words_are_read_with_either_dash_and_wrong_ones_are_answered_by_all() -> None:
    assert AXIS["schedule"].parse("zb_v", "--fix") == "zb-v"
    assert AXIS["cp_kind"].parse("all-to-all", "--fix") == "all_to_all"
    for axis in AXES:
        if axis.kind is not Kind.LIST:
            with pytest.raises(InputError, match=f"--fix {axis.name}=maybe: must be "):
                axis.parse("maybe", "--fix")


def test_changes_are_named_by_the_table_where_they_mean_something() -> None:
    named = axes_of(load_model("deepseek-v3"), dataclasses.replace(BUSY, offload=Offload.OPTIMIZER, ep_overlap=True))
    assert set(named) == {axis.changed_as for axis in FIELDS} - {""}
    assert set(LABELS) <= set(named)
    assert set(named) - set(axes_of(load_model("llama3-8b"), ParallelPlan(global_batch=1))) == {
        *("sp", "tp_overlap", "cp_kind", "dynamic_cp", "schedule", "layers", "rank_order"),  # of one device
        *("sharding", "grad_reduce_overlap", "param_gather_overlap", "reduce_dtype"),
        *("quantized_gathers", "quantized_reductions"),
        *("ep", "etp", "ep_overlap", "dispatcher", "token_dropping", "router_fusion", "rope_fusion"),  # without experts
        *("shared_expert_overlap", "delay_wgrad"),
        "offload_percent",  # with nothing on the host
    }
    assert {axis.changed_as for axis in TYPED} == set(named) - {"layers", "nodes"}


def test_a_command_gets_the_flags_of_the_table() -> None:
    @plan_flags(after="first")
    def command(first: int, last: int = 0, **axes: Any) -> None: ...

    names = [*command.__signature__.parameters]  # type: ignore[attr-defined]
    assert names == ["first", *(axis.name for axis in AXES if axis.spelled and axis.name not in SHARED), "last"]
    assert {"tp", "sp", "tp_overlap", "layers_per_chunk"} < set(names)


# -- what follows from other fields -----------------------------------------------------------------------------------


def test_dependent_fields_follow() -> None:
    plan = ParallelPlan.derived(num_devices=64, has_experts=True, global_batch=64, tp=4, pp=2, vp=3, dp_replicate=2)
    assert (plan.dp_shard, plan.dp, plan.etp, plan.schedule) == (4, 8, 4, "interleaved")
    assert ParallelPlan.derived(num_devices=8, global_batch=8, dp_shard=2).dp_replicate == 4
    assert ParallelPlan.derived(global_batch=8, tp=2).etp == 1
    assert not ParallelPlan.derived(global_batch=8, sp=True).sp
    assert ParallelPlan.derived(global_batch=8, tp=2, sp=True).sp
    assert not ParallelPlan.derived(global_batch=8, sharding="none").param_gather_overlap


def test_what_is_said_is_kept() -> None:
    said = {"tp": 2, "vp": 2, "schedule": "zb-v", "etp": 1, "sharding": "zero3", "param_gather_overlap": False}
    assert derived_values(global_batch=8, has_experts=True, **said).items() >= said.items()
    assert decode(ParallelPlan, derived_values(global_batch=8, precision="fp16"), "plan").precision == Precision.FP16


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tp": 3}, "tp 3 does not divide the 16 devices: or so"),
        ({"tp": 2, "pp": 16}, "tp 2 x pp 16 does not divide the 16 devices"),
        ({"cp": 0}, "cp must be at least 1, got 0"),
        ({"dp_replicate": 3}, "dp_replicate 3 does not divide dp 16"),
        ({"dp_shard": 5}, "dp 16 is not a multiple of the 5 ranks"),
    ],
)
def test_degrees_that_leave_no_whole_number_are_refused(values: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        ParallelPlan.derived(num_devices=16, global_batch=8, hint=": or so", **values)
