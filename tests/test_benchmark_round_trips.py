"""Is what is exported read back, with every option of a plan and every value of it, and is a loss noticed?"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autoplan
from autoplan.api.estimate import make_plan
from autoplan.api.problem import make_problem
from autoplan.base.errors import AutoplanError
from autoplan.cost.estimate import estimate
from autoplan.frameworks.common.launch import Launch
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.presets import load_framework, preset_frameworks
from autoplan.frameworks.registry import FRAMEWORKS, TARGETS, book_of
from autoplan.search.ranking import ranked
from autoplan.spec.axes import AXES, AXIS, SEARCHED, shown
from autoplan.spec.axis import Axis, Kind, Value
from autoplan.spec.enums import (
    ContextParallelKind,
    CrossEntropyFusion,
    Dispatcher,
    Fp8Scaling,
    GradType,
    MainWeights,
    MomentType,
    OffloadLayers,
    OffloadModules,
    RankOrder,
    RecomputeModule,
    Schedule,
    Sharding,
)
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.problem import Problem

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
Way = Mapping[str, Any]  # what a plan sets


@pytest.fixture(scope="module")
def trips() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    import round_trips

    yield round_trips
    sys.path.remove(str(BENCHMARKS))
    for name in ("round_trips", "drawn_problems", "reports"):
        sys.modules.pop(name, None)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_legal_plan_of_any_framework_comes_back_or_is_refused(trips: Any, data: st.DataObject) -> None:
    rules = data.draw(st.sampled_from(sorted(trips.frameworks())))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    problem = trips.draw_problem(rng, rules)
    subject = trips.draw_file(rng, problem) if problem else None
    tally = trips.Tally()
    if subject:
        trips.check(tally, subject)
    assert tally.wrong == []


def test_a_dropped_option_is_told(trips: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"cluster": "h100-sxm:1x8", "global_batch": 64, "seq_len": 2048}
    result = autoplan.estimate("llama3-8b", **place, plan={"recompute": "full"})
    subject = trips.Exported(problem=result.problem, file=result.file)
    assert trips.trip(subject, "megatron-lm").outcome == "same"
    reader = trips.reader_of("megatron-lm")

    def forgetful(text: str, given_: Any) -> Launch:
        launch = reader.read(text, given_)
        return replace(launch, plan=replace(launch.plan, recompute="none"))

    monkeypatch.setattr(trips, "reader_of", lambda to: replace(reader, read=forgetful))
    lost = trips.trip(subject, "megatron-lm")
    assert (lost.outcome, lost.why) == ("wrong", "other recompute")


# -- every value of every option --------------------------------------------------------------------------------------

BATCH = 64
DENSE, EXPERTS, LATENTS = "llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"
STAGES: Way = {"pp": 2}
EXPERT_RANKS: Way = {"ep": 2}
# What a way may say of the problem, and what it is otherwise.
PROBLEM = {"precision": "bf16", "finetune": "", "lengths": "", "cluster": "b200:2x4"}
NOT_OVERLAPPED: Way = {"grad_reduce_overlap": False, "param_gather_overlap": False}
# Of options whose values need others: for every value, what plans set that have it; the first legal one makes the trip.
# An order of the nodes is in no launch file: the launcher is given them in it.
WAYS: dict[str, dict[str, tuple[Way, ...]]] = {
    "vp": {"1": (STAGES,), "2": (STAGES | {"vp": 2},)},
    "etp": {"1": ({"tp": 2, "ep": 2, "etp": 1},), "2": ({"tp": 2, "etp": 2},)},
    "dp": {"1": ({"tp": 8}, {"tp": 4, "pp": 2}), "2": ({"tp": 4}, {"pp": 4})},
    "dp_replicate": {"1": ({},), "2": ({"dp_replicate": 2}, {"dp_replicate": 2, "sharding": "zero3"})},
    "dp_shard": {
        "1": ({"dp_replicate": 8}, {"dp_replicate": 8, "sharding": "none"}),
        "4": ({"dp_replicate": 2}, {"dp_replicate": 2, "sharding": "zero3"}),
    },
    "global_batch": {str(BATCH): ({},)},
    "recompute_modules": {str(part): ({"recompute": str(part)},) for part in RecomputeModule},
    "recompute_num_layers": {"all": ({"recompute": "full"},), "2": ({"recompute": "full:2"},)},
    "sp": {"off": ({"tp": 2, "sp": False},), "on": ({"tp": 2, "sp": True},)},
    "tp_overlap": {"off": ({"tp": 2},), "on": ({"tp": 2, "tp_overlap": True},)},
    "ep_overlap": {"off": (EXPERT_RANKS,), "on": (EXPERT_RANKS | {"ep_overlap": True},)},
    "delay_wgrad": {
        shown(value): (EXPERT_RANKS | {"ep_overlap": True, "delay_wgrad": value},) for value in (False, True)
    },
    "dispatcher": {word: (EXPERT_RANKS | {"dispatcher": word},) for word in Dispatcher},
    "grad_reduce_overlap": {"on": ({},), "off": (NOT_OVERLAPPED,)},
    "param_gather_overlap": {"on": ({},), "off": ({"param_gather_overlap": False},)},
    "schedule": {
        word: tuple(STAGES | {"schedule": word, "vp": chunks} | overlap for overlap in ({}, NOT_OVERLAPPED))
        for word, chunks in ((word, 2 if word in ("interleaved", "zb-v", "dualpipe-v") else 1) for word in Schedule)
    },
    "layers_per_chunk": {"even": (STAGES,), "uneven": (STAGES | {"layers_per_chunk": [15, 17]},)},
    "cp_kind": {
        word: ({"cp": max(2 * word.inner, 2), "cp_kind": word} | ({"cluster": "b200:4x4"} if word.inner == 8 else {}),)
        for word in ContextParallelKind
    },
    "dynamic_cp": {"off": ({"cp": 2},), "on": ({"cp": 2, "dynamic_cp": True, "lengths": "1k:3,4k:1"},)},
    "fp8_scaling": {  # of past steps, MaxText adds up no gradients
        word: ({"precision": "fp8", "fp8_scaling": word}, {"precision": "fp8", "fp8_scaling": word, "micro_batch": 8})
        for word in Fp8Scaling
    },
    "narrow_params": {word: ({"precision": "fp8", "narrow_params": word == "on"},) for word in ("off", "on")},
    "fp8_attention": {word: ({"precision": "fp8", "fp8_attention": word == "on"},) for word in ("off", "on")},
    "offload_percent": {
        str(percent): tuple(
            {"offload": "optimizer", "sharding": kind, "offload_percent": percent} for kind in ("zero1", "zero3")
        )
        for percent in (100, 57, 1)
    },
    **{
        name: {shown(value): ({"sharding": "zero3", name: value},) for value in values}
        for name, values in (
            ("quantized_gathers", (False, True)),
            ("quantized_reductions", (False, True)),
            ("secondary_shard", (1, 2)),
        )
    },
    "shared_expert_overlap": {
        shown(value): (EXPERT_RANKS | {"dispatcher": "alltoall", "shared_expert_overlap": value},)
        for value in (False, True)
    },
    "offload_modules": {word: (EXPERT_RANKS | {"offload_modules": word},) for word in OffloadModules},
    "offload_layers": {word: ({"offload_layers": word},) for word in OffloadLayers},
    "fp8_activation_input": {word: ({"fp8_activation_input": word == "on"},) for word in ("off", "on")},
    "cross_entropy_fusion": {  # te of Megatron-Bridge, whose usual gradients and routers others do not take
        word: tuple(
            {"cross_entropy_fusion": word} | others
            for others in ({}, {"grad_dtype": "fp32", "narrow_params": False, "router_fusion": False})
        )
        for word in CrossEntropyFusion
    },
    "main_weights": {
        word: ({"main_weights": word}, {"main_weights": word, "moment_dtype": "bf16"}) for word in MainWeights
    },
    "grad_dtype": {
        word: ({"grad_dtype": word}, {"grad_dtype": word, "main_weights": "remainders"}) for word in GradType
    },
    "moment_dtype": {
        word: tuple({"moment_dtype": word, "main_weights": main} for main in ("fp32", "remainders", "bf16"))
        for word in MomentType
    },
    "wide_adapters": {"off": ({},), "on": ({"finetune": "lora", "wide_adapters": True},)},
    "rank_order": {word: (STAGES | {"rank_order": word},) for word in RankOrder},
    "placement": {"none": ({},)},
}


def ways_to(axis: Axis) -> dict[str, tuple[Way, ...]]:
    """The values of an option, and what plans set that have them."""
    if axis.name in WAYS:
        return WAYS[axis.name]
    values = {Kind.COUNT: (1, 2), Kind.FLAG: (False, True)}.get(axis.kind) or tuple(axis.enum or ())
    return {shown(value): ({axis.name: value},) for value in values}


def models_with(axis: Axis) -> tuple[str, ...]:
    """Models in which an option means something."""
    if axis.needs.can_be_met(has_experts=False, has_latents=False):
        return DENSE, EXPERTS, LATENTS
    return (EXPERTS, LATENTS) if axis.needs.can_be_met(has_experts=True, has_latents=False) else (LATENTS,)


@cache
def problem_of(model: str, framework: str, precision: str, finetune: str, lengths: str, cluster: str) -> Problem:
    training = {"seq_len": 4096, "precision": precision, "finetune": finetune or None, "lengths": lengths or None}
    return make_problem(model, cluster=cluster, framework=framework, **training)  # type: ignore[arg-type]


def books_of(to: str) -> tuple[str, ...]:
    """The known books of rules whose plans a target takes."""
    return tuple(rules for rules in TARGETS[to].rules if rules != "unknown")


@cache
def frameworks_of(rules: str) -> tuple[str, ...]:
    """The presets under a book of rules, first the one to plan with."""
    usual = {entry.facts for entry in FRAMEWORKS}
    names = (name for name in preset_frameworks() if load_framework(name).rules == rules)
    return tuple(sorted(names, key=lambda name: name not in usual))


def plan_with(problem: Problem, way: Way) -> ParallelPlan:
    """The plan that sets what a way says, with states sharded as the framework can."""
    book, plain = book_of(problem.framework), {}
    if Sharding.ZERO1 not in book.words("sharding"):
        plain["sharding"] = "zero3"
    if "cp_kind" not in way:
        plain["cp_kind"] = book.words("cp_kind")[0]
    apart = (*PROBLEM, *NOT_OVERLAPPED)
    flagged = {name: value for name, value in way.items() if name not in apart}
    plan = make_plan(problem, BATCH, plain | flagged)
    return replace(plan, **{name: way[name] for name in NOT_OVERLAPPED if name in way})


def has(plan: ParallelPlan, axis: Axis, value: str) -> bool:
    """Return whether a plan has a value, which a list is taken to be."""
    return axis.kind is Kind.LIST or shown(getattr(plan, axis.name)) == value


class Start(NamedTuple):
    """A plan, and the names of what its problem is made of."""

    model: str
    framework: str
    precision: str
    finetune: str
    lengths: str
    cluster: str
    plan: ParallelPlan


@cache
def legal_plan(axis: str, value: str, at: int, framework: str, model: str) -> Start | None:
    """The plan of one of the ways to a value, if it is legal; several targets take the plans of a framework."""
    way = ways_to(AXIS[axis])[value][at]
    training = [str(way.get(name, default)) for name, default in PROBLEM.items()]
    try:
        problem = problem_of(model, framework, *training)
        plan = plan_with(problem, way)
        is_legal = not broken(book_of(problem.framework).rules, problem.workload, plan)
    except AutoplanError:
        return None
    return Start(model, framework, *training, plan) if is_legal and has(plan, AXIS[axis], value) else None


def legal_plans(axis: str, value: str, rules: str) -> Iterator[Start]:
    """Yield legal plans with a value of an option under a book of rules: of the first framework that has any."""
    for framework in frameworks_of(rules):
        has_any = False
        for at, model in product(range(len(ways_to(AXIS[axis])[value])), models_with(AXIS[axis])):
            if start := legal_plan(axis, value, at, framework, model):
                has_any = True
                yield start
        if has_any:
            return


@pytest.fixture(scope="module")
def trips_from(trips: Any) -> Callable[[Start, str], tuple[Any, ...]]:
    """Make the trips of a plan to all versions of a target, once."""
    files: dict[tuple[str, ...], PlanFile] = {}

    @cache
    def subject(start: Start) -> Any:
        problem = problem_of(*(names := start[:6]))
        if names not in files:
            files[names] = trips.priced(problem, start.plan).file
        [best] = ranked(problem, estimate(problem, PlanBatch.of([start.plan], problem.model.num_layers)), [0])
        return trips.Exported(problem=problem, file=replace(files[names], best=best))

    @cache
    def made(start: Start, to: str) -> tuple[Any, ...]:
        return tuple(trips.trip(subject(start), version) for version in TARGETS[to].spellings)

    return made


CASES = [(axis, value) for axis in AXES for value in ways_to(axis)]


@pytest.mark.parametrize(("axis", "value"), CASES, ids=[f"{axis.name}={value}" for axis, value in CASES])
def test_a_value_comes_back_from_every_target_or_is_refused_by_its_name(
    trips_from: Callable[[Start, str], tuple[Any, ...]], axis: Axis, value: str
) -> None:
    came_back = False
    for to in TARGETS:
        refusals: list[str] = []
        for start in (start for rules in books_of(to) for start in legal_plans(axis.name, value, rules)):
            made = trips_from(start, to)
            assert not [trip.why for trip in made if trip.outcome == "wrong"], (to, start)
            refusals += [trip.why for trip in made if trip.outcome == "refused"]
            has_come_back = any(trip.outcome != "refused" for trip in made)
            came_back = came_back or has_come_back
            if has_come_back or any(names(why, axis, value) for why in refusals):
                break
        else:
            assert not refusals, (to, refusals)
    assert came_back


def names(why: str, axis: Axis, value: str) -> bool:
    """Return whether a refusal names the option, what it needs, or what is set for it."""
    named = [name for way in ways_to(axis)[value] for name in way]
    return any(re.search(rf"\b{name}\b", why) for name in (axis.name, axis.needs.value, *named))


RARE = [(axis, value) for axis in SEARCHED if axis.offered_by for value in axis.searched]


@pytest.mark.parametrize(("axis", "value"), RARE, ids=[f"{axis.name}={shown(value)}" for axis, value in RARE])
def test_what_few_frameworks_offer_is_legal_in_some_plan_of_theirs(axis: Axis, value: Value) -> None:
    for rules in dict.fromkeys(rules for to in TARGETS for rules in books_of(to)):
        books = (book_of(load_framework(name)) for name in frameworks_of(rules))
        offers = any(axis.name in book.extras and book.offers(axis, value) for book in books)
        assert any(legal_plans(axis.name, shown(value), rules)) or not offers, rules


def test_one_graph_of_experts_comes_back(trips: Any) -> None:
    way = {"ep": 8, "dispatcher": "hybridep", "cuda_graphs": "full_iteration"}
    for to, framework in (("megatron-lm", "megatron-core"), ("megatron-bridge", "nemo")):
        problem = problem_of(EXPERTS, framework, "mxfp8", "", "", "b200:2x4")
        trip = trips.trip(trips.priced(problem, plan_with(problem, way)), to)
        assert trip.outcome == "same", trip
