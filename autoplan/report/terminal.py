"""Search result on a terminal: the answer, then the table, then why and how sure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import NormalDist
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autoplan.base.units import GIB, format_bytes, format_flops, format_percent, format_seconds
from autoplan.cost.estimate import NORMAL_90
from autoplan.spec.estimate import PlacedStage, StageCost, datasheet_peak, placed
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.plan import chunk_layers
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.ranks import HostRanks
from autoplan.spec.search_result import Certificate, Confidence, ObviousPlan, RankedPlan
from autoplan.spec.timing import Provenance

SHOWN_PLANS = 10
SHOWN_REASONS = 3
LEAST_REASON = 0.02  # of the largest
LEAST_GAP = 1e-6  # of two steps that are not called level
LEAST_OFF = 0.001  # less would read as 0.0 %
SHOWN_FLIPS = 3
SHOWN_SWITCHES = 8
SHOWN_HOSTS = 64
MOST_STAGES = 16  # rows of the table of stages; the first and last ones stay
LEAST_TEXT = 16  # columns that a cell of words gets before columns of numbers are left out
LEAST_SHOWN_S = 5e-8  # less would read as 0.0 us
END_OF_STEP = ("data_parallel_reduce", "optimizer", "parameter_gather", "overhead")
WAITS = ("pipeline_bubble", "pipeline_send", "stragglers")
LEAST_SHOWN_SHARE = 0.0005  # less would read as 0.0 %
SHOWN_HOST_SHARE = 0.5  # of a node's memory; less is not worth a line unless the plan offloads
MOST_MEMORY_COLUMNS = 8
MEMORY_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "head and loss",
    "transients": "backward transients",
    "wgrad_buffers": "weight-gradient buffers",
    "gathered": "gathered parameters, buckets",
    "update": "more for the optimizer's step",
    "fragmentation": "fragmentation",
    "cached": "cached blocks",
    "communicators": "communication buffers",
    "context": "context and workspaces",
}
MEMORY_SUMS: dict[str, tuple[str, ...]] = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "logits": ("logits",),
    "buffers": ("transients", "wgrad_buffers", "gathered", "update"),
    "outside": ("fragmentation", "cached", "communicators", "context"),
}
TERM_NAMES = {
    "gemm": "matrix products",
    "attention": "attention core",
    "memory_bound": "memory-bound kernels",
    "recompute": "recomputation",
    "tp_communication": "tensor-parallel traffic",
    "cp_communication": "context-parallel traffic",
    "ep_communication": "expert traffic",
    "fsdp_communication": "parameter gathers",
    "launch": "kernel launches",
    "head": "head and loss",
    "pipeline_bubble": "pipeline bubble",
    "pipeline_send": "pipeline messages",
    "data_parallel_reduce": "gradient reduction",
    "optimizer": "optimizer",
    "parameter_gather": "parameter gather",
    "overhead": "fixed overhead",
    "stragglers": "waiting for the slowest rank",
    # sums
    "work": "work of the busiest stage",
    "end_of_step": "time after the last backward pass",
}


def make_console(stream: TextIO | None = None) -> Console:
    """A console that is plain where `stream` (stdout) is no terminal, and obeys NO_COLOR and COLUMNS."""
    return Console(file=stream or sys.stdout, highlight=False, soft_wrap=False, emoji=False)


def print_part(console: Console, part: Table | Panel | str) -> None:
    """Print a part; into a file or pipe without the blanks that fill its lines."""
    if console.is_terminal:
        console.print(part)
        return
    with console.capture() as captured:
        console.print(part)
    lines = (line.rstrip() for line in captured.get().splitlines())
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def term_name(name: str) -> str:
    """Name of a term of an estimate on screen."""
    return TERM_NAMES.get(name, name.replace("_", " "))


def print_table(
    console: Console,
    columns: Sequence[tuple[str, bool]],
    rows: Iterable[Sequence[str]],
    *,
    keep: int = 2,
    fold_headers: bool = False,
) -> None:
    """Print a borderless table; each column is (header, whether its cells are numbers).

    A narrow terminal folds words but never a number: columns after the first `keep` are left out from the right, and
    a line says which.
    """
    rows = list(rows)
    widths = []
    for at, (header, is_number) in enumerate(columns):
        cells = max((cell_len(Text.from_markup(row[at]).plain) for row in rows if at < len(row)), default=0)
        least_header = min(len(header), 5) if fold_headers else len(header)
        widths.append(max(cells, least_header) if is_number else min(max(cells, len(header)), LEAST_TEXT))
    shown = len(columns)
    while shown > keep and sum(widths[:shown]) + 2 * (shown - 1) > console.width:
        shown -= 1
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for (header, is_number), width in zip(columns[:shown], widths, strict=False):
        table.add_column(
            header,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number and not fold_headers,
            min_width=width if is_number else None,
        )
    for row in rows:
        table.add_row(*row[:shown])
    print_part(console, table)
    if left_out := [header for header, _ in columns[shown:]]:
        print_part(console, escape(f"(too narrow for {', '.join(left_out)}: widen the terminal or use --json)"))


def _headline(file: PlanFile) -> str:
    cluster, training = file.cluster, file.training
    slow = f" ({len(cluster.faults)} of their parts slow)" if cluster.faults else ""
    return (
        f"{file.model.name} on {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}"
        f"{slow}, {training.precision}, {training.seq_len:,} tokens, global batch {file.best.plan.global_batch:,}"
    )


def labelled(columns: int = 2) -> Table:
    """A grid of labels and what they stand for, in the last of the columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(columns - 1):
        grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def repetitions(counts: Iterable[object]) -> str:
    """Counts with their repetitions told once: '7, 14 x 8, 7'."""
    repetitions = [(count, len(list(same))) for count, same in groupby(counts)]
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in repetitions)


