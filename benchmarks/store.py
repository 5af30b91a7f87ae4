"""Timing database under many writers at once, and searches among a million rows.

usage: python benchmarks/store.py [--server URL] [--writers N] [--rows N] [--lookup-rows N] [--shapes N]
       [--report REPORT.md]

Writers push by `autoplan db push`, each from a file of its own, into one SQLite file and into one PostgreSQL database
at once with the others; one is killed with SIGKILL when half of its rows have arrived, and every push is repeated.
Then a database is filled to a million rows of fifty machines, five of each device, one of which has a fifth of all
rows.  The timings of this machine and of a usual one are looked up and made a table, and the team's page is asked for.
PostgreSQL gets a schema of its own, which is dropped afterwards.
"""

from __future__ import annotations

import datetime
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from reports import make_parser

from autoplan.base.errors import AutoplanError
from autoplan.base.files import write_text
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.store import Store, open_store
from autoplan.spec.operations import Operation
from autoplan.spec.timing import TimingTable

SERVER = "postgresql://postgres@127.0.0.1:5432/postgres"
AUTOPLAN = [sys.executable, "-c", "from autoplan.cli import main; main()"]
NUM_DEVICES, NUM_FINGERPRINTS = 10, 5
OPERATIONS: tuple[Operation, ...] = ("gemm", "dgrad", "wgrad", "norm", "swiglu")
REPEATS = 3


