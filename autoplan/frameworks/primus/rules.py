"""Rules on the plans of Primus: those of Megatron-LM, whose code it runs, plus two zero-bubble schedules.

Places are files and lines of Primus fd1eeab (2026-08), below primus/.  Of its split-backward schedules zero-bubble is
ZB-H1 (as many micro-batches in flight as 1F1B) and zbv-formatted is ZB-V; v-half and v-min, which trade speed for
memory, do not exist in plans.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords
from autoplan.frameworks.common.shared_rules import only
from autoplan.frameworks.megatron_lm.rules import (
    COMMON,
    FP8_SCALINGS,
    INTERLEAVED,
    INTERLEAVED_MICROBATCHES,
    MAIN_WEIGHTS,
    OFFLOADS,
)
from autoplan.spec.axes import offered
from autoplan.spec.enums import CudaGraphs, Recompute, Schedule
from autoplan.spec.plan import PlanBatch
from autoplan.spec.workload import Workload

_LAUNCHER = "backends/megatron/core/pipeline_parallel/primuspipe/pipeline_launcher.py"

ZB_V = Schedule.ZB_V.code

# Values of `pp_algorithm` by the names of schedules.
ALGORITHMS = {"zb-h1": "zero-bubble", "zb-v": "zbv-formatted"}


def _chunks(workload: Workload, batch: PlanBatch) -> Bools:
    needed = np.where(batch.schedule == ZB_V, batch.vp == 2, batch.vp == 1)
    return np.where(batch.schedule == INTERLEAVED, batch.vp > 1, needed)


def _split_overlap(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans synchronise a split backward after the last pass only, without overlap.

    Megatron-LM asserts that overlapped buckets are reduced by then (core/distributed/param_and_grad_buffer.py:824).
    """
    return ~batch.splits_backward | ~(batch.grad_reduce_overlap | batch.param_gather_overlap)


SUPPORTED = (
    MAIN_WEIGHTS,
    FP8_SCALINGS,
    OFFLOADS,
    SupportedWords(
        axis="schedule",
        words=("1f1b", "interleaved", *ALGORITHMS),
        source=f"{_LAUNCHER}:52",
    ),
)

RULES: tuple[Rule, ...] = (
    *COMMON,
    only("delay_wgrad", False, why="its experts do not split their backward pass, leave it out"),
    only("dynamic_cp", False, why="its own training loop is not known to spread samples over ranks, leave it out"),
    *(words.rule() for words in SUPPORTED),
    Rule(
        source="Megatron-LM d3528a2: core/transformer/transformer_config.py, without moe_paged_stash",
        holds=lambda s, b: (b.cuda_graphs != CudaGraphs.FULL_ITERATION.code) | (s.model.moe is None),
        text=lambda s, p: f"cuda_graphs {p.cuda_graphs} with experts: use layer",
    ),
    Rule(
        source=f"{_LAUNCHER}:63",
        holds=_chunks,
        text=lambda s, p: (
            f"schedule {p.schedule!r} with vp {p.vp}: 1f1b and zb-h1 have vp 1, zb-v has 2, interleaved more than 1"
        ),
    ),
    Rule(
        source=f"{_LAUNCHER}:209",
        # Weight gradients are only deferred if the product accumulates them.
        holds=lambda s, b: ~b.splits_backward | b.gradient_accumulation_fusion,
        text=lambda s, p: f"schedule {p.schedule!r} needs gradient_accumulation_fusion: leave it on",
    ),
    Rule(
        source=INTERLEAVED_MICROBATCHES.source,
        holds=lambda s, b: (b.schedule != INTERLEAVED) | INTERLEAVED_MICROBATCHES.holds(s, b),
        text=INTERLEAVED_MICROBATCHES.text,
    ),
    Rule(
        source="core/pipeline_parallel/scheduler/algorithms/zbv_formatted.py:27",
        # The ZB-V table always has passes for 2 pp - 1 micro-batches, even if some do not exist.
        holds=lambda s, b: (b.schedule != ZB_V) | (b.num_microbatches >= 2 * b.pp - 1),
        text=lambda s, p: (
            f"zb-v needs 2 pp - 1 = {2 * p.pp - 1} micro-batches, there are {p.num_microbatches}: "
            "use zb-h1, lower pp or micro_batch"
        ),
    ),
    Rule(
        source=f"{_LAUNCHER}:269",
        holds=_split_overlap,
        text=lambda s, p: (
            f"schedule {p.schedule!r} overlaps neither reductions nor gathers: turn both overlap options off"
        ),
    ),
    Rule(
        source="core/projection/config_validation.py:99",
        # Deferred weight gradients keep the inputs that recomputation would free.
        holds=lambda s, b: ~b.splits_backward | (b.recompute == Recompute.NONE.code),
        text=lambda s, p: f"schedule {p.schedule!r} with recompute {p.recompute!r} frees no memory: use none",
    ),
    Rule(
        source=f"{_LAUNCHER}:63",
        holds=lambda s, b: ~b.splits_backward | (b.offload_modules == 0),
        text=lambda s, p: f"schedule {p.schedule!r} with offload_modules {p.offload_modules} is not priced: use none",
    ),
)

BOOK = Rulebook(
    rules=RULES,
    supported=SUPPORTED,
    extras=offered("primus"),
    repeats_parts=True,
    repeats_some_layers=True,
    split_schedules_overlap=False,
)
