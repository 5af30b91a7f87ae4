"""Do plans of four and of eight ranks train what one process trains?"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from trained import MOE, OLD, SLIDING, assert_alike, plan_of, task

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
    *(
        task(plan_of(tp=2, sp=True, dp_shard=2, micro_batch=4, sharding=sharding))
        for sharding in ("none", "zero1", "zero2", "zero3")
    ),
    task(plan_of(tp=2, dp_shard=2, micro_batch=2, sharding="zero3", recompute="selective")),
    task(plan_of(tp=2, pp=2, micro_batch=4)),
    task(plan_of(tp=2, sp=True, pp=2, micro_batch=4, schedule="zb-v", vp=2)),
    task(
        plan_of(
            tp=2, sp=True, pp=2, micro_batch=4, schedule="interleaved", vp=2, recompute="full", recompute_num_layers=1
        )
    ),
    *(task(plan_of(dp_replicate=2, dp_shard=2, sharding=sharding)) for sharding in ("zero1", "zero3")),
    task(plan_of(dp_replicate=4, sharding="none")),
    task(plan_of(dp_replicate=4, sharding="zero1")),
    task(plan_of(pp=4, micro_batch=2)),
    task(plan_of(pp=4, micro_batch=2, schedule="zb-h1")),
    task(plan_of(pp=2, dp_shard=2, layers_per_chunk=(1, 3))),
    task(plan_of(dp_shard=4, sharding="zero3"), MOE),
    task(plan_of(tp=2, sp=True, dp_shard=2, micro_batch=4, sharding="zero3"), MOE),
    task(plan_of(pp=2, dp_shard=2, sharding="zero1", recompute="selective", recompute_modules=("moe",)), MOE),
    task(plan_of(tp=2, sp=True, dp_shard=2, micro_batch=4), OLD),
    task(plan_of(tp=2, dp_shard=2, micro_batch=4, sharding="zero3"), OLD),
    task(plan_of(tp=2, pp=2, micro_batch=4, schedule="1f1b"), SLIDING),
]
OF_EIGHT = [
    task(plan_of(tp=2, pp=2, dp_shard=2, micro_batch=2, sharding=sharding, sp=sp, schedule=schedule, vp=vp))
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
