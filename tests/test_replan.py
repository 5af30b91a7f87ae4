from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan.api.plan_files import make_mixed_file
from autoplan.api.plan_result import PlanResult
from autoplan.api.problem import load_any_cluster
from autoplan.api.results import MixedPlanResult
from autoplan.base.errors import InputError, NoPlanError
from autoplan.cli import make_app
from autoplan.cost.memory.stage_memory import checkpoint_bytes
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster, of_size
from autoplan.readers.lost_nodes import remaining
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.plan_file import SpaceFlags
from autoplan.spec.started_plan import started_plan
from autoplan.topology.cluster import NodeGroup
from autoplan.topology.mixed_cluster import MixedCluster
from autoplan.trainer.task import PredictedRun, RunFile, Task, TrainingReport
from mixed_cases import SMALL, plan_of, problem_of, replicas, scaled


@pytest.fixture(scope="module")
def before() -> PlanResult:
    return autoplan.search("llama3-8b", cluster="h100-sxm:4x8", global_batch=128, seq_len=4096)


@pytest.fixture(scope="module")
def named() -> PlanResult:
    """The same on nodes with names."""
    cluster = load_cluster("h100-sxm:4x8")
    groups = [NodeGroup(names=names, switches=("leaf",)) for names in (("a", "b"), ("c", "d"))]
    cluster = replace(cluster, nodes=tuple(groups))
    return autoplan.search("llama3-8b", cluster=cluster, global_batch=96, seq_len=4096)


def test_a_checkpoint_is_weights_and_states_of_every_parameter_once(before: PlanResult) -> None:
    # 8.03e9 parameters: weights in 2 bytes, fp32 weights and two moments in 12.
    for axes in ({"tp": 1}, {"tp": 4, "pp": 2}, {"tp": 2, "sharding": "zero3"}):
        plan = autoplan.estimate("llama3-8b", cluster="h100-sxm:4x8", global_batch=128, seq_len=4096, plan=axes)
        assert checkpoint_bytes(plan.problem, plan.plan) == pytest.approx(8.03e9 * 14, rel=2e-3)


def test_a_checkpoint_of_adapters_has_the_adapters_alone() -> None:
    adapters = FineTuning(rank=8, targets=("q_proj",))
    plan = autoplan.estimate("llama3-8b", cluster="h100-sxm:1x8", global_batch=8, seq_len=4096, plan={"tp": 2})
    tuned = replace(plan.problem, training=replace(plan.problem.training, finetuning=adapters))
    # A matrix of 4096 x 8 and one of 8 x 4096 in each of 32 layers.
    one_copy = 32 * 2 * 8 * 4096 * 14
    assert one_copy <= checkpoint_bytes(tuned, plan.plan) <= 1.5 * one_copy  # the first of the two is on both ranks


def test_the_new_plan_is_the_best_of_all_numbers_of_nodes_that_are_left(before: PlanResult) -> None:
    found = autoplan.replan(before, nodes=3)
    steps = []
    for nodes in (2, 3):
        try:
            other = autoplan.search("llama3-8b", cluster=f"h100-sxm:{nodes}x8", global_batch=128, seq_len=4096)
        except NoPlanError:
            continue
        steps.append(other.best.step_s)
    assert found.summary.after.step_s == pytest.approx(min(steps), rel=1e-9)
    assert found.plan.file.best.plan.global_batch == 128
    assert found.summary.nodes_left == 3
    assert found.summary.kept_share == pytest.approx(before.best.step_s / min(steps))
    assert isinstance(found.plan, PlanResult)
    assert found.plan.plan.describe() == found.summary.after.plan
    # One of four nodes is lost, and with it a quarter of the replicas and tensor-parallel groups, which fit in nodes.
    assert before.plan.num_devices // before.plan.dp <= 8
    assert (found.summary.usable_replicas, found.summary.usable_tensor_groups) == (0.75, 0.75)


def test_the_same_layout_keeps_all_but_the_replicas() -> None:
    place: dict[str, Any] = {"cluster": "h100-sxm:4x8", "global_batch": 128, "seq_len": 4096}
    before = autoplan.search("llama3-8b", **place, fix=["micro_batch=1"])  # which leaves room for larger shards
    same = autoplan.replan(before, nodes=3).same_layout
    assert same is not None
    old, new = before.plan, same.plan
    assert new == replace(old, dp_replicate=new.dp_replicate, dp_shard=new.dp_shard)
    assert new.num_devices <= 24
    assert new.num_microbatches * new.micro_batch * new.dp == 128
    again = autoplan.estimate(before, cluster=None).best
    assert again.step_s < same.step_s


