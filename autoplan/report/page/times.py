"""Section of time: the step by term, and by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from autoplan.base.units import format_percent, format_seconds
from autoplan.report.page.content import Content
from autoplan.report.page.elements import Segment, bar, bars, folded, key, note, section, table
from autoplan.report.page.html import Markup, tag
from autoplan.report.terminal import MIN_SHOWN_S, term_name
from autoplan.spec.estimate import PlacedStage, StageCost
from autoplan.spec.terms import LAST_WAITS, UPDATE_TERMS

MAX_ROWS = 20  # rows of the usual height

# Kinds of time with their colours and terms.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compute": ("computing", ("gemm", "attention", "memory_bound", "recompute", "reference", "head")),
    "traffic": (
        "communication that shows",
        ("tp_communication", "cp_communication", "ep_communication", "fsdp_communication", "activation_offload"),
    ),
    "wait": ("waiting in the pipeline", ("pipeline_bubble", "pipeline_send")),
    "end": ("end of the step", UPDATE_TERMS),
    "host": ("host, slow ranks and input", ("launch", "allocator_retries", "overhead", *LAST_WAITS)),
}
COLOURS = {term: kind for kind, (_, terms) in KINDS.items() for term in terms}


def _kind_seconds(terms_s: Mapping[str, float]) -> dict[str, float]:
    """Sum the terms of a step, or of a stage, by kind."""
    return {kind: sum(terms_s.get(term, 0.0) for term in terms) for kind, (_, terms) in KINDS.items()}


def kind_segments(terms_s: Mapping[str, float], width_s: float) -> Iterator[Segment]:
    """Yield the segments of a bar of the kinds of time; `width_s` is its full width."""
    for kind, seconds in _kind_seconds(terms_s).items():
        yield Segment(name=KINDS[kind][0], colour=kind, share=seconds / width_s, text=format_seconds(seconds))


def kind_key() -> Markup:
    """Return the colour key of the kinds of time."""
    return key((kind, name) for kind, (name, _) in KINDS.items())


def times(content: Content) -> Markup:
    """Return the step as a waterfall, and the busy time of every stage."""
    file = content.file
    return section(
        "time",
        "Where the time goes",
        _summary(file.best.terms_s, file.best.step_s),
        kind_key(),
        bars("Time of a step by term", ("term", "in a step", "time", "share"), _waterfall(file.best.terms_s), "total"),
        note("Work is that of the busiest stage; the others wait for the difference.")
        if len(content.stages) > 1
        else None,
        _stages(content),
    )


def _summary(terms_s: Mapping[str, float], step_s: float) -> str:
    kinds = sorted(_kind_seconds(terms_s).items(), key=lambda item: -item[1])
    (first, first_s), *next_two = kinds[:3]
    further = ", ".join(f"{format_percent(value / step_s)} {KINDS[kind][0]}" for kind, value in next_two if value > 0)
    return f"{format_percent(first_s / step_s)} of a step is {KINDS[first][0]}{f', {further}' if further else ''}."


def _waterfall(terms_s: Mapping[str, float]) -> Iterator[tuple[str, Markup, str, str]]:
    """Yield terms, each starting at the end of the previous one, and their sum."""
    total_s, before = sum(terms_s.values()), 0.0
    for name, seconds in terms_s.items():
        if seconds >= MIN_SHOWN_S:
            text = format_seconds(seconds)
            piece = Segment(name=term_name(name), colour=COLOURS[name], share=seconds / total_s, text=text)
            yield term_name(name), bar([piece], start=before / total_s), text, format_percent(seconds / total_s)
        before += seconds
    yield "all", bar(kind_segments(terms_s, total_s)), format_seconds(total_s), format_percent(1.0)


def _stages(content: Content) -> Markup | None:
    """Return the busy time of every stage relative to the step, if there are several."""
    if len(content.stages) == 1:
        return None
    step_s = content.file.best.step_s
    kinds = alike(content.stages, lambda cost: (cost.layers, cost.terms_s))
    rows = []
    for stages in kinds:
        busy_s, count = stages[0].busy_s, stages[0].place.num_microbatches
        drawn = bar(kind_segments({name: count * value for name, value in stages[0].cost.terms_s.items()}, step_s))
        rows.append((stage_name(stages), drawn, format_seconds(busy_s), format_percent(busy_s / step_s)))
    costs = [stages[0].cost for stages in kinds]
    names = [name for name in costs[0].terms_s if any(cost.terms_s[name] >= MIN_SHOWN_S for cost in costs)]
    columns = [("stage", False), ("layers", True), ("forward", True), ("backward", True)]
    cells = [
        (
            stage_name(stages),
            str(cost.layers),
            format_seconds(cost.forward_s),
            format_seconds(cost.backward_s),
            *(or_none(cost.terms_s[name]) for name in names),
        )
        for stages, cost in zip(kinds, costs, strict=True)
    ]
    return tag(
        "div",
        tag("h3", "Work of each stage"),
        bars("Work of each stage in a step", ("stage", "in a step", "busy", "share"), rows, dense(rows)),
        note("The full width is the step time: the empty part of a bar is waiting."),
        folded(
            "Every stage, for one micro-batch",
            table("Time of one micro-batch by stage", [*columns, *((term_name(name), True) for name in names)], cells),
        ),
    )


def or_none(seconds: float) -> str:
    """Return the time of a term as text, with a word for zero."""
    return format_seconds(seconds) if seconds >= MIN_SHOWN_S else "–"


def alike(stages: Iterable[PlacedStage], of: Callable[[StageCost], object]) -> list[list[PlacedStage]]:
    """Group neighbouring stages on the same devices by equal values of `of`."""
    return [
        list(same) for _, same in groupby(stages, key=lambda item: (item.place.kind, item.place.part, of(item.cost)))
    ]


def dense(rows: Sequence[object]) -> str:
    """Return the style of a table with this many rows."""
    return "dense" if len(rows) > MAX_ROWS else ""


def stage_name(stages: Sequence[PlacedStage]) -> str:
    """Return the name of a row of equal stages."""
    first, last = stages[0].place, stages[-1].place
    names = first.name if first == last else f"{first.name}–{last.name}"
    return f"{names} on {first.part}" if first.part else names
