"""Does the view of a database say what is known of which machine, how hosts and days compare, and what plans lack?"""

from __future__ import annotations

import json
import re
import sqlite3
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autoplan.api import team
from autoplan.profiler.record import Record
from autoplan.profiler.store import open_store
from autoplan.profiler.store import overview as store_overview
from autoplan.spec.team_overview import TeamOverview
from commands import run
from stores import GEMM, LAB
from test_run_record import RUN

DAYS = ("2026-11-20", "2026-11-22")
SLOW_HOST = 1.2  # times of n2 over those of others
NEW_DRIVER = 0.9  # times of the second day over those of the first


def timed(size: int, host: str, day: str, over: float) -> Record:
    seconds = 1e-4 * (size / 1024) * over
    return replace(
        GEMM, shape=(size, 4096, 4096), samples_s=(seconds,) * 5, host=host, measured_at=f"{day}T09:00:00+00:00"
    )


def fill(url: str) -> list[Record]:
    """Four shapes on three hosts, of which one is slow, on two days, after the first of which all became faster."""
    kept = [
        timed(size, host, day, (SLOW_HOST if host == "n2" else 1 + 0.001 * at) * (NEW_DRIVER if day == DAYS[1] else 1))
        for size in (1024, 2048, 3072, 4096)
        for at, host in enumerate(("n1", "n2", "n3"))
        for day in DAYS
    ]
    alone = replace(GEMM, operation="norm", shape=(4096, 4096), measured_by="bob", samples_s=(5e-5,) * 5)
    failed = replace(alone, shape=(8, 4096), samples_s=(), status="failed", reason="out of memory")
    checked = {"checked": "nic", "device": "5"}
    slow = replace(
        GEMM,
        operation="send_recv",
        shape=(2, 1, 8, 2**28),
        samples_s=(1e-2,) * 3,
        host="n2",
        status="contaminated",
        reason="device slowed down: nic at 48 % of the usual rate",
        conditions=checked,
    )
    other = replace(slow, host="n3")
    sound = replace(other, status="ok", reason="", measured_at="2026-11-23T12:00:00Z", samples_s=(5.5e-3,) * 3)
    with open_store(url) as store:
        store.add([*kept, alone, failed, slow, replace(other, samples_s=(1.1e-2,) * 3), sound, RUN])
        store.change([kept[0].key], hides=True, by="ada", reason="hot")
        store.change([kept[1].key], hides=False, by="ada", reason="looked")
    return kept


