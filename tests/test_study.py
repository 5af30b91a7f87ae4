from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import optuna
import pytest

from autoplan.base.errors import AutoplanError, InputError, NoPlanError
from autoplan.cost.estimate import estimate
from autoplan.search.advice import check_result, fits_somewhere, smallest_nodes, why_empty
from autoplan.search.ranking import Leaders, ordering, ranked, seconds_per_sequence
from autoplan.search.sampler import Sampling
from autoplan.search.space import Space
from autoplan.search.storage import opened
from autoplan.search.study import MARGIN, Shared, search
from autoplan.spec.blocks import Experts
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, PlanBatch
from autoplan.spec.problem import Problem
from search_cases import DENSE, LARGE, PLAIN, make

MOE = ModelSpec(
    name="moe",
    num_layers=12,
    hidden_size=2048,
    vocab_size=32000,
    num_heads=16,
    ffn_size=8192,
    moe=Experts(num_experts=16, experts_per_token=2, expert_ffn_size=2048, shared_expert_ffn_size=2048),
)


@pytest.mark.parametrize("model", [DENSE, MOE])
@pytest.mark.parametrize("cluster", ["h100-sxm:2x8", "a100-sxm-40:3x8"])
def test_the_best_plan_is_that_of_a_plain_enumeration(model: ModelSpec, cluster: str) -> None:
    problem, space = make(model, cluster, batches=(24, 48))
    result = search(problem, space)
    batch, owner = space.plans(space.cells())
    costs = estimate(problem, batch)
    fits = np.flatnonzero(costs.verdict == 0)
    objective = seconds_per_sequence(costs)[fits]
    best = fits[np.argmin(objective)]
    certificate = result.certificate
    assert result.ranked[0].step_s == pytest.approx(costs.step_s[best], rel=1e-8)
    assert certificate.plans == len(space.candidates(space.cells())) >= len(batch)
    assert certificate.priced < len(batch) / 10
    assert len(np.unique(owner)) <= certificate.cells == len(space.cells())
    assert certificate.best_step_s == result.ranked[0].step_s
    near = fits[objective <= objective.min() * (1 + MARGIN)]
    expected = [batch.plan(int(at)) for at in near[ordering(seconds_per_sequence(costs)[near], batch.take(near))]]
    assert [ranked_plan.plan for ranked_plan in result.ranked] == expected
    assert certificate.least_left is not None
    assert certificate.least_left >= 1 + MARGIN


def test_without_sequence_parallelism_other_degrees_may_be_best() -> None:
    """An all-reduce hides behind the weight gradients; the gather of sequence parallelism does not."""
    job = {"cluster": "b200:2x8", "seq_len": 512, "framework": "megatron-lm-2022"}
    either, on, off = (search(*make(LARGE, fix=fix, **job)).rivals[0] for fix in ((), ("sp=on",), ("sp=off",)))
    assert either == off
    assert either.plan.tp == 2 != on.plan.tp
    assert on.s_per_sequence > 1.02 * either.s_per_sequence


def test_rivals_are_the_best_of_their_cells() -> None:
    problem, space = make(MOE)
    result = search(problem, space, margin=0.5)
    assert result.rivals[0] == result.ranked[0]
    cells = [(p.plan.pp, p.plan.tp, p.plan.cp, p.plan.ep, p.plan.etp, p.plan.dp_replicate) for p in result.rivals]
    assert len(set(cells)) == len(cells)
    rates = [rival.step_s / rival.plan.global_batch for rival in result.rivals]
    assert rates == sorted(rates)
    assert len(result.rivals) > 5


@pytest.mark.parametrize("share", [0.9, 0.99, 1.01, 1.06, 1.2, 2.0])
def test_a_plan_that_may_fit_stands_for_its_cell_before_one_that_does_not(share: float) -> None:
    """`share`: memory that may be used over that of the leanest plan, which is never the fastest of its cell."""
    problem, space = make(DENSE, "h100-sxm:1x8", batches=(16,))
    batch, _ = space.plans(space.cells())
    least = estimate(problem, batch).memory_bytes.min()
    tight = replace(problem, reserve_bytes=problem.capacity_bytes - share * least)
    result = search(tight, space)
    assert result.rivals[:1] == result.ranked[:1]
    verdicts = estimate(tight, batch).verdict
    assert [ranked_plan.verdict for ranked_plan in result.ranked[:1]] == [
        VERDICTS[v] for v in [verdicts.min()] if v < 2
    ]
    assert len({candidate.verdict for candidate in (*result.ranked, *result.rivals)}) <= 1


