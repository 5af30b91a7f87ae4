"""Functions of `autoplan.api` that measure: discover, profile, run and tune, without the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from autoplan.api.discovery import discover
from autoplan.api.plan_files import make_plan_file
from autoplan.api.plan_run import run
from autoplan.api.problem import make_problem
from autoplan.api.profiling import ProfileOptions, profile
from autoplan.api.tuning import tune
from autoplan.base.errors import InputError
from autoplan.base.files import encode
from autoplan.cost.estimate import estimate
from autoplan.profiler.store import open_store
from autoplan.search.ranking import ranked
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from topology_samples import FOLDER

PROGRAM = str(Path(__file__).parent / "support" / "logging_program.py")
SMALL = ModelSpec(name="small", num_layers=2, hidden_size=32, vocab_size=256, num_heads=4, ffn_size=64)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan file of two ranks, in the format that every CPU computes fast."""
    problem = make_problem(SMALL, cluster="cpu:1x2", seq_len=16, framework="torch", precision="fp32")
    plan = ParallelPlan(global_batch=4, dp_shard=2, sharding="none", param_gather_overlap=False, precision="fp32")
    best = ranked(problem, estimate(problem, PlanBatch.of([plan], SMALL.num_layers)), [0])
    path = tmp_path / "plan.json"
    path.write_text(encode(make_plan_file(problem, best, None)))
    return path


def test_saved_output_of_a_tool_describes_a_cluster() -> None:
    name = FOLDER / "hgx-h100.txt"
    description = discover([name], nodes=4, name="lab", device="h100-sxm")
    assert description is not None
    assert (description.cluster.name, description.cluster.num_nodes) == ("lab", 4)
    with pytest.raises(InputError, match="--nodes must be at least 1"):
        discover([name], nodes=-1)


def test_a_profile_is_stored(tmp_path: Path) -> None:
    path = str(tmp_path / "times.db")
    options = ProfileOptions(db=path, seq_len=32, tp="1", micro_batches="1", only="norm", ranks=2, allowance="0.05s")
    seen = []
    progress = profile(SMALL, options=options, advance=lambda now: seen.append(now.num_visits))
    assert progress is not None
    assert seen == list(range(1, len(seen) + 1))
    with open_store(path) as store:
        assert {record.operation for record in store.records()} == {"norm"}


def test_a_run_tells_its_steps_and_what_was_predicted(plan_file: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    path = str(tmp_path / "runs.db")
    measured = run(plan_file, steps=2, warmup=1, db=path, progress=lambda done, total: steps.append((done, total)))
    assert measured is not None
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert len(measured.measured.step_s) == 2
    with open_store(path) as store:
        assert [kept.predicted_s for kept in store.runs()] == [measured.predicted.step_s]


def test_a_tuning_returns_the_plan_that_ran(plan_file: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    tuned = tune(
        plan_file, program=[sys.executable, PROGRAM, "end", "6"], trials=1, steps=3, warmup=1, work=tmp_path / "tune",
        show=lines.append,
    )  # fmt: skip
    assert tuned.file is not None
    assert tuned.best == tuned.file.best.plan
    assert lines[0].startswith("trial 0: ")
    assert not tuned.is_interrupted
