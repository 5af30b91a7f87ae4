"""Problems of tests, from names of presets or from specifications."""

from __future__ import annotations

from typing import Any

from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.readers.model import load_model
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec


def problem_for(
    model: str | ModelSpec,
    cluster: str | ClusterSpec,
    framework: str | Framework = "megatron-core",
    *,
    training: TrainingSpec | None = None,
    seq_len: int = 4096,
    **parts: Any,
) -> Problem:
    """Return the problem of training `model` on sequences of `seq_len`; its calibration is the reference one."""
    return Problem(
        model=load_model(model) if isinstance(model, str) else model,
        training=training or TrainingSpec(seq_len=seq_len),
        cluster=load_cluster(cluster) if isinstance(cluster, str) else cluster,
        framework=load_framework(framework) if isinstance(framework, str) else framework,
        **parts,
    )