def test_limits_of_the_space_are_told_in_full() -> None:
    _, space = make(MOE, batches=(16, 32, 48))
    limits = "; ".join(space.describe())
    for words in ("grid of 3 values from 16 to 48", "etp 1|tp", "vp a divisor", "layers spread evenly", "domain of 8"):
        assert words in limits
    _, fixed = make(DENSE, fix=("vp=1", "sp=off"))
    assert "sp off" in fixed.describe()
    assert not [part for part in fixed.describe() if "etp" in part or "vp a" in part or "grid" in part]


def test_ways_out_are_true() -> None:
    problem, space = make(replace(DENSE, num_layers=48), "h100-sxm:1x1", batches=(16,), fix=("recompute=none",))
    result = search(problem, space)
    with pytest.raises(NoPlanError) as caught:
        check_result(problem, space, result)
    says = str(caught.value)
    least = re.search(r"within these limits it fits on (\d+) nodes of 1 device, h100-sxm has 1", says)
    assert least, says
    nodes = int(least[1])
    larger, wider = make(
        replace(DENSE, num_layers=48), f"h100-sxm:{nodes}x1", batches=(16,), fix=("recompute=none", "tp=1")
    )
    assert search(larger, wider).ranked
    offloading = replace(space, limits=space.limits.where(offload=("none", "optimizer")))
    fits = any(ranked.verdict == "fits" for ranked in search(problem, offloading).ranked)
    assert ("without --forbid offload" in says) == fits


def test_a_shorter_sequence_that_fits_is_named() -> None:
    def cut(seq_len: int) -> tuple[Problem, Space]:
        return make(replace(DENSE, num_layers=16), "h100-sxm:1x1", batches=(16,), seq_len=seq_len)

    with pytest.raises(NoPlanError) as caught:
        check_result(*cut(2**18), search(*cut(2**18)))
    named = re.search(r"it fits on this size with --seq-len (\d+)", str(caught.value))
    assert named, caught.value
    assert search(*cut(int(named[1]))).certificate.fitting > 0
    assert search(*cut(2 * int(named[1]))).certificate.fitting == 0


def test_a_single_device_may_keep_its_optimizer_on_the_host() -> None:
    problem, space = make(DENSE, "h100-sxm:1x1", batches=(16,))
    assert not search(problem, space).ranked
    _, allowed = make(DENSE, "h100-sxm:1x1", batches=(16,), forbid=tuple(set(PLAIN) - {"offload"}))
    best = search(problem, allowed).ranked[0].plan
    assert (best.offload, best.sharding) == ("optimizer", "zero1")
    batch, _ = allowed.plans(allowed.cells())
    assert ((batch.sharding == 0) == (batch.offload == 0)).all(), "one plan under two names"


def test_a_search_repeats_itself() -> None:
    problem, space = make(DENSE, batches=(48, 64))
    assert search(problem, space) == search(problem, space)


def test_ties_go_to_the_same_plan_in_any_order() -> None:
    _, space = make(DENSE)
    batch, _ = space.plans(space.cells())
    flat = np.ones(len(batch))
    first = batch.take(ordering(flat, batch)[:20])
    shuffled = batch.take(np.random.default_rng(7).permutation(len(batch)))
    again = shuffled.take(ordering(flat, shuffled)[:20])
    assert [first.plan(at) for at in range(20)] == [again.plan(at) for at in range(20)]


def test_of_plans_of_equal_time_that_with_even_chunks_goes_first() -> None:
    even = ParallelPlan(global_batch=64, pp=2, vp=2, schedule="interleaved", layers_per_chunk=(6, 6, 6, 6))
    plans = [replace(even, layers_per_chunk=layers) for layers in ((4, 8, 8, 4), (5, 7, 7, 5), (6, 6, 6, 6))]
    order = ordering(np.ones(3), PlanBatch.of(plans, 24))
    assert order.tolist() == [2, 1, 0]


def test_noise_of_rounding_does_not_decide() -> None:
    _, space = make(DENSE)
    batch, _ = space.plans(space.cells()[:5])
    noise = 1.0 + np.random.default_rng(3).uniform(-1e-13, 1e-13, len(batch))
    assert (ordering(noise * 1.2345, batch) == ordering(np.full(len(batch), 1.2345), batch)).all()


