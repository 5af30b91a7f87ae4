"""Is the plan that stands for one that a target cannot express legal, accepted, and the nearest?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.search.axes import axes_of, differing
from autoplan.search.nearest import nearest
from autoplan.search.plan_changes import prices
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.search_result import RankedPlan
from commands import run
from search_cases import DENSE, make

PROBLEM, _ = make()
PLAN = ParallelPlan(global_batch=64, micro_batch=2, tp=4, sp=True, pp=2, dp_shard=2)


@settings(max_examples=8, deadline=None)
@given(
    refused=st.dictionaries(
        st.sampled_from(["tp", "pp", "micro_batch", "sharding", "recompute"]), st.none(), min_size=1, max_size=2
    )
)
def test_the_nearest_plan_changes_just_what_is_refused_and_is_the_fastest_of_these(refused: dict[str, None]) -> None:
    def accepts(candidate: RankedPlan) -> bool:
        return all(getattr(candidate.plan, axis) != getattr(PLAN, axis) for axis in refused)

    near = nearest(PROBLEM, PLAN, accepts)
    assert near is not None
    assert accepts(near.plan)
    assert near.plan.verdict == "fits"
    assert not broken(RULES, PROBLEM.workload, near.plan.plan)
    assert {axis for axis, *_ in near.changes} <= set(refused)  # sharding of one replica means nothing
    # Whatever else is accepted and differs in these axes alone is slower.
    faster = nearest(PROBLEM, PLAN, lambda candidate: accepts(candidate) and candidate.step_s < near.plan.step_s)
    assert faster is None or len(faster.changes) > len(near.changes)


def test_one_change_is_nearer_than_a_faster_plan_of_the_file() -> None:
    other = dataclasses.replace(PLAN, tp=2, pp=1, dp_shard=8, micro_batch=1)
    near = nearest(PROBLEM, PLAN, lambda candidate: candidate.plan.pp == 1, [other])
    assert near is not None
    assert [axis for axis, *_ in near.changes] == ["pp"]
    alone = nearest(PROBLEM, PLAN, lambda candidate: candidate.plan == other, [other], most_changes=1)
    assert alone is not None
    assert alone.plan == prices(PROBLEM, [other])[0]
    assert len(alone.changes) == len(differing(axes_of(DENSE, PLAN), axes_of(DENSE, other)))


def test_where_nothing_near_is_accepted_there_is_none() -> None:
    assert nearest(PROBLEM, PLAN, lambda candidate: False) is None


@pytest.fixture(scope="module")
def gpipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file whose schedule Megatron-LM does not have."""
    folder = tmp_path_factory.mktemp("nearest")
    place = ("--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "2048")
    assert run(folder, "search", "llama3-8b", *place, "--fix", "pp=2", "--fix", "vp=1", "-q").returncode == 0
    table = json.loads((folder / "plan.json").read_text())
    table["best"]["plan"]["schedule"] = "gpipe"
    (folder / "gpipe.json").write_text(json.dumps(table))
    return folder / "gpipe.json"


def test_a_refusal_names_what_would_do(gpipe: Path) -> None:
    done = run(gpipe.parent, "export", "gpipe.json", "--to", "megatron-lm")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "schedule 'gpipe'" in done.stderr
    assert "or pass --nearest: schedule " in done.stderr
    assert " instead of gpipe; " in done.stderr


def test_the_nearest_plan_is_written_and_said(gpipe: Path) -> None:
    done = run(gpipe.parent, "export", "gpipe.json", "--to", "megatron-lm", "--nearest")
    assert done.returncode == 0
    assert "# Plan: " in done.stdout
    assert "gpipe" not in done.stdout
    assert "schedule 'gpipe'" in done.stderr
    assert "wrote the nearest plan that it can start: schedule " in done.stderr


def test_a_plan_that_can_be_expressed_stays_as_it_is(gpipe: Path) -> None:
    arguments = ("export", "plan.json", "--to", "megatron-lm")
    assert run(gpipe.parent, *arguments, "--nearest").stdout == run(gpipe.parent, *arguments).stdout


def test_what_no_other_plan_mends_is_refused_as_before(gpipe: Path) -> None:
    table = json.loads(gpipe.read_text())
    table["model"]["rope_base"] = 10000.5
    (gpipe.parent / "odd.json").write_text(json.dumps(table))
    done = run(gpipe.parent, "export", "odd.json", "--to", "megatron-lm", "--nearest")
    assert done.returncode == 1
    assert "no legal plan near it that fits was found" in done.stderr
