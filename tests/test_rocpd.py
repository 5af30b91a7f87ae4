"""Are the databases of rocprofv3 and rocmProfileData read as traces of torch's profiler are, or refused in one line?"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from autoplan.api.traces import read_traces
from autoplan.base.errors import InputError
from autoplan.profiler.imports.traces import is_trace, read_ranks
from commands import run
from rocm_step import COPY, STEP, assert_read_as_step

CPU, FIRST, SECOND = 0, 4, 7  # numbers of agents
ID = "0000dead"  # ends the names of tables, whose rows a view without it shows
Marks = tuple[tuple[str, int, int], ...]


def dispatches(
    path: Path, *, devices: tuple[int, ...] = (FIRST,), marks: Marks = (), schema: int = 3, names_ranges: bool = False
) -> Path:
    """Write a database as rocprofv3 does, or as rocprof-sys, which names ranges by the user's text."""
    owner = "nid, pid, agent_id" if schema == 3 else "track_id"
    copied = "nid, pid" if schema == 3 else "track_id"
    tables = {
        "rocpd_string": "id INTEGER PRIMARY KEY, guid, string",
        "rocpd_info_agent": "id INTEGER PRIMARY KEY, guid, nid, pid, type",
        "rocpd_info_kernel_symbol": "id INTEGER PRIMARY KEY, guid, display_name",
        "rocpd_track": "id INTEGER PRIMARY KEY, guid, nid, pid, agent_id",
        "rocpd_event": "id INTEGER PRIMARY KEY, guid, extdata",
        "rocpd_region": f'id INTEGER PRIMARY KEY, guid, {copied}, start, "end", name_id, event_id',
        "rocpd_kernel_dispatch": f'id INTEGER PRIMARY KEY, guid, {owner}, kernel_id, start, "end"',
        "rocpd_memory_copy": f'id INTEGER PRIMARY KEY, guid, {copied}, src_agent_id, dst_agent_id, start, "end"',
    }
    with closing(sqlite3.connect(path)) as database:

        def insert(table: str, *values: object) -> None:
            places = ", ".join("?" * (2 + len(values)))
            database.execute(f"INSERT INTO {table}_{ID} VALUES ({places})", (None, ID, *values))

        for table, columns in tables.items():
            database.execute(f"CREATE TABLE {table}_{ID} ({columns})")
            database.execute(f"CREATE VIEW {table} AS SELECT * FROM {table}_{ID}")
        for agent in (CPU, FIRST, SECOND):
            values = (None if agent == CPU else agent, ID, 1, 1, "CPU" if agent == CPU else "GPU")
            database.execute(f"INSERT INTO rocpd_info_agent_{ID} VALUES (?, ?, ?, ?, ?)", values)
        for name, *_ in STEP:
            insert("rocpd_info_kernel_symbol", name)
        insert("rocpd_string", "roctxRangePush")
        for track, device in enumerate(devices, 1):
            insert("rocpd_track", 1, 1, device)
            of = (1, 1) if schema == 3 else (track,)
            for kernel, (_, start, end) in enumerate(STEP, 1):
                on = (*of, device) if schema == 3 else of
                insert("rocpd_kernel_dispatch", *on, kernel, 1000 * start, 1000 * end)
            insert("rocpd_memory_copy", *of, device, CPU, *(1000 * at for at in COPY))
        for number, (name, start, end) in enumerate(marks, 1):
            if names_ranges:
                insert("rocpd_string", name)
            insert("rocpd_event", "{}" if names_ranges else json.dumps({"message": name}))
            of = (1, 1) if schema == 3 else (1,)
            insert("rocpd_region", *of, 1000 * start, 1000 * end, 1 + number if names_ranges else 1, number)
        database.commit()
    return path


