"""Is a plan in fp32 priced as one that keeps no other copies, and found, and measured times of fp32 looked up?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.cost.collectives.traffic import step_traffic
from autoplan.cost.estimate import estimate, stage_costs
from autoplan.cost.kernels.products import peaks
from autoplan.frameworks.presets import load_framework
from autoplan.profiler.machine.hardware import emulates_bf16
from autoplan.readers.cluster import load_cluster
from autoplan.spec.measurement import Measurement
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.timing import TimingTable
from autoplan.spec.training import TrainingSpec
from commands import run
from model_specs import TINY_TOML
from problems import problem_for

TOKENS = 128
# As in test_memory: two layers and two tables of 512 x 64.
SMALL = ModelSpec(name="small", num_layers=2, hidden_size=64, vocab_size=512, num_heads=4, num_kv_heads=2, ffn_size=128)
TABLE = 512 * 64
TOTAL = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 2 * TABLE + 64
# Elements that a layer keeps of a token: two norms' inputs and outputs, q k v o, gate, up, its half and the product.
KEPT = 4 * 64 + 16 * (2 * 4 + 2 * 2) + 4 * 128


def problem_of(precision: Any = "fp32", seq_len: int = TOKENS) -> Problem:
    return problem_for(
        SMALL, "cpu:1x2", "torch", training=TrainingSpec(seq_len=seq_len, precision=precision, fused_norm=True)
    )


def plan_of(precision: Any = "fp32", **axes: Any) -> ParallelPlan:
    return ParallelPlan(**{"global_batch": 8, "micro_batch": 1, "sharding": "none", "precision": precision, **axes})


def terms(plan: ParallelPlan, seq_len: int = TOKENS) -> dict[str, float]:
    return stage_costs(problem_of(plan.precision, seq_len), plan)[0].memory_terms_bytes


def test_products_run_on_tf32_units_where_a_framework_lets_them() -> None:
    problem = dataclasses.replace(
        problem_of(), cluster=load_cluster("h100-sxm:1x2"), framework=load_framework("sailor")
    )
    assert peaks(problem)["fp32"] == problem.device.peak_flops_per_s["tf32"]
    plain = dataclasses.replace(problem, framework=load_framework("torch"))
    assert peaks(plain)["fp32"] == plain.device.peak_flops_per_s["fp32"] < peaks(problem)["fp32"]
    with pytest.raises(InputError, match="fp32 is priced only for the built-in trainer, not for megatron-core"):
        dataclasses.replace(problem, framework=load_framework("megatron-core"))


# -- memory -----------------------------------------------------------------------------------------------------------


def test_states_alone_are_16_bytes_a_parameter_and_there_is_no_copy() -> None:
    """Weights, gradients and two moments of Adam; sequences of one token keep next to nothing."""
    found = terms(plan_of(global_batch=1), seq_len=1)
    states = {name: found[name] for name in ("weights", "gradients", "optimizer", "gathered")}
    assert states == {"weights": 4 * TOTAL, "gradients": 4 * TOTAL, "optimizer": 8 * TOTAL, "gathered": 0}


def test_activations_take_4_bytes_an_element() -> None:
    """And 4 for the logarithm of every softmax sum, in either precision."""
    layers = 2 * TOKENS * (4 * KEPT + 4 * 4)
    assert terms(plan_of(global_batch=1))["activations"] == layers


def test_replicas_gather_fp32_weights_and_reduce_fp32_gradients() -> None:
    """Twice the bytes of a gather in bf16; gradients are reduced in fp32 either way."""
    moved = {}
    for precision in ("bf16", "fp32"):
        plan = plan_of(precision, dp_shard=2, sharding="zero3")
        rows = step_traffic(problem_of(precision), plan).rows
        moved[precision] = {row.operation: row.buffer_bytes * row.times for row in rows}
    assert moved["fp32"]["all_gather"] == 2 * moved["bf16"]["all_gather"]
    assert moved["fp32"]["reduce_scatter"] == moved["bf16"]["reduce_scatter"]


@pytest.mark.parametrize("axes", [{"pp": 2}, {"tp": 2, "sp": True}])
def test_messages_of_activations_are_twice_as_large(axes: dict[str, Any]) -> None:
    narrow, wide = (
        step_traffic(problem_of(precision), plan_of(precision, **axes)).rows for precision in ("bf16", "fp32")
    )
    # But for the numbers of the loss, which are fp32 in either.
    assert [row.operation for row in narrow if row.buffer_bytes == 4 * TOKENS] == ["all_reduce"] * ("tp" in axes)
    twice = [row.buffer_bytes * (1 if row.buffer_bytes == 4 * TOKENS else 2) for row in narrow]
    assert twice == [row.buffer_bytes for row in wide]


SPREAD = st.sampled_from(
    [
        *({"dp_shard": 2, "sharding": sharding} for sharding in ("none", "zero1", "zero2", "zero3")),
        *({"tp": 2, "sp": sp} for sp in (False, True)),
        *({"pp": 2, "schedule": schedule} for schedule in ("1f1b", "gpipe", "zb-h1")),
    ]
)


@given(SPREAD, st.sampled_from([1, 2, 4]), st.sampled_from(["none", "full"]), st.sampled_from([1, 64, 512]))
def test_activations_are_never_smaller_than_in_bf16(
    axes: dict[str, Any], micro_batch: int, recompute: Any, seq_len: int
) -> None:
    """Where replicas gather weights nothing is; else bf16 has copies of the weights that fp32 does without."""
    plan = plan_of(micro_batch=micro_batch, recompute=recompute, **axes)
    wide, narrow = (terms(dataclasses.replace(plan, precision=word), seq_len) for word in ("fp32", "bf16"))
    copies = 2 * TOTAL if plan.dp == 1 else 0
    assert sum(wide.values()) >= sum(narrow.values()) - copies
    assert wide["weights"] == narrow["weights"]
    assert wide["optimizer"] == narrow["optimizer"]


# -- time -------------------------------------------------------------------------------------------------------------


def test_measured_times_are_those_of_fp32() -> None:
    """A layer that took a second in fp32, and ten in bf16."""
    shape = (1, TOKENS, 64, 128, 4, 2, 16, 1)
    measured = [
        Measurement(operation=operation, dtype=dtype, shape=shape, seconds=seconds, device="cpu")
        for dtype, seconds in (("fp32", 1.0), ("bf16", 10.0))
        for operation in ("layer", "layer_backward")
    ]
    steps = {}
    for precision in ("fp32", "bf16"):
        problem = dataclasses.replace(problem_of(precision), timings=TimingTable.of(measured, is_own=True))
        steps[precision] = float(estimate(problem, PlanBatch.of([plan_of(precision)], 2)).step_s[0])
    assert steps["fp32"] == pytest.approx(8 * 2 * 2 * 1.0, rel=0.05)
    assert steps["bf16"] == pytest.approx(8 * 2 * 2 * 10.0, rel=0.05)


# -- commands ---------------------------------------------------------------------------------------------------------

WHERE = ("--cluster", "cpu:1x2", "--global-batch", "4", "--seq-len", "32", "--precision", "fp32")


def test_a_search_finds_plans_that_the_trainer_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "tiny.toml").write_text(TINY_TOML)
    done = run(tmp_path, "search", "tiny.toml", *WHERE, "--framework", "torch", "--quiet")
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["best"]["plan"]["precision"] == plan["training"]["precision"] == "fp32"
    done = run(tmp_path, "run", "plan.json", "--steps", "2", "--warmup", "1", "--quiet", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["task"]["dtype"] == "fp32"
    assert made["predicted"]["peak_bytes"] == pytest.approx(max(made["measured"]["peak_bytes"]), rel=0.15)


def test_others_refuse_it_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY_TOML)
    done = run(tmp_path, "search", "tiny.toml", *WHERE, "--quiet")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "autoplan: fp32 is priced only for the built-in trainer, not for megatron-core: pass --precision bf16"
    )


@pytest.mark.parametrize(
    ("text", "emulates"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", False),
        ("flags\t\t: fpu avx2 amx_tile amx_bf16\n", False),
        ("flags\t\t: fpu avx2 avx512f\n", True),
        ("Features\t: fp asimd sve bf16\n", False),
        ("Features\t: fp asimd\n", True),
        ("processor : 0\n", False),
    ],
)
def test_cores_without_units_are_known_by_their_flags(tmp_path: Path, text: str, emulates: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert emulates_bf16(path) == emulates
    assert not emulates_bf16(tmp_path / "nothing")


def test_a_layer_norm_is_one_kernel_whatever_else_is_eager() -> None:
    shape = dataclasses.replace(SMALL, norm="layernorm")
    eager, fused = (
        dataclasses.replace(
            problem_of(), model=shape, training=TrainingSpec(seq_len=TOKENS, precision="fp32", fused_norm=on)
        )
        for on in (False, True)
    )
    batch = PlanBatch.of([plan_of()], shape.num_layers)
    assert estimate(eager, batch).step_s == estimate(fused, batch).step_s
