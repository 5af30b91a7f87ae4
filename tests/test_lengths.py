"""Samples that differ in length: their distribution, the sequences that they make, and ranks that wait for others."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.api.problem import make_problem
from autoplan.base.errors import InputError, NoPlanError
from autoplan.cost.estimate import estimate, memory_oom_z
from autoplan.cost.kernels.sequences import Kinds, attended_len, means_of, packs_of, tokens_per_sample, useful
from autoplan.cost.uneven_lengths import Distribution, Meeting, waited_microbatches
from autoplan.readers.lengths import MAX_BINS, load_lengths
from autoplan.report.answer import answer_lines
from autoplan.spec.lengths import BATCHINGS, Batching, Lengths
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from unequal_pipeline import one_forward_one_backward

MODEL = "llama3.2-1b"
TWO = Lengths(histogram=((100, 3), (400, 1)))  # a quarter of the samples is four times as long


def problem_of(lengths: Lengths | None, batching: Batching = "packed", **options: Any) -> Problem:
    """A small model on one node."""
    known = {"cluster": "h100-sxm:1x8", "seq_len": 400, "framework": "transformers", **options}
    return make_problem(MODEL, lengths=lengths, batching=batching if lengths else None, **known)


def step(problem: Problem, **axes: Any) -> dict[str, float]:
    """The terms of the step of one plan."""
    batch = PlanBatch.of([ParallelPlan.derived(**axes)], problem.model.num_layers)
    return {name: float(value[0]) for name, value in estimate(problem, batch).terms_s.items()}


# -- where they are read from ------------------------------------------------------------------------------------------


def test_lengths_are_read_from_text_and_histograms(tmp_path: Path) -> None:
    assert load_lengths("1k:56,64k:1").histogram == ((1024, 56), (65536, 1))
    assert load_lengths("900").histogram == ((900, 1),)
    table = tmp_path / "lengths.csv"
    table.write_text("tokens,samples\n512,3\n128,5\n512,1\n")
    assert load_lengths(str(table)).histogram == ((128, 5), (512, 4))
    with pytest.raises(InputError, match="write TOKENS:SAMPLES"):
        load_lengths("no/such/file")
    table.write_text("512;3\n128 five\n")
    with pytest.raises(InputError, match=r"lengths.csv: line 2: write the tokens"):
        load_lengths(str(table))
    with pytest.raises(InputError, match="tokens must be"):
        load_lengths("0:3")
    # A first line with numbers is no heading, and editors of Windows put a mark before it.
    table.write_text("\ufeff512,3\n128,5\n")
    assert load_lengths(str(table)).histogram == ((128, 5), (512, 3))
    table.write_text("1.5k,3\n128,5\n")
    with pytest.raises(InputError, match=r"lengths.csv: line 1: write the tokens"):
        load_lengths(str(table))
    samples = tmp_path / "samples.json"
    samples.write_text("[]")
    with pytest.raises(InputError, match="a JSON file is not read"):
        load_lengths(str(samples))
    table.write_text("tokens,samples\n")
    with pytest.raises(InputError, match=r"--lengths lengths\.csv: holds no samples"):
        load_lengths(str(table))


@pytest.mark.parametrize(
    ("sample", "tokens"),
    [
        ({"num_tokens": 77, "text": "not looked at"}, 77),
        ({"input_ids": [1, 2, 3]}, 3),
        (12, 12),
        ({"text": "eight by"}, 2 + 4),
        ({"messages": [{"role": "user", "content": "four"}, {"role": "assistant", "content": "eight by"}]}, 3 + 8),
        ({"conversations": [{"from": "human", "value": "four"}]}, 1 + 4),
        ({"id": "of no length", "prompt": "four", "completion": "four"}, 2 + 8),
        ({"prompt": "four", "prompt_id": "b5", "messages": [{"role": "user", "content": "four"}]}, 1 + 4),
        ({"num_tokens": 12.0, "text": "not looked at"}, 12),
    ],
)
def test_samples_of_a_jsonl_are_counted(tmp_path: Path, sample: Any, tokens: int) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"\ufeff{json.dumps(sample)}\n\n{json.dumps(sample)}\n")
    assert load_lengths(str(path)).histogram == ((tokens, 2),)


def test_what_is_no_sample_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    for text, says in (
        ('{"text": "a"}\n{"label": 3}\n', "line 2: has neither num_tokens"),
        ("{\n", "line 1: not valid"),
        ("[" * 3000, "line 1: not valid"),
        ('{"num_tokens": -5, "text": "a"}\n', "line 1: num_tokens -5: write a whole number"),
        ("1e400\n", "line 1: "),
        ("", "data.jsonl: holds no samples"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=says):
            load_lengths(str(path))


def test_many_lengths_keep_their_sums(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    tokens = (1.0 + np.random.default_rng(3).pareto(1.5, 20000)) * 100
    path.write_text("\n".join(str(int(number)) for number in tokens))
    lengths = load_lengths(str(path))
    assert len(lengths.histogram) <= MAX_BINS
    assert lengths.num_samples == 20000
    assert lengths.longest == int(tokens.max())
    assert lengths.mean == pytest.approx(tokens.astype(int).mean(), rel=2e-3)
    squares = sum(length**2 * samples for length, samples in lengths.histogram)
    assert squares == pytest.approx((tokens.astype(int).astype(float) ** 2).sum(), rel=2e-3)


# -- sequences ---------------------------------------------------------------------------------------------------------


def test_packs_are_those_of_best_fit_decreasing() -> None:
    """1 x 70, 2 x 50 and 3 x 30 tokens in 100 are {70, 30}, {50, 50} and, of three times as many, {30, 30, 30}."""
    packs = packs_of(Lengths(histogram=((30, 3), (50, 2), (70, 1))), 100)
    kinds = {(tokens, squares): share for share, tokens, squares, _ in zip(*packs, strict=True)}
    assert kinds[100, 70**2 + 30**2] == pytest.approx(3 / 8, abs=1e-5)
    assert kinds[100, 2 * 50**2] == pytest.approx(3 / 8, abs=1e-5)
    assert kinds[90, 3 * 30**2] == pytest.approx(2 / 8, abs=1e-5)


def test_packs_of_many_short_samples_are_full() -> None:
    """A million samples of one token fill a sequence of as many, without a rest."""
    packs = packs_of(Lengths(histogram=((1, 7),)), 2**20)
    assert float(packs.share @ packs.tokens) == pytest.approx(2**20, rel=1e-5)


def test_packs_hold_every_sample_once() -> None:
    lengths = Lengths(histogram=tuple((tokens, 1 + tokens % 7) for tokens in range(13, 997, 31)))
    packs = packs_of(lengths, 1024)
    assert packs.tokens.max() <= 1024
    per_pack = float(packs.share @ packs.samples)
    assert float(packs.share @ packs.tokens) / per_pack == pytest.approx(lengths.mean)
    assert useful(TrainingSpec(seq_len=1024, lengths=lengths)).tokens > 0.95 * 1024


def test_sequences_have_the_tokens_that_their_batching_gives_them() -> None:
    """The longer of two samples has 400 tokens in 7 of 16 cases."""
    padded = (9 * 100 + 7 * 400) / 16
    expected: dict[Batching, float] = {"packed": 400, "joined": 400, "full": 400, "padded": padded, "unpadded": 175}
    for batching in BATCHINGS:
        assert means_of(TWO, batching, 400, 2)[0] == pytest.approx(expected[batching])
    assert means_of(TWO, "padded", 400, 2)[1] == pytest.approx((9 * 100**2 + 7 * 400**2) / 16)
    assert means_of(TWO, "unpadded", 400, 2)[1] == pytest.approx((3 * 100**2 + 400**2) / 4)
    assert means_of(TWO, "packed", 400, 2)[1] == pytest.approx((4 / 7) * 400**2 + (3 / 7) * 4 * 100**2)
    # Longer samples are cut.
    assert means_of(TWO, "unpadded", 200, 1)[0] == 125


def test_attention_takes_the_squares_of_packed_samples() -> None:
    """S38, `modelling` A2: the sum of L_i^2 instead of s^2; all else stays."""
    axes = {"micro_batch": 1, "global_batch": 8, "dp_shard": 8, "sharding": "zero3"}
    whole, packed = (
        step(problem_of(lengths, seq_len=4096), **axes) for lengths in (None, Lengths(histogram=((512, 1),)))
    )
    assert packed["gemm"] == whole["gemm"]
    assert packed["attention"] < whole["attention"] / 3
    assert packed["uneven_lengths"] == 0.0


def test_equal_lengths_change_nothing() -> None:
    axes = {"micro_batch": 2, "global_batch": 32, "dp_shard": 8, "sharding": "zero3"}
    expected = step(problem_of(None), **axes)
    for batching in BATCHINGS:
        found = step(problem_of(Lengths(histogram=((400, 5),)), batching), **axes)
        assert found == pytest.approx(expected, rel=1e-12)


def test_no_plans_have_no_tokens() -> None:
    none = np.array([], dtype=np.int64)
    training = TrainingSpec(seq_len=400, lengths=TWO, batching="padded")
    assert len(np.atleast_1d(tokens_per_sample(training, none))) == 0
    assert len(np.atleast_1d(attended_len(training, none))) == 0


def test_joined_samples_are_cut_into_sequences_and_lose_nothing() -> None:
    """A sample of twice the length of a sequence fills two."""
    training = TrainingSpec(seq_len=400, lengths=Lengths(histogram=((800, 1),)), batching="joined")
    assert useful(training).samples == 0.5
    lines = {
        batching: " ".join(
            text
            for _, text in answer_lines(
                autoplan.estimate(
                    *(MODEL,), cluster="h100-sxm:1x8", global_batch=8, seq_len=400, lengths="800:1", batching=batching
                ).file
            )
        )
        for batching in ("joined", "padded")
    }
    assert "joined: 0.5 samples per sequence, 0.0 % padding" in lines["joined"]
    assert "cut" not in lines["joined"]
    assert "1 sample, 800 tokens on average, 100.0 % of them truncated" in lines["padded"]


def test_sequences_that_stay_short_take_their_memory_alone() -> None:
    """Samples of at most 400 tokens need the same memory whether sequences may have 400 tokens or 4,096."""
    axes: dict[str, Any] = {"micro_batch": 4, "global_batch": 32, "dp_shard": 8, "sharding": "zero3"}
    batch = PlanBatch.of([ParallelPlan.derived(**axes)], 16)
    short, may_be_long, full = (
        float(estimate(problem_of(TWO, batching, seq_len=seq_len), batch).memory_bytes[0])
        for batching, seq_len in (("padded", 400), ("padded", 4096), ("full", 4096))
    )
    assert may_be_long == short < full


def test_memory_is_that_of_the_longest_sequences() -> None:
    plan = ParallelPlan.derived(micro_batch=4, global_batch=32, dp_shard=8, sharding="zero3")
    batch = PlanBatch.of([plan], 16)
    even, padded = problem_of(None), problem_of(TWO, "padded")
    assert estimate(even, batch).memory_bytes == estimate(padded, batch).memory_bytes
    assert memory_oom_z(even, batch) == memory_oom_z(padded, batch)


# -- ranks that wait ---------------------------------------------------------------------------------------------------


def brute(values: dict[float, float], draws: int, ranks: int) -> float:
    """Expected largest of the ranks' sums of draws, over all outcomes."""
    sums: dict[float, float] = {}
    for outcome in itertools.product(values, repeat=draws):
        weight = float(np.prod([values[value] for value in outcome]))
        sums[sum(outcome)] = sums.get(sum(outcome), 0.0) + weight
    below, mean = 0.0, 0.0
    for value in sorted(sums):
        upto = min(below + sums[value], 1.0)
        mean += value * (upto**ranks - below**ranks)
        below = upto
    return mean


