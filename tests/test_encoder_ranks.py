"""An encoder of images on ranks of its own: degrees, time, memory, and what a user sees of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.api.encoder_options import encoder_ranks
from autoplan.api.problem import load_cluster, load_model, make_problem
from autoplan.base.errors import InputError
from autoplan.cost.encoder_ranks import encoder_ranks as cost_of_ranks
from autoplan.cost.estimate import estimate, memory_oom_z
from autoplan.cost.kernels.arithmetic import count_parameters, model_flops_per_token
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.report.answer import answer_lines
from autoplan.spec.estimate import CostEstimate
from autoplan.spec.finetuning import FineTuning
from autoplan.spec.model import Encoder, ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem

# InternViT-6B of OpenGVLab (448 px, squares of 2 x 2 patches of 14) before Llama-2-7B: the sizes of S40.
INTERN_VIT = ModelSpec(
    name="internvit-6b",
    num_layers=45,
    hidden_size=3200,
    num_heads=25,
    ffn_size=12800,
    vocab_size=588,
    gated_mlp=False,
    mlp_bias=True,
    bidirectional=True,
    tied_embeddings=True,
    position_embedding="none",
)
LANGUAGE_MODEL = load_model("llama2-7b")
MULTIMODAL = replace(
    LANGUAGE_MODEL,
    encoder=Encoder(layers=INTERN_VIT, patches=1025, image_tokens=256, projector=((12800, 4096), (4096, 4096))),
)
ONE_OR_EIGHT = "1:1,8:1"


def _problem(images: int | str = ONE_OR_EIGHT, ranks: str | None = "tp=1,dp=16", **options: Any) -> Problem:
    known: dict[str, Any] = {"cluster": "h100-sxm:4x8", "seq_len": 4096} | options
    return make_problem(MULTIMODAL, images=images, encoder_ranks=ranks, **known)


def _plan(**axes: Any) -> ParallelPlan:
    return ParallelPlan.derived(**{"global_batch": 128, "micro_batch": 1, "sharding": "zero1", "dp_shard": 16} | axes)


def _priced(problem: Problem, **axes: Any) -> CostEstimate:
    return estimate(problem, PlanBatch.of([_plan(**axes)], problem.model.num_layers))


def _fastest(problem: Problem) -> tuple[float, ParallelPlan]:
    """The fastest plan that fits, of those with the same degrees in all stages and equal layers."""
    plans, rules = [], book_of(problem.framework).rules
    for tp, pp, micro_batch, recompute in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4), ("none", "full")):
        dp = max(problem.cluster.num_devices // (tp * pp), 1)
        plan = _plan(tp=tp, sp=tp > 1, pp=pp, dp_shard=dp, micro_batch=micro_batch, recompute=recompute)
        if not broken(rules, problem.workload, plan):
            plans.append(plan)
    costs = estimate(problem, PlanBatch.of(plans, problem.model.num_layers))
    at = min(np.flatnonzero(costs.verdict == 0), key=lambda index: costs.step_s[index])
    return float(costs.step_s[at]), plans[at]


def test_degrees_of_its_own_beat_an_even_split_where_images_vary() -> None:
    """S40: ViT-6B and LLM-7B on 32 devices, half of the samples with one image and half with eight.

    The same (t, p, d) = (1, 4, 8) for both, with equal layers, leaves the encoder to the first stage.
    """
    even = _priced(_problem(ranks=None), pp=4, dp_shard=8, recompute="full")
    assert even.verdict[0] == 0
    own_s, plan = _fastest(_problem())
    assert plan.num_devices == 16
    assert even.step_s[0] / own_s >= 1.3


def test_equal_images_leave_nothing_to_be_gained_from_knowing_them() -> None:
    """S40: the gain of a schedule that knows the data is at most the time that ranks wait for samples with more."""
    for ranks, axes in ((None, {"pp": 2}), ("tp=1,dp=16", {})):
        equal, unlike = (_priced(_problem(images, ranks), **axes) for images in (4, ONE_OR_EIGHT))
        assert equal.terms_s["uneven_lengths"][0] / equal.step_s[0] <= 0.05
        assert unlike.terms_s["uneven_lengths"][0] / unlike.step_s[0] > 0.05


def test_a_step_is_that_of_a_pipeline_with_one_stage_more() -> None:
    """Fewer replicas of the encoder each do more; a slow one decides as m micro-batches of its own."""
    fast, slow = (_problem(4, ranks) for ranks in ("tp=1,dp=16", "tp=1,dp=4"))
    batch = PlanBatch.of([_plan(dp_shard=16)], 32)
    few, many = (cost_of_ranks(problem, batch) for problem in (slow, fast))
    assert few is not None
    assert many is not None
    assert few.batch.micro_batch[0] == 4 * many.batch.micro_batch[0] == 4
    passes_s = few.passes.forward_s[0] + few.passes.backward_s[0]
    assert passes_s == pytest.approx(4 * (many.passes.forward_s[0] + many.passes.backward_s[0]), rel=0.1)
    step = _priced(slow)
    work_s = step.step_s[0] - step.terms_s["stragglers"][0]
    assert work_s == pytest.approx(8 * passes_s, rel=0.15)
    assert step.terms_s["encoder_ranks"][0] > 0.5 * step.step_s[0]
    assert _priced(fast).step_s[0] < step.step_s[0]


def test_ranks_of_the_text_model_hold_nothing_of_the_encoder() -> None:
    axes = {"tp": 2, "sp": True, "dp_shard": 8, "micro_batch": 2}
    alone = _priced(make_problem(LANGUAGE_MODEL, cluster="h100-sxm:2x8", seq_len=4096), **axes)
    apart = _priced(_problem(1, "tp=1,dp=16"), **axes)
    encoder = cost_of_ranks(_problem(1), apart.batch)
    assert encoder is not None
    assert apart.memory_bytes[0] == max(alone.memory_bytes[0], encoder.reserved_bytes[0])
    # 5.5 billion parameters in 16 bits, gradients in fp32, and a sixteenth of 12 bytes of states.
    states = sum(float(encoder.memory_terms[name][0]) for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(5.5e9 * (2 + 4 + 12 / 16), rel=0.02)


def test_a_frozen_encoder_only_works_forward() -> None:
    trained, frozen = (
        cost_of_ranks(_problem(4, finetune=tuning), PlanBatch.of([_plan()], 32))
        for tuning in (None, FineTuning(frozen=("vision_tower",)))
    )
    assert trained is not None
    assert frozen is not None
    assert frozen.passes.forward_s[0] == trained.passes.forward_s[0]
    assert frozen.passes.backward_s[0] == frozen.end_s[0] == frozen.memory_terms["optimizer"][0] == 0.0
    assert frozen.reserved_bytes[0] < 0.5 * trained.reserved_bytes[0]


def test_memory_of_a_search_is_that_of_an_estimate() -> None:
    problem = _problem()
    batch = PlanBatch.of([_plan(), _plan(tp=2, sp=True, dp_shard=8, micro_batch=2)], 32)
    assert memory_oom_z(problem, batch) == pytest.approx(estimate(problem, batch).oom_z)


def test_the_model_is_the_same_on_other_ranks() -> None:
    fewer_ranks, other = _problem(4, None).model, _problem(4).model
    assert count_parameters(fewer_ranks) == count_parameters(other)
    assert model_flops_per_token(fewer_ranks, 4096) == model_flops_per_token(other, 4096)


def test_a_search_proves_its_answer_and_tries_ranks() -> None:
    """The best of all ranks is none slower than any; figures per device count those of the encoder."""
    options: dict[str, Any] = {"cluster": "h100-sxm:1x8", "global_batch": 32, "seq_len": 4096, "images": 2}
    small = replace(
        MULTIMODAL, num_layers=8, encoder=replace(MULTIMODAL.encoder, layers=replace(INTERN_VIT, num_layers=8))
    )
    apart = autoplan.search(small, encoder_ranks="tp=1,dp=2", **options)
    assert apart.file.certificate is not None
    assert apart.file.best.plan.num_devices == 6
    assert apart.file.num_devices == 8
    best = apart.file.best
    assert best.tokens_per_s_per_device == pytest.approx(32 * 4096 / best.step_s / 8)
    tried = autoplan.search(small, encoder_ranks="auto", **options)
    assert tried.file.best.step_s <= best.step_s
    text = dict(answer_lines(apart.file))["encoder"]
    assert text.startswith("tp 1 x dp 2 on 2 devices beside those of the text model")
    with pytest.raises(InputError, match=r"MegatronMIMO .*language=tp=\d+,.*images=tp=1,dp=2,rank_offset=6"):
        autoplan.export(apart, to="megatron-bridge")


def test_ranks_to_try_are_whole_nodes_and_divide_the_heads() -> None:
    assert encoder_ranks(MULTIMODAL, load_cluster("h100-sxm:4x8")) == (None, "tp=1,dp=8", "tp=1,dp=16")
    assert encoder_ranks(MULTIMODAL, load_cluster("h100-sxm:1x4")) == (None, "tp=1,dp=1", "tp=1,dp=2")
    assert encoder_ranks(LANGUAGE_MODEL, load_cluster("h100-sxm:1x8")) == (None,)


@pytest.mark.parametrize(
    ("ranks", "options", "says"),
    [
        ("tp=2,dp=8", {}, "must be a power of two that divides the 25 heads of the encoder, got 2"),
        ("tp=1,dp=24", {}, "24 of the 32 devices of h100-sxm leave 8 to the text model, fewer than to the encoder"),
        ("dp", {}, "write the degrees of the encoder's ranks, such as tp=2,dp=4"),
        ("dp=8", {"framework": "torchtitan"}, "is priced only for Megatron-Core, not for torchtitan"),
        ("dp=8", {"images": None}, ""),
    ],
)
def test_ranks_that_cannot_be_are_refused(ranks: str, options: dict[str, Any], says: str) -> None:
    if not says:
        assert _problem(ranks=ranks).cluster.num_devices == 24
        return
    with pytest.raises(InputError, match=says):
        _problem(ranks=ranks, **options)


def test_stages_run_1f1b_with_whole_replicas() -> None:
    problem = _problem(ranks="dp=8")
    plans = (_plan(pp=3, dp_shard=8), _plan(tp=2, sp=True, pp=4, dp_shard=3, global_batch=120))
    rules = book_of(problem.framework).rules
    reasons = [broken(rules, problem.workload, plan) for plan in plans]
    assert not any("ranks of its own" in why for why in reasons[0])
    assert any("use 1f1b with vp 1, and a dp of which the encoder's dp 8 is a divisor" in why for why in reasons[1])
