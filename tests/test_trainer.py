"""Does every plan train what one process trains?  And what happens to a run that something goes wrong with?"""

from __future__ import annotations

import itertools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from autoplan.children import CrewError
from autoplan.errors import InputError
from autoplan.model import Experts, ModelSpec
from autoplan.plan import ParallelPlan
from autoplan.trainer import run as trainer_run
from autoplan.trainer.run import check_task, run_task
from autoplan.trainer.task import Advance, Check, Task
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
    """Every way to use two ranks, with micro-batches of 1 to 8, and one of them recomputed."""
    pipelines = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]
    shared = [{"dp_shard": 2, "sharding": sharding} for sharding in ("none", "zero1", "zero2", "zero3")]
    cut = [{"tp": 2, "sp": sp} for sp in (False, True)]
    piped = [{"pp": 2, "schedule": schedule, "vp": vp} for schedule, vp in pipelines]
    found = []
    turns = [*((micro_batch, "none") for micro_batch in (1, 2, 4, 8)), (2, "full")]
    for place, (micro_batch, recompute) in itertools.product([*shared, *cut, *piped], turns):
        plan = {"global_batch": 8, "micro_batch": micro_batch, "recompute": recompute, **place}
        try:
            found.append(ParallelPlan(**plan))  # type: ignore[arg-type]
        except InputError:
            continue
    return found


def assert_alike(tasks: list[Task]) -> None:
    for one, check in zip(tasks, checks(tasks), strict=True):
        assert isinstance(check, Check)
        assert check.holds, (one.plan.describe(), check)


def test_every_plan_of_two_ranks_trains_what_one_process_does() -> None:
    tasks = legal([task(plan) for plan in plans_of_two()])
    assert len(tasks) >= 45
    assert_alike(tasks)


def plan_of(**axes: object) -> ParallelPlan:
    return ParallelPlan(**{"global_batch": 8, "micro_batch": 1, **axes})  # type: ignore[arg-type]


OF_FOUR = [
    *(task(plan_of(pp=2, dp_shard=2, sharding=sharding)) for sharding in ("none", "zero1", "zero3")),
    *(
        task(plan_of(pp=2, dp_shard=2, sharding=sharding, schedule=schedule, vp=vp))
        for sharding, schedule, vp in (
            ("none", "zb-h1", 1),
            ("none", "zb-v", 2),
            ("zero1", "zb-v", 2),
            ("zero1", "dualpipe-v", 2),
            ("zero3", "interleaved", 2),
            ("zero1", "gpipe", 1),
        )
    ),
    task(plan_of(pp=2, dp_shard=2, sharding="zero1", rank_order="tp-cp-ep-pp-dp", recompute="full")),
    *(task(plan_of(tp=2, sp=True, dp_shard=2, sharding=sharding)) for sharding in ("none", "zero1", "zero2", "zero3")),
    task(plan_of(tp=2, dp_shard=2, sharding="zero3", recompute="selective")),
    task(plan_of(tp=2, pp=2)),
    task(plan_of(tp=2, sp=True, pp=2, schedule="zb-v", vp=2)),
    task(plan_of(tp=2, sp=True, pp=2, schedule="interleaved", vp=2, recompute="full", recompute_num_layers=1)),
    *(task(plan_of(dp_replicate=2, dp_shard=2, sharding=sharding)) for sharding in ("zero1", "zero3")),
    task(plan_of(dp_replicate=4, sharding="none")),
    task(plan_of(dp_replicate=4, sharding="zero1")),
    task(plan_of(pp=4)),
    task(plan_of(pp=4, schedule="zb-h1")),
    task(plan_of(pp=2, dp_shard=2, layers_per_chunk=(1, 3))),
    task(plan_of(dp_shard=4, sharding="zero3"), MOE),
    task(plan_of(tp=2, sp=True, dp_shard=2, sharding="zero3"), MOE),
    task(plan_of(pp=2, dp_shard=2, sharding="zero1", recompute="selective", recompute_modules=("moe",)), MOE),
    task(plan_of(tp=2, sp=True, dp_shard=2), OLD),
    task(plan_of(tp=2, dp_shard=2, sharding="zero3"), OLD),
    task(plan_of(tp=2, pp=2, schedule="1f1b"), SLIDING),
]
OF_EIGHT = [
    task(plan_of(tp=2, pp=2, dp_shard=2, sharding=sharding, sp=sp, schedule=schedule, vp=vp))
    for sharding, sp, schedule, vp in (
        ("none", False, "1f1b", 1),
        ("none", True, "zb-v", 2),
        ("zero1", True, "interleaved", 2),
        ("zero3", False, "zb-h1", 1),
    )
] + [
    task(plan_of(pp=4, dp_shard=2, sharding="zero1")),
    task(plan_of(pp=2, dp_replicate=2, dp_shard=2, sharding="zero3")),
    task(plan_of(dp_shard=8, sharding="zero3")),
    task(plan_of(pp=2, dp_shard=4, sharding="zero1", rank_order="tp-cp-ep-pp-dp"), MOE),
]


