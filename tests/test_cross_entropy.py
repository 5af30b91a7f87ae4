"""Is the cross entropy priced by the kernels that a plan has for it, and read from what launch files choose?"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from autoplan.api.problem import make_problem
from autoplan.cost.estimate import estimate
from autoplan.cost.kernels.memory_bound import memory_bound_s
from autoplan.cost.kernels.times import head_s
from autoplan.cost.memory.activations import logit_bytes
from autoplan.frameworks.presets import load_framework
from autoplan.spec.enums import CrossEntropyFusion
from autoplan.spec.plan import ParallelPlan, PlanBatch
from test_megatron_read import read

TOKENS, VOCAB = 4096, 128256
LOGITS = TOKENS * VOCAB / 2  # of a rank, with tp 2


@pytest.mark.parametrize("framework", ["megatron-core", "nemo", "primus"])
def test_fused_kernels_move_less_of_every_logit_and_the_last_holds_least(framework: str) -> None:
    problem = make_problem("llama3-8b", cluster="h100-sxm:1x8", seq_len=TOKENS, framework=framework)
    plans = [ParallelPlan(global_batch=8, tp=2, dp_shard=4, cross_entropy_fusion=word) for word in CrossEntropyFusion]
    batch = PlanBatch.of(plans, problem.model.num_layers)
    assert logit_bytes(problem, batch) == pytest.approx(np.array([8, 10, 2]) * LOGITS)
    passes = head_s(problem, batch).passes
    moved_s = memory_bound_s(problem, np.array([26.0, 14.0, 12.0]) * LOGITS)
    for seconds in (passes.forward_s, passes.backward_s):
        assert np.diff(seconds) == pytest.approx(np.diff(moved_s))
    costs = estimate(problem, batch)
    assert (np.diff(costs.step_s) < 0).all()
    assert costs.memory_bytes.argmin() == 2


@pytest.mark.parametrize(
    ("framework", "tp", "bytes_per_logit"),
    [("torchtitan", 1, 4), ("torchtitan", 2, 10), ("torchtitan-eager", 1, 12), ("torchtitan-eager", 2, 16)],
)
def test_losses_of_torch_hold_what_was_counted(framework: str, tp: int, bytes_per_logit: int) -> None:
    problem = make_problem("llama3-8b", cluster="h100-sxm:1x8", seq_len=TOKENS, framework=framework)
    batch = PlanBatch.of([ParallelPlan(global_batch=8, tp=tp, dp_shard=8 // tp)], problem.model.num_layers)
    assert logit_bytes(problem, batch) == pytest.approx(bytes_per_logit * TOKENS * VOCAB / tp)


def test_an_eager_loss_of_torch_holds_twelve_bytes_of_a_logit() -> None:
    torch = pytest.importorskip("torch")
    weight, hidden = torch.randn(4096, 8, dtype=torch.bfloat16, requires_grad=True), torch.randn(64, 8).bfloat16()

    def step() -> None:
        logits = torch.nn.functional.linear(hidden, weight)
        loss = torch.nn.functional.cross_entropy(logits.float(), torch.arange(64))
        del logits
        loss.backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    changes = [
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()) if event.name() == "[memory]"
    ]
    assert max(itertools.accumulate(changes)) / (64 * 4096) == pytest.approx(12.0, rel=0.01)


@pytest.mark.parametrize(
    ("options", "fusion"),
    [
        ("", "unfused"),
        ("--cross-entropy-fusion-impl te", "unfused"),
        ("--cross-entropy-loss-fusion", "native"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "te"),
    ],
)
def test_arguments_of_megatron_lm_choose_them(options: str, fusion: str) -> None:
    assert read(options).plan.cross_entropy_fusion == fusion


def test_every_version_has_its_own_and_no_other() -> None:
    usual = {"nemo": "te", "nemo-24.07": "native", "megatron-core-0.8": "native", "megatron-core": "unfused"}
    assert {name: load_framework(name).choice("cross_entropy_fusion") for name in usual} == usual


def test_pieces_of_a_loss_have_an_eighth_of_the_logits_and_add_up_the_gradients_of_the_head() -> None:
    problem = make_problem("llama3-8b", cluster="h100-sxm:1x8", seq_len=TOKENS, framework="torchtitan")
    plans = [
        ParallelPlan(global_batch=8, dp_shard=8, sharding="zero3", chunked_loss=word) for word in ("none", "chunks")
    ]
    batch = PlanBatch.of(plans, problem.model.num_layers)
    assert logit_bytes(problem, batch) == pytest.approx(np.array([4, 0.5]) * TOKENS * VOCAB)
    passes = head_s(problem, batch).passes
    assert passes.forward_s[0] == passes.forward_s[1]
    assert np.diff(passes.backward_s) == pytest.approx(memory_bound_s(problem, np.array([7 * 10.0 * VOCAB * 4096])))
    # At a micro-batch of 1 the peak is behind the loss, in the last layer's backward pass.
    large = [dataclasses.replace(plan, global_batch=32, micro_batch=4) for plan in plans]
    costs = estimate(problem, PlanBatch.of(large, problem.model.num_layers))
    assert costs.memory_bytes[1] < costs.memory_bytes[0]


def test_fused_losses_take_as_long_as_measured_and_hold_few_logits() -> None:
    """Gemma 2 2B's head with 8,192 tokens on an A100: 207, 303 and 135 ms (arXiv:2411.09009, table 1)."""
    problem = make_problem("gemma2-9b", cluster="a100-sxm:1x1", seq_len=8192, framework="transformers")
    model = dataclasses.replace(problem.model, hidden_size=2304, vocab_size=256_000)
    problem = dataclasses.replace(problem, model=model)
    plans = [ParallelPlan(global_batch=1, chunked_loss=word) for word in ("none", "liger", "cut")]
    batch = PlanBatch.of(plans, model.num_layers)
    passes = head_s(problem, batch).passes
    assert passes.forward_s + passes.backward_s == pytest.approx(np.array([0.207, 0.303, 0.135]), rel=0.16)
    kept_bytes = logit_bytes(problem, batch)
    assert kept_bytes[1] == pytest.approx(2 * 128 * 256_000)  # 64 pieces of 128 tokens
    assert kept_bytes[2] == 0
