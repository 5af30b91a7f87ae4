"""Section of memory: terms of the fullest stage, and all stages relative to their capacity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autoplan.base.units import GIB, format_bytes, format_percent
from autoplan.report.page.content import Content
from autoplan.report.page.elements import Segment, bar, bars, folded, key, note, section, table
from autoplan.report.page.html import Markup, tag
from autoplan.report.page.times import alike, dense, stage_name
from autoplan.report.terminal import MEMORY_NAMES, MEMORY_SUMS, summed_memory
from autoplan.spec.estimate import PlacedStage

# Names of the sums in `MEMORY_SUMS`.
SUM_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "head and loss",
    "buffers": "buffers",
    "outside": "context, fragmentation, NCCL",
}
COLOUR_OF_TERM: dict[str, str] = {term: f"m-{name}" for name, terms in MEMORY_SUMS.items() for term in terms}


def memory(content: Content) -> Markup:
    """Return the fullest stage as a waterfall, then all stages."""
    worst = max(content.stages, key=lambda stage: stage.fill)
    scale = 1.02 * max(max(stage.place.capacity_bytes, stage.cost.memory_bytes) for stage in content.stages)
    kinds = alike(content.stages, lambda cost: cost.memory_terms_bytes)
    reserve_bytes = content.file.reserve_bytes
    return section(
        "memory",
        "Where the memory goes",
        _summary(worst, len(content.stages)),
        key((f"m-{name}", text) for name, text in SUM_NAMES.items()),
        bars(
            f"Memory of {worst.place.words} by term",
            (worst.place.words, "memory of a device", "GiB"),
            _waterfall(worst, scale),
            "total",
        ),
        tag("h3", "Each stage against the capacity") if len(kinds) > 1 else None,
        bars(
            "Memory of each stage",
            ("stage", "memory of a device", "GiB", "free"),
            (
                (
                    stage_name(stages),
                    _stacked(stages[0], scale),
                    f"{stages[0].cost.memory_bytes / GIB:,.1f}",
                    f"{_free_bytes(stages[0]) / GIB:,.1f}",
                )
                for stages in kinds
            ),
            dense(kinds),
        )
        if len(kinds) > 1
        else None,
        note(
            f"The line is what a device has to give: {_capacities(content.stages)}"
            f"{f', {format_bytes(reserve_bytes)} kept free' if reserve_bytes else ''}."
        ),
        folded("Every term of every stage", _table(kinds)),
    )


def _free_bytes(stage: PlacedStage) -> float:
    return stage.place.capacity_bytes - stage.cost.memory_bytes


def _capacities(stages: Iterable[PlacedStage]) -> str:
    """Return the device capacity of every used part of the cluster."""
    capacities = {stage.place.part: format_bytes(stage.place.capacity_bytes) for stage in stages}
    return ", ".join(f"{size} on {part}" if part else size for part, size in capacities.items())


def _summary(worst: PlacedStage, num_stages: int) -> str:
    free, words = _free_bytes(worst), worst.place.words
    where = f"{words[0].upper()}{words[1:]} is fullest: it" if num_stages > 1 else "A device"
    margin = f"and leaves {format_bytes(free)}" if free >= 0 else f"which is {format_bytes(-free)} too much"
    usage = f"{format_bytes(worst.cost.memory_bytes)} of {format_bytes(worst.place.capacity_bytes)}"
    return f"{where} takes {usage} {margin}."


def _waterfall(stage: PlacedStage, scale: float) -> Iterator[tuple[str, Markup, str]]:
    before, mark = 0.0, stage.place.capacity_bytes / scale
    for name, value in stage.cost.memory_terms_bytes.items():
        if value >= 0.005 * GIB:
            piece = Segment(
                name=MEMORY_NAMES[name], colour=COLOUR_OF_TERM[name], share=value / scale, text=format_bytes(value)
            )
            yield MEMORY_NAMES[name], bar([piece], start=before / scale, mark=mark), f"{value / GIB:,.2f}"
        before += value
    yield "all", _stacked(stage, scale), f"{stage.cost.memory_bytes / GIB:,.2f}"


def _stacked(stage: PlacedStage, scale: float) -> Markup:
    segments = (
        Segment(name=SUM_NAMES[name], colour=f"m-{name}", share=value / scale, text=format_bytes(value))
        for name, terms in MEMORY_SUMS.items()
        if (value := summed_memory(stage.cost, terms)) > 0
    )
    return bar(segments, mark=stage.place.capacity_bytes / scale)


def _table(kinds: list[list[PlacedStage]]) -> Markup:
    """Return a table with one row per stage and one column per term."""
    firsts = [stages[0] for stages in kinds]
    names = [name for name in MEMORY_NAMES if any(stage.cost.memory_terms_bytes.get(name) for stage in firsts)]
    columns = [("stage", False), *((MEMORY_NAMES[name], True) for name in names)]
    columns += [("all", True), ("free", True), ("risk", True)]
    rows = (
        (
            stage_name(stages),
            *(f"{stage.cost.memory_terms_bytes.get(name, 0.0) / GIB:,.2f}" for name in names),
            f"{stage.cost.memory_bytes / GIB:,.2f}",
            f"{_free_bytes(stage) / GIB:,.2f}",
            format_percent(stage.cost.oom_probability),
        )
        for stages, stage in zip(kinds, firsts, strict=True)
    )
    return table("Memory of each stage by term, in GiB", columns, rows)
