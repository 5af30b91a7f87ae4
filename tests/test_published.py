"""Published relations: those of the Megatron-LM papers (Narayanan et al., SC21, arXiv:2104.04473), on their cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoplan.api.problem import make_problem
from autoplan.cost.estimate import estimate
from autoplan.cost.pipeline.closed_forms import one_forward_one_backward_s
from autoplan.cost.step import straggler_share
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.spec.estimate import VERDICTS, CostEstimate
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.training import TrainingSpec
from model_specs import gpt
from problems import problem_for


def priced(
    model: ModelSpec,
    plans: list[ParallelPlan],
    *,
    framework: Framework | None = None,
    network_gb_per_s: float = 25.0,
    attention: str = "megatron-fused",
) -> CostEstimate:
    """The plans on DGX A100 nodes with 8 x HDR200, the cluster of the paper (Selene)."""
    nodes = max(plans[0].num_devices // 8, 1)
    cluster = load_cluster(f"a100-sxm:{nodes}x{min(8, plans[0].num_devices)}")
    cluster = replace(cluster, network=replace(cluster.network, nic_bytes_per_s=network_gb_per_s * 1e9))
    problem = problem_for(
        model,
        cluster,
        framework or load_framework("megatron-lm-2021"),
        training=TrainingSpec(seq_len=2048, precision="fp16"),
    )
    plans = [replace(plan, attention=attention) for plan in plans]  # type: ignore[arg-type]
    return estimate(problem, PlanBatch.of(plans, model.num_layers))


def plan(
    batch: int, *, b: int = 1, t: int = 1, p: int = 1, d: int = 1, v: int = 1, recompute: str = "full"
) -> ParallelPlan:
    return ParallelPlan(
        global_batch=batch,
        micro_batch=b,
        tp=t,
        pp=p,
        vp=v,
        schedule="interleaved" if v > 1 else "1f1b",
        dp_replicate=d,
        sharding="none",
        recompute=recompute,  # type: ignore[arg-type]
        precision="fp16",
        dropout=True,
    )


def throughput(cost: CostEstimate) -> np.ndarray:
    """Sequences per second."""
    return cost.batch.global_batch / cost.step_s


# h, l, heads, t, p, n, B, b, v, d, TFLOP/s per GPU: Table 1, micro-batch and v from examples/sc21/run_table_1.sh
TABLE_1 = [
    (2304, 24, 24, 1, 1, 32, 512, 16, 1, 32, 137),
    (3072, 30, 32, 2, 1, 64, 512, 16, 1, 32, 138),
    (4096, 36, 32, 4, 1, 128, 512, 16, 1, 32, 142),
    (6144, 40, 48, 8, 1, 256, 1024, 8, 1, 32, 135),
    (8192, 48, 64, 8, 2, 512, 1536, 4, 1, 32, 138),
    (10240, 60, 80, 8, 4, 1024, 1792, 2, 3, 32, 140),
    (12288, 80, 96, 8, 8, 1536, 2304, 2, 2, 24, 148),
    (16384, 96, 128, 8, 16, 1920, 2160, 1, 2, 15, 155),
    (20480, 105, 128, 8, 35, 2520, 2520, 1, 3, 9, 163),
    (25600, 128, 160, 8, 64, 3072, 3072, 1, 1, 6, 163),
]


def test_pt2_table_1_of_sc21_is_within_ten_percent_after_calibration_on_one_row() -> None:
    ratios = []
    for h, layers, heads, t, p, n, batch, b, v, d, tflops in TABLE_1:
        cost = priced(gpt(layers, h, heads), [plan(batch, b=b, t=t, p=p, d=d, v=v)])
        operations = 96 * batch * 2048 * layers * h**2 * (1 + 2048 / (6 * h) + 51200 / (16 * layers * h))
        ratios.append(float(cost.step_s[0]) / (operations / (n * tflops * 1e12)))
    middle = sorted(ratios)[len(ratios) // 2]
    assert [round(ratio / middle, 3) for ratio in ratios] == pytest.approx([1.0] * 10, abs=0.10)


# GPUs, micro-batch of ZeRO-3, TFLOP/s per GPU with it and with tensor and pipeline parallelism: Table 2, 174.6 billion
# parameters, 1,536 sequences.
TABLE_2 = [(384, 4, 144, 153), (768, 2, 88, 149), (1536, 1, 44, 141)]


def test_pt3_zero3_of_sc21_is_within_a_fifth_and_loses_to_tensor_and_pipeline_parallelism() -> None:
    model, batch = gpt(96, 12288, 96), 1536
    operations = 96 * batch * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    for n, b, zero3_tflops, tp_pp_tflops in TABLE_2:
        sharded = replace(plan(batch, b=b), dp_replicate=1, dp_shard=n, sharding="zero3")
        alone = priced(model, [sharded], framework=load_framework("deepspeed-2021"))
        split = priced(model, [plan(batch, t=8, p=12, d=n // 96)])
        rates = [float(operations / cost.step_s[0]) / n / 1e12 for cost in (alone, split)]
        assert rates == pytest.approx([zero3_tflops, tp_pp_tflops], rel=0.2)
        assert rates[0] < rates[1]


@pytest.mark.parametrize("devices", [32, 128])
@pytest.mark.parametrize("batch", [32, 128, 512])
def test_pt5_bubble_falls_with_data_parallelism_as_n_minus_d_over_b(devices: int, batch: int) -> None:
    d = 1
    while d <= min(devices, batch):
        stages, microbatches = devices // d, batch // d
        ones = np.ones((1, stages))
        makespan = one_forward_one_backward_s(ones, 2 * ones, np.array([microbatches]), np.array([1])).work_s
        assert makespan[0] / (3 * microbatches) - 1 == pytest.approx((devices - d) / batch)
        d *= 2


@pytest.mark.parametrize(("batch", "ratio"), [(8, 88 / 165), (128, 163 / 178)])
def test_pt7_weak_scaling_over_pipeline_stages(batch: int, ratio: float) -> None:
    per_device = []
    for p in (1, 8):
        cost = priced(gpt(3 * p, 20480, 128), [plan(batch, t=8, p=p)])
        work = 3 * p * 20480**2 * (1 + 2048 / (6 * 20480) + 51200 / (16 * 3 * p * 20480))
        per_device.append(work * throughput(cost)[0] / (8 * p))
    # The figures were read off a plot to 3 TF of 165 and 178, at both ends.
    assert per_device[1] / per_device[0] == pytest.approx(ratio, abs=0.04)


BATCHES = (12, 24, 36, 48, 60)


def test_pt8_interleaving_gains_at_small_batches_and_less_and_less() -> None:
    model = gpt(96, 12288, 96)
    plain = throughput(priced(model, [plan(batch, t=8, p=12) for batch in BATCHES]))
    interleaved = throughput(priced(model, [plan(batch, t=8, p=12, v=4) for batch in BATCHES]))
    gain = interleaved / plain - 1
    assert gain[0] >= 0.40
    assert (gain[:4] >= 0.10).all()
    assert (np.diff(gain) < 0).all()


def test_pt8_interleaving_without_scatter_gather_loses_at_large_batches() -> None:
    framework = load_framework("megatron-lm-2021").changed(torch_pipelines=True)
    model = gpt(96, 12288, 96)
    plain = priced(model, [plan(480, t=8, p=12)], framework=framework)
    interleaved = priced(model, [plan(480, t=8, p=12, v=4)], framework=framework)
    assert throughput(interleaved)[0] < throughput(plain)[0]


@pytest.mark.parametrize("batch", [32, 128])
def test_pt9_tensor_parallelism_inside_the_node_and_pipeline_across_nodes_is_best(batch: int) -> None:
    shapes = [(2, 32), (4, 16), (8, 8), (16, 4), (32, 2)]
    speeds = throughput(priced(gpt(32, 20480, 128), [plan(batch, t=t, p=p) for p, t in shapes]))
    best = int(np.argmax(speeds))
    assert shapes[best] == (8, 8)
    assert (np.diff(speeds[: best + 1]) > 0).all()
    assert (np.diff(speeds[best:]) < 0).all()


def test_pt9_batches_differ_by_the_bubble_in_deep_pipelines() -> None:
    model = gpt(32, 20480, 128)
    small = throughput(priced(model, [plan(32, t=2, p=32)]))[0]
    large = throughput(priced(model, [plan(128, t=2, p=32)]))[0]
    assert small / large == pytest.approx((32 / 63) / (128 / 159), abs=0.03)


@pytest.mark.parametrize("batch", [32, 512])
def test_pt10_without_tensor_parallelism_more_stages_are_slower(batch: int) -> None:
    plans = [plan(batch, p=p, d=64 // p) for p in (2, 4, 8, 16, 32)]
    speeds = throughput(priced(gpt(32, 3840, 32), plans))
    assert (np.diff(speeds) < 0).all()
    if batch == 32:
        assert speeds[-1] / speeds[0] == pytest.approx(42 / 62, abs=0.1)


@pytest.mark.parametrize("batch", [32, 128, 512])
def test_pt11_tensor_parallelism_costs_more_and_more_and_most_across_nodes(batch: int) -> None:
    plans = [plan(batch, t=t, d=64 // t) for t in (2, 4, 8, 16, 32)]
    speeds = throughput(priced(gpt(32, 3840, 32), plans))
    assert (np.diff(speeds) < 0).all()
    assert speeds[3] / speeds[2] < speeds[2] / speeds[1]  # the step across nodes is steeper than the one inside
    if batch == 512:  # from 128 to 22-25 TFLOP/s per GPU
        assert speeds[-1] / speeds[0] == pytest.approx(23.5 / 128, abs=0.05)


def test_pt12_one_kernel_curve_explains_both_batches_within_two_percent() -> None:
    model = gpt(32, 15360, 128)
    measured = np.array([155 / 163, 158 / 172, 140 / 160, 120 / 155])
    small = throughput(priced(model, [plan(128, b=b, t=8, p=8) for b in (1, 2, 4, 8)]))
    large = throughput(priced(model, [plan(512, b=b, t=8, p=8) for b in (1, 2, 4, 8)]))
    assert small / large == pytest.approx(measured, abs=0.02)


def test_pt13_without_recomputation_only_small_batches_fit() -> None:
    model = gpt(80, 12288, 96)
    kept = priced(model, [plan(batch, t=8, p=16, recompute="none") for batch in (4, 8, 16, 64)])
    assert [VERDICTS[verdict] == "oom" for verdict in kept.verdict] == [False, False, True, True]


def test_pt13_recomputation_wins_at_the_largest_batch_and_loses_at_a_small_one() -> None:
    model = gpt(80, 12288, 96)
    small = priced(model, [plan(8, t=8, p=16, recompute=kind) for kind in ("none", "full")])
    assert 0.60 < throughput(small)[1] / throughput(small)[0] < 0.80
    large = priced(model, [plan(256, t=8, p=16)])
    assert VERDICTS[large.verdict[0]] == "fits"
    assert throughput(large)[0] / throughput(small)[0] == pytest.approx(7.8 / 4, rel=0.15)


def test_pt14_scatter_gather_gains_five_to_fifteen_percent_when_interleaved() -> None:
    model = gpt(96, 12288, 96)
    whole = load_framework("megatron-lm-2021").changed(torch_pipelines=True)
    plans = [plan(batch, t=8, p=12, v=4) for batch in BATCHES]

    def gain(network_gb_per_s: float) -> np.ndarray:
        fast = priced(model, plans, network_gb_per_s=network_gb_per_s)
        slow = priced(model, plans, framework=whole, network_gb_per_s=network_gb_per_s)
        return throughput(fast) / throughput(slow) - 1

    assert ((gain(25.0) >= 0.05) & (gain(25.0) <= 0.15)).all()
    assert (gain(12.5) > gain(25.0)).all()


def test_pt14_scatter_gather_changes_nothing_without_tensor_parallelism() -> None:
    whole = load_framework("megatron-lm-2021").changed(torch_pipelines=True)
    plans = [plan(64, p=8, d=8)]
    model = gpt(32, 3840, 32)
    assert priced(model, plans).step_s[0] == priced(model, plans, framework=whole).step_s[0]


def test_an_optimizer_on_the_host_costs_and_frees_what_was_measured() -> None:
    """0.93 s more a step and 4.7 GiB less: Qwen3-0.6B on one H100, Megatron-Core (NVIDIA-NeMo/RL pull request 3628)."""
    problem = make_problem("qwen3-0.6b", cluster="h100-sxm:1x1", seq_len=4096)
    plans = [ParallelPlan(global_batch=8, offload=offload) for offload in ("none", "optimizer")]
    cost = estimate(problem, PlanBatch.of(plans, problem.model.num_layers))
    assert cost.step_s[1] - cost.step_s[0] == pytest.approx(0.926, rel=0.15)
    assert cost.memory_bytes[0] - cost.memory_bytes[1] == pytest.approx(4.71 * 2**30, rel=0.1)


def test_kernels_that_are_not_fused_take_as_much_longer_as_their_operations() -> None:
    """S47: 113 to 135 TFLOP/s of 175 billion parameters by fusion (SC21, section 5.6).

    Without fused kernels scores are cast to fp32 first, and scaled, masked and normalised there (Megatron-LM
    core/fusions/fused_softmax.py, forward_torch_softmax): with casts and dropout 41 bytes a score forward and 45
    backward.  Biases, GELU, dropout and sums move twice as much as their fused kernels.
    """
    fused = load_framework("megatron-lm-2021")
    eager = fused.changed(bytes_per_unfused_score=86.0, kernel_bytes_factor=2.0)
    model, plans = gpt(96, 12288, 96), [plan(1536, t=8, p=12)]
    by_kernels = [
        priced(model, plans, framework=framework, attention=attention)
        for framework, attention in ((fused, "megatron-fused"), (eager, "unfused"))
    ]
    steps, terms = (
        [cost.step_s[0] for cost in by_kernels],
        ("attention", "memory_bound", "recompute", "pipeline_bubble"),
    )
    assert steps[1] / steps[0] == pytest.approx(135 / 113, rel=0.03)
    longer = sum(by_kernels[1].terms_s[name][0] - by_kernels[0].terms_s[name][0] for name in terms)
    assert steps[1] - steps[0] == pytest.approx(longer * (1 + straggler_share(np.array([96]))[0]), rel=0.02)
