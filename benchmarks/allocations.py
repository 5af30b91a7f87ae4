"""Nodes of a fat tree as a scheduler hands them out, and plans on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from autoplan.cost.estimate import estimate
from autoplan.frameworks.presets import load_framework
from autoplan.readers.calibration import built_in_calibration
from autoplan.readers.cluster import load_cluster
from autoplan.readers.model import load_model
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec, NodeGroup, SwitchTier
from autoplan.topology.placement import RankGroup, spreads, switches_of_nodes

DEVICES = 8
BIG = ParallelPlan(global_batch=64, tp=8, sp=True, pp=8, dp_shard=8)
_WIDE = (RankGroup("ring", 64, 8, 8, 512), RankGroup("ring", 8, 8, 8, 64))  # its pipelines and data-parallel groups


def fat_tree(leaves: Iterable[int], *, nodes_per_leaf: int = 16, taper: float = 4.0) -> ClusterSpec:
    """H100 nodes n0, n1, ... below the leaf switches of these numbers, in this order."""
    nodes = tuple(NodeGroup(names=(f"n{at}",), switches=(f"leaf{leaf}",)) for at, leaf in enumerate(leaves))
    cluster = load_cluster(f"h100-sxm:{len(nodes)}x{DEVICES}")
    tier = SwitchTier(num_nodes=nodes_per_leaf, oversubscription=taper)
    return replace(cluster, nodes=nodes, network=replace(cluster.network, tiers=(tier,)))


def packed(
    seed: int, *, num_nodes: int = 64, leaves: int = 8, nodes_per_leaf: int = 16, taken: float = 0.4
) -> list[int]:
    """Leaves of a job's nodes where a share of all is taken at random: the emptiest leaves first, one after another."""
    rng = np.random.default_rng(seed)
    total = leaves * nodes_per_leaf
    free = np.bincount(rng.permutation(total)[int(taken * total) :] // nodes_per_leaf, minlength=leaves)
    order = np.argsort(-free, kind="stable")
    return np.repeat(order, free[order])[:num_nodes].tolist()


def shuffled(leaves: list[int], seed: int) -> list[int]:
    """Return the nodes in random order."""
    return np.random.default_rng(seed).permutation(leaves).tolist()


def widest(problem: Problem, plan: ParallelPlan) -> int:
    """Leaves of the pipeline or data-parallel group of `BIG`, as `plan` places it, that spreads most."""
    leaf = switches_of_nodes(problem.cluster, plan.placement)[0][None]
    return max(int(spreads(leaf, group, DEVICES).max()) for group in _WIDE)


def step_s(problem: Problem, plan: ParallelPlan) -> float:
    """Step of one plan, in seconds."""
    return float(estimate(problem, problem.batch([plan])).step_s[0])


def problem_on(cluster: ClusterSpec, model: str = "gpt3-175b", seq_len: int = 2048) -> Problem:
    """A model on that cluster, as Megatron-Core runs it."""
    framework = load_framework("megatron-core")
    calibration = built_in_calibration(framework, cluster.device)
    training = TrainingSpec(seq_len=seq_len)
    return Problem(
        model=_model(model), training=training, cluster=cluster, framework=framework, calibration=calibration
    )


_model = lru_cache(load_model)