def _records(machine: Fingerprint, count: int, seed: int) -> Iterator[Record]:
    rng = random.Random(seed)
    for at in range(count):
        operation, size = OPERATIONS[at % len(OPERATIONS)], at // len(OPERATIONS)
        shape = (128 * (size % 25 + 1), 1024 * (size // 25 + 1))
        yield Record(
            fingerprint=machine,
            operation=operation,
            shape=(*shape, 4096) if operation in ("gemm", "dgrad", "wgrad") else shape,
            dtype=("bf16", "fp8")[size % 2],
            samples_s=tuple(0.1 * (1 + 0.01 * rng.random()) for _ in range(10)),
            kernel="torch",
            measured_by=f"user{seed % 5}",
            host=f"node{seed}",
            measured_at="2026-11-21T12:00:00Z",
        )


def _machine(device: int, version: int) -> Fingerprint:
    return Fingerprint(
        device=f"device{device}",
        runtime=f"cuda {12 + version // 5}.{version % 5}",
        torch=f"2.{version}.0",
        collectives=f"nccl 2.{20 + version}.0",
    )


def _count(store: Store) -> int:
    return sum(holding.num_records for holding in store.holdings())


def _push_all(files: list[Path], url: str, *, kill_after: int | None = None) -> float:
    """Push every file at once, and kill the last when so many of its rows have arrived; seconds that took."""
    start = time.perf_counter()
    running = [subprocess.Popen([*AUTOPLAN, "db", "push", url, "--db", str(file)], stdout=-3) for file in files]
    if kill_after is not None:
        with open_store(url) as store:
            victim = files[-1].stem
            while not any(
                holding.fingerprint.device == victim and holding.num_records >= kill_after
                for holding in store.holdings()
            ):
                time.sleep(0.1)
        running[-1].kill()
    codes = [process.wait() for process in running]
    assert codes[:-1] == [0] * (len(files) - 1), codes
    assert (codes[-1] < 0) == (kill_after is not None), codes
    return time.perf_counter() - start


def _writers(url: str, folder: Path, num_writers: int, num_rows: int) -> str:
    files = []
    expected = set()
    for number in range(num_writers):
        files.append(folder / f"writer{number}.db")
        machine = Fingerprint(device=files[-1].stem, torch="2.13.0")
        if not files[-1].exists():
            with open_store(str(files[-1])) as store:
                store.add(_records(machine, num_rows, number))
        expected |= {record.key for record in _records(machine, num_rows, number)}
    first_s = _push_all(files, url, kill_after=num_rows // 2)
    with open_store(url) as store:
        left = _count(store)
    again_s = _push_all(files, url)
    with open_store(url) as store:
        keys = [record.key for record in store.records(include_hidden=True)]
        findings = sum(1 for _ in store.check())
    lost, doubled = len(expected - set(keys)), len(keys) - len(set(keys))
    assert findings == 0, findings
    assert set(keys) <= expected, len(keys)
    sent = num_writers * num_rows
    return (
        f"| {_kind(url)} | {num_writers} x {num_rows:,} | {first_s:.0f} s | {sent - left:,} | {again_s:.0f} s "
        f"| {lost} | {doubled} | {os.getloadavg()[0]:.1f} |"
    )


def _fill(url: str, num_rows: int, num_shapes: int) -> float:
    """Fill a database; seconds that took."""
    each = (num_rows - num_shapes) // (NUM_DEVICES * NUM_FINGERPRINTS - 1)
    start = time.perf_counter()
    with open_store(url) as store:
        for number in range(NUM_DEVICES * NUM_FINGERPRINTS):
            machine = _machine(number // NUM_FINGERPRINTS, number % NUM_FINGERPRINTS)
            store.add(_records(machine, each if number else num_shapes, number))
    return time.perf_counter() - start


def _lookup(url: str, fill_s: float) -> list[str]:
    rows = []
    with open_store(url, writable=False) as store:
        count = _count(store)
        for machine, operations in (
            (_machine(3, 3), OPERATIONS[:1]),
            (_machine(3, 3), None),
            (_machine(0, 0), OPERATIONS[:1]),
            (_machine(0, 0), None),
        ):
            look_up = partial(store.timings, machine, operations=operations)
            shown = f"{_kind(url)} | {count:,} | {fill_s:.0f} s | {operations[0] if operations else 'all'}"
            found = look_up()
            calls = {
                "look-up": _timed(look_up),
                "table": _timed(partial(TimingTable.of, found)),
                "digest": _timed(lambda found=found: TimingTable.of(found).digest),  # type: ignore[misc]
            }
            for what, cells in calls.items():
                rows.append(f"| {shown} | {len(found):,} | {what} | {cells} |")
        rows.append(f"| {_kind(url)} | {count:,} | {fill_s:.0f} s | all | | page | {_timed(_overview(store))} |")
    return rows


def _overview(store: Store) -> Callable[[], object]:
    return partial(store.overview, "2026-11-26")


def _timed(call: Callable[[], object], repeats: int = REPEATS) -> str:
    """Return the cells of what a call takes: fastest, median, CPU, load."""
    times_s, cpu_times_s = [], []
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        times_s.append(time.perf_counter() - start)
        cpu_times_s.append(time.process_time() - cpu_start)
    return (
        f"{1e3 * min(times_s):.0f} ms | {1e3 * sorted(times_s)[repeats // 2]:.0f} ms "
        f"| {1e3 * min(cpu_times_s):.0f} ms | {os.getloadavg()[0]:.1f}"
    )


def _kind(url: str) -> str:
    return "PostgreSQL" if url.startswith("postgresql") else "SQLite"


@contextmanager
def _schema(server: str) -> Iterator[str]:
    import psycopg

    name = f"autoplan_benchmark_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(server, autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA {name}".encode())
        try:
            yield f"{server}?options={quote(f'-csearch_path={name}', safe='')}"
        finally:
            admin.execute(f"DROP SCHEMA {name} CASCADE".encode())


LEGEND = """On {cores} CPU cores ({machine}) that other work shared: every row ends with the load average at its end.

## Many writers

Each of the writers pushes its rows at once with the others; one is killed with SIGKILL when half of its rows have
arrived.  Missing: rows that the killed one had not sent yet.  Then every push is repeated.

| database | writers and rows | first push | missing | every push again | lost | doubled | load |
|---|---|--:|--:|--:|--:|--:|--:|
{writers}

## A search's timings among a million rows

{devices} devices, {fingerprints} machines of each; the first has {shapes:,} rows, each of a shape of its own.  Found
are the timings that serve a usual machine, and this one; of them the table is made that plans are priced with, and its
digest.  The page is that of `autoplan db report`.  CPU: of the searching process, whose time with SQLite is all that
there is.

| database | rows | filled in | operations | found | what | fastest of {repeats} | median | CPU | load |
|---|--:|--:|---|--:|---|--:|--:|--:|--:|
{lookups}
"""


def main() -> int:
    """Measure, print and, if asked, write the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--server", default=SERVER, help="URL of a PostgreSQL database in which a schema may be made")
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=20_000, help="of each writer")
    parser.add_argument("--lookup-rows", type=int, default=1_000_000)
    parser.add_argument("--shapes", type=int, default=200_000, help="of the machine with most of the rows")
    options = parser.parse_args()
    writers, lookups = [], []
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for place in ("pushed", "large"):
                with _schema(options.server) as schema:
                    for url in (str(folder / f"{place}.db"), schema):
                        if place == "pushed":
                            writers.append(_writers(url, folder, options.writers, options.rows))
                            print(writers[-1], flush=True)
                        else:
                            new = _lookup(url, _fill(url, options.lookup_rows, options.shapes))
                            lookups += new
                            print("\n".join(new), flush=True)
    except AutoplanError as error:
        print(error, file=sys.stderr)
        return 1
    if options.report:
        text = LEGEND.format(
            cores=os.cpu_count(),
            machine=platform.machine(),
            writers="\n".join(writers),
            devices=NUM_DEVICES,
            fingerprints=NUM_FINGERPRINTS,
            repeats=REPEATS,
            shapes=options.shapes,
            lookups="\n".join(lookups),
        )
        write_text(options.report, f"# The timing database, {datetime.date.today().isoformat()}\n\n{text}", force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
