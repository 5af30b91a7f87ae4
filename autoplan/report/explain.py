"""Explanation of a plan on a terminal: breakdown of the step, binding limits, faster plans, plans that lost."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from autoplan.base.units import format_bytes, format_percent, format_seconds
from autoplan.report.answer import closeness, print_answer
from autoplan.report.mixed_search import describe, print_mixed_answer, waiting
from autoplan.report.ranking import reasons, why_lost
from autoplan.report.terminal import (
    END_OF_STEP,
    MAX_MEMORY_COLUMNS,
    MIN_GAP,
    MIN_SHOWN_S,
    Cell,
    bold,
    equal_stages,
    number_ranges,
    print_lines,
    print_next_steps,
    print_table,
    signed,
    term_name,
)
from autoplan.spec.estimate import PlacedStage, placed
from autoplan.spec.explanation import AxisChange, Explanation, MixedExplanation, Neighbour, Versus
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.search_result import RankedPlan
from autoplan.spec.terms import LAST_WAITS

SHOWN_CHANGES = 12
UNSPOKEN = {"layers", "rank_order", "nodes"}  # axes that --versus does not support
Names = Mapping[str, str]


def print_explanation(console: Console, file: PlanFile, explanation: Explanation, names: Names, path: str) -> None:
    """Print an explanation; `names` are display names of axes that differ from the internal ones."""
    print_answer(console, file)
    console.print()
    stages = placed(explanation.stages, explanation.plan.plan.num_microbatches, explanation.capacity_bytes)
    _print_terms(console, explanation.plan, stages)
    console.print()
    lines = [("" if at else "binds", reason) for at, reason in enumerate(explanation.binds)]
    for at, near in enumerate(explanation.better):
        lines.append(("" if at else "faster", f"{_changes(near, names)}: {_needs(near, explanation)}"))
    print_lines(console, lines)
    if explanation.versus:
        console.print()
        _print_versus(console, explanation.plan, explanation.versus, names)
    else:
        console.print()
        _print_changes(console, explanation, names)
        if explanation.alternatives:
            lost = [(plan.plan.describe(), plan) for plan in explanation.alternatives]
            console.print()
            _print_lost(console, explanation.plan, lost)
    if explanation.versus:
        return
    possible = (_versus_flag(near) for near in _effective_changes(explanation) if near.is_possible)
    if changes := next(filter(None, possible), ""):
        print_next_steps(console, ("next", f"autoplan explain {shlex.quote(path)} --versus {changes}"))


def print_mixed_explanation(console: Console, file: MixedPlanFile, explanation: MixedExplanation) -> None:
    """Print the explanation of a plan of a mixed cluster, with plans one change away."""
    names = file.cluster.part_names
    print_mixed_answer(console, file)
    console.print()
    _print_terms(console, explanation.plan, explanation.stages)
    console.print()
    print_lines(console, (*waiting(explanation.plan, explanation.stages), *_binding(explanation, names)))
    console.print()
    _print_mixed_changes(console, explanation, names)
    if explanation.alternatives:
        console.print()
        _print_lost(
            console, explanation.plan, [(describe(plan.plan, names), plan) for plan in explanation.alternatives]
        )


def _print_terms(console: Console, best: RankedPlan | MixedCost, stages: Sequence[PlacedStage]) -> None:
    """Print one row per term: of the step, and of the stages, with equal stages in one column."""
    groups = equal_stages(stages, lambda cost: (*cost.terms_s.values(), cost.memory_bytes))[:MAX_MEMORY_COLUMNS]
    firsts = [group[0] for group in groups]
    after = (*END_OF_STEP, *LAST_WAITS)
    pipeline_s = sum(value for name, value in best.terms_s.items() if name not in after)
    rows: list[tuple[Cell, ...]] = []
    for name, value in best.terms_s.items():
        of_stages = [stage.place.num_microbatches * stage.cost.terms_s.get(name, 0.0) for stage in firsts]
        if max(value, *of_stages) < MIN_SHOWN_S:
            continue
        cells = [_seconds(seconds) for seconds in of_stages]
        rows.append((term_name(name), format_seconds(value), format_percent(value / best.step_s), *cells))
    if len(stages) > 1:
        waits = (format_seconds(max(pipeline_s - stage.busy_s, 0.0)) for stage in firsts)
        rows.append(("(waits for others)", "", "", *waits))
    rows.append((bold("all"), bold(format_seconds(best.step_s)), format_percent(1.0), *[""] * len(groups)))
    rows.append(("memory", "", "", *(format_bytes(stage.cost.memory_bytes) for stage in firsts)))
    free = (format_bytes(stage.place.capacity_bytes - stage.cost.memory_bytes) for stage in firsts)
    rows.append(("free", "", "", *free))
    if any(stage.place.part for stage in firsts):
        rows.append(("on", "", "", *(stage.place.part for stage in firsts)))
    heads = [f"stage {group[0].place.kind}{number_ranges(stage.place.stage for stage in group)}" for group in groups]
    columns = [("time of a step", False), ("", True), ("share", True), *((head, True) for head in heads)]
    print_table(console, columns, rows, keep=3)


def _changes(near: Neighbour, names: Names) -> str:
    return ", ".join(f"{names.get(axis, axis)} {before} -> {after}" for axis, before, after in near.changes)


def _faster(ratio: float) -> str:
    if abs(ratio - 1.0) < MIN_GAP:
        return "level"
    return f"{format_percent(1.0 / ratio - 1.0)} faster" if ratio < 1 else f"{format_percent(ratio - 1.0)} slower"


def _needs(near: Neighbour, explanation: Explanation) -> str:
    """Describe the speed-up of a neighbour, and what it lacks."""
    parts = [f"{format_seconds(near.plan.step_s)}, {_faster(near.ratio)}"]
    if near.plan.verdict != "fits":
        parts.append(_memory_needed(near))
    parts += [f"refused: {rule}" for rule in near.broken[:1]]
    if near.plan.plan.global_batch != explanation.plan.plan.global_batch:
        parts.append(f"works with a global batch of {near.plan.plan.global_batch:,}")
    if near.is_possible:
        parts.append("possible, but excluded from the search")
    return "; ".join(parts)


def _versus_flag(near: Neighbour) -> str:
    """Return the changes in --versus notation; blank if one has none."""
    plan, axes = near.plan.plan, [axis for axis, _, _ in near.changes]
    if not UNSPOKEN.isdisjoint(axes):
        return ""
    values = {axis: value for axis, _, value in near.changes}
    if "etp" in values:
        values["etp"] = str(plan.etp)
    if "sharding" in values:
        values |= {"sharding": plan.sharding, **({"dp_shard": str(plan.dp_shard)} if plan.dp_replicate > 1 else {})}
    if "schedule" in values:
        values |= {"schedule": plan.schedule, "vp": str(plan.vp)}
    if "recompute" in values and plan.recompute_num_layers is not None:
        values["recompute"] = f"full:{plan.recompute_num_layers}"
    return ",".join(f"{axis}={value}" for axis, value in values.items())


def _memory_needed(near: Neighbour) -> str:
    where = "of a node's host memory" if near.is_host else f"on stage {near.stage}"
    needed = f"needs {format_bytes(near.needed_bytes)} of {format_bytes(near.capacity_bytes)} {where}"
    return needed if near.plan.verdict == "oom" else f"{needed}, {format_percent(near.plan.oom_probability)} risk"


def _effective_changes(explanation: Explanation) -> list[Neighbour]:
    """Return changes with an effect, without those that leave the step unchanged or are both slower and impossible."""
    return [
        near
        for near in explanation.changes
        if near.ratio <= 1 - MIN_GAP or (near.ratio >= 1 + MIN_GAP and not near.broken)
    ]


def _print_changes(console: Console, explanation: Explanation, names: Names) -> None:
    rows = []
    for near in _effective_changes(explanation)[:SHOWN_CHANGES]:
        why = reasons(near.plan, explanation.plan) if near.ratio >= 1 + MIN_GAP else ""
        if near.plan.verdict != "fits":
            why = f"{_memory_needed(near)}{'; ' * bool(why)}{why}"
        if near.broken:
            why = f"refused: {near.broken[0]}"
        rows.append((_changes(near, names), format_seconds(near.plan.step_s), why or _faster(near.ratio)))
    print_table(console, (("one change", False), ("step", True), ("why not", False)), rows, keep=3)


def _binding(explanation: MixedExplanation, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the missing memory of the faster plan that needs the least."""
    faster = [near.plan for near in explanation.changes if near.ratio < 1 - MIN_GAP and near.plan.verdict != "fits"]
    if faster:
        yield "binds", f"memory: a faster plan {_needed(min(faster, key=lambda plan: plan.oom_z), names)}"


