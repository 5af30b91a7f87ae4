"""Plans of a mixed cluster, whose replicas and stages differ, and their problem."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from string import ascii_uppercase

from autoplan.base.errors import InputError, UnpricedError
from autoplan.base.units import check_count
from autoplan.spec.calibration import Calibration
from autoplan.spec.enums import Precision, RankOrder, Recompute, Schedule, Sharding
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec, WanSpec
from autoplan.topology.levels import Level
from autoplan.topology.mixed_cluster import MixedCluster

SHARE_SUM = 1e-9  # how far the shares of all replicas may be from 1


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MixedStage:
    """One pipeline stage: the part of the cluster on which it sits, its tensor-parallel degree and its layers."""

    part: int  # index into the cluster's parts
    tp: int = 1
    layers: int

    def __post_init__(self) -> None:
        check_count("part", self.part, least=0, most=1000)
        check_count("tp", self.tp, most=10**6)
        check_count("layers", self.layers, least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaKind:
    """`count` replicas that are alike: stages, micro-batches of a step in each, and the share of all sharded states.

    `state_share` is that of one replica; None where all replicas of the plan have the same.
    """

    count: int = 1
    micro_batch: int = 1
    num_microbatches: int
    stages: tuple[MixedStage, ...]
    state_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("count", "micro_batch", "num_microbatches"):
            check_count(name, getattr(self, name))
        if not self.stages:
            raise InputError("stages must name at least one")
        if self.state_share is not None and not 0 <= self.state_share <= 1:
            raise InputError(f"state_share must lie between 0 and 1, got {self.state_share:g}")

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts that a replica spans, each once, in the order of its stages."""
        return tuple(dict.fromkeys(stage.part for stage in self.stages))

    def num_devices(self, part: int) -> int:
        """Devices of a part that all replicas of the kind take."""
        return self.count * sum(stage.tp for stage in self.stages if stage.part == part)

    def _order(self) -> tuple[object, ...]:
        return (self.stages, self.micro_batch, self.num_microbatches, self.state_share or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlan:
    """One configuration of a mixed cluster.  Kinds that are equal become one, and all stand in one order."""

    kinds: tuple[ReplicaKind, ...]
    sharding: Sharding = Sharding.ZERO1
    recompute: Recompute = Recompute.NONE
    precision: Precision = Precision.BF16
    schedule: Schedule = Schedule.ONE_F_ONE_B

    def __post_init__(self) -> None:
        if not self.kinds:
            raise InputError("kinds must name at least one")
        if self.schedule != "1f1b":
            raise UnpricedError(f"schedule {self.schedule!r} is not priced yet where stages differ: use 1f1b")
        merged: dict[tuple[object, ...], ReplicaKind] = {}
        for kind in self.kinds:
            same = merged.get(kind._order())
            merged[kind._order()] = replace(kind, count=kind.count + same.count) if same else kind
        ordered = sorted(merged.values(), key=ReplicaKind._order)
        object.__setattr__(self, "kinds", tuple(ordered))
        shares = [kind.state_share for kind in self.kinds]
        if shares.count(None) not in (0, len(shares)):
            raise InputError("state_share must be given of every kind, or of none")
        if None not in shares:
            if self.sharding == "none":
                raise InputError("state_share needs sharding zero1, zero2 or zero3: unsharded states have no shares")
            total = sum(kind.count * (kind.state_share or 0.0) for kind in self.kinds)
            if abs(total - 1) > SHARE_SUM:
                raise InputError(f"state_share of all replicas must add up to 1, got {total:.9g}")

    @property
    def letters(self) -> tuple[str, ...]:
        """Names of the kinds, A and so on; a single one needs no name."""
        if len(self.kinds) == 1:
            return ("",)
        return tuple(ascii_uppercase[at % 26] * (at // 26 + 1) for at in range(len(self.kinds)))

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas of all kinds."""
        return sum(kind.count for kind in self.kinds)

    @property
    def global_batch(self) -> int:
        """Sequences in a step."""
        return sum(kind.count * kind.micro_batch * kind.num_microbatches for kind in self.kinds)

    @property
    def parts(self) -> frozenset[int]:
        """The parts that are in use; others are idle."""
        return frozenset(part for kind in self.kinds for part in kind.parts)

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return sum(kind.num_devices(part) for kind in self.kinds for part in kind.parts)

    def num_inside(self, kind: ReplicaKind, stage: int) -> tuple[int, int]:
        """(replicas that hold the layers of a stage on the same part as it, parts that hold them).

        Of a stage whose layers other kinds cut elsewhere the middle one decides.
        """
        middle = sum(earlier.layers for earlier in kind.stages[:stage]) + kind.stages[stage].layers // 2
        layers_elsewhere = [(other.count, part_of_layer(other, middle)) for other in self.kinds]
        own_part = kind.stages[stage].part
        inside = (
            sum(count for count, part in layers_elsewhere if part == own_part) or kind.count
        )  # a stage without layers
        return inside, len({part for _, part in layers_elsewhere} | {own_part})


def part_of_layer(kind: ReplicaKind, layer: int) -> int:
    """The part on which a replica holds a layer."""
    for stage in kind.stages:
        if layer < stage.layers:
            return stage.part
        layer -= stage.layers
    return kind.stages[-1].part


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedProblem:
    """The constant half of an estimate on a mixed cluster; `calibrations` are those of its parts."""

    model: ModelSpec
    training: TrainingSpec
    cluster: MixedCluster
    framework: Framework
    calibrations: tuple[Calibration, ...]
    reserve_bytes: float = 0.0
    _as_if: dict[tuple[int, frozenset[int]], Problem] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if len(self.calibrations) != len(self.cluster.parts):
            num_calibrations, num_parts = len(self.calibrations), len(self.cluster.parts)
            raise InputError(f"{num_calibrations} calibrations for {num_parts} parts: give one each")
        for part in range(len(self.cluster.parts)):
            self.as_if(part, frozenset((part,)))

    def as_if(self, part: int, used: frozenset[int]) -> Problem:
        """The problem in which all parts in use had the devices of `part`, joined as the parts are.

        What a stage costs on its part is what it costs there, so that one model of costs prices both.
        """
        key = (part, used)
        if key not in self._as_if:
            self._as_if[key] = Problem(
                model=self.model,
                training=self.training,
                cluster=self._cluster(part, used),
                framework=self.framework,
                calibration=self.calibrations[part],
                reserve_bytes=self.reserve_bytes,
            )
        return self._as_if[key]

    def _cluster(self, part: int, used: frozenset[int]) -> ClusterSpec:
        own = self.cluster.parts[part]
        if used == {part}:
            return own
        nodes = -(-self._num_devices(used) // own.devices_per_node)
        if not self.is_apart(part, used):
            return replace(own, num_nodes=nodes)
        level = self.between(part, used, own.num_devices)
        wan = WanSpec(
            nodes_per_site=own.num_nodes,
            bandwidth_bytes_per_s=level.bytes_per_s * own.num_devices,
            latency_s=level.latency_s,
            num_flows=10**6,  # counted in the rate
        )
        return replace(own, num_nodes=nodes, wan=wan)

    def _num_devices(self, used: frozenset[int]) -> int:
        return sum(self.cluster.parts[part].num_devices for part in used)

    def _fabric(self, part: int, used: frozenset[int]) -> Level:
        """The network of a part as devices see it who leave all its switches."""
        own = self.cluster.parts[part]
        network, nodes = own.network, -(-self._num_devices(used) // own.devices_per_node)
        rate = network.nic_bytes_per_s * network.nics_per_device * network.efficiency
        for tier in network.tiers:
            rate /= tier.oversubscription if tier.num_nodes < nodes else 1.0
        return Level(
            name=network.kind,
            num_devices=self._num_devices(used),
            bytes_per_s=rate,
            latency_s=network.latency_s,
            half_rate_bytes=network.half_rate_bytes,
        )

    def between(self, part: int, used: frozenset[int], num_senders: int) -> Level:
        """Level that `num_senders` devices of `part` share when they send to the other parts in use at once."""
        spec, fabrics = self.cluster.between, [self._fabric(part_used, used) for part_used in used]
        latency = max(fabric.latency_s for fabric in fabrics) if spec.latency_s is None else spec.latency_s
        rate = min(fabric.bytes_per_s for fabric in fabrics)
        if spec.device_bytes_per_s is not None:
            rate = min(rate, spec.device_bytes_per_s)
        if (shared := spec.shared_bytes_per_s(latency)) is not None:
            rate = min(rate, shared / num_senders)
        half_rate = max(fabric.half_rate_bytes for fabric in fabrics)
        own = self._fabric(part, used)
        return replace(own, name="between", bytes_per_s=rate, latency_s=latency, half_rate_bytes=half_rate)

    def is_apart(self, part: int, used: frozenset[int]) -> bool:
        """Return whether what joins the parts is worse than the network of `part`; else they are to it one network."""
        own, level = self._fabric(part, used), self.between(part, used, self.cluster.parts[part].num_devices)
        return level != replace(own, name="between")


def as_parallel(problem: MixedProblem, plan: MixedPlan, kind: ReplicaKind, tp: int) -> ParallelPlan:
    """The plan in which all replicas were of `kind` and all their stages had the tensor-parallel degree `tp`."""
    training, replicas = problem.training, plan.num_replicas
    return ParallelPlan.derived(
        has_experts=problem.model.moe is not None,
        has_latents=problem.model.mla is not None,
        global_batch=kind.micro_batch * kind.num_microbatches * replicas,
        micro_batch=kind.micro_batch,
        tp=tp,
        sp=problem.framework.network.sequence_parallel and training.seq_len % tp == 0,
        pp=len(kind.stages),
        layers_per_chunk=tuple(stage.layers for stage in kind.stages),
        dp_shard=replicas,
        sharding=plan.sharding,
        recompute=plan.recompute,
        precision=plan.precision,
        **problem.framework.choices,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedPlan:
    """A plan of a mixed cluster as frameworks start it: degrees that hold for all replicas, and the part of every node.

    `num_microbatches` are those of every replica where they differ, else there are none.
    """

    plan: ParallelPlan
    node_parts: tuple[int, ...]  # in the order of the ranks
    num_microbatches: tuple[int, ...] = ()


def started_plan(problem: MixedProblem, plan: MixedPlan, *, unequal_batches: bool = False) -> StartedPlan:
    """Return the plan as frameworks start it; `unequal_batches` says whether replicas may have unlike micro-batches.

    Of equal replicas the ranks of a stage stand together, of unlike ones those of a replica.  Raises InputError where
    replicas or degrees are too different, or where a node would hold ranks of two parts.
    """
    counts = {kind.num_microbatches for kind in plan.kinds}
    if len(counts) > 1 and not unequal_batches:
        raise InputError(f"its replicas take {_listed(counts)} micro-batches a step")
    if len(counts) > 1 and plan.sharding in ("zero2", "zero3"):
        raise InputError(f"{plan.sharding} communicates in every micro-batch, of which replicas have {_listed(counts)}")
    if len({tuple(stage.layers for stage in kind.stages) for kind in plan.kinds}) > 1:
        raise InputError("its replicas cut the layers differently")
    if len(degrees := {stage.tp for kind in plan.kinds for stage in kind.stages}) > 1:
        raise InputError(f"its stages have the tensor-parallel degrees {_listed(degrees)}")
    if len(sizes := {kind.micro_batch for kind in plan.kinds}) > 1:
        raise InputError(f"its micro-batches hold {_listed(sizes)} sequences")
    if len({kind.state_share for kind in plan.kinds}) > 1:
        raise InputError("its replicas hold unlike shares of the optimizer's states")
    tp = degrees.pop()
    parallel = as_parallel(problem, plan, plan.kinds[0], tp)
    if len(plan.kinds) == 1:
        places = [stage.part for stage in plan.kinds[0].stages for _ in range(plan.num_replicas)]
    else:
        places = [stage.part for kind in plan.kinds for _ in range(kind.count) for stage in kind.stages]
        parallel = replace(parallel, rank_order=RankOrder.PP_BEFORE_DP) if parallel.pp > 1 else parallel
    return StartedPlan(
        plan=parallel,
        node_parts=_parts_of_nodes(problem, [part for part in places for _ in range(tp)]),
        num_microbatches=tuple(kind.num_microbatches for kind in plan.kinds for _ in range(kind.count))
        if len(counts) > 1
        else (),
    )


def _parts_of_nodes(problem: MixedProblem, parts: Sequence[int]) -> tuple[int, ...]:
    """Return the part of every node, from the part of every rank."""
    if len(sizes := {problem.cluster.parts[part].devices_per_node for part in parts}) > 1:
        raise InputError(f"its nodes have {_listed(sizes)} devices")
    size = sizes.pop()
    nodes = [set(parts[first : first + size]) for first in range(0, len(parts), size)]
    if len(parts) % size or any(len(node) > 1 for node in nodes):
        raise InputError(f"its ranks do not fill nodes of {size} devices of one part each")
    return tuple(node.pop() for node in nodes)


def _listed(values: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(values)))


def check_mixed(problem: MixedProblem, plan: MixedPlan) -> None:
    """Refuse a plan that does not belong to the problem, or that is not priced."""
    parts, num_layers = problem.cluster.parts, problem.model.num_layers
    if plan.precision != problem.training.precision:
        raise InputError(f"precision of the plan is {plan.precision}, of the training {problem.training.precision}")
    for kind in plan.kinds:
        if beyond := [part for part in kind.parts if part >= len(parts)]:
            raise InputError(f"part {beyond[0]} does not exist: the cluster has {len(parts)}, counted from 0")
        if (layers_elsewhere := sum(stage.layers for stage in kind.stages)) != num_layers:
            raise InputError(f"layers of the stages add up to {layers_elsewhere}, the model has {num_layers}")
    for at in sorted(plan.parts):
        num_devices = sum(kind.num_devices(at) for kind in plan.kinds)
        if num_devices > parts[at].num_devices:
            raise InputError(
                f"the plan takes {num_devices} devices of {parts[at].name}, which has {parts[at].num_devices}"
            )
    if reason := mixes_vendors(problem, plan):
        raise InputError(reason)
    _check_sharding(problem, plan)


def mixes_vendors(problem: MixedProblem, plan: MixedPlan) -> str | None:
    """Name the collective of the plan that spans two vendors where that is not possible; messages may."""
    if problem.cluster.between.cross_vendor_collectives:
        return None
    vendors = problem.cluster.vendors
    for layer in range(problem.model.num_layers):
        if len({vendors[part_of_layer(kind, layer)] for kind in plan.kinds}) > 1:
            return (
                f"gradients of layer {layer} would be reduced between devices of two vendors, which "
                "cross_vendor_collectives = false rules out: let pipelines cross instead of replicas"
            )
    for kind in plan.kinds:
        if problem.model.tied_embeddings and vendors[kind.stages[0].part] != vendors[kind.stages[-1].part]:
            return (
                "gradients of the tied embedding would be reduced between devices of two vendors, which "
                "cross_vendor_collectives = false rules out"
            )
    return None


def _check_sharding(problem: MixedProblem, plan: MixedPlan) -> None:
    """Weights and gradients that are sharded over parts travel in every layer: priced where whole parts do so."""
    if plan.sharding in ("none", "zero1") or len(plan.parts) == 1:
        return
    for at in plan.parts:
        degrees = {stage.tp for kind in plan.kinds for stage in kind.stages if stage.part == at}
        num_devices = sum(kind.num_devices(at) for kind in plan.kinds)
        is_whole = num_devices == problem.cluster.parts[at].num_devices
        if len(degrees) > 1 or not is_whole or any(len(kind.stages) > 1 for kind in plan.kinds):
            raise UnpricedError(
                f"sharding {plan.sharding!r} over several parts is priced for replicas of one stage and one tp that "
                "fill their parts: use zero1"
            )