def layers_line(file: PlanFile) -> str:
    """Layers of every stage or chunk, if they are spread unevenly."""
    plan = file.best.plan
    chunks = chunk_layers(plan, file.model.num_layers)
    if len(set(chunks)) == 1:
        return ""
    text = f"{repetitions(sum(chunks[rank :: plan.pp]) for rank in range(plan.pp))} on the stages"
    return f"{text}; {repetitions(chunks)} in the chunks" if plan.vp > 1 else text


def _answer(file: PlanFile) -> Table:
    best = file.best
    grid = labelled()
    grid.add_row("plan", f"[bold green]{escape(best.plan.describe())}[/]")
    if layers := layers_line(file):
        grid.add_row("layers", layers)
    grid.add_row(
        "step",
        f"[bold]{format_seconds(best.step_s)}[/] (90 %: {format_seconds(best.low_s)} to {format_seconds(best.high_s)})",
    )
    grid.add_row(
        "rate",
        f"{best.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {format_percent(best.mfu)} "
        f"({mfu_convention(file)})",
    )
    risk = format_percent(best.oom_probability) if best.oom_probability >= 0.001 else "under 0.1 %"
    free = best.memory_headroom_bytes
    room = f"{format_bytes(abs(free))} free" if free >= 0 else f"{format_bytes(-free)} too much"
    grid.add_row(
        "memory",
        f"{format_bytes(best.memory_bytes)} of {format_bytes(file.capacity_bytes)}, {room}, {risk} risk of running out",
    )
    if len(file.stages) > 1:
        grid.add_row(
            "", f"{repetitions(f'{stage.memory_bytes / GIB:,.1f}' for stage in file.stages)} GiB on the stages"
        )
    if file.rests_on:
        grid.add_row("rests on", rests_on(file.rests_on))
    if file.listed_step_s is not None:
        grid.add_row("nodes", escape(placement_line(file.hosts, file.listed_step_s, best.step_s)))
    host = file.cluster.host.memory_bytes
    if best.plan.offload != "none" or best.host_memory_bytes > SHOWN_HOST_SHARE * host:
        grid.add_row("host", f"{format_bytes(best.host_memory_bytes)} of {format_bytes(host)} a node")
    if file.certificate:
        grid.add_row("sure", certificate_line(file.certificate, file.choice))
    return grid


def mfu_convention(file: PlanFile) -> str:
    """Peak rate that an MFU refers to.  That of a CPU is worked out from its clock, which no datasheet does."""
    device = file.cluster.device
    name, peak = datasheet_peak(device, file.training.precision)
    peak_name = "peak" if device.vendor == "cpu" else "datasheet peak"
    return f"Megatron model FLOPs over the {name} {peak_name}, {format_flops(peak)}"


