"""Plans that torchtitan runs and its launch files cannot express, or that a version of it lacks.

Places are below torchtitan/ in the wheels of 0.3.0 and 0.2.2 and in b5bcd76 (main, 2026-08).
"""

from __future__ import annotations

from autoplan.base.arrays import Bools
from autoplan.frameworks.common.rules import Rule, all_true
from autoplan.frameworks.common.shared_rules import gathers_ahead, only, stages_last
from autoplan.frameworks.torchtitan.families import family_of
from autoplan.spec.enums import AttentionKernel, ChunkedLoss, Fp8Scaling, MainWeights, Precision
from autoplan.spec.plan import PlanBatch
from autoplan.spec.workload import Workload


def _has_adapters(workload: Workload, batch: PlanBatch) -> Bools:
    return all_true(batch) & workload.training.has_adapters


_LIMITS_OF_ALL = (
    only("attention", AttentionKernel.FLASH, AttentionKernel.FLASH2, why="plan with flash or flash2"),
    stages_last("it numbers stages last, leave it out"),
    only("ep_overlap", False, why="it overlaps expert traffic in no schedule that is priced here"),
    only("grad_reduce_overlap", True, why="FSDP2 always overlaps the reduction"),
    gathers_ahead("FSDP2 always gathers ahead"),
    Rule(
        holds=lambda s, b: (b.precision != Precision.NVFP4.code) | (s.model.moe is None),
        text=lambda s, p: "precision 'nvfp4' of experts: plan with mxfp8",
    ),
    Rule(
        holds=lambda s, b: ~b.tp_overlap | (s.training.fused_norm is not False),
        text=lambda s, p: "tp_overlap without compilation: leave fused_norm out",
    ),
)
LIMITS = (
    *_LIMITS_OF_ALL,
    Rule(
        source="distributed/full_dtensor.py:46",
        holds=lambda s, b: (b.attention == AttentionKernel.FLASH.code) | (b.cp == 1),
        text=lambda s, p: f"attention {p.attention} with cp {p.cp}: plan with flash",
    ),
    Rule(
        holds=lambda s, b: (b.main_weights == MainWeights.BF16.code) | (not s.training.has_adapters),
        text=lambda s, p: "adapters beside frozen weights in fp32: plan with main_weights=bf16 (training.dtype)",
    ),
    Rule(
        holds=lambda s, b: ~_has_adapters(s, b) if s.model.moe or s.model.mla else all_true(b),
        text=lambda s, p: "adapters beside experts and latent attention: use another target",
    ),
    Rule(
        holds=lambda s, b: (b.precision != Precision.FP8.code) | (b.fp8_scaling == Fp8Scaling.ROWWISE.code),
        text=lambda s, p: f"fp8_scaling {p.fp8_scaling}: 0.3 scales rows alone, plan so or use --to torchtitan@0.2",
    ),
)
OLD_LIMITS = (
    *_LIMITS_OF_ALL,
    only("attention", AttentionKernel.FLASH, why="plan with flash, or export for 0.3"),
    only("chunked_loss", ChunkedLoss.NONE, why="version 0.2 has none, export for 0.3"),
    Rule(
        holds=lambda s, b: ~_has_adapters(s, b),
        text=lambda s, p: "adapters in version 0.2: export for 0.3",
    ),
    Rule(
        holds=lambda s, b: b.precision != Precision.NVFP4.code,
        text=lambda s, p: "precision 'nvfp4' in version 0.2: export for 0.3",
    ),
    Rule(
        holds=lambda s, b: (b.tp == 1) | b.sp,
        text=lambda s, p: "tp without sp in version 0.2: plan with sp or export for 0.3",
    ),
    Rule(
        holds=lambda s, b: (b.pp == 1) | (family_of(s.model) not in ("qwen3", "gpt_oss")),
        text=lambda s, p: f"a pipeline of {family_of(s.model)} in version 0.2: plan with pp 1 or export for 0.3",
    ),
)
