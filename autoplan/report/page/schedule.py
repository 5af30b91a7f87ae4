"""Section of the schedule: a Gantt chart of every stage from the timeline behind the estimate."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from typing import Any

import numpy as np

from autoplan.base.units import format_percent, format_seconds
from autoplan.report.page.content import Content
from autoplan.report.page.elements import chart, folded, key, note, section, table
from autoplan.report.page.html import Markup, data
from autoplan.report.page.times import KINDS, or_none
from autoplan.report.terminal import number_ranges, term_name
from autoplan.spec.timeline import RankTimeline, Timeline

MAX_MESSAGES = 100_000  # per page
SHOWN_RANGES = 3
TRAFFIC = KINDS["traffic"][1]
COLOURS = {
    "forward": "forward",
    "backward": "backward",
    "input_gradient": "input-gradient",
    "weight_gradient": "weight-gradient",
}


def schedule(content: Content) -> Markup:
    """Return the step of one rank per stage, and the breakdown of its time."""
    timeline = content.schedule
    title = "The step, moment by moment"
    if timeline is None:
        return section("schedule", title, content.why_not("schedule"))
    return section(
        "schedule",
        title,
        _summary(timeline),
        chart(
            "gantt",
            "Schedule of the pipeline, a row for one rank of each stage",
            _key(timeline),
            data("content", _content(timeline)),
        ),
        note(*_notes(timeline)),
        folded("Each stage", _table(timeline)),
    )


def _summary(timeline: Timeline) -> str:
    if len(timeline.ranks) == 1:
        return "There is one stage: every rank does the same, and none waits for the passes of another."
    waits = [_waits_s(rank, timeline.pipeline_s) for rank in timeline.ranks]
    idle = sum(waits) / len(waits) / timeline.step_s
    return (
        f"{_micro_batches(timeline)} {format_seconds(timeline.pipeline_s)} of the {format_seconds(timeline.step_s)}; "
        f"on average, a stage waits for others for {format_percent(idle)} of the step."
    )


def _micro_batches(timeline: Timeline) -> str:
    """Describe the numbers of micro-batches and stages."""
    last = {rank.place.kind: rank.place for rank in timeline.ranks}
    if len(last) == 1:
        return f"Its {timeline.ranks[0].place.num_microbatches:,} micro-batches take the {len(timeline.ranks)} stages"
    parts = [f"{place.num_microbatches:,} micro-batches of a replica {kind}" for kind, place in last.items()]
    return f"{', '.join(parts[:-1])} and {parts[-1]} take, each on its own stages,"


def _waits_s(rank: RankTimeline, until_s: float) -> float:
    return sum(event.duration_s for event in rank.other_events if event.stream == "wait" and event.start_s < until_s)


def _key(timeline: Timeline) -> Markup:
    is_split = any(kind == "weight_gradient" for kind, _ in _codes(timeline.ranks[0]))
    entries = [("forward", "forward"), ("backward", "gradient of the inputs" if is_split else "backward")]
    entries += [("weight-gradient", "gradient of the weights")] if is_split else []
    entries += [("traffic", "exposed communication, messages"), ("wait", "bubble")]
    return key([*entries, ("end", "end of the step"), ("host", "host and slow ranks")])


def _notes(timeline: Timeline) -> Iterable[str]:
    yield "Drag to move, Ctrl and the wheel or two fingers to zoom. "
    yield "In a pass, the strip at the bottom is the part in which its ranks only communicate; below the passes stand "
    yield "messages and what else hides beside them. Where passes are too thin to draw, colours show their shares. "
    if abs(timeline.order_error) > 1e-3:
        yield (
            f"The estimate of this schedule is a closed form, {format_percent(abs(timeline.order_error))} "
            f"{'more' if timeline.order_error > 0 else 'less'} than its passes one by one: waits are drawn in "
            "proportion."
        )


# -- what the script draws --------------------------------------------------------------------------------------------


def _codes(rank: RankTimeline) -> list[tuple[str, int]]:
    """Return the kinds of a rank's passes by (kind, chunk)."""
    return list(dict.fromkeys((event.kind, event.chunk or 0) for event in rank.passes))