def _needed(plan: MixedCost, names: Sequence[str]) -> str:
    """Return the memory of the stage nearest to the capacity of its devices."""
    stages = [stage for kind in plan.kinds for stage in kind.stages]
    worst = max(stages, key=lambda stage: stage.memory_bytes / stage.capacity_bytes)
    return f"needs {format_bytes(worst.memory_bytes)} of {format_bytes(worst.capacity_bytes)} on {names[worst.part]}"


def _print_mixed_changes(console: Console, explanation: MixedExplanation, names: Sequence[str]) -> None:
    rows = []
    telling = [near for near in explanation.changes if abs(near.ratio - 1) >= MIN_GAP]
    for near in telling[:SHOWN_CHANGES]:
        why = [_needed(near.plan, names)] if near.plan.verdict != "fits" else []
        why.append(reasons(near.plan, explanation.plan) if near.ratio > 1 else _faster(near.ratio))
        axis, before, after = near.change
        rows.append((f"{axis} {before} -> {after}", format_seconds(near.plan.step_s), "; ".join(why)))
    print_table(console, (("one change", False), ("step", True), ("why not", False)), rows, keep=3)


def _print_lost(
    console: Console, best: RankedPlan | MixedCost, lost: Sequence[tuple[str, RankedPlan | MixedCost]]
) -> None:
    """Print other plans by their descriptions."""
    console.print("why the next best lost")
    rows = [(words, format_seconds(plan.step_s), why_lost(plan, best)) for words, plan in lost]
    print_table(console, (("plan", False), ("step", True), ("why", False)), rows, keep=3)


