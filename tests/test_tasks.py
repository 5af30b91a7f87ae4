"""Is everything measured that a plan for a model is made of, in the order of its worth?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.api.timings import with_timings
from autoplan.base.errors import InputError
from autoplan.cost.estimate import estimate
from autoplan.cost.provenance import shares
from autoplan.frameworks.presets import load_framework
from autoplan.profiler.protocol import BESIDE, Hello, Task
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import open_store
from autoplan.profiler.tasks import MeasurementScope, ranked_tasks, reference_s, unmeasurable_parts
from autoplan.readers.device import load_device
from autoplan.readers.model import load_model
from autoplan.spec.blocks import Experts
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.operations import COLLECTIVES, LAYERS, MOE_LAYERS, SHAPES
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.timing import batch_index
from problems import problem_for

MEGATRON: Framework = load_framework("megatron-core")
TORCH: Framework = load_framework("torch")
SMALL = ModelSpec(
    name="small", num_layers=4, hidden_size=256, vocab_size=1000, num_heads=4, num_kv_heads=2, ffn_size=512
)
SCOPE = MeasurementScope(model=SMALL, framework=MEGATRON, seq_len=128, tps=(1, 2))
TRAINER = replace(SCOPE, framework=TORCH)
ALL = {(operation, "fp32"): "gloo" if operation in COLLECTIVES else "way" for operation in SHAPES}
LAB = Hello(
    fingerprint=Fingerprint(device="cpu", memory_bytes=2**34),
    device_type="cpu",
    hosts=("a", "a"),
    dtypes=("fp32",),
    kernels=ALL,
    windowed={("attention", "fp32"): "window", ("attention_backward", "fp32"): "window"},
)


def shapes(scope: MeasurementScope, operation: str, hello: Hello = LAB) -> set[tuple[int, ...]]:
    return {ranked.task.shape for ranked in ranked_tasks(scope, hello, ()) if ranked.task.operation == operation}


def test_products_of_a_model_are_those_that_a_rank_of_each_degree_runs() -> None:
    # 4 heads and 2 x 2 key/value heads of 64; two gated matrices of 512.
    qkv, out, fc1, fc2 = (512, 256), (256, 256), (1024, 256), (256, 512)
    half = (256, 256), (256, 128), (512, 256), (256, 256)
    expected = {(128, n, k) for n, k in (qkv, out, fc1, fc2, *half)}
    for operation in ("gemm", "dgrad", "wgrad"):
        assert shapes(SCOPE, operation) == expected


def test_a_rank_of_two_has_half_the_heads_and_the_vocabulary() -> None:
    assert shapes(SCOPE, "attention") == {(1, 128, 4, 2, 64, 0), (1, 128, 2, 1, 64, 0)}
    assert shapes(TRAINER, "cross_entropy") == {(128, 1000), (128, 500)}
    assert shapes(SCOPE, "cross_entropy") == set()  # it fuses it, in its own way
    assert shapes(SCOPE, "norm") == {(128, 256), (64, 256)}  # sequence parallelism


def test_layers_of_experts_are_measured_where_pricing_looks_them_up() -> None:
    moe = Experts(num_experts=8, experts_per_token=2, expert_ffn_size=96)
    routed = replace(TRAINER, model=replace(SMALL, moe=moe))
    layer = (1, 128, 256, 96, 4, 2, 64)
    for operation in MOE_LAYERS:
        assert shapes(routed, operation) == {(*layer, 1, 8, 2), (*layer, 2, 8, 2)}
    assert shapes(routed, "sharded_moe_layer") == {(*layer, 1, 8, 2, 2, 2)}
    assert shapes(routed, "layer") == set()
    # The dense layers of such a model are those that count; a shared expert is no part of the unit.
    assert shapes(replace(TRAINER, model=replace(SMALL, moe=replace(moe, num_dense_layers=1))), "moe_layer") == set()
    gated = replace(moe, shared_expert_ffn_size=96)
    assert shapes(replace(TRAINER, model=replace(SMALL, moe=gated)), "moe_layer") == set()


def test_units_of_the_trainer_are_measured_for_it_alone() -> None:
    layer = (1, 128, 256, 512, 4, 2, 64)
    for operation in (*LAYERS, "embedding", "head", "replicated_layer", "pipeline_actions"):
        named = {(*layer, 1)} if operation in LAYERS[:2] else set()  # somebody may name its own
        assert shapes(SCOPE, operation) == named
    for operation in LAYERS:
        assert shapes(TRAINER, operation) == {(*layer, 1), (*layer, 2)}
    # A backward pass is taken apart in a pipeline, for which tp over both ranks leaves none.
    assert shapes(TRAINER, "layer_weight_gradient") == {(*layer, 1)}
    assert shapes(TRAINER, "head") == shapes(TRAINER, "embedding") == {(128, 256, 1000, 1), (128, 256, 1000, 2)}
    # States are shared by what tp leaves; a single rank casts them too.
    assert shapes(TRAINER, "replicated_layer") == {(*layer, 1, 1, 1), (*layer, 1, 2, 2), (*layer, 2, 1, 1)}
    assert shapes(TRAINER, "sharded_layer") == shapes(TRAINER, "resharded_layer") == {(*layer, 1, 2, 2)}
    nodes = replace(LAB, hosts=("a",) * 4 + ("b",) * 4)
    assert {shape[-3:] for shape in shapes(TRAINER, "sharded_layer", nodes)} == {
        (1, 2, 2),
        (1, 4, 4),
        (1, 8, 4),
        (2, 2, 2),
        (2, 4, 2),
    }
    assert shapes(replace(TRAINER, tps=(4,)), "layer") == set()  # for which there are no ranks


def test_weights_that_are_cast_as_they_are_gathered_need_no_copy_by_the_optimizer() -> None:
    hello = replace(LAB, dtypes=("bf16",), kernels={(operation, "bf16"): "way" for operation, _ in ALL})
    for scope, dtype in ((SCOPE, "bf16"), (TRAINER, "fp32")):
        assert {
            ranked.task.dtype for ranked in ranked_tasks(scope, hello, ()) if ranked.task.operation == "optimizer"
        } == {dtype}


def test_windowed_layers_are_measured_with_the_kernel_of_windows() -> None:
    scope = replace(SCOPE, model=replace(SMALL, window=32, full_attention_interval=2), tps=(1,))
    cores = {
        ranked.task.shape: ranked.task.kernel
        for ranked in ranked_tasks(scope, LAB, ())
        if ranked.task.operation == "attention"
    }
    assert cores == {(1, 128, 4, 2, 64, 0): "way", (1, 128, 4, 2, 64, 32): "window"}
    assert shapes(replace(scope, seq_len=32), "attention") == {(1, 32, 4, 2, 64, 0)}
    assert shapes(scope, "attention", replace(LAB, windowed={})) == {(1, 128, 4, 2, 64, 0)}


def test_latent_attention_is_measured_by_the_widths_of_its_keys_and_values() -> None:
    scope = MeasurementScope(model=load_model("deepseek-v3"), framework=MEGATRON, seq_len=4096, tps=(1, 8))
    for operation in ("latent_attention", "latent_attention_backward"):
        assert shapes(scope, operation) == {(1, 4096, 128, 192, 128), (1, 4096, 16, 192, 128)}
    assert shapes(scope, "attention") == set()


def test_a_pipeline_over_all_ranks_of_a_node_is_measured_with_few_and_many_micro_batches() -> None:
    assert shapes(TRAINER, "pipeline_actions") == {(2, 2, 2), (8, 2, 2)}
    assert shapes(TRAINER, "pipeline_actions", replace(LAB, hosts=("a",) * 4 + ("b",) * 4)) == {(4, 4, 4), (16, 4, 4)}
    assert shapes(TRAINER, "pipeline_actions", replace(LAB, hosts=("a",))) == set()


def test_micro_batches_multiply_tokens() -> None:
    scope = replace(SCOPE, tps=(1,), micro_batches=(1, 4))
    assert {shape[0] for shape in shapes(scope, "gemm")} == {128, 512}
    assert {shape[:2] for shape in shapes(scope, "attention")} == {(1, 128), (4, 128)}


def test_experts_are_those_of_one_rank_of_each_degree() -> None:
    mixtral = MeasurementScope(model=load_model("mixtral-8x7b"), framework=MEGATRON, seq_len=4096, eps=(1, 8))
    expected = {(4096 * ep, 4096, 14336, 2, 8, 1, ep) for ep in (1, 8)}
    assert shapes(mixtral, "experts") == shapes(mixtral, "experts_backward") == expected
    assert shapes(replace(mixtral, framework=TORCH), "layer") == set()  # it has no dense one


def test_what_no_operation_names_is_told() -> None:
    def lacks(model: str) -> list[str]:
        return unmeasurable_parts(MeasurementScope(model=load_model(model), framework=MEGATRON, seq_len=8192))

    for model in ("llama3-8b", "deepseek-v3", "gemma3-12b"):
        assert lacks(model) == []
    assert lacks("nemotron-h-56b") == ["state-space scans"]
    both = replace(load_model("deepseek-v3"), window=4096)
    assert unmeasurable_parts(MeasurementScope(model=both, framework=MEGATRON, seq_len=8192)) == [
        "latent attention within a window"
    ]
    assert unmeasurable_parts(MeasurementScope(model=both, framework=MEGATRON, seq_len=4096)) == []


@pytest.mark.parametrize(
    "model", ["llama3-70b", "gpt3-175b", "deepseek-v3", "qwen3-235b-a22b", "nemotron-h-56b", "gemma2-9b"]
)
def test_every_model_gets_shapes_that_are_legal(model: str) -> None:
    hello = replace(LAB, hosts=("a",) * 8 + ("b",) * 8)
    for ranked_task in ranked_tasks(
        MeasurementScope(model=load_model(model), framework=MEGATRON, seq_len=4096, tps=(1, 4)), hello, ()
    ):
        assert len(ranked_task.task.shape) == len(SHAPES[ranked_task.task.operation])
        assert min(ranked_task.task.shape[:2]) > 0
        assert ranked_task.effect_s > 0 < ranked_task.expected_s


def test_collectives_cover_groups_within_and_across_nodes() -> None:
    hello = replace(LAB, hosts=("a",) * 4 + ("b",) * 4)
    groups = {shape[:3] for shape in shapes(SCOPE, "all_gather", hello)}
    assert groups == {(2, 2, 1), (2, 2, 2), (4, 4, 1), (2, 1, 1), (2, 1, 4), (8, 4, 1)}
    assert {shape[:3] for shape in shapes(SCOPE, "send_recv", hello)} == {(2, 2, 1), (2, 2, 2), (2, 1, 1), (2, 1, 4)}
    beside = {ranked.task.shape[:3] for ranked in ranked_tasks(SCOPE, hello, ()) if ranked.task.kernel.endswith(BESIDE)}
    assert beside == {(2, 2, 2), (4, 4, 1), (2, 1, 4), (8, 4, 1)}


def test_what_is_known_or_not_asked_for_or_cannot_run_is_left_out() -> None:
    everything = ranked_tasks(SCOPE, LAB, ())
    known = {item.task.key for item in everything[::2]}
    assert {ranked.task for ranked in ranked_tasks(SCOPE, LAB, known)} == {ranked.task for ranked in everything[1::2]}
    assert ranked_tasks(SCOPE, LAB, {item.task.key for item in everything}) == []
    assert {ranked.task.operation for ranked in ranked_tasks(replace(SCOPE, only=("norm", "gemm")), LAB, ())} == {
        "norm",
        "gemm",
    }
    with pytest.raises(InputError, match="--only embedding,rope: nothing of plans for"):
        ranked_tasks(replace(SCOPE, only=("embedding", "rope")), LAB, ())
    without = {which: way for which, way in ALL.items() if which[0] != "gemm"}
    assert "gemm" not in {ranked.task.operation for ranked in ranked_tasks(SCOPE, replace(LAB, kernels=without), ())}
    # Another mode or kernel is another measurement.
    assert len(ranked_tasks(replace(SCOPE, modes=("burst",)), LAB, known)) == len(everything)


def test_copies_to_and_from_the_host_are_those_of_devices() -> None:
    assert shapes(SCOPE, "copy_to_host") == set()
    device = replace(LAB, device_type="cuda")
    assert shapes(SCOPE, "copy_to_host", device) == shapes(SCOPE, "copy_from_host", device)
    assert (2**30,) in shapes(replace(SCOPE, only=("copy_to_host",)), "copy_to_host", device)


def test_modules_that_somebody_names_have_the_sizes_of_a_rank() -> None:
    assert shapes(SCOPE, "mlp") == {(128, 256, 512)}
    assert shapes(SCOPE, "overlapped_mlp") == {(128, 256, 512, 2, 2)}
    assert (128, 512, 256) in shapes(SCOPE, "norm_linear")
    assert shapes(SCOPE, "ring_attention") == {(1, 128, 4, 2, 64, 2, 2), (1, 128, 2, 1, 64, 2, 2)}
    moe = Experts(num_experts=8, experts_per_token=2, expert_ffn_size=96)
    routed = replace(SCOPE, model=replace(SMALL, moe=moe), eps=(2,))
    assert shapes(routed, "routing") == {(128, 256, 8, 2), (64, 256, 8, 2)}
    assert shapes(routed, "exchange") == {(128, 256, 8, 2, 2, 2), (64, 256, 8, 2, 2, 2)}


@given(st.integers(0, 60))
def test_a_first_point_of_every_line_comes_before_a_second_of_any_then_the_larger_share(num_known: int) -> None:
    scope = replace(SCOPE, micro_batches=(1, 2, 4))
    known = {ranked.task.key for ranked in ranked_tasks(scope, LAB, ())[:num_known]}
    begun = {(key[0], key[1][: batch_index(key[0])], key[1][batch_index(key[0]) + 1 :], *key[2:]) for key in known}
    effects: list[list[float]] = [[], []]
    for ranked_task in ranked_tasks(scope, LAB, known):
        task, at = ranked_task.task, batch_index(ranked_task.task.operation)
        line = (task.operation, task.shape[:at], task.shape[at + 1 :], *task.key[2:])
        is_second = line in begun
        assert is_second or not effects[1]  # all first points are through before
        begun.add(line)
        effects[is_second].append(ranked_task.effect_s)
    for part in effects:
        assert part == sorted(part, reverse=True)


def test_larger_calls_are_expected_to_take_longer() -> None:
    device = load_device("h100-sxm")
    assert device is not None

    def call_s(operation: str, *shape: int, dtype: str = "bf16") -> float:
        return reference_s(Task(operation=operation, shape=shape, dtype=dtype, kernel=""), device)  # type: ignore[arg-type]

    # 2 x 8192^3 at .7 of 989.4e12 (devices/h100-sxm.toml), and a start of 5 us
    peak = device.peak_flops_per_s["bf16"] * device.gemm_efficiency
    assert call_s("gemm", 8192, 8192, 8192) == pytest.approx(2 * 8192**3 / peak + 5e-6)
    assert call_s("gemm", 8192, 8192, 8192, dtype="fp8") < call_s("gemm", 8192, 8192, 8192)
    layer = (1, 4096, 4096, 14336, 32, 8, 128)
    assert call_s("layer", *layer, 2) < call_s("layer", *layer, 1) < call_s("layer_backward", *layer, 1)
    assert call_s("sharded_layer", *layer, 1, 8, 8) > call_s("layer_backward", *layer, 1)
    assert call_s("layer_backward_full", *layer, 1) > call_s("layer_backward", *layer, 1)
    # Two experts of 7,168 are as much work as an MLP of 14,336.
    halved = (1, 4096, 4096, 7168, 32, 8, 128, 1, 8, 2)
    assert call_s("moe_layer", *halved) == pytest.approx(call_s("layer", *layer, 1))
    assert call_s("moe_layer_backward_full", *halved) > call_s("moe_layer_backward", *halved)
    whole, windowed = (call_s("attention", 1, 8192, 32, 8, 128, window) for window in (0, 1024))
    assert windowed == pytest.approx(whole / 4, rel=0.1)
    # Queries and keys of 192 and values of 128 are products as large as heads of 160.
    assert call_s("latent_attention", 1, 8192, 128, 192, 128) == pytest.approx(
        call_s("attention", 1, 8192, 160, 160, 128, 0), rel=0.01
    )
    assert call_s("pipeline_actions", 16, 4, 4) == 4 * call_s("pipeline_actions", 4, 4, 4)
    assert call_s("all_reduce", 8, 8, 1, 2**30) > call_s("all_reduce", 8, 8, 1, 2**20)


def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(InputError, match="tp 3 must divide the 4 heads"):
        replace(SCOPE, tps=(1, 3))


def test_what_a_gpu_is_asked_for_is_what_its_steps_are_priced_by(tmp_path: Path) -> None:
    """Through the database: every time twice as long makes steps twice as long, and almost nothing rests on curves."""
    kernels = {(operation, "bf16"): "nccl" if operation in COLLECTIVES else "trainer" for operation in SHAPES}
    device, model = load_device("h200-sxm"), load_model("llama3-8b")
    assert device is not None
    machine = Fingerprint(device=device.name, memory_bytes=round(device.visible_memory_bytes), runtime="cuda 13.0")
    hello = Hello(fingerprint=machine, device_type="cuda", hosts=("a",) * 8, dtypes=("bf16",), kernels=kernels)
    scope = MeasurementScope(model=model, framework=TORCH, seq_len=4096, tps=(1, 2), micro_batches=(1, 2))
    tasks = [ranked.task for ranked in ranked_tasks(scope, hello, ())]
    problem = problem_for(model, "h200-sxm:1x8", TORCH)
    axes = [
        (1, 1, 8, "zero1", "none"),
        (1, 2, 8, "zero3", "full"),
        (2, 1, 4, "none", "none"),
        (2, 2, 4, "zero1", "full"),
    ]
    plans = [
        ParallelPlan(
            global_batch=32, micro_batch=size, tp=tp, sp=tp > 1, dp_shard=dp, sharding=sharding, recompute=recompute
        )  # type: ignore[arg-type]
        for tp, size, dp, sharding, recompute in axes
    ]
    batch = PlanBatch.of(plans, model.num_layers)
    steps_s = []
    for times in (1.0, 2.0):
        path = str(tmp_path / f"{times}.db")
        with open_store(path) as store:
            store.add(
                Record(
                    fingerprint=machine,
                    operation=task.operation,
                    shape=task.shape,
                    dtype=task.dtype,
                    kernel=task.kernel,
                    samples_s=(times * reference_s(task, device),) * 3,
                )
                for task in tasks
            )
        priced = with_timings(problem, "db", path)
        steps_s.append(estimate(priced, batch).step_s)
        rests = shares(priced, batch)
        assert (rests["measured"] > 0.9).all()
        assert (rests["measured"] + rests["interpolated"] > 0.98).all()
    assert steps_s[1] == pytest.approx(2 * steps_s[0], rel=0.02)
