"""What does the trainer refuse, and what happens to a run that something goes wrong with?"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from autoplan.base.errors import InputError
from autoplan.base.processes import Children, CrewError
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.spec.plan import ParallelPlan
from autoplan.trainer import run as trainer_run
from autoplan.trainer.run import check_task, run_task
from autoplan.trainer.task import Advance, Deviation
from trained import DENSE, assert_alike, peaks_of_building, plan_of, task


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
    with pytest.raises(InputError, match="does not support different kinds of layers"):
        check_task(task(plan_of(dp_shard=2), replace(DENSE, layer_pattern="*-*-")))
    with pytest.raises(InputError, match="one token a byte"):
        check_task(task(plan_of(dp_shard=2), replace(DENSE, vocab_size=128)))


def test_a_difference_that_is_no_rounding_does_not_hold() -> None:
    found = Deviation(loss=0.0, gradients=1e-2, weights=0.0)
    assert not found.holds
    assert not Deviation(loss=float("nan"), gradients=0.0, weights=0.0).holds
    assert Deviation(loss=1e-6, gradients=3e-6, weights=1e-6).holds


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


def test_ranks_that_share_weights_never_hold_all_of_them() -> None:
    model = replace(DENSE, num_layers=8, hidden_size=256, ffn_size=1024)
    whole = 4 * count_parameters(model)
    for plan in (plan_of(dp_shard=2, sharding="zero3"), plan_of(tp=2, sp=True)):
        # Half of it, and of one layer the whole with what it is drawn into.
        assert 0.5 * whole <= peaks_of_building(task(plan, model)) <= 0.75 * whole


def test_replicas_with_unlike_micro_batches_train_what_one_process_does() -> None:
    two = [plan_of(dp_shard=2, sharding=sharding) for sharding in ("none", "zero1")]
    assert_alike([replace(task(plan), micro_batches=((plan.micro_batch, 5), (plan.micro_batch, 3))) for plan in two])
    # Micro-batches of one and of three sequences, of which one process trains the mean over sequences too.
    assert_alike([replace(task(plan), micro_batches=((1, 2), (3, 2))) for plan in two])
    # Stages of three layers and of one, and a replica with thrice the micro-batches of the other.
    four = plan_of(dp_shard=2, pp=2, layers_per_chunk=(3, 1), sharding="zero1", rank_order="tp-cp-ep-pp-dp")
    assert_alike([replace(task(four), micro_batches=((four.micro_batch, 6), (four.micro_batch, 2)))])


def killed_in_the_middle(number: signal.Signals, limit_s: float) -> str:
    """Words of a run whose rank 1 gets a signal after its second step."""
    started: list[int] = []

    class Watched(Children):
        def start(self) -> object:
            answer = super().start()
            started.extend(self.pids)
            return answer

    def strike(now: Advance) -> None:
        if now.step == 1:
            os.kill(started[1], number)

    endless = replace(task(plan_of(dp_shard=2, sharding="zero3")), num_steps=10_000, limit_s=limit_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_run, "Children", Watched)
        with pytest.raises(CrewError) as caught:
            run_task(endless, advance=strike)
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
