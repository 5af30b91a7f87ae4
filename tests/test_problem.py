"""Does a problem refuse what its device cannot run, and know what its gradients weigh?"""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.base.errors import InputError
from autoplan.cost.kernels.products import moved_per_accumulated_grad
from autoplan.cost.state_types import reduced_grad_bytes
from autoplan.readers.cluster import load_cluster
from autoplan.spec.enums import GradType, Precision
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem, precisions_of
from autoplan.spec.training import TrainingSpec
from problems import problem_for

RUNS: dict[str, str] = {
    "v100": "fp16 fp32",
    "a100-sxm": "bf16 fp16 fp32",
    "h100-sxm": "bf16 fp16 fp8 fp32",
    "l40s": "bf16 fp16 fp8 fp32",
    "b200": "bf16 fp16 fp8 mxfp8 nvfp4 fp32",
    "gb300-nvl72": "bf16 fp16 fp8 mxfp8 nvfp4 fp32",
    "frontier": "bf16 fp16 fp32",
    "mi300x": "bf16 fp16 fp8 fp32",
    "mi350x": "bf16 fp16 fp8 mxfp8 fp32",
    "mi355x": "bf16 fp16 fp8 mxfp8 fp32",
    "cpu": "bf16 fp32",
}


def problem(cluster: str, precision: Any, framework: str = "torch", **training: Any) -> Problem:
    return problem_for(
        "llama3-8b", cluster, framework, training=TrainingSpec(seq_len=4096, precision=precision, **training)
    )


@pytest.mark.parametrize("cluster", RUNS)
def test_a_device_runs_the_precisions_that_it_has_units_for(cluster: str) -> None:
    usable = RUNS[cluster].split()
    assert list(precisions_of(load_cluster(cluster).device)) == usable
    for precision in Precision:
        if precision in usable:
            assert problem(cluster, precision).training.precision == precision
        else:
            with pytest.raises(
                InputError, match=rf"has no {precision} matrix units: pass --precision {' or '.join(usable)}"
            ):
                problem(cluster, precision)


def test_a_refused_precision_names_one_that_the_framework_takes_on_that_device() -> None:
    for precision in ("bf16", "fp32"):
        with pytest.raises(InputError, match=r"pass --precision fp16$"):
            problem("v100", precision, "megatron-core")


@pytest.mark.parametrize("framework", ["megatron-core", "pytorch-fsdp", "deepspeed-zero", "torchtitan"])
def test_fp32_is_of_the_built_in_trainer(framework: str) -> None:
    with pytest.raises(InputError, match=f"fp32 is priced only for the built-in trainer, not for {framework}"):
        problem("h100-sxm", "fp32", framework)


@pytest.mark.parametrize(
    ("framework", "precision", "grad_dtype", "reduced", "moved"),
    [
        ("megatron-lm-2021", "bf16", "fp32", 4.0, 10.0),
        ("megatron-lm-2021", "fp16", "fp32", 2.0, 6.0),
        ("megatron-lm-2022", "bf16", "fp32", 4.0, 0.0),  # added up by the products
        ("megatron-deepspeed", "bf16", "fp32", 4.0, 10.0),
        ("deepspeed-zero", "bf16", "bf16", 2.0, 0.0),
        ("deepspeed-zero", "bf16", "fp32", 2.0, 10.0),  # sent in bf16
        ("internevo", "bf16", "fp32", 2.0, 6.0),
    ],
)
def test_accumulators_of_fp32_are_moved_beside_gradients_and_sent_in_a_type_of_their_framework(
    framework: str, precision: str, grad_dtype: str, reduced: float, moved: float
) -> None:
    of = problem("a100-sxm", precision, framework)
    plan = ParallelPlan(global_batch=8, dp_shard=8, precision=Precision(precision), grad_dtype=GradType(grad_dtype))
    batch = PlanBatch.of([plan], of.model.num_layers)
    assert reduced_grad_bytes(of, batch)[0] == reduced
    assert moved_per_accumulated_grad(of, batch)[0] == moved
