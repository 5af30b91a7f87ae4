"""Plans for a mixed cluster, with different replicas and stages, and their problem."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from string import ascii_uppercase
from typing import Any

from autoplan.base.errors import InputError, UnpricedError
from autoplan.base.units import check_count
from autoplan.spec.axes import USUAL_SCHEDULES
from autoplan.spec.calibration import Calibration
from autoplan.spec.chunk_order import chunks_of_stages, in_turn
from autoplan.spec.enums import Schedule, enum_value
from autoplan.spec.framework import Framework
from autoplan.spec.model import ModelSpec
from autoplan.spec.plan import ParallelPlan, check_priced, chunk_layers, even_chunks
from autoplan.spec.problem import Problem
from autoplan.spec.timing import NO_TIMINGS, TimingTable
from autoplan.spec.training import TrainingSpec
from autoplan.topology.cluster import ClusterSpec, WanSpec
from autoplan.topology.levels import Level
from autoplan.topology.mixed_cluster import MixedCluster

SHARE_SUM = 1e-9  # how far the shares of all replicas may be from 1

Nodes = tuple[int, ...]  # in use of every part of a cluster, 0 of idle ones


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MixedStage:
    """Pipeline stage: the part of the cluster on which it sits, its tensor-parallel degree and its layers."""

    part: int  # index into the cluster's parts
    tp: int = 1
    layers: int
    chunks: tuple[int, ...] = ()  # of them in each virtual stage, where there are several

    def __post_init__(self) -> None:
        check_count("part", self.part, at_least=0, at_most=1000)
        check_count("tp", self.tp, at_most=10**6)
        check_count("layers", self.layers, at_least=0)
        if self.chunks and sum(self.chunks) != self.layers:
            raise InputError(f"chunks of a stage add up to {sum(self.chunks)}, it has {self.layers} layers")

    def with_layers(self, layers: int) -> MixedStage:
        """The stage with this many layers, spread over its virtual stages."""
        return replace(self, layers=layers, chunks=even_chunks(layers, len(self.chunks)) if self.chunks else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaKind:
    """`count` equal replicas: stages, micro-batches a step, and each one's share of states (None: equal in all)."""

    count: int = 1
    micro_batch: int = 1
    num_microbatches: int
    stages: tuple[MixedStage, ...]
    state_share: float | None = None

    def __post_init__(self) -> None:
        for name in ("count", "micro_batch", "num_microbatches"):
            check_count(name, getattr(self, name))
        if len({len(stage.chunks) for stage in self.stages}) != 1:
            raise InputError("stages must name at least one, and all have as many virtual stages")
        if self.state_share is not None and not 0 <= self.state_share <= 1:
            raise InputError(f"state_share must be between 0 and 1, got {self.state_share:g}")

    @property
    def parts(self) -> tuple[int, ...]:
        """The parts that a replica spans, each once, in the order of its stages."""
        return tuple(dict.fromkeys(stage.part for stage in self.stages))

    @property
    def vp(self) -> int:
        """Virtual stages of every stage."""
        return len(self.stages[0].chunks) or 1

    def _order(self) -> tuple[object, ...]:
        return (self.stages, self.micro_batch, self.num_microbatches, self.state_share or 0.0)