def placement_line(hosts: Sequence[HostRanks], listed_step_s: float, step_s: float) -> str:
    """Below which leaf switches the stages sit, and what the order of the nodes gains."""
    below: dict[str, set[int]] = {}
    for host in hosts:
        below.setdefault(host.switches[0] if host.switches else host.site, set()).update(host.stages)
    shown = [f"{switch}: stage {number_ranges(stages)}" for switch, stages in below.items()]
    more = [f"{len(shown) - SHOWN_SWITCHES} more"] if len(shown) > SHOWN_SWITCHES else []
    gain = format_percent(listed_step_s / step_s - 1)
    return f"{gain} faster than in the order of the cluster's list; {', '.join((*shown[:SHOWN_SWITCHES], *more))}"


def number_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers with neighbours joined: '0-3+6'."""
    repetitions: list[list[int]] = []
    for number in sorted(numbers):
        if repetitions and number == repetitions[-1][-1] + 1:
            repetitions[-1].append(number)
        else:
            repetitions.append([number])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in repetitions)


def rests_on(shares: Mapping[Provenance, float]) -> str:
    """Shares of measured, interpolated, reference and datasheet times in a step, in words."""
    shown = (f"{format_percent(share)} {name}" for name, share in shares.items() if share >= LEAST_SHOWN_SHARE)
    return ", ".join(shown)


def _print_ranking(console: Console, plans: Sequence[RankedPlan], quantile: float | None) -> None:
    """The plans in their order; with the quantile of the step by which they are, where that is not the step itself."""
    many = len({plan.plan.global_batch for plan in plans}) > 1
    columns = [("#", True), ("plan", False), ("step", True), ("tokens/s", True), ("MFU", True), ("memory", True)]
    if quantile is not None:
        columns.insert(3, (f"{quantile:g} quantile", True))
    rows = []
    for at, plan in enumerate(plans, 1):
        cells = [
            str(at),
            escape(plan.plan.describe()),
            format_seconds(plan.step_s),
            f"{plan.tokens_per_s_per_device:,.0f}",
            format_percent(plan.mfu),
            format_bytes(plan.memory_bytes),
        ]
        if quantile is not None:
            spreads = NormalDist().inv_cdf(quantile) / NORMAL_90
            cells.insert(3, format_seconds(plan.step_s * (plan.high_s / plan.step_s) ** spreads))
        rows.append([*cells, f"{plan.plan.global_batch:,}"] if many else cells)
    print_table(console, [*columns, ("batch", True)] if many else columns, rows, keep=3)


def _summed(terms_s: dict[str, float]) -> dict[str, float]:
    """Work of the busiest stage in one term, and what ends the step in one."""
    work = sum(value for name, value in terms_s.items() if name not in (*WAITS, *END_OF_STEP))
    waits = {name: terms_s.get(name, 0.0) for name in WAITS}
    return {"work": work, **waits, "end_of_step": sum(terms_s.get(name, 0.0) for name in END_OF_STEP)}


def why_first(best: RankedPlan, second: RankedPlan, *, keeps_today: bool = False) -> str:
    """Reason why the winner beats the runner-up: the terms in which their times per sequence differ most."""
    gained = _gained(best, second)
    total = sum(gained.values())
    if total < -1e-6 * best.step_s:
        gain = format_percent(-total / (best.step_s + total))
        return f"simpler than the fastest ({second.plan.describe()}), {gain} faster: {reasons(second, best)}"
    if total < 1e-6 * best.step_s:
        which = "the one that changes least of today's" if keeps_today else "the plainer plan"
        return f"level with the runner-up ({second.plan.describe()}): {which} goes first"
    share = total / (best.step_s + total)
    return f"{format_percent(share)} faster than the runner-up ({second.plan.describe()}): {reasons(best, second)}"


def reasons(plan: RankedPlan | MixedCost, other: RankedPlan | MixedCost) -> str:
    """The terms in which two plans' times per sequence differ most, as the first of them has them: more or less."""
    gained = _gained(plan, other)
    largest = sorted(gained, key=lambda name: -abs(gained[name]))[:SHOWN_REASONS]
    least = LEAST_REASON * max(abs(gained[largest[0]]), abs(sum(gained.values())))
    return ", ".join(
        f"{format_seconds(abs(gained[name]))} {'less' if gained[name] > 0 else 'more'} {term_name(name)}"
        for name in largest
        if abs(gained[name]) > least
    )


