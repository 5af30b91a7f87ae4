"""Does the store keep every record once, from any number of writers, and choose for a search by its stated rule?"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import signal
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import MetaData, event, func, inspect, select, text

from autoplan.api.database import change, copy
from autoplan.base.errors import InputError, StoreError, StoreWarning
from autoplan.profiler.record import SLOWED, Fingerprint, Mode, Record, Status
from autoplan.profiler.store import Choice, Store, match, open_store, schema
from autoplan.profiler.store import store as store_module
from autoplan.profiler.store.database import open_database
from autoplan.spec.measurement import Match
from stores import GEMM, LAB, migrate_later, some_records


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


def keys(store: Store) -> list[str]:
    return sorted(record.key for record in store.records())


def test_what_is_added_comes_back_whole(store: Store) -> None:
    failed = replace(GEMM, shape=(1, 2, 3), samples_s=(), status="failed", reason="out of memory: 81 GiB, ∞ wanted")
    assert store.add([GEMM, failed]).new == 2
    back = {record.key: record for record in store.records()}
    assert back == {GEMM.key: GEMM, failed.key: failed}


def test_adding_again_adds_nothing(store: Store) -> None:
    records = some_records(0, 30)
    assert (store.add(records[:20]).new, store.add(records).new, store.add(records).present) == (20, 10, 30)
    assert keys(store) == sorted(record.key for record in records)


def test_a_damaged_mark_does_not_keep_the_others_from_travelling(store: Store) -> None:
    store.add(some_records(0, 2))
    store.change(keys(store), hides=True, by="ada", reason="hot GPU")
    with store._database.writing() as connection:
        connection.execute(text("UPDATE marks SET at = 'noon' WHERE id = 1"))
    assert (len(list(store.marks())), store.num_unread) == (1, 1)


def test_a_record_given_twice_in_one_call_is_held_once(store: Store) -> None:
    added = store.add([GEMM, GEMM, replace(GEMM, measured_by="eve")])
    assert (added.new, added.present, len(keys(store))) == (1, 2, 1)


def test_batches_are_counted_as_they_come_in(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.profiler.store.store.BATCH", 7)
    heard: list[int] = []
    assert store.add(some_records(0, 20), on_batch=heard.append).new == 20
    assert heard == [7, 14, 20]
    assert len(keys(store)) == 20  # read back page by page


def test_records_are_chosen_by_device_operation_and_who_measured(store: Store) -> None:
    other = replace(GEMM, fingerprint=replace(LAB, device="h200-sxm"), measured_by="bob")
    unstable = replace(GEMM, operation="wgrad", status="unstable")
    store.add([GEMM, other, unstable])
    assert list(store.records(Choice(device="h200-sxm"))) == [other]
    assert list(store.records(Choice(operation="wgrad"))) == [unstable]
    assert list(store.records(Choice(trust=["bob", "carl"]))) == [other]
    assert list(store.records(Choice(device="b200"))) == []


def test_a_sweep_knows_what_is_measured_or_failed_on_its_machine(store: Store) -> None:
    failed = replace(GEMM, operation="dgrad", samples_s=(), status="failed")
    again = replace(failed, conditions={"failed_at": "2026-11-22T12:00:00+00:00"})
    once = replace(failed, shape=(64, 64, 64))
    unstable = replace(GEMM, operation="wgrad", status="unstable")
    elsewhere = replace(GEMM, shape=(1, 1, 1), fingerprint=replace(LAB, driver="580.65"))
    hidden = replace(GEMM, shape=(2, 2, 2))
    store.add([GEMM, failed, again, once, unstable, elsewhere, hidden])
    store.change([hidden.key], hides=True, by="ada", reason="hot")
    assert store.measured_keys(LAB) == {
        ("gemm", (4096, 4096, 4096), "bf16", "torch", "sustained"),
        ("dgrad", (4096, 4096, 4096), "bf16", "torch", "sustained"),
    }


def test_what_one_device_does_alone_is_known_without_its_links(store: Store) -> None:
    reduce = replace(GEMM, operation="all_reduce", shape=(8, 8, 1, 2**20), kernel="nccl")
    whole = replace(GEMM, operation="layer", shape=(1, 4096, 4096, 14336, 32, 8, 128, 1), kernel="trainer")
    split = replace(whole, shape=(1, 4096, 4096, 14336, 32, 8, 128, 2))
    store.add([GEMM, reduce, whole, split])
    healthy = {"gemm", "all_reduce", "layer"}
    assert {key[0] for key in store.measured_keys(LAB)} == healthy
    assert len(store.measured_keys(LAB)) == 4
    broken_nic = replace(LAB, nics=("infiniband 400",), topology="other", num_hosts=4)
    assert {(key[0], key[1][-1]) for key in store.measured_keys(broken_nic)} == {("gemm", 4096), ("layer", 1)}
    assert not store.measured_keys(replace(LAB, power_cap_w=350))
    assert not store.measured_keys(replace(LAB, torch="2.14.0"))


def test_a_hidden_record_is_kept_and_not_used(store: Store) -> None:
    store.add([GEMM])
    assert store.change([GEMM.key, "0" * 64], hides=True, by="ada", reason="hot GPU") == 1
    assert store.change([GEMM.key], hides=True, by="bob", reason="again") == 0
    assert list(store.records()) == list(store.timings(LAB)) == []
    assert list(store.records(include_hidden=True)) == [GEMM]
    _, mark = store.find(GEMM.key[:10])
    assert mark is not None
    assert (mark.by, mark.reason) == ("ada", "hot GPU")
    assert store.add([GEMM]).present == 1
    assert list(store.records()) == []


def test_a_record_is_proposed_until_a_person_approves_or_hides_it(store: Store) -> None:
    impossible, other = replace(GEMM, samples_s=(1e-5,) * 5), replace(GEMM, shape=(8, 8, 8))
    store.add([GEMM, impossible, other])
    everything = [GEMM.key, impossible.key, other.key]
    assert list(store.reviews(everything).values()) == ["proposed", "hidden", "proposed"]
    assert store.change(everything, hides=False, by="ada", reason="looked at them") == 3
    assert store.change(everything, hides=False, by="bob", reason="I too") == 0
    assert set(store.reviews(everything).values()) == {"approved"}
    assert len(list(store.records())) == 3
    assert store.change([other.key], hides=True, by="cid", reason="hot") == 1
    chosen = [set(store.keys(choice=Choice(review=review))) for review in ("proposed", "approved", "hidden")]
    assert chosen == [set(), {GEMM.key, impossible.key}, {other.key}]
    assert [(word.by, word.hides) for word in store.words(other.key)] == [("cid", True), ("ada", False)]
    with pytest.raises(InputError, match="review 'good': known are proposed, approved, hidden"):
        Choice(review="good")


def test_a_hidden_record_is_taken_back_into_use_and_nothing_is_forgotten(store: Store) -> None:
    store.add([GEMM])
    store.change([GEMM.key], hides=True, by="ada", reason="hot GPU")
    assert store.change([GEMM.key, "0" * 64], hides=False, by="bob", reason="fan was replaced before") == 1
    assert store.change([GEMM.key], hides=False, by="bob", reason="again") == 0
    assert list(store.records()) == [GEMM]
    assert len(store.timings(LAB)) == 1
    assert store.find(GEMM.key)[1] is None
    assert store.holdings()[0].num_hidden == 0
    assert store.change([GEMM.key], hides=True, by="cid", reason="not that fan") == 1
    mark = store.find(GEMM.key)[1]
    assert mark is not None
    assert (mark.by, mark.reason) == ("cid", "not that fan")
    assert [(mark.by, mark.hides) for mark in store.marks()] == [("ada", True), ("bob", False), ("cid", True)]


def test_what_the_check_hid_a_person_may_use_and_it_comes_in_again_so(store: Store) -> None:
    impossible = replace(GEMM, samples_s=(1e-5,) * 5)
    assert store.add([impossible]).quarantined == 1
    assert store.add([impossible]).quarantined == 1
    assert store.change([impossible.key], hides=False, by="ada", reason="a new kind of device") == 1
    assert store.add([impossible]).quarantined == 0
    assert list(store.records()) == [impossible]
    assert len(list(store.marks())) == 2


def test_the_newest_word_of_a_person_counts_in_whatever_order_marks_travel(store: Store, tmp_path: Path) -> None:
    with open_store(str(tmp_path / "other.db")) as other:
        other.add([GEMM])
        other.change([GEMM.key], hides=True, by="ada", reason="hot GPU")
        other.change([GEMM.key], hides=False, by="ada", reason="was cool")
        marks = list(other.marks())
    store.add([GEMM])
    store.add(marks[1:])
    assert list(store.records()) == [GEMM]
    assert store.add(marks).marks == 1
    assert list(store.records()) == [GEMM]
    assert store.add(reversed(marks)).marks == 0
    store.add([replace(marks[1], by="check", hides=True, at="2999-01-01T00:00:00+00:00")])
    assert list(store.records()) == [GEMM]


def test_an_implausible_record_is_quarantined(store: Store) -> None:
    impossible = replace(GEMM, samples_s=(1e-5,) * 5)  # 13.7 PFLOP/s
    added = store.add([GEMM, impossible])
    assert (added.new, added.quarantined) == (2, 1)
    assert added.first is not None
    assert added.first.key == impossible.key
    assert list(store.records()) == [GEMM]
    assert [(mark.key, mark.by) for mark in store.marks()] == [(impossible.key, "check")]


def test_holdings_count_by_machine(store: Store) -> None:
    other = replace(LAB, torch="2.14.0")
    newer = replace(GEMM, shape=(2, 2, 2), measured_at="2026-11-22T00:00:00Z")
    store.add([GEMM, newer, replace(GEMM, fingerprint=other)])
    store.change([newer.key], hides=True, by="ada", reason="")
    first, second = store.holdings()
    assert (first.fingerprint, first.num_records, first.num_hidden) == (LAB, 2, 1)
    assert first.newest == "2026-11-22T00:00:00Z"
    assert (second.fingerprint, second.num_records) == (other, 1)


@pytest.mark.parametrize("change", ["shape = 'axb'", "shape = '1x2'", "operation = 'sort'", "samples = ''"])
def test_what_this_version_does_not_understand_is_passed_over_and_counted(store: Store, url: str, change: str) -> None:
    """Operations that are new, or no longer known, or of other shapes before."""
    other = replace(GEMM, shape=(2, 2, 2))
    store.add([GEMM, other])
    with store._database.writing() as connection:
        connection.execute(text(f"UPDATE records SET seconds = -1, {change} WHERE key = '{GEMM.key}'"))
    assert [timing.shape for timing in store.timings(LAB)] == [other.shape]
    assert store.num_unread == 1
    assert list(store.records()) == [other]
    assert store.num_unread == 1
    assert store.measured_keys(LAB) >= {("gemm", other.shape, other.dtype, other.kernel, other.mode)}
    assert store.change([store.full_key(GEMM.key[:8])], hides=True, by="ada", reason="of an older version") == 1
    with open_store(url) as again:
        assert (list(again.records()), len(again.timings(LAB)), again.num_unread) == ([other], 1, 0)


@pytest.mark.parametrize("key", ["abc", "xyz12345", "", "0" * 12, "%" * 8])
def test_a_key_that_names_no_record_is_refused(store: Store, key: str) -> None:
    store.add([GEMM])
    with pytest.raises(InputError, match="key"):
        store.find(key)


# -- the choice for a search


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, Match.EXACT),
        ({"driver": "600.1", "clock_mhz": 1, "num_hosts": 9}, Match.EXACT),
        ({"torch": "2.14.0"}, Match.RUNTIME),
        ({"collectives": "nccl 2.29.1", "runtime": "cuda 13.4"}, Match.RUNTIME),
        ({"topology": "other"}, Match.RUNTIME),
        ({"torch": "2.9.0", "runtime": "cuda 12.8"}, Match.DEVICE),
        ({"torch": "", "collectives": "", "topology": "", "runtime": ""}, Match.DEVICE),
        ({"runtime": "rocm 13.0", "torch": "2.14.0"}, Match.DEVICE),
        ({"device": "h200-sxm"}, None),
        ({"power_cap_w": 350}, Match.POWER),
        ({"power_cap_w": 350, "torch": "2.14.0"}, Match.POWER),
        ({"power_cap_w": 690}, Match.EXACT),
        ({"clock_mhz": 1200}, Match.POWER),
    ],
)
def test_how_near_a_machine_is(change: dict[str, str], level: Match | None) -> None:
    wanted = replace(LAB, power_cap_w=700, clock_mhz=1980) if level is Match.POWER or "power_cap_w" in change else LAB
    assert match(replace(LAB, **change), wanted) == level  # type: ignore[arg-type]


def test_machines_of_which_only_the_device_is_known_match_no_further() -> None:
    assert match(Fingerprint(device="b200"), Fingerprint(device="b200")) == Match.DEVICE


def chosen(store: Store, **options: list[str]) -> dict[tuple[int, ...], tuple[float, Match]]:
    return {timing.shape: (timing.seconds, timing.match) for timing in store.timings(LAB, **options)}  # type: ignore[arg-type]


def test_the_nearest_machine_wins_and_of_imports_the_newest(store: Store) -> None:
    newer, older = "2026-11-22T00:00:00Z", "2026-11-20T00:00:00Z"
    near = replace(LAB, torch="2.12.0")
    far = Fingerprint(device=LAB.device)
    a, b, c = ((size, size, size) for size in (1024, 2048, 4096))
    store.add(
        [
            replace(GEMM, shape=a, samples_s=(1.0,), measured_at=older),
            replace(GEMM, shape=a, samples_s=(2.0,), fingerprint=near, measured_at=newer),
            replace(GEMM, shape=b, samples_s=(4.0,), fingerprint=near, measured_at=older),
            replace(GEMM, shape=b, samples_s=(5.0,), fingerprint=far, measured_at=newer),
            replace(GEMM, shape=c, samples_s=(5.0,), fingerprint=far, mode="imported", measured_at=older),
            replace(GEMM, shape=c, samples_s=(6.0,), fingerprint=far, mode="imported", measured_at=newer),
            replace(GEMM, shape=c, samples_s=(6.5,), fingerprint=far, mode="imported", measured_at=newer),
            replace(GEMM, shape=c, samples_s=(7.0,), fingerprint=replace(LAB, device="b200")),
        ]
    )
    assert chosen(store) == {a: (1.0, Match.EXACT), b: (4.0, Match.RUNTIME), c: (6.0, Match.DEVICE)}


def test_of_the_last_five_measurements_the_middle_one_counts(store: Store) -> None:
    """The faster of two; what was run in another way than the newest is no part of it."""
    expected = {1: 9.0, 2: 3.0, 3: 4.0, 4: 4.0, 5: 5.0, 6: 4.0, 7: 4.0}
    for day, seconds in enumerate((9.0, 3.0, 4.0, 8.0, 5.0, 2.0, 1.0), start=1):
        store.add([replace(GEMM, samples_s=(seconds,), measured_at=f"2026-11-0{day}T00:00:00Z")])
        assert [measured.seconds for measured in store.timings(LAB)] == [expected[day]]
    store.add([replace(GEMM, samples_s=(7.0,), kernel="another", measured_at="2026-11-08T00:00:00Z")])
    assert [measured.seconds for measured in store.timings(LAB)] == [7.0]


def test_of_a_machine_that_is_mostly_slow_or_restless_all_measurements_count(store: Store) -> None:
    """The settled ones alone would be those of its fast minutes; what other load did never counts beside them."""
    slow = {"status": "contaminated", "reason": f"{SLOWED}: 30 % slower than usual", "conditions": CPU_TIME}
    loaded = {"status": "contaminated", "reason": "other load took 41 % of the machine", "conditions": CPU_TIME}
    visits: list[tuple[float, dict[str, Any], float]] = [
        (2.0, {}, 2.0),
        (5.0, slow, 2.0),  # as many settled as slow
        (9.0, loaded, 2.0),
        (4.0, {"status": "unstable"}, 4.0),  # of 2, 4 and 5
        (3.0, {}, 2.0),  # two of four settled: of 2 and 3
        (6.0, slow, 4.0),  # of 2, 3, 4, 5 and 6
        (7.0, slow, 5.0),  # 2 is too old
    ]
    for day, (seconds, how, expected) in enumerate(visits, start=1):
        store.add([replace(GEMM, samples_s=(seconds,), measured_at=f"2026-11-0{day}T00:00:00Z", **how)])
        assert [measured.seconds for measured in store.timings(LAB)] == [expected]
    assert [timing.is_disturbed for timing in store.timings(LAB)] == [True]


def test_hosts_are_kept_apart_and_a_word_is_said_where_they_differ(store: Store) -> None:
    for day, (host, seconds) in enumerate((("a", 1.0), ("b", 1.25), ("a", 1.02), ("b", 1.27), ("a", 1.01)), start=1):
        moment = f"2026-11-0{day}T00:00:00Z"
        store.add([replace(GEMM, samples_s=(1e-3 * seconds,), host=host, measured_at=moment)])
    assert [measured.seconds for measured in store.timings(LAB)] == [
        1.25e-3
    ]  # of two the slower: a step over both waits for it
    (apart,) = store.hosts_apart
    assert (apart.fast, apart.slow, round(apart.ratio, 2)) == ("a", "b", 1.24)
    other = replace(GEMM, samples_s=(1.1e-3,), host="c", measured_at="2026-11-06T00:00:00Z")
    store.add([other])
    assert [measured.seconds for measured in store.timings(LAB)] == [1.1e-3]  # of three the middle one


def test_what_nccl_chose_itself_counts_before_what_it_was_told(store: Store) -> None:
    reduce = replace(GEMM, operation="all_reduce", shape=(8, 8, 1, 2**28), kernel="nccl", conditions={})
    low_latency = replace(reduce, conditions={"NCCL_PROTO": "LL"})
    for day, (record, seconds) in enumerate(
        ((reduce, 1.0), (low_latency, 3.0), (reduce, 1.2), (low_latency, 3.1)), start=1
    ):
        store.add([replace(record, samples_s=(1e-2 * seconds,), measured_at=f"2026-11-0{day}T00:00:00Z")])
    assert [measured.seconds for measured in store.timings(LAB)] == [1e-2]
    store.change([key for key in keys(store) if not store.find(key)[0].conditions], hides=True, by="ada", reason="test")
    assert [measured.seconds for measured in store.timings(LAB)] == [3e-2]


def test_a_slow_measurement_alone_does_not_stand_before_an_imported_one(store: Store) -> None:
    slow = {"status": "contaminated", "reason": f"{SLOWED}: 30 % slower than usual", "conditions": CPU_TIME}
    store.add([replace(GEMM, samples_s=(2.0,), mode="imported"), replace(GEMM, samples_s=(5.0,), **slow)])  # type: ignore[arg-type]
    assert [(timing.seconds, timing.is_disturbed) for timing in store.timings(LAB)] == [(2.0, False)]


def test_of_one_machine_sustained_beats_burst_beats_imported(store: Store) -> None:
    times = {"imported": 1.0, "burst": 2.0, "sustained": 3.0}
    new = "2026-11-22T00:00:00Z"
    for mode, seconds in times.items():
        moment = GEMM.measured_at if mode == "sustained" else new
        store.add([replace(GEMM, mode=mode, samples_s=(seconds,), measured_at=moment)])  # type: ignore[arg-type]
        assert [measured.seconds for measured in store.timings(LAB)] == [seconds]


def test_the_latest_machine_is_that_of_the_last_measurement_of_our_own(store: Store) -> None:
    assert store.latest("h100-sxm") is None
    later = replace(LAB, torch="2.14.0")
    public = Fingerprint(device="h100-sxm")
    store.add([GEMM])
    store.add([replace(GEMM, fingerprint=later)])
    store.add([replace(GEMM, fingerprint=public, mode="imported")])
    assert store.latest("h100-sxm") == later
    assert store.latest("b200") is None


def test_the_latest_machine_is_the_one_measured_last_not_the_one_added_last(store: Store) -> None:
    old, new = replace(LAB, torch="2.4.0"), replace(LAB, torch="2.14.0")
    store.add([replace(GEMM, fingerprint=new, measured_at="2026-11-23T12:00:00+00:00")])
    # A colleague pushes what he measured long ago, and what failed.
    store.add([replace(GEMM, fingerprint=old, measured_at="2025-01-01T12:00:00+00:00")])
    broken = replace(GEMM, fingerprint=old, samples_s=(), status="failed", reason="lost")
    store.add([replace(broken, measured_at="2026-11-24T01:00:00+00:00")])
    assert store.latest("h100-sxm") == new
    store.change(
        [key for key in keys(store) if store.find(key)[0].fingerprint == new], hides=True, by="ada", reason="hot"
    )
    assert store.latest("h100-sxm") == old


@pytest.mark.parametrize(("mode", "is_burst"), [("sustained", False), ("burst", True), ("imported", True)])
def test_what_was_not_sustained_is_a_burst(store: Store, mode: Mode, is_burst: bool) -> None:
    store.add([replace(GEMM, mode=mode)])
    assert [timing.is_burst for timing in store.timings(LAB)] == [is_burst]


def test_failed_and_overlapped_timings_do_not_count(store: Store) -> None:
    store.add(
        [
            replace(GEMM, samples_s=(), status="failed"),
            replace(GEMM, operation="all_reduce", shape=(8, 8, 1, 2**20), kernel="nccl beside gemm"),
        ]
    )
    assert not store.timings(LAB)


CPU_TIME = {"clock": "cpu time", "other_load": "41.0 %"}


@pytest.mark.parametrize(
    ("status", "conditions", "serves"),
    [
        ("unstable", {"other_load": "1.0 %"}, True),
        ("contaminated", CPU_TIME, True),
        ("contaminated", {"other_load": "2.0 %"}, True),  # a slow phase of the device
        ("contaminated", {"other_load": "41.0 %"}, False),
        ("contaminated", {"other_load": "a little"}, False),  # of a file from elsewhere
        ("contaminated", {}, False),
    ],
)
def test_a_disturbed_timing_stands_in_where_its_clock_can_be_trusted(
    store: Store, status: Status, conditions: dict[str, str], serves: bool
) -> None:
    store.add([replace(GEMM, status=status, conditions=conditions)])
    assert [(timing.seconds, timing.is_disturbed) for timing in store.timings(LAB)] == [(GEMM.seconds, True)] * serves


@pytest.mark.parametrize(("load", "serves"), [("41.0 %", True), ("83.0 %", False)])
def test_a_unit_of_the_trainer_beside_some_load_is_truer_than_a_sum_of_kernels(
    store: Store, load: str, serves: bool
) -> None:
    layer = replace(GEMM, operation="layer", shape=(1, 64, 32, 48, 4, 2, 8, 2), status="contaminated")
    store.add([replace(layer, conditions={"other_load": load})])
    assert len(store.timings(LAB)) == serves


def test_a_clean_timing_of_any_machine_comes_before_the_middle_one_of_disturbed_ones(store: Store) -> None:
    slow = [
        replace(GEMM, status="contaminated", conditions=CPU_TIME, samples_s=(seconds,))
        for seconds in (3e-4, 9e-4, 4e-4)
    ]
    farther = replace(slow[0], fingerprint=replace(LAB, torch="2.14.0"), samples_s=(1e-4,))
    store.add([*slow, farther])
    assert [(timing.seconds, timing.match) for timing in store.timings(LAB)] == [(4e-4, Match.EXACT)]
    assert not store.timings(LAB, operations=["wgrad"])
    clean = replace(GEMM, fingerprint=replace(LAB, torch="2.14.0"))
    store.add([clean])
    assert [(timing.seconds, timing.is_disturbed) for timing in store.timings(LAB)] == [(clean.seconds, False)]
    store.change([clean.key], hides=True, by="ada", reason="wrong")
    assert [timing.is_disturbed for timing in store.timings(LAB)] == [True]


def test_a_search_asks_for_operations(store: Store) -> None:
    store.add([GEMM, replace(GEMM, operation="wgrad"), replace(GEMM, dtype="fp8", measured_by="eve")])
    assert len(store.timings(LAB)) == 3
    assert [timing.operation for timing in store.timings(LAB, operations=["wgrad"])] == ["wgrad"]


machines = st.builds(
    lambda torch, runtime: replace(LAB, torch=torch, runtime=runtime),
    st.sampled_from(["2.13.0", "2.12.0"]),
    st.sampled_from(["cuda 13.0", "cuda 12.8"]),
)
drawn_record = st.builds(
    lambda machine, m, samples, day: replace(
        GEMM, fingerprint=machine, shape=(m, 64, 64), samples_s=samples, measured_at=f"2026-11-{day:02}T00:00:00Z"
    ),
    machines,
    st.sampled_from([64, 128]),
    st.sampled_from([(1.0,), (2.0,), (3.0,)]),
    st.integers(10, 12),
)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without a row: to make one takes longer than to copy it."""
    path = tmp_path_factory.mktemp("empty") / "timings.db"
    open_store(str(path)).close()
    return path


