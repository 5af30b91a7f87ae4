"""Section of other plans: the best ones side by side, and the Pareto front of time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autoplan.base.units import GIB, format_bytes, format_percent, format_seconds
from autoplan.report.page.content import PlanContent
from autoplan.report.page.elements import bar, bars, folded, note, section, table
from autoplan.report.page.html import Child, Markup, tag
from autoplan.report.page.plot import Axis, Series, plot
from autoplan.report.page.times import kind_key, kind_segments, or_none
from autoplan.report.ranking import choice_lines
from autoplan.report.terminal import MIN_SHOWN_S, term_name
from autoplan.spec.axes import AXES as ALL_AXES
from autoplan.spec.axes import shown as text_of
from autoplan.spec.axis import Kind
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.run_report import RunPlan
from autoplan.spec.search_result import RankedPlan

SHOWN_PLANS = 10
COMPARED_PLANS = 5

AXES: tuple[tuple[str, Callable[[ParallelPlan], str]], ...] = (
    ("tensor parallel", lambda plan: str(plan.tp)),
    ("context parallel", lambda plan: str(plan.cp)),
    ("pipeline stages", lambda plan: str(plan.pp)),
    ("chunks a stage", lambda plan: str(plan.vp)),
    ("expert parallel", lambda plan: str(plan.ep)),
    ("data parallel", lambda plan: str(plan.dp)),
    ("schedule", lambda plan: plan.schedule),
    ("micro-batch", lambda plan: str(plan.micro_batch)),
    ("micro-batches", lambda plan: f"{plan.num_microbatches:,}"),
    ("global batch", lambda plan: f"{plan.global_batch:,}"),
    ("sharding", lambda plan: plan.sharding),
    ("recomputation", lambda plan: plan.recompute),
    ("offload", lambda plan: plan.offload),
)
OWN_ROWS = ("schedule", "sharding", "recompute", "offload")
# Axes shown as a row if plans differ in them.
OPTIONS = tuple(axis for axis in ALL_AXES if axis.kind in (Kind.FLAG, Kind.WORD) and axis.name not in OWN_ROWS)


def plans(content: PlanContent) -> Markup | None:
    """Return the best plans of other degrees, the breakdown of their time, and why the winner wins."""
    file = content.file
    shown = (file.best, *file.alternatives[: SHOWN_PLANS - 1])
    if len(shown) == 1:
        return None
    slowest = max(plan.s_per_sequence for plan in shown)
    return section(
        "plans",
        "The best plans side by side",
        "Each is the best plan of its degrees; the bar is its step time, by kind.",
        kind_key(),
        bars("The best plans", ("plan", "in a step", "step", "memory"), _ranking(shown, slowest), "worded first"),
        _note_batches(shown),
        folded(
            f"The first {min(COMPARED_PLANS, len(shown))} in every axis and term",
            _compared(shown[:COMPARED_PLANS], [f"#{at}" for at in range(1, COMPARED_PLANS + 1)]),
        ),
        _lost(file),
    )


def _ranking(shown: Sequence[RankedPlan], slowest: float) -> Iterator[tuple[Child, Markup, str, str]]:
    for at, plan in enumerate(shown, 1):
        width_s = slowest * plan.plan.global_batch
        name = tag("span", tag("span", f"{at} ", class_="quiet"), plan.plan.describe())
        drawn = bar(kind_segments(plan.terms_s, width_s))
        yield name, drawn, format_seconds(plan.step_s), format_bytes(plan.memory_bytes)


def _note_batches(shown: Sequence[RankedPlan]) -> Markup | None:
    if len({plan.plan.global_batch for plan in shown}) == 1:
        return None
    return note("Batches differ: bars compare the time per sequence, numbers are per step.")


def compared(files: Sequence[PlanFile], names: Sequence[str]) -> Markup:
    """Return plans as columns, possibly for different sizes; differences from the first are highlighted."""
    sizes: tuple[tuple[str, Callable[[PlanFile], str]], ...] = (
        ("nodes", lambda file: f"{file.cluster.num_nodes:,}"),
        ("sequence length", lambda file: f"{file.training.seq_len:,}"),
    )
    rows = [_differing(name, [value(file) for file in files]) for name, value in sizes]
    return _compared([file.best for file in files], names, rows)


def _differing(name: str, values: Sequence[str]) -> tuple[Child, ...]:
    return (name, *(text if text == values[0] else tag("strong", text) for text in values))


def _compared(shown: Sequence[RankedPlan], names: Sequence[str], first: Sequence[tuple[Child, ...]] = ()) -> Markup:
    """Return plans as columns, with differences from the first highlighted."""
    columns = [("axis or term", False), *((name, True) for name in names[: len(shown)])]
    rows = [*first]
    for name, value in AXES:
        values = [value(plan.plan) for plan in shown]
        if len(set(values)) > 1 or values[0] not in ("1", "none"):
            rows.append(_differing(name, values))
    for axis in OPTIONS:
        values = [text_of(getattr(plan.plan, axis.name)) for plan in shown]
        if len(set(values)) > 1:
            rows.append(_differing(axis.label or axis.name, values))
    figures: tuple[tuple[str, Callable[[RankedPlan], str]], ...] = (
        ("step", lambda plan: format_seconds(plan.step_s)),
        ("90 % from", lambda plan: format_seconds(plan.low_s)),
        ("90 % to", lambda plan: format_seconds(plan.high_s)),
        ("tokens/s per device", lambda plan: f"{plan.tokens_per_s_per_device:,.0f}"),
        ("MFU", lambda plan: format_percent(plan.mfu)),
        ("memory", lambda plan: format_bytes(plan.memory_bytes)),
        ("OOM risk", lambda plan: format_percent(plan.oom_probability)),
    )
    rows += [(name, *(value(plan) for plan in shown)) for name, value in figures]
    for term in shown[0].terms_s:
        if any(plan.terms_s.get(term, 0.0) >= MIN_SHOWN_S for plan in shown):
            rows.append((term_name(term), *(or_none(plan.terms_s.get(term, 0.0)) for plan in shown)))
    return table("Plans in every axis and term", columns, rows)


def _lost(file: PlanFile) -> Markup | None:
    """Return reasons why the baselines lost."""
    if not file.choice or not file.choice.obvious:
        return None
    texts = [text for label, text in choice_lines(file.best, file.choice) if label in ("not", "")]
    items = [tag("li", text) for text in texts[-len(file.choice.obvious) :]]
    return tag("div", tag("h3", "Why the obvious plans lost"), tag("ul", *items, class_="reasons"))


# -- the front --------------------------------------------------------------------------------------------------------


def front(content: PlanContent) -> Markup:
    """Return the Pareto front: in the objectives of the run, else in step time and memory."""
    file = content.file
    if file.run and len(file.run.front) > 1:
        return _front_of_run(file.run.front, file.run.objectives)
    title = "Time against memory"
    if not content.front:
        return section("front", title, content.why_not("front"))
    capacity = file.capacity_bytes
    drawn = plot(
        "Step time against memory of the Pareto-optimal plans",
        Axis(label="memory of the fullest stage, GiB"),
        Axis(label="step time, s"),
        [
            Series(
                name="Pareto front",
                kind="steps",
                colour="first",
                points=[_point(plan) for plan in sorted(content.front, key=lambda plan: plan.memory_bytes)],
            ),
            Series(name="the answer", kind="point", colour="second", points=[_point(file.best, "the answer, ")]),
        ],
        limit=(capacity / GIB, "capacity"),
    )
    columns = (("plan", False), ("step", True), ("memory", True), ("MFU", True))
    rows = (
        (plan.plan.describe(), format_seconds(plan.step_s), format_bytes(plan.memory_bytes), format_percent(plan.mfu))
        for plan in content.front
    )
    listed = table("Plans on the Pareto front of step time and memory", columns, rows)
    return section("front", title, _summary(content.front), drawn, folded(f"The {len(content.front)} plans", listed))


def _point(plan: RankedPlan, label: str = "") -> tuple[float, float, str]:
    text = f"{label}{plan.plan.describe()}: {format_seconds(plan.step_s)}, {format_bytes(plan.memory_bytes)}"
    return plan.memory_bytes / GIB, plan.step_s, text


def _summary(front: Sequence[RankedPlan]) -> str:
    fastest, smallest = front[0], min(front, key=lambda plan: plan.memory_bytes)
    if len(front) == 1:
        return "The fastest plan also needs the least memory."
    return (
        f"{len(front)} plans are beaten by no other in both. The one with the least memory takes "
        f"{format_bytes(fastest.memory_bytes - smallest.memory_bytes)} less than the fastest and is "
        f"{format_percent(smallest.s_per_sequence / fastest.s_per_sequence - 1)} slower."
    )


def _front_of_run(front: Sequence[RunPlan], objectives: Sequence[str]) -> Markup:
    """Return the front of a run as a table, for any two or more objectives."""
    from autoplan.report.run_report import FIGURES, SHOWN_FRONT

    shown = front[:SHOWN_FRONT]
    extra = [(head, text) for head, text in FIGURES if any(text(plan.figures) for plan in shown)]
    columns = [("plan", False), ("nodes", True), ("step", True), ("memory", True), *((head, True) for head, _ in extra)]
    rows = (
        (
            plan.plan.plan.describe(),
            f"{plan.num_nodes:,}",
            format_seconds(plan.plan.step_s),
            format_bytes(plan.plan.memory_bytes),
            *(text(plan.figures) or "" for _, text in extra),
        )
        for plan in shown
    )
    return section(
        "front",
        "Pareto front",
        f"In {', '.join(objectives)}: {len(front):,} plans, the best in the first one first.",
        table("Plans on the Pareto front of the objectives", columns, rows),
    )
