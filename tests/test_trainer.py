"""Does every plan train what one process trains?  And what happens to a run that something goes wrong with?"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from autoplan.errors import InputError
from autoplan.model import Experts, ModelSpec
from autoplan.plan import ParallelPlan
from autoplan.trainer.run import check_task
from autoplan.trainer.task import Check, Task
from trained import checks

DENSE = ModelSpec(
    name="dense", num_layers=4, hidden_size=32, vocab_size=256, num_heads=4, num_kv_heads=2, ffn_size=64, qk_norm="head"
)
MOE = replace(
    DENSE,
    name="experts",
    moe=Experts(num_experts=4, experts_per_token=2, expert_ffn_size=32, num_dense_layers=1, shared_expert_ffn_size=16),
)
OLD = replace(
    DENSE,
    name="old",
    num_kv_heads=None,
    gated_mlp=False,
    mlp_bias=True,
    qkv_bias=True,
    attention_output_bias=True,
    norm="layernorm",
    position_embedding="learned",
    max_positions=16,
    tied_embeddings=True,
    qk_norm="none",
)
SLIDING = replace(DENSE, name="sliding", window=4, full_attention_interval=2)


def task(plan: ParallelPlan, model: ModelSpec = DENSE) -> Task:
    return Task(model=model, plan=plan, seq_len=16, dtype="bf16", tracks_memory=False)


def legal(tasks: list[Task]) -> list[Task]:
    kept = []
    for one in tasks:
        try:
            check_task(one)
        except InputError:
            continue
        kept.append(one)
    return kept


def plans_of_two() -> list[ParallelPlan]:
    """Every way to use two ranks, with micro-batches of 1 to 8 in turn."""
    pipelines = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]
    shared = [{"dp_shard": 2, "sharding": sharding} for sharding in ("none", "zero1", "zero2", "zero3")]
    cut = [{"tp": 2, "sp": sp} for sp in (False, True)]
    piped = [{"pp": 2, "schedule": schedule, "vp": vp} for schedule, vp in pipelines]
    found = []
    for place, micro_batch, recompute in itertools.product([*shared, *cut, *piped], (1, 2, 4, 8), RECOMPUTES):
        plan = {"global_batch": 8, "micro_batch": micro_batch, **place, **recompute}
        try:
            found.append(ParallelPlan(**plan))  # type: ignore[arg-type]
        except InputError:
            continue
    return found


RECOMPUTES: list[dict[str, object]] = [
    {},
    {"recompute": "full"},
]


def assert_alike(tasks: list[Task]) -> None:
    for one, check in zip(tasks, checks(tasks), strict=True):
        assert isinstance(check, Check)
        assert check.holds, (one.plan.describe(), check)


def test_every_plan_of_two_ranks_trains_what_one_process_does() -> None:
    tasks = legal([task(plan) for plan in plans_of_two()])
    assert len(tasks) >= 60
    assert_alike(tasks)
