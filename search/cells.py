"""Cells of a space: the ways to factorise the devices into degrees of parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from autoplan.search.limits import Limits, divisors
from autoplan.spec.model import ModelSpec
from autoplan.spec.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """The degrees, which define the process groups; everything else varies inside a cell."""

    pp: int
    tp: int
    cp: int
    ep: int
    etp: int
    dp_replicate: int
    dp_shard: int

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard


DEGREES = tuple(field.name for field in fields(Cell))


def cells_of(workload: Workload, limits: Limits) -> Iterator[Cell]:
    """Yield the cells that use all devices of a workload."""
    devices, model = workload.num_devices, workload.model
    for pp in divisors(devices):
        if pp > model.num_layers or not limits.admits("pp", pp):
            continue
        for tp in divisors(devices // pp):
            if not limits.admits("tp", tp):
                continue
            for cp in divisors(devices // pp // tp):
                dp = devices // (pp * tp * cp)
                if not limits.admits("cp", cp) or not limits.admits("dp", dp):
                    continue
                if not any(batch % dp == 0 for batch in limits.global_batches):
                    continue
                for replicate in _replicates(limits, tp, cp, dp):
                    shard = dp // replicate
                    for ep, etp in expert_degrees(model, limits, tp, devices // pp, replicate):
                        yield Cell(pp=pp, tp=tp, cp=cp, ep=ep, etp=etp, dp_replicate=replicate, dp_shard=shard)


def _replicates(limits: Limits, tp: int, cp: int, dp: int) -> Iterator[int]:
    """Yield numbers of shard-group replicas: one, as many as make a group fill a link domain, or the fixed number."""
    free = limits.shards_any_part or limits.fixes("dp_replicate", "dp_shard")
    for replicate in divisors(dp):
        shard = dp // replicate
        natural = replicate == 1 or (cp * shard > 1 and tp * cp * shard in limits.shard_domains)
        if (free or natural) and limits.admits("dp_replicate", replicate) and limits.admits("dp_shard", shard):
            yield replicate


def expert_degrees(model: ModelSpec, limits: Limits, tp: int, stage: int, replicate: int) -> Iterator[tuple[int, int]]:
    """Yield (ep, etp) for a stage: experts divide over ep; each is whole or split like other matrices by default."""
    if model.moe is None:
        if limits.admits("ep", 1) and limits.admits("etp", 1):
            yield 1, 1
        return
    etps = divisors(stage) if limits.fixes("etp") else sorted({1, tp})
    for ep in divisors(math.gcd(model.moe.num_experts, stage)):
        for etp in etps:
            # Each shard-group replica contains whole expert groups.
            lawful = stage % (ep * etp * replicate) == 0
            if lawful and limits.admits("ep", ep) and limits.admits("etp", etp):
                yield ep, etp
