"""Sections that differ for a mixed cluster: the answer, other plans, the cluster."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.base.units import format_bytes, format_percent, format_seconds
from autoplan.report.answer import training_lines
from autoplan.report.cluster import between_text
from autoplan.report.cluster_drawing import draw
from autoplan.report.mixed_search import certificate_line, common_words, describe, describe_kind, waiting
from autoplan.report.page.answer import figure, interval_figure
from autoplan.report.page.content import MixedContent
from autoplan.report.page.elements import Segment, bar, bars, folded, masthead, note, pairs, scrolling, section, table
from autoplan.report.page.html import Child, Markup, tag
from autoplan.report.page.times import kind_key, kind_segments
from autoplan.report.ranking import reasons
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.plan_file import MixedPlanFile
from autoplan.topology.graph import quotient

SHOWN_PLANS = 10


def headline(content: MixedContent) -> Markup:
    """Return the question as the headline of the page."""
    file = content.file
    training_text = (
        f"{file.cluster.sizes}; {file.training.precision}, {file.training.seq_len:,} tokens a sequence, global batch "
        f"{file.best.plan.global_batch:,}, {file.framework.name}"
    )
    return masthead(file.model.name, f"{file.cluster.num_devices:,} different devices", training_text)


def answer(content: MixedContent) -> Markup:
    """Return the plan and its main figures."""
    file = content.file
    line = certificate_line(file.certificate, file.cluster.part_names) if file.certificate else None
    return tag(
        "section",
        tag("h2", "The plan", id="answer-title", class_="unseen"),
        tag("p", *_words(file), class_="plan"),
        tag("div", *_figures(content), class_="figures"),
        tag("p", f"{line}.", class_="sure") if line else None,
        pairs((*training_lines(file.model, file.training), *waiting(file.best, content.stages))),
        id="answer",
        aria_labelledby="answer-title",
    )


def _words(file: MixedPlanFile) -> Iterator[Markup]:
    """Yield the kinds of replicas with their letters, and their common axes."""
    plan, names = file.best.plan, file.cluster.part_names
    for letter, kind in zip(plan.letters, plan.kinds, strict=True):
        head = tag("strong", f"{letter} ") if letter else None
        yield tag("span", head, describe_kind(kind, names), class_="axis")
    for word in common_words(plan):
        yield tag("span", word, class_="axis plain")


def _figures(content: MixedContent) -> Iterator[Markup]:
    file = content.file
    best, cluster = file.best, file.cluster
    yield interval_figure(best.step_s, best.low_s, best.high_s)
    rate, used = best.sequences_per_s * file.training.seq_len, best.plan.num_devices
    yield figure("Throughput", f"{rate:,.0f}", None, f"tokens/s in all; {rate / used:,.0f} per device in use")
    share = used / cluster.num_devices
    idle = ", ".join(name for at, name in enumerate(cluster.part_names) if at not in best.plan.parts)
    yield figure(
        "Devices in use",
        f"{used:,}",
        bar([Segment(name="in use", colour="compute", share=share, text=format_percent(share))]),
        f"of {cluster.num_devices:,}{f'; idle: {idle}' if idle else ''}",
    )
    fullest = max(content.stages, key=lambda stage: stage.fill)
    memory = format_bytes(fullest.cost.memory_bytes)
    yield figure(
        "Memory",
        format_percent(fullest.fill),
        bar([Segment(name="fullest stage", colour="memory", share=min(fullest.fill, 1.0), text=memory)]),
        f"{memory} of {format_bytes(fullest.place.capacity_bytes)} on {fullest.place.words}; "
        f"{format_percent(fullest.cost.oom_probability)} OOM risk",
    )


def plans(content: MixedContent) -> Markup | None:
    """Return the best plans of other structures, and why they lost."""
    file = content.file
    shown = (file.best, *file.alternatives[: SHOWN_PLANS - 1])
    if len(shown) == 1:
        return None
    lost = [(_name(file, plan), format_seconds(plan.step_s), reasons(plan, file.best)) for plan in shown[1:]]
    return section(
        "plans",
        "The best plans side by side",
        "The bar is the step time on the busiest stage, by kind.",
        kind_key(),
        bars("The best plans", ("plan", "in a step", "step", "sequences/s"), _ranking(file, shown), "worded first"),
        folded(
            "Why the others lost",
            table("Why other plans lost", (("plan", False), ("step", True), ("why", False)), lost),
        ),
    )


def _name(file: MixedPlanFile, plan: MixedCost) -> str:
    return describe(plan.plan, file.cluster.part_names)


def _ranking(file: MixedPlanFile, shown: tuple[MixedCost, ...]) -> Iterator[tuple[Child, Markup, str, str]]:
    slowest = max(plan.step_s for plan in shown)
    for at, plan in enumerate(shown, 1):
        name = tag("span", tag("span", f"{at} ", class_="quiet"), _name(file, plan))
        drawn = bar(kind_segments(plan.terms_s, slowest))
        yield name, drawn, format_seconds(plan.step_s), f"{plan.sequences_per_s:.4g}"


def parts(content: MixedContent) -> Markup:
    """Return the parts of the cluster and the links between them."""
    file = content.file
    alone = file.certificate.rates_alone if file.certificate else None
    columns = [("part", False), ("nodes", True), ("devices", True), ("in use", True), ("memory of a device", True)]
    columns += [("alone, sequences/s", True)] if alone else []
    rows = []
    for at, (name, part) in enumerate(zip(file.cluster.part_names, file.cluster.parts, strict=True)):
        used = file.best.plan.num_devices_on(at)
        memory = format_bytes(part.device.visible_memory_bytes)
        cells = [name, f"{part.num_nodes:,}", f"{part.num_devices:,}", f"{used:,}", memory]
        rows.append([*cells, f"{alone[at]:.4g}"] if alone else cells)
    drawings = (
        scrolling(f"Drawing of {name}", tag("div", Markup(draw(part, quotient(part))), class_="drawing"))
        for name, part in zip(file.cluster.part_names, file.cluster.parts, strict=True)
    )
    words = between_text(file.cluster.between)
    return section(
        "parts",
        "The parts of the cluster",
        f"{words[0].upper()}{words[1:]}.",
        table("Devices of each part", columns, rows),
        tag("h3", "Topology of each part"),
        *drawings,
        note("Link traffic is not available for mixed clusters."),
    )