def _gained(best: RankedPlan | MixedCost, second: RankedPlan | MixedCost) -> dict[str, float]:
    """Time by which every term of the second plan is longer, for as many sequences as the best has in a step."""
    scale = best.plan.global_batch / second.plan.global_batch
    terms, others = best.terms_s, second.terms_s
    if (terms.get("head", 0.0) > 0) != (others.get("head", 0.0) > 0):
        # Terms of work are those of the busiest stage, which holds the head in one plan and layers in its place in
        # the other: only their sums compare.
        terms, others = _summed(terms), _summed(others)
    return {name: others.get(name, 0.0) * scale - value for name, value in terms.items()}


def certificate_line(certificate: Certificate, choice: Confidence | None = None) -> str:
    """Sentence on why there is no better plan, and what the model cannot tell from it."""
    least = certificate.least_left
    if not certificate.proven:
        assert least is not None, "of the cells that were not looked at"
        return (
            f"best of {certificate.expanded:,} of {certificate.cells:,} cells ({certificate.priced:,} plans priced), "
            f"not proven: by its bound, a plan of the others may be up to {format_percent(1 / least - 1)} faster"
        )
    if certificate.best_in:
        return (
            f"proven: of {certificate.plans:,} plans in {certificate.cells:,} cells none is better in "
            f"{' and '.join(certificate.best_in)} ({certificate.bounded:,} bounds, {certificate.priced:,} priced)"
        )
    others = "every other is too large" if least is None else f"no other within {format_percent(least - 1)}"
    sure = "proven best" if certificate.proven else "best found"
    if certificate.quantile is not None:
        sure += f" at the {certificate.quantile:g} quantile"
        if certificate.margin:
            others += f" (plans up to {format_percent(certificate.margin)} slower may have the least quantile)"
    rival = f"{_runner_up(choice, least)}; " if choice and choice.runner_up else ""
    if certificate.slower_than_fastest is not None:
        off = f"{_small_percent(certificate.slower_than_fastest)} off the"
        sure = f"proven {off} best" if certificate.proven else f"{off} {sure}"
    return (
        f"{sure} of {certificate.plans:,} plans in {certificate.cells:,} cells; {rival}{certificate.bounded:,} bounds, "
        f"{certificate.priced:,} priced, {others}"
    )


def _small_percent(share: float) -> str:
    return format_percent(share) if share >= LEAST_OFF else f"under {format_percent(LEAST_OFF)}"


def slower(behind: float) -> str:
    """Share by which a step is slower or, where `behind` is negative, faster."""
    return f"{format_percent(abs(behind))} {'slower' if behind > 0 else 'faster'}"


def _runner_up(choice: Confidence, least_left: float | None) -> str:
    """Sentence on how far off the runner-up is, and whether the model can tell.

    Plans as slow as `least_left` need not have been priced, so that more of them may be in a wider interval.
    """
    behind, width = (choice.ratio or 1.0) - 1.0, format_percent((choice.width or 1.0) - 1.0)
    gap = "level" if abs(behind) < LEAST_GAP else slower(behind)
    if not choice.is_close:
        return f"runner-up {gap}, outside the model's {width} interval"
    more = choice.num_contenders - 1
    least = "at least " if least_left is not None and (choice.width or 1.0) > least_left else ""
    rest = f", as {'is' if more == 1 else 'are'} {least}{more} more: measure them" if more else ": measure both"
    return f"runner-up {gap}, inside the model's {width} interval{rest}"


def choice_lines(best: RankedPlan, choice: Confidence) -> Iterator[tuple[str, str]]:
    """(label, text) of what would change the answer, and of why the obvious alternatives lost."""
    if choice.sensitivity:
        flips = choice.sensitivity.flips
        for at, flip in enumerate(flips[:SHOWN_FLIPS]):
            change = f"{format_percent(abs(flip.factor - 1.0))} {'higher' if flip.factor > 1 else 'lower'}"
            late = "" if flip.is_proven else " at the latest"
            tell = f"; autoplan profile --only {','.join(flip.measure)} tells" if flip.measure else ""
            yield "" if at else "unless", f"{flip.quantity} {change}{late}: then {flip.plan.describe()}{tell}"
        if not flips:
            yield "unless", "no number of the hardware, halved or doubled alone, makes another plan win"
    for at, rival in enumerate(choice.obvious):
        yield "" if at else "not", f"{rival.family}: {_lost(best, rival)}"