def test_leaders_are_the_first_of_a_full_sort_however_they_come() -> None:
    _, space = make(DENSE)
    batch, _ = space.plans(space.cells())
    objective = np.round(np.random.default_rng(1).uniform(1, 3, len(batch)), 2)
    expected = batch.take(ordering(objective, batch)[:50])
    leaders = Leaders(50)
    for part in np.array_split(np.random.default_rng(2).permutation(len(batch)), 7):
        leaders.offer(objective[part], batch.take(part))
    assert leaders.batch is not None
    assert [leaders.batch.plan(at) for at in range(50)] == [expected.plan(at) for at in range(50)]


def test_the_size_of_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, space = make(MOE)
    whole = search(problem, space)
    monkeypatch.setattr("autoplan.search.study.BLOCK_KINDS", 100)
    parts = search(problem, space)
    assert parts.ranked == whole.ranked
    assert parts.certificate.proven


def test_progress_counts_all_cells() -> None:
    problem, space = make(DENSE)
    seen: list[tuple[int, int]] = []
    search(problem, space, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(space.cells()), len(space.cells()))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_trials_are_cells_in_the_order_of_their_bounds(tmp_path: Path) -> None:
    problem, space = make(DENSE, batches=(16,))
    result = search(problem, space, shared=Shared(url=str(tmp_path / "journal"), name="one"))
    with opened(str(tmp_path / "journal")) as storage:
        trials = optuna.load_study(study_name="one", storage=storage).trials
    assert len(trials) == result.certificate.expanded < result.certificate.cells
    bounds = [trial.user_attrs["bound"] for trial in trials]
    assert bounds == sorted(bounds)
    complete = [trial for trial in trials if trial.state == optuna.trial.TrialState.COMPLETE]
    assert all(trial.user_attrs["bound"] <= (trial.value or 0.0) for trial in complete)
    best = min((t for t in complete if t.constraints["memory"] <= 0), key=lambda trial: trial.value or np.inf)
    assert best.user_attrs["plan"]["tp"] == result.ranked[0].plan.tp == best.params["tp"]
    assert best.value == pytest.approx(result.ranked[0].step_s / result.ranked[0].plan.global_batch)
    assert result == search(problem, space)


def test_more_global_batch_to_choose_from_is_never_slower() -> None:
    problem, narrow = make(DENSE, batches=(64,))
    _, wide = make(DENSE, batches=(64, 96, 128))
    slow, fast = search(problem, narrow).ranked[0], search(problem, wide).ranked[0]
    assert fast.tokens_per_s_per_device >= slow.tokens_per_s_per_device


def test_risky_plans_are_ranked_where_none_fits() -> None:
    problem, space = make(DENSE, "a100-sxm-40:1x8", fix=("tp=8", "pp=1", "recompute=full", "micro_batch=1"))
    least = estimate(problem, space.plans(space.cells())[0]).memory_bytes.min()
    # Leave so little that the probability of running out lies between the two bounds.
    tight = replace(problem, reserve_bytes=problem.capacity_bytes - least * 1.05)
    result = search(tight, space)
    assert result.certificate.fitting == 0
    assert result.ranked[0].verdict == "risky"
    check_result(tight, space, result)


def test_nothing_fits_says_how_much_is_missing_and_where_it_would() -> None:
    big = replace(DENSE, name="big", num_layers=96, hidden_size=12288, num_heads=96, ffn_size=33024)
    problem, space = make(big, "h100-sxm:1x8", batches=(256,))
    result = search(problem, space)
    assert not result.ranked
    with pytest.raises(
        NoPlanError, match=r"needs .* GiB of 79\.1 GiB.*it fits on [0-9]+ nodes of 8 devices, h100-sxm has "
    ):
        check_result(problem, space, result)
    nodes = smallest_nodes(problem, space.limits, space)
    assert nodes is not None
    larger = replace(problem, cluster=replace(problem.cluster, num_nodes=nodes))
    assert fits_somewhere(larger, space.limits, space)
    enough, roomy = make(big, f"h100-sxm:{nodes}x8", batches=(256,))
    assert search(enough, roomy).ranked


def test_fixed_values_that_leave_no_room_are_named() -> None:
    problem, space = make(DENSE, fix=("tp=1", "pp=1", "sharding=none"))
    with pytest.raises(NoPlanError, match=r"it fits on this size without --fix tp=1 or .*without --fix sharding=none"):
        check_result(problem, space, search(problem, space))


