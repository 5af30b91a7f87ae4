"""Page of a team's timing database: coverage of each machine, age and spread of its records, and gaps."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import date

from autoplan.base.units import format_percent
from autoplan.report.page.elements import folded, note, section, table
from autoplan.report.page.html import Markup, tag
from autoplan.report.page.page import page_text
from autoplan.spec.team_overview import ComparedTimes, MachineRecords, PlanNeeds, TeamOverview

MACHINE_COLUMNS = (
    *(("machine", False), ("hosts", False), ("by", False), ("records", True), ("settled", True), ("approved", True)),
    *(("hidden", True), ("runs", True), ("newest", False), ("age", True)),
)
OPERATION_COLUMNS = (
    *(("operation", False), ("shapes", True), ("records", True), ("settled", True), ("failed", True)),
    *(("approved", True), ("hidden", True), ("first", False), ("last", False), ("spread", True)),
)
COMPARED_COLUMNS = (("device", False), ("shapes", True), ("usually", True), ("at most", True), ("in", False))
SLOW_COLUMNS = (("host", False), ("device", False), ("index", True), ("what", False), ("day", False))
SERVED_COLUMNS = (("source", False), ("shapes", True))
MISSING_COLUMNS = (("not measured", False), ("shapes", True))
MAX_HOSTS = 4  # named per machine


def team_page(team: TeamOverview) -> str:
    """Return the page as the text of a file."""
    head = tag(
        "div",
        tag("p", "autoplan timing database", class_="brand"),
        tag("h1", team.database),
        tag("p", f"as of {team.day}", class_="asked"),
    )
    shown = {"machines": ("machines", _machines(team))}
    if team.plans:
        shown["plans"] = ("what plans lack", _plans(team.plans))
    shown["slow"] = ("slow parts", _slow(team))
    of = compared_words(team)
    shown["hosts"] = ("hosts", _compared("hosts", "Hosts compared", "host", team.hosts, of))
    shown["days"] = ("days", _compared("days", "Days compared", "day", team.days, of))
    return page_text(f"{team.database}: autoplan timing database", head, dict(shown), start="the machines")


def _machines(team: TeamOverview) -> Markup:
    records = sum(operation.records for machine in team.machines for operation in machine.operations)
    runs = sum(machine.runs for machine in team.machines)
    return section(
        "machines",
        "Coverage of each machine",
        f"{records:,} records and {runs:,} training runs of {len(team.machines):,} machines.",
        table(
            "Records of each machine", MACHINE_COLUMNS, (_machine_cells(machine, team.day) for machine in team.machines)
        ),
        *(
            folded(
                f"{machine.machine}: by operation",
                table(f"Operations of {machine.machine}", OPERATION_COLUMNS, _operation_cells(machine)),
            )
            for machine in team.machines
            if machine.operations
        ),
        note(
            "Settled: nothing disturbed them.  Approved or hidden: by a person, or hidden by the check; others are "
            "proposed.  Spread: of a shape over hosts and days, the slowest over the fastest; the median of all shapes."
        ),
    )


def _machine_cells(machine: MachineRecords, today: str) -> Sequence[str]:
    def total(name: str) -> str:
        return f"{sum(getattr(operation, name) for operation in machine.operations):,}"

    hosts = ", ".join(machine.hosts[:MAX_HOSTS])
    more = len(machine.hosts) - MAX_HOSTS
    return (
        *(machine.machine, f"{hosts} and {more:,} more" if more > 0 else hosts, ", ".join(machine.authors)),
        *(total(name) for name in ("records", "settled", "approved", "hidden")),
        *(f"{machine.runs:,}", machine.last_day, _age(machine.last_day, today)),
    )


def _age(day: str, today: str) -> str:
    return f"{max((date.fromisoformat(today) - date.fromisoformat(day)).days, 0):,} d" if day else ""


def _operation_cells(machine: MachineRecords) -> Iterator[Sequence[str]]:
    for row in machine.operations:
        numbers = (row.shapes, row.records, row.settled, row.failed, row.approved, row.hidden)
        spread = "" if row.spread is None else format_percent(row.spread)
        yield (row.operation, *(f"{number:,}" for number in numbers), row.first_day, row.last_day, spread)


def _plans(plans: Sequence[PlanNeeds]) -> Markup:
    return section(
        "plans",
        "What plans lack",
        "Timings that each plan needs, by how this database provides them.",
        *(part for needs in plans for part in _plan(needs)),
    )


def _plan(needs: PlanNeeds) -> Iterator[Markup]:
    yield tag("h3", needs.plan)
    yield table(f"Times of {needs.path}", SERVED_COLUMNS, ((name, f"{n:,}") for name, n in needs.served.items()))
    if needs.missing:
        yield table(
            f"Missing for {needs.path}",
            MISSING_COLUMNS,
            ((name, f"{n:,}") for name, n in needs.missing.items()),
        )
        yield note("Measure them: ", tag("code", f"autoplan profile --for {shlex.quote(needs.path)}"))


def _slow(team: TeamOverview) -> Markup:
    if not team.slow:
        return section("slow", "Slow parts", "None found: autoplan profile --health runs a check.")
    rows = ((part.host, part.device, part.index, part.reason, part.day) for part in team.slow)
    summary = f"{len(team.slow):,} parts were slower than their peers in the last check."
    return section("slow", "Slow parts", summary, table("Slow parts", SLOW_COLUMNS, rows))


def compared_words(team: TeamOverview) -> str:
    """Describe which shapes are compared; blank if all are."""
    if team.compared_share == 1:
        return ""
    return f"{format_percent(team.compared_share)} of the shapes are compared, the same ones everywhere"


def _compared(name: str, title: str, header: str, times: Sequence[ComparedTimes], of: str) -> Markup:
    remark = [note(f"{of}.")] if of else []
    if not times:
        return section(name, title, f"No shape was measured on two {name}.", *remark)
    rows = (
        (row.name, row.device, f"{row.shapes:,}", _over(row.ratio), _over(row.worst), row.worst_what) for row in times
    )
    summary = "Times over the median of the others that measured the same shapes in the same way."
    return section(name, title, summary, table(title, ((header, False), *COMPARED_COLUMNS), rows), *remark)


def _over(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
