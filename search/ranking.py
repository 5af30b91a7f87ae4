"""Ranking of plans: a stable order, the best of many, and the figures for comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.cost.kernels.arithmetic import model_flops_per_token
from autoplan.cost.kernels.sequences import useful
from autoplan.spec.axes import SEARCHED
from autoplan.spec.estimate import VERDICTS, CostEstimate, datasheet_peak
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.training import TrainingSpec

# Relative difference up to which step times are equal: summation order changes less, measurements far more.
TIE = 1e-9

# Tie-breakers between plans of equal time: fewer parts and plainer choices first.
_OF_LAYOUT = (
    *("pp", "tp", "cp", "ep", "etp", "vp", "schedule"),
    *("recompute", "recompute_modules", "recompute_num_layers"),
    *("offload", "offload_percent", "offload_modules", "offload_layers", "sharding"),
    *("cp_kind", "dispatcher", "tp_overlap", "ep_overlap", "rank_order"),
)
_TIE_ORDER = (
    *_OF_LAYOUT,
    *(axis.name for axis in SEARCHED if axis.name not in _OF_LAYOUT),
    *("micro_batch", "dp_replicate", "dp_shard", "global_batch"),
)


def seconds_per_sequence(costs: CostEstimate) -> Floats:
    """Return step time over global batch, the search objective, which is comparable between batch sizes."""
    return costs.step_s / costs.batch.global_batch


def ordering(objective: Floats, batch: PlanBatch) -> Ints:
    """Return indices of plans, best first: by `objective` rounded to `TIE`, then plainer plans, then even layers."""
    rounded = np.round(np.log(objective) / TIE).astype(np.int64)
    by_evenness = sorted(batch.layouts, key=lambda layers: (max(layers) - min(layers), layers))
    rank_of_layout = {layout: at for at, layout in enumerate(by_evenness)}
    layers = np.array([rank_of_layout[layout] for layout in batch.layouts], dtype=np.int64)
    keys = [rounded, *(getattr(batch, name) for name in _TIE_ORDER), layers[batch.layout]]
    return np.lexsort(keys[::-1])


class Leaders:
    """The best `limit` plans of all offered ones."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.batch: PlanBatch | None = None
        self.objective: Floats = np.empty(0)

    def __len__(self) -> int:
        return len(self.objective)

    def offer(self, objective: Floats, batch: PlanBatch) -> None:
        """Keep the plans of `batch` that are among the best so far."""
        full = len(self) >= self.limit
        bar = self.objective[-1] if full else np.inf
        if len(objective) > self.limit:
            bar = min(bar, np.partition(objective, self.limit - 1)[self.limit - 1])
        better = np.flatnonzero(objective <= bar * (1 + 2 * TIE))
        if not len(better):
            return
        batch, objective = batch.take(better), objective[better]
        if self.batch is not None:
            batch = PlanBatch.concatenate([self.batch, batch])
            objective = np.concatenate([self.objective, objective])
        order = ordering(objective, batch)[: self.limit]
        self.batch, self.objective = batch.take(order), objective[order]


def training_flops_per_token(model: ModelSpec, training: TrainingSpec) -> float:
    """Return the model FLOPs per sample token over all passes, without recomputation."""
    return model_flops_per_token(
        *(model, useful(training).attended_len, training.finetuning),
        has_scores=training.has_scores,
        runs_reference=training.runs_reference,
    )


def ranked(problem: Problem, costs: CostEstimate, order: Iterable[int]) -> tuple[RankedPlan, ...]:
    """Return the plans at the indices `order`, with their figures.

    Tokens are sample tokens without padding.  MFU follows Megatron-LM: model FLOPs without recomputation over the
    datasheet peak of the precision.
    """
    devices, learnt = problem.num_devices, useful(problem.training)
    flops_per_token = training_flops_per_token(problem.model, problem.training)
    _, peak = datasheet_peak(problem.cluster.device, problem.training.precision)
    verdicts = costs.verdict
    result = []
    for at in order:
        step_s, memory = float(costs.step_s[at]), float(costs.memory_bytes[at])
        tokens_per_s = float(costs.batch.global_batch[at]) * learnt.tokens / step_s / devices
        result.append(
            RankedPlan(
                plan=costs.batch.plan(at),
                step_s=step_s,
                low_s=float(costs.low_s[at]),
                high_s=float(costs.high_s[at]),
                tokens_per_s_per_device=tokens_per_s,
                mfu=tokens_per_s * flops_per_token / peak,
                memory_bytes=memory,
                memory_headroom_bytes=costs.capacity_bytes - memory,
                host_memory_bytes=float(costs.host_memory_bytes[at]),
                oom_probability=costs.oom_probability(at),
                verdict=VERDICTS[verdicts[at]],
                terms_s={name: float(value[at]) for name, value in costs.terms_s.items()},
            )
        )
    assert all(math.isfinite(plan.step_s) for plan in result)
    return tuple(result)
