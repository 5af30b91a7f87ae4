"""Is a mixed cluster priced as its parts are, joined by the right links, and is a homogeneous one what it was?"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.errors import InputError, UnpricedError
from autoplan.cost.estimate import estimate
from autoplan.cost.mixed.collectives import Islands, links_between
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.links import Links
from autoplan.cost.passes import Pass
from autoplan.cost.pipeline.closed_forms import hop_sends_exposed_s, pipeline_s, send_exposed_s
from autoplan.frameworks.presets import load_framework
from autoplan.readers.cluster import load_cluster
from autoplan.readers.mixed_cluster import load_parts
from autoplan.spec.mixed_problem import MixedPlan, ReplicaKind, as_parallel, check_mixed
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import PlanBatch
from autoplan.topology.cluster import WanSpec
from autoplan.topology.mixed_cluster import BetweenSpec, MixedCluster, joined
from mixed_cases import SMALL, plan_of, problem_of, replicas, scaled, stages, whole
from pipeline_oracle import simulate_blocking

H2, H4 = load_cluster("h100-sxm:2x8"), load_cluster("h100-sxm:4x8")
A4 = load_cluster("a100-sxm:4x8")
WAN = BetweenSpec(bandwidth_bytes_per_s=1.25e8, latency_s=0.03)


def price(problem: object, plan: MixedPlan) -> MixedCost:
    return estimate_mixed(problem, [plan])[0]  # type: ignore[arg-type]


# -- a homogeneous cluster written as a mixed one ---------------------------------------------------------------------

PLAIN = [
    (8, 1, 4, "zero1", "none"),
    (4, 2, 4, "zero1", "full"),
    (2, 4, 4, "none", "none"),
    (1, 1, 32, "zero3", "none"),
    (1, 12, 2, "zero1", "none"),
]


@pytest.mark.parametrize(("tp", "pp", "dp", "sharding", "recompute"), PLAIN)
@pytest.mark.parametrize("tied", [False, True])
def test_one_part_costs_what_the_estimate_says(
    tp: int, pp: int, dp: int, sharding: str, recompute: str, tied: bool
) -> None:
    model = replace(SMALL, tied_embeddings=tied)
    places = [(0, tp, 12 // pp)] * pp
    plan = plan_of(kinds=(replicas(dp, 8, *places),), sharding=sharding, recompute=recompute)  # type: ignore[arg-type]
    problem = problem_of(H4, model=model)
    plain = whole(problem, H4)
    batch = PlanBatch.of([as_parallel(problem, plan, plan.kinds[0], tp)], model.num_layers)
    expected, found = estimate(plain, batch), price(problem, plan)
    assert found.step_s == pytest.approx(expected.step_s[0], rel=1e-9)
    assert found.low_s == pytest.approx(expected.low_s[0], rel=1e-9)
    assert found.oom_z == pytest.approx(expected.oom_z[0], rel=1e-9)
    assert found.terms_s == pytest.approx({name: value[0] for name, value in expected.terms_s.items()}, abs=1e-12)
    # The same in two halves that were not merged: replicas apart, and pipelines across.
    halves = problem_of(H2, H2, model=model)
    if dp % 2 == 0:
        apart = [replicas(dp // 2, 8, *[(part, tp, 12 // pp)] * pp) for part in (0, 1)]
        if sharding != "zero3":
            assert price(halves, replace(plan, kinds=tuple(apart))).step_s == pytest.approx(found.step_s, rel=1e-9)
    if pp % 2 == 0:
        across = [(part, tp, 12 // pp) for part in (0, 1) for _ in range(pp // 2)]
        assert price(halves, replace(plan, kinds=(replicas(dp, 8, *across),))).step_s == pytest.approx(
            found.step_s, rel=1e-9
        )


def test_sharded_weights_over_two_halves_cost_what_they_cost_on_the_whole() -> None:
    plan = plan_of(kinds=(replicas(32, 4, (0, 1, 12)),), sharding="zero3")
    halves = plan_of(kinds=(replicas(16, 4, (0, 1, 12)), replicas(16, 4, (1, 1, 12))), sharding="zero3")
    assert price(problem_of(H2, H2), halves).step_s == pytest.approx(price(problem_of(H4), plan).step_s, rel=1e-9)


def test_equal_parts_on_one_network_are_one_cluster() -> None:
    assert load_parts("h100-sxm:2x8+h100-sxm:2x8") == H4
    three = load_parts("h100-sxm:1x8+a100-sxm:4x8+h100-sxm:3x8")
    assert isinstance(three, MixedCluster)
    assert three.parts == (H4, A4)
    assert isinstance(joined([H2, H2], WAN, "two sites"), MixedCluster)


# -- the pipeline -----------------------------------------------------------------------------------------------------


@given(st.integers(2, 8), st.integers(1, 40), st.floats(0.001, 1))
def test_equal_hops_cost_what_equal_messages_cost(stages: int, m: int, send: float) -> None:
    ones = np.array([1])
    expected = send_exposed_s(
        np.array([send]), np.array([stages]), np.array([m]), ones, Pass(ones, ones), overlaps=False
    )
    found = hop_sends_exposed_s(np.full((1, stages - 1), send), np.array([m]))
    assert found == pytest.approx(expected, rel=1e-12)


def test_unlike_hops_stay_close_to_the_simulation_of_blocking_calls() -> None:
    random = np.random.default_rng(1)
    errors = []
    for _ in range(60):
        p = int(random.integers(2, 7))
        m = int(random.integers(p, 4 * p))
        forward = random.uniform(0.9, 1.1, p)
        hops = np.full(p - 1, 0.02)
        hops[random.integers(p - 1)] = random.choice([0.1, 0.3, 2.0])
        times = {"F": forward.tolist(), "B": (2 * forward).tolist()}
        exact = simulate_blocking(p, m, times, hops.tolist())
        makespan, sends, _ = pipeline_s(
            forward[None],
            2 * forward[None],
            np.append(hops, 0.0)[None],
            np.array([m]),
            np.array([1]),
            overlaps=False,
        )
        errors.append(float(makespan[0] + sends[0]) / exact - 1)
    assert statistics.mean(errors) < 0.03
    assert min(errors) > -0.03
    assert max(errors) < 0.15


def test_a_stage_costs_and_holds_what_it_does_on_its_own_part() -> None:
    problem = problem_of(H4, A4)
    mixed = price(problem, plan_of(kinds=(replicas(4, 16, (0, 8, 8), (1, 8, 4)),)))
    for part, cluster in enumerate((H4, A4)):
        alone = price(problem_of(cluster), plan_of(kinds=(replicas(2, 16, (0, 8, 8), (0, 8, 4)),), sharding="none"))
        here, there = mixed.kinds[0].stages[part], alone.kinds[0].stages[part]
        assert (here.forward_s, here.backward_s) == pytest.approx((there.forward_s, there.backward_s))
        assert here.capacity_bytes == cluster.device.visible_memory_bytes
        assert here.memory_bytes < there.memory_bytes  # by what is sharded


def test_a_slower_link_between_costs_more_and_only_where_it_is_crossed() -> None:
    across = plan_of(kinds=(replicas(4, 16, (0, 8, 8), (1, 8, 4)),))
    inside = plan_of(kinds=(replicas(4, 16, (0, 8, 12)),))
    near, far = problem_of(H4, A4), problem_of(H4, A4, between=WAN)
    assert price(far, inside) == price(near, inside)
    slower = price(far, across).terms_s
    assert slower["pipeline_send"] > 10 * price(near, across).terms_s["pipeline_send"]
    # A message of a rank's 8th of the hidden states; 32 ranks share the link; (m - 1) + 2 exchanges.
    dearer = max(calibration.scale_out for calibration in far.calibrations)
    message = 0.03 + dearer * 2 * 2048 * 2048 / 8 * 32 / 1.25e8
    overall = max(calibration.overall for calibration in far.calibrations)
    assert slower["pipeline_send"] == pytest.approx(overall * 17 * message, rel=0.02)


@pytest.mark.parametrize("between", [None, WAN])
def test_idle_nodes_have_no_part_in_the_price_of_a_plan(between: BetweenSpec | None) -> None:
    """Neither as a wider domain, nor as senders over a line, nor under switches of their own."""
    plan = plan_of(kinds=(replicas(3, 8, (0, 8, 12)), replicas(2, 4, (1, 8, 6), (1, 8, 6))))
    costs = [
        price(problem_of(replace(H4, num_nodes=3 + idle), replace(A4, num_nodes=4 + idle), between=between), plan)
        for idle in (0, 1, 40)
    ]
    assert costs[0] == costs[1] == costs[2]


# -- data parallelism over parts --------------------------------------------------------------------------------------


def test_a_reduction_over_parts_is_the_one_inside_and_one_across() -> None:
    """S59: four nodes of each of two vendors; max(intra) + inter, as equal slices cross."""
    amd = load_cluster("mi300x:4x8")
    problem = problem_of(H4, amd, between=BetweenSpec(device_bytes_per_s=5e9))
    nodes, ones, buffer = (4, 4), np.ones(1, dtype=np.int64), np.array([2.0**30])
    size, inside = np.array([8]), np.array([4])
    total = []
    for part in (0, 1):
        own = problem.as_if(part, nodes)
        level = problem.between(part, nodes, 32)
        between = links_between(level, own.calibration)
        islands = Islands(own=Links.of(own), between=between, span=8 * inside, islands=2 * ones)
        intra = Links.of(own).seconds("all_reduce", ProcessGroup(8 * ones, inside), buffer)
        inter = between.seconds("all_reduce", ProcessGroup(ones, 2 * ones), buffer / 4)
        reduced = islands.seconds("all_reduce", ProcessGroup(8 * ones, size), buffer)
        assert reduced == pytest.approx(intra + inter)
        # 2 (n - 1) / n of the slice, at the rate that the link is given.
        assert inter[0] == pytest.approx(own.calibration.scale_out * buffer[0] / 4 / 5e9, rel=0.02)
        total.append(reduced[0])
    plan = plan_of(kinds=(replicas(4, 4, (0, 8, 12)), replicas(4, 4, (1, 8, 12))), sharding="none")
    assert price(problem, plan).terms_s["data_parallel_reduce"] > 0
    assert max(total) > min(total)


def test_collectives_of_two_vendors_may_be_ruled_out_and_messages_may_not() -> None:
    amd = load_cluster("mi300x:4x8")
    problem = problem_of(H4, amd, between=BetweenSpec(cross_vendor_collectives=False))
    apart = plan_of(kinds=(replicas(4, 4, (0, 8, 12)), replicas(4, 4, (1, 8, 12))))
    with pytest.raises(InputError, match="between devices of two vendors"):
        price(problem, apart)
    across = plan_of(kinds=(replicas(4, 8, (0, 8, 6), (1, 8, 6)),))
    assert price(problem, across).step_s > 0
    tied = problem_of(H4, amd, model=replace(SMALL, tied_embeddings=True), between=problem.cluster.between)
    with pytest.raises(InputError, match="tied embedding"):
        price(tied, across)


def test_parts_in_another_order_cost_the_same() -> None:
    plans = [
        ((replicas(3, 16, (0, 8, 8), (1, 8, 4)),)),
        ((replicas(4, 10, (0, 8, 12)), replicas(2, 4, (1, 8, 6), (1, 8, 6)))),
    ]
    for kinds in plans:
        turned = tuple(
            replace(kind, stages=tuple(replace(stage, part=1 - stage.part) for stage in kind.stages)) for kind in kinds
        )
        for between in (BetweenSpec(), WAN):
            as_written = price(problem_of(H4, A4, between=between), plan_of(kinds=kinds))
            as_turned = price(problem_of(A4, H4, between=between), plan_of(kinds=turned))
            assert as_written.step_s == pytest.approx(as_turned.step_s, rel=1e-12)
            assert as_written.terms_s == pytest.approx(as_turned.terms_s, rel=1e-12)


# -- uneven batches and states ----------------------------------------------------------------------------------------

BERT = ModelSpec(
    name="bert-base",
    num_layers=12,
    hidden_size=768,
    vocab_size=30522,
    num_heads=12,
    ffn_size=3072,
    gated_mlp=False,
    norm="layernorm",
    position_embedding="learned",
    max_positions=512,
    tied_embeddings=True,
)


def test_a_device_takes_the_batch_that_its_memory_holds() -> None:
    """S46 (b), (d): BERT-base on 4 x P100-16 and 4 x 1080 Ti-11, 21 and 11 TFLOP/s of fp16."""
    p100 = scaled("a100-sxm:1x4", "p100", speed=21 / 312, memory_gb=16)
    ti = scaled("a100-sxm:1x4", "1080ti", speed=11 / 312, memory_gb=11)
    problem = problem_of(p100, ti, model=BERT, seq_len=512)

    def verdict(*sizes: int) -> str:
        kinds = [replicas(4, 1, (part, 1, 12), micro_batch=size) for part, size in enumerate(sizes)]
        return price(problem, plan_of(kinds=tuple(kinds))).verdict

    assert verdict(32, 32) == "oom"
    assert verdict(32, 16) == "fits"
    # Small memory caps the batch of a faster device as well.
    fast = problem_of(p100, scaled("a100-sxm:1x4", "fast", speed=0.2, memory_gb=12), model=BERT, seq_len=512)
    kinds = (replicas(4, 1, (0, 1, 12), micro_batch=32), replicas(4, 1, (1, 1, 12), micro_batch=32))
    assert price(fast, plan_of(kinds=kinds)).verdict == "oom"


def test_shares_of_states_apart_from_shares_of_work() -> None:
    """S54: 10 B parameters of 16 bytes under FSDP; fast devices have the less memory."""
    model = replace(SMALL, num_layers=48, hidden_size=4096, num_heads=32, num_kv_heads=32, ffn_size=11008)
    fast = scaled("a100-sxm:1x4", "fast", memory_gb=22)
    slow = scaled("a100-sxm:1x4", "slow", speed=0.5, memory_gb=52)
    problem = problem_of(fast, slow, model=model, seq_len=2048, framework=load_framework("pytorch-fsdp"))

    def plan(sizes: tuple[int, int], num_microbatches: int, shares: tuple[float, float]) -> MixedCost:
        kinds = [
            ReplicaKind(
                count=4,
                micro_batch=size,
                num_microbatches=num_microbatches,
                stages=stages((part, 1, 48)),
                state_share=share,
            )
            for part, (size, share) in enumerate(zip(sizes, shares, strict=True))
        ]
        return price(problem, plan_of(kinds=tuple(kinds), sharding="zero3", recompute="full"))

    def states_gb(cost: MixedCost) -> list[float]:
        return [kind.stages[0].sharded_bytes / 1e9 for kind in cost.kinds]

    by_speed = plan((2, 1), 8, (1 / 6, 1 / 12))
    assert by_speed.verdict == "oom"
    assert states_gb(by_speed)[0] == pytest.approx(160 / 6, rel=0.06)  # 26.7 GB and their fragmentation
    apart = plan((2, 1), 8, (0.05, 0.2))
    assert apart.verdict == "fits"
    assert states_gb(apart) == pytest.approx([8, 32], rel=0.06)
    even = plan((1, 1), 12, (1 / 8, 1 / 8))
    assert states_gb(even) == pytest.approx([20, 20], rel=0.06)
    # All fast ranks are done sooner with more than their share of the work.
    assert apart.kinds[0].pipeline_s > even.kinds[0].pipeline_s
    assert apart.kinds[1].pipeline_s < even.kinds[1].pipeline_s
    assert apart.step_s < even.step_s


# -- what is refused --------------------------------------------------------------------------------------------------


def test_plans_have_one_order_and_equal_kinds_are_one() -> None:
    a, b = replicas(2, 4, (1, 8, 12)), replicas(1, 4, (0, 8, 12))
    plan = plan_of(kinds=(a, b, a))
    assert plan.kinds == (b, replace(a, count=4))
    assert plan.global_batch == 5 * 4
    assert plan == plan_of(kinds=(b, replace(a, count=4)))


@pytest.mark.parametrize(
    ("kinds", "fields", "says"),
    [
        ((replicas(1, 4, (0, 8, 11)),), {}, "add up to 11, the model has 12"),
        ((replicas(5, 4, (0, 8, 12)),), {}, "takes 40 devices of h100-sxm, which has 32"),
        ((replicas(1, 4, (2, 8, 12)),), {}, "part 2 does not exist"),
        ((replicas(1, 4, (0, 8, 12)),), {"precision": "fp8"}, "precision of the plan is fp8"),
        ((replicas(1, 4, (0, 8, 6), (1, 8, 6)),), {"sharding": "zero3"}, "'zero3' over several parts is priced for"),
        (
            (replicas(4, 4, (0, 8, 12)), replicas(4, 2, (1, 8, 12))),
            {"sharding": "zero2"},
            "'zero2' communicates in every micro-batch, of which replicas have 2 and 4: give all as many",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(kinds: tuple[ReplicaKind, ...], fields: dict[str, str], says: str) -> None:
    with pytest.raises((InputError, UnpricedError), match=says):
        check_mixed(problem_of(H4, A4), plan_of(kinds=kinds, **fields))  # type: ignore[arg-type]


def test_shares_that_do_not_add_up_are_refused() -> None:
    half = replace(replicas(1, 4, (0, 8, 12)), state_share=0.5)
    with pytest.raises(InputError, match=r"must add up to 1, got 0\.5"):
        plan_of(kinds=(half,))
    with pytest.raises(InputError, match="unsharded states have no shares"):
        plan_of(kinds=(replace(half, count=2),), sharding="none")
    with pytest.raises(InputError, match="of every kind, or of none"):
        plan_of(kinds=(half, replicas(1, 4, (1, 8, 12))))


def test_schedules_need_their_virtual_stages_and_micro_batches() -> None:
    across = plan_of(kinds=(replicas(1, 3, (0, 8, 6), (1, 8, 6)),))
    for schedule, says in (("zb-v", "needs vp 2, vp is 1"), ("dualpipe-v", "needs vp 2"), ("1f", "must be one of")):
        with pytest.raises(InputError, match=says):
            check_mixed(problem_of(H4, A4), replace(across, schedule=schedule))
    halves = tuple(replace(stage, chunks=(3, 3)) for stage in across.kinds[0].stages)
    folded = replace(across, kinds=(replace(across.kinds[0], stages=halves),))
    check_mixed(problem_of(H4, A4), replace(folded, schedule="zb-v"))
    with pytest.raises(InputError, match="needs 2 pp = 4 micro-batches, there are 3"):
        check_mixed(problem_of(H4, A4), replace(folded, schedule="dualpipe-v"))
    with pytest.raises(UnpricedError, match="'gpipe' with vp > 1"):
        check_mixed(problem_of(H4, A4), replace(folded, schedule="gpipe"))
    (kind,) = folded.kinds
    assert replace(folded, schedule="zb-v").part_of_layers(kind) == (0,) * 3 + (1,) * 6 + (0,) * 3
    assert folded.part_of_layers(kind) == ((0,) * 3 + (1,) * 3) * 2


def test_parts_with_sites_are_refused() -> None:
    wan = replace(H2, wan=WanSpec(nodes_per_site=1, bandwidth_bytes_per_s=1e9, latency_s=0.01))
    with pytest.raises(InputError, match="make every site a part"):
        MixedCluster(name="m", parts=(wan, A4))


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_of_parts_and_what_joins_them(tmp_path: object) -> None:
    path = tmp_path / "two.toml"  # type: ignore[operator]
    path.write_text(
        'name = "two sites"\n[[parts]]\ncluster = "h100-sxm:4x8"\n[[parts]]\nname = "old"\ndevice = "a100-sxm"\n'
        'num_nodes = 2\ndevices_per_node = 8\nlevels = [{name = "nvlink", kind = "nvlink", num_devices = 8, '
        'bandwidth_gb_per_s = 300, latency_us = 1.6}]\nnetwork = {kind = "infiniband", nic_gb_per_s = 25}\n'
        "[between]\nbandwidth_gb_per_s = 0.125\nlatency_ms = 30\ncross_vendor_collectives = false\n"
    )
    cluster = load_parts(str(path))
    assert isinstance(cluster, MixedCluster)
    assert cluster.name == "two sites"
    assert [part.num_devices for part in cluster.parts] == [32, 16]
    assert cluster.between == replace(WAN, cross_vendor_collectives=False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("parts = 3\n", "parts must be tables"),
        ('[[parts]]\ncluster = "h100-sxm:4x8"\nname = "x"\n', r"parts\[0\]: write cluster"),
        ('[[parts]]\ncluster = "h100-sxn:4x8"\n', r"parts\[0\]: unknown cluster 'h100-sxn'"),
        ('[[parts]]\ncluster = "h100-sxm:4x8"\n[betwixt]\n', "unknown key 'betwixt'"),
        ('[[parts]]\ncluster = "h100-sxm:4x8"\n[between]\nlatency_ms = -1\n', "latency_ms must be a positive"),
    ],
)
def test_a_file_of_parts_that_is_wrong_gets_one_line(tmp_path: object, text: str, says: str) -> None:
    path = tmp_path / "bad.toml"  # type: ignore[operator]
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        load_parts(str(path))


@settings(max_examples=10)
@given(st.integers(1, 11), st.integers(1, 20), st.sampled_from(["none", "zero1"]))
def test_terms_add_up_and_sit_in_the_interval(layers: int, m: int, sharding: str) -> None:
    plan = plan_of(
        kinds=(replicas(2, m, (0, 8, layers), (1, 8, 12 - layers)), replicas(1, m + 1, (0, 4, 12))),
        sharding=sharding,  # type: ignore[arg-type]
    )
    cost = price(problem_of(H4, A4), plan)
    assert sum(cost.terms_s.values()) == pytest.approx(cost.step_s, rel=1e-12)
    assert min(cost.terms_s.values()) >= 0
    assert cost.low_s < cost.step_s < cost.high_s
    assert plan.global_batch == 2 * m + m + 1
