"""Plans of a mixed cluster on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from autoplan.base.units import format_bytes, format_percent, format_seconds, repetitions
from autoplan.report.answer import input_text, optimizer_text, training_lines
from autoplan.report.ranking import flip_lines
from autoplan.report.run_report import print_sets, run_lines
from autoplan.report.terminal import MIN_SHOWN_S, Cell, print_lines, print_part, print_table, print_terms
from autoplan.spec.enums import Schedule
from autoplan.spec.estimate import PlacedStage
from autoplan.spec.mixed_problem import MixedPlan, ReplicaKind
from autoplan.spec.mixed_result import MixedCertificate, MixedCost, MixedRun, MixedToday
from autoplan.spec.plan_file import MixedPlanFile
from autoplan.spec.plan_words import SCHEDULE_WORDS

SHOWN_PLANS = 8


def describe_kind(kind: ReplicaKind, names: Sequence[str]) -> str:
    """Describe a kind of replica: '4 x (h100-sxm tp 8: 20 | a100-sxm tp 8: 12) of 16 micro-batches of 1'."""
    runs_of: list[tuple[tuple[int, int], list[int]]] = []
    for stage in kind.stages:
        if not runs_of or runs_of[-1][0] != (stage.part, stage.tp):
            runs_of.append(((stage.part, stage.tp), []))
        runs_of[-1][1].append(stage.layers)
    vp = f" vp {kind.vp}" if kind.vp > 1 else ""
    stages = " | ".join(f"{names[part]} tp {tp}{vp}: {repetitions(layers)}" for (part, tp), layers in runs_of)
    count = f"{kind.num_microbatches} micro-batch{'es' if kind.num_microbatches > 1 else ''}"
    return f"{kind.count} x ({stages}) of {count} of {kind.micro_batch}"


def describe(plan: MixedPlan, names: Sequence[str]) -> str:
    """Describe a plan in one line."""
    return ", ".join([" + ".join(describe_kind(kind, names) for kind in plan.kinds), *common_words(plan)])


def common_words(plan: MixedPlan) -> list[str]:
    """Describe the common axes of all replicas, as for a plain plan with the same number of replicas."""
    words = replace(plan.common, dp_shard=plan.num_replicas // plan.common.dp_replicate).describe().split(", ")
    degrees = [f"{axis} {getattr(plan.common, axis)}" for axis in ("cp", "ep") if getattr(plan.common, axis) > 1]
    schedule = [] if plan.schedule == Schedule.ONE_F_ONE_B else [SCHEDULE_WORDS[plan.schedule]]
    return degrees + schedule + words[2:]


def print_mixed_answer(console: Console, file: MixedPlanFile) -> None:
    """Print the question, and the plan with its figures."""
    names, best = file.cluster.part_names, file.best
    print_part(
        console,
        f"{file.model.name} on {file.cluster.sizes}, {file.training.precision}, {file.training.seq_len:,} tokens, "
        f"global batch {best.plan.global_batch:,}{optimizer_text(file.training)}",
    )
    console.print()
    interval = f"90 % interval {format_seconds(best.low_s)} to {format_seconds(best.high_s)}"
    tokens_per_s = best.sequences_per_s * file.training.seq_len
    lines: list[tuple[str, Cell]] = [
        ("plan", Text(describe(best.plan, names), style="bold green")),
        *training_lines(file.model, file.training),
        ("time", Text.assemble((format_seconds(best.step_s), "bold"), f" per step; {interval}")),
        ("", f"{tokens_per_s:,.0f} tokens/s, {tokens_per_s / best.plan.num_devices:,.0f} per device in use"),
    ]
    if file.today:
        lines.append(("today", today_text(file.today, best)))
    if text := input_text(file):
        lines.append(("input", text))
    totals = [part.num_devices for part in file.cluster.parts]
    free = [total - best.plan.num_devices_on(at) for at, total in enumerate(totals)]
    if any(free):
        counts = zip(free, totals, names, strict=True)
        lines.append(("idle", ", ".join(f"{count} of {total} {name}" for count, total, name in counts if count)))
    if file.certificate:
        lines.append(("searched", certificate_line(file.certificate, names)))
    print_lines(console, lines)


def today_text(today: MixedToday, best: MixedCost) -> str:
    """Compare the plan of the launch file, on the parts in their order, with the best one."""
    if today.cost is None:
        return f"{today.path} has no price on these parts: {today.why}"
    times = best.sequences_per_s / today.cost.sequences_per_s
    fits = (
        "" if today.cost.verdict == "fits" else ", out of memory" if today.cost.verdict == "oom" else ", risky memory"
    )
    return f"{today.path}: {format_seconds(today.cost.step_s)} per step{fits}; the plan is {times:.2f} times as fast"


def print_mixed(console: Console, file: MixedPlanFile, *, details: bool = False) -> None:
    """Print the answer and its stages; with `details` also the breakdown of its time, and other plans."""
    names, best = file.cluster.part_names, file.best
    print_mixed_answer(console, file)
    console.print()
    _print_stages(console, best, names)
    if file.sensitivity:
        console.print()
        print_lines(console, flip_lines(file.sensitivity, lambda plan: describe(plan, names)))
    if file.run:
        console.print()
        _print_run(console, file.run, best)
    if not details:
        return
    console.print()
    print_terms(console, best)
    if file.alternatives:
        console.print()
        _print_ranking(console, [best, *file.alternatives[: SHOWN_PLANS - 1]], names)
    if file.certificate:
        console.print()
        print_lines(console, [("space", "; ".join(file.certificate.limits))])


def certificate_line(certificate: MixedCertificate, names: Sequence[str]) -> str:
    """Return a sentence on the gap left by the bounds, and the best steps of single parts."""
    rates = ", ".join(f"{name} {rate:.4g}" for name, rate in zip(names, certificate.rates_alone, strict=True))
    gap = certificate.gap
    better = "faster" if certificate.best_in == "step-time" else f"better in {certificate.best_in}"
    proof = f"no plan in the search space is more than {format_percent(gap)} {better}" if gap else "proven"
    return (
        f"{certificate.plans:,} plans priced, {certificate.structures:,} ways to form pipelines bounded: {proof}; "
        f"each part alone reaches (sequences/s): {rates}"
    )


def waiting(cost: MixedCost, stages: Sequence[PlacedStage]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the stage with the most work, the one nearest to its capacity, and waiting replicas."""
    slowest, fullest = max(stages, key=lambda stage: stage.busy_s), max(stages, key=lambda stage: stage.fill)
    if len(stages) > 1:
        yield "slowest", f"{slowest.place.words}: busy for {format_percent(slowest.busy_s / cost.step_s)} of the step"
    usage = f"{format_bytes(fullest.cost.memory_bytes)} of {format_bytes(fullest.place.capacity_bytes)}"
    yield "fullest", f"{fullest.place.words}: {usage}, {format_percent(fullest.cost.oom_probability)} risk"
    last_s, last = max((kind.pipeline_s, letter) for kind, letter in zip(cost.kinds, cost.plan.letters, strict=True))
    early = zip((last_s - kind.pipeline_s for kind in cost.kinds), cost.plan.letters, strict=True)
    if waits := [f"{letter} {format_seconds(wait_s)}" for wait_s, letter in early if wait_s >= MIN_SHOWN_S]:
        yield "replicas", f"{last} finishes last; the others wait for it: {', '.join(waits)}"


