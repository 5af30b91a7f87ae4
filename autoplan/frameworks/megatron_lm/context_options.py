"""Options of context parallelism."""

from __future__ import annotations

from autoplan.base.errors import InputError
from autoplan.frameworks.common.option_table import Fields, Value, count
from autoplan.frameworks.megatron_lm.table import Line, Reading, Special, switches, valued
from autoplan.spec.enums import ContextParallelKind
from autoplan.spec.plan_file import PlanFile

CP = count("context_parallel_size", "cp", 1, when=lambda file: file.best.plan.cp > 1)

_CP_KINDS = {ContextParallelKind.RING: "p2p", ContextParallelKind.ALL_TO_ALL: "a2a"}


def _write_cp_kind(file: PlanFile) -> dict[str, Value]:
    plan = file.best.plan
    if plan.cp == 1:
        return {}
    if not (inner := plan.cp_kind.inner if plan.cp_kind.is_hierarchical else 0):
        return {"cp_comm_type": _CP_KINDS[plan.cp_kind]}
    return {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [inner, plan.cp // inner]}


def _read_cp_kind(reading: Reading) -> Fields:
    """Read the kind of all layers; levels of a hierarchy with one rank are none (Transformer Engine)."""
    arguments, cp, key = reading.arguments, reading.fields["cp"], "hierarchical_context_parallel_sizes"
    kinds, sizes = set(arguments.words("cp_comm_type", ("p2p",))), arguments.words(key)
    if cp == 1 or kinds <= {"p2p", "None"}:
        return {}
    if kinds == {"a2a"}:
        return {"cp_kind": ContextParallelKind.ALL_TO_ALL}
    if kinds != {"a2a+p2p"}:
        arguments.remark("cp_comm_type", "priced as ring attention")
        return {}
    option = arguments.name(key)
    if not all(size.isascii() and size.isdigit() and len(size) < 8 for size in sizes) or len(sizes) != 2:
        raise InputError(
            f"{option} must be two sizes beside cp_comm_type a2a+p2p, got {' '.join(sizes)[:30] or 'none'}"
        )
    inner, outer = map(int, sizes)
    if inner * outer != cp:
        raise InputError(
            f"{option} {inner} {outer} must multiply to the context-parallel size {cp}: change one of them"
        )
    if outer == 1 or inner == 1:
        return {"cp_kind": ContextParallelKind.RING if inner == 1 else ContextParallelKind.ALL_TO_ALL}
    of_size = {kind.inner: kind for kind in ContextParallelKind if kind.is_hierarchical}
    if inner not in of_size:
        arguments.remark(key, f"priced as ring attention: all-to-alls over {inner} ranks are not priced")
    return {"cp_kind": of_size.get(inner, ContextParallelKind.RING)}


def _write_dynamic_cp(file: PlanFile) -> dict[str, Value]:
    """Write the switch, the tokens of a rank, which determine the ranks of a sample, and the loss that it demands."""
    if not file.best.plan.dynamic_cp:
        return {}
    tokens = -(-file.training.seq_len // file.best.plan.cp)
    return {
        "hybrid_context_parallel": True,
        "max_seqlen_per_dp_cp_rank": tokens,
        "calculate_per_token_loss": True,
    }


def _read_dynamic_cp(reading: Reading) -> Fields:
    """Read the switch by its names in releases, since core 0.16, and in the branch dev."""
    arguments, cp = reading.arguments, reading.fields["cp"]
    names = ("hybrid_context_parallel", "dynamic_context_parallel")
    name = next((name for name in names if arguments.flag(name)), None)
    tokens = arguments.optional_count("max_seqlen_per_dp_cp_rank")
    if name is None:
        return {}
    if cp == 1:
        arguments.remark(name, "priced without, as cp is 1")
        return {}
    if (most := -(-reading.seq_len // cp)) != tokens:
        key = "max_seqlen_per_dp_cp_rank" if tokens else name
        arguments.remark(key, f"priced as {most:,} tokens, the longest sample over cp {cp}")
    return {"dynamic_cp": True}


# fmt: off
CONTEXT: tuple[Line, ...] = (
    (CP, Special("cp_comm_type", _write_cp_kind, _read_cp_kind,
                 companions=valued("hierarchical_context_parallel_sizes"))),
    (
        Special("hybrid_context_parallel", _write_dynamic_cp, _read_dynamic_cp, is_switch=True,
                companions=(*valued("max_seqlen_per_dp_cp_rank"),
                        *switches("dynamic_context_parallel", "calculate_per_token_loss"))),
    ),
)
# fmt: on
