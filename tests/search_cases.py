"""Small problems with their spaces, for tests of what a search says beside its answer."""

from __future__ import annotations

from autoplan.model import ModelSpec
from autoplan.problem import Problem
from autoplan.read.cluster import load_cluster
from autoplan.read.framework import load_framework
from autoplan.rules import Setting
from autoplan.rules.megatron_lm import RULES
from autoplan.timing import Calibration
from autoplan.training import TrainingSpec
from search.limits import default_limits, with_wishes
from search.space import Space

DENSE = ModelSpec(
    name="dense", num_layers=24, hidden_size=4096, vocab_size=32000, num_heads=32, num_kv_heads=8, ffn_size=11008
)
LARGE = ModelSpec(
    name="large", num_layers=48, hidden_size=8192, vocab_size=32000, num_heads=32, num_kv_heads=8, ffn_size=22016
)


def make(
    model: ModelSpec = DENSE,
    cluster: str = "h100-sxm:2x8",
    batch: int = 64,
    fix: tuple[str, ...] = (),
    calibration: Calibration | None = None,
) -> tuple[Problem, Space]:
    """A problem of 4,096 tokens and the default space for it."""
    problem = Problem(
        model=model,
        training=TrainingSpec(seq_len=4096),
        cluster=load_cluster(cluster),
        framework=load_framework("megatron-core"),
        calibration=calibration or Calibration(),
    )
    limits = with_wishes(default_limits(problem, (batch,)), fix=fix, at_most=(), allow=())
    setting = Setting(model=model, training=problem.training, num_devices=problem.cluster.num_devices)
    return problem, Space(setting=setting, limits=limits, rules=RULES)