def _print_stages(console: Console, cost: MixedCost, names: Sequence[str]) -> None:
    columns = ("replicas", "stage", "part", "tp", "layers", "forward", "backward", "memory", "of")
    rows = [
        (
            str(kind.count) if at == 0 else "",
            f"{letter}{at}",
            names[stage.part],
            str(stage.tp),
            str(stage.layers),
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
            format_bytes(stage.memory_bytes),
            format_bytes(stage.capacity_bytes),
        )
        for letter, kind, price in zip(cost.plan.letters, cost.plan.kinds, cost.kinds, strict=True)
        for at, stage in enumerate(price.stages)
    ]
    print_table(console, [(name, name != "part") for name in columns], rows, keep=5)


def _print_run(console: Console, run: MixedRun, best: MixedCost) -> None:
    """Print the figures of the run, and those of all sets of parts."""
    assert run.best.figures
    print_lines(console, run_lines(run.best.figures, best))
    if len(run.outcomes) > 1:
        console.print()
        print_sets(console, run.outcomes)


def _print_ranking(console: Console, costs: Sequence[MixedCost], names: Sequence[str]) -> None:
    columns = (("#", True), ("plan", False), ("step", True), ("sequences/s", True))
    rows = [
        (str(at), describe(cost.plan, names), format_seconds(cost.step_s), f"{cost.sequences_per_s:.4g}")
        for at, cost in enumerate(costs, 1)
    ]
    print_table(console, columns, rows, keep=3)