def _content(timeline: Timeline) -> dict[str, Any]:
    num_messages = sum(event.kind == "message" for rank in timeline.ranks for event in rank.other_events)
    fullest = max(timeline.ranks, key=lambda rank: float(rank.memory_bytes.max()) / rank.place.capacity_bytes)
    return {
        "step_s": timeline.step_s,
        "rows": [_row(rank, with_messages=num_messages <= MAX_MESSAGES) for rank in timeline.ranks],
        "memory": {
            "stage": fullest.place.words,
            "capacity": fullest.place.capacity_bytes,
            "time": _packed(fullest.memory_time_s),
            "bytes": _packed(fullest.memory_bytes),
        },
    }


def _row(rank: RankTimeline, *, with_messages: bool) -> dict[str, Any]:
    """Return passes as indices into a table of kinds: the n-th of a kind is for micro-batch n."""
    codes = _codes(rank)
    number = {code: at for at, code in enumerate(codes)}
    kinds = []
    for kind, chunk in codes:
        terms = rank.pass_terms_s[kind, chunk]
        seconds = sum(terms.values())
        kinds.append(
            {
                "name": kind.replace("_", " "),
                "colour": COLOURS[kind],
                "chunk": chunk,
                "seconds": seconds,
                "traffic": sum(terms.get(name, 0.0) for name in TRAFFIC) / seconds if seconds else 0.0,
            }
        )
    messages = [event for event in rank.other_events if event.kind == "message"] if with_messages else []
    return {
        "stage": rank.place.name,
        "where": rank.place.words,
        "ranks": _ranks(rank),
        "kinds": kinds,
        "codes": _packed([number[event.kind, event.chunk or 0] for event in rank.passes], np.uint16),
        "starts": _packed([event.start_s for event in rank.passes]),
        "messages": {
            "starts": _packed([message.start_s for message in messages]),
            "seconds": _packed([message.duration_s for message in messages]),
        },
        "others": [
            [
                _name(event.kind, is_hidden=event.is_hidden),
                _colour(event.kind),
                event.start_s,
                event.duration_s,
                event.is_hidden,
            ]
            for event in rank.other_events
            if event.kind not in ("message", "pipeline_bubble", "pipeline_send")
        ],
        "waits": _waits(rank),
    }


def _waits(rank: RankTimeline) -> dict[str, str]:
    """Return bubbles and waits for messages in time order."""
    waits = [event for event in rank.other_events if event.kind in ("pipeline_bubble", "pipeline_send")]
    return {
        "starts": _packed([wait.start_s for wait in waits]),
        "seconds": _packed([wait.duration_s for wait in waits]),
        "sends": _packed([wait.kind == "pipeline_send" for wait in waits], np.uint8),
    }


def _ranks(rank: RankTimeline) -> str:
    """Return the identical ranks in short notation."""
    parts = number_ranges(rank.ranks).split("+")
    more = f" and so on, {len(rank.ranks):,} in all" if len(parts) > SHOWN_RANGES else ""
    return ", ".join(parts[:SHOWN_RANGES]) + more


def _packed(values: Any, kind: type[np.generic] = np.float32) -> str:
    """Return numbers as base64 of their little-endian bytes, as a long step has hundreds of thousands."""
    return b64encode(np.asarray(values).astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def _name(kind: str, *, is_hidden: bool) -> str:
    return f"{term_name(kind)}, hidden beside passes" if is_hidden else term_name(kind)


def _colour(kind: str) -> str:
    return next((colour for colour, (_, terms) in KINDS.items() if kind in terms), "host")


# -- the same as a table ----------------------------------------------------------------------------------------------


def _table(timeline: Timeline) -> Markup:
    """Return a table of every stage's time; rows add up to the step."""
    names = {name: None for rank in timeline.ranks for name, seconds in rank.terms_s().items() if seconds > 0}
    columns = [("stage", False), ("ranks", False), *((term_name(name), True) for name in names)]
    rows = (
        (rank.place.words.removeprefix("stage "), _ranks(rank), *(or_none(rank.terms_s()[name]) for name in names))
        for rank in timeline.ranks
    )
    return table("Time of a step on each stage by term", columns, rows)
