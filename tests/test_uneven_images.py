"""Samples with unlike numbers of images: how long ranks wait for those with most."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.uneven_images import Encoding, images_waiting_s
from autoplan.readers.huggingface import read_huggingface
from autoplan.readers.lengths import load_images
from autoplan.report.answer import answer_lines
from autoplan.spec.lengths import ImageCounts
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from model_specs import QWEN_VL
from unequal_pipeline import one_forward_one_backward

ONE_OR_EIGHT = ImageCounts(histogram=((1, 1), (8, 1)))


@pytest.fixture(scope="module")
def qwen() -> ModelSpec:
    """Qwen2.5-VL-7B."""
    return read_huggingface(QWEN_VL, "qwen2.5-vl-7b")


def _waits(counts: ImageCounts, *, beside: float = 0.0, others: float = 0.0, **numbers: int) -> float:
    """Wait in mean times of the encoder for a micro-batch."""
    known = {"samples": 1, "microbatches": 1, "stages": 1, "in_turn": 1, "at_end": 1} | numbers
    ints = {name: np.array([number]) for name, number in known.items()}
    times = {"encoder_s": np.ones(1), "beside_s": np.array([beside]), "others_s": np.array([others])}
    return float(images_waiting_s(counts, Encoding(**times, **ints, is_gpipe=np.zeros(1, dtype=np.bool_)))[0])


def test_numbers_of_images_are_read_from_text() -> None:
    assert load_images("8:1, 1:3,1:2").histogram == ((1, 5), (8, 1))
    assert load_images("3").mean == 3.0
    with pytest.raises(InputError, match="write a number, or IMAGES:SAMPLES"):
        load_images("many")
    with pytest.raises(InputError, match="has no images"):
        load_images("0:7")


def test_replicas_wait_for_the_one_with_most_images() -> None:
    """S40: of two samples one has eight images in three of four cases; the mean is 4.5."""
    assert _waits(ONE_OR_EIGHT, at_end=2) == pytest.approx((0.75 * 8 + 0.25 * 1) / 4.5 - 1)
    assert _waits(ONE_OR_EIGHT, in_turn=2, microbatches=4) == pytest.approx(4 * (6.25 / 4.5 - 1), rel=0.01)
    assert _waits(ONE_OR_EIGHT, at_end=1) == pytest.approx(0.0, abs=1e-9)
    assert _waits(ONE_OR_EIGHT, at_end=8, microbatches=16) < 16 * _waits(ONE_OR_EIGHT, at_end=8)


def test_a_first_stage_with_time_to_spare_delays_less() -> None:
    waits = [_waits(ONE_OR_EIGHT, others=others, stages=4, microbatches=32) for others in (1.0, 1.2, 1.5, 2.0)]
    assert waits == sorted(waits, reverse=True)
    assert _waits(ONE_OR_EIGHT, others=2.0, stages=4, microbatches=32) == 0.0  # slower than eight images


@pytest.mark.parametrize(("stages", "count", "samples"), [(2, 8, 1), (4, 32, 1), (4, 8, 4), (8, 32, 4)])
@pytest.mark.parametrize("others", [0.6, 1.0, 1.5])
def test_a_step_takes_as_long_as_a_simulated_pipeline(stages: int, count: int, samples: int, others: float) -> None:
    """1F1B in which the first stage alone draws its time, within 10 % of the mean of simulated steps."""
    random, counts = np.random.default_rng(7), np.array([1.0, 8.0]) / 4.5
    times = np.full((stages, count), others)
    equal = one_forward_one_backward(stages, np.vstack([np.ones(count), times[1:]]))
    simulated = []
    for _ in range(60):
        times[0] = random.choice(counts, (count, samples)).mean(axis=1)
        simulated.append(one_forward_one_backward(stages, times))
    ours = equal + _waits(ONE_OR_EIGHT, others=others, stages=stages, microbatches=count, samples=samples)
    assert ours == pytest.approx(np.mean(simulated), rel=0.1)


def _terms(model: ModelSpec, images: Any, **axes: Any) -> dict[str, float]:
    problem = make_problem(model, cluster="h100-sxm:1x8", seq_len=8192, image_tokens=512, images=images)
    plan = ParallelPlan.derived(global_batch=32, micro_batch=1, sharding="zero1", **axes)
    result = estimate(problem, PlanBatch.of([plan], model.num_layers))
    return {"memory": float(result.memory_bytes[0])} | {name: float(term[0]) for name, term in result.terms_s.items()}


@pytest.mark.parametrize("axes", [{"dp_shard": 8}, {"pp": 4, "dp_shard": 2}])
def test_unlike_images_cost_time_and_the_memory_of_the_most(qwen: ModelSpec, axes: dict[str, int]) -> None:
    """S40: with equal images there is nothing to gain from knowing them."""
    equal, unlike, most = (_terms(qwen, images, **axes) for images in (4, "1:4,7:4", 7))
    assert equal["uneven_lengths"] == 0.0
    assert unlike["uneven_lengths"] > 0.0
    assert {name: unlike[name] for name in ("gemm", "attention")} == {
        name: equal[name] for name in ("gemm", "attention")
    }
    assert unlike["memory"] == most["memory"] > equal["memory"]


def test_the_answer_says_how_long_ranks_wait(qwen: ModelSpec) -> None:
    priced = autoplan.estimate(
        *(qwen,), cluster="h100-sxm:1x8", global_batch=32, seq_len=8192, images="1:1,8:1", image_tokens=512
    )
    text = dict(answer_lines(priced.file))["images"]
    idle = priced.file.best.terms_s["uneven_lengths"] / priced.file.best.step_s
    assert "1:1,8:1: 4.5 per sample on average, 8 at most" in text
    assert f"for {100 * idle:.1f} % of the step" in text


def test_the_most_images_need_room(qwen: ModelSpec) -> None:
    with pytest.raises(InputError, match="no room for 8 x 1280 = 10240 tokens of images"):
        make_problem(qwen, cluster="h100-sxm:1x8", seq_len=8192, images="1:9,8:1")
    with pytest.raises(InputError, match="need a model with images"):
        make_problem(replace(qwen, encoder=None), cluster="h100-sxm:1x8", seq_len=8192, images="1:9,8:1")
