"""Do frameworks start a plan of different nodes as it was priced: ranks, layers, micro-batches and memory?"""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import autoplan
from autoplan.api.plan_files import make_mixed_file
from autoplan.api.results import MixedPlanResult
from autoplan.api.unlike_nodes import node_ranges
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import decode
from autoplan.cost.estimate import estimate
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.search.ranking import ranked, training_flops_per_token
from autoplan.spec.enums import RankOrder
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, ReplicaKind
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.plan_file import MixedPlanFile
from autoplan.spec.started_plan import plan_over, started_plan
from launched import launched
from mixed_cases import SMALL, plan_of, problem_of, replicas, scaled, whole
from test_measured_times import TABLE

H100, A100 = load_cluster("h100-sxm:1x8"), load_cluster("a100-sxm:2x8")
# Of 12 layers: A100 take the stages 0 and 1, H100 the stage 2.
UNEVEN = plan_of(kinds=(replicas(4, 8, (1, 2, 2), (1, 2, 3), (0, 2, 7)),))


@pytest.fixture(scope="module")
def problem() -> MixedProblem:
    return problem_of(H100, A100)


def result_of(problem: MixedProblem, plan: MixedPlan) -> MixedPlanResult:
    file = make_mixed_file(problem, estimate_mixed(problem, [plan]), None, command="a test")
    return MixedPlanResult(file=file, problem=problem)


def test_ranks_of_a_stage_stand_together_so_that_parts_follow_one_another(problem: MixedProblem) -> None:
    started = started_plan(problem, UNEVEN)
    assert started.node_parts == (1, 1, 0)  # 4 replicas x tp 2 fill a node with every stage
    assert (started.plan.tp, started.plan.pp, started.plan.dp) == (2, 3, 4)
    assert started.plan.layers_per_chunk == (2, 3, 7)
    assert started.plan.rank_order == RankOrder.DP_BEFORE_PP
    assert started.micro_batches == ()


def test_a_plan_of_equal_nodes_is_laid_over_the_parts_in_their_order(problem: MixedProblem) -> None:
    """The first of three nodes has H100, whichever way the ranks of 12 pipelines of two stages are numbered."""
    plan = ParallelPlan(global_batch=24, pp=2, dp_shard=12)
    over = plan_over(problem, plan)  # stage 0 on ranks 0 to 11: 8 replicas begin on H100
    assert [(kind.count, [stage.part for stage in kind.stages]) for kind in over.kinds] == [(8, [0, 1]), (4, [1, 1])]
    inside = plan_over(problem, replace(plan, rank_order=RankOrder.PP_BEFORE_DP))
    assert [(kind.count, [stage.part for stage in kind.stages]) for kind in inside.kinds] == [(4, [0, 0]), (8, [1, 1])]
    with pytest.raises(InputError, match="ranks that share a layer are on two parts"):
        plan_over(problem, ParallelPlan(global_batch=2, tp=12, dp_shard=2))


