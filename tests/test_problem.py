"""Does a problem refuse what its device cannot run?"""

from __future__ import annotations

from typing import Any, get_args

import pytest

from autoplan.errors import InputError
from autoplan.problem import Problem, precisions_of
from autoplan.read.cluster import load_cluster
from autoplan.read.framework import load_framework
from autoplan.read.model import load_model
from autoplan.training import Precision, TrainingSpec

RUNS: dict[str, str] = {
    "v100": "fp16",
    "a100-sxm": "bf16 fp16",
    "h100-sxm": "bf16 fp16 fp8",
    "l40s": "bf16 fp16 fp8",
    "b200": "bf16 fp16 fp8 mxfp8 nvfp4",
    "gb300-nvl72": "bf16 fp16 fp8 mxfp8 nvfp4",
    "frontier": "bf16 fp16",
    "mi300x": "bf16 fp16 fp8",
    "mi355x": "bf16 fp16 fp8 mxfp8",
    "cpu": "bf16",
}


def problem(cluster: str, precision: Any) -> Problem:
    return Problem(
        model=load_model("llama3-8b"),
        training=TrainingSpec(seq_len=4096, precision=precision),
        cluster=load_cluster(cluster),
        framework=load_framework("megatron-core"),
    )


@pytest.mark.parametrize("cluster", RUNS)
def test_a_device_runs_the_precisions_that_it_has_units_for(cluster: str) -> None:
    usable = RUNS[cluster].split()
    assert list(precisions_of(load_cluster(cluster).device)) == usable
    for precision in get_args(Precision):
        if precision in usable:
            assert problem(cluster, precision).training.precision == precision
        else:
            with pytest.raises(InputError, match=rf"has no {precision} matrix units: use {' or '.join(usable)}"):
                problem(cluster, precision)
