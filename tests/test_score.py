"""Are predictions scored as a count by hand and the reference scorer score them?"""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.base.errors import InputError
from autoplan.report.score import COLUMNS, kendall_tau, score, score_by_source, score_table
from autoplan.runs.outcomes import read_outcomes
from autoplan.runs.predictions import predict_all, prediction_table, read_predictions
from autoplan.runs.runs import read_runs
from autoplan.spec.run_outcome import Prediction, RunOutcome

SHARED = Path(__file__).resolve().parents[2] / "shared"


def ran(name: str, step_s: float | None = None, status: str = "ok", **changes: Any) -> RunOutcome:
    values = {"id": name, "source": "a", "peak_gib": None, "decision": ("a",), "plan": (name,), **changes}
    return RunOutcome(status=status, step_s=step_s, **values)  # type: ignore[arg-type]


def said(name: str, step_s: float | None, verdict: str = "fits", spread: float = 1.5, **changes: Any) -> Prediction:
    low, high = (None, None) if step_s is None else (step_s / spread, step_s * spread)
    return Prediction(
        id=name,
        verdict=verdict,  # type: ignore[arg-type]
        note="",
        step_time_s=step_s,
        step_time_low_s=low,
        step_time_high_s=high,
        **changes,
    )


# -- by hand ----------------------------------------------------------------------------------------------------------

MEASURED = [ran("a-1", 1.0), ran("a-2", 2.0), ran("a-3", 4.0), ran("a-4", status="oom"), ran("a-5", 5.0)]
PREDICTED = {
    prediction.id: prediction
    for prediction in (
        said("a-1", 1.1),
        said("a-2", 1.0),
        said("a-3", 4.0),
        said("a-4", 0.5, "risky"),
        said("a-5", 6.0),
    )
}


def test_errors_intervals_and_widths_are_those_of_a_count_by_hand() -> None:
    row = score(MEASURED, PREDICTED)
    assert row["finished"] == 4
    assert row["priced"] == 1.0
    assert row["medAPE"] == pytest.approx(100 * (0.1 + 0.2) / 2)  # of 0, .1, .2 and .5
    assert row["cover"] == pytest.approx(3 / 4)  # 1.0 x 1.5 is below 2.0
    assert row["width"] == pytest.approx(100 * (0.8333333 + 0.9166667) / 2, rel=1e-6)


def test_a_finished_run_without_a_price_is_wholly_wrong() -> None:
    row = score([ran("a-1", 1.0)], {})
    assert (row["priced"], row["medAPE"], row["cover"]) == (0.0, 100.0, 0.0)


def test_the_pick_is_the_fastest_that_fits_and_regret_what_it_loses() -> None:
    row = score(MEASURED, PREDICTED)
    assert row["groups"] == 1
    assert row["regret"] == pytest.approx(100 * (1 - 1.0 / 2.0))  # a-2 is said to be fastest
    assert row["badpick"] == 0.0
    assert row["tau"] == pytest.approx((5 - 1) / 6)


def test_a_pick_that_runs_out_of_memory_costs_everything() -> None:
    row = score(MEASURED, PREDICTED | {"a-4": said("a-4", 0.5)})
    assert (row["regret"], row["badpick"]) == (100.0, 1.0)


def test_repeats_of_a_plan_count_once_in_a_decision() -> None:
    again = ran("a-6", 3.0, plan=("a-1",))  # the mean of its times is 2.0
    row = score([*MEASURED, again], PREDICTED | {"a-6": said("a-6", 1.1)})
    assert row["regret"] == 0.0
    assert row["finished"] == 5


def test_memory_and_verdicts_count_runs_that_are_known() -> None:
    measured = [
        ran("a-1", 1.0, peak_gib=10.0),
        ran("a-2", 1.0, peak_gib=10.0),
        ran("a-3", status="oom"),
        ran("a-4", status="oom"),
        ran("a-5", status="failed"),
    ]
    predicted = {
        "a-1": said("a-1", 1.0, peak_memory_gib=11.0),
        "a-2": said("a-2", 1.0, "oom"),
        "a-3": said("a-3", 1.0, "oom"),
        "a-5": said("a-5", 1.0, "oom"),
    }
    row = score(measured, predicted)
    assert row["memAPE"] == pytest.approx(100 * (0.1 + 1.0) / 2)
    assert (row["oomP"], row["oomR"], row["oomF1"]) == (0.5, 0.5, 0.5)


