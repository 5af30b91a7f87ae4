"""Commands `autoplan db`: show the timing database, and move records in and out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from autoplan import api
from autoplan.base.errors import InputError
from autoplan.base.files import encode, encode_line, write_text
from autoplan.base.units import format_bytes, format_seconds
from autoplan.cli.inputs import check_outputs, url_with_password
from autoplan.cli.options import DbOption, ForceOption, QuietOption, whole_number
from autoplan.cli.progress import progress_bar
from autoplan.cli.remarks import print_warnings, print_written, say

if TYPE_CHECKING:
    from autoplan.profiler.store import Added
    from autoplan.spec.team_overview import TeamOverview

Row = TypeVar("Row")
FILTERS = ("device", "driver", "operation", "trust", "host", "status", "since", "until", "review")  # fields of `Choice`

db: typer.Typer = typer.Typer(
    help="The shared timing database: measure once, plan everywhere.", no_args_is_help=True, rich_markup_mode=None
)

OtherArgument = Annotated[str, typer.Argument(metavar="URL", help="The other database, as for --db.")]
KeysArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY...]",
        help="Keys of records or runs, or prefixes of keys; without keys, all that the options select.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OperationOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Only this operation, such as gemm or layer.")
]
DriverOption = Annotated[
    str | None, typer.Option(metavar="VERSION", help="Only this version of the driver, or those that begin so: 580.")
]
HostOption = Annotated[str | None, typer.Option(metavar="NAME", help="Only measurements of this host.")]
StatusOption = Annotated[
    str | None, typer.Option(metavar="STATUS", help="Only this status: ok, unstable, contaminated, oom or failed.")
]
SinceOption = Annotated[
    str | None, typer.Option(metavar="DAY", help="Only measurements from this day on, such as 2026-11-24.")
]
UntilOption = Annotated[
    str | None, typer.Option(metavar="DAY", help="Only measurements before this day, such as 2026-11-24.")
]
ReviewOption = Annotated[
    str | None, typer.Option(metavar="STATE", help="Only this review state: proposed, approved or hidden.")
]
RunsOption = Annotated[bool, typer.Option("--runs", help="Training runs instead of operations.")]
TrustOption = Annotated[
    list[str] | None, typer.Option(metavar="WHO", help="Only measurements of this person (repeatable).")
]
DeviceOption = Annotated[str | None, typer.Option(metavar="NAME", help="Only this device, such as h100-sxm.")]


@db.command()
def info(context: typer.Context, url: DbOption = None, json: JsonOption = False) -> None:
    """Show where the database is, and how many records it has for each machine."""
    database = api.database.holdings(url_with_password(context, url))
    if json:
        _print_json(database)
        return
    typer.echo(f"{database.database}, schema {database.schema}, {database.runs:,} training runs\n")
    columns: dict[str, Callable[[Any], object]] = {
        "device": lambda holding: holding.fingerprint.device,
        "torch": lambda holding: holding.fingerprint.torch,
        "collectives": lambda holding: holding.fingerprint.collectives,
        "runtime": lambda holding: holding.fingerprint.runtime,
        "nodes": lambda holding: holding.fingerprint.num_hosts,
        "records": lambda holding: f"{holding.num_records:,}",
        "hidden": lambda holding: f"{holding.num_hidden:,}",
        "newest": lambda holding: holding.newest[:10],
    }
    _print_rows(columns, database.holdings, numbers=("nodes", "records", "hidden"))


@db.command("list")
def list_(
    context: typer.Context,
    url: DbOption = None,
    device: DeviceOption = None,
    driver: DriverOption = None,
    operation: OperationOption = None,
    trust: TrustOption = None,
    host: HostOption = None,
    status: StatusOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    review: ReviewOption = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="Include hidden ones.")] = False,
    runs: RunsOption = False,
    limit: Annotated[int, whole_number("--limit", "N", "Maximum number of rows.", at_least=1)] = 100,
    json: JsonOption = False,
) -> None:
    """List records or training runs in the order in which they were added."""
    from autoplan.profiler.store import Choice  # brings SQLAlchemy

    database, max_rows = url_with_password(context, url), limit + 1  # one more, to know whether there are more
    choice = Choice(**{name: context.params[name] for name in FILTERS})
    hidden = hidden or review == "hidden"
    if not runs:
        records = api.database.list_records(database, choice, hidden=hidden, limit=max_rows)
        _print_listed(RECORD_COLUMNS, records, limit, numbers=("time",), json=json)
        return
    if operation:
        raise InputError("--runs lists training runs, which have no --operation")
    listed = api.database.list_runs(database, choice, hidden=hidden, limit=max_rows)
    _print_listed(RUN_COLUMNS, listed, limit, numbers=("step", "predicted", "memory"), json=json)


RECORD_COLUMNS: dict[str, Callable[[Any], object]] = {
    "key": lambda row: row.key[:12],
    "operation": lambda row: row.record.operation,
    "shape": lambda row: "x".join(map(str, row.record.shape)),
    "dtype": lambda row: row.record.dtype,
    "time": lambda row: format_seconds(row.record.seconds),
    "status": lambda row: row.record.status,
    "device": lambda row: row.record.fingerprint.device,
    "kernel": lambda row: row.record.kernel,
    "mode": lambda row: row.record.mode,
    "review": lambda row: row.review,
    "load": lambda row: row.record.conditions.get("other_load", ""),
    "by": lambda row: row.record.measured_by,
    "host": lambda row: row.record.host,
    "day": lambda row: row.record.measured_at[:10],
    "driver": lambda row: row.record.fingerprint.driver,
}
RUN_COLUMNS: dict[str, Callable[[Any], object]] = {
    "key": lambda row: row.key[:12],
    "model": lambda row: row.run.model.name,
    "plan": lambda row: row.run.plan.describe(),
    "framework": lambda row: row.run.framework,
    "step": lambda row: format_seconds(row.seconds) if row.seconds else "",
    "predicted": lambda row: format_seconds(row.run.predicted_s) if row.run.predicted_s else "",
    "memory": lambda row: format_bytes(row.run.peak_bytes) if row.run.peak_bytes else "",
    "status": lambda row: row.run.status,
    "device": lambda row: row.run.fingerprint.device,
    "review": lambda row: row.review,
    "load": lambda row: row.run.conditions.get("other_load", ""),
    "MHz": lambda row: row.run.conditions.get("clock_mhz", ""),
    "by": lambda row: row.run.measured_by,
    "host": lambda row: row.run.host,
    "day": lambda row: row.run.measured_at[:10],
    "driver": lambda row: row.run.fingerprint.driver,
}


@db.command()
def show(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of a record or run, or a prefix of it.")],
    url: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Show one record or training run, with its samples, its machine and its review."""
    shown = api.database.find(key, url_with_password(context, url))
    if json:
        _print_json(shown)
    else:
        typer.echo(encode(shown), nl=False)


