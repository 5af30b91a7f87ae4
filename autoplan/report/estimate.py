"""Estimate of a plan on a terminal: time and memory by term and by stage."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from autoplan.base.units import GIB, format_bytes, format_percent, format_seconds
from autoplan.report.answer import detail_lines, print_answer
from autoplan.report.terminal import (
    MAX_MEMORY_COLUMNS,
    MEMORY_NAMES,
    MEMORY_SUMS,
    MIN_SHOWN_S,
    Cell,
    bold,
    equal_stages,
    number_ranges,
    print_lines,
    print_table,
    print_terms,
    signed,
    summed_memory,
)
from autoplan.spec.estimate import PlacedStage, StageCost, placed
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.ranks import HostRanks

SHOWN_HOSTS = 64
MAX_STAGES = 16  # rows in the table of stages; the first and last ones are kept


def print_estimate(console: Console, file: PlanFile) -> None:
    """Print time and memory of one plan: terms of the step, then every pipeline rank."""
    print_answer(console, file)
    console.print()
    print_lines(console, detail_lines(file))
    console.print()
    print_terms(console, file.best, has_sum=True)
    console.print()
    _print_stage_times(console, file.stages)
    console.print("\nms per micro-batch by stage")
    _print_stage_terms(console, file.stages)
    console.print("\nmemory of each stage in GiB")
    _print_stage_memory(console, file.stages)
    if file.hosts:
        console.print("\nranks of each node")
        _print_hosts(console, file.hosts)


def _print_hosts(console: Console, hosts: tuple[HostRanks, ...]) -> None:
    columns = (("ranks", True), ("node", False), ("below", False), ("stages", False), ("replicas", False))
    rows = [
        (
            f"{host.first_rank}-{host.first_rank + host.num_ranks - 1}",
            host.node,
            " < ".join((*host.switches, *([host.site] if host.site else []))),
            number_ranges(host.stages),
            number_ranges(host.replicas),
        )
        for host in hosts[:SHOWN_HOSTS]
    ]
    print_table(console, columns, rows)
    if len(hosts) > SHOWN_HOSTS:
        console.print(f"({len(hosts) - SHOWN_HOSTS} more nodes: see --json)")


def _print_stages(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], least_header: int | None = None
) -> None:
    """Print one row per stage; of many only the first and last ones."""
    if len(rows) > MAX_STAGES:
        rows = [*rows[: MAX_STAGES // 2], ("...",), *rows[-MAX_STAGES // 2 :]]
    print_table(console, [(name, True) for name in columns], rows, least_header=least_header)


def _print_stage_times(console: Console, stages: tuple[StageCost, ...]) -> None:
    rows = [
        (
            str(stage.stage),
            str(stage.layers),
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
            format_bytes(stage.memory_bytes),
        )
        for stage in stages
    ]
    _print_stages(console, ("stage", "layers", "forward", "backward", "memory"), rows)


def _print_stage_terms(console: Console, stages: tuple[StageCost, ...]) -> None:
    names = [name for name in stages[0].terms_s if any(stage.terms_s[name] >= MIN_SHOWN_S for stage in stages)]
    rows = [(str(stage.stage), *(f"{stage.terms_s[name] * 1e3:,.1f}" for name in names)) for stage in stages]
    short = [name.replace("_communication", " traffic").replace("_", " ") for name in names]
    _print_stages(console, ("stage", *short), rows, least_header=5)


def _print_stage_memory(console: Console, stages: tuple[StageCost, ...]) -> None:
    rows = [
        (str(stage.stage), *(f"{summed_memory(stage, names) / GIB:,.1f}" for names in MEMORY_SUMS.values()))
        for stage in stages
    ]
    _print_stages(console, ("stage", *MEMORY_SUMS), rows, least_header=5)


def print_memory(console: Console, file: PlanFile) -> None:
    """Print the memory of one plan, stage by stage, and how much each change would free."""
    print_answer(console, file)
    print_waterfall(console, placed(file.stages, file.best.plan.num_microbatches, file.capacity_bytes))
    console.print()
    _print_knobs(console, file)


def print_waterfall(console: Console, stages: Sequence[PlacedStage]) -> None:
    """Print the memory of stages: one row per term and one column per stage; equal stages share a column."""
    console.print("\nmemory in GiB, stage by stage")
    groups = equal_stages(stages, lambda cost: cost.memory_terms_bytes.values())
    worst = max(groups, key=lambda group: group[0].fill)
    if len(groups) > MAX_MEMORY_COLUMNS:
        shown = {0, len(groups) - 1, groups.index(worst), *range(MAX_MEMORY_COLUMNS - 2)}
        groups = [group for at, group in enumerate(groups) if at in shown]
    firsts = [group[0] for group in groups]
    terms = [stage.cost.memory_terms_bytes for stage in firsts]
    rows: list[tuple[Cell, ...]] = [
        (MEMORY_NAMES[name], *(f"{terms_bytes[name] / GIB:,.2f}" for terms_bytes in terms))
        for name in terms[0]
        if any(terms_bytes[name] for terms_bytes in terms)
    ]
    rows.append((bold("all"), *(bold(f"{stage.cost.memory_bytes / GIB:,.2f}") for stage in firsts)))
    rows.append(("free", *(f"{(stage.place.capacity_bytes - stage.cost.memory_bytes) / GIB:,.2f}" for stage in firsts)))
    rows.append(("risk", *(format_percent(stage.cost.oom_probability) for stage in firsts)))
    if any(stage.place.part for stage in firsts):
        rows.append(("on", *(stage.place.part for stage in firsts)))
    print_table(console, [("stage", False), *((_numbers(group), True) for group in groups)], rows)


def _numbers(stages: list[PlacedStage]) -> str:
    first, last = stages[0].place, stages[-1].place
    if first == last:
        return first.name
    is_consecutive = last.stage - first.stage == len(stages) - 1
    return f"{first.name}-{last.name}" if is_consecutive else f"{first.name}..{last.name}"


def _print_knobs(console: Console, file: PlanFile) -> None:
    if not file.memory_knobs:
        console.print("no single change of the plan frees memory")
        return
    rows = []
    for knob in file.memory_knobs:
        step = signed(knob.plan.step_s / file.best.step_s - 1, format_percent)
        needed = format_bytes(knob.plan.memory_bytes)
        rows.append((knob.change, format_bytes(knob.freed_bytes), needed, step, knob.plan.verdict))
    columns = [("changes that free memory", False), ("frees", True), ("leaves", True), ("step", True), ("then", False)]
    print_table(console, columns, rows, keep=3)
