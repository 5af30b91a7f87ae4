"""Rules that several frameworks share, without a place: each framework gives the one in its source."""

from __future__ import annotations

import numpy as np

from autoplan.base.arrays import Bools
from autoplan.frameworks.common.rules import ANY_FRAMEWORK, Rule, all_true
from autoplan.frameworks.common.widths import gemm_widths, kv_groups
from autoplan.spec.axes import AXIS, offered
from autoplan.spec.axis import Kind, Value
from autoplan.spec.enums import Fp8Scaling, MainWeights, Precision, RankOrder, Sharding
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.workload import Workload


def only(axis: str, *values: Value | int, why: str, source: str = ANY_FRAMEWORK) -> Rule:
    """Return the rule that a plan has one of these values of an axis; `why` ends what is said of others."""
    row, codes = AXIS[axis], [AXIS[axis].code(value) for value in values]

    def text(workload: Workload, plan: ParallelPlan) -> str:
        value = getattr(plan, axis)
        shown = {Kind.FLAG: "" if value else " off", Kind.WORD: f" {value!r}"}.get(row.kind, f" {value}")
        return f"{axis}{shown}: {why}"

    def holds(workload: Workload, batch: PlanBatch) -> Bools:
        return np.logical_or.reduce([getattr(batch, axis) == code for code in codes])

    return Rule(source=source, holds=holds, text=text)


def no_options_but(taken: tuple[str, ...], rules: str, source: str) -> tuple[Rule, ...]:
    """Return the rules that plans leave out what few frameworks offer, under these `rules`, but the options `taken`."""
    left_out = (AXIS[name] for name in offered(rules) if name not in taken)
    return tuple(only(axis.name, axis.default, why="leave it out", source=source) for axis in left_out)  # type: ignore[arg-type]


def whole_kv_heads(source: str) -> Rule:
    """Ranks have whole heads of keys and values, none of them copied."""
    return Rule(
        source=source,
        holds=lambda s, b: kv_groups(s.model) % b.tp == 0,
        text=lambda s, p: f"num_kv_heads {kv_groups(s.model)} must be divisible by tp {p.tp}: lower tp",
    )


def sp_needs_tp(source: str) -> Rule:
    """Sequence parallelism re-uses the ranks of tensor parallelism."""
    return Rule(
        source=source,
        holds=lambda s, b: ~b.sp | (b.tp > 1),
        text=lambda s, p: f"sp needs tp > 1, tp is {p.tp}: leave sp out",
    )


def _sequence(workload: Workload, batch: PlanBatch) -> Bools:
    """Two chunks a rank balance the causal mask; sequence parallelism spreads each rank's tokens over tp."""
    parts = np.where(batch.sp, batch.tp, 1) * np.where(batch.cp > 1, 2 * batch.cp, 1)
    return workload.training.seq_len % parts == 0


def whole_sequence(source: str) -> Rule:
    """The sequence divides into what context and sequence parallelism make of it."""
    return Rule(
        source=source,
        holds=_sequence,
        text=lambda s, p: (
            f"seq_len {s.training.seq_len} must be divisible by tp {p.tp} with sp, times 2 cp {2 * p.cp} with cp > 1: "
            "lower tp or cp"
        ),
    )


def tied_needs_one_stage(source: str) -> Rule:
    """Nothing adds up the gradients of a weight that two stages share."""
    return Rule(
        source=source,
        holds=lambda s, b: b.pp == 1 if s.model.tied_embeddings else all_true(b),
        text=lambda s, p: f"tied embeddings need pp 1, pp is {p.pp}: lower pp",
    )


def no_interleaving(source: str) -> Rule:
    """Allow one chunk a rank."""
    return only("vp", 1, why="there is no interleaving, set vp 1", source=source)


def whole_experts(source: str) -> Rule:
    """Tensor parallelism does not split experts."""
    return only("etp", 1, why="every rank has all experts, set etp 1", source=source)


SCALING_NEEDS_FP8 = Rule(
    holds=lambda s, b: (b.fp8_scaling == Fp8Scaling.TENSORWISE.code) | (b.precision == Precision.FP8.code),
    text=lambda s, p: f"fp8_scaling {p.fp8_scaling} needs precision fp8, it is {p.precision}: leave it out",
)


def bf16_throughout(source: str) -> Rule:
    """Weights in bf16 that are the main ones have products that are no other 16 bits."""
    return Rule(
        source=source,
        holds=lambda s, b: (b.main_weights == MainWeights.FP32.code) | (b.precision != Precision.FP16.code),
        text=lambda s, p: f"main_weights {p.main_weights} with precision {p.precision}: use bf16",
    )


_BLOCK = np.array([{"mxfp8": 32, "fp8": 16, "nvfp4": 16}.get(precision, 1) for precision in Precision], dtype=np.int64)


def _aligned_widths(workload: Workload, batch: PlanBatch) -> Bools:
    block = _BLOCK[batch.precision]
    return np.all([width % block == 0 for width in gemm_widths(workload.model, batch.tp, batch.etp)], axis=0)


def _aligned_tokens(workload: Workload, batch: PlanBatch) -> Bools:
    tokens = batch.micro_batch * (workload.training.seq_len // batch.cp)
    return tokens % _BLOCK[batch.precision] == 0


def aligned(source: str) -> tuple[Rule, ...]:
    """Require that in 8 and 4 bits the sizes of every product are whole blocks."""
    return (
        Rule(
            source=source,
            holds=_aligned_widths,
            text=lambda s, p: (
                f"{p.precision} needs the widths of a rank divisible by {_BLOCK[Precision(p.precision).code]}, "
                f"with tp {p.tp} and etp {p.etp} they are not: lower tp or etp, or use bf16"
            ),
        ),
        Rule(
            source=source,
            holds=_aligned_tokens,
            text=lambda s, p: (
                f"{p.precision} needs the {p.micro_batch * (s.training.seq_len // p.cp)} tokens of a micro-batch "
                f"divisible by {_BLOCK[Precision(p.precision).code]}: lower cp or use bf16"
            ),
        ),
    )


# -- what few launch files can be told ---------------------------------------------------------------------------------


# Of a target that always numbers its ranks in Megatron's usual order.
USUAL_RANK_ORDER = only("rank_order", RankOrder.DP_BEFORE_PP, why="leave it out")


def stages_last(why: str) -> Rule:
    """Return the limit of a target whose mesh numbers the stages of a pipeline last."""
    return Rule(
        holds=lambda s, b: (b.rank_order == RankOrder.DP_BEFORE_PP.code) | (b.pp == 1) | (b.dp == 1),
        text=lambda s, p: f"rank_order {p.rank_order}: {why}",
    )


def gathers_ahead(why: str) -> Rule:
    """Return the rule that a plan with sharded states gathers parameters ahead; `why` ends what is said of others."""
    return Rule(
        holds=lambda s, b: b.param_gather_overlap | (b.sharding == Sharding.NONE.code),
        text=lambda s, p: f"param_gather_overlap off: {why}",
    )


FSDP2_OVERLAPS = (
    Rule(
        holds=lambda s, b: ~(b.tp_overlap | b.ep_overlap),
        text=lambda s, p: f"{'tp_overlap' if p.tp_overlap else 'ep_overlap'}: leave it out",
    ),
    Rule(
        holds=lambda s, b: b.grad_reduce_overlap & (b.param_gather_overlap | (b.sharding == Sharding.NONE.code)),
        text=lambda s, p: (
            f"{'param_gather_overlap' if p.grad_reduce_overlap else 'grad_reduce_overlap'} off: FSDP2 always overlaps"
        ),
    ),
)
