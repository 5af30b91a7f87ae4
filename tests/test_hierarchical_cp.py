"""Is a hierarchy of all-to-alls and a ring priced as its parts, and only where its sizes fit?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autoplan
from autoplan.api.problem import make_problem, make_space
from autoplan.base.errors import AutoplanError
from autoplan.cost.collectives.context_parallel import context_parallel, context_parallel_s
from autoplan.cost.estimate import estimate
from autoplan.cost.network.links import Links
from autoplan.cost.passes import Pass
from autoplan.frameworks.common.rules import broken
from autoplan.frameworks.registry import book_of
from autoplan.launch.targets import exported
from autoplan.search.study import search
from autoplan.spec.enums import ContextParallelKind
from autoplan.spec.estimate import RISKY_Z
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem

K = 1024
KINDS = {kind.inner: str(kind) for kind in ContextParallelKind if kind.is_hierarchical}


def problem_of(model: str = "llama3-8b", **options: Any) -> Problem:
    return make_problem(model, **{"cluster": "h100-sxm:4x8", "seq_len": 128 * K} | options)


def plan_of(**axes: Any) -> ParallelPlan:
    return ParallelPlan(**{"global_batch": 8, "cp": 16, "dp_shard": 2, "recompute": "full"} | axes)


def exposed(problem: Problem, core_s: float, **axes: Any) -> Pass:
    core = Pass(np.array([core_s]), np.array([2.5 * core_s]))
    return context_parallel_s(problem, problem.batch([plan_of(**axes)]), Links.of(problem), core)


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_neighbours_exchange_heads_and_groups_of_them_form_the_ring(inner: int) -> None:
    problem = problem_of()
    batch = problem.batch([plan_of(cp_kind=KINDS[inner])])
    [ring, heads, kv] = context_parallel(problem, batch)
    assert (heads.group.stride.tolist(), heads.group.size.tolist()) == ([1], [inner])
    assert (ring.group.stride.tolist(), ring.group.size.tolist()) == ([inner], [16 // inner])
    tokens = 128 * K / 16
    # 8 KV heads and 32 query heads of 128 elements of 2 bytes, of keys and values, and of queries and outputs.
    assert kv.buffer_bytes.tolist() == [2 * 2 * 8 * 128 * tokens]
    assert heads.buffer_bytes.tolist() == [2 * 2 * 32 * 128 * tokens]
    # Every rank passes on the keys and values of its share of the heads, of the tokens of its all-to-all.
    assert ring.buffer_bytes.tolist() == [2 * 2 * 8 * 128 * tokens * 16 / inner]


def test_a_hierarchy_exposes_its_all_to_alls_and_what_its_shorter_ring_exposes() -> None:
    """By hand from the prices of both collectives, with attention that hides all but the first transfer, or nothing."""
    problem = problem_of()
    links, batch = Links.of(problem), problem.batch([plan_of(cp_kind=KINDS[8])])
    ring, heads, kv = (float(part.seconds(links)[0]) for part in context_parallel(problem, batch))
    hidden, shown = (exposed(problem, core_s, cp_kind=KINDS[8]) for core_s in (1e3, 0.0))
    assert hidden.forward_s[0] == pytest.approx(heads + kv + ring)  # one transfer between two nodes
    assert hidden.backward_s[0] == pytest.approx(heads + kv + 2 * ring)
    assert shown.forward_s[0] == pytest.approx(heads + kv + ring)
    four = context_parallel(problem, problem.batch([plan_of(cp_kind=KINDS[4])]))
    ring_of_four = float(four.ring.seconds(links)[0])
    exchange = sum(float(part.seconds(links)[0]) for part in four[1:])
    partly = exposed(problem, ring_of_four / 2, cp_kind=KINDS[4])
    assert partly.forward_s[0] == pytest.approx(exchange + ring_of_four * (1 - 3 / 8))  # 3 of 4 parts hide a half each


def test_levels_of_one_rank_are_those_of_a_ring_or_an_all_to_all() -> None:
    problem = problem_of()
    ring, all_to_all = (problem.batch([plan_of(cp_kind=kind)]) for kind in ("ring", "all_to_all"))
    assert (ring.cp_inner.tolist(), all_to_all.cp_inner.tolist()) == ([1], [16])
    assert context_parallel(problem, ring).exchange_kv.forward.tolist() == [0.0]  # type: ignore[union-attr]
    assert context_parallel(problem, all_to_all).ring.forward.tolist() == [0.0]  # type: ignore[union-attr]


def test_attention_takes_longer_the_more_parts_its_ring_has() -> None:
    problem = problem_of()
    times = {
        kind: float(estimate(problem, problem.batch([plan_of(cp_kind=kind)])).terms_s["attention"][0])
        for kind in ("ring", *KINDS.values(), "all_to_all")
    }
    assert list(times.values()) == sorted(times.values(), reverse=True)


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "axes", "why"),
    [
        (
            "llama3-8b",
            {"cp": 8, "dp_shard": 4, "cp_kind": KINDS[8]},
            "needs a cp above 8 and a multiple of it, cp is 8",
        ),
        ("llama3-8b", {"cp": 2, "dp_shard": 16, "cp_kind": KINDS[4]}, "needs a cp above 4"),
        (
            "llama3-8b",
            {"tp": 2, "sp": True, "dp_shard": 1, "cp_kind": KINDS[8]},
            "divisible by 8: use ring or lower cp",
        ),
        ("deepseek-v2-lite", {"cp_kind": KINDS[2]}, "needs value heads as wide as query heads"),
        ("mistral-7b", {"cp_kind": KINDS[2]}, "supports neither windows nor attention sinks"),
    ],
)
def test_sizes_and_heads_have_to_fit(model: str, axes: dict[str, Any], why: str) -> None:
    problem = problem_of(model)
    faults = broken(book_of(problem.framework).rules, problem.workload, plan_of(**axes))
    assert [line for line in faults if why in line], faults


def test_many_ranks_with_few_heads_use_a_hierarchy_where_an_all_to_all_does_not_exist() -> None:
    problem = problem_of()
    rules = book_of(problem.framework).rules
    assert broken(rules, problem.workload, plan_of(cp_kind="all_to_all"))
    assert not broken(rules, problem.workload, plan_of(cp_kind=KINDS[8]))


@pytest.mark.parametrize("framework", ["torchtitan", "pytorch-fsdp", "deepspeed-zero", "maxtext"])
def test_other_frameworks_do_not_have_it(framework: str) -> None:
    problem = problem_of(framework=framework)
    faults = broken(book_of(problem.framework).rules, problem.workload, plan_of(cp_kind=KINDS[4], sharding="zero3"))
    assert [line for line in faults if "cp_kind 'a2a+p2p:4' does not exist" in line]


# -- searches and files -----------------------------------------------------------------------------------------------


def test_a_search_finds_the_best_of_all_plans() -> None:
    problem = problem_of(cluster="h100-sxm:2x8", seq_len=64 * K)
    fixed = ["tp=1", "pp=1", "offload=none", "cuda_graphs=none", "cross_entropy_fusion=native", "sharding=zero1"]
    space = make_space(problem, 16, fix=fixed)
    plans, _ = space.plans(space.cells())
    costs = estimate(problem, plans)
    fits = costs.oom_z <= RISKY_Z
    found = search(problem, space)
    assert found.certificate.proven
    assert set(plans.cp_kind.tolist()) == {kind.code for kind in ContextParallelKind}
    assert found.ranked[0].step_s == costs.step_s[fits].min()


def test_cells_are_not_offered_hierarchies_that_do_not_fit() -> None:
    space = make_space(problem_of(), 32)
    cells = [cell for cell in space.cells() if cell.cp > 1]
    groups, _ = space.groups(cells)
    kinds = [ContextParallelKind(tuple(ContextParallelKind)[code]) for code in groups.cp_kind.tolist()]
    assert all(kind.fits(cp) for kind, cp in zip(kinds, groups.cp.tolist(), strict=True))


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-lm@0.12", "megatron-bridge", "primus"])
def test_sizes_are_written_and_read(tmp_path: Path, target: str) -> None:
    place: dict[str, Any] = {"cluster": "h100-sxm:4x8", "seq_len": 128 * K, "global_batch": 8}
    file = autoplan.estimate("llama3-8b", **place, plan={"cp": 16, "cp_kind": KINDS[8], "recompute": "full"}).file
    files = exported(file, target, "torchrun")
    text = "\n".join(written.text for written in files)
    sizes = {"megatron-lm": "--hierarchical-context-parallel-sizes 8 2", "megatron-bridge": "parallel_sizes = [8, 2]"}
    assert sizes.get(target.partition("@")[0], "a2a+p2p") in text
    for written in files:
        (tmp_path / written.name).write_text(written.text)
    launch = autoplan.read(tmp_path / files[-1].name, devices=32, seq_len=128 * K).launch
    assert (launch.plan.cp, launch.plan.cp_kind) == (16, KINDS[8])


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ("", "must be two sizes beside cp_comm_type a2a+p2p, got none"),
        ("2 2 4", "must be two sizes"),
        ("2 x", "must be two sizes"),
        ("2 4", "must multiply to the context-parallel size 16"),
    ],
)
def test_sizes_that_do_not_make_a_hierarchy_are_refused_in_one_line(tmp_path: Path, sizes: str, why: str) -> None:
    place: dict[str, Any] = {"cluster": "h100-sxm:4x8", "seq_len": 128 * K, "global_batch": 8}
    file = autoplan.estimate("llama3-8b", **place, plan={"cp": 16, "cp_kind": KINDS[8], "recompute": "full"}).file
    text = exported(file, "megatron-lm", "torchrun")[0].text
    written = "--hierarchical-context-parallel-sizes 8 2"
    assert written in text
    (tmp_path / "launch.sh").write_text(text.replace(written, f"{written[:-3]}{sizes}" if sizes else ""))
    with pytest.raises(AutoplanError, match=re.escape(why)) as refusal:
        autoplan.read(tmp_path / "launch.sh")
    assert "\n" not in str(refusal.value)


def test_an_all_to_all_of_a_size_that_is_not_priced_is_listed(tmp_path: Path) -> None:
    place: dict[str, Any] = {"cluster": "h100-sxm:4x8", "seq_len": 128 * K, "global_batch": 8}
    file = autoplan.estimate("llama3-8b", **place, plan={"cp": 16, "cp_kind": KINDS[8], "recompute": "full"}).file
    text = exported(file, "megatron-lm", "torchrun")[0].text
    (tmp_path / "launch.sh").write_text(
        text.replace("parallel-size 16", "parallel-size 32").replace("sizes 8 2", "sizes 16 2")
    )
    launch = autoplan.read(tmp_path / "launch.sh").launch
    assert launch.plan.cp_kind == "ring"
    assert [item.why for item in launch.unread if "all-to-alls over 16 ranks are not priced" in item.why]


def test_a_plan_says_how_its_ranks_share_attention() -> None:
    assert "all-to-all attention over 4 and ring" in plan_of(cp_kind=KINDS[4]).describe()
    with pytest.raises(AutoplanError, match="cp_kind"):
        plan_of(cp_kind="a2a+p2p:3")
