"""Section of scaling: the best plans on fewer and on more nodes."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.base.units import format_percent, format_seconds
from autoplan.report.page.content import PlanContent
from autoplan.report.page.elements import section, table
from autoplan.report.page.html import Markup
from autoplan.report.page.plot import Axis, Series, plot
from autoplan.spec.run_report import RunFigures, RunPlan


def scaling(content: PlanContent) -> Markup:
    """Return tokens per second by devices, compared with perfect scaling."""
    title = "Fewer or more devices"
    best_plans = [size.best for size in content.sizes if size.best]
    if not best_plans:
        return section("scaling", title, content.why_not("sizes"))
    first, last = best_plans[0].figures, best_plans[-1].figures
    perfect = [
        (figures.num_devices, first.tokens_per_s * figures.num_devices / first.num_devices, "perfect scaling")
        for figures in (first, last)
    ]
    same_size = [run for run in best_plans if run.num_nodes == content.file.cluster.num_nodes]
    drawn = plot(
        "Tokens per second by number of devices",
        Axis(label="devices", scale="log", base=2),
        Axis(label="tokens/s", scale="log"),
        [
            Series(name="perfect scaling", kind="dashes", colour="faint", points=perfect),
            Series(name="best plan", kind="line", colour="first", points=[_point(run) for run in best_plans]),
            Series(
                name="the answer",
                kind="point",
                colour="second",
                points=[_point(run, "the answer, ") for run in same_size],
            ),
        ],
    )
    return section("scaling", title, _summary(first, last), drawn, _table(content, best_plans))


def _point(run: RunPlan, label: str = "") -> tuple[float, float, str]:
    figures = run.figures
    text = f"{label}{run.plan.plan.describe()}: {figures.tokens_per_s:,.0f} tokens/s of {figures.num_devices:,} devices"
    return figures.num_devices, figures.tokens_per_s, text


def _summary(first: RunFigures, last: RunFigures) -> str:
    if first.num_devices == last.num_devices:
        return "This is the only size with a plan that fits."
    faster, more = last.tokens_per_s / first.tokens_per_s, last.num_devices / first.num_devices
    return (
        f"With the same global batch, {last.num_devices:,} devices train {faster:.2f} times as fast as "
        f"{first.num_devices:,}: {format_percent(faster / more)} of perfect scaling."
    )


def _table(content: PlanContent, best_plans: Sequence[RunPlan]) -> Markup:
    columns = [("devices", True), ("plan", False), ("step", True), ("tokens/s", True), ("MFU", True)]
    has_cost = any(run.figures.cost_per_token is not None for run in best_plans)
    if has_cost:
        columns.append(("cost per M tokens", True))
    rows = []
    for size in content.sizes:
        devices = f"{size.num_nodes * content.file.cluster.devices_per_node:,}"
        if size.best is None:
            rows.append((devices, size.why, *("" for _ in columns[2:])))
            continue
        plan, figures = size.best.plan, size.best.figures
        cost = [f"{1e6 * (figures.cost_per_token or 0):,.4g}"] if has_cost else []
        rate = f"{figures.tokens_per_s:,.0f}"
        rows.append((devices, plan.plan.describe(), format_seconds(plan.step_s), rate, format_percent(plan.mfu), *cost))
    return table("The best plan of each number of devices", columns, rows)
