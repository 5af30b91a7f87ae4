"""Does an explanation tell the truth: what it says would be faster is, and what it says is lacking lacks?"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import autoplan
from autoplan.api.plan_files import make_plan_file
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.readers.model import load_model
from autoplan.report.explain import _versus_flag
from autoplan.search.axes import axes_of, differing
from autoplan.search.explain import MIN_GAIN, changed, explain, versus
from autoplan.search.ranking import ranked
from autoplan.spec.explanation import Explanation
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from commands import run
from search_cases import LARGE, make

PLAN = ParallelPlan(global_batch=64, tp=8, sp=True, pp=2, etp=1)


def price(problem: Problem, plan: ParallelPlan) -> RankedPlan:
    batch = PlanBatch.of([plan], problem.model.num_layers)
    return ranked(problem, estimate(problem, batch), [0])[0]


def explained(problem: Problem, plan: ParallelPlan) -> Explanation:
    return explain(problem, make_plan_file(problem, [price(problem, plan)], None))


def test_neighbours_are_what_their_changes_say_and_cost_what_an_estimate_does() -> None:
    problem, _ = make(LARGE)
    found = explained(problem, PLAN)
    rules, mine = book_of(problem.framework).rules, axes_of(problem.model, PLAN)
    assert found.changes
    assert found.better
    for near in (*found.changes, *found.better):
        assert tuple(axis for axis, _, _ in near.changes) == differing(mine, axes_of(problem.model, near.plan.plan))
        assert near.plan.step_s == price(problem, near.plan.plan).step_s
        assert near.ratio == pytest.approx(near.plan.s_per_sequence / found.plan.s_per_sequence)
        assert near.broken == broken(rules, problem.workload, near.plan.plan)
        stages = stage_costs(problem, near.plan.plan)
        assert near.stage == np.argmax([stage.memory_bytes for stage in stages])


def test_one_change_is_told_of_every_axis_and_two_at_most_for_faster_plans() -> None:
    problem, _ = make(LARGE)
    found = explained(problem, PLAN)
    axes = [near.changes[0][0] for near in found.changes]
    assert {len(near.changes) for near in found.changes} == {1}
    assert len(set(axes)) == len(axes)
    assert {"tp", "pp", "micro_batch", "recompute", "schedule"} <= set(axes)
    assert [near.ratio for near in found.changes] == sorted(near.ratio for near in found.changes)
    for near in found.better:
        assert near.ratio < 1 - MIN_GAIN
        assert len(near.changes) <= 2


def test_memory_binds_where_more_of_it_makes_a_faster_plan_possible() -> None:
    problem, _ = make(LARGE)
    tight = replace(problem, reserve_bytes=problem.capacity_bytes - 1.25 * price(problem, PLAN).memory_bytes)
    found = explained(tight, PLAN)
    heavy = next(near for near in found.better if near.plan.verdict != "fits" and not near.broken)
    assert found.binds[0].startswith(f"memory of stage {heavy.stage}: a faster plan needs")
    assert price(problem, heavy.plan.plan).verdict == "fits"
    assert price(problem, heavy.plan.plan).step_s < found.plan.step_s
    assert any(near.is_possible for near in explained(problem, PLAN).better)


def test_memory_binds_a_plan_that_does_not_fit_itself() -> None:
    problem, _ = make(LARGE)
    tight = replace(problem, reserve_bytes=problem.capacity_bytes - 0.5 * price(problem, PLAN).memory_bytes)
    found = explained(tight, PLAN)
    assert found.plan.verdict == "oom"
    worst = int(np.argmax([stage.memory_bytes for stage in found.stages]))
    assert found.binds[0].startswith(f"memory of stage {worst}: the plan itself needs")


def test_a_plan_that_nothing_binds_says_whether_others_are_faster() -> None:
    problem, _ = make(LARGE)
    for plan in (PLAN, replace(PLAN, sp=False)):
        found = explained(problem, plan)
        assert found.binds
        assert any("0.5 % faster" in says for says in found.binds) == (not found.better)


def test_a_rule_binds_where_it_alone_stops_a_faster_plan() -> None:
    problem, _ = make(LARGE)
    plan = replace(PLAN, sp=False)
    found = explained(problem, plan)
    stopped = [near for near in found.better if near.broken]
    for near in stopped:
        assert broken(book_of(problem.framework).rules, problem.workload, near.plan.plan) == near.broken
    assert all("memory" in says or says.endswith(")") for says in found.binds)


def test_what_the_target_of_a_search_cannot_express_is_refused() -> None:
    result = autoplan.search(
        "llama3-8b", cluster="rtx-4090:1x8", global_batch=64, seq_len=2048, to="accelerate", forbid=["offload"]
    )
    explanation = explain(result.problem, result.file)
    (pipeline,) = (near for near in explanation.changes if near.changes[0][0] == "pp")
    assert pipeline.ratio < 1.0
    assert "pipelines" in pipeline.broken[0]
    assert not pipeline.is_possible


def test_a_plan_that_does_not_divide_the_batch_is_told_with_one_that_it_divides() -> None:
    problem, _ = make(cluster="h100-sxm:2x8", batches=(12,))
    found = explained(problem, ParallelPlan(global_batch=12, tp=4, sp=True, dp_shard=4))
    other = [near for near in (*found.changes, *found.better) if near.plan.plan.global_batch != 12]
    assert other
    for near in other:
        assert near.plan.plan.global_batch == 16
        assert "global_batch 12 must be divisible by micro_batch 1 x dp" in near.broken[0]
        assert "global_batch" not in {axis for axis, _, _ in near.changes}


# -- another plan ------------------------------------------------------------------------------------------------------


def test_changes_make_the_plan_that_they_say() -> None:
    problem, _ = make(LARGE)
    other = changed(problem, PLAN, "tp=4, pp=4, vp=3, micro_batch=2, recompute=full:2, sp=off, sharding=none")
    assert (other.tp, other.pp, other.dp, other.micro_batch, other.sp) == (4, 4, 1, 2, False)
    assert (other.schedule, other.vp, other.recompute_num_layers) == ("interleaved", 3, 2)
    assert changed(problem, other, "vp=1").schedule == "1f1b"
    assert changed(problem, PLAN, "schedule=zb-v").vp == 2
    # In any order.
    for wish in ("sharding=zero2,dp_shard=2", "dp_shard=2,sharding=zero2"):
        assert (found := changed(problem, PLAN, f"tp=4,{wish}")).dp_shard == 2
        assert found.sharding == "zero2"


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ("plan2.json", "no such file; write a plan file, or changes such as tp=4,pp=8"),
        ("tp=", "no such file"),
        ("tp=many", "must be a whole number"),
        ("tp=0", "must be a whole number"),
        ("tp=3", "tp 3 x pp 2 does not divide the 16 devices"),
        ("colour=3", "unknown axis; known: tp, cp"),
        ("schedule=fast", "must be one of 1f1b, gpipe"),
        ("sp=maybe", "must be one of on, off"),
        ("tp=8", "changes nothing"),
        ("tp=4,TP=2", "tp is given twice"),
        ("vp=2,schedule=1f1b", "vp = 2 needs schedule = 'interleaved'"),
        ("schedule=1f1b,vp=2", "vp = 2 needs schedule = 'interleaved'"),
        ("recompute=all", "write none, selective, full"),
    ],
)
def test_changes_that_make_no_other_plan_are_refused(wishes: str, says: str) -> None:
    problem, _ = make(LARGE)
    with pytest.raises(InputError, match=says):
        changed(problem, PLAN, wishes)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (LARGE, PLAN),
        (LARGE, replace(PLAN, pp=1, dp_shard=2, offload="optimizer")),
        (load_model("mixtral-8x7b"), ParallelPlan(global_batch=64, tp=2, sp=True, ep=4, etp=1, dp_shard=8)),
    ],
    ids=["pipeline", "replicas", "experts"],
)
def test_the_changes_that_are_told_can_be_typed(model: ModelSpec, plan: ParallelPlan) -> None:
    problem, _ = make(model)
    changes = {near.changes[0][0]: near for near in explained(problem, plan).changes}
    typed = {axis: wish for axis, near in changes.items() if (wish := _versus_flag(near))}
    assert set(changes) - set(typed) <= {"layers", "rank_order"}
    for axis, wish in typed.items():
        wanted = changes[axis].plan.plan
        made = replace(changed(problem, plan, wish), global_batch=wanted.global_batch)
        assert not differing(axes_of(model, made), axes_of(model, wanted)), wish


def test_another_plan_is_priced_and_its_changes_alone() -> None:
    problem, _ = make(LARGE)
    other = changed(problem, PLAN, "tp=4,recompute=full")
    found = versus(problem, PLAN, "tp=4,recompute=full", other, problem)
    assert found.plan == price(problem, other)
    assert found.gap.ratio == pytest.approx(found.plan.step_s / price(problem, PLAN).step_s)
    assert {change.axis for change in found.changes} == {"tp", "recompute"}
    alone = next(change for change in found.changes if change.axis == "recompute").alone
    assert alone is not None
    assert alone.step_s == price(problem, replace(PLAN, recompute="full")).step_s
    with pytest.raises(InputError, match="needs 12 devices, there are 16"):
        versus(problem, PLAN, "x", replace(PLAN, tp=12, pp=1, dp_shard=1), problem)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explained")
    asked = ["llama3-8b", "--cluster", "h100-sxm:4x8", "--global-batch", "128", "--seq-len", "8192"]
    assert run(path, "search", *asked, "--quiet").returncode == 0
    assert run(path, "estimate", *asked, "--tp", "8", "--out", "other.json", "--quiet").returncode == 0
    return path


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
@pytest.mark.parametrize("versus", [(), ("--versus", "other.json"), ("--versus", "tp=8,recompute=full")])
def test_an_explanation_fits_the_width(folder: Path, columns: int, versus: tuple[str, ...]) -> None:
    answer = run(folder, "explain", "plan.json", *versus, COLUMNS=str(columns))
    assert answer.returncode == 0
    lines = answer.stdout.splitlines()
    assert max(len(line) for line in lines if "autoplan explain" not in line) <= columns
    for says in ("matrix products", "binds", "proof", "versus" if versus else "one change"):
        assert says in answer.stdout


def test_the_next_command_names_the_file_as_a_shell_reads_it(folder: Path) -> None:
    (folder / "my plan.json").write_bytes((folder / "plan.json").read_bytes())
    shown = run(folder, "explain", "my plan.json").stdout.splitlines()
    (command,) = [line.removeprefix("next:  autoplan ") for line in shown if line.startswith("next:")]
    assert run(folder, *shlex.split(command)).returncode == 0


def test_json_has_what_the_tables_show(folder: Path) -> None:
    answer = run(folder, "explain", "plan.json", "--versus", "other.json", "--json")
    found = json.loads(answer.stdout)
    assert found["versus"]["plan"]["plan"]["tp"] == 8
    assert found["plan"]["step_s"] == json.loads((folder / "plan.json").read_text())["best"]["step_s"]
    assert found["alternatives"]
    shown = run(folder, "explain", "plan.json").stdout
    assert all(says.split()[0] in shown for says in found["binds"])


def test_explain_writes_a_trace(folder: Path) -> None:
    answer = run(folder, "explain", "plan.json", "--trace", "step.json")
    assert "wrote step.json" in answer.stderr
    assert json.loads((folder / "step.json").read_text())["traceEvents"]


def test_a_file_that_is_no_plan_is_refused_in_one_line(folder: Path) -> None:
    answer = run(folder, "explain", "nothing.json")
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
    assert "nothing.json" in answer.stderr


def test_a_plan_that_lacks_memory_of_its_hosts_says_so() -> None:
    result = autoplan.search("llama3-8b", cluster="rtx-4090:1x8", global_batch=256, seq_len=4096, to="accelerate")
    explanation = explain(result.problem, result.file)
    (without_tp,) = (near for near in explanation.changes if near.changes[0] == ("tp", "2", "1"))
    host_bytes = result.problem.cluster.host.memory_bytes
    assert (without_tp.plan.verdict, without_tp.is_host) == ("oom", True)
    assert without_tp.plan.host_memory_bytes == without_tp.needed_bytes > without_tp.capacity_bytes == host_bytes
    assert without_tp.plan.memory_headroom_bytes > 0


def test_sequence_parallelism_is_tried_with_the_larger_micro_batch_that_it_makes_room_for() -> None:
    """A search for FSDP2, whose plans have none, found one 49 % slower than explain's first proposal."""
    result = autoplan.search("llama3-70b", cluster="l40s:4x8", global_batch=512, seq_len=8192, to="fsdp2")
    assert result.best.plan.sp or result.best.plan.tp == 1
    explanation = explain(result.problem, result.file)
    assert all(near.ratio > 0.97 for near in explanation.better if near.is_possible)
