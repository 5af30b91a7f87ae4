"""Process groups of a plan.  Every array has one element per plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autoplan.base.arrays import Floats, Ints, add_up
from autoplan.cost.network.algorithms import ProcessGroup
from autoplan.spec.enums import Sharding
from autoplan.spec.plan import PP_BEFORE_DP, PlanBatch
from autoplan.topology.levels import Gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """Process groups of every communicator of a plan."""

    tp: ProcessGroup
    cp: ProcessGroup
    shard: ProcessGroup  # dense states: dp_shard x cp
    replicate: ProcessGroup  # replicas of a shard group
    ep: ProcessGroup
    etp: ProcessGroup
    expert_shard: ProcessGroup  # expert states
    pp: ProcessGroup
    stage: ProcessGroup  # all ranks of a pipeline stage, as if they were consecutive

    def cp_exchange(self, inner: Ints) -> ProcessGroup:
        """Return the neighbouring context-parallel ranks of all-to-alls among so many."""
        return self.cp._replace(size=inner)

    def cp_ring(self, inner: Ints) -> ProcessGroup:
        """Return the ranks of a ring over the all-to-alls."""
        return self.cp._replace(stride=self.cp.stride * inner, size=self.cp.size // inner)

    @property
    def num_communicators(self) -> Floats:
        """Number of communicators with their own buffers per rank, except those of expert states."""
        groups = (self.tp, self.cp, self.shard, self.replicate, self.ep, self.pp)
        return add_up((group.size > 1).astype(np.float64) for group in groups)

    @property
    def dense_copies(self) -> ProcessGroup:
        """Number of ranks with the same dense parameters."""
        return self.shard._replace(size=self.shard.size * self.replicate.size)

    @property
    def expert_copies(self) -> ProcessGroup:
        """Number of ranks with the same expert parameters."""
        return self.expert_shard._replace(size=self.expert_shard.size * self.replicate.size)


@lru_cache(maxsize=4)
def process_groups(batch: PlanBatch) -> ProcessGroups:
    """Return the process groups of every plan, computed once per batch.

    Expert groups reuse the ranks of a stage: etp varies fastest, then ep.  If pipelines come before data parallelism,
    replicas are whole pipelines, with correspondingly distant ranks; in `shard` they are then between the
    context-parallel groups.  Without sharding all replicas form one group, however they are split.
    Source: Megatron-LM core/parallel_state.py, RankGenerator.
    """
    ones = np.ones(len(batch), dtype=np.int64)
    stage = batch.tp * batch.cp * batch.dp
    replicas = np.where(batch.sharding == Sharding.NONE.code, 1, batch.dp_replicate)
    shard = batch.cp * batch.dp // replicas
    expert = batch.ep * batch.etp
    expert_shard = np.maximum(stage // expert // replicas, 1)
    block, parted = batch.tp * batch.cp, (batch.rank_order == PP_BEFORE_DP) & (batch.pp > 1)
    apart = np.where(parted, batch.pp, 1)
    in_runs = parted & (batch.cp > 1)
    gaps = Gaps(np.where(in_runs, batch.cp, batch.num_devices), block * apart) if in_runs.any() else None
    return ProcessGroups(
        tp=ProcessGroup(ones, batch.tp),
        cp=ProcessGroup(batch.tp, batch.cp),
        shard=ProcessGroup(np.where(in_runs, batch.tp, batch.tp * apart), shard, gaps),
        replicate=ProcessGroup(batch.tp * shard * apart, replicas),
        ep=ProcessGroup(batch.etp, batch.ep),
        etp=ProcessGroup(ones, batch.etp),
        expert_shard=ProcessGroup(expert * apart, expert_shard),
        pp=ProcessGroup(np.where(parted, block, stage), batch.pp),
        stage=ProcessGroup(ones, stage),
    )