def test_plans_of_four_ranks_train_what_one_process_does() -> None:
    assert len(OF_FOUR) >= 25
    assert_alike(OF_FOUR)


def test_plans_of_eight_ranks_train_what_one_process_does() -> None:
    assert len(OF_EIGHT) >= 8
    assert_alike(OF_EIGHT)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (plan_of(cp=2), "cp 2: attention sees whole sequences"),
        (plan_of(pp=2, dp_shard=2, sharding="zero2"), "zero2 with pp 2 is what zero1 is"),
        (plan_of(tp=4), "num_kv_heads 2 must be divisible by tp 4"),
        (plan_of(pp=2, micro_batch=8), "1f1b needs at least pp 2 micro-batches"),
        (plan_of(dp_shard=2, tp_overlap=True), "need kernels of their own"),
        (plan_of(dp_shard=2, recompute="selective", recompute_modules=("layernorm",)), "core_attn, mlp and moe alone"),
        (plan_of(dp_shard=2, precision="fp8"), "precision 'fp8'"),
        (plan_of(dp_shard=2, offload="optimizer"), "offload 'optimizer'"),
    ],
)
def test_what_would_not_run_or_not_be_priced_is_refused(plan: ParallelPlan, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_task(task(plan))


def test_what_the_transformer_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="does not know a layer_pattern"):
        check_task(task(plan_of(dp_shard=2), replace(DENSE, layer_pattern="*-*-")))
    with pytest.raises(InputError, match="one token a byte"):
        check_task(task(plan_of(dp_shard=2), replace(DENSE, vocab_size=128)))


def test_a_difference_that_is_no_rounding_does_not_hold() -> None:
    found = Check(loss=0.0, gradients=1e-2, weights=0.0)
    assert not found.holds
    assert not Check(loss=float("nan"), gradients=0.0, weights=0.0).holds
    assert Check(loss=1e-6, gradients=3e-6, weights=1e-6).holds


def test_a_run_reports_every_step_and_its_loss_falls() -> None:
    seen: list[Advance] = []
    plan = plan_of(dp_shard=2, sharding="zero3", micro_batch=2)
    made = run_task(replace(task(plan), num_steps=3, num_warmup=1, tracks_memory=True), advance=seen.append)
    assert made is not None
    assert [now.step for now in seen] == [0, 1, 2, 3]
    assert len(made.step_s) == len(made.losses) == 3
    for step, passes, optimizer in zip(made.step_s, made.passes_s, made.optimizer_s, strict=True):
        assert 0 < max(passes, optimizer) <= step <= passes + optimizer + 0.5
    assert len(made.peak_bytes) == 2
    # At least the shards of weights, gradients and Adam's two states, 16 bytes a parameter, live at once.
    assert min(made.peak_bytes) > 16 * 40_000 / 2


def killed_in_the_middle(number: signal.Signals, limit_s: float) -> str:
    """What a run says whose rank 1 gets a signal after its second step."""
    started: list[int] = []

    class Watched(trainer_run.Children):
        def start(self) -> object:
            answer = super().start()
            started.extend(self.pids)
            return answer

    def strike(now: Advance) -> None:
        if now.step == 1:
            os.kill(started[1], number)

    one = replace(task(plan_of(dp_shard=2, sharding="zero3")), num_steps=10_000, limit_s=limit_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_run, "Children", Watched)
        with pytest.raises(CrewError) as caught:
            run_task(one, advance=strike)
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < end
        time.sleep(0.05)
    return str(caught.value)


def test_a_rank_that_is_killed_ends_the_run_with_its_name() -> None:
    assert "rank 1 was ended by SIGKILL" in killed_in_the_middle(signal.SIGKILL, limit_s=60.0)


def test_a_rank_that_hangs_ends_the_run() -> None:
    assert killed_in_the_middle(signal.SIGSTOP, limit_s=3.0)


def test_a_rank_that_runs_out_of_memory_says_so() -> None:
    huge = replace(DENSE, hidden_size=2**20, vocab_size=2**20)
    with pytest.raises(CrewError, match="out of memory"):
        run_task(task(plan_of(dp_shard=2), huge))