@pytest.mark.parametrize(("draws", "ranks"), [(1, 2), (1, 8), (3, 2), (5, 4), (8, 64)])
def test_the_expected_maximum_is_that_of_all_outcomes(draws: int, ranks: int) -> None:
    values = {1.0: 0.5, 2.0: 0.3, 7.0: 0.2}
    found = Distribution.of(Kinds(np.array([*values]), np.array([*values.values()])))
    assert found.sum(draws).largest(ranks).mean == pytest.approx(brute(values, draws, ranks), rel=1e-3)
    assert found.sum(draws).mean == pytest.approx(draws * 2.5, rel=1e-9)


def waited(batching: Batching, micro_batch: int = 1, **meeting: Any) -> float:
    """Mean micro-batches that the tokens of `TWO` make a step longer."""
    usual = Meeting(microbatches=1, stages=1, is_gpipe=False, in_turn=1, at_end=1)
    return waited_microbatches(TWO, batching, 400, micro_batch, "tokens", usual._replace(**meeting))


def test_ranks_wait_for_the_longest_of_all() -> None:
    """The mean of 100 and 400 tokens is 175; of eight ranks one has a long sample but in .75^8 of the steps."""
    longest = 400 - 300 * 0.75**8
    assert waited("unpadded", at_end=8) == pytest.approx(longest / 175 - 1)
    assert waited("unpadded", in_turn=8) == pytest.approx(longest / 175 - 1)
    # Where they meet in every micro-batch nothing evens out.
    assert waited("unpadded", in_turn=8, microbatches=16) == pytest.approx(16 * (longest / 175 - 1), rel=1e-3)
    assert waited("unpadded", at_end=8, microbatches=16) < 0.5 * waited("unpadded", in_turn=8, microbatches=16)
    assert waited("unpadded", at_end=1, microbatches=16) == pytest.approx(0.0, abs=1e-6)
    for batching in ("packed", "joined", "full"):
        assert waited(batching, at_end=8) == 0.0


