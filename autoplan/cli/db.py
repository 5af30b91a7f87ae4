"""Commands `autoplan db`: show the timing database, and move records in and out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from autoplan.base.errors import InputError
from autoplan.cli.inputs import whole_url
from autoplan.cli.options import DbOption, ForceOption, QuietOption

if TYPE_CHECKING:
    from autoplan.profiler.record import Record
    from autoplan.profiler.run_record import RunRecord
    from autoplan.profiler.store import Added, Store

T = TypeVar("T")

db: typer.Typer = typer.Typer(
    help="The shared timing database: measure once, plan everywhere.", no_args_is_help=True, rich_markup_mode=None
)

OtherArgument = Annotated[str, typer.Argument(metavar="URL", help="The other database, as for --db.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrustOption = Annotated[list[str] | None, typer.Option(metavar="WHO", help="Only what they measured; may be repeated.")]
DeviceOption = Annotated[str | None, typer.Option(metavar="NAME", help="Only of this device, such as h100-sxm.")]


@db.command()
def info(context: typer.Context, url: DbOption = None, json: JsonOption = False) -> None:
    """Where the database is, and what it holds of which machine."""
    with _open(context, url, writable=False) as store:
        holdings = store.holdings()
        num_runs = sum(1 for _ in store.runs())
        summary = {"database": store.name, "schema": store.schema, "holdings": holdings, "runs": num_runs}
    if json:
        _print_json(summary)
        return
    from autoplan.report.terminal import make_console, print_table

    typer.echo(f"{summary['database']}, schema {summary['schema']}, {num_runs:,} training runs\n")
    columns = ("device", "torch", "collectives", "runtime", "hosts", "records", "hidden", "newest")
    print_table(
        make_console(),
        [(name, name in ("hosts", "records", "hidden")) for name in columns],
        [
            _cells(
                holding.fingerprint.device,
                holding.fingerprint.torch,
                holding.fingerprint.collectives,
                holding.fingerprint.runtime,
                holding.fingerprint.num_hosts,
                f"{holding.num_records:,}",
                f"{holding.num_hidden:,}",
                holding.newest[:10],
            )
            for holding in holdings
        ],
    )


@db.command("list")
def list_(
    context: typer.Context,
    url: DbOption = None,
    device: DeviceOption = None,
    operation: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this operation: gemm, layer.")] = None,
    trust: TrustOption = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="Hidden ones as well.")] = False,
    runs: Annotated[bool, typer.Option("--runs", help="Training runs instead of operations.")] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="At most so many.")] = 100,
    json: JsonOption = False,
) -> None:
    """Records, or training runs, in the order in which they came in."""
    from autoplan.base.units import format_seconds
    from autoplan.spec.timing import SHAPES

    if operation is not None and operation not in SHAPES:
        raise InputError(f"--operation {operation!r}: known are {', '.join(SHAPES)}")
    if runs:
        if operation or hidden:
            raise InputError("--runs lists training runs, which have no operation and are never hidden")
        with _open(context, url, writable=False) as store:
            runs_found = _first(store.runs(device=device, trust=trust or None), limit)
        _print_runs(runs_found, json=json)
        return
    with _open(context, url, writable=False) as store:
        wanted = [operation] if operation else None
        found = store.records(device=device, operations=wanted, trust=trust or None, include_hidden=hidden)
        rows = [(record.key, record) for record in _first(found, limit)]
    if json:
        _print_json([{"key": key, "seconds": _seconds(one), "record": one} for key, one in rows])
        return
    from autoplan.report.terminal import make_console, print_table

    columns = ("key", "operation", "shape", "dtype", "time", "status", "device", "kernel", "mode", "by")
    print_table(
        make_console(),
        [(name, name == "time") for name in columns],
        [
            _cells(
                key[:12],
                one.operation,
                "x".join(map(str, one.shape)),
                one.dtype,
                format_seconds(one.seconds),
                one.status,
                one.fingerprint.device,
                one.kernel,
                one.mode,
                one.measured_by,
            )
            for key, one in rows
        ],
    )


def _first(found: Iterable[T], limit: int) -> list[T]:
    """Take as many as shall be shown, with a word where there are more."""
    from itertools import islice

    shown = list(islice(found, limit + 1))
    if len(shown) > limit:
        shown.pop()
        print(f"autoplan: the first {limit:,} are shown: raise --limit or narrow the choice", file=sys.stderr)
    return shown


def _print_runs(runs_found: list[RunRecord], *, json: bool) -> None:
    from autoplan.base.units import format_bytes, format_seconds

    if json:
        _print_json([{"key": run.key, "seconds": run.seconds, "run": run} for run in runs_found])
        return
    from autoplan.report.terminal import make_console, print_table

    columns = ("key", "model", "plan", "framework", "step", "predicted", "memory", "status", "device", "by")
    print_table(
        make_console(),
        [(name, name in ("step", "predicted", "memory")) for name in columns],
        [
            _cells(
                run.key[:12],
                run.model.name,
                run.plan.describe(),
                run.framework,
                format_seconds(run.seconds) if run.seconds else "",
                format_seconds(run.predicted_s) if run.predicted_s else "",
                format_bytes(run.peak_bytes) if run.peak_bytes else "",
                run.status,
                run.fingerprint.device,
                run.measured_by,
            )
            for run in runs_found
        ],
    )


@db.command()
def show(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key of a record or run, or how it begins.")],
    url: DbOption = None,
    json: JsonOption = False,
) -> None:
    """One record with its samples, its machine and whether it is hidden; or one training run."""
    import msgspec

    shown: dict[str, object]
    with _open(context, url, writable=False) as store:
        if run := store.find_run(key.lower()):
            shown = {"key": run.key, "seconds": run.seconds, "run": run}
        else:
            record, mark = store.find(key.lower())
            shown = {"key": record.key, "seconds": _seconds(record), "record": record, "hidden": mark}
    if json:
        _print_json(shown)
    else:
        typer.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())


@db.command()
def push(
    context: typer.Context,
    to: OtherArgument,
    url: DbOption = None,
    trust: TrustOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Add what this database holds to another one, runs too; implausible records are quarantined there."""
    with _open(context, url, writable=False) as source, _open(context, to) as target:
        _add(target, _held(source, trust), json=json, quiet=quiet)