@db.command()
def push(
    context: typer.Context,
    to: OtherArgument,
    url: DbOption = None,
    trust: TrustOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Add the visible records and runs, and the reviews, of this database to another one.

    The other one quarantines implausible records.
    """
    _copy(url_with_password(context, url), url_with_password(context, to), trust, json=json, quiet=quiet)


@db.command()
def pull(
    context: typer.Context,
    from_: OtherArgument,
    url: DbOption = None,
    trust: TrustOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Add the visible records and runs, and the reviews, of another database to this one; needs read access only."""
    _copy(url_with_password(context, from_), url_with_password(context, url), trust, json=json, quiet=quiet)


def _copy(source: str | None, target: str | None, trust: list[str] | None, *, json: bool, quiet: bool) -> None:
    with progress_bar(quiet=quiet, doing="adding", unit="records") as show:
        on_batch = (lambda done: show(done, None)) if show else None
        added = api.database.copy(source, target, trust=trust, on_batch=on_batch)
    _print_added(added, json=json)


@db.command()
def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The jsonl.gz file to write.")],
    url: DbOption = None,
    device: DeviceOption = None,
    trust: TrustOption = None,
    anonymous: Annotated[bool, typer.Option("--anonymous", help="Remove hosts and users.")] = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Write the visible records and training runs, and the reviews, to an exchange file."""
    written = api.database.export_file(
        file, url_with_password(context, url), device=device, trust=trust, anonymous=anonymous, force=force
    )
    if json:
        _print_json(written)
    marks = f" and {written.marks:,} reviews" if written.marks else ""
    print(f"{written.records:,} records and {written.runs:,} runs{marks} written to {file}", file=sys.stderr)


@db.command("import")
def import_(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Exchange file, output of nccl-tests or rccl-tests (text or JSON), trace of torch's profiler, "
            "folder with the traces or the NCCL Inspector logs of one run, or `aiconfigurator`.",
        ),
    ],
    url: DbOption = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device of a log or trace; for aiconfigurator, the only device to import."),
    ] = None,
    operation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Operation of a log that does not name it: all_reduce, all_gather, ..."),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Add records from a file or from the tables of aiconfigurator; invalid files add nothing."""
    records, unknown = api.database.read_records(source, device=device, operation=operation)
    if unknown:
        counts = ", ".join(f"{count:,} of {name}" for name, count in unknown.items())
        warning = f"skipped records of operations that this version does not know: {counts}"
        print_warnings([warning], quiet=quiet)
    with progress_bar(quiet=quiet, doing="adding", unit="records") as show:
        on_batch = (lambda done: show(done, None)) if show else None
        added = api.database.add(records, url_with_password(context, url), on_batch=on_batch)
    _print_added(added, json=json)


@db.command()
def check(context: typer.Context, url: DbOption = None, json: JsonOption = False) -> None:
    """Find records that cannot be right: faster than the device, unsettled, or changed since they were added."""
    findings = api.database.check(url_with_password(context, url))
    if json:
        _print_json(findings)
        return
    for finding in findings:
        typer.echo(f"{finding.key[:12]}  {finding.what}: {finding.reason}")
    print(f"{len(findings):,} findings; `autoplan db hide KEY --reason WHY` excludes a record", file=sys.stderr)


@db.command()
def report(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page.")] = None,
    plans: Annotated[
        list[Path] | None,
        typer.Option("--for", metavar="PLAN", help="Report which timings this plan.json lacks (repeatable)."),
    ] = None,
    url: DbOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare hosts and days; with --out write a page on the coverage, age and spread of the measurements."""
    check_outputs(out, force=force)
    overview = api.team.overview(url_with_password(context, url), plans or ())
    if out is not None:
        write_text(out, api.team.page_of(overview), force=force)
        print_written(out, quiet=quiet)
    if json:
        _print_json(overview)
    elif out is None:
        _print_compared(overview)


def _print_compared(overview: TeamOverview) -> None:
    """Print slow parts, then times of hosts and days relative to others, and the times that plans lack."""
    from autoplan.report.page.team import compared_words

    for part in overview.slow:
        typer.echo(f"slow: device {part.index} of {part.host} ({part.device}): {part.reason}, {part.day}")
    for title, times in (("host", overview.hosts), ("day", overview.days)):
        columns: dict[str, Callable[[Any], object]] = {
            title: lambda row: row.name,
            "device": lambda row: row.device,
            "shapes": lambda row: f"{row.shapes:,}",
            "usually": lambda row: f"{100 * (row.ratio - 1):+.1f} %",
            "at most": lambda row: f"{100 * (row.worst - 1):+.1f} %",
            "in": lambda row: row.worst_what,
        }
        if times:
            _print_rows(columns, times, numbers=("shapes", "usually", "at most"))
        else:
            typer.echo(f"no shape was measured on two {title}s")
    if words := compared_words(overview):
        typer.echo(words)
    for needs in overview.plans:
        served = ", ".join(f"{number:,} {how}" for how, number in needs.served.items())
        typer.echo(f"{needs.path}: {served}")


def _mark(
    context: typer.Context,
    reason: Annotated[str, typer.Option(metavar="WHY", help="Reason, shown to others.")],
    keys: KeysArgument = None,
    url: DbOption = None,
    device: DeviceOption = None,
    driver: DriverOption = None,
    operation: OperationOption = None,
    trust: TrustOption = None,
    host: HostOption = None,
    status: StatusOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    review: ReviewOption = None,
    runs: RunsOption = False,
    json: JsonOption = False,
) -> None:
    """Hide or approve the records named or selected on the command line."""
    from autoplan.profiler.store import Choice  # brings SQLAlchemy

    typed, hides = context.params, context.info_name == "hide"
    chosen = {name: typed[name] for name in FILTERS if typed[name]}
    if bool(typed["keys"]) == bool(chosen or typed["runs"]):
        raise InputError("give either keys, or filters such as --host and --since")
    if typed["operation"] and typed["runs"]:
        raise InputError("--runs selects training runs, which have no --operation")
    url = url_with_password(context, typed["url"])
    if typed["keys"]:
        counts = api.database.change(typed["keys"], typed["reason"], url, hides=hides)
    else:
        choice = Choice(**chosen)
        counts = api.database.change_chosen(choice, typed["reason"], url, hides=hides, runs=typed["runs"])
    if typed["json"]:
        _print_json(counts)
    done = "hidden" if hides else "approved"
    if counts.changed + counts.as_before:
        print(f"{counts.changed:,} {done}, {counts.as_before:,} already were", file=sys.stderr)
    else:
        print(f"no match: none was {done}; autoplan db list takes the same filters", file=sys.stderr)


db.command(
    "hide",
    help="Exclude records or runs from use; they stay in the database with your name and reason.\n\n"
    "Preview the selection with `autoplan db list` and the same options.",
)(_mark)
db.command(
    "approve",
    help="Confirm records or runs in your name; hidden and quarantined ones are used again.\n\n"
    "Earlier reviews are kept: `autoplan db show KEY`.",
)(_mark)


def _print_added(added: Added, *, json: bool) -> None:
    if json:
        _print_json(added)
        return
    text = f"{added.new:,} new, {added.present:,} already there"
    if added.left_out:
        text += f", {added.left_out:,} hidden not copied"
    if added.marks:
        text += f"; {added.marks:,} new review{'s' * (added.marks > 1)}"
    if added.first:
        text += f"; {added.quarantined:,} quarantined, the first {added.first.key[:12]}: {added.first.reason}"
    typer.echo(text)


def _print_listed(
    columns: Mapping[str, Callable[[Row], object]], rows: list[Row], limit: int, *, numbers: Collection[str], json: bool
) -> None:
    """Print up to `limit` rows, with a note if there are more."""
    if len(rows) > limit:
        rows = rows[:limit]
        say(f"showing the first {limit:,}: raise --limit or add filters")
    if json:
        _print_json(rows)
    elif rows:
        _print_rows(columns, rows, numbers=numbers)
    else:
        say("no match in the database")


def _print_rows(
    columns: Mapping[str, Callable[[Row], object]], rows: Sequence[Row], *, numbers: Collection[str]
) -> None:
    from autoplan.report.terminal import make_console, print_table

    cells = [[str(value(row)) for value in columns.values()] for row in rows]
    print_table(make_console(), [(name, name in numbers) for name in columns], cells)


def _print_json(value: Any) -> None:
    typer.echo(encode_line(value), nl=False)