def _lost(best: RankedPlan, rival: ObviousPlan) -> str:
    """Reason why an alternative lost: memory, or time in the terms that grow most."""
    if rival.excess_bytes > 0:
        return f"does not fit by {format_bytes(rival.excess_bytes)} ({rival.plan.plan.describe()})"
    lost = _gained(best, rival.plan)
    largest = sorted(lost, key=lambda name: -lost[name])[:SHOWN_REASONS]
    parts = [
        f"{format_seconds(lost[name])} more {term_name(name)}"
        for name in largest
        if lost[name] > LEAST_REASON * abs(sum(lost.values()))
    ]
    risk = "" if rival.plan.verdict == "fits" else "may run out of memory, "
    gap = f"{format_percent(abs(rival.ratio - 1.0))} {'slower' if rival.ratio > 1 else 'faster'}"
    return f"{risk}{gap} ({rival.plan.plan.describe()}): {', '.join(parts)}"


def print_answer(console: Console, file: PlanFile) -> None:
    """Print the question, and the plan with its figures."""
    print_part(console, escape(_headline(file)))
    console.print()
    answer = _answer(file)
    print_part(console, Panel(answer, padding=(0, 1), expand=False) if console.is_terminal else answer)


def print_search(console: Console, file: PlanFile) -> None:
    """The answer of a search, the runners-up, why and how sure."""
    print_answer(console, file)
    console.print()
    if file.alternatives:
        quantile = file.certificate.quantile if file.certificate else None
        _print_ranking(console, [file.best, *file.alternatives[: SHOWN_PLANS - 1]], quantile)
        console.print()
    grid = labelled()
    choice = file.choice
    if second := choice.runner_up if choice else next(iter(file.alternatives), None):
        grid.add_row("why", escape(why_first(file.best, second, keeps_today=file.today is not None)))
    if fastest := fastest_of(file):
        gain = _small_percent(file.best.s_per_sequence / fastest.s_per_sequence - 1.0)
        grid.add_row("fastest", escape(f"{fastest.plan.describe()}: {gain} faster, {reasons(fastest, file.best)}"))
    if choice:
        for label, text in choice_lines(file.best, choice):
            grid.add_row(label, escape(text))
    if file.certificate:
        grid.add_row("space", escape("; ".join(file.certificate.limits)))
    print_part(console, grid)


def fastest_of(file: PlanFile) -> RankedPlan | None:
    """Return the fastest plan, where the best one is simpler and about as fast."""
    if file.certificate is None or file.certificate.slower_than_fastest is None:
        return None
    return min(file.alternatives, key=lambda one: one.s_per_sequence)


def print_next_steps(console: Console, *steps: tuple[str, str]) -> None:
    """Print next steps by label, each on one line whatever the width, so that it can be copied."""
    console.print()
    for label, text in steps:
        console.print(f"{label}:  {escape(text)}", soft_wrap=True)


def print_estimate(console: Console, file: PlanFile) -> None:
    """Print time and memory of one plan: terms of the step, then every pipeline rank."""
    print_answer(console, file)
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
            escape(host.node),
            escape(" < ".join((*host.switches, *([host.site] if host.site else [])))),
            number_ranges(host.stages),
            number_ranges(host.replicas),
        )
        for host in hosts[:SHOWN_HOSTS]
    ]
    print_table(console, columns, rows)
    if len(hosts) > SHOWN_HOSTS:
        console.print(f"({len(hosts) - SHOWN_HOSTS} more nodes: --json has all)")


def print_terms(console: Console, best: RankedPlan | MixedCost, *, has_sum: bool = False) -> None:
    """Print the time of a step, a row a term, and in all if asked."""
    rows = [
        (term_name(name), format_seconds(value), format_percent(value / best.step_s))
        for name, value in best.terms_s.items()
        if value >= LEAST_SHOWN_S
    ]
    if has_sum:
        rows.append(("[bold]all[/]", f"[bold]{format_seconds(best.step_s)}[/]", format_percent(1.0)))
    print_table(console, (("time of a step", False), ("", True), ("share", True)), rows)


def _shown(stages: tuple[StageCost, ...]) -> tuple[StageCost | None, ...]:
    """The stages that have a row; None stands for those that are left out in the middle."""
    if len(stages) <= MOST_STAGES:
        return stages
    half = MOST_STAGES // 2
    return (*stages[:half], None, *stages[-half:])


def _print_stage_times(console: Console, stages: tuple[StageCost, ...]) -> None:
    columns = (("stage", True), ("layers", True), ("forward", True), ("backward", True), ("memory", True))
    rows = [
        (
            str(stage.stage),
            str(stage.layers),
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
            format_bytes(stage.memory_bytes),
        )
        if stage
        else ("...",)
        for stage in _shown(stages)
    ]
    print_table(console, columns, rows)