def test_more_ranks_wait_longer_and_larger_microbatches_less() -> None:
    grows = [waited("unpadded", at_end=ranks, microbatches=4) for ranks in (1, 2, 8, 64)]
    assert grows == sorted(grows)
    shrinks = [waited("unpadded", at_end=8, micro_batch=size, microbatches=64 // size) * size for size in (1, 4, 16)]
    assert shrinks == pytest.approx([shrinks[0]] * 3, rel=0.01)  # as many samples in a step, however cut


@pytest.mark.parametrize(("stages", "count"), [(2, 8), (4, 8), (4, 64), (8, 32)])
def test_a_pipeline_is_as_slow_as_the_longest_in_flight(stages: int, count: int) -> None:
    draws = np.random.default_rng(5).choice([100.0, 400.0], p=[0.75, 0.25], size=(60, count)) / 175
    run = float(np.mean([one_forward_one_backward(stages, sizes) for sizes in draws]))
    found = count + stages - 1 + waited("unpadded", microbatches=count, stages=stages)
    assert found == pytest.approx(run, rel=0.09)
    assert found > 1.1 * (count + stages - 1)


def test_sharded_replicas_meet_in_every_microbatch() -> None:
    problem, axes = problem_of(TWO, "unpadded"), {"micro_batch": 1, "global_batch": 128, "dp_shard": 8}
    by_sharding = {name: step(problem, sharding=name, **axes)["uneven_lengths"] for name in ("none", "zero1", "zero3")}
    assert by_sharding["none"] == by_sharding["zero1"]
    assert by_sharding["zero3"] > 2 * by_sharding["zero1"]


def test_one_long_among_short_samples_leaves_ranks_idle() -> None:
    """S38: {1 x 64k, 56 x 1k} on 64 GPUs with static context parallelism 8; equal lengths leave nothing to win back."""
    idle = {}
    for lengths in ("1k:56,64k:1", "64k"):
        problem = make_problem("llama3-8b", cluster="h100-sxm:8x8", seq_len=2**16, lengths=lengths, batching="unpadded")
        terms = step(problem, cp=8, dp_shard=8, micro_batch=1, global_batch=64, recompute="full", sharding="zero1")
        idle[lengths] = terms["uneven_lengths"] / sum(terms.values())
    assert idle["1k:56,64k:1"] > 0.3
    assert idle["64k"] == 0.0


def test_the_best_static_degree_is_found_and_its_idle_share_said() -> None:
    """S38: a search weighs the degrees of context parallelism on the distribution."""
    found = autoplan.search(
        *("llama3-8b",),
        cluster="h100-sxm:8x8",
        global_batch=64,
        seq_len=2**16,
        lengths="1k:56,64k:1",
        batching="unpadded",
        fix=["tp=1", "pp=1", "micro_batch=1", "dynamic_cp=off"],
    )
    best, lines = found.file.best, [text for _, text in answer_lines(found.file)]
    assert found.file.certificate is not None
    assert found.file.certificate.proven
    assert best.plan.cp > 8
    assert any(text.startswith("unpadded: 0.0 % padding; ranks wait ") for text in lines)


def test_degrees_of_context_parallelism_need_not_be_powers_of_two() -> None:
    """S38: of the degrees up to 12 that divide 48 devices, 12 leaves least of them idle, and less than 8 does."""
    options: dict[str, Any] = {"cluster": "h100-sxm:6x8", "seq_len": 2730 * 24, "lengths": "1k:56,64k:1"}
    options |= {"global_batch": 48, "batching": "unpadded", "fix": ["tp=1", "pp=1", "micro_batch=1", "dynamic_cp=off"]}
    best, of_eight = (
        autoplan.search("llama3-8b", at_most=[f"cp={most}"], prefer="fastest", **options).file.best for most in (12, 8)
    )
    assert best.plan.cp == 12
    assert of_eight.plan.cp <= 8
    assert best.step_s < of_eight.step_s
    idle = [plan.terms_s["uneven_lengths"] / plan.step_s for plan in (best, of_eight)]
    assert idle[0] < idle[1]


def test_padding_lowers_the_rate_of_useful_tokens() -> None:
    """S47: six of ten tokens are no padding, and the rate is .6 of that of whole sequences."""
    rates = [
        autoplan.estimate(
            *(MODEL,), cluster="h100-sxm:1x8", global_batch=64, seq_len=1000, lengths=lengths, batching="full"
        ).file.best.tokens_per_s_per_device
        for lengths in ("200:1,1000:1", "1000")
    ]
    assert rates[0] == pytest.approx(0.6 * rates[1])


def test_a_limit_of_tokens_is_a_micro_batch_of_sequences() -> None:
    """S50: 3,584 tokens a device are 7 sequences of 512, and 4 updates at once as many micro-batches a step."""
    plan = {"micro_batch": 3584 // 512, "sharding": "zero3"}
    best = autoplan.estimate(
        MODEL, cluster="h100-sxm:1x8", global_batch=7 * 4 * 8, seq_len=512, framework="transformers", plan=plan
    ).file.best
    assert "micro-batch 7" in best.plan.describe()
    assert best.plan.num_microbatches == 4
    assert best.tokens_per_s_per_device == pytest.approx(3584 * 4 / best.step_s)


def test_lengths_outlive_a_plan_file(tmp_path: Path) -> None:
    found = autoplan.search(
        MODEL,
        cluster="h100-sxm:1x8",
        global_batch=64,
        seq_len=4096,
        lengths="300:5,4000:1",
        batching="padded",
        framework="transformers",
    )
    found.save(tmp_path / "plan.json")
    again = autoplan.estimate(tmp_path / "plan.json")
    assert again.file.training == found.file.training
    assert again.file.best.terms_s == pytest.approx(found.file.best.terms_s)
    script = autoplan.export(found, to="accelerate").texts
    assert any("padded to the longest of a micro-batch" in text for text in script.values())


def test_bounds_stay_below_where_lengths_differ() -> None:
    """The proven best plan is the best of all that were priced one by one."""
    options: dict[str, Any] = {"cluster": "h100-sxm:1x8", "global_batch": 32, "seq_len": 4096}
    options |= {"lengths": "300:5,4000:1", "batching": "unpadded", "fix": ["tp=1", "pp=1", "cp=1"]}
    proven = autoplan.search(MODEL, prefer="fastest", **options).file.best
    tried = autoplan.search(MODEL, prefer="fastest", sampler="random", trials=40, **options).file.best
    assert proven.step_s <= tried.step_s * (1 + 1e-9)


# -- what does not go together -----------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(InputError, match="document_len is the mean of lengths"):
        problem_of(TWO, document_len=100)
    with pytest.raises(NoPlanError, match="attention unfused cannot skip other documents or samples"):
        autoplan.estimate(MODEL, cluster="h100-sxm:1x8", seq_len=400, global_batch=8, lengths=TWO, attention="unfused")
    with pytest.raises(InputError, match="--batching 'padded' needs samples of different lengths: give --lengths too"):
        make_problem(MODEL, cluster="h100-sxm:1x8", seq_len=400, batching="padded")
    with pytest.raises(InputError, match="batching must be one of packed, joined"):
        replace(TrainingSpec(seq_len=400), batching="heaped")  # type: ignore[arg-type]


def test_unlike_devices_wait_for_longer_samples_too() -> None:
    options: dict[str, Any] = {"cluster": "h100-sxm:1x2+a100-sxm:1x2", "global_batch": 16, "seq_len": 400}
    padded = autoplan.search_mixed("llama3-8b", lengths=TWO, batching="padded", **options).best
    assert padded.terms_s["uneven_lengths"] > 0
    assert autoplan.search_mixed("llama3-8b", **options).best.terms_s["uneven_lengths"] == 0
