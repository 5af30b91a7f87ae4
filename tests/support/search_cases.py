"""Small problems with their spaces, for tests of what a search says beside its answer."""

from __future__ import annotations

from typing import Any

from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.search.flags import with_flags
from autoplan.search.limits import default_limits
from autoplan.search.space import Space
from autoplan.spec.model import ModelSpec
from autoplan.spec.problem import Problem
from problems import problem_for

DENSE = ModelSpec(
    name="dense", num_layers=24, hidden_size=4096, vocab_size=32000, num_heads=32, num_kv_heads=8, ffn_size=11008
)
LARGE = ModelSpec(
    name="large", num_layers=48, hidden_size=8192, vocab_size=32000, num_heads=32, num_kv_heads=8, ffn_size=22016
)


# Leaves of the default space what a test can enumerate and a reader can follow.
PLAIN = (
    *("tp_overlap", "ep_overlap", "offload", "sharding=zero2", "sharding=zero3"),
    *("uneven_stages", "partial_recompute", "partial_sharding"),
)


def make(
    model: ModelSpec = DENSE,
    cluster: str = "h100-sxm:2x8",
    batches: tuple[int, ...] = (64,),
    fix: tuple[str, ...] = (),
    seq_len: int = 4096,
    forbid: tuple[str, ...] = PLAIN,
    **changes: Any,
) -> tuple[Problem, Space]:
    """A problem, plain except for `changes`, and the default space for it without what is forbidden."""
    problem = problem_for(model, cluster, seq_len=seq_len, **changes)
    narrow = with_flags(default_limits(problem, batches), fix=(), at_most=(), forbid=forbid)
    limits = with_flags(narrow, fix=fix, at_most=(), forbid=())
    return problem, Space(workload=problem.workload, limits=limits, rules=RULES)
