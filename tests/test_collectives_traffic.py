"""Is what a step moves what its prices rest on, what hands compute, and what flows add up to link by link?"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from autoplan.cost.collectives.pipeline_messages import message_s
from autoplan.cost.collectives.traffic import StepTraffic, TrafficRow, step_traffic, transfers
from autoplan.cost.network.links import Links
from autoplan.readers.cluster import load_cluster
from autoplan.report.cluster_drawing import draw
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.topology.graph import quotient
from commands import run
from flows import Expanded, chain, hierarchical
from test_estimate import PLAIN, price, problem_of, terms_of
from test_topology_traffic import cluster_of

# Nothing hides, and nothing is gathered twice; 8-bit plans gather in 8 bits.
OPEN = PLAIN.changed(fsdp_unhidden_share=1.0, regathers_norm_output=False, narrow_tp_gathers="tensors")


def rows_of(step: StepTraffic) -> dict[str, TrafficRow]:
    return {f"{row.communicator} {row.operation}": row for row in step.rows}


def test_volumes_of_a_small_model_are_those_computed_by_hand() -> None:
    plan = ParallelPlan(global_batch=32, tp=2, sp=True, pp=2, dp_shard=8, sharding="zero1")
    step = step_traffic(problem_of(cluster="h100-sxm:4x8"), plan)
    rows = rows_of(step)
    assert [level.name for level in step.levels] == ["nvlink", "infiniband"]
    assert step.stage == 1  # with the final norm
    # 4 micro-batches, 8 blocks, 2 passes, and the inputs once more for the gradients of the weights.
    hidden = 2 * 2048 * 1024
    # The head gathers its inputs, twice as well, and scatters their gradient.
    assert rows["tp reduce_scatter"].times == 64 + 4
    assert rows["tp all_gather"].times == 96 + 2 * 4
    assert rows["tp reduce_scatter"].level_bytes == (68 * hidden / 2, 0)
    assert rows["tp all_gather"].level_bytes == (104 * hidden / 2, 0)
    # Three fp32 numbers a token, which an all-reduce of two ranks sends once each.
    assert rows["tp all_reduce"].times == 4 * 3
    assert rows["tp all_reduce"].level_bytes == (12 * 4 * 2048, 0)
    # Of 8 replicas 4 sit in a node.
    layer = (1024 * 2048 + 1024 * 1024 + 3 * 1024 * 4096) / 2 + 2 * 1024
    state_elements = 4 * layer + 32000 * 1024 / 2 + 1024
    assert rows["shard reduce_scatter"].level_bytes == pytest.approx(
        (4 * state_elements * 3 / 4, 4 * state_elements / 4 / 2)
    )
    assert rows["shard all_gather"].level_bytes == pytest.approx(
        (2 * state_elements * 3 / 4, 2 * state_elements / 4 / 2)
    )
    assert rows["pp send_recv"].level_bytes == (0, 4 * hidden / 2)
    assert len(rows) == 6
    assert step.level_bytes[1] == pytest.approx(6 * state_elements / 8 + 2 * hidden)
    assert sum(step.share(row) for row in step.rows) == pytest.approx(1)


@pytest.mark.parametrize(("precision", "size"), [("mxfp8", 33 / 32), ("nvfp4", 9 / 16)])
def test_blocks_of_scales_are_gathered_as_rows_and_those_of_gradients_as_columns_too(
    precision: str, size: float
) -> None:
    """A block gathers its inputs, and the gradients of its outputs for both products that they enter."""
    problem = problem_of(framework=OPEN.changed(narrow_tp_gathers="blocks"), cluster="b200:1x8")

    def gathered_bytes(precision: str) -> float:
        plan = ParallelPlan(global_batch=32, tp=2, sp=True, dp_shard=4, sharding="zero1", precision=precision)  # type: ignore[arg-type]
        return rows_of(step_traffic(problem, plan))["tp all_gather"].level_bytes[0]

    hidden, blocks = 2 * 2048 * 1024 / 2, 8 * 8 * 2  # micro-batches, layers and their blocks
    assert gathered_bytes("bf16") - gathered_bytes(precision) == pytest.approx(blocks * (2 - 3 * size / 2) * hidden)


@pytest.mark.parametrize(
    ("schedule", "vp", "sends"),
    [("1f1b", 1, [1, 2, 2, 1]), ("interleaved", 2, [3, 4, 4, 3]), ("zb-v", 2, [2, 4, 4, 2])],
)
def test_messages_leave_a_stage_as_often_as_its_chunks_have_neighbours(
    schedule: str, vp: int, sends: list[int]
) -> None:
    plan = ParallelPlan(global_batch=8, pp=4, vp=vp, schedule=schedule)  # type: ignore[arg-type]
    every = transfers(problem_of(cluster="h100-sxm:1x4"), plan)
    found = next(row for row in every if row.collective.operation == "send_recv")
    assert found.times.tolist() == [8 * count for count in sends]


def priced_cases() -> Iterator[tuple[str, ParallelPlan]]:
    dense = ParallelPlan(global_batch=32, dp_shard=4, dp_replicate=2, micro_batch=2)
    for sharding in ("none", "zero1", "zero2", "zero3"):
        yield "dense", dataclasses.replace(dense, tp=2, cp=2, sharding=sharding, cp_kind="all_to_all", sp=True)
        yield "moe", dataclasses.replace(dense, tp=2, ep=4, etp=2, sharding=sharding)
    yield "dense", dataclasses.replace(dense, tp=2, sharding="zero1", sp=True, precision="fp8")
    yield "moe", dataclasses.replace(dense, tp=2, ep=4, etp=2, sharding="zero1", precision="fp8")
    yield "mla", dataclasses.replace(dense, tp=4, sp=False)


@pytest.mark.parametrize(("model", "plan"), list(priced_cases()), ids=lambda case: getattr(case, "sharding", case))
def test_the_counted_times_are_those_of_the_estimate(model: str, plan: ParallelPlan) -> None:
    problem = problem_of(model, framework=OPEN, cluster=f"h100-sxm:{plan.num_devices // 8}x8")
    terms, links = terms_of(problem, plan), Links.of(problem)
    spent: dict[str, float] = {}
    for transfer in transfers(problem, plan):
        name = transfer.collective.communicator
        spent[name] = spent.get(name, 0.0) + float(transfer.seconds(links)[0])
    assert spent["tp"] == pytest.approx(terms["tp_communication"])
    assert spent.get("cp", 0) == pytest.approx(terms["cp_communication"])
    assert spent.get("ep", 0) + spent.get("etp", 0) == pytest.approx(terms["ep_communication"])
    states = sum(spent.get(name, 0) for name in ("shard", "expert shard", "replicate", "expert replicate"))
    ends = terms["fsdp_communication"] + terms["data_parallel_reduce"] + terms["parameter_gather"]
    assert states == pytest.approx(ends)
    assert price(problem, plan).step_s[0] > sum(spent.values())


def test_recomputed_blocks_send_again() -> None:
    plan = ParallelPlan(global_batch=8, tp=2, sp=True, ep=2, etp=2, dp_shard=4)
    problem = problem_of("moe", framework=OPEN, cluster="h100-sxm:1x8")
    full = rows_of(step_traffic(problem, dataclasses.replace(plan, recompute="full")))
    selective = rows_of(
        step_traffic(problem, dataclasses.replace(plan, recompute="selective", recompute_modules=("moe",)))
    )
    none = rows_of(step_traffic(problem, plan))
    assert full["ep all_to_all"].times == selective["ep all_to_all"].times == 1.5 * none["ep all_to_all"].times
    ends = 2 * 2  # of each micro-batch the lookup and the gradient of the head's input, which are not repeated
    assert full["tp reduce_scatter"].times - ends == 1.5 * (none["tp reduce_scatter"].times - ends)
    assert selective["tp reduce_scatter"].times == none["tp reduce_scatter"].times + 7 * 2  # shared experts of 7 blocks


def test_a_message_and_the_gather_behind_it_take_as_long_as_the_estimate_says() -> None:
    problem = problem_of("tied", cluster="h100-sxm:8x8", framework=PLAIN)
    plan = ParallelPlan(global_batch=64, tp=4, pp=4, dp_shard=4, sp=False)
    found, links = list(transfers(problem, plan)), Links.of(problem)
    sent = sum(
        float(finding.seconds(links)[0] / finding.times[0])
        for finding in found
        if finding.collective.communicator == "pp"
    )
    assert sent == pytest.approx(float(message_s(problem, PlanBatch.of([plan], 8))[0]))
    tied = next(finding for finding in found if finding.collective.communicator == "tied embedding")
    assert tied.times.tolist() == [1, 0, 0, 1]


def flows_of(problem: Problem, plan: ParallelPlan) -> Expanded:
    """Messages of a step between devices numbered by (stage, replica, context, tensor), put on every link."""
    expanded = Expanded(problem.cluster)
    ranks = np.arange(plan.num_devices).reshape(plan.pp, plan.dp, plan.cp, plan.tp)
    micro, layers = plan.num_microbatches, problem.model.num_layers // plan.pp
    tokens, hidden = 2048 // plan.cp, problem.model.hidden_size
    state = 2.0 * tokens * hidden
    keys_and_values = 2.0 * tokens * 2 * 8 * 64 / plan.tp
    layer = (1024 * 2048 + 1024 * 1024 + 3 * 1024 * 4096) / plan.tp + 2 * 1024
    table = math.ceil(32000 / (128 * plan.tp)) * 128 * 1024
    for stage in range(plan.pp):
        for row in ranks[stage].reshape(-1, plan.tp):
            hierarchical(expanded, row.tolist(), 2 * layers * micro * (3 + 2) * state, 1.0)
            if stage == 0:  # the looked-up rows and their gradient
                hierarchical(expanded, row.tolist(), micro * 2 * state, 1.0)
            if stage == plan.pp - 1:  # the head's inputs, twice, and their gradient; three numbers a token of the loss
                hierarchical(expanded, row.tolist(), micro * (3 * state + 3 * 2 * 4.0 * tokens), 1.0)
        for row in np.moveaxis(ranks[stage], 1, -1).reshape(-1, plan.cp):
            hierarchical(expanded, row.tolist(), layers * micro * 3 * keys_and_values * plan.cp, 1.0)
        state_elements = layers * layer + (2 if plan.pp == 1 else 1) * table + 1024 * (stage == plan.pp - 1)
        for column in range(plan.tp):
            hierarchical(expanded, ranks[stage, :, :, column].ravel().tolist(), (4 + 2) * state_elements, 1.0)
    for row in ranks.reshape(plan.pp, -1).T:
        for members in (row.tolist(), row[::-1].tolist()):
            chain(expanded, members, micro * state / plan.tp, 1.0)
    return expanded


@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), [(2, 2, 2, 4), (1, 2, 2, 8), (4, 1, 2, 4), (2, 8, 1, 2)])
def test_a_step_loads_every_link_as_its_flows_do(tp: int, cp: int, pp: int, dp: int) -> None:
    cluster = cluster_of(8, (4,), tiers=(2,))
    problem = problem_of(cluster=cluster)
    plan = ParallelPlan(global_batch=2 * dp, tp=tp, sp=tp > 1, cp=cp, pp=pp, dp_shard=dp)
    found, expanded = step_traffic(problem, plan), flows_of(problem, plan)
    assert found.stage == pp - 1
    # Every device has links and a NIC of its own, those out of a leaf are shared.
    leaf = found.levels[1].num_devices
    moved = (found.level_bytes[0], found.level_bytes[1], leaf * found.level_bytes[2])
    assert moved == pytest.approx(tuple(expanded.busiest(level) for level in range(3)))


def test_tiers_that_hold_nothing_back_are_told_too() -> None:
    plan = ParallelPlan(global_batch=64, tp=8, sp=True, dp_shard=64)
    step = step_traffic(problem_of(cluster="h100-sxm:64x8"), plan)
    assert [level.name for level in step.levels] == ["nvlink", "infiniband leaf", "infiniband"]
    # Of the rings of a leaf's 32 nodes one hop leaves it, over links that all of them share.
    reduced = rows_of(step)["shard reduce_scatter"].level_bytes
    assert reduced[2] == pytest.approx(reduced[1] / 32)


@pytest.mark.parametrize(
    ("name", "labels"),
    [("a100-pcie:64x8", 3), ("frontier:256x8", 4), ("gb200-nvl72:128x4", 3), ("mi300x:64x8", 3), ("h100-sxm:1x8", 1)],
)
def test_every_level_of_links_is_labelled_where_it_is_drawn(name: str, labels: int) -> None:
    cluster = load_cluster(name)
    plan = ParallelPlan(global_batch=4096, tp=4, sp=True, dp_shard=cluster.num_devices // 4)
    step = step_traffic(problem_of(cluster=cluster), plan)
    assert len(step.levels) == labels
    assert draw(cluster, quotient(cluster), step).count(" per step<") == labels


def test_the_command_shows_the_traffic_of_a_plan_and_draws_it(tmp_path: Path) -> None:
    training = ("--global-batch", "32", "--seq-len", "4096", "--tp", "4", "--pp", "2")
    priced = run(tmp_path, "estimate", "llama3-8b", "--cluster", "h100-sxm:4x8", *training, "--out", "plan.json")
    assert priced.returncode == 0, priced.stderr
    shown = run(tmp_path, "topo", "h100-sxm:4x8", "--plan", "plan.json", "--svg", "drawn.svg", "--json")
    assert shown.returncode == 0, shown.stderr
    traffic = json.loads(shown.stdout)["traffic"]
    assert [level["name"] for level in traffic["levels"]] == ["nvlink", "infiniband"]
    assert (tmp_path / "drawn.svg").read_text().count(" per step<") == 2
    # On the last stage 8 micro-batches of 16 layers with two sums in each pass, and the head's.
    assert f" {8 * (16 * 2 * 2 + 1)} " in run(tmp_path, "topo", "h100-sxm:4x8", "--plan", "plan.json").stdout
    other = run(tmp_path, "topo", "h100-sxm:2x8", "--plan", "plan.json")
    assert other.returncode == 1
    assert "the plan is for 32 devices, h100-sxm has 16" in other.stderr
    (tmp_path / "measured.json").write_text(
        (tmp_path / "plan.json").read_text().replace('"timings": ""', '"timings": "db"')
    )
    elsewhere = run(tmp_path, "topo", "h100-sxm:4x8", "--plan", "measured.json", AUTOPLAN_DB="not-here.db")
    assert elsewhere.returncode == 0, elsewhere.stderr  # bytes rest on no timings
    (tmp_path / "note.json").write_text("{}")
    strange = run(tmp_path, "topo", "h100-sxm:2x8", "--plan", "note.json")
    assert (strange.returncode, strange.stderr.count("\n")) == (1, 1)