def test_ranks_of_unlike_replicas_stand_together(problem: MixedProblem) -> None:
    plan = plan_of(kinds=(replicas(4, 9, (0, 2, 12)), replicas(8, 4, (1, 2, 12))))
    started = started_plan(problem, plan, unequal_batches=True)
    assert started.node_parts == (0, 1, 1)
    assert started.micro_batches == ((1, 9),) * 4 + ((1, 4),) * 8
    deep = plan_of(kinds=(replicas(1, 9, (0, 4, 5), (0, 4, 7)), replicas(2, 4, (1, 4, 5), (1, 4, 7))))
    assert started_plan(problem, deep, unequal_batches=True).plan.rank_order == RankOrder.PP_BEFORE_DP


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ((replicas(4, 9, (0, 2, 12)), replicas(8, 4, (1, 2, 12))), "its replicas take 4 and 9 micro-batches"),
        ((replicas(1, 8, (0, 4, 5), (0, 4, 7)), replicas(2, 8, (1, 4, 6), (1, 4, 6))), "split the layers differently"),
        ((replicas(4, 8, (1, 4, 5), (0, 2, 7)),), "tensor-parallel degrees 2 and 4"),
        ((replicas(8, 8, (0, 1, 12)), replicas(16, 8, (1, 1, 12), micro_batch=2)), "hold 1 and 2 sequences"),
        ((replicas(2, 8, (1, 2, 5), (0, 2, 7)),), "do not fill nodes of 8 devices of one part each"),
    ],
)
def test_a_plan_that_no_framework_starts_is_refused(
    problem: MixedProblem, kinds: tuple[ReplicaKind, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        started_plan(problem, plan_of(kinds=kinds))


def test_flops_of_frozen_weights_are_those_of_a_plain_plan(problem: MixedProblem) -> None:
    """Frozen weights have no gradients, and attention keeps to documents: on one part as on a plain cluster."""
    training = replace(problem.training, finetuning=FineTuning(rank=8), document_len=512)
    tuned = replace(problem, training=training)
    found = node_ranges(tuned, result_of(tuned, plan_of(kinds=(replicas(8, 4, (0, 1, 12)),))).file, "megatron-bridge")
    plan = ParallelPlan(global_batch=32, dp_shard=8, sharding="zero1")
    alone = whole(tuned, H100)
    (plain,) = ranked(alone, estimate(alone, PlanBatch.of([plan], 12)), [0])
    best = found[0].plan_file.best
    assert best.mfu / best.tokens_per_s_per_device == pytest.approx(plain.mfu / plain.tokens_per_s_per_device)


def test_a_node_with_fewer_devices_starts_fewer_ranks(tmp_path: Path) -> None:
    """Three nodes of 8 beside one of 4, each a replica per device: torchrun asks every node for its own number."""
    problem = problem_of(load_cluster("h100-sxm:3x8"), load_cluster("h100-sxm:1x4"))
    result = result_of(problem, plan_of(kinds=(replicas(24, 4, (0, 1, 12)), replicas(4, 4, (1, 1, 12)))))
    best = node_ranges(problem, result.file, "megatron-lm")[0].plan_file.best
    peak = 28 * 989e12
    flops = training_flops_per_token(problem.model, problem.training)
    assert best.mfu == pytest.approx(best.tokens_per_s_per_device * 28 * flops / peak, rel=1e-3)
    files = autoplan.export(result, to="megatron-lm").files
    for rank, size in enumerate(("8", "8", "8", "4")):
        words = launched(tmp_path / str(rank), files, NODE_RANK=str(rank), MASTER_ADDR="node0", MEGATRON_DIR="/opt")
        assert (words[words.index("--nproc-per-node") + 1], words[words.index("--nnodes") + 1]) == (size, "4")
    assert "4 devices are needed" in files[0].text
    assert autoplan.export(result, to="megatron-lm", launcher="mpirun").files
    with pytest.raises(
        InputError, match=r"slurm starts as many ranks on every node.*use --launcher torchrun or mpirun"
    ):
        autoplan.export(result, to="megatron-lm", launcher="slurm")


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-bridge", "primus"])
@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "mpirun"])
def test_launch_files_name_the_nodes_and_check_the_memory_of_each_part(
    problem: MixedProblem, target: str, launcher: str, tmp_path: Path
) -> None:
    result = result_of(problem, UNEVEN)
    files = autoplan.export(result, to=target, launcher=launcher).texts
    text = files["launch.sh"]
    assert "Nodes by NODE_RANK" in text
    assert "0 to 1 a100-sxm, 2 h100-sxm" in text
    stages = result.best.kinds[0].stages
    for part, ranks in ((1, "NODE_RANK >= 0 && NODE_RANK <= 1"), (0, "NODE_RANK >= 2 && NODE_RANK <= 2")):
        most = max(stage.memory_bytes for stage in stages if stage.part == part)
        check = text.index(f"the plan needs {math.ceil(most / 2**20)} MiB")
        assert text.rindex("NODE_RANK >=", 0, check) == text.index(ranks)
    for name, script in files.items():
        if script.startswith("#!/bin/bash"):
            (tmp_path / name).write_text(script)
            assert subprocess.run(["bash", "-n", tmp_path / name], check=False).returncode == 0


def test_the_layout_that_megatron_reads_has_the_layers_of_the_plan(problem: MixedProblem) -> None:
    (text,) = autoplan.export(result_of(problem, UNEVEN), to="megatron-lm").texts.values()
    layout = re.search(r"--pipeline-model-parallel-layout '(.*)'", text)
    assert layout is not None
    assert layout[1] == "Et*2|t*3|t*7L"
    assert "MFU" in text


def test_the_built_in_trainer_gets_the_whole_plan(problem: MixedProblem) -> None:
    trained = problem_of(H100, A100, framework=load_framework("torch"))
    plan = plan_of(kinds=(replicas(4, 9, (0, 2, 12)), replicas(8, 4, (1, 2, 12))))
    files = autoplan.export(result_of(trained, plan), to="autoplan").texts
    assert decode(MixedPlanFile, json.loads(files["plan.json"]), "plan.json").best.plan == plan


