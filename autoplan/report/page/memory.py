"""Where does the memory go?  Term by term on the fullest stage, and every stage beside the capacity."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.report.page.content import Content
from autoplan.report.page.html import Markup, tag
from autoplan.report.page.parts import Segment, bar, bars, folded, key, note, section, table
from autoplan.report.page.times import alike, dense, stage_name
from autoplan.report.terminal import MEMORY_NAMES, MEMORY_SUMS, summed_memory
from autoplan.result import StageCost
from autoplan.units import GIB, format_bytes, format_percent

# What the sums of `MEMORY_SUMS` are called.
SUM_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "head and loss",
    "buffers": "buffers",
    "outside": "context, fragmentation, NCCL",
}
COLOUR_OF_TERM = {term: f"m-{name}" for name, terms in MEMORY_SUMS.items() for term in terms}


def memory(content: Content) -> Markup:
    """The fullest stage as a waterfall, then all stages."""
    file = content.file
    capacity = file.best.memory_bytes + file.best.memory_headroom_bytes
    worst = max(file.stages, key=lambda stage: stage.memory_bytes)
    scale = max(capacity, worst.memory_bytes) * 1.02
    kinds = alike(file.stages, lambda stage: stage.memory_terms_bytes)
    return section(
        "memory",
        "Where the memory goes",
        _says(worst, capacity, len(file.stages)),
        key((f"m-{name}", text) for name, text in SUM_NAMES.items()),
        bars(
            f"Memory of stage {worst.stage} by term",
            (f"stage {worst.stage}", "memory of a device", "GiB"),
            _waterfall(worst, capacity, scale),
            "total",
        ),
        tag("h3", "Each stage beside the capacity") if len(kinds) > 1 else None,
        bars(
            "Memory of each stage",
            ("stage", "memory of a device", "GiB", "free"),
            (
                (
                    stage_name(stages),
                    _stacked(stages[0], capacity, scale),
                    f"{stages[0].memory_bytes / GIB:,.1f}",
                    f"{(capacity - stages[0].memory_bytes) / GIB:,.1f}",
                )
                for stages in kinds
            ),
            dense(kinds),
        )
        if len(kinds) > 1
        else None,
        note(
            f"The line is what a device has to give: {format_bytes(capacity)}"
            f"{f', {format_bytes(file.reserve_bytes)} kept free' if file.reserve_bytes else ''}."
        ),
        folded("Every term of every stage", _table(kinds, capacity)),
    )


def _says(worst: StageCost, capacity: float, num_stages: int) -> str:
    free = capacity - worst.memory_bytes
    where = f"Stage {worst.stage} is fullest: it" if num_stages > 1 else "A device"
    left = f"and leaves {format_bytes(free)}" if free >= 0 else f"which is {format_bytes(-free)} too much"
    return f"{where} takes {format_bytes(worst.memory_bytes)} of {format_bytes(capacity)} {left}."


def _waterfall(stage: StageCost, capacity: float, scale: float) -> Iterator[tuple[str, Markup, str]]:
    before = 0.0
    for name, value in stage.memory_terms_bytes.items():
        if value >= 0.005 * GIB:
            piece = Segment(
                name=MEMORY_NAMES[name], colour=COLOUR_OF_TERM[name], share=value / scale, text=format_bytes(value)
            )
            yield MEMORY_NAMES[name], bar([piece], start=before / scale, mark=capacity / scale), f"{value / GIB:,.2f}"
        before += value
    yield "all", _stacked(stage, capacity, scale), f"{stage.memory_bytes / GIB:,.2f}"


def _stacked(stage: StageCost, capacity: float, scale: float) -> Markup:
    segments = (
        Segment(name=SUM_NAMES[name], colour=f"m-{name}", share=value / scale, text=format_bytes(value))
        for name, terms in MEMORY_SUMS.items()
        if (value := summed_memory(stage, terms)) > 0
    )
    return bar(segments, mark=capacity / scale)


def _table(kinds: list[list[StageCost]], capacity: float) -> Markup:
    """One row a stage, one column a term."""
    names = [name for name in MEMORY_NAMES if any(stages[0].memory_terms_bytes.get(name) for stages in kinds)]
    columns = [("stage", False), *((MEMORY_NAMES[name], True) for name in names)]
    columns += [("all", True), ("free", True), ("risk", True)]
    rows = (
        (
            stage_name(stages),
            *(f"{stages[0].memory_terms_bytes.get(name, 0.0) / GIB:,.2f}" for name in names),
            f"{stages[0].memory_bytes / GIB:,.2f}",
            f"{(capacity - stages[0].memory_bytes) / GIB:,.2f}",
            format_percent(stages[0].oom_probability),
        )
        for stages in kinds
    )
    return table("Memory of each stage by term, in GiB", columns, rows)