def operations(path: Path, *, devices: tuple[int, ...] = (2,), marks: Marks = (), has_own_texts: bool = True) -> Path:
    """Write a database as rocmProfileData does: schema 3, or 2 without a table of their own for arguments."""
    strings = ["", "KernelExecution", "CopyDeviceToHost", "UserMarker", "hipLaunchKernel", *(name for name, *_ in STEP)]
    texts = "rocpd_ustring" if has_own_texts else "rocpd_string"
    with closing(sqlite3.connect(path)) as database:
        for table in dict.fromkeys(("rocpd_string", texts)):
            database.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, string)")
        timed = 'start INTEGER, "end" INTEGER'
        database.execute(f"CREATE TABLE rocpd_op (gpuId INTEGER, {timed}, description_id INTEGER, opType_id INTEGER)")
        database.execute(f"CREATE TABLE rocpd_api ({timed}, apiName_id INTEGER, args_id INTEGER)")
        database.executemany("INSERT INTO rocpd_string VALUES (?, ?)", enumerate(strings, 1))
        for device in devices:
            rows = [(device, 1000 * start, 1000 * end, 6 + at, 2) for at, (_, start, end) in enumerate(STEP)]
            rows.append((device, 1000 * COPY[0], 1000 * COPY[1], 1, 3))
            database.executemany("INSERT INTO rocpd_op VALUES (?, ?, ?, ?, ?)", rows)
        for at, (name, start, end) in enumerate(marks, 100):
            database.execute(f"INSERT INTO {texts} VALUES (?, ?)", (at, name))
            database.execute("INSERT INTO rocpd_api VALUES (?, ?, 4, ?)", (1000 * start, 1000 * end, at))
        database.commit()
    return path


@pytest.mark.parametrize("schema", [3, 4, None])
def test_every_instant_of_a_step_counts_once(tmp_path: Path, schema: int | None) -> None:
    path = dispatches(tmp_path / "1_results.db", schema=schema) if schema else operations(tmp_path / "trace.rpd")
    assert_read_as_step(path)


@pytest.mark.parametrize("schema", [3, 4])
@pytest.mark.parametrize("names_ranges", [False, True])
def test_ranges_mark_steps_and_every_device_is_a_rank(tmp_path: Path, schema: int, names_ranges: bool) -> None:
    marks = (("step 1", 900, 1400), ("forward", 900, 1000), ("step 2", 1400, 1900))
    path = dispatches(
        tmp_path / "1_results.db", devices=(SECOND, FIRST), marks=marks, schema=schema, names_ranges=names_ranges
    )
    result = read_traces([path])
    assert [rank.num_steps for rank in result.ranks] == [2, 2]
    assert [rank.step_s for rank in result.ranks] == pytest.approx([450e-6, 450e-6])
    assert [rank.file.rpartition(", ")[2] for rank in result.ranks] == [
        "device 0 of process 0",
        "device 1 of process 0",
    ]
    assert "no steps are marked" in read_traces([dispatches(tmp_path / "2_results.db")]).remarks[0]


def test_devices_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    ranks = read_ranks(operations(tmp_path / "trace.rpd", devices=(10, 2)))
    assert [rank.file.rpartition(", ")[2] for rank in ranks] == ["device 2 of process 0", "device 10 of process 0"]


@pytest.mark.parametrize("has_own_texts", [True, False])
def test_markers_of_rocm_profile_data_mark_steps(tmp_path: Path, has_own_texts: bool) -> None:
    marks = (("step 1", 900, 1400), ("aten::add_", 900, 1000), ("step 2", 1400, 1900))
    (rank,) = read_ranks(operations(tmp_path / "trace.rpd", marks=marks, has_own_texts=has_own_texts))
    assert (rank.num_steps, rank.is_marked) == (2, True)
    assert rank.step_s == pytest.approx(450e-6)


def test_what_tells_nothing_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no kernels of a device in it: trace with rocprofv3 --kernel-trace"):
        read_ranks(dispatches(tmp_path / "1_results.db", devices=()))
    path = dispatches(tmp_path / "2_results.db")
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"UPDATE rocpd_kernel_dispatch_{ID} SET start = 'soon'")
        database.commit()
    with pytest.raises(InputError, match="an event has no time in nanoseconds"):
        read_ranks(path)
    damaged = dispatches(tmp_path / "damaged_results.db")
    damaged.write_bytes(
        damaged.read_bytes().replace(b"attn_fwd", b"attn_\xff\xfe\xfd").replace(b"rocpd_event_", b"rocpd_\xffvent_")
    )
    assert read_ranks(damaged)[0].seconds["attention"] > 0
    damaged.write_bytes(damaged.read_bytes().replace(b"CREATE TABLE rocpd_string_", b"CREATE TABLE \xffocpd_string-"))
    assert not is_trace(damaged)
    path = tmp_path / "3_results.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE rocpd_op (gpuId INTEGER)")
    refused = run(tmp_path, "read", path.name)
    assert refused.returncode == 1
    assert "no database of rocprofv3 or rocmProfileData: no such table: rocpd_string" in refused.stderr
    assert "\n" not in refused.stderr.strip()