def test_the_built_in_trainer_trains_unlike_replicas_as_one_process_does(tmp_path: Path) -> None:
    """A device of half the speed takes half the micro-batches (the kind of `systems` S54)."""
    fast, slow = (scaled("cpu:1x1", name, speed=speed) for name, speed in (("fast", 1.0), ("slow", 0.5)))
    tiny = replace(SMALL, num_layers=2, hidden_size=32, vocab_size=256, num_heads=4, num_kv_heads=2, ffn_size=64)
    problem = problem_of(fast, slow, model=tiny, seq_len=16, precision="fp32", framework=load_framework("torch"))
    plan = plan_of(kinds=(replicas(1, 4, (0, 1, 2)), replicas(1, 2, (1, 1, 2))), precision="fp32")
    result_of(problem, plan).save(tmp_path / "plan.json")
    measured = autoplan.run(tmp_path / "plan.json", steps=1, warmup=1, check=True)
    assert measured is not None
    assert measured.task.global_batch == 6
    assert measured.measured.check is not None
    assert measured.measured.check.holds
    assert len(measured.measured.peak_bytes) == 2


def test_the_built_in_trainer_trains_a_v_over_unlike_stages_as_one_process_does(tmp_path: Path) -> None:
    """The first stage has the first chunk and the last, with the head."""
    fast, slow = (scaled("cpu:1x1", name, speed=speed) for name, speed in (("fast", 1.0), ("slow", 0.5)))
    tiny = replace(SMALL, num_layers=5, hidden_size=32, vocab_size=256, num_heads=4, num_kv_heads=2, ffn_size=64)
    problem = problem_of(fast, slow, model=tiny, seq_len=16, precision="fp32", framework=load_framework("torch"))
    (kind,) = plan_of(kinds=(replicas(1, 4, (0, 1, 3), (1, 1, 2)),)).kinds
    stages = tuple(replace(stage, chunks=chunks) for stage, chunks in zip(kind.stages, ((2, 1), (1, 1)), strict=True))
    plan = replace(plan_of(kinds=(replace(kind, stages=stages),), precision="fp32"), schedule="zb-v")
    result_of(problem, plan).save(tmp_path / "plan.json")
    measured = autoplan.run(tmp_path / "plan.json", steps=1, warmup=1, check=True)
    assert measured is not None
    assert measured.task.plan.layers_per_chunk == (2, 1, 1, 1)
    assert measured.measured.check is not None
    assert measured.measured.check.holds


def test_measured_times_of_all_parts_travel_with_the_plan_file(problem: MixedProblem, tmp_path: Path) -> None:
    timed = replace(problem, timings=(TABLE, TABLE))
    (plain,), (cost,) = estimate_mixed(problem, [UNEVEN]), estimate_mixed(timed, [UNEVEN])
    assert cost.step_s != plain.step_s
    file = make_mixed_file(timed, [cost], None, timings="db", command="a test")
    MixedPlanResult(file=file, problem=timed).save(tmp_path / "plan.json")
    again = autoplan.api.mixed.estimate_mixed(tmp_path / "plan.json")
    assert again.best == cost
    assert again.file.pinned == file.pinned


def test_the_built_in_trainer_refuses_another_optimizer_on_unlike_nodes(tmp_path: Path) -> None:
    place = {"cluster": "h100-sxm:1x2+a100-sxm:1x2", "global_batch": 16, "seq_len": 512, "framework": "torch"}
    autoplan.search_mixed("qwen2.5-0.5b", **place, optimizer="sgd").save(tmp_path / "plan.json")
    with pytest.raises(InputError, match="the built-in trainer has Adam, not sgd"):
        autoplan.run(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("to", "fix", "optimizer", "says"),
    [
        ("megatron-lm", [], "sgd", "Megatron-LM cannot express SGD with momentum"),
        (
            "accelerate",
            ["pp=2"],
            "adam",
            "no plan that was found is one that Hugging Face Accelerate starts on different",
        ),
    ],
)
def test_a_search_for_what_a_target_does_not_start_says_so(to: str, fix: list[str], optimizer: str, says: str) -> None:
    place = {"cluster": "h100-sxm:1x2+a100-sxm:1x2", "global_batch": 16, "seq_len": 512}
    with pytest.raises(AutoplanError, match=says):
        autoplan.search_mixed("qwen2.5-0.5b", **place, to=to, fix=fix, optimizer=optimizer)