def _print_versus(console: Console, best: RankedPlan, versus: Versus, names: Names) -> None:
    """Print both plans side by side, term by term, scaled to the same number of sequences."""
    scale = best.plan.global_batch / versus.plan.plan.global_batch
    lines: list[tuple[str, Cell]] = [("versus", bold(versus.plan.plan.describe()))]
    apart = closeness(versus.gap.high / versus.gap.ratio, is_close=versus.gap.low <= 1.0 <= versus.gap.high)
    lines.append(("", f"{_faster(versus.gap.ratio)}, {apart}"))
    if versus.plan.verdict != "fits":
        worst = max(versus.stages, key=lambda stage: stage.memory_bytes)
        capacity = format_bytes(versus.plan.memory_bytes + versus.plan.memory_headroom_bytes)
        risk = format_percent(versus.plan.oom_probability)
        needed = f"{format_bytes(worst.memory_bytes)} of {capacity} on stage {worst.stage}"
        lines.append(("", f"needs {needed}, {risk} risk"))
    lines += [("refused", fault) for fault in versus.broken]
    if scale != 1.0:
        lines.append(("", f"times below are for {best.plan.global_batch:,} sequences in both plans"))
    print_lines(console, lines)
    console.print()
    rows: list[tuple[Cell, ...]] = []
    for name, value in best.terms_s.items():
        other_s = scale * versus.plan.terms_s.get(name, 0.0)
        if max(value, other_s) >= MIN_SHOWN_S:
            rows.append((term_name(name), _seconds(value), _seconds(other_s), _signed(other_s - value)))
    other_s = scale * versus.plan.step_s
    total = (format_seconds(best.step_s), format_seconds(other_s), _signed(other_s - best.step_s))
    rows.append((bold("all"), *map(bold, total)))
    more = versus.plan.memory_bytes - best.memory_bytes
    memory = (format_bytes(best.memory_bytes), format_bytes(versus.plan.memory_bytes))
    rows.append(("memory", *memory, signed(more, format_bytes)))
    print_table(console, (("time of a step", False), ("this", True), ("versus", True), ("", True)), rows, keep=4)
    if len(versus.changes) > 1:
        console.print()
        _print_alone(console, best, versus.changes, names)


def _print_alone(console: Console, best: RankedPlan, changes: Sequence[AxisChange], names: Names) -> None:
    rows = []
    for change in changes:
        text = f"{names.get(change.axis, change.axis)} {change.before} -> {change.after}"
        if change.alone is None:
            rows.append((text, "", f"not alone: {change.why_not}"))
        else:
            fits = (
                ""
                if change.alone.verdict == "fits"
                else f"{change.alone.verdict}, {format_bytes(change.alone.memory_bytes)}"
            )
            scale = best.plan.global_batch / change.alone.plan.global_batch
            rows.append((text, _signed(scale * change.alone.step_s - best.step_s), fits))
    print_table(console, (("each change alone", False), ("", True), ("", False)), rows, keep=3)


def _seconds(value: float) -> str:
    return format_seconds(value) if value >= MIN_SHOWN_S else ""


def _signed(seconds: float) -> str:
    return signed(seconds, format_seconds) if abs(seconds) >= MIN_SHOWN_S else ""
