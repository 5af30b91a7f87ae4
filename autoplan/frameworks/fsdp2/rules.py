"""Rules on the plans of plain PyTorch: fully_shard (FSDP2), DTensor tensor parallelism, torch.distributed.pipelining.

Places are files and lines of PyTorch 2.13.0.  Unsharded states use `replicate`, which is built on FSDP2:
DistributedDataParallel silently computes wrong gradients under a schedule that splits the backward pass, or with tensor
parallelism in a pipeline.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common import shared_rules as shared
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords
from autoplan.spec.axes import V_SHAPED, offered
from autoplan.spec.enums import ContextParallelKind, Offload, Schedule
from autoplan.spec.plan import PlanBatch
from autoplan.spec.workload import Workload

_SCHEDULES = "torch/distributed/pipelining/schedules.py"
_ATTENTION = "torch/distributed/tensor/experimental/_context_parallel/_attention.py"


# -- pipelines --------------------------------------------------------------------------------------------------------


def _chunks(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans have as many stages per rank as the schedule expects: one, or several if interleaved."""
    several = np.isin(batch.schedule, [schedule.code for schedule in (Schedule.INTERLEAVED, *V_SHAPED)])
    return several == (batch.vp > 1)


def _zero_bubble_rounds(workload: Workload, batch: PlanBatch) -> Bools:
    count = batch.num_microbatches
    return (batch.schedule != Schedule.ZB_H1.code) | (count % np.maximum(count // batch.pp, 1) == 0)


PIPELINE_RULES: tuple[Rule, ...] = (
    Rule(
        source=f"{_SCHEDULES}:686",
        holds=_chunks,
        text=lambda s, p: (
            f"schedule {p.schedule!r} with vp {p.vp}: vp 1 is 1f1b, gpipe or zb-h1, vp > 1 is interleaved, vp 2 also "
            "zb-v or dualpipe-v"
        ),
    ),
    Rule(
        source=f"{_SCHEDULES}:686",
        holds=lambda s, b: (b.schedule == Schedule.ONE_F_ONE_B.code) | (b.pp > 1),
        text=lambda s, p: f"schedule {p.schedule!r} needs pp > 1, pp is {p.pp}: use 1f1b with vp 1",
    ),
    Rule(
        source=f"{_SCHEDULES}:1021",
        holds=lambda s, b: (b.schedule != Schedule.ONE_F_ONE_B.code) | (b.num_microbatches >= b.pp),
        text=lambda s, p: (
            f"1f1b needs at least pp {p.pp} micro-batches, there are {p.num_microbatches}: lower pp or micro_batch, or "
            "use gpipe"
        ),
    ),
    Rule(
        source=f"{_SCHEDULES}:2937",
        # If pp does not divide the micro-batches, rounds have more than pp of them, which is not modelled.
        holds=lambda s, b: (b.schedule != Schedule.INTERLEAVED.code) | (b.num_microbatches % b.pp == 0),
        text=lambda s, p: (
            f"interleaving needs micro-batches in multiples of pp {p.pp}, there are {p.num_microbatches}: "
            "change global_batch, micro_batch or vp"
        ),
    ),
    Rule(
        source=f"{_SCHEDULES}:3048",
        holds=_zero_bubble_rounds,
        text=lambda s, p: (
            f"zb-h1 needs {p.num_microbatches} micro-batches divisible by their rounds, as many as pp {p.pp} fits into "
            "them: change global_batch or micro_batch"
        ),
    ),
)


# -- experts, sharding ------------------------------------------------------------------------------------------------


SUPPORTED = (
    # reshard_after_forward False and True.
    SupportedWords(
        axis="sharding",
        words=("none", "zero2", "zero3"),
        source="torch/distributed/fsdp/_fully_shard/_fully_shard.py:102",
    ),
    SupportedWords(axis="cp_kind", words=(ContextParallelKind.RING,), source=f"{_ATTENTION}:53"),
    # CPUOffloadPolicy always includes the parameters.
    SupportedWords(
        axis="offload",
        words=(Offload.NONE, Offload.PARAMETERS),
        source="torch/distributed/fsdp/_fully_shard/_fsdp_api.py:183",
    ),
    SupportedWords(
        axis="reduce_dtype",
        words=("usual", "fp32"),
        source="torch/distributed/fsdp/_fully_shard/_fsdp_api.py MixedPrecisionPolicy",
    ),
    SupportedWords(axis="main_weights", words=("fp32", "bf16"), source="torch/optim/adam.py zeros_like"),
    SupportedWords(
        axis="fp8_scaling",
        words=("tensorwise", "delayed"),
        source="torchao float8, Transformer Engine common/recipe DelayedScaling",
    ),
    SupportedWords(
        axis="precision",
        words=("bf16", "fp16", "fp8", "mxfp8"),
        source="torch/distributed/fsdp/_fully_shard/_fsdp_api.py:14",
    ),
)

EXTRAS = offered("fsdp2")

_OWN_RULES: tuple[Rule, ...] = (
    *universal.RULES,
    universal.NO_PARTS,
    *(words.rule() for words in SUPPORTED),
    *PIPELINE_RULES,
    shared.tied_needs_one_stage("torch/distributed/pipelining/stage.py PipelineStage"),
    shared.whole_kv_heads("torch/distributed/tensor/parallel/style.py ColwiseParallel"),
    shared.sp_needs_tp("torch/distributed/tensor/parallel/style.py SequenceParallel"),
    shared.whole_sequence("torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py:148"),
    Rule(
        source="torch/distributed/tensor/parallel/style.py",
        holds=lambda s, b: (b.ep == 1) & (b.etp == 1),
        text=lambda s, p: (
            f"ep {p.ep} and etp {p.etp}: PyTorch has no style that spreads experts; set both to 1, or use torchtitan"
        ),
    ),
    shared.SCALING_NEEDS_FP8,
    shared.bf16_throughout("torch/optim/adam.py"),
    *shared.aligned("torchao float8 and mx, torch._scaled_mm"),
)


def rules_offering(*extras: str) -> tuple[Rule, ...]:
    """Return the rules of FSDP2 for a program that offers these rarely supported options."""
    return (*_OWN_RULES, *universal.options_of_others(*extras))


RULES = rules_offering(*EXTRAS)
BOOK = Rulebook(rules=RULES, supported=SUPPORTED, extras=EXTRAS, repeats_some_layers=True)
