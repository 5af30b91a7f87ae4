"""Do exchange files carry records whole, and are damaged or poisoned ones refused before anything is taken?"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from autoplan.base.errors import InputError
from autoplan.profiler.imports import read_source
from autoplan.profiler.record import MAX_SAMPLES, Record
from autoplan.profiler.store import exchange, open_store
from autoplan.profiler.store.exchange import MAX_LINE_BYTES, read_exchange, write_exchange
from stores import GEMM, LAB, some_records

HEADER = {"format": "autoplan-timings", "version": 1, "protocol": 1}


def packed(path: Path, *lines: object) -> Path:
    path.write_bytes(gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines)))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        list(read_source(str(path)))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert message.isprintable()
    return message


def test_records_come_back_whole_with_where_they_are_from(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl.gz"
    records = [GEMM, *some_records(0, 5), replace(GEMM, samples_s=(), status="failed", reason="OOM")]
    assert write_exchange(path, records) == 7
    assert list(read_exchange(path)) == records
    header = json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])
    assert header.items() >= HEADER.items()
    assert set(header) - set(HEADER) == {"autoplan", "exported_at"}


def test_an_anonymous_export_names_no_host_and_no_user(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl.gz"
    failed = replace(
        GEMM, samples_s=(), status="failed", reason="rank 3 on node7 exited", conditions={"log": "/home/ada/x"}
    )
    write_exchange(path, [GEMM, failed], anonymous=True)
    text = gzip.decompress(path.read_bytes())
    assert b"node7" not in text
    assert b"ada" not in text
    first, second = read_exchange(path)
    assert first.key == GEMM.key
    assert second.reason == "rank 3 on - exited"


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl.gz"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists"):
        write_exchange(path, [GEMM])
    assert path.read_text() == "mine"
    assert write_exchange(path, [GEMM], force=True) == 1


def test_an_export_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    def records() -> object:
        yield GEMM
        raise InputError("the server went away")

    with pytest.raises(InputError, match="went away"):
        write_exchange(tmp_path / "timings.jsonl.gz", records())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_a_truncated_file_adds_nothing_and_the_whole_one_adds_all(tmp_path: Path, share: float) -> None:
    path = tmp_path / "timings.jsonl.gz"
    records = some_records(0, 500)
    write_exchange(path, records)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with open_store(str(tmp_path / "timings.db")) as store:
        with pytest.raises(InputError, match="ends too early"):
            store.add(read_source(str(path)))
        assert list(store.records()) == []
        path.write_bytes(whole)
        assert store.add(read_source(str(path))).new == 500


def test_no_flipped_byte_gets_in_unnoticed(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl.gz"
    write_exchange(path, some_records(0, 20))
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(100):
        at = rng.randrange(10, len(whole))  # behind the gzip header, whose flags and times mean nothing here
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        refusal(path)


def test_a_hash_in_the_file_is_not_believed(tmp_path: Path) -> None:
    altered = {**msgspec.json.decode(msgspec.json.encode(GEMM)), "key": "0" * 64}
    path = packed(tmp_path / "timings.jsonl.gz", HEADER, altered)
    with open_store(str(tmp_path / "timings.db")) as store:
        store.add(read_source(str(path)))
        assert store.find(GEMM.key)[0] == GEMM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": "\x1b]0;gone\x07"}, "control characters"),
        ({"operation": "rm -rf /\x1b[2J"}, "line 3"),
        ({"operation": "x" * 41}, "line 3"),
        ({"shape": [1, 2]}, "needs m, n, k"),
        ({"shape": [2**70, 1, 1]}, "line 3"),
        ({"samples_s": [1e300]}, "no time in seconds"),
        ({"samples_s": [1.0] * (MAX_SAMPLES + 1)}, "at most 10000"),
        ({"samples_s": ["1; DROP TABLE records"]}, "line 3"),
        ({"measured_at": "9"}, "not ISO 8601"),
        ({"measured_at": "2026-11-21T12:00:00+02:00"}, "not ISO 8601 in UTC"),
        ({"fingerprint": {"device": ""}}, "name of a device"),
        ({"conditions": {"a": "x" * 2000}}, "longer than 1000"),
        ({"measured_by": "\ud800"}, "line 3"),
        ({"dtype": "x" * 50}, "at most 40"),
    ],
)
def test_a_poisoned_record_is_named_by_its_line_and_adds_nothing(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    good = msgspec.json.decode(msgspec.json.encode(GEMM))
    path = packed(tmp_path / "timings.jsonl.gz", HEADER, good, {**good, **change})
    assert message in refusal(path)
    with open_store(str(tmp_path / "timings.db")) as store:
        with pytest.raises(InputError):
            store.add(read_source(str(path)))
        assert list(store.records()) == []


def test_a_record_that_nests_where_a_number_belongs_is_one_line(tmp_path: Path) -> None:
    """The first fault is found at its opening bracket; looking for an unknown operation meets all of them."""
    write_exchange(path := tmp_path / "out.jsonl.gz", [GEMM])
    text = gzip.decompress(path.read_bytes()).replace(b'"clock_mhz":0', b'"clock_mhz":' + b"[" * 50_000)
    assert text.count(b"[") > 50_000
    path.write_bytes(gzip.compress(text))
    assert "line 2: " in refusal(path)


def test_operations_of_a_later_version_are_passed_over_and_counted(tmp_path: Path) -> None:
    good = msgspec.json.decode(msgspec.json.encode(GEMM))
    later = [{**good, "operation": name, "shape": [1]} for name in ("fft", "scan_2d", "fft")]
    path = packed(tmp_path / "timings.jsonl.gz", HEADER, later[0], good, *later[1:])
    unknown: Counter[str] = Counter()
    assert list(read_source(str(path), unknown=unknown)) == [GEMM]
    assert unknown == {"fft": 2, "scan_2d": 1}


def test_a_file_of_unknown_operations_alone_is_refused(tmp_path: Path) -> None:
    good = msgspec.json.decode(msgspec.json.encode(GEMM))
    path = packed(tmp_path / "timings.jsonl.gz", HEADER, {**good, "operation": "fft"})
    assert "knows none of its operations (fft): update autoplan" in refusal(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({}, "no export of autoplan"),
        ([], "no export of autoplan"),
        ({"format": "other"}, "no export of autoplan"),
        ({**HEADER, "version": 5}, "its version is 5, this autoplan knows 3: update"),
        ({**HEADER, "protocol": 99}, "its protocol is 99"),
        ({**HEADER, "version": "1"}, "its version is '1'"),
    ],
)
def test_what_does_not_say_that_it_is_an_export_is_refused(tmp_path: Path, header: object, message: str) -> None:
    assert message in refusal(packed(tmp_path / "timings.jsonl.gz", header))


@pytest.mark.parametrize("protocol", [2**31, 10**20, -1])
def test_a_protocol_that_no_database_holds_is_refused(tmp_path: Path, protocol: int) -> None:
    """Found by benchmarks/fuzz.py: SQLite takes numbers of 63 bits."""
    good = msgspec.json.decode(msgspec.json.encode(GEMM))
    assert "protocol must be from 0 to" in refusal(packed(tmp_path / "x.gz", HEADER, {**good, "protocol": protocol}))


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl.gz"
    head = json.dumps(HEADER).encode() + b"\n"
    path.write_bytes(gzip.compress(head + b" " * (64 * MAX_LINE_BYTES)))
    assert path.stat().st_size < MAX_LINE_BYTES
    assert "a line is longer" in refusal(path)


def test_the_number_of_records_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timings.jsonl.gz"
    write_exchange(path, some_records(0, 5))
    monkeypatch.setattr(exchange, "MAX_RECORDS", 5)
    assert len(list(read_exchange(path))) == 5
    monkeypatch.setattr(exchange, "MAX_RECORDS", 4)
    assert "more than 4 records" in refusal(path)


def test_the_longest_record_fits_a_line(tmp_path: Path) -> None:
    longest: Record = replace(GEMM, samples_s=tuple(1e-3 + at * 1.1e-16 for at in range(MAX_SAMPLES)))
    path = tmp_path / "timings.jsonl.gz"
    write_exchange(path, [longest])
    assert list(read_exchange(path)) == [longest]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "nothing")
    assert "no traces of torch's profiler in it" in refusal(tmp_path)


def test_an_export_needs_no_flags_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl.gz"
    write_exchange(path, [GEMM])
    with pytest.raises(InputError, match="leave --device"):
        list(read_source(str(path), device=LAB.device))