def test_the_batch_of_every_virtual_node_stays_as_devices_go() -> None:
    """S57: 2,048 samples of 32 virtual nodes, by gradient accumulation on fewer devices (VirtualFlow)."""
    plan = {"micro_batch": 64, "sharding": "zero1"}
    before = autoplan.estimate("qwen3-0.6b", cluster="a100-sxm:4x8", global_batch=2048, seq_len=128, plan=plan)
    for devices in (16, 8, 4):
        same = autoplan.replan(before, devices=devices).same_layout
        assert same is not None
        found = same.plan
        assert (found.global_batch, found.dp * found.num_microbatches, found.micro_batch) == (2048, 32, 64)


def test_named_nodes_are_left_out_by_name(named: PlanResult) -> None:
    found = autoplan.replan(named, without=["b"])
    assert [name for group in found.plan.problem.cluster.nodes for name in group.names] == ["a", "c", "d"]
    assert found.summary.after.num_devices == 24
    whole_group = autoplan.replan(named, without=["a", "b"])
    assert [group.names for group in whole_group.plan.problem.cluster.nodes] == [("c", "d")]


def test_a_store_says_how_long_and_how_often(before: PlanResult) -> None:
    summary = autoplan.replan(before, nodes=2, storage_bytes_per_s=2e9).summary
    assert summary.load_s == pytest.approx(summary.checkpoint_bytes / 2e9)
    faster = autoplan.replan(before, nodes=2, storage_bytes_per_s=8e9).summary
    assert summary.checkpoint_interval_s is not None
    assert faster.checkpoint_interval_s is not None
    # By Young twice the rate of checkpoints at four times the rate of the store; Daly's is near.
    assert summary.checkpoint_interval_s / faster.checkpoint_interval_s == pytest.approx(2, rel=0.05)
    silent = autoplan.replan(before, nodes=2).summary
    assert (silent.load_s, silent.checkpoint_interval_s) == (None, None)
    paused = autoplan.replan(before, nodes=2, run={"checkpoint_time": summary.load_s}).summary
    assert paused.checkpoint_interval_s == pytest.approx(summary.checkpoint_interval_s)