def test_many_records_are_compared_by_some_of_their_shapes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(url)
    whole = team.overview(url)
    assert whole.compared_share == 1
    num_records = sum(operation.records for machine in whole.machines for operation in machine.operations)
    monkeypatch.setattr(store_overview, "MAX_COMPARED", num_records // 2)
    part = team.overview(url)
    assert part.compared_share == pytest.approx(0.5, abs=0.02)
    assert [replace(row, spread=None) for row in part.machines[0].operations] == [
        replace(row, spread=None) for row in whole.machines[0].operations
    ]
    # The shapes of gemm have hashes on both sides: fewer are compared, of every host.
    assert {host.name for host in part.hosts} == {host.name for host in whole.hosts}
    assert all(0 < host.shapes < 4 for host in part.hosts)
    assert "50.0 % of the shapes are compared" in team.page_of(replace(part, compared_share=0.5))


def test_it_counts_what_is_known_of_each_machine(url: str) -> None:
    fill(url)
    found = team.overview(url)
    (machine,) = found.machines
    assert machine.machine == LAB.words
    assert machine.hosts == ("n1", "n2", "n3", "node7")
    assert machine.authors == ("ada", "bob")
    assert machine.runs == 1
    by_name = {operation.operation: operation for operation in machine.operations}
    gemm, norm = by_name["gemm"], by_name["norm"]
    assert (gemm.shapes, gemm.records, gemm.settled, gemm.approved, gemm.hidden) == (4, 24, 24, 1, 1)
    assert (gemm.first_day, gemm.last_day) == DAYS
    assert gemm.spread == pytest.approx(SLOW_HOST / NEW_DRIVER - 1)
    assert (norm.shapes, norm.settled, norm.failed, norm.spread) == (2, 1, 1, None)
    assert machine.last_day == "2026-11-23"


def test_hosts_and_days_stand_to_those_that_measured_the_same(url: str) -> None:
    fill(url)
    found = team.overview(url)
    assert [host.name for host in found.hosts] == ["n2", "n3", "n1"]  # the slowest first
    slow = found.hosts[0]
    assert (slow.device, slow.shapes) == (LAB.device, 4)
    assert slow.ratio == pytest.approx(SLOW_HOST, rel=0.01)
    assert re.fullmatch(r"gemm \d+x4096x4096 bf16", slow.worst_what)
    assert [day.name for day in found.days] == [*reversed(DAYS)]  # nothing of node7 was measured on another day
    assert found.days[0].ratio == pytest.approx(NEW_DRIVER, rel=0.01)


def test_parts_that_the_last_check_found_slow_are_named(url: str) -> None:
    fill(url)
    (part,) = team.overview(url).slow  # n3 was repaired
    assert (part.host, part.index, part.reason) == ("n2", "5", "nic at 48 % of the usual rate")


def test_an_empty_database_has_a_page_too(url: str) -> None:
    with open_store(url):
        pass
    found = team.overview(url)
    assert (found.machines, found.hosts, found.days, found.slow) == ((), (), (), ())
    assert "0 records" in team.page_of(found)


DAMAGES = {
    "conditions": ("conditions = '{\"checked\" nic'", "status = 'contaminated'"),
    "a list": ("""conditions = '["checked"]'""", "status = 'contaminated'"),
    "no day": ("measured_at = 'yesterday'", "operation = 'gemm'"),
    "blobs": ("host = x'00ff', measured_at = x'00ff', reason = x'00ff', measured_by = x'00ff'", "id % 2 = 0"),
    "no numbers": ("seconds = 'abc'", "host = 'n2'"),
    "zeros": ("seconds = 0", "host = 'n2'"),
    "control characters": ("host = 'n' || char(27) || '[31m2' || char(10)", "host = 'n2'"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_read_of_a_damaged_file_is_left_out(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.db"
    fill(str(path))
    change, rows = DAMAGES[damage]
    with sqlite3.connect(path) as connection:
        assert connection.execute(f"UPDATE records SET {change} WHERE {rows}").rowcount > 0
    found = team.overview(str(path))
    (machine,) = found.machines
    assert sum(operation.records for operation in machine.operations) == 29
    assert "\x1b" not in team.page_of(found)
    if damage == "no day":
        assert machine.last_day == "2026-11-23"  # of a check
        assert (found.days, len(found.hosts)) == ((), 3)
    elif damage == "control characters":
        assert [part.host for part in found.slow] == ["n[31m2"]
    elif damage in ("no numbers", "zeros"):
        assert [host.name for host in found.hosts] == ["n3", "n1"]
    elif damage != "blobs":
        assert found.slow == ()


class Page(HTMLParser):
    """Content of a page: the sections, its cells, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.loaded: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "section":
            self.sections.append(values["id"] or "")
        self.loaded += [value for name, value in attrs if value and name in ("src", "href") and value[0] != "#"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(str(tmp_path / "a.db"))
    asked = ("llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "64", "--seq-len", "4096")
    assert run(tmp_path, "estimate", *asked, "--out", "plan.json").returncode == 0
    return tmp_path


def test_the_command_writes_a_page_and_says_what_a_plan_lacks(folder: Path) -> None:
    evil = replace(GEMM, host="<script>alert(1)</script>", samples_s=(1e-3,) * 3)
    with open_store(str(folder / "a.db")) as store:
        store.add([evil])
    done = run(folder, "db", "report", "--db", "a.db", "--for", "plan.json", "--out", "team.html")
    assert done.returncode == 0, done.stderr
    text = (folder / "team.html").read_text()
    page = Page(text)
    assert page.sections == ["machines", "plans", "slow", "hosts", "days"]
    assert page.loaded == []
    assert "<script>alert" not in text
    assert any(re.fullmatch(r"\+(19|20)\.\d %", cell) for cell in page.texts)
    assert "autoplan profile --for plan.json" in page.texts
    assert "team.html exists" in run(folder, "db", "report", "--db", "a.db", "--out", "team.html").stderr
    found = json.loads(run(folder, "db", "report", "--db", "a.db", "--for", "plan.json", "--json").stdout)
    (needs,) = found["plans"]
    assert needs["machine"] == LAB.words
    assert needs["served"]["not measured"] == sum(needs["missing"].values()) > 0
    shown = run(folder, "db", "report", "--db", "a.db", "--for", "plan.json").stdout
    assert "slow: device 5 of n2 (h100-sxm): nic at 48 % of the usual rate" in shown
    assert re.search(r"^n2\s+h100-sxm\s+4\s+\+(19|20)\.", shown, re.MULTILINE)


def test_a_plan_of_a_device_that_nobody_measured_lacks_all(folder: Path) -> None:
    asked = ("llama3-8b", "--cluster", "a100-sxm:1x8", "--global-batch", "64", "--seq-len", "4096")
    assert run(folder, "estimate", *asked, "--out", "other.json").returncode == 0
    found: TeamOverview = team.overview(str(folder / "a.db"), [folder / "other.json"])
    (needs,) = found.plans
    assert needs.machine == ""
    assert set(needs.served) == {"not measured"}
    assert needs.missing["gemm bf16"] > 0
