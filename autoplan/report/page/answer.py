"""Section of the answer: the plan, its time, rate and memory, and the confidence of the choice."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.base.units import format_bytes, format_percent, format_seconds
from autoplan.report.answer import (
    encoder_lines,
    layers_line,
    lengths_lines,
    mfu_convention,
    next_best_line,
    proof_line,
    risk_text,
    training_lines,
)
from autoplan.report.page.content import PlanContent
from autoplan.report.page.elements import Segment, bar, masthead, pairs
from autoplan.report.page.html import Child, Markup, tag
from autoplan.report.ranking import why_first
from autoplan.spec.plan_file import PlanFile

VERDICTS = {"fits": "", "risky": "may run out of memory", "oom": "does not fit"}


def headline(content: PlanContent) -> Markup:
    """Return the question as the headline of the page."""
    file = content.file
    cluster, training = file.cluster, file.training
    places = f"{cluster.num_nodes:,} × {cluster.devices_per_node} {cluster.device.name}"
    slow = f", {len(cluster.faults)} of their parts slow" if cluster.faults else ""
    training_text = (
        f"{training.precision}, {training.seq_len:,} tokens a sequence, global batch "
        f"{file.best.plan.global_batch:,}, {file.framework.name}"
    )
    return masthead(
        file.model.name, f"{cluster.num_devices:,} devices", f"{cluster.name}: {places}{slow}; {training_text}"
    )


def answer(content: PlanContent) -> Markup:
    """Return the plan and its main figures."""
    file = content.file
    choice = tag("p", sure(file), class_="sure") if file.certificate else None
    return tag(
        "section",
        tag("h2", "The plan", id="answer-title", class_="unseen"),
        tag("p", *_axes(file), class_="plan"),
        _warning(file),
        tag("div", *_figures(file), class_="figures"),
        choice,
        pairs(_further_lines(file)),
        id="answer",
        aria_labelledby="answer-title",
    )


def sure(file: PlanFile) -> str:
    """Return the certificate as a sentence."""
    assert file.certificate is not None
    sentences = [proof_line(file.certificate)]
    if file.choice and file.choice.runner_up:
        sentences.append(f"next best: {next_best_line(file.choice, file.certificate, file.best.plan)}")
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def _axes(file: PlanFile) -> Iterator[Markup]:
    """Yield the parts of a plan's description, with highlighted degrees."""
    degrees, *options = file.best.plan.describe().split(", ")
    words = degrees.split()
    for axis, degree in zip(words[::2], words[1::2], strict=True):
        yield tag("span", tag("span", axis, class_="quiet"), " ", tag("strong", degree), class_="axis")
        yield Markup(" ")
    for text in options:
        yield tag("span", text, class_="axis plain")
        yield Markup(" ")


def _warning(file: PlanFile) -> Child:
    if file.best.verdict == "fits":
        return None
    risk = format_percent(file.best.oom_probability)
    subject = "No plan fits safely: this one" if file.certificate else "This plan"
    return tag("p", f"{subject} {VERDICTS[file.best.verdict]} (risk {risk}).", class_="warning")


def interval_figure(step_s: float, low_s: float, high_s: float) -> Markup:
    """Return the step time with its interval."""
    widest, text = 1.04 * high_s, f"{format_seconds(low_s)} to {format_seconds(high_s)}"
    drawn = bar(
        [Segment(name="90 % interval", colour="interval", share=(high_s - low_s) / widest, text=text)],
        start=low_s / widest,
        mark=step_s / widest,
    )
    return figure("Step time", format_seconds(step_s), drawn, f"90 % interval {text}")


def _figures(file: PlanFile) -> Iterator[Markup]:
    best = file.best
    yield interval_figure(best.step_s, best.low_s, best.high_s)
    rate = best.tokens_per_s_per_device
    yield figure(
        "Throughput",
        f"{rate:,.0f}",
        None,
        f"tokens/s per device; {rate * file.num_devices:,.0f} tokens/s in all",
    )
    yield figure(
        "MFU",
        format_percent(best.mfu),
        bar([Segment(name="MFU", colour="compute", share=best.mfu, text=format_percent(best.mfu))]),
        mfu_convention(file),
    )
    used = best.memory_bytes / max(file.capacity_bytes, best.memory_bytes)
    yield figure(
        "Memory",
        format_bytes(best.memory_bytes),
        bar([Segment(name="worst stage", colour="memory", share=used, text=format_bytes(best.memory_bytes))]),
        f"of {format_bytes(file.capacity_bytes)} on the fullest stage; OOM risk {risk_text(best.oom_probability)}",
    )


def figure(label: str, value: str, drawn: Child, meaning: str) -> Markup:
    """Return a figure with its label, a bar and its meaning."""
    return tag(
        "div",
        tag("p", label, class_="label"),
        tag("p", value, class_="value"),
        drawn or tag("div", class_="bar empty"),
        tag("p", meaning, class_="note"),
        class_="figure",
    )


def _further_lines(file: PlanFile) -> Iterator[tuple[str, Child]]:
    """Yield further lines of the answer, if any."""
    if layers := layers_line(file):
        yield "layers", layers
    yield from training_lines(file.model, file.training)
    for _, text in (*lengths_lines(file), *encoder_lines(file)):
        yield "lengths", text
    choice = file.choice
    if second := choice.runner_up if choice else next(iter(file.alternatives), None):
        yield "why", why_first(file.best, second, keeps_today=file.today is not None)
    if file.run:
        from autoplan.report.run_report import run_lines

        yield from run_lines(file.run.best.figures, file.run.best.plan)
    if file.today:
        from autoplan.report.launch_file import gap_line

        yield "today", f"{file.today.plan.describe()} ({file.today.path})"
        if file.today.gap and file.today.priced:
            yield "gap", gap_line(file.today)
