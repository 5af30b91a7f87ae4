"""Launch file on a terminal: its plan, compared with the best one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from autoplan.base.units import counted, format_bytes, format_percent, format_seconds, format_tokens
from autoplan.cost.kernels.arithmetic import count_parameters
from autoplan.report.answer import closeness, optimizer_text, training_lines
from autoplan.report.ranking import MIN_OFF, slower
from autoplan.report.terminal import MIN_GAP, Cell, bold, print_lines, print_part, print_table
from autoplan.spec.explanation import AxisChange, CurrentPlan, OptionChange
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.training import TrainingSpec

SHOWN_VALUE = 60  # characters shown of an option's value
LONG_OPTION = 50  # characters of an option beside which a column of 80 has no room for values
MANY = 12  # unread options with the same reason are a table up to this number, a list of names beyond
OPTIONS_TITLE = "options, from today's file to the exported file of the best plan"


def print_launch(
    console: Console,
    headline: str,
    spec: tuple[ModelSpec, TrainingSpec, ParallelPlan],
    *,
    matters: Sequence[tuple[str, str, str]],
    harmless: Sequence[tuple[str, str, str]],
) -> None:
    """Print the plan of a launch file, then its unread options: (option, value, why)."""
    model, training, plan = spec
    print_part(console, headline)
    console.print()
    kernels = f"{training.precision}, {plan.attention} attention{optimizer_text(training)}"
    count, samples = plan.num_microbatches, "sequences" if training.preference is None else "pairs"
    lines: list[tuple[str, Cell]] = [
        ("model", f"{model.name}: {_model_line(model)}"),
        ("training", f"{training.seq_len:,} tokens, {kernels}"),
        *training_lines(model, training),
        ("plan", bold(plan.describe())),
        ("step", f"{plan.global_batch:,} {samples}, {count:,} micro-batch{'es' * (count > 1)} per replica"),
        ("devices", f"{plan.num_devices:,}"),
    ]
    print_lines(console, lines)
    if matters:
        console.print("\nnot read, may cost time or memory")
        shared = _reasons_of_many(why for *_, why in matters)
        few = [(option, _cut(value), why) for option, value, why in matters if why not in shared]
        if few:
            print_table(console, (("option", False), ("value", False), ("why", False)), few, keep=3)
        _print_names(console, [row for row in matters if row[2] in shared])
    if harmless:
        console.print("\nnot read")
        _print_names(console, harmless)


def _reasons_of_many(reasons: Iterable[str]) -> set[str]:
    """Return the reasons that are given for so many options that a table of them would hide the others."""
    return {reason for reason, count in Counter(reasons).items() if count > MANY}


def _print_names(console: Console, rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the names of unread options by reason."""
    for reason in dict.fromkeys(why for *_, why in rows):
        options = ", ".join(dict.fromkeys(option for option, _, why in rows if why == reason))
        print_part(console, f"{options}: {reason}")


def _model_line(model: ModelSpec) -> str:
    """Return the main numbers of a model."""
    heads = f"{model.num_heads} heads"
    if model.mla:
        heads += f", latent attention of rank {model.mla.kv_lora_rank}"
    elif model.kv_heads != model.num_heads:
        heads += f" over {model.kv_heads} of keys and values"
    parts = [
        f"{format_tokens(count_parameters(model))} parameters",
        f"{model.num_layers} layers of {model.hidden_size}",
    ]
    parts.append(heads)
    if model.ffn_size:
        parts.append(f"{'gated ' if model.gated_mlp else ''}MLP of {model.ffn_size}")
    if model.moe:
        parts.append(
            f"{model.moe.num_experts} experts of {model.moe.expert_ffn_size}, {model.moe.experts_per_token} a token"
        )
    if model.num_mtp_layers:
        parts.append(f"{counted(model.num_mtp_layers, 'layer')} of multi-token prediction")
    return ", ".join((*parts, f"vocabulary of {model.vocab_size:,}"))


def print_today(console: Console, today: CurrentPlan, names: Mapping[str, str]) -> None:
    """Print a launch file's rank, gains and changed options; `names` are display names of axes."""
    console.print()
    lines = [("today", f"{today.plan.describe()} ({today.path})")]
    lines += [("" if at else "refused", fault) for at, fault in enumerate(today.broken)]
    if today.priced:
        lines.append(("", _priced(today.priced)))
    if today.gap and today.priced:
        lines.append(("gap", gap_line(today)))
    shared = _reasons_of_many(today.unread.values())
    unread = [f"{option}: {why}" for option, why in today.unread.items() if why not in shared]
    for reason in sorted(shared):
        count = sum(why == reason for why in today.unread.values())
        unread.append(f"{count} options, which autoplan read lists: {reason}")
    lines += [("" if at else "not read", line) for at, line in enumerate(unread)]
    print_lines(console, lines)
    if today.changes:
        console.print()
        _print_changes(console, today, names)
    if today.options:
        console.print()
        _print_options(console, today.options)
    elif today.no_options:
        print_part(console, f"\noptions are not compared: {today.no_options}")


