"""Flags that change the limits of a search: --fix, --max, --forbid and --allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autoplan.base.errors import InputError
from autoplan.base.names import close_names, suggestion
from autoplan.frameworks.common.rules import Rulebook
from autoplan.search.limits import COUNTS, Limits
from autoplan.spec.axes import AXES, AXIS, SEARCHED, shown
from autoplan.spec.axis import Axis, Kind, Value
from autoplan.spec.enums import Recompute
from autoplan.spec.plan import parse_recompute

# Extents: how far layers, recomputation, sharding and offload may go beyond the plain choices of their axes.
EXTENTS = ("partial_recompute", "uneven_stages", "partial_sharding", "partial_offload")

# Counts for which --forbid accepts any value; the parts of replicas that share states are an extent.
FORBIDDEN_COUNTS = tuple(name for name in COUNTS if name not in ("dp_replicate", "dp_shard"))

# Arguments of --forbid: an extent, an axis that then keeps its plain value, or one value of an axis with others.
FORBIDDEN = (
    *EXTENTS,
    *FORBIDDEN_COUNTS,
    *(axis.name for axis in SEARCHED),
    *(f"{axis.name}={shown(value)}" for axis in SEARCHED for value in axis.searched),
    *("recompute", *(f"recompute={word}" for word in Recompute)),
)

# Arguments of --allow: an axis whose values change the numerics of training, or one of these values.
ALLOWED = tuple(
    choice
    for axis in SEARCHED
    if axis.exact is not None
    for choice in (axis.name, *(f"{axis.name}={shown(value)}" for value in axis.searched))
)

# Names that a user may try to fix that are not axes of a search, and where they are set instead.
ELSEWHERE = {axis.name: axis.elsewhere for axis in AXES if axis.elsewhere} | {
    "framework": "use --framework",
    "seq_len": "use --seq-len",
    "optimizer": "use --optimizer",
    "nodes": "use --nodes, or the size in --cluster",
}

# Common names of axes, and what to write instead.
CALLED_OTHERWISE = {
    **dict.fromkeys(("tensor", "tensor_parallel", "tensor_model_parallel_size"), "write tp"),
    **dict.fromkeys(("pipeline", "pipeline_parallel", "pipeline_model_parallel_size"), "write pp"),
    **dict.fromkeys(("context_parallel", "context_parallel_size"), "write cp"),
    **dict.fromkeys(("expert_parallel", "expert_model_parallel_size"), "write ep"),
    **dict.fromkeys(("vpp", "interleaving", "virtual_pipeline"), "write vp"),
    **dict.fromkeys(("fsdp", "zero", "zero_stage"), "write sharding=zero3, zero2, zero1 or none"),
    **dict.fromkeys(("mb", "mbs", "micro_batch_size", "batch_size"), "write micro_batch"),
    **dict.fromkeys(
        ("gas", "grad_accum", "gradient_accumulation_steps"), "it follows from the batch: use --fix micro_batch"
    ),
    **dict.fromkeys(("ac", "activation_checkpointing", "gradient_checkpointing", "checkpointing"), "write recompute"),
    **dict.fromkeys(("ulysses", "ring"), "write cp with cp_kind=all_to_all or cp_kind=ring"),
    **dict.fromkeys(("gpus", "devices", "world_size"), "use --cluster"),
}


def _pairs(typed: Iterable[str], option: str) -> tuple[tuple[str, str], ...]:
    """Parse (axis, value) of every AXIS=VALUE, each axis once."""
    pairs: dict[str, str] = {}
    for text in typed:
        axis, sign, value = text.partition("=")
        axis = axis.strip().lower().replace("-", "_")
        if not sign or not axis or not value.strip():
            raise InputError(f"{option} {text!r}: write AXIS=VALUE, such as {option} tp=8")
        if "=" in value:
            each = " ".join(f"{option} {pair.strip()}" for pair in text.split(","))
            raise InputError(f"{option} {text!r} names several axes: write {each}")
        if axis in pairs:
            raise InputError(f"{option} {axis} is given twice: leave one of them out")
        pairs[axis] = value.strip().lower()
    return tuple(pairs.items())


def _not_an_axis(name: str, names: tuple[str, ...]) -> str:
    if name in ELSEWHERE:
        return f"not an axis of the search: {ELSEWHERE[name]}"
    if name in CALLED_OTHERWISE:
        return f"unknown axis: {CALLED_OTHERWISE[name]}"
    return f"unknown axis; {suggestion(name, names)}"


def _fixed(limits: Limits, name: str, text: str) -> Limits:
    if name not in AXIS or name in ELSEWHERE:
        names = tuple(axis.name for axis in AXES if not axis.elsewhere)
        raise InputError(f"--fix {name}: {_not_an_axis(name, names)}")
    if name == "recompute":
        parse_recompute(text)
        return replace(limits, recomputes=(text,))
    value = AXIS[name].parse(text, "--fix")
    if AXIS[name].kind is not Kind.COUNT:
        return limits.where(**{name: (value,)})  # type: ignore[arg-type]
    # A fixed value replaces the default bound.
    upper_bounds = tuple((axis, bound) for axis, bound in limits.upper_bounds if axis != name)
    return replace(limits, fixed=(*limits.fixed, (name, int(value))), upper_bounds=upper_bounds)


def _closest(typed: str, choices: Sequence[str]) -> str:
    """Return suggestions: choices with a similar spelling, or those of the named axis."""
    axis = typed.partition("=")[0].replace("-", "_")
    of_axis = [choice for choice in choices if choice.startswith(f"{axis}=")]
    if of_axis:
        values = [choice.partition("=")[2] for choice in of_axis]
        close = close_names(typed.partition("=")[2], values, most=1)
        return f"did you mean {axis}={close[0]}?" if close else f"of {axis} there are {', '.join(of_axis)}"
    names = ", ".join(choice for choice in choices if "=" not in choice)
    return suggestion(typed, choices, f"known: {names}, or a value of one of these")


def plain_of(axis: Axis, values: tuple[Value, ...]) -> Value:
    """Return the value that remains if an axis is forbidden."""
    default = False if axis.kind is Kind.FLAG else axis.default
    return next((value for value in values if value == default), values[0])


def _forbidding(limits: Limits, typed: str) -> Limits:
    name, sign, value = typed.strip().lower().partition("=")
    name = name.replace("-", "_")
    if name in FORBIDDEN_COUNTS:
        return _without_count(limits, typed, name, value if sign else None)
    if sign and name in AXIS and AXIS[name].kind is Kind.FLAG:
        value = shown(AXIS[name].parse(value, "--forbid"))
    name += f"={value}" if sign else ""
    choice = next((word for word in FORBIDDEN if word.replace("_", "-") == name.replace("_", "-")), None)
    if choice is None:
        axis, why = name.partition("=")[0], f"unknown; {_closest(name, FORBIDDEN)}"
        raise InputError(f"--forbid {typed}: {_not_an_axis(axis, ()) if axis in ELSEWHERE else why}")
    if choice == "uneven_stages":
        return replace(limits, fewer_at_ends=1)
    if choice == "partial_sharding":
        return replace(limits, shards_any_part=False)
    if choice == "partial_offload":
        return replace(limits, offload_percents=(100,))
    if choice == "partial_recompute":
        return _recomputing(limits, typed, [text for text in limits.recomputes if text in tuple(Recompute)])
    axis, _, word = choice.partition("=")
    if axis == "recompute":
        kinds = set(Recompute) - {word} if word else {Recompute.NONE}
        of_kinds = (text for text in limits.recomputes if parse_recompute(text)["recompute"] in kinds)
        return _recomputing(limits, typed, of_kinds)
    values = limits.of(axis)
    plain = AXIS[axis].default if len(values) == 1 else plain_of(AXIS[axis], values)
    allowed = [value for value in values if (shown(value) != word if word else value == plain)]
    if not allowed:
        raise InputError(f"--forbid {typed}: no other value of {axis} is left: leave it out")
    return limits.where(**{axis: allowed})


def _without_count(limits: Limits, typed: str, axis: str, text: str | None) -> Limits:
    """Return `limits` without one value of a count, or with the count limited to 1."""
    value = None if text is None else int(AXIS[axis].parse(text, "--forbid"))
    fixed = next((fixed for name, fixed in limits.fixed if name == axis), None)
    bound = next((bound for name, bound in limits.upper_bounds if name == axis), None)
    is_empty = fixed not in (None, 1) if value is None else value == fixed or value == bound == 1
    if is_empty:
        raise InputError(f"--forbid {typed}: no other value of {axis} is left: leave it out")
    if value is not None:
        return replace(limits, forbidden=(*limits.forbidden, (axis, value)))
    return replace(
        limits, upper_bounds=(*((name, bound) for name, bound in limits.upper_bounds if name != axis), (axis, 1))
    )


def _recomputing(limits: Limits, typed: str, recomputes: Iterable[str]) -> Limits:
    allowed = tuple(recomputes)
    if not allowed:
        raise InputError(f"--forbid {typed}: no other value of recompute is left: leave it out")
    return replace(limits, recomputes=allowed)


def _allowing(limits: Limits, typed: str, offered: Callable[[Axis, Value], bool]) -> Limits:
    """Return `limits` extended by values of an axis that change the numerics of training."""
    name, sign, value = typed.strip().lower().replace("-", "_").partition("=")
    axis = AXIS.get(name)
    if axis is None or axis.exact is None or f"{name}{sign}{value}" not in ALLOWED:
        raise InputError(f"--allow {typed}: unknown; {_closest(typed, ALLOWED)}")
    added = [axis.parse(value, "--allow")] if value else [word for word in axis.searched if offered(axis, word)]
    values_before = limits.of(name)
    values = [word for word in axis.searched if word in values_before or word in added]
    # The plain value comes first, unless the values are ordered by need.
    return limits.where(
        **{name: values if axis.is_monotone else sorted(values, key=lambda word: word != values_before[0])}
    )


def _is_other_value(allowed: str, axis: str, limits: Limits) -> bool:
    """Return whether an allowed choice is an axis value outside of the limits."""
    name, _, value = allowed.strip().lower().replace("-", "_").partition("=")
    return name == axis and bool(value) and AXIS[name].parse(value, "--allow") not in limits.of(name)


def with_flags(
    limits: Limits,
    *,
    fix: Iterable[str],
    at_most: Iterable[str],
    forbid: Iterable[str],
    allow: Iterable[str] = (),
    offered: Callable[[Axis, Value], bool] = lambda axis, value: True,
) -> Limits:
    """`limits` with the user's flags; `offered` says whether the framework has a value of an axis."""
    allowed = tuple(allow)
    for text in allowed:
        limits = _allowing(limits, text, offered)
    bounds: dict[str, int] = {}
    for axis, text in _pairs(at_most, "--max"):
        if axis not in COUNTS:
            raise InputError(f"--max {axis}: {_not_an_axis(axis, COUNTS)}")
        bounds[axis] = int(AXIS[axis].parse(text, "--max"))
    unchanged = tuple((name, bound) for name, bound in limits.upper_bounds if name not in bounds)
    limits = replace(limits, upper_bounds=(*unchanged, *bounds.items()))
    fixes = _pairs(fix, "--fix")
    for axis, text in fixes:
        limits = _fixed(limits, axis, text)
        if excluded := [choice for choice in allowed if _is_other_value(choice, axis, limits)]:
            raise InputError(f"--allow {excluded[0]} and --fix {axis}={text}: leave one of them out")
    for axis, count in limits.fixed:
        if count > bounds.get(axis, count):
            raise InputError(f"--fix {axis}={count} is above --max {axis}={bounds[axis]}: leave one of them out")
    for text in forbid:
        limits = _forbidding(limits, text)
    return limits


def check_words(name: str, book: Rulebook, limits: Limits, unasked: Limits) -> None:
    """Raise InputError for limits with a choice that the framework `name` lacks, beyond the `unasked` defaults.

    The placeholder value of an option without effect, such as fp8 scales in bf16, is not checked.
    """
    for axis, values in limits.values:
        row = AXIS[axis]
        words = [word for word in book.words(axis) if row.exact is None or book.offers(row, row.word(word))]
        accepted = words if row.kind is Kind.WORD else values
        for value in values:
            if value not in accepted and value not in unasked.of(axis):
                raise InputError(f"{name} has no {axis} {value}: it has {', '.join(map(shown, accepted))}")