@db.command()
def pull(
    context: typer.Context,
    from_: OtherArgument,
    url: DbOption = None,
    trust: TrustOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Add what another database holds to this one, and hide and unhide here what was there; reading it suffices."""
    with _open(context, from_, writable=False) as source, _open(context, url) as target:
        _add(target, _held(source, trust), json=json, quiet=quiet)
        target.mark(source.marks())


@db.command()
def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The jsonl.gz file to write.")],
    url: DbOption = None,
    device: DeviceOption = None,
    trust: TrustOption = None,
    anonymous: Annotated[bool, typer.Option("--anonymous", help="Leave hosts and users out.")] = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Write the records that are not hidden, and the training runs, to an exchange file."""
    from autoplan.base.files import check_target
    from autoplan.profiler.store.exchange import write_exchange

    check_target(file, force=force)
    with _open(context, url, writable=False) as store:
        records = store.records(device=device, trust=trust or None)
        runs = tuple(store.runs(device=device, trust=trust or None))
        num_written = write_exchange(file, records, runs=runs, anonymous=anonymous, force=force)
    if json:
        from autoplan.api.outputs import Written

        _print_json(Written(file=str(file), records=num_written - len(runs), runs=len(runs)))
    print(f"{num_written - len(runs):,} records and {len(runs):,} runs written to {file}", file=sys.stderr)


@db.command("import")
def import_(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Exchange file, output of nccl-tests or rccl-tests (text or JSON), or `aiconfigurator`.",
        ),
    ],
    url: DbOption = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a log: its device. Of aiconfigurator: only this one.")
    ] = None,
    operation: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a log that does not say it: all_reduce, all_gather, ...")
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Add records from a file or from the tables of aiconfigurator; a file is read to its end before any is added."""
    from autoplan.profiler.imports import read_source

    unknown: Counter[str] = Counter()
    records = read_source(source, device=device, operation=operation, unknown=unknown)
    if unknown and not quiet:
        counts = ", ".join(f"{count:,} of {name}" for name, count in unknown.items())
        print(
            f"autoplan: warning: records of operations that this version does not know, and passes over: {counts}",
            file=sys.stderr,
        )
    with _open(context, url) as store:
        _add(store, records, json=json, quiet=quiet)


@db.command()
def check(context: typer.Context, url: DbOption = None, json: JsonOption = False) -> None:
    """Find records that cannot be right: faster than the device, unsettled, changed since they were added."""
    with _open(context, url, writable=False) as store:
        findings = list(store.check())
    if json:
        _print_json(findings)
        return
    for finding in findings:
        typer.echo(f"{finding.key[:12]}  {finding.what}: {finding.reason}")
    print(f"{len(findings):,} findings; `autoplan db hide KEY --reason WHY` takes one out of use", file=sys.stderr)


KeysArgument = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of records, or how they begin.")]


@db.command()
def hide(
    context: typer.Context,
    keys: KeysArgument,
    reason: Annotated[str, typer.Option(metavar="WHY", help="Why they shall not be used.")],
    url: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Take records out of use; they stay in the database with your name and reason."""
    num_new = _change(context, keys, reason, url, hides=True, json=json)
    print(f"{num_new:,} hidden, {len(keys) - num_new:,} were already", file=sys.stderr)