@pytest.mark.parametrize(
    ("cluster", "fix", "forbid", "ways"),
    [
        ("h100-sxm:2x8", ("pp=1",), ("dp",), "there is one without --fix pp=1 or with dp above 1"),
        ("h100-sxm:2x8", ("dp=2", "pp=1"), ("tp=8",), "or without --forbid tp=8"),
        (
            "h100-sxm:2x8",
            (),
            ("sharding", "tp", "pp"),
            "tp above 1 or with pp above 1 or with another sharding than zero1",
        ),
    ],
)
def test_ways_out_name_what_was_forbidden(
    cluster: str, fix: tuple[str, ...], forbid: tuple[str, ...], ways: str
) -> None:
    problem, space = make(LARGE, cluster, fix=fix, forbid=(*PLAIN, *forbid))
    with pytest.raises(NoPlanError) as caught:
        check_result(problem, space, search(problem, space))
    assert str(caught.value).endswith(ways)


@pytest.mark.parametrize(
    ("num_layers", "seq_len", "forbid", "ways"),
    [
        (24, 32768, ("recompute", "micro_batch=1"), "without --forbid micro_batch=1 or with recomputation"),
        (32, 65536, ("sp", "pp", "sharding=zero3"), "with sp on"),
    ],
)
def test_ways_out_of_long_sequences_name_what_keeps_fewer_activations(
    num_layers: int, seq_len: int, forbid: tuple[str, ...], ways: str
) -> None:
    model = replace(LARGE, num_layers=num_layers)
    problem, space = make(model, "h100-sxm:1x8", seq_len=seq_len, forbid=(*PLAIN, *forbid))
    with pytest.raises(NoPlanError) as caught:
        check_result(problem, space, search(problem, space))
    assert str(caught.value).endswith(f"it fits on this size {ways}")


def test_nothing_fits_on_one_replica_that_a_search_does_not_find() -> None:
    """Main weights as remainders need a sharded optimizer, which searches leave out where nothing is shared."""
    problem, space = make(replace(LARGE, num_layers=44), "h100-sxm:1x8")
    assert search(problem, space).certificate.fitting == 0
    assert not fits_somewhere(problem, space.limits, space)


def test_a_size_where_it_fits_is_found_though_micro_batches_of_1_are_forbidden() -> None:
    problem, space = make(LARGE, forbid=(*PLAIN, "micro_batch=1"))
    assert fits_somewhere(problem, space.limits, space)
    assert search(problem, space).ranked


@pytest.mark.parametrize(
    ("cluster", "batches", "fix", "says"),
    [
        ("h100-sxm:3x8", (72,), ("tp=3",), "num_heads 32 must be divisible by tp 3"),
        ("h100-sxm:2x8", (64,), ("tp=3",), "tp 3 must divide the 16 devices"),
        ("h100-sxm:2x8", (64,), ("pp=32",), "leaves stages without layers"),
        ("h100-sxm:2x8", (64,), ("ep=2",), "needs a model with experts"),
        ("h100-sxm:64x8", (7,), (), "nearest usable"),
        ("h100-sxm:2x8", (64,), ("sharding=zero3", "pp=2"), "needs pp 1"),
        ("h100-sxm:2x8", (64,), ("micro_batch=5",), "relax"),
        # All that the batch would admit is tp 7, which no head count does: not tp is to be changed, but the batch.
        ("h100-sxm:13x7", (32,), (), "the nearest usable ones are 26, 28, 35, 39"),
    ],
)
def test_an_empty_space_is_explained(cluster: str, batches: tuple[int, ...], fix: tuple[str, ...], says: str) -> None:
    problem, space = make(DENSE, cluster, batches=batches, fix=fix)
    result = search(problem, space)
    assert result.closest is None
    assert not result.certificate.proven
    assert says in why_empty(space)
    with pytest.raises(NoPlanError) as caught:
        check_result(problem, space, result)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("cluster", "asked"), [("h100-sxm:64x8", 7), ("h100-sxm:13x7", 32)])
def test_nearest_batches_are_usable(cluster: str, asked: int) -> None:
    _, space = make(DENSE, cluster, batches=(asked,))
    nearest = [int(word) for word in why_empty(space).split("usable ones are ")[1].split(", ")]
    for batch in nearest:
        problem, usable = make(DENSE, cluster, batches=(batch,))
        assert search(problem, usable).ranked


