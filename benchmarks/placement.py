"""What does it gain to order the nodes of a fragmented allocation?

usage: python benchmarks/placement.py [--seeds N]

A fat tree of 8 leaves of 16 nodes of 8 H100, 40 % of whose nodes are taken at random, as in He et al. (Arnold,
arXiv:2509.15940); a job takes 64 of the rest, those of the emptiest leaves.  Steps of GPT-3 175B with tp 8, pp 8, dp 8
are priced with the nodes in random order, packed leaf by leaf, and as the search orders them, with leaves
oversubscribed 4:1 and not at all; and how many leaves the widest pipeline or data-parallel group spans.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import geometric_mean

import numpy as np

from autoplan.cluster import ClusterSpec, NodeGroup, SwitchTier
from autoplan.cost.estimate import estimate
from autoplan.plan import ParallelPlan, PlanBatch
from autoplan.problem import Problem
from autoplan.read.calibration import built_in_calibration
from autoplan.read.cluster import load_cluster
from autoplan.read.framework import load_framework
from autoplan.read.model import load_model
from autoplan.topology.placement import Group, spreads, switches_of_nodes
from autoplan.training import TrainingSpec
from search.placement import best_placement

LEAVES, NODES_PER_LEAF, NUM_NODES, DEVICES = 8, 16, 64, 8
PLAN = ParallelPlan(global_batch=64, tp=8, sp=True, pp=8, dp_shard=8)
WIDE = (Group("ring", 64, 8, 8, 512), Group("ring", 8, 8, 8, 64))  # pipelines, data-parallel groups


def packed(seed: int) -> list[int]:
    """Leaves of the job's nodes, the emptiest first."""
    total = LEAVES * NODES_PER_LEAF
    taken = np.random.default_rng(seed).permutation(total)[: int(0.4 * total)]
    free = NODES_PER_LEAF - np.bincount(taken // NODES_PER_LEAF, minlength=LEAVES)
    order = np.argsort(-free, kind="stable")
    return np.repeat(order, free[order])[:NUM_NODES].tolist()


def cluster_of(leaves: list[int], taper: float) -> ClusterSpec:
    """Nodes below the leaves of these numbers, in this order."""
    nodes = tuple(NodeGroup(names=(f"n{at}",), switches=(f"leaf{leaf}",)) for at, leaf in enumerate(leaves))
    cluster = load_cluster(f"h100-sxm:{NUM_NODES}x{DEVICES}")
    tier = SwitchTier(num_nodes=NODES_PER_LEAF, oversubscription=taper)
    return replace(cluster, nodes=nodes, network=replace(cluster.network, tiers=(tier,)))


def step_s(problem: Problem, plan: ParallelPlan) -> float:
    """Of one plan."""
    return float(estimate(problem, PlanBatch.of([plan], problem.model.num_layers)).step_s[0])


def widest(problem: Problem, plan: ParallelPlan) -> int:
    """Leaves that the widest group spans."""
    leaf = switches_of_nodes(problem.cluster, plan.placement)[0][None]
    return max(int(spreads(leaf, group, DEVICES).max()) for group in WIDE)


def placement(seeds: int) -> None:
    """Print the gain for every seed, and its mean."""
    framework = load_framework("megatron-core")
    model, training = load_model("gpt3-175b"), TrainingSpec(seq_len=2048)
    print("taper  seed  random s  packed s  placed s  gain over random  over packed  leaves of the widest group")
    for taper in (4.0, 1.0):
        gains = []
        for seed in range(seeds):
            leaves = packed(seed)
            mixed = np.random.default_rng(seed).permutation(leaves).tolist()
            in_order, at_random = (
                Problem(
                    model=model,
                    training=training,
                    cluster=cluster,
                    framework=framework,
                    calibration=built_in_calibration(framework, cluster.device.generation),
                )
                for cluster in (cluster_of(leaves, taper), cluster_of(mixed, taper))
            )
            placed = best_placement(at_random, PLAN)
            times = step_s(at_random, PLAN), step_s(in_order, PLAN), step_s(at_random, placed)
            gains.append((times[0] / times[2], times[1] / times[2]))
            spans = widest(at_random, PLAN), widest(in_order, PLAN), widest(at_random, placed)
            print(
                f"{taper:5.0f}  {seed:4d}  {times[0]:8.3f}  {times[1]:8.3f}  {times[2]:8.3f}  {gains[-1][0]:15.3f}x"
                f"  {gains[-1][1]:10.3f}x  {spans[0]} random, {spans[1]} packed, {spans[2]} placed"
            )
        means = [geometric_mean(column) for column in zip(*gains, strict=True)]
        print(f"{taper:5.0f}  mean{'':30}  {means[0]:15.3f}x  {means[1]:10.3f}x")


def main() -> None:
    """Print all sections."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20)
    placement(parser.parse_args().seeds)


if __name__ == "__main__":
    main()
