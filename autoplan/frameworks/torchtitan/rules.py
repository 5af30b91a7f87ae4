"""Rules on the plans that torchtitan accepts.

Places are files and lines of torchtitan b5bcd76 (2026-08), below torchtitan/, and of PyTorch 2.13.0, whose pipeline
schedules it runs, below torch/.  Both sharded and unsharded states use FSDP2, so any schedule works with them.
--parallelism.module_fqns_per_model_part accepts any layer counts.
"""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.cost.kernels.cross_entropy import PIECES
from autoplan.frameworks.common import shared_rules as shared
from autoplan.frameworks.common import universal_rules as universal
from autoplan.frameworks.common.rules import Rule, Rulebook, SupportedWords, all_true
from autoplan.frameworks.common.widths import gemm_widths
from autoplan.frameworks.fsdp2.rules import PIPELINE_RULES
from autoplan.spec.axes import offered
from autoplan.spec.enums import ContextParallelKind, Offload, Precision, Sharding
from autoplan.spec.plan import PlanBatch
from autoplan.spec.workload import Workload

_DECODER = "models/common/decoder.py"
_DIMS = "distributed/parallel_dims.py"
_FSDP = "distributed/fsdp.py"

NONE, ZERO2 = Sharding.NONE.code, Sharding.ZERO2.code


# -- multi-token prediction, four bits --------------------------------------------------------------------------------


def _nvfp4_widths(workload: Workload, batch: PlanBatch) -> Bools:
    widths = [width % 128 == 0 for width in gemm_widths(workload.model, batch.tp, batch.etp)]
    return (batch.precision != Precision.NVFP4.code) | np.all(widths, axis=0)


# -- experts ----------------------------------------------------------------------------------------------------------


def _experts_take_ranks(workload: Workload, batch: PlanBatch) -> Bools:
    """Return which plans fit their experts into the ranks of one shard group; without sharding a replica is one."""
    copies = np.where(batch.sharding == NONE, batch.dp, batch.dp_replicate)
    ranks = batch.tp * batch.cp * batch.dp // copies
    return ranks % batch.ep == 0 if workload.model.moe else all_true(batch)


SUPPORTED = (
    # fsdp_reshard_after_forward never and always.
    SupportedWords(axis="sharding", words=("none", "zero2", "zero3"), source=f"{_FSDP}:112"),
    SupportedWords(axis="cp_kind", words=(ContextParallelKind.RING,), source="distributed/context_parallel/api.py:88"),
    # enable_cpu_offload always includes the parameters.
    SupportedWords(axis="offload", words=(Offload.NONE, Offload.PARAMETERS), source=f"{_FSDP}:231"),
    SupportedWords(axis="reduce_dtype", words=("usual", "half"), source="config/configs.py mixed_precision_reduce"),
    SupportedWords(axis="main_weights", words=("fp32", "bf16"), source="config/configs.py:89 dtype"),
    SupportedWords(axis="fp8_scaling", words=("tensorwise", "rowwise"), source="components/quantization/float8.py"),
    SupportedWords(axis="chunked_loss", words=("none", "chunks"), source="components/loss.py, ChunkedLossWrapper"),
    SupportedWords(axis="precision", words=("bf16", "fp8", "mxfp8", "nvfp4"), source="config/configs.py:94"),
)

EXTRAS = offered("torchtitan")

_OWN: tuple[Rule, ...] = (
    universal.ALL_OR_NONE,
    *(words.rule() for words in SUPPORTED),
    *PIPELINE_RULES,
    shared.tied_needs_one_stage(f"{_DECODER}:168"),
    Rule(
        source=f"{_FSDP}:129",
        # By default the weights of a stage stay gathered during a step, which is the meaning of zero3 in its pipelines.
        holds=lambda s, b: (b.pp == 1) | (b.sharding != ZERO2),
        text=lambda s, p: f"zero2 with pp {p.pp} is what zero3 is in a pipeline: use zero3",
    ),
    Rule(
        source="models/deepseek_v3/MTP.md:186",
        holds=lambda s, b: b.chunked_loss == 0 if s.model.num_mtp_layers else all_true(b),
        text=lambda s, p: "chunked_loss with multi-token prediction: leave it out",
    ),
    Rule(
        source="components/loss.py, ChunkedLossWrapper",
        holds=lambda s, b: (b.chunked_loss == 0) | (b.micro_batch * s.training.seq_len // b.cp % PIECES == 0),
        text=lambda s, p: (
            f"chunked_loss needs the tokens of a micro-batch divisible by {PIECES}: seq_len is {s.training.seq_len}, "
            "leave it out"
        ),
    ),
    shared.whole_kv_heads(f"{_DECODER}:195"),
    shared.sp_needs_tp("trainer.py:300"),
    shared.SCALING_NEEDS_FP8,
    # Version 0.3 requires it for every sequence, b5bcd76 for the tokens of a micro-batch.
    shared.whole_sequence("trainer.py:302"),
    Rule(
        source=f"{_DIMS} fsdp_enabled",
        # Sharded states need several ranks (dp_shard x cp): with one rank they are treated as unsharded.
        holds=lambda s, b: (b.sharding == NONE) | (b.dp_shard * b.cp > 1),
        text=lambda s, p: f"{p.sharding} over one rank has nothing to shard: use none, or a larger dp_shard",
    ),
    Rule(
        source=f"{_FSDP}:54",
        # The ranks of a context group are among those that FSDP shards over.
        holds=lambda s, b: (b.cp == 1) | (b.sharding != NONE),
        text=lambda s, p: f"cp {p.cp} needs sharded states, sharding is {p.sharding}: use zero3 or cp 1",
    ),
    Rule(
        source=f"{_DIMS}:188",
        holds=_experts_take_ranks,
        text=lambda s, p: (
            f"ep {p.ep} must divide the ranks of one copy of the sharded states: lower ep or dp_replicate"
        ),
    ),
    Rule(
        source="models/common/MOE_SHARDING.md:23",
        # With expert parallelism experts are whole; otherwise tp splits them like every other matrix.
        holds=lambda s, b: b.etp == np.where(b.ep > 1, 1, b.tp) if s.model.moe else all_true(b),
        text=lambda s, p: f"etp {p.etp} with ep {p.ep} and tp {p.tp}: set etp to {1 if p.ep > 1 else p.tp}",
    ),
    *shared.aligned("components/quantization/utils.py:22"),
    Rule(
        source="components/quantization/nvfp4.py:39",
        holds=_nvfp4_widths,
        text=lambda s, p: (
            f"nvfp4 needs the widths of a rank divisible by 128, with tp {p.tp} they are not: lower tp or use mxfp8"
        ),
    ),
    Rule(
        source="models/deepseek_v3/mtp.py:203",
        # Prediction layers need inputs that only the last stage has, over the whole sequence.
        holds=lambda s, b: (b.pp == 1) & (b.cp == 1) if s.model.num_mtp_layers else all_true(b),
        text=lambda s, p: (
            f"multi-token prediction with pp {p.pp} and cp {p.cp}: set num_mtp_layers of the model to 0, or both to 1"
        ),
    ),
)


def rules_offering(*extras: str) -> tuple[Rule, ...]:
    """Return torchtitan's rules for a framework that offers these rarely supported options."""
    return (*universal.RULES, universal.NO_PARTS, *universal.options_of_others(*extras), *_OWN)


RULES = rules_offering(*EXTRAS)
BOOK = Rulebook(rules=RULES, supported=SUPPORTED, extras=EXTRAS)