# Of the axes that all replicas share, those that the kinds have themselves.
_OF_KINDS: dict[str, Any] = dict.fromkeys(("global_batch", "micro_batch", "tp", "pp", "vp", "dp_shard"), 1)
_OF_KINDS |= {"layers_per_chunk": None, "placement": None, "schedule": Schedule.ONE_F_ONE_B}
_PLAN_FIELDS = tuple(field.name for field in fields(ParallelPlan))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPlan:
    """Configuration of a mixed cluster.  Kinds that are equal become one, and all stand in one order.

    `common` are the axes that all replicas share, in which `sp` stands for wherever tp divides the tokens and `etp` for
    as much of it as tp has; those that the kinds have themselves are 1 in it.  `schedule` is that of all pipelines,
    where 1F1B is interleaved in kinds with virtual stages.
    """

    kinds: tuple[ReplicaKind, ...]
    common: ParallelPlan
    schedule: Schedule = Schedule.ONE_F_ONE_B

    def __post_init__(self) -> None:
        if not self.kinds:
            raise InputError("kinds must name at least one")
        schedule = enum_value("schedule", Schedule, self.schedule)
        is_usual = schedule in USUAL_SCHEDULES or all(len(kind.stages) == 1 for kind in self.kinds)
        object.__setattr__(self, "schedule", Schedule.ONE_F_ONE_B if is_usual else schedule)
        most_tp = max(stage.tp for kind in self.kinds for stage in kind.stages)
        common = replace(self.common, etp=min(self.common.etp, most_tp), **_OF_KINDS)
        object.__setattr__(self, "common", common)
        merged: dict[tuple[object, ...], ReplicaKind] = {}
        for kind in self.kinds:
            same = merged.get(kind._order())
            merged[kind._order()] = replace(kind, count=kind.count + same.count) if same else kind
        ordered = sorted(merged.values(), key=ReplicaKind._order)
        object.__setattr__(self, "kinds", tuple(ordered))
        if self.num_replicas % self.common.dp_replicate:
            raise InputError(f"dp_replicate {self.common.dp_replicate} does not divide {self.num_replicas} replicas")
        shares = [kind.state_share for kind in self.kinds]
        if shares.count(None) not in (0, len(shares)):
            raise InputError("state_share must be given of every kind, or of none")
        if None not in shares:
            if self.common.sharding == "none":
                raise InputError("state_share needs sharding zero1, zero2 or zero3: unsharded states have no shares")
            total = sum(kind.count * (kind.state_share or 0.0) for kind in self.kinds)
            if abs(total - 1) > SHARE_SUM:
                raise InputError(f"state_share of all replicas must add up to 1, got {total:.9g}")

    @classmethod
    def of(cls, plan: ParallelPlan, part: int, num_layers: int) -> MixedPlan:
        """The plan of one part, of a model with this many layers, as one of a mixed cluster."""
        stages = tuple(
            MixedStage(part=part, tp=plan.tp, layers=sum(of_stage), chunks=of_stage if plan.vp > 1 else ())
            for of_stage in chunks_of_stages(chunk_layers(plan, num_layers), plan.pp, plan.schedule)
        )
        kind = ReplicaKind(
            count=plan.dp, micro_batch=plan.micro_batch, num_microbatches=plan.num_microbatches, stages=stages
        )
        return cls(kinds=(kind,), common=plan, schedule=plan.schedule)

    def schedule_of(self, kind: ReplicaKind) -> Schedule:
        """The schedule of a kind's pipelines; a single stage has no pipeline and uses 1F1B."""
        if len(kind.stages) > 1 and self.schedule != Schedule.ONE_F_ONE_B:
            return self.schedule
        return Schedule.INTERLEAVED if kind.vp > 1 else Schedule.ONE_F_ONE_B

    def hops_of(self, kind: ReplicaKind) -> tuple[tuple[MixedStage, MixedStage], ...]:
        """The stages that send to each other; in an interleaved pipeline the last one sends to the first."""
        around = kind.stages[:1] if self.schedule_of(kind) == Schedule.INTERLEAVED else ()
        return tuple(pairwise((*kind.stages, *around)))

    def layers_per_chunk(self, kind: ReplicaKind) -> tuple[int, ...]:
        """Layers of every chunk of a kind in model order."""
        return tuple(layers for _, layers in self.chunks_of(kind))

    def part_of_layers(self, kind: ReplicaKind) -> tuple[int, ...]:
        """The part on which a replica of a kind holds each layer."""
        return tuple(stage.part for stage, layers in self.chunks_of(kind) for _ in range(layers))

    def chunks_of(self, kind: ReplicaKind) -> tuple[tuple[MixedStage, int], ...]:
        """(stage, layers) of every chunk of a kind in model order."""
        of_stages = ([(stage, size) for size in stage.chunks or (stage.layers,)] for stage in kind.stages)
        return tuple(chain(*in_turn(zip(*of_stages, strict=True), self.schedule_of(kind))))

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
        """Sequences per step."""
        return sum(kind.count * kind.micro_batch * kind.num_microbatches for kind in self.kinds)

    @property
    def parts(self) -> frozenset[int]:
        """The parts that are in use; others are idle."""
        return frozenset(part for kind in self.kinds for part in kind.parts)

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return sum(map(self.num_devices_on, self.parts))

    def num_devices_on(self, part: int) -> int:
        """Devices of a part that all replicas take."""
        return self.common.cp * sum(
            kind.count * stage.tp for kind in self.kinds for stage in kind.stages if stage.part == part
        )

    def num_inside(self, kind: ReplicaKind) -> list[tuple[int, int]]:
        """(replicas that hold the layers of a stage on the same part as it, parts that hold them) of all its stages.

        Of a stage whose layers other kinds cut elsewhere the middle one of its first chunk decides.
        """
        layers_elsewhere = [(other.count, self.part_of_layers(other)) for other in self.kinds]
        sizes, before, result = self.layers_per_chunk(kind), 0, []
        for stage, size in zip(kind.stages, sizes, strict=False):
            middle, before = min(before + size // 2, sum(sizes) - 1), before + size
            of_middle = [(count, parts[middle]) for count, parts in layers_elsewhere]
            inside = sum(count for count, part in of_middle if part == stage.part)
            result.append((inside or kind.count, len({part for _, part in of_middle} | {stage.part})))  # or no layers
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedProblem:
    """The constant half of an estimate on a mixed cluster; `calibrations` and `timings` are those of its parts."""

    model: ModelSpec
    training: TrainingSpec
    cluster: MixedCluster
    framework: Framework
    calibrations: tuple[Calibration, ...]
    timings: tuple[TimingTable, ...] = ()  # blank: none of any part
    reserve_bytes: float = 0.0
    _as_if: dict[tuple[int, Nodes], Problem] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if len(self.calibrations) != len(self.cluster.parts):
            num_calibrations, num_parts = len(self.calibrations), len(self.cluster.parts)
            raise InputError(f"{num_calibrations} calibrations for {num_parts} parts: give one each")
        for part in range(len(self.cluster.parts)):
            self.alone(part)

    def only(self, parts: Sequence[int]) -> MixedProblem:
        """The problem on these of its parts alone."""
        own = [self.cluster.parts[part] for part in parts]
        return replace(
            self,
            cluster=replace(self.cluster, name="+".join(part.name for part in own), parts=tuple(own)),
            calibrations=tuple(self.calibrations[part] for part in parts),
            timings=tuple(self.timings[part] for part in parts) if self.timings else (),
        )

    def alone(self, part: int) -> Problem:
        """The problem on a part alone."""
        return self.as_if(part, tuple(spec.num_nodes * (at == part) for at, spec in enumerate(self.cluster.parts)))

    def nodes_of(self, plan: MixedPlan) -> Nodes:
        """Nodes that hold devices of a plan; idle ones have no part in its price."""
        return tuple(-(-plan.num_devices_on(at) // part.devices_per_node) for at, part in enumerate(self.cluster.parts))

    def as_if(self, part: int, nodes: Nodes) -> Problem:
        """The problem as if all nodes in use had the devices of `part`: a stage there costs the same."""
        key = (part, nodes)
        if key not in self._as_if:
            self._as_if[key] = Problem(
                model=self.model,
                training=self.training,
                cluster=self._cluster(part, nodes),
                framework=self.framework,
                calibration=self.calibrations[part],
                timings=self.timings[part] if self.timings else NO_TIMINGS,
                reserve_bytes=self.reserve_bytes,
            )
        return self._as_if[key]

    def _cluster(self, part: int, nodes: Nodes) -> ClusterSpec:
        own = replace(self.cluster.parts[part], num_nodes=nodes[part], nodes=())  # all nodes of a part are priced alike
        if nodes[part] == sum(nodes):
            return own
        num_nodes = -(-self._num_devices(nodes) // own.devices_per_node)
        if not self.is_apart(part, nodes):
            return replace(own, num_nodes=num_nodes)
        level = self.between(part, nodes, own.num_devices)
        wan = WanSpec(
            nodes_per_site=own.num_nodes,
            bandwidth_bytes_per_s=level.bytes_per_s * own.num_devices,
            latency_s=level.latency_s,
            num_flows=10**6,  # counted in the rate
        )
        return replace(own, num_nodes=num_nodes, wan=wan)

    def _num_devices(self, nodes: Nodes) -> int:
        return sum(number * part.devices_per_node for number, part in zip(nodes, self.cluster.parts, strict=True))

    def _fabric(self, part: int, nodes: Nodes) -> Level:
        """The network of a part as devices see it who leave all its switches."""
        own, num_devices = self.cluster.parts[part], self._num_devices(nodes)
        network, num_nodes = own.network, -(-num_devices // own.devices_per_node)
        rate = network.nic_bytes_per_s * network.nics_per_device * network.efficiency
        for tier in network.tiers:
            rate /= tier.oversubscription if tier.num_nodes < num_nodes else 1.0
        return Level(
            name=network.kind,
            num_devices=num_devices,
            bytes_per_s=rate,
            latency_s=network.latency_s,
            half_rate_bytes=network.half_rate_bytes,
        )

    def between(self, part: int, nodes: Nodes, num_senders: int) -> Level:
        """Level that `num_senders` devices of `part` share when they send to the other parts in use at once."""
        spec, fabrics = self.cluster.between, [self._fabric(at, nodes) for at, number in enumerate(nodes) if number]
        latency = max(fabric.latency_s for fabric in fabrics) if spec.latency_s is None else spec.latency_s
        rate = min(fabric.bytes_per_s for fabric in fabrics)
        if spec.device_bytes_per_s is not None:
            rate = min(rate, spec.device_bytes_per_s)
        if (shared := spec.shared_bytes_per_s(latency)) is not None:
            rate = min(rate, shared / num_senders)
        half_rate = max(fabric.half_rate_bytes for fabric in fabrics)
        own = self._fabric(part, nodes)
        return replace(own, name="between", bytes_per_s=rate, latency_s=latency, half_rate_bytes=half_rate)

    def is_apart(self, part: int, nodes: Nodes) -> bool:
        """Return whether what joins the parts is worse than the network of `part`; else they are to it one network."""
        num_senders = nodes[part] * self.cluster.parts[part].devices_per_node
        own, level = self._fabric(part, nodes), self.between(part, nodes, num_senders)
        return level != replace(own, name="between")


def only_on(nodes: Nodes, parts: Container[int]) -> Nodes:
    """Return the nodes in use of some parts alone."""
    return tuple(number * (at in parts) for at, number in enumerate(nodes))


def as_parallel(problem: MixedProblem, plan: MixedPlan, kind: ReplicaKind, tp: int) -> ParallelPlan:
    """The plan in which all replicas were of `kind` and all their stages had the tensor-parallel degree `tp`."""
    common, replicas = plan.common, plan.num_replicas
    values = {name: getattr(common, name) for name in _PLAN_FIELDS}
    values |= {
        "global_batch": kind.micro_batch * kind.num_microbatches * replicas,
        "micro_batch": kind.micro_batch,
        "tp": tp,
        "sp": common.sp and problem.training.seq_len // common.cp % tp == 0,
        "etp": min(common.etp, tp),
        "pp": len(kind.stages),
        "vp": kind.vp,
        "schedule": plan.schedule_of(kind),
        "layers_per_chunk": plan.layers_per_chunk(kind),
        "dp_shard": replicas // common.dp_replicate,
    }
    return ParallelPlan.derived(
        has_experts=problem.model.moe is not None, has_latents=problem.model.mla is not None, **values
    )


def check_mixed(problem: MixedProblem, plan: MixedPlan) -> None:
    """Refuse a plan that does not belong to the problem, or that is not priced."""
    parts, num_layers = problem.cluster.parts, problem.model.num_layers
    if plan.common.precision != problem.training.precision:
        raise InputError(
            f"precision of the plan is {plan.common.precision}, of the training {problem.training.precision}"
        )
    for kind in plan.kinds:
        if beyond := [part for part in kind.parts if part >= len(parts)]:
            raise InputError(f"part {beyond[0]} does not exist: the cluster has {len(parts)}, counted from 0")
        if (layers_elsewhere := sum(stage.layers for stage in kind.stages)) != num_layers:
            raise InputError(f"layers of the stages add up to {layers_elsewhere}, the model has {num_layers}")
        if plan.schedule != Schedule.ONE_F_ONE_B:
            check_priced(as_parallel(problem, plan, kind, kind.stages[0].tp))
    for at in sorted(plan.parts):
        num_devices = plan.num_devices_on(at)
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
    parts_of_layers = [plan.part_of_layers(kind) for kind in plan.kinds]
    for layer in range(problem.model.num_layers):
        if len({vendors[parts[layer]] for parts in parts_of_layers}) > 1:
            return (
                f"gradients of layer {layer} would be reduced between devices of two vendors, which "
                "cross_vendor_collectives = false forbids: let pipelines cross vendors instead of replicas"
            )
    for kind in plan.kinds if problem.model.tied_embeddings else ():
        ends = [stage for stage, _ in plan.chunks_of(kind)]
        if vendors[ends[0].part] != vendors[ends[-1].part]:
            return (
                "gradients of the tied embedding would be reduced between devices of two vendors, which "
                "cross_vendor_collectives = false forbids"
            )
    return None


def _check_sharding(problem: MixedProblem, plan: MixedPlan) -> None:
    """Refuse what would travel between parts in every layer, except for whole nodes whose weights or gradients do so.

    Ranks that gather weights or reduce gradients in every micro-batch wait for each other until all have as many.
    """
    common, used = plan.common, plan.parts
    if common.ep > 1 and any(problem.is_apart(part, problem.nodes_of(plan)) for part in used):
        experts = common.ep * common.etp
        if any(kind.count * common.cp * stage.tp % experts for kind in plan.kinds for stage in kind.stages):
            raise UnpricedError(
                f"ep {common.ep} over several parts is not priced: use a degree that divides the ranks of each part"
            )
    if common.sharding in ("none", "zero1"):
        return
    if len(counts := {kind.num_microbatches for kind in plan.kinds}) > 1:
        raise UnpricedError(
            f"sharding {common.sharding!r} communicates in every micro-batch, of which replicas have "
            f"{' and '.join(map(str, sorted(counts)))}: give all as many, or use zero1"
        )
    for at in used if len(used) > 1 else ():
        degrees = {stage.tp for kind in plan.kinds for stage in kind.stages if stage.part == at}
        fills_nodes = plan.num_devices_on(at) % problem.cluster.parts[at].devices_per_node == 0
        if len(degrees) > 1 or not fills_nodes or any(len(kind.stages) > 1 for kind in plan.kinds):
            raise UnpricedError(
                f"sharding {common.sharding!r} over several parts is priced for replicas of one stage and one tp that "
                "fill whole nodes: use zero1"
            )
