"""Do the data types of gradients and states save what they save, and does a search fix those that only save?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autoplan
from autoplan.api.estimate import make_plan
from autoplan.api.problem import make_problem, make_space
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.state_types import reduced_grad_bytes
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.presets import load_framework
from autoplan.frameworks.registry import book_of
from autoplan.readers.model import load_model
from autoplan.search.allowances import allowances
from autoplan.search.study import search
from autoplan.spec.axes import AXIS, SEARCHED
from autoplan.spec.blocks import Experts
from autoplan.spec.plan import ParallelPlan, PlanBatch, column_type
from autoplan.spec.problem import Problem
from search_cases import DENSE

GIB = 2.0**30
MIXTURE = replace(DENSE, moe=Experts(num_experts=8, experts_per_token=2, expert_ffn_size=1024))


def problem_of(framework: str = "megatron-core", precision: str = "bf16", model: object = DENSE) -> Problem:
    return make_problem(model, cluster="h100-sxm:1x8", seq_len=4096, framework=framework, precision=precision)  # type: ignore[arg-type]


def cost_of(problem: Problem, **changes: object) -> dict[str, float]:
    plan = ParallelPlan(**{"global_batch": 64, "dp_shard": 8, "precision": problem.training.precision, **changes})  # type: ignore[arg-type]
    costs = estimate(problem, PlanBatch.of([plan], problem.model.num_layers))
    return {
        **{name: float(value[0]) for name, value in costs.memory_terms_bytes.items()},
        **{f"{name}_s": float(value[0]) for name, value in costs.terms_s.items()},
    }


@pytest.mark.parametrize(
    ("changes", "saved_bytes", "unmoved_bytes"),
    [
        ({"main_weights": "remainders"}, 2, 2),  # 4 + 4 written and read less 2 + 2, and the weights are read: 2
        ({"main_weights": "fp16"}, 2, 4),
        ({"main_weights": "remainders", "moment_dtype": "bf16"}, 6, 10),
        ({"main_weights": "remainders", "moment_dtype": "fp8"}, 8, 14),
    ],
)
def test_states_take_and_move_what_their_types_do(
    changes: dict[str, str], saved_bytes: float, unmoved_bytes: float
) -> None:
    problem = problem_of()
    plain, narrow = cost_of(problem), cost_of(problem, **changes)
    assert narrow["optimizer"] / plain["optimizer"] == pytest.approx((12 - saved_bytes) / 12)
    parameters = plain["optimizer"] / 12 * 8
    # The update moves 30 bytes of an own parameter, and sets the gradients of all to zero.
    moved = 30 * parameters / 8 + 4 * parameters
    assert narrow["optimizer_s"] / plain["optimizer_s"] == pytest.approx(1 - unmoved_bytes * parameters / 8 / moved)


def test_16_bit_gradients_take_half_the_buffer_and_half_the_wire() -> None:
    problem = problem_of()
    plain, half, main = (cost_of(problem, grad_dtype=word) for word in ("fp32", "bf16", "bf16_main"))
    assert half["gradients"] == main["gradients"] == plain["gradients"] / 2
    assert half["data_parallel_reduce_s"] == main["data_parallel_reduce_s"] < plain["data_parallel_reduce_s"]
    # Of what lives during the update there is an fp32 copy of the own shard, unless main gradients are narrow too.
    small = {"micro_batch": 1, "global_batch": 8, "recompute": "full"}
    terms = [cost_of(problem, grad_dtype=word, **small) for word in ("bf16", "bf16_main")]
    assert terms[0]["update"] >= terms[1]["update"] == 0.0


def test_copies_of_automodel_reduce_in_the_type_of_their_weights() -> None:
    """Its DDP has no policy of mixed precision, by which FSDP2 reduces 16-bit gradients in fp32."""
    problem = problem_of("nemo-automodel")
    plan = ParallelPlan(global_batch=64, dp_shard=8, sharding="none", main_weights="bf16")
    copies, shards = plan, replace(plan, sharding="zero3")
    assert tuple(reduced_grad_bytes(problem, problem.batch([copies, shards]))) == (2, 4)
    rules = book_of(problem.framework).rules
    for other in ({"reduce_dtype": "half"}, {"main_weights": "fp32"}):
        (text,) = broken(rules, problem.workload, replace(copies, **other))
        assert text.startswith("unsharded with ")
        assert not broken(rules, problem.workload, replace(shards, **other))


@pytest.mark.parametrize(
    ("framework", "word", "bytes_on_wire"),
    [("torchtitan", "half", (4, 2)), ("deepspeed-zero", "fp32", (2, 4)), ("pytorch-fsdp", "fp32", (2, 4))],
)
def test_gradients_travel_in_the_type_that_a_plan_says(
    framework: str, word: str, bytes_on_wire: tuple[int, int]
) -> None:
    problem = problem_of(framework)
    usual = ParallelPlan(global_batch=64, dp_shard=8, sharding="zero3")
    batch = PlanBatch.of([usual, replace(usual, reduce_dtype=word)], problem.model.num_layers)
    assert tuple(reduced_grad_bytes(problem, batch)) == bytes_on_wire
    costs = estimate(problem, batch)
    narrow, wide = np.argsort(bytes_on_wire)
    assert costs.step_s[narrow] <= costs.step_s[wide]
    assert costs.memory_bytes[narrow] <= costs.memory_bytes[wide]
    space = make_space(problem, 64)
    assert space.limits.of("reduce_dtype") == ("usual",)
    assert make_space(problem, 64, allow=["reduce_dtype"]).limits.of("reduce_dtype") == ("usual", word)


def test_megatron_bridge_reduces_16_bits_unless_told_otherwise() -> None:
    framework = load_framework("nemo")
    assert framework.choices == {
        "grad_dtype": "bf16",
        "narrow_params": True,
        "router_fusion": True,
        "rope_fusion": True,
        "cross_entropy_fusion": "te",
    }
    assert load_framework("nemo-26.06").choices == framework.choices
    space = make_space(problem_of("nemo"), 64)
    assert space.limits.of("grad_dtype") == ("bf16",)
    assert make_space(problem_of("nemo"), 64, allow=["grad_dtype"]).limits.of("grad_dtype")[0] == "bf16"


def test_versions_do_not_offer_what_came_later() -> None:
    assert "moment_dtype" not in book_of(load_framework("nemo-24.07")).extras
    assert "moment_dtype" in book_of(load_framework("nemo")).extras
    with pytest.raises(InputError, match="has no moment_dtype bf16: it has fp32"):
        make_space(problem_of("nemo-24.07"), 64, fix=["moment_dtype=bf16"])
    with pytest.raises(InputError, match="torchtitan has no moment_dtype bf16"):
        make_space(problem_of("torchtitan"), 64, fix=["moment_dtype=bf16"])


def test_what_changes_the_numerics_is_searched_when_it_is_allowed() -> None:
    problem = problem_of()
    unasked = make_space(problem, 64).limits
    assert unasked.of("main_weights") == ("fp32", "remainders")
    assert (unasked.of("moment_dtype"), unasked.of("grad_dtype")) == (("fp32",), ("fp32",))
    allowed = make_space(problem, 64, allow=["moment-dtype=bf16", "grad_dtype"]).limits
    assert allowed.of("moment_dtype") == ("fp32", "bf16")
    assert allowed.of("grad_dtype") == ("fp32", "bf16", "bf16_main")
    for text, says in (
        ("tp", "unknown; "),
        ("moment_dtyp", "did you mean moment_dtype"),
        ("moment_dtype=int", "of moment_dtype there are moment_dtype=fp32"),
    ):
        with pytest.raises(InputError, match=says):
            make_space(problem, 64, allow=[text])
    fixed = make_space(problem, 64, allow=["moment_dtype", "grad_dtype=bf16"], fix=["moment_dtype=bf16"]).limits
    assert fixed.of("moment_dtype") == ("bf16",)
    with pytest.raises(InputError, match="--allow grad-dtype=bf16 and --fix grad_dtype=fp32: leave one of them out"):
        make_space(problem, 64, allow=["grad-dtype=bf16"], fix=["grad_dtype=fp32"])


def test_narrow_weights_that_are_asked_for_stay_in_the_plan_for_a_rule_to_refuse() -> None:
    assert not make_plan(problem_of("nemo"), 64, {}).narrow_params  # its usual choice needs low-precision GEMMs
    assert make_plan(problem_of("nemo"), 64, {"narrow_params": True}).narrow_params


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize(
    ("framework", "allow"),
    [("megatron-core", ("grad_dtype", "narrow_params", "main_weights", "moment_dtype")), ("nemo", ())],
)
def test_a_search_finds_what_enumeration_over_all_types_finds(
    precision: str, model: object, framework: str, allow: tuple[str, ...]
) -> None:
    problem = problem_of(framework, precision, model)
    few = ["micro_batch=1", "cp=1", "recompute=none"]
    space = make_space(problem, 16, allow=allow, fix=few, at_most=["vp=2"], forbid=["uneven_stages"])
    result = search(problem, space, margin=0.0)
    batch, _ = space.plans(space.cells())
    axes = [axis for axis in SEARCHED if axis.is_monotone]
    others = [batch]
    for axis in axes:
        others = [
            replace(part, **{axis.name: np.full(len(part), AXIS[axis.name].code(value), dtype=column_type(axis))})  # type: ignore[arg-type]
            for part in others
            for value in space.limits.of(axis.name)
        ]
    everything = PlanBatch.concatenate(others)
    lawful = np.ones(len(everything), dtype=bool)
    for rule in space.rules:
        lawful &= rule.holds(problem.workload, everything)
    costs = estimate(problem, everything.take(lawful))
    fits = costs.verdict == 0
    assert fits.any()
    assert result.ranked[0].step_s == pytest.approx(costs.step_s[fits].min(), rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 2]),
            "pp": st.sampled_from([1, 2]),
            "dp_shard": st.sampled_from([1, 2, 4]),
            "sharding": st.sampled_from(["none", "zero1", "zero3"]),
            "offload": st.sampled_from(["none", "optimizer"]),
            "grad_dtype": st.sampled_from(["fp32", "bf16", "bf16_main"]),
            "recompute": st.sampled_from(["none", "full"]),
        }
    ),
    st.sampled_from(["megatron-core", "nemo", "torchtitan", "deepspeed-zero"]),
)
def test_later_values_of_monotone_axes_take_no_more(changes: dict[str, object], framework: str) -> None:
    problem = problem_of(framework)
    monotone = [axis for axis in SEARCHED if axis.is_monotone]
    limits = make_space(problem, 64, allow=[axis.name for axis in monotone if axis.exact is not None]).limits
    for axis in monotone:
        plans = [ParallelPlan(global_batch=64, **{**changes, axis.name: value}) for value in limits.of(axis.name)]  # type: ignore[arg-type]
        costs = estimate(problem, PlanBatch.of(plans, problem.model.num_layers))
        for values in (costs.step_s, costs.memory_bytes, costs.host_memory_bytes):
            assert (np.diff(values) <= 1e-9 * values[0]).all()


@settings(max_examples=20)
@given(
    st.fixed_dictionaries(
        {
            "ep": st.sampled_from([1, 4]),
            "pp": st.sampled_from([1, 3]),
            "dispatcher": st.sampled_from(["alltoall", "deepep"]),
            "cuda_graphs": st.sampled_from(["none", "router", "attn"]),
            "recompute": st.sampled_from(["none", "selective", "full"]),
            "token_dropping": st.booleans(),
        }
    ),
    st.sampled_from(["megatron-core", "nemo"]),
)
def test_fused_kernels_take_no_more(changes: dict[str, object], framework: str) -> None:
    problem = problem_of(framework, model=load_model("deepseek-v2-lite"))
    for name in ("router_fusion", "rope_fusion"):
        plans = [
            ParallelPlan(**{"global_batch": 16, "dp_shard": 8, **changes, name: value})  # type: ignore[arg-type]
            for value in (False, True)
        ]
        costs = estimate(problem, PlanBatch.of(plans, problem.model.num_layers))
        assert costs.step_s[1] <= costs.step_s[0] * (1 + 1e-9)
        assert costs.memory_bytes[1] == costs.memory_bytes[0]


def test_a_search_always_fuses_what_leaves_the_numerics_alone() -> None:
    few = ["recompute=none", "cp=1", "cross_entropy_fusion=native"]
    space = make_space(problem_of(model=load_model("deepseek-v2-lite")), 16, fix=few)
    plans, _ = space.plans(space.cells())
    assert plans.router_fusion.all()
    assert plans.rope_fusion.all()
    assert not (plans.token_dropping | plans.fp8_attention).any()
    dense, _ = (space := make_space(problem_of(), 16, fix=few)).plans(space.cells())
    assert not (dense.router_fusion | dense.rope_fusion).any()


def test_tokens_are_dropped_where_that_is_allowed_or_usual_and_none_travels_once() -> None:
    for framework, allow, drops in (("nemo-25.09", (), {True}), ("nemo", ("token_dropping",), {False, True})):
        few = ["recompute=none", "cp=1", "cross_entropy_fusion=native"]
        space = make_space(problem_of(framework, model=MIXTURE), 16, allow=allow, fix=few)
        plans, _ = space.plans(space.cells())
        assert set(plans.token_dropping.tolist()) == drops
        assert set(plans.dispatcher[plans.token_dropping & (plans.ep > 1)].tolist()) == {0}


def test_attention_in_8_bits_is_searched_when_it_is_allowed() -> None:
    problem = make_problem(DENSE, cluster="b200:1x8", seq_len=16384, framework="nemo", precision="fp8")
    wide, narrow = (
        search(problem, make_space(problem, 16, allow=allow), margin=0.0).ranked[0]
        for allow in ((), ("fp8_attention",))
    )
    assert (wide.plan.fp8_attention, narrow.plan.fp8_attention) == (False, True)
    assert narrow.step_s < wide.step_s


def test_weights_are_gathered_in_8_bits_where_that_is_usual_and_states_are_sharded() -> None:
    # Remainders go with 16-bit products alone: they do not keep the 8-bit weights of others out.
    space = make_space(problem_of("nemo", "fp8"), 64)
    plans, _ = space.plans(space.cells())
    assert set(zip(plans.sharding > 0, plans.narrow_params, strict=True)) == {(False, False), (True, True)}


def test_a_search_from_a_file_keeps_its_types(tmp_path: Path) -> None:
    types = {"grad_dtype": "bf16_main", "moment_dtype": "bf16", "main_weights": "fp16"}
    plan = {"sharding": "zero1", **types}
    on = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 4096}
    autoplan.estimate("llama3-8b", plan=plan, **on).export("megatron-lm").save(tmp_path)  # type: ignore[arg-type]
    found = autoplan.search(launch_file=tmp_path / "launch.sh", cluster="h100-sxm:1x8")
    assert {name: str(getattr(found.plan, name)) for name in types} == types
    assert found.file.today is not None
    assert found.file.today.gap is not None
    assert found.file.today.gap.ratio >= 1.0


def test_the_answer_tells_what_was_left_out() -> None:
    problem = problem_of()
    space = make_space(problem, 64)
    result = search(problem, space)
    by_axis = {option.choice.partition("=")[0]: option for option in allowances(problem, space, result.rivals[0])}
    assert set(by_axis) <= {"grad_dtype", "main_weights", "moment_dtype"}
    assert by_axis["grad_dtype"].freed_bytes > 0.5 * GIB
    for allowance in by_axis.values():
        axis, _, value = allowance.choice.partition("=")
        assert getattr(allowance.plan.plan, axis) == value
    everything = make_space(problem, 64, allow=["grad_dtype", "main_weights", "moment_dtype"])
    assert allowances(problem, everything, search(problem, everything).rivals[0]) == ()


def test_deepspeed_has_16_bit_weights_and_moments_together() -> None:
    problem = problem_of("deepspeed-zero")
    wide, narrow = cost_of(problem), cost_of(problem, main_weights="bf16", moment_dtype="bf16")
    assert narrow["optimizer"] == pytest.approx(wide["optimizer"] * 6 / 12)  # 2 bytes for each of the three
    assert narrow["optimizer_s"] < wide["optimizer_s"]
    types = [
        {(ranked.plan.main_weights, ranked.plan.moment_dtype) for ranked in search(problem, space).ranked}
        for space in (make_space(problem, 64), make_space(problem, 64, allow=["main_weights", "moment_dtype"]))
    ]
    assert types == [{("fp32", "fp32")}, {("bf16", "bf16")}]
    with pytest.raises(InputError, match="has no moment_dtype fp8"):
        make_space(problem, 64, fix=["moment_dtype=fp8"])
    assert "moment_dtype" not in book_of(load_framework("deepspeed-2021")).extras


@pytest.mark.parametrize(
    ("framework", "bytes_at_head"), [("torchtitan", 2.0), ("pytorch-fsdp", 0.0), ("transformers", 0.0)]
)
def test_weights_without_a_copy_take_half_of_everything_in_bf16(framework: str, bytes_at_head: float) -> None:
    """4 + 4 + 8 bytes of weights, gradients and moments become 2 + 2 + 4.

    At the peak of a step of FSDP2 the gradient of the head is there too, whole and in the 16 bits of the passes.
    """
    problem = problem_of(framework)
    wide, narrow = (cost_of(problem, sharding="zero3", main_weights=word) for word in ("fp32", "bf16"))
    passing = {"gradients": bytes_at_head * DENSE.vocab_size * DENSE.hidden_size}
    for term in ("weights", "gradients", "optimizer"):
        unmoved = passing.get(term, 0.0)
        assert narrow[term] - unmoved == pytest.approx((wide[term] - unmoved) / 2)
