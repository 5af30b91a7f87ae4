"""Records behind a plan's step time, as texts and cells shared by the terminal and the page."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console

from autoplan.base.units import format_percent, format_seconds
from autoplan.cost.spreads import NORMAL_90
from autoplan.report.answer import print_answer
from autoplan.report.terminal import MIN_SHOWN_S, print_next_steps, print_part, print_table, term_name
from autoplan.spec.needed_times import NeededTime, RecordFacts, StepSources
from autoplan.spec.plan_file import PlanFile
from autoplan.spec.terms import LAST_WAITS, TERMS
from autoplan.spec.timing import TimeSource

# (header, whether cells are numbers)
NEED_COLUMNS: tuple[tuple[str, bool], ...] = (
    *(("time of a step", False), ("shape", False), ("how", False), ("share", True), ("record", False)),
)
RECORD_COLUMNS: tuple[tuple[str, bool], ...] = (
    *(("record", False), ("host", False), ("day", False), ("age", True), ("by", False), ("load", True)),
    *(("spread", True), ("kernel", False)),
    *(("torch", False), ("collectives", False), ("driver", False)),
)
MAX_NEIGHBOURS = 3  # records named for an interpolated time
MIN_SHARE = 5e-4  # of a term; less would show as 0.0 %


def print_step_sources(console: Console, file: PlanFile, sources: StepSources, path: str) -> None:
    """Print the source of each time that pricing the plan looks up, and where and when the records were measured."""
    print_answer(console, file)
    console.print()
    print_table(console, NEED_COLUMNS, need_rows(sources), keep=5)
    if rows := [*record_rows(sources)]:
        console.print()
        print_table(console, RECORD_COLUMNS, rows, keep=6)
    console.print()
    for line in remarks(sources):
        print_part(console, line)
    if any(need.served != "measured" for need in sources.needed):
        print_next_steps(console, ("next", f"autoplan profile --for {path}"))


def remarks(sources: StepSources) -> Iterator[str]:
    """Yield remarks on the records' database, their machine, and omitted records."""
    if not sources.timings:
        yield "nothing was measured: the plan is priced from published measurements and datasheets"
        return
    of = f" for {sources.machine}" if sources.machine else ""
    yield f"timings: {sources.database or sources.timings}{of}"
    if sources.unknown:
        yield sources.unknown
    if sources.spreads:
        yield (
            "+-: 90 % interval of the measured part of a term, from the spread of its samples and of times for other "
            "shapes, groups or machines"
        )


def need_rows(sources: StepSources) -> Iterator[tuple[str, ...]]:
    """Yield the cells of `NEED_COLUMNS` by term, largest shares first."""
    by_term: dict[str, list[NeededTime]] = {}
    for need in sources.needed:
        by_term.setdefault(_term_of(need, sources), []).append(need)
    for name in (*(term.name for term in TERMS), ""):
        needs = [need for need in by_term.get(name, ()) if _is_shown(need, name)]
        seconds = sources.terms_s.get(name, 0.0)
        if not needs and seconds < MIN_SHOWN_S:
            continue
        title = f"{term_name(name)}, {format_seconds(seconds)}" if name else "with others only"
        if name in sources.spreads:
            title += f" {_within(sources.spreads[name])}"
        measured = sources.measured_shares.get(name, 0.0)
        if not needs and measured > MIN_SHARE:
            yield (title, "", "same as the terms above", format_percent(measured))
        elif not needs:
            yield (title, "", "not measured", format_percent(1.0))
        for need in sorted(needs, key=lambda need: -(need.terms.get(name) or 0.0)):
            yield from _need_rows(title, need, need.terms.get(name))
            title = ""
        if needs and 1 - measured > MIN_SHARE:
            yield ("", "(all the rest)" if measured else "(all)", "not measured", format_percent(1 - measured))


def _term_of(need: NeededTime, sources: StepSources) -> str:
    """Return the term with the largest share of a time; blank if it only counts together with others."""
    return max(
        need.terms,
        key=lambda name: -1.0 if name in LAST_WAITS else sources.terms_s.get(name, 0.0) * (need.terms[name] or 1.0),
        default="",
    )


def _is_shown(need: NeededTime, term: str) -> bool:
    share = need.terms.get(term)
    return share is None or share >= MIN_SHARE


def _need_rows(title: str, need: NeededTime, share: float | None) -> Iterator[tuple[str, ...]]:
    """Yield the row of a time, and the records from which it is interpolated or scaled."""
    shape = f"{need.operation} {_sizes(need.shape)} {need.dtype}"
    is_timed = need.served in ("measured", "disturbed")
    key = need.sources[0].source if is_timed and need.sources else ""
    yield (title, shape, need.served, "" if share is None else format_percent(share), key)
    if need.served in ("interpolated", "scaled"):
        for source in _shown_sources(need):
            counts = f"counts {format_percent(source.share)}" if len(need.sources) > 1 else ""
            yield ("", f"  from {_sizes(source.shape)}", counts, "", source.source)


def _shown_sources(need: NeededTime) -> list[TimeSource]:
    return [source for source in need.sources if abs(source.share) >= MIN_SHARE][:MAX_NEIGHBOURS]


def record_rows(sources: StepSources) -> Iterator[tuple[str, ...]]:
    """Yield the cells of `RECORD_COLUMNS` for each named record, largest shares of the step first."""
    keys = (source.source for need in sources.needed for source in _shown_sources(need))
    for key in dict.fromkeys(keys):
        if facts := sources.records.get(key):
            yield (
                *(key, facts.host, facts.measured_at[:10], _age_words(facts), facts.measured_by, facts.other_load),
                "" if facts.spread is None else format_percent(facts.spread),
                *(facts.kernel, facts.torch, facts.collectives, facts.driver),
            )


def _within(spread: float) -> str:
    """Return half the width of the 90 % interval of a time with this log spread."""
    return f"+-{100 * math.expm1(NORMAL_90 * spread):.1f} %"


def _age_words(facts: RecordFacts) -> str:
    """Return the age of a record in days."""
    return "" if facts.age_days is None else f"{max(facts.age_days, 0.0):,.0f} d"


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
