"""Options that spaces leave out, tried on the best plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autoplan
from autoplan.api.page import _front
from autoplan.api.tuning import _searched
from autoplan.search.excluded_options import switched, with_excluded_options
from autoplan.search.study import search
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.plan_file import SpaceFlags
from search_cases import DENSE, LARGE, make


def test_an_option_that_is_forbidden_is_not_tried() -> None:
    problem, space = make(DENSE)
    plan = ParallelPlan(global_batch=64, tp=2, sp=True, pp=4, dp_shard=2, cuda_graphs="attn")
    tried = [replace(plan, cp=2, dp_shard=1)]  # beyond the 4,096 tokens of a rank
    exposed = replace(plan, grad_reduce_overlap=False)
    tried += [exposed]
    tried += [replace(plan, cuda_graphs="layer"), replace(plan, cuda_graphs="full_iteration")]
    assert list(switched(problem, space, plan, ())) == tried
    flags = SpaceFlags(global_batch="64", at_most=("CP=1",), forbid=("cuda-graphs=layer", "offload"))
    assert list(switched(problem, space, plan, flags.barred)) == [exposed, tried[-1]]
    flags = replace(flags, forbid=(*flags.forbid, "cuda_graphs=full-iteration"))
    assert list(switched(problem, space, plan, flags.barred)) == [exposed]


def test_micro_batches_grow_beyond_the_space_where_that_helps() -> None:
    """Sequences so short that 16 of them leave the device idle."""
    problem, space = make(DENSE, "b300:1x8", batches=(4096,), seq_len=256)
    found = search(problem, space)
    assert found.rivals[0].plan.micro_batch == 16
    wider, result = with_excluded_options(problem, space, found, ())
    best = result.rivals[0]
    assert best.plan.micro_batch > 16
    assert best.s_per_sequence < found.rivals[0].s_per_sequence
    assert wider.limits.admits("micro_batch", best.plan.micro_batch)
    assert f"micro_batch <= {best.plan.micro_batch}" in result.certificate.limits
    assert result.certificate == search(problem, wider).certificate
    bounded = SpaceFlags(global_batch="4096", at_most=("micro-batch=16",)).barred
    assert with_excluded_options(problem, space, found, bounded)[1] == found


def test_searches_for_runs_and_tunings_grow_as_far() -> None:
    """Front, sizes and tuning end with the micro-batches of the plain search."""
    asked = {"cluster": "h100-sxm:1x8", "global_batch": 2048, "seq_len": 512, "fix": ("pp=1", "tp=1")}
    fastest = autoplan.search("llama3.2-1b", prefer="fastest", **asked)
    assert fastest.plan.micro_batch > 16
    front = autoplan.search("llama3.2-1b", objectives=["step-time", "memory-headroom"], **asked)
    sized = autoplan.search("llama3.2-1b", nodes="1", prefer="fastest", **asked)
    for found in (front, sized):
        assert found.file.best.step_s == pytest.approx(fastest.file.best.step_s, rel=1e-6)
    flags = SpaceFlags(global_batch="2048", fix=asked["fix"])
    tuned = _searched("llama3.2-1b", asked["cluster"], 512, {}, flags, None)
    assert tuned.plans[0].step_s == pytest.approx(fastest.file.best.step_s, rel=1e-6)


def test_the_page_of_such_a_plan_looks_at_micro_batches_as_large() -> None:
    found = autoplan.search("llama3.2-1b", cluster="h100-sxm:1x8", global_batch=2048, seq_len=512)
    assert found.plan.micro_batch > 16
    fastest = _front(found.file, found.problem)[0]
    assert fastest.plan.micro_batch == found.plan.micro_batch
    assert fastest.step_s <= found.file.best.step_s


def test_a_best_plan_that_they_do_not_help_stays() -> None:
    problem, space = make(LARGE, "h100-sxm:2x8", batches=(64,), fix=("pp=1",))
    found = search(problem, space)
    assert with_excluded_options(problem, space, found, ()) == (space, found)


def test_half_of_the_optimizer_on_the_host_is_enough_and_faster_than_all_of_it() -> None:
    """Twin flow of DeepSpeed and Megatron-Core: the other half is updated meanwhile on the device."""
    job = {"cluster": "h100-sxm:1x2", "global_batch": 16, "seq_len": 8192, "prefer": "fastest"}
    half, whole = (
        autoplan.search("llama3-8b", **job, forbid=forbid).file.best  # type: ignore[arg-type]
        for forbid in ((), ("partial-offload",))
    )
    assert (half.plan.offload, half.plan.offload_percent) == ("optimizer", 50)
    assert (whole.plan.offload, whole.plan.offload_percent) == ("optimizer", 100)
    assert half.step_s < 0.95 * whole.step_s
    problem, space = make(DENSE)
    plan = ParallelPlan(global_batch=64, dp_shard=16, offload="optimizer", offload_percent=50)
    tried = {changed.offload_percent for changed in switched(problem, space, plan, ())}
    assert tried == {25, 50, 75}
