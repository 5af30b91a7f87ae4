"""Which runs `benchmarks/pairs.py` takes for a pair, and what it calls right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RUNS = BENCHMARKS.parents[1] / "shared" / "data" / "measured_runs.csv"
ROW = {"model": "m", "tp": "2", "dp": "4", "recompute": "none", "vp": "?", "options": "", "notes": "n", "id": "a-1"}


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pairs

    yield pairs
    for name in ("pairs", "measured_runs", "reports"):
        sys.modules.pop(name, None)


def side(pairs: Any, row: dict[str, str], measured_s: float = 1.0, predicted_s: float = 1.0) -> Any:
    return pairs.Side(
        id=row["id"],
        choices=pairs.choices_of(row),
        measured_s=measured_s,
        predicted_s=predicted_s,
        low_s=0.9 * predicted_s,
        high_s=1.1 * predicted_s,
    )


def test_choices_are_columns_and_options_and_modules_go_before_the_kind_of_recomputation(pairs: Any) -> None:
    assert pairs.choices_of(ROW | {"options": "ep_overlap=1; dispatcher=deepep"}) == {
        "recompute": "none",
        "ep_overlap": "1",
        "dispatcher": "deepep",
    }
    assert pairs.choices_of(ROW | {"options": "recompute_modules=moe_act"}) == {"recompute_modules": "moe_act"}


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        ({"vp": "2"}, {"vp": "4"}, "vp"),
        ({"vp": "2", "sp": "0"}, {"vp": "4", "sp": "1"}, None),
        ({"vp": "2"}, {"vp": "2"}, None),
        ({"vp": "2", "cuda_graph": "attn"}, {"vp": "4"}, "vp"),  # of graphs the other one says nothing
    ],
)
def test_two_runs_differ_in_the_one_choice_that_both_state(
    pairs: Any, first: dict[str, str], other: dict[str, str], expected: str | None
) -> None:
    assert pairs.difference(first, other) == expected
    assert pairs.difference(other, first) == expected


def test_pairs_are_alike_in_all_else_that_describes_a_run(pairs: Any) -> None:
    rows = [
        ROW,
        ROW | {"id": "a-2", "notes": "other", "recompute": "full"},
        ROW | {"id": "a-3", "recompute": "full", "tp": "4"},  # of another degree: no pair
    ]
    timed = [("a", row, side(pairs, row, 1.0 + at, 1.0 + 0.5 * at)) for at, row in enumerate(rows)]
    (pair,) = pairs.pairs_of(timed)
    assert (pair.choice, pair.first.id, pair.other.id) == ("recompute", "a-1", "a-2")
    assert (pair.measured, pair.predicted) == (2.0, 1.5)
    assert pair.is_right_way
    assert not pair.is_inside
    assert not list(pairs.pairs_of([*timed[:1], ("b", *timed[1][1:])]))  # of another source


@pytest.mark.parametrize(
    ("measured", "predicted", "right"), [(0.8, 0.9, True), (1.1, 0.99, False), (1.005, 0.995, True), (1.05, 1.0, False)]
)
def test_a_ratio_is_right_on_the_same_side_of_one(pairs: Any, measured: float, predicted: float, right: bool) -> None:
    assert pairs.is_right_way(measured, predicted) is right


def test_a_summary_counts_changes_up_and_down_alike(pairs: Any) -> None:
    fast, slow = side(pairs, ROW, 1.0, 1.0), side(pairs, ROW, 2.0, 1.5)
    both = [
        pairs.Pair(source="a", choice="vp", first=first, other=other) for first, other in ((fast, slow), (slow, fast))
    ]
    line = list(pairs.summary(both))[1].split()
    assert line[:5] == ["a", "vp", "2", "100.0%", "50.0%"]


@pytest.mark.skipif(not RUNS.is_file(), reason="the table of measured runs is not there")
def test_overlapped_expert_traffic_is_as_much_faster_as_it_was_measured(pairs: Any, tmp_path: Path) -> None:
    """16 H100 with Qwen3-30B: by 15 to 18 %, both runs inside their intervals."""
    lines = RUNS.read_text(encoding="utf-8").splitlines(keepends=True)
    table = tmp_path / "runs.csv"
    table.write_text("".join([lines[0], *(line for line in lines if line.startswith("bridge_ab"))]), encoding="utf-8")
    overlaps = [pair for pair in pairs.pairs_of(pairs.sides(table)) if pair.choice == "ep_overlap"]
    assert len(overlaps) == 3
    for pair in overlaps:
        assert pair.is_right_way
        assert pair.is_inside
        assert pair.predicted == pytest.approx(pair.measured, rel=0.06)