def test_sources_weigh_the_same_in_their_mean() -> None:
    measured = [*MEASURED, ran("b-1", 1.0, source="b", decision=("b",))]
    rows = score_by_source(measured, PREDICTED | {"b-1": said("b-1", 2.0)})
    assert list(rows) == ["a", "b", "all runs", "mean of sources"]
    assert rows["mean of sources"]["medAPE"] == pytest.approx((15.0 + 100.0) / 2)
    assert rows["mean of sources"]["oomF1"] == rows["a"]["oomF1"]
    lines = score_table(rows).splitlines()
    assert lines[0].split() == ["source", *COLUMNS]
    assert len({len(line) for line in lines}) == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=12))
def test_kendalls_tau_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    from scipy.stats import kendalltau  # loads most of scipy

    ours = kendall_tau([(float(a), float(b)) for a, b in pairs])
    theirs = kendalltau([a for a, _ in pairs], [b for _, b in pairs], variant="b").statistic
    assert ours == pytest.approx(theirs) if ours is not None else theirs != theirs


# -- tables -----------------------------------------------------------------------------------------------------------


def test_predictions_come_back_from_their_table(tmp_path: Path) -> None:
    path = tmp_path / "said.csv"
    near_miss, two = said("a-1", 1.25, peak_memory_gib=10.5), said("a-2", None, "unpriced")
    path.write_text(prediction_table([near_miss, two]))
    assert [prediction.id for prediction in read_predictions(path)] == ["a-1", "a-2"]
    back = next(iter(read_predictions(path)))
    assert (back.step_time_s, back.verdict, back.peak_memory_gib) == (1.25, "fits", 10.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("id,step_time_s\na,1\n", "lacks verdict"),
        ("id,step_time_s,verdict\na,1,perhaps\n", "must be one of fits"),
        ("id,step_time_s,verdict\na,fast,fits\n", "is no positive number"),
        ("id,step_time_s,verdict\na,-1,fits\n", "is no positive number"),
    ],
)
def test_a_table_that_is_none_of_predictions_is_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "said.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        list(read_predictions(path))
    assert "\n" not in str(caught.value)


def test_a_table_without_a_status_counts_what_was_timed_as_finished(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("id,step_time_s,gpu\nmine-1,2.5,h100\nmine-2,,h100\n")
    first, second = read_outcomes(path)
    assert (first.is_finished, first.step_s, first.source) == (True, 2.5, "mine")
    assert (second.is_finished, second.status) == (False, "?")


def reference_scorer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("score_runs", SHARED / "tools" / "score_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (SHARED / "data" / "measured_runs.csv").is_file(), reason="the table of runs is not beside us")
def test_the_reference_scorer_says_the_same(tmp_path: Path) -> None:
    """On some runs of all sources and on all of two, predicted as they ship."""
    runs = tmp_path / "runs.csv"
    with (SHARED / "data" / "measured_runs.csv").open(newline="") as stream:
        rows = [
            row
            for at, row in enumerate(csv.DictReader(stream))
            if at % 32 == 0 or row["id"].startswith(("hagemann", "bloom"))
        ]
    with runs.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    said_table = tmp_path / "said.csv"
    said_table.write_text(prediction_table(predict_all(read_runs(runs))))
    scorer = reference_scorer()
    with said_table.open(newline="") as stream:
        expected = scorer.score(rows, {row["id"]: row for row in csv.DictReader(stream)})
    found = score(list(read_outcomes(runs)), {prediction.id: prediction for prediction in read_predictions(said_table)})
    for name in COLUMNS:
        assert found[name] == (None if expected[name] is None else pytest.approx(expected[name])), name