@given(records=st.lists(drawn_record, max_size=12))
def test_the_choice_is_that_of_sorting_them_all(empty: Path, records: list[Record]) -> None:
    with open_store(str(shutil.copy(empty, empty.with_name("law.db")))) as store:
        store.add(records)
        expected = {}
        for shape in {record.shape for record in records}:
            # What was added first keeps its day: the key does not tell it.
            alike = {record.key: record for record in reversed(records) if record.shape == shape}.values()
            nearest = min(match(record.fingerprint, LAB) or Match.EXACT for record in alike)
            near = [record for record in alike if match(record.fingerprint, LAB) == nearest]
            near.sort(key=lambda record: (-int(record.measured_at[8:10]), record.seconds))
            newest_s = sorted(record.seconds for record in near[:5])
            expected[shape] = (newest_s[(len(newest_s) - 1) // 2], nearest)
        assert chosen(store) == expected


def test_pushes_hides_and_pulls_reach_a_team(store: Store, url: str, tmp_path: Path) -> None:
    mine = str(tmp_path / "mine.db")
    slow = replace(GEMM, host="node2", samples_s=(GEMM.seconds * 1.5,), measured_at="2026-11-24T00:00:00Z")
    open_store(mine).close()

    def served(place: str) -> float | None:
        """Return what a search would take for the product."""
        with open_store(place, writable=False) as again:
            return {time.shape: time.seconds for time in again.timings(LAB)}.get(GEMM.shape)

    store.add([GEMM, *some_records(0, 3)])
    assert served(url) == GEMM.seconds
    with open_store(mine) as own:
        own.add([slow])
    assert served(mine) == slow.seconds
    copy(mine, url)
    assert served(url) == slow.seconds  # of two hosts
    copy(url, mine)
    change([slow.key], "a hot node", mine, hides=True)
    assert (served(mine), served(url)) == (GEMM.seconds, slow.seconds)
    copy(mine, url)
    assert served(url) == GEMM.seconds
    change([GEMM.key], "not this one either", url, hides=True)
    copy(url, mine)
    assert (served(mine), served(url)) == (None, None)
    change([slow.key], "no, it is sound", mine, hides=False)
    copy(mine, url)
    assert (served(mine), served(url)) == (slow.seconds, slow.seconds)


# -- check


def test_a_sound_store_has_no_findings(store: Store) -> None:
    store.add([GEMM, *some_records(0, 5)])
    assert list(store.check()) == []


def test_a_machine_that_another_process_meets_during_the_check_is_no_harm(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoplan.profiler.store.store.BATCH", 1)
    bad = replace(GEMM, samples_s=(1e-9,))
    store.add([bad])
    store.change([bad.key], hides=False, by="ada", reason="to see it found")
    findings = store.check()
    assert next(findings).key == bad.key
    with open_store(url) as other:
        other.add([replace(GEMM, fingerprint=replace(LAB, torch="2.14.0"))])
    assert list(findings) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("measured_by = 'x', seconds = 1, kernel = 'fast'", "its content has another key"),
        ("shape = '1x2'", "cannot be read"),
        ("shape = 'axbxc'", "cannot be read"),
        ("conditions = '{'", "cannot be read"),
        ("conditions = '[1]'", "cannot be read"),
        ("kernel = 'a' || chr(27)", "cannot be read"),
        ("operation = 'sort'", "cannot be read"),
    ],
)
def test_a_record_changed_by_hand_is_found(store: Store, url: str, change: str, reason: str) -> None:
    store.add([GEMM, *some_records(0, 3)])
    if not url.startswith("postgresql"):
        change = change.replace("chr(", "char(")
    with store._database.writing() as connection:
        connection.execute(text(f"UPDATE records SET {change} WHERE key = '{GEMM.key}'"))
    (finding,) = store.check()
    assert finding.key == GEMM.key
    assert reason in finding.reason


# -- schema


def test_migrations_make_the_tables_that_the_program_uses(url: str) -> None:
    assert ScriptDirectory(str(schema.MIGRATIONS)).get_heads() == [str(schema.SCHEMA)]
    database = open_database(url, writable=True, creates=True)
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": schema.VERSION_TABLE})
        assert compare_metadata(context, schema.metadata) == []
    database.engine.dispose()


def set_schema(store: Store, number: int, *statements: str) -> None:
    with store._database.writing() as connection:
        for statement in (*statements, f"UPDATE {schema.VERSION_TABLE} SET version_num = '{number}'"):
            connection.execute(text(statement))


def test_a_schema_two_versions_newer_is_refused(url: str) -> None:
    with open_store(url) as store:
        set_schema(store, schema.SCHEMA + 2)
    for writable in (True, False):
        with pytest.raises(StoreError, match=f"schema {schema.SCHEMA + 2}, .* knows {schema.SCHEMA}: update"):
            open_store(url, writable=writable)


def test_a_schema_one_version_newer_is_used_as_far_as_it_is_understood(url: str) -> None:
    """The next version may add tables, columns that may be left out, operations and statuses."""
    with open_store(url) as store:
        store.add([GEMM, replace(GEMM, shape=(2, 2, 2))])
        news = "ALTER TABLE records ADD COLUMN site TEXT", "CREATE TABLE sites (id BIGINT)"
        set_schema(store, schema.SCHEMA + 1, *news, "UPDATE records SET operation = 'sort' WHERE shape = '2x2x2'")
    with pytest.warns(StoreWarning, match=f"schema {schema.SCHEMA + 1}, this .* {schema.SCHEMA} and ignores newer"):
        store = open_store(url)
    with store:
        assert store.schema == schema.SCHEMA + 1
        assert (list(store.records()), len(store.timings(LAB)), store.num_unread) == ([GEMM], 1, 1)
        assert store.add([replace(GEMM, shape=(4, 4, 4))]).new == 1
        assert store.change([GEMM.key], hides=True, by="ada", reason="hot GPU") == 1
        assert len(store.timings(LAB)) == 1


def test_a_revision_only_adds_so_that_the_version_before_can_go_on(url: str) -> None:
    """From the one on that the tolerance begins with, see `FIRST_TOLERANT`."""
    from alembic import command
    from alembic.config import Config

    database = open_database(f"{url}-other" if "://" not in url else url, writable=True, creates=True)
    with database.reading() as connection:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", str(schema.MIGRATIONS))
        metadata = MetaData()
        metadata.reflect(connection)
        metadata.drop_all(connection)
        before: dict[str, set[str]] = {}
        for revision in range(1, schema.SCHEMA + 1):
            command.upgrade(config, str(revision))
            inspector = inspect(connection)
            columns = {name: inspector.get_columns(name) for name in inspector.get_table_names()}
            if revision > schema.FIRST_TOLERANT:
                for name, known in before.items():
                    added = [column for column in columns[name] if column["name"] not in known]
                    assert known <= {column["name"] for column in columns[name]}
                    assert all(column["nullable"] or column["default"] for column in added)
            before = {name: {column["name"] for column in found} for name, found in columns.items()}
    database.engine.dispose()


def test_an_older_schema_is_migrated_and_keeps_its_records(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(url) as store:
        store.add([GEMM])
    migrate_later(monkeypatch, tmp_path, "")
    with open_store(url, writable=False) as store:
        assert (list(store.records()), store.schema) == ([GEMM], schema.SCHEMA - 1)
    with monkeypatch.context() as patch:
        patch.setattr(schema, "SCHEMA", schema.SCHEMA + 1)
        with pytest.raises(StoreError, match="its owner can migrate it by writing to it"):
            open_store(url, writable=False)
    with open_store(url) as store:
        assert list(store.records()) == [GEMM]
        with store._database.reading() as connection:
            assert connection.execute(text("SELECT site FROM fingerprints")).scalar() is None
    with open_store(url, writable=False) as store:
        assert list(store.records()) == [GEMM]


def test_what_was_hidden_under_the_first_schema_stays_hidden(url: str) -> None:
    with open_store(url) as store:
        store.add([GEMM])
        with store._database.writing() as connection:
            for statement in (
                "DROP TABLE run_marks",
                "DROP TABLE runs",
                "DROP TABLE marks",
                'CREATE TABLE hidden (record_id BIGINT PRIMARY KEY, "by" TEXT, reason TEXT, at TEXT)',
                f"UPDATE {schema.VERSION_TABLE} SET version_num = '1'",
                "INSERT INTO hidden VALUES (1, 'ada', 'hot GPU', '2026-11-21T12:00:00+00:00')",
            ):
                connection.execute(text(statement))
    with open_store(url) as store:
        assert list(store.records()) == []
        assert [(mark.by, mark.reason, mark.hides) for mark in store.marks()] == [("ada", "hot GPU", True)]


def test_a_migration_that_fails_leaves_the_database_as_it_was(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(url) as store:
        store.add([GEMM])
    with monkeypatch.context() as patch:
        migrate_later(patch, tmp_path, "    op.drop_table('nothing')\n")
        with pytest.raises(StoreError, match="nothing"):
            open_store(url)
    with open_store(url) as store:
        assert list(store.records()) == [GEMM]
        with store._database.reading() as connection, pytest.raises(Exception, match="site"):
            connection.execute(text("SELECT site FROM fingerprints"))


def test_a_store_that_may_only_be_read_is_neither_made_nor_changed(url: str) -> None:
    with pytest.raises(StoreError, match=r"no such file|holds no timings yet"):
        open_store(url, writable=False)
    with open_store(url) as store:
        store.add([GEMM])
    with open_store(url, writable=False) as store:
        assert list(store.records()) == [GEMM]
        assert len(store.timings(LAB)) == 1
        with pytest.raises(StoreError, match=r"may not be written|may only be read"):
            store.add(some_records(0, 1))


# -- many writers

FORK = multiprocessing.get_context("fork")  # which has all loaded


def write(url: str, seed: int, count: int, line: Connection) -> None:
    store_module.BATCH = 20
    with open_store(url) as opened:
        opened.add(some_records(seed, count), on_batch=line.send)


def writer(url: str, seed: int, count: int) -> tuple[BaseProcess, Connection]:
    """A process that writes, and where it says how many it has written."""
    ours, theirs = FORK.Pipe(duplex=False)
    process = FORK.Process(target=write, args=(url, seed, count, theirs))
    process.start()
    theirs.close()
    return process, ours


def statuses(writers: Iterable[tuple[BaseProcess, Connection]]) -> list[int | None]:
    """With which they end."""
    found = []
    for process, line in writers:
        process.join(timeout=120)
        found.append(process.exitcode)
        line.close()
    return found


def test_no_row_is_lost_or_doubled_by_four_writers_at_once_one_of_them_killed(url: str) -> None:
    count = 300
    # Two of them push the same records; all meet a database that does not exist yet.
    seeds = (0, 1, 1, 2)
    running = [writer(url, seed, count) for seed in seeds]
    victim, line = running[-1]
    assert line.recv() == 20
    victim.kill()
    assert statuses(running) == [0, 0, 0, -signal.SIGKILL]
    with open_store(url) as store:
        stored = keys(store)
        assert len(stored) == len(set(stored)) >= 2 * count + 20
        assert list(store.check()) == []
    again = [writer(url, seed, count) for seed in seeds[-2:]]  # what was killed, and what is there whole
    assert statuses(again) == [0] * 2
    with open_store(url) as store:
        assert keys(store) == sorted(record.key for seed in set(seeds) for record in some_records(seed, count))


def test_the_seconds_in_the_table_are_the_median_of_the_samples(store: Store) -> None:
    store.add([GEMM, replace(GEMM, operation="wgrad", samples_s=(), status="failed")])
    with store._database.reading() as connection:
        rows = dict(connection.execute(text("SELECT operation, seconds FROM records")).all())  # type: ignore[arg-type]
    assert rows == {"gemm": GEMM.seconds, "wgrad": None}
    assert math.isclose(GEMM.seconds, 2.1e-4)


def test_what_is_read_at_once_is_one_state(store: Store, url: str) -> None:
    store.add([GEMM])
    count = select(func.count()).select_from(schema.records)
    with store._database.reading() as connection:
        before = connection.execute(count).scalar()
        with open_store(url) as other:
            other.add(some_records(0, 3))
        assert connection.execute(count).scalar() == before


def test_the_times_of_a_machine_are_read_from_the_index_without_a_sort(tmp_path: Path) -> None:
    place, asked = tmp_path / "timings.db", []
    with open_store(str(place)) as store:
        store.add([GEMM, *some_records(0, 50)])
        event.listen(store._database.engine, "before_cursor_execute", lambda *call: asked.append(call[2:4]))
        store.timings(LAB, operations=["gemm", "dgrad"])
    joined = [query for query in asked if "GROUP BY" in query[0] and "group_concat" in query[0]]
    assert joined
    for statement, values in joined:
        plan = [row[-1] for row in sqlite3.connect(place).execute(f"EXPLAIN QUERY PLAN {statement}", values)]
        assert "USING COVERING INDEX records_by_work" in plan[0]
        assert not any("TEMP B-TREE" in step for step in plan)
