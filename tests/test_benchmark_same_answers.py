"""Does the comparison of answers see what differs, and nothing else?"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.answer_cases import NUM_SEARCHES, make_cases
from benchmarks.same_answers import (
    Renames,
    comparable,
    compared,
    differences,
    exits_of,
    read_renames,
    read_sections,
    write_sections,
)

NOTHING = Renames()


def record_of(text: str, title: str = "1 stdout") -> str:
    return write_sections({"1 command": "autoplan search\nexit 0\n", title: text})


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\n\n", "\na\r\n", "--- a\n+++ b", "é\n"])
def test_sections_are_read_as_they_were_written(text: str) -> None:
    sections = {"1 command": "autoplan\nexit 1\n", "1 stdout": text, "1 search wrote plan.json": text}
    assert read_sections(write_sections(sections)) == sections


def test_exit_statuses_are_read_from_a_record() -> None:
    record = write_sections({"1 command": "autoplan search\nexit 0\n", "2 command": "autoplan read a\nexit 1\n"})
    assert exits_of(record) == [0, 1]


def test_json_is_compared_by_its_fields() -> None:
    old = record_of(json.dumps({"versions": {"numpy": "1"}, "step_s": 1.5, "tp": 2}))
    assert not differences(old, record_of(json.dumps({"tp": 2, "step_s": 1.5, "versions": {"numpy": "2"}})), NOTHING)
    assert '- "step_s": 1.5,' in differences(old, record_of(json.dumps({"tp": 2, "step_s": 1.6})), NOTHING)


def test_what_export_wrote_is_compared_byte_for_byte() -> None:
    title = "2 export wrote launch/deepspeed.json"
    old, new = record_of('{"a": 1, "b": 2}\n', title), record_of('{"b": 2, "a": 1}\n', title)
    assert differences(old, new, NOTHING)
    assert differences(record_of("a\n", title), record_of("a", title), NOTHING)
    plan = "2 export wrote launch/plan.json"
    assert not differences(record_of('{"a": 1, "b": 2}\n', plan), record_of('{"b": 2, "a": 1}\n', plan), NOTHING)
    assert not differences(record_of("# autoplan 0.1.0 a\n", title), record_of("# autoplan 0.2.0 a\n", title), NOTHING)


def test_a_section_of_one_record_alone_is_a_difference() -> None:
    new = record_of("a\n") + write_sections({"1 search wrote plan.json": "{}"})
    assert differences(record_of("a\n"), new, NOTHING) == ["@@@ 1 search wrote plan.json: only in the second"]


def test_renamed_fields_are_equal(tmp_path: Path) -> None:
    path = tmp_path / "renames.toml"
    path.write_text('lines = ["^autoplan: warning"]\n[fields]\nstep_s = "step_time_s"\nnew = ""\n')
    renames = read_renames(path)
    old, new = record_of('{"plan": [{"step_s": 1}]}'), record_of('{"plan": [{"step_time_s": 1}], "new": 3}')
    assert differences(old, new, NOTHING)
    assert not differences(old, new, renames)
    assert not differences(record_of("autoplan: warning a\nb\n"), record_of("b\n"), renames)


def test_unknown_tables_of_renames_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "renames.toml"
    path.write_text("[field]\n")
    with pytest.raises(SystemExit, match="unknown field"):
        read_renames(path)


def test_a_page_is_compared_by_its_data_and_its_words() -> None:
    page = (
        '<html><style>{}</style><h1>Plan</h1><script type="application/json" class="a">{}</script>'
        "<script>{}</script></html>"
    )
    title = "2 report wrote report.html"
    plain = comparable(title, page.format("b {}", '{"x":1,"y":2}', "f()"), NOTHING)
    assert plain == comparable(title, page.format("c {}", '{"y":2,"x":1}', "g()"), NOTHING)
    assert plain != comparable(title, page.format("b {}", '{"x":1,"y":3}', "f()"), NOTHING)
    assert "Plan" in plain


def test_cases_of_one_folder_alone_differ(tmp_path: Path) -> None:
    for folder, names in (("a", ("x", "y")), ("b", ("y", "z"))):
        (tmp_path / folder / "searches").mkdir(parents=True)
        for name in names:
            (tmp_path / folder / "searches" / f"{name}.txt").write_text(record_of("a\n"))
    found = dict(compared(tmp_path / "a", tmp_path / "b", ("searches",), NOTHING))
    assert {name: bool(lines) for name, lines in found.items()} == {
        "searches/x": True,
        "searches/y": False,
        "searches/z": True,
    }


def test_cases_are_the_same_every_time() -> None:
    cases = make_cases()
    assert cases == make_cases()
    assert Counter(case.group for case in cases) == {"predict": 1, "exports": 60, "searches": NUM_SEARCHES}
    assert len({(case.group, case.name) for case in cases}) == len(cases)
    assert all(re.fullmatch(r"[\w.@-]+", case.name) for case in cases)
