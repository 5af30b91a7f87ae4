"""Does a dry run without devices plan what the ranks of such a cluster would measure?"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from autoplan.api.profiling import ProfileOptions, planned_profile, started_profile
from autoplan.base.errors import InputError
from autoplan.profiler.record import Record
from autoplan.profiler.store import open_store
from commands import run
from model_specs import SMALL_TOML
from stores import LAB, postgres_schema

SEARCH = "search llama3-8b --cluster h100-sxm:2x8 --global-batch 64 --seq-len 4096 --out plan.json --quiet"


def test_what_is_planned_is_what_real_ranks_are_asked(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "small.toml").write_text(SMALL_TOML)
    options = ProfileOptions(
        db=str(tmp_path / "t.db"), seq_len=32, tp="1,2", micro_batches="1", ranks=2, cluster="cpu:1x2", dtypes="fp32"
    )
    planned = planned_profile(str(tmp_path / "small.toml"), options=options)
    assert not (tmp_path / "t.db").exists()
    with started_profile(str(tmp_path / "small.toml"), plan_file=None, options=options) as started:
        assert started is not None
        assert [ranked.task for ranked in planned.tasks] == [ranked.task for ranked in started.tasks]
        assert planned.expected_s == pytest.approx(started.expected_s)


def test_nothing_is_needed_of_torch_or_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, *SEARCH.split()).returncode == 0
    # None in the table of modules stands for one that cannot be imported.
    monkeypatch.setitem(sys.modules, "torch", None)
    done = run(tmp_path, "profile", "--for", "plan.json", "--dry-run", "--db", "none.db")
    assert done.returncode == 0, done.stderr
    assert "autoplan: h100-sxm: 16 ranks on 2 nodes" in done.stderr
    assert "certain that A is faster; expected after" in done.stdout
    assert "measurements in about" in done.stdout
    assert not (tmp_path / "none.db").exists()


def test_fewer_nodes_measure_smaller_groups(tmp_path: Path) -> None:
    whole = planned_profile("llama3-8b", options=ProfileOptions(db=str(tmp_path / "t.db"), cluster="h100-sxm:4x8"))
    single = planned_profile(
        "llama3-8b", options=ProfileOptions(db=str(tmp_path / "t.db"), cluster="h100-sxm:4x8"), num_nodes=1
    )

    def widest(tasks: list[tuple[int, ...]]) -> int:
        return max(shape[0] for shape in tasks)

    groups = [
        [task.task.shape for task in plan.tasks if task.task.operation == "all_reduce"] for plan in (whole, single)
    ]
    assert [widest(shapes) for shapes in groups] == [32, 8]
    with pytest.raises(InputError, match="--nodes 5: the cluster has 4"):
        planned_profile("llama3-8b", options=ProfileOptions(cluster="h100-sxm:4x8"), num_nodes=5)
    with pytest.raises(InputError, match="--nodes must be between 0"):
        planned_profile("llama3-8b", options=ProfileOptions(cluster="h100-sxm:4x8"), num_nodes=-1)
    with pytest.raises(InputError, match="or --cluster"):
        planned_profile("llama3-8b")


def test_every_visit_takes_its_time() -> None:
    once, thrice = (
        planned_profile("llama3-8b", options=ProfileOptions(cluster="h100-sxm:1x8", visits=visits)) for visits in (1, 3)
    )
    assert thrice.expected_s == pytest.approx(3 * once.expected_s)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--limit", "bogus", "--dry-run"), "'bogus'"),
        (("--allowance", "3", "--dry-run"), "'3'"),
        (("--ranks", "4", "--dry-run"), "leave it out"),
        (("--nodes", "1"), "--nodes goes with --dry-run"),
        (("--image", "x"), "go with --template"),
        (("--work", "x"), "go with --template"),
        (("--template", "slurm"), "give --for PLAN"),
    ],
)
def test_what_is_asked_in_vain_is_refused(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    done = run(tmp_path, "profile", "llama3-8b", "--cluster", "h100-sxm:1x8", *flags)
    assert done.returncode == 1
    assert says in done.stderr


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_what_the_team_has_measured_is_left_out(kind: str, tmp_path: Path) -> None:
    """Whichever way an operation ran there: it is looked up as it was measured."""
    if kind == "postgresql":
        with postgres_schema() as url:
            _leaves_out(url, tmp_path)
    else:
        _leaves_out(str(tmp_path / "t.db"), tmp_path)


def _measured(shape: tuple[int, ...]) -> Record:
    return Record(
        fingerprint=LAB,
        operation="wgrad",
        shape=shape,
        dtype="bf16",
        samples_s=(2 * math.prod(shape) / 6e14,),
        kernel="mm + add",
        measured_at="2026-11-20T12:00:00Z",
    )


def _leaves_out(url: str, folder: Path) -> None:
    options = ProfileOptions(db=url, cluster="h100-sxm:2x8", only="wgrad", tp="1")
    before = planned_profile("llama3-8b", options=options)
    shapes = [ranked.task.shape for ranked in before.tasks]
    with open_store(url) as store:
        store.add(_measured(shape) for shape in shapes[:3])
    after = planned_profile("llama3-8b", options=options)
    assert after.num_known == 3
    assert {ranked.task.shape for ranked in after.tasks} == set(shapes[3:])
    assert {ranked.task.kernel for ranked in after.tasks} == {"mm + add"}
    assert after.hello.fingerprint == LAB
    asked = "profile llama3-8b --cluster h100-sxm:2x8 --only wgrad --tp 1 --dry-run --json"
    done = run(folder, *asked.split(), "--db", url)
    printed = json.loads(done.stdout)
    assert (printed["known"], len(printed["measurements"])) == (3, len(shapes) - 3)
    assert printed["expected_s"] == pytest.approx(after.expected_s)