def _print_stage_terms(console: Console, stages: tuple[StageCost, ...]) -> None:
    names = [name for name in stages[0].terms_s if any(stage.terms_s[name] >= LEAST_SHOWN_S for stage in stages)]
    rows = [
        (str(stage.stage), *(f"{stage.terms_s[name] * 1e3:,.1f}" for name in names)) if stage else ("...",)
        for stage in _shown(stages)
    ]
    short = [name.replace("_communication", " traffic").replace("_", " ") for name in names]
    print_table(console, [("stage", True), *((name, True) for name in short)], rows, fold_headers=True)


def _print_stage_memory(console: Console, stages: tuple[StageCost, ...]) -> None:
    rows = [
        (str(stage.stage), *(f"{summed_memory(stage, names) / GIB:,.1f}" for names in MEMORY_SUMS.values()))
        if stage
        else ("...",)
        for stage in _shown(stages)
    ]
    columns = [("stage", True), *((name, True) for name in MEMORY_SUMS)]
    print_table(console, columns, rows, fold_headers=True)


def summed_memory(stage: StageCost, names: tuple[str, ...]) -> float:
    """Bytes of the terms of `MEMORY_SUMS` that make one sum."""
    return sum(stage.memory_terms_bytes.get(name, 0.0) for name in names)


def print_memory(console: Console, file: PlanFile) -> None:
    """Print the memory of one plan, stage by stage, and how much each change would free."""
    print_answer(console, file)
    print_waterfall(console, placed(file.stages, file.best.plan.num_microbatches, file.capacity_bytes))
    console.print()
    _print_knobs(console, file)


def print_waterfall(console: Console, stages: Sequence[PlacedStage]) -> None:
    """The memory of stages: one row a term and one column a stage; stages that are alike share a column."""
    console.print("\nmemory in GiB, stage by stage")
    kinds: dict[tuple[float | str, ...], list[PlacedStage]] = {}
    for stage in stages:
        place = stage.place
        kinds.setdefault((place.kind, place.part, *stage.cost.memory_terms_bytes.values()), []).append(stage)
    groups = [*kinds.values()]
    worst = max(groups, key=lambda group: group[0].fill)
    if len(groups) > MOST_MEMORY_COLUMNS:
        kept = {0, len(groups) - 1, groups.index(worst), *range(MOST_MEMORY_COLUMNS - 2)}
        groups = [group for at, group in enumerate(groups) if at in kept]
    firsts = [group[0] for group in groups]
    terms = [stage.cost.memory_terms_bytes for stage in firsts]
    rows = [
        (MEMORY_NAMES[name], *(f"{terms_bytes[name] / GIB:,.2f}" for terms_bytes in terms))
        for name in terms[0]
        if any(terms_bytes[name] for terms_bytes in terms)
    ]
    rows.append(("[bold]all[/]", *(f"[bold]{stage.cost.memory_bytes / GIB:,.2f}[/]" for stage in firsts)))
    rows.append(("free", *(f"{(stage.place.capacity_bytes - stage.cost.memory_bytes) / GIB:,.2f}" for stage in firsts)))
    rows.append(("risk", *(format_percent(stage.cost.oom_probability) for stage in firsts)))
    if any(stage.place.part for stage in firsts):
        rows.append(("on", *(escape(stage.place.part) for stage in firsts)))
    print_table(console, [("stage", False), *((_numbers(group), True) for group in groups)], rows)


def _numbers(stages: list[PlacedStage]) -> str:
    first, last = stages[0].place, stages[-1].place
    if first == last:
        return first.name
    is_whole = last.stage - first.stage == len(stages) - 1
    return f"{first.name}-{last.name}" if is_whole else f"{first.name}..{last.name}"


def _print_knobs(console: Console, file: PlanFile) -> None:
    if not file.memory_knobs:
        console.print("no single change of the plan would free memory")
        return
    rows = []
    for knob in file.memory_knobs:
        slower = knob.plan.step_s / file.best.step_s - 1
        step = f"{'+' if slower >= 0 else '-'}{format_percent(abs(slower))}"
        needed = format_bytes(knob.plan.memory_bytes)
        rows.append((escape(knob.change), format_bytes(knob.freed_bytes), needed, step, knob.plan.verdict))
    columns = [("what would free memory", False), ("frees", True), ("leaves", True), ("step", True), ("then", False)]
    print_table(console, columns, rows, keep=3)