@pytest.mark.parametrize(
    ("batch", "fix", "ways"),
    [
        (64, ("sharding=zero3", "pp=2"), "without --fix pp=2 or without --fix sharding=zero3"),
        (64, ("micro_batch=5", "recompute=none"), "without --fix micro_batch=5"),
        (64, ("tp=16", "pp=2"), "without --fix tp=16 or without --fix pp=2"),
    ],
)
def test_wishes_that_leave_no_legal_plan_are_told_and_leaving_one_out_helps(
    batch: int, fix: tuple[str, ...], ways: str
) -> None:
    problem, space = make(DENSE, "h100-sxm:2x8", batches=(batch,), fix=fix)
    with pytest.raises(NoPlanError) as caught:
        check_result(problem, space, search(problem, space))
    assert str(caught.value).endswith(f"; there is one {ways}")
    for way in ways.split(" or "):
        rest = tuple(wish for wish in fix if wish != way.removeprefix("without --fix "))
        assert len(rest) == len(fix) - 1
        problem, space = make(DENSE, "h100-sxm:2x8", batches=(batch,), fix=rest)
        assert space.size(space.cells()) > 0
        assert search(problem, space).certificate.plans > 0


def test_figures_of_a_ranked_plan() -> None:
    """8 devices, 16 sequences of 4,096 tokens: rates follow from the step time by hand."""
    problem, _ = make(DENSE, "h100-sxm:1x8")
    plan = ParallelPlan(global_batch=16, tp=2, sp=True, pp=2, dp_shard=2)
    costs = estimate(problem, PlanBatch.of([plan], DENSE.num_layers))
    (ranked_plan,) = ranked(problem, costs, [0])
    assert ranked_plan.plan == plan
    assert ranked_plan.tokens_per_s_per_device == pytest.approx(16 * 4096 / ranked_plan.step_s / 8)
    # 6 x weights of the matrix products plus 6 x causal attention (2 x 2 x s/2 x hidden a layer) per token
    weights = 24 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 11008) + 4096 * 32000
    flops = 6 * weights + 3 * 24 * 2 * 4096 * 4096
    assert ranked_plan.mfu == pytest.approx(ranked_plan.tokens_per_s_per_device * flops / 989e12, rel=1e-3)
    assert ranked_plan.memory_headroom_bytes == pytest.approx(problem.capacity_bytes - ranked_plan.memory_bytes)
    assert sum(ranked_plan.terms_s.values()) == pytest.approx(ranked_plan.step_s)


def test_a_damaged_journal_is_refused_in_one_line_or_harmless(tmp_path: Path) -> None:
    problem, space = make(DENSE, "h100-sxm:1x8", batches=(16,))
    journal = tmp_path / "journal"
    expected = search(problem, space, shared=Shared(url=str(journal), name="one")).ranked[0].plan
    whole, dice = journal.read_bytes(), random.Random(7)
    refusals = set[str]()
    for number in range(24):
        data, at = bytearray(whole), dice.randrange(len(whole))
        data[at : at + dice.choice((1, 8, 60))] = dice.choice((b"", b"null", b"{}", b"x", b"7", b'"', b"findings"))
        copy = tmp_path / f"journal {number}"
        copy.write_bytes(data)
        try:
            assert search(problem, space, shared=Shared(url=str(copy), name="one")).ranked[0].plan == expected
        except AutoplanError as error:
            refusals.add(str(error))
    assert any("damaged" in text for text in refusals)
    assert not any("\n" in text for text in refusals)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        *((r'\{"cell":[0-9]+\}', text) for text in ('{"cell":70000}', '{"cell":"x"}', '{"other":0}')),
        (r'"step\\": null', '"step\\": true'),  # of a distribution
    ],
)
def test_a_damaged_journal_of_sampled_cells_is_refused(tmp_path: Path, was: str, becomes: str) -> None:
    problem, space = make(DENSE, "h100-sxm:1x2", batches=(4,))
    journal, sampling = tmp_path / "journal", Sampling(name="random", trials=1, seed=0, warm=False)
    search(problem, space, sampling=sampling, shared=Shared(url=str(journal), name="a"))
    journal.write_text(re.sub(was, lambda _: becomes, journal.read_text()))
    with pytest.raises(InputError, match="is damaged"):
        search(problem, space, sampling=sampling, shared=Shared(url=str(journal), name="a"))
