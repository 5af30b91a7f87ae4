"""Do logs of NCCL Inspector become records of what a collective took, once every rank was there?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.imports import read_source
from autoplan.profiler.imports.nccl_inspector import read_inspector_records
from autoplan.profiler.record import Record


def line(rank: int, collective: str, number: int, size: int, time_us: float, *, world: int = 4) -> str:
    """Return what the process of a rank writes; two processes on a host, each in a communicator of `world`."""
    return json.dumps(
        {
            "header": {"id": "0x7f8c", "rank": rank, "n_ranks": world, "nnodes": 2},
            "metadata": {
                "inspector_output_format_version": "v4.0",
                "dump_timestamp_us": 1_748_030_377_748_202,
                "hostname": f"node{rank // 2}",
                "pid": 100 + rank,
            },
            "coll_perf": {
                "coll": collective,
                "coll_sn": number,
                "coll_msg_size_bytes": size,
                "coll_exec_time_us": time_us,
                "coll_busbw_gbs": 366.1,
            },
        }
    )


def written(folder: Path, ranks: range, *, late_us: float = 40.0) -> Path:
    """Write logs of an all-reduce and an all-gather, for which the last rank comes `late_us` after the others."""
    folder.mkdir()
    for rank in ranks:
        waits_us = late_us if rank < 3 else 0.0
        # NCCL counts the calls of each kind.
        lines = [line(rank, "AllReduce", 1, 2**20, 60 + waits_us), line(rank, "AllGather", 1, 2**20, 80 + waits_us)]
        message = {"p2p": "Send", "p2p_sn": 1, "p2p_msg_size_bytes": 8, "p2p_exec_time_us": 3}
        sent = {name: value for name, value in json.loads(lines[0]).items() if name != "coll_perf"} | {
            "p2p_perf": message
        }
        (folder / f"node{rank // 2}-pid{100 + rank}.log").write_text("\n".join([*lines, json.dumps(sent), ""]))
    return folder


def by_operation(records: list[Record]) -> dict[str, Record]:
    return {record.operation: record for record in records}


def test_a_collective_takes_as_long_as_the_rank_saw_that_came_last(tmp_path: Path) -> None:
    records = by_operation(read_inspector_records(written(tmp_path / "logs", range(4)), device="h100-sxm"))
    # The size of an all-gather is the part of one rank.
    assert {name: record.shape for name, record in records.items()} == {
        "all_reduce": (4, 2, 1, 2**20),
        "all_gather": (4, 2, 1, 4 * 2**20),
    }
    assert records["all_reduce"].samples_s == pytest.approx((60e-6,))
    assert records["all_gather"].samples_s == pytest.approx((80e-6,))
    assert {record.status for record in records.values()} == {"ok"}
    assert records["all_reduce"].measured_at.startswith("2025-05-23T")
    assert (records["all_reduce"].fingerprint.num_hosts, records["all_reduce"].mode) == (2, "imported")


def test_a_call_that_a_rank_did_not_write_down_is_no_clean_time(tmp_path: Path) -> None:
    folder = written(tmp_path / "logs", range(4))
    with (folder / "node0-pid100.log").open("a") as log:
        log.write(line(0, "ReduceScatter", 3, 2**20, 500))
    records = by_operation(read_inspector_records(folder, device="h100-sxm"))
    assert records["reduce_scatter"].status == "contaminated"
    assert "not all ranks" in records["reduce_scatter"].reason
    assert records["all_reduce"].status == "ok"


def test_the_import_of_a_folder_or_file_knows_the_logs(tmp_path: Path) -> None:
    folder = written(tmp_path / "logs", range(4))
    assert len(list(read_source(str(folder), device="h100-sxm"))) == 2
    with pytest.raises(InputError, match="name their kind with --device"):
        read_source(str(folder))
    with pytest.raises(InputError, match="no collective of a known kind over the processes"):
        read_source(str(folder / "node0-pid100.log"), device="h100-sxm")
    (folder / "node0-pid100.log").write_text(line(0, "AllReduce", 1, 8, 1) + "\n{")
    with pytest.raises(InputError, match=r"pid100.log, line 2: no line of NCCL Inspector"):
        read_source(str(folder), device="h100-sxm")


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("metadata", "dump_timestamp_us", 2**60),
        ("coll_perf", "coll_exec_time_us", -1),
        ("coll_perf", "coll_msg_size_bytes", "many"),
        ("header", "n_ranks", 0),
        ("header", "rank", 2**40),
    ],
)
def test_values_that_cannot_be_are_refused_by_their_line(tmp_path: Path, part: str, name: str, value: object) -> None:
    content = json.loads(line(0, "AllReduce", 1, 8, 1))
    content[part][name] = value
    path = tmp_path / "node0-pid100.log"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"line 1: no line of NCCL Inspector: .*" + name):
        read_source(str(path), device="h100-sxm")


def test_a_line_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node0-pid100.log"
    path.write_text(line(0, "AllReduce", 1, 8, 1).replace('"nnodes": 2', f'"nnodes": {"[" * 3000}'))
    with pytest.raises(InputError, match="line 1: no line of NCCL Inspector"):
        read_source(str(path), device="h100-sxm")