def gap_line(today: CurrentPlan) -> str:
    """Return a sentence on the file's plan relative to the best, and whether the model can distinguish them."""
    gap = today.gap
    assert gap is not None
    behind = gap.ratio - 1.0
    if today.priced and today.priced.verdict == "oom" and behind < 0:
        return f"it does not fit; the best plan that does is {format_percent(1.0 / gap.ratio - 1.0)} slower" + _unless(
            today
        )
    if abs(behind) < MIN_GAP:
        return f"none: no plan is {format_percent(MIN_OFF)} faster" + _unless(today)
    text = f"{slower(behind)} than the best plan, "
    text += closeness(gap.high / gap.ratio, is_close=gap.low <= 1.0 <= gap.high)
    if today.num_faster:
        plural = "" if today.num_faster == 1 else "s"
        text += (
            f"; at least {today.num_faster:,} other choice{plural} of degrees {'is' if not plural else 'are'} faster"
        )
    return text + _unless(today)


def _unless(today: CurrentPlan) -> str:
    """Return the reservation on a verdict if parts of the file were not read."""
    return ", if the parts of the file that were not read do not matter" if today.unread else ""


def _priced(plan: RankedPlan) -> str:
    risk = "" if plan.verdict == "fits" else f", {format_percent(plan.oom_probability)} OOM risk"
    return (
        f"{format_seconds(plan.step_s)} per step ({format_seconds(plan.low_s)} to {format_seconds(plan.high_s)}), "
        f"MFU {format_percent(plan.mfu)}, {format_bytes(plan.memory_bytes)}{risk}"
    )


def _cells(plan: RankedPlan, is_rate: bool) -> tuple[str, str]:
    memory = format_bytes(plan.memory_bytes)
    time = f"{plan.tokens_per_s_per_device:,.0f}" if is_rate else format_seconds(plan.step_s)
    return time, memory if plan.verdict == "fits" else f"{memory} {plan.verdict}"


CHANGE_COLUMNS = (("change", False), ("alone", True), ("memory", True), ("in this order", True), ("memory", True))


def compares_rates(today: CurrentPlan) -> bool:
    """Return whether changes are compared by rate, as steps of different batches are not comparable."""
    return any(change.axis == "global_batch" for change in today.changes)


def change_rows(today: CurrentPlan, names: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return changes in path order: the gain of each alone, and the step after it and those before."""
    changes, is_rate = {change.axis: change for change in today.changes}, compares_rates(today)
    if not today.walk:
        return [(*_alone(change, names, is_rate), "", "") for change in today.changes]
    rows: list[tuple[str, ...]] = []
    for step in today.walk:
        for axis in step.axes:
            after = _cells(step.plan, is_rate) if axis == step.axes[-1] else ("with the next", "")
            rows.append((*_alone(changes[axis], names, is_rate), *after))
    return rows


def _alone(change: AxisChange, names: Mapping[str, str], is_rate: bool) -> tuple[str, str, str]:
    text = f"{names.get(change.axis, change.axis)} {change.before} -> {change.after}"
    return (text, *(_cells(change.alone, is_rate) if change.alone else ("not alone", "")))


def not_alone(today: CurrentPlan, names: Mapping[str, str]) -> list[str]:
    """Return reasons why changes are not possible without others; why today's plan is refused is said of the plan."""
    by_reason: dict[str, list[str]] = {}
    for change in today.changes:
        if change.why_not and change.why_not not in today.broken:
            by_reason.setdefault(change.why_not, []).append(names.get(change.axis, change.axis))
    return [f"{', '.join(axes)} not alone: {reason}" for reason, axes in by_reason.items()]


def option_rows(options: Iterable[OptionChange]) -> list[tuple[str, str]]:
    """Return options of a launch file with their changes."""
    return [(option.option, _option_change(option)) for option in options]


def _print_changes(console: Console, today: CurrentPlan, names: Mapping[str, str]) -> None:
    print_table(console, CHANGE_COLUMNS, change_rows(today, names), keep=5)
    if compares_rates(today):
        console.print("(tokens/s per device)")
    for reason in not_alone(today, names):
        print_part(console, reason)


def _print_options(console: Console, options: Sequence[OptionChange]) -> None:
    print_part(console, OPTIONS_TITLE)
    rows = option_rows(options)
    if max(len(option) for option, _ in rows) > LONG_OPTION:
        for option, change in rows:
            print_part(console, f"{option}: {change}")
    else:
        print_lines(console, rows)


def _option_change(option: OptionChange) -> str:
    if option.before is None:
        return f"add {_cut(option.after or '')}".rstrip()
    if option.after is None:
        return f"drop {_cut(option.before)}".rstrip()
    return f"{_cut(option.before) or 'set'} -> {_cut(option.after) or 'set'}"


def _cut(value: str) -> str:
    shown = "".join(character if character.isprintable() else "?" for character in value)
    return shown if len(shown) <= SHOWN_VALUE else f"{shown[: SHOWN_VALUE - 3]}..."
