"""Is a table that is not what it seems told in one line, whichever command reads it?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from autoplan.base.errors import InputError
from autoplan.runs.outcomes import read_outcomes
from autoplan.runs.predictions import read_predictions
from autoplan.runs.runs import read_runs
from autoplan.runs.table import MAX_BYTES
from commands import run

RUNS = "id,framework,gpu,num_gpus,model,step_time_s,verdict\nmine-1,NeMo,h100-sxm,8,llama3-8b,1.5,fits\n"
READERS: tuple[Callable[[Path], Iterable[object]], ...] = (read_runs, read_outcomes, read_predictions)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a table of .* it lacks id"),
        ("a,b\n1,2\n", "needs the columns id, .* separated by commas; it lacks id"),
        (RUNS.replace(",", ";"), "separated by commas; it lacks id"),
        (RUNS.replace("model", "gpu"), "it lacks model|'gpu' stands twice"),
        (RUNS + "mine-2,NeMo,h100-sx", "ends in line 3 has 3 cells, .* 7 columns: .* not copied whole"),
        (RUNS.replace("1.5,", "1,5,"), "ends in line 2 has 8 cells"),
        (RUNS.replace("NeMo", '"NeMo'), "ends in line 2 has 2 cells, .* a quote is missing"),
        (RUNS + RUNS.splitlines()[1], "id 'mine-1' stands twice"),
        (RUNS.replace("NeMo", "x" * 200_000), r"not a CSV table: field larger .* \(line \d\)"),
        ("x" * 200_000, r"not a CSV table: field larger .* \(line \d\)"),
    ],
)
def test_a_table_whose_cells_are_not_under_their_columns_is_refused(
    tmp_path: Path, read: Callable[[Path], Iterable[object]], text: str, says: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=rf"table\.csv: .*{says}") as caught:
        list(read(path))
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        list(read(tmp_path / "missing.csv"))


@pytest.mark.parametrize("read", READERS)
def test_a_table_as_spreadsheets_write_it_is_read(tmp_path: Path, read: Callable[[Path], Iterable[object]]) -> None:
    path = tmp_path / "table.csv"
    path.write_text(RUNS.replace("NeMo", '"Ne\nMo"').replace("\n", "\r\n") + "\r\n", encoding="utf-8-sig", newline="")
    (row,) = read(path)
    assert row.id == "mine-1"  # type: ignore[attr-defined]


def test_a_table_above_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    with path.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)  # sparse: it takes no disk
    with pytest.raises(InputError, match=r"runs\.csv: too large: .* at most 1,073,741,824 are read"):
        list(read_runs(path))


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ("fast,ok", "step_time_s of mine-1 is no positive number: 'fast'"),
        ("-1,ok", "step_time_s of mine-1 is no positive number: '-1'"),
        ("nan,ok", "step_time_s of mine-1 is no positive number: 'nan'"),
        ("1e999,ok", "step_time_s of mine-1 is no positive number: '1e999'"),
        ("1.5,okay", "status 'okay' of mine-1 must be one of ok, oom, failed, invalid, computed, ?"),
    ],
)
def test_an_answer_that_is_none_is_refused(tmp_path: Path, cells: str, says: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"id,step_time_s,status\nmine-1,{cells}\n")
    with pytest.raises(InputError) as caught:
        list(read_outcomes(path))
    assert str(caught.value) == f"{path}: {says}"


def test_predictions_of_other_runs_are_no_answer(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(RUNS)
    (tmp_path / "said.csv").write_text(RUNS.replace("mine-1", "other-1"))
    asked = run(tmp_path, "score", "--runs", "runs.csv", "--predictions", "said.csv")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert asked.stderr == "autoplan: said.csv has none of the runs of runs.csv: predict that table first\n"