@db.command()
def unhide(
    context: typer.Context,
    keys: KeysArgument,
    reason: Annotated[str, typer.Option(metavar="WHY", help="Why they may be used after all.")],
    url: DbOption = None,
    json: JsonOption = False,
) -> None:
    """Take hidden records back into use, quarantined ones too; who hid them, and why, stays in the database."""
    num_new = _change(context, keys, reason, url, hides=False, json=json)
    print(f"{num_new:,} in use again, {len(keys) - num_new:,} were not hidden", file=sys.stderr)


def _change(context: typer.Context, keys: list[str], reason: str, url: str | None, *, hides: bool, json: bool) -> int:
    """Hide or unhide; how many that changed."""
    from autoplan.api.timings import opened_store
    from autoplan.base.units import cleaned
    from autoplan.base.user import user_name

    with opened_store(whole_url(context, url), writable=True, creates=False) as store:
        whole = [store.whole_key(key.lower()) for key in keys]
        change = store.hide if hides else store.unhide
        num_new = change(whole, by=user_name(), reason=cleaned(reason))
    if json:
        from autoplan.api.outputs import Changed

        _print_json(Changed(changed=num_new, as_before=len(keys) - num_new))
    return num_new


def _open(context: typer.Context, url: str | None, *, writable: bool = True) -> AbstractContextManager[Store]:
    from autoplan.api.timings import opened_store

    return opened_store(whole_url(context, url), writable=writable)


def _held(store: Store, trust: list[str] | None) -> Iterable[Record | RunRecord]:
    from itertools import chain

    return chain(store.records(trust=trust or None), store.runs(trust=trust or None))


def _add(store: Store, records: Iterable[Record | RunRecord], *, json: bool, quiet: bool) -> None:
    from autoplan.cli.progress import progress_bar

    with progress_bar(quiet=quiet, doing="adding", unit="records") as advance:
        added = store.add(records, on_batch=(lambda done: advance(done, None)) if advance else None)
    if json:
        _print_json(added)
    else:
        typer.echo(_sentence(added))


def _sentence(added: Added) -> str:
    text = f"{added.new:,} new, {added.held:,} held already"
    if added.first:
        text += f"; {added.quarantined:,} quarantined, the first {added.first.key[:12]}: {added.first.reason}"
    return text


def _seconds(record: Record) -> float | None:
    return record.seconds if record.samples_s else None


def _cells(*values: object) -> list[str]:
    from rich.markup import escape

    return [escape(str(value)) for value in values]


def _print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.encode(value).decode())