@pytest.mark.parametrize(
    ("left", "says"),
    [
        ({}, "give one of them"),
        ({"nodes": 4}, "--nodes 4: the plan runs on 4"),
        ({"nodes": 0}, "--nodes 0"),
        ({"without": ["x"]}, "does not name its nodes"),
        ({"nodes": 2, "without": ["x"]}, "leave all but one of them out"),
        ({"devices": 32}, "--gpus 32: the plan runs on 32"),
        ({"devices": 0}, "--gpus 0: the plan runs on 32"),
        ({"nodes": 2, "storage_bytes_per_s": -1.0}, "storage_bytes_per_s"),
    ],
)
def test_what_cannot_be_left_is_said(before: PlanResult, left: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        autoplan.replan(before, **left)  # type: ignore[arg-type]


def test_lost_devices_leave_a_node_with_fewer(before: PlanResult) -> None:
    """Four of 32 devices are lost in one node: the others of it train on beside three whole nodes."""
    before = autoplan.estimate(before, global_batch=112)
    found = autoplan.replan(before, devices=28)
    assert isinstance(found.plan, MixedPlanResult)
    assert [part.num_devices for part in found.plan.problem.cluster.parts] == [24, 4]
    assert found.summary.after.num_devices == 28
    whole_nodes = autoplan.replan(before, nodes=3).summary
    assert found.summary.after.step_s < whole_nodes.after.step_s
    assert found.summary.same_layout == whole_nodes.same_layout
    assert autoplan.export(found.plan, to="megatron-lm").files
    # Lost in four groups of the size of a replica, the devices stop four of these.
    replica = before.plan.num_devices // before.plan.dp
    assert found.summary.usable_replicas == pytest.approx(1 - 4 * replica / 32)


def test_a_mixed_cluster_loses_nodes_of_a_part_or_named_ones(tmp_path: Path) -> None:
    words = {"global_batch": 96, "seq_len": 4096, "fix": {"micro_batch": 1}}
    unnamed = autoplan.search_mixed("llama3-8b", cluster="h100-sxm:1x8+a100-sxm:2x8", **words)
    unnamed.save(tmp_path / "plan.json")
    replanned = autoplan.replan(tmp_path / "plan.json", without=["a100-sxm:1"], storage_bytes_per_s=1e10)
    again = autoplan.search_mixed("llama3-8b", cluster="h100-sxm:1x8+a100-sxm:1x8", **words, prefer="fastest")
    assert isinstance(replanned.plan, MixedPlanResult)
    assert replanned.plan.best == again.best  # with the limits of the first search
    assert replanned.summary.kept_share == pytest.approx(unnamed.best.step_s / again.best.step_s)
    assert (replanned.summary.nodes_before, replanned.summary.nodes_left) == (3, 2)
    # Main weights are remainders: 2 bytes of each are in the weights themselves.
    assert replanned.summary.checkpoint_bytes == pytest.approx(8.03e9 * 12, rel=2e-3)
    assert replanned.summary.load_s == pytest.approx(replanned.summary.checkpoint_bytes / 1e10)
    alone = autoplan.replan(unnamed, without=["a100-sxm:2"])
    assert alone.plan.file.cluster.part_names == ("h100-sxm",)

    parts = load_any_cluster("h100-sxm:1x8+a100-sxm:2x8").parts
    listed = (
        replace(part, nodes=(NodeGroup(names=names, switches=("leaf",)),))
        for part, names in zip(parts, (("h0",), ("a0", "a1")), strict=True)
    )
    named = autoplan.search_mixed("llama3-8b", cluster=MixedCluster(name="named", parts=tuple(listed)), **words)
    assert named.best == unnamed.best
    (script,) = autoplan.export(named, to="megatron-lm").texts.values()
    assert re.search(r"hosts=\(\s+(h0\s+a0\s+a1|a0\s+a1\s+h0)\s+\)", script)
    without = autoplan.replan(named, without=["a0"])
    assert without.plan.best == replanned.plan.best
    for lost, says in (
        (["a100-sxm:1"], "names its nodes: name the lost ones"),
        (["a7"], "has no such node"),
        (["h0", "a0", "a1"], "no node is left"),
    ):
        with pytest.raises(InputError, match=says):
            autoplan.replan(named, without=lost)
    with pytest.raises(InputError, match="does not say of which part"):
        autoplan.replan(unnamed, devices=16)
    with pytest.raises(InputError, match="with --without PART:NUMBER"):
        autoplan.replan(unnamed, without=["host7"])
    with pytest.raises(InputError, match="it has 2 nodes"):
        autoplan.replan(unnamed, without=["a100-sxm:3"])


TINY = replace(SMALL, num_layers=2, hidden_size=64, vocab_size=256, num_heads=4, num_kv_heads=2, ffn_size=128)


def of_run(plan: MixedPlanResult, seconds: list[float]) -> RunFile:
    """A run of a plan in which a micro-batch took so many seconds on each rank."""
    started = started_plan(plan.problem, plan.best.plan, unequal_batches=True)
    predicted = PredictedRun(device="cpu", step_s=1.0, low_s=1.0, high_s=1.0, terms_s={}, peak_bytes=0.0)
    report = TrainingReport(losses=(1.0,), step_s=(1.0,), microbatch_s=tuple(seconds), device="cpu")
    task = Task(model=plan.problem.model, plan=started.plan, seq_len=128, dtype="fp32")
    return RunFile(task=task, predicted=predicted, measured=report)


def test_batches_follow_measured_speeds_and_settle() -> None:
    """S63: speeds 1, .5 and .25: .75 with equal batches, 1.75 in proportion, which noise of 5 % does not change."""
    parts = [scaled("cpu:1x1", name) for name in ("a", "b", "c")]
    problem = problem_of(*parts, model=TINY, seq_len=128, precision="fp32", framework=load_framework("torch"))
    equal = plan_of(kinds=[replicas(1, 28, (part, 1, 2)) for part in range(3)], precision="fp32")
    fixed = ("tp=1", "pp=1", "cp=1", "micro_batch=1", "recompute=none", "sharding=none")
    file = make_mixed_file(
        problem,
        estimate_mixed(problem, [equal]),
        None,
        space=SpaceFlags(global_batch="84", fix=fixed, to="autoplan"),
        command="a test",
    )
    plan, choices = MixedPlanResult(file=file, problem=problem), random.Random(1)

    def batches() -> list[int]:
        return [kind.num_microbatches for kind in sorted(plan.best.plan.kinds, key=lambda kind: kind.parts)]

    def speed(speeds: list[float]) -> float:
        return 84 / max(count / each for count, each in zip(batches(), speeds, strict=True))

    def updated(speeds: list[float], noise: float) -> bool:
        """Measure the plan and replan; whether that changed it."""
        nonlocal plan
        before = batches()
        seconds = [0.01 / each * choices.uniform(1 - noise, 1 + noise) for each in speeds]
        found = autoplan.replan(plan, measured=of_run(plan, seconds)).plan
        assert isinstance(found, MixedPlanResult)
        plan = found
        return batches() != before

    speeds = [1.0, 0.5, 0.25]
    assert speed(speeds) == pytest.approx(0.75)
    assert updated(speeds, noise=0.0)
    assert batches() == [48, 24, 12]
    assert speed(speeds) == pytest.approx(1.75)
    assert not any(updated(speeds, noise=0.05) for _ in range(9))
    slower = [0.5, 0.5, 0.25]  # a worker halves its speed
    changes = [updated(slower, noise=0.05) for _ in range(5)]
    assert changes == [True] + [False] * 4
    assert speed(slower) >= 0.9 * 1.25


def test_a_run_that_does_not_tell_speeds_is_refused(before: PlanResult, tmp_path: Path) -> None:
    mixed = autoplan.search_mixed("llama3-8b", cluster="h100-sxm:1x8+a100-sxm:1x8", global_batch=64, seq_len=4096)
    for plan, left, says in (
        (before, {}, "unlike parts: search on a cluster with slow nodes as a part"),
        (mixed, {}, "times of micro-batches of 2 ranks, the plan 16: run it with autoplan run"),
        (mixed, {"without": ["a100-sxm:1"]}, "leave --nodes, --gpus and --without out"),
    ):
        with pytest.raises(InputError, match=says):
            autoplan.replan(plan, measured=of_run(mixed_of_two(), [1.0, 1.0]), **left)  # type: ignore[arg-type]


def mixed_of_two() -> MixedPlanResult:
    problem = problem_of(*(scaled("cpu:1x1", name) for name in "ab"), model=TINY, framework=load_framework("torch"))
    plan = plan_of(kinds=[replicas(1, 4, (part, 1, 2)) for part in range(2)])
    return MixedPlanResult(
        file=make_mixed_file(problem, estimate_mixed(problem, [plan]), None, command="a test"), problem=problem
    )


def test_names_that_are_not_there_are_said(named: PlanResult) -> None:
    with pytest.raises(InputError, match="no such node"):
        autoplan.replan(named, without=["z"])
    with pytest.raises(InputError, match="no node is left"):
        autoplan.replan(named, without=["a", "b", "c", "d"])
    with pytest.raises(InputError, match="with --without"):
        autoplan.replan(named, nodes=3)


@pytest.mark.parametrize(("tp", "share"), [(8, "99.2 %"), (64, "93.6 %")])
def test_the_command_says_what_trains_on_with_unequal_tensor_parallel_degrees(
    tp: int, share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S37: 33 of 32,768 devices are lost, each in a tensor group of its own; the plan that it finds starts."""
    monkeypatch.chdir(tmp_path)
    fix = [f"tp={tp}", "pp=8", "cp=1", "micro_batch=1", "vp=1", "recompute=selective"]
    words = {"cluster": "h100-sxm:512x64", "global_batch": 4096, "seq_len": 4096}
    autoplan.search("llama3.1-405b", fix=fix, **words).save("plan.json")
    make_app()(["replan", "plan.json", "--gpus", "32735"], standalone_mode=False, obj={})
    assert f"{share} with unequal tensor-parallel degrees" in " ".join(capsys.readouterr().out.split())
    assert autoplan.export("replan.json", to="megatron-lm").files


def test_what_is_too_small_has_no_plan() -> None:
    large = autoplan.search("llama3-70b", cluster="h100-sxm:8x8", global_batch=64, seq_len=8192, forbid=["offload"])
    with pytest.raises(NoPlanError):
        autoplan.replan(large, nodes=1)


def test_the_command_writes_the_new_plan(
    before: PlanResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before.save("plan.json")
    flags = ["replan", "plan.json", "--nodes", "3", "--checkpoint-gbytes-per-s", "10"]
    make_app()(flags, standalone_mode=False, obj={})
    said = capsys.readouterr().out
    for part in ("before", "on 4 nodes", "checkpoint"):
        assert part in said
    written = autoplan.load_plan("replan.json")
    assert written.plan.global_batch == 128
    assert written.file.command.startswith("autoplan")
    assert "Python" not in written.file.command
    with pytest.raises(InputError, match=r"replan\.json exists"):
        make_app()(flags, standalone_mode=False, obj={})


def test_on_one_node_the_number_of_devices_is_asked_for() -> None:
    with pytest.raises(InputError, match="--nodes 1: the plan runs on 1: give the number of its devices left"):
        remaining(of_size(load_cluster("h100-sxm"), 8), nodes=1)
