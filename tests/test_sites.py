"""What crosses a link between two sites, and what does its latency do to the choice of a plan?"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.cost.network.links import Links
from autoplan.frameworks.megatron_lm.rules import RULES
from autoplan.readers.cluster import load_cluster
from autoplan.search.flags import with_flags
from autoplan.search.limits import default_limits
from autoplan.search.ranking import RankedPlan
from autoplan.search.space import Space
from autoplan.search.study import search
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec, WanSpec
from flows import RankGroups, traffic
from problems import problem_for

# GPT-2 L (774M), and a GPT of 7B.
GPT2_L = ModelSpec(
    name="gpt2-l",
    num_layers=36,
    hidden_size=1280,
    vocab_size=50257,
    num_heads=20,
    ffn_size=5120,
    gated_mlp=False,
    position_embedding="learned",
    max_positions=1024,
    tied_embeddings=True,
)
GPT_7B = dataclasses.replace(
    GPT2_L, name="gpt-7b", num_layers=32, hidden_size=4096, num_heads=32, ffn_size=16384, max_positions=2048
)
GBIT = 1e9 / 8


def sites(name: str, bytes_per_s: float, latency_s: float, **flows: float) -> ClusterSpec:
    """Two sites of one node, so many seconds apart."""
    wan = WanSpec(nodes_per_site=1, bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s, **flows)  # type: ignore[arg-type]
    return dataclasses.replace(load_cluster(name), wan=wan)


def problem_of(cluster: ClusterSpec, model: ModelSpec) -> Problem:
    training = TrainingSpec(seq_len=model.max_positions)
    return problem_for(model, cluster, training=training)


def ranked(cluster: ClusterSpec, model: ModelSpec, global_batch: int, *fixed: str) -> tuple[RankedPlan, ...]:
    """The best plans without interleaving whose micro-batches have 8 sequences at most."""
    problem = problem_of(cluster, model)
    limits = with_flags(
        default_limits(problem, (global_batch,)), fix=fixed, at_most=["micro_batch=8", "vp=1"], forbid=[]
    )
    return tuple(search(problem, Space(workload=problem.workload, limits=limits, rules=RULES)).ranked)


def crossing(cluster: ClusterSpec, plan: ParallelPlan) -> set[str]:
    """The axes of `plan` whose groups have members in both sites."""
    topology = problem_of(cluster, GPT2_L).topology
    groups = {
        "tp": RankGroups.of(1, plan.tp),
        "dp": RankGroups.of(plan.tp, plan.cp * plan.dp),
        "pp": RankGroups.of(plan.tp * plan.cp * plan.dp, plan.pp),
    }
    moved = {axis: traffic(topology, group, "hierarchical", np.array([1.0])) for axis, group in groups.items()}
    return {axis for axis, of_axis in moved.items() if of_axis.domain_bytes[-1, 0] > 0}


# -- GPT-2 L on 2 sites of 2 devices, 10 Gb/s (arXiv:2602.02632) -------------------------------------------------------


def test_a_boundary_of_stages_sends_2_6_mb_a_sample_and_gradients_take_1_9_s() -> None:
    problem = problem_of(sites("a100-pcie:2x2", 10 * GBIT, 50e-6), GPT2_L)
    links = Links.of(problem)
    two, four, single = np.array([2]), np.array([4]), np.array([1])
    gradients = np.array([2.0 * 774e6])
    # One ring of all four, as the devices of a site share what leads out of it: 2 x 3/4 of them leave a site.
    assert links.seconds("all_reduce", ProcessGroup(single, four), gradients)[0] == pytest.approx(1.9, rel=0.05)
    sample = 2.0 * 1024 * 1280
    assert sample == pytest.approx(2.6e6, rel=0.01)
    groups = ProcessGroup(two, two), ProcessGroup(single, four)
    pair_s, chain_s = (links.seconds("send_recv", group, np.array([sample]))[0] for group in groups)
    # One tensor-parallel pair sends from each site: each of the two has half of the link.
    assert pair_s == pytest.approx(2 * sample / (10 * GBIT), rel=0.05)
    # A chain of four stages has one sender there.
    assert chain_s == pytest.approx(sample / (10 * GBIT), rel=0.05)


def test_far_sites_share_a_boundary_of_stages_at_most_and_the_step_grows_with_latency() -> None:
    """Four flows of 6 MiB, the most that Linux gives a TCP connection (tcp_rmem): at 50 ms one site is as good."""
    alone = ranked(load_cluster("a100-pcie:1x2"), GPT2_L, 512)[0].step_s
    steps = []
    for round_trip_s in (1e-4, 1e-2, 5e-2, 0.2):
        flows = {"num_flows": 4, "window_bytes": 6 * 2**20}
        cluster = sites("a100-pcie:2x2", 10 * GBIT, round_trip_s / 2, **flows)
        best = ranked(cluster, GPT2_L, 512)[0]
        if round_trip_s < 1e-3:
            assert best.plan.dp >= 2
            assert best.step_s < alone
        if round_trip_s >= 5e-2:
            assert best.step_s > alone or crossing(cluster, best.plan) == {"pp"}
        steps.append(min(best.step_s, alone))
    assert steps == sorted(steps)
    assert steps[-1] == alone


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 4), (2, 2, 1), (1, 2, 2), (1, 4, 1), (2, 1, 2), (4, 1, 1)])
def test_no_plan_is_faster_over_a_longer_line(tp: int, pp: int, dp: int) -> None:
    from test_estimate import price

    plan = ParallelPlan(global_batch=32, tp=tp, pp=pp, dp_shard=dp)
    steps = [
        price(problem_of(sites("a100-pcie:2x2", 10 * GBIT, latency_s), GPT2_L), plan).step_s[0]
        for latency_s in (5e-5, 1e-3, 1e-2, 5e-2, 0.2)
    ]
    assert steps == sorted(steps)


# -- a GPT of 7B on 2 regions of 8 devices, 1 Gb/s and 30 ms (arXiv:2505.15536) ----------------------------------------


def test_one_boundary_of_stages_crosses_between_regions_until_one_region_is_better() -> None:
    fast, slow = (sites("a100-sxm:2x8", rate, 15e-3) for rate in (GBIT, GBIT / 10))
    best = ranked(fast, GPT_7B, 128)[0]
    assert crossing(fast, best.plan) == {"pp"}
    assert best.plan.pp == 2
    # What is blind to the line lets gradients cross it.
    blind = ranked(fast, GPT_7B, 128, "pp=1")[0]
    assert "dp" in crossing(fast, blind.plan)
    assert blind.step_s >= 1.3 * best.step_s
    # A tenth of the line: other micro-batches would be best over it, a single region is better still.
    after = ranked(slow, GPT_7B, 128)[0]
    alone = ranked(load_cluster("a100-sxm:1x8"), GPT_7B, 128)[0]
    assert after.plan != best.plan
    assert alone.step_s < after.step_s
    grown = {name: after.terms_s[name] - best.terms_s[name] for name in after.terms_s}
    assert max(grown, key=grown.__getitem__) == "pipeline_send"
