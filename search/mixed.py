"""What is the fastest plan of a mixed cluster?  Structures of pipelines within stated limits, each balanced exactly.

A structure says which parts form pipelines together, with which degrees.  Given one, layers, micro-batches and shares
of states follow from its prices (`search.balance`), which depend on them in turn: a few rounds settle that.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoplan.cost.mixed import estimate_mixed, layer_kinds, pipeline_s
from autoplan.cost.recompute import stores_scores
from autoplan.mixed import MixedPlan, MixedProblem, MixedStage, ReplicaKind, mixes_vendors
from autoplan.plan import ParallelPlan, Recompute, Sharding, even_chunks
from autoplan.problem import Problem
from autoplan.result import RISKY_Z, MixedCertificate, MixedCost, MixedKindCost, MixedResult, MixedStageCost, RankedPlan
from autoplan.rules import Setting, broken, megatron_lm, universal
from search.balance import even_shares, min_max_layers, split_microbatches
from search.limits import default_limits, divisors
from search.space import Space
from search.study import search as search_alone

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_STAGES = 32  # without interleaving deeper pipelines are mostly bubble
LEAST_USED = 0.9  # share of the devices of its parts that a structure must use
KEPT_PIPELINES = 3  # of every group of parts, taken on to be combined
KEPT_STRUCTURES = 4  # of every set of parts in use, whose other choices are looked at
KEPT_CHOICES = 2  # of them, whose kinds are given micro-batches of their own
KEPT_PLANS = 20
ROUNDS = 6  # of pricing and sharing out anew
MICRO_BATCHES = (1, 2, 4, 8)

# What is left out, in words.
LIMITS = (
    "every group of parts forms equal pipelines, whose stages on one part have one tp; parts may be idle",
    f"at least {LEAST_USED:.0%} of the devices of a group in use, at most {MAX_STAGES} stages",
    "tp a power of two in the scale-up domain; of three parts and more the same on all",
    "parts in the order of their memory, of two also the reverse",
    f"the best {KEPT_PIPELINES} pipelines of every group combined; micro-batches, sharding and recomputation of the "
    f"best {KEPT_STRUCTURES} structures of every set of parts in use",
    f"micro-batch {'|'.join(map(str, MICRO_BATCHES))}, 1f1b without interleaving, cp 1, ep 1",
)

Place = tuple[int, int]  # part and tensor-parallel degree of a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """`count` replicas with their stages, before layers and micro-batches are shared out."""

    count: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Replicas of one or more kinds, and the choices that hold for all of them."""

    kinds: tuple[Pipelines, ...]
    micro_batches: tuple[int, ...]  # of every kind
    sharding: Sharding
    recompute: Recompute


# -- structures -------------------------------------------------------------------------------------------------------


def tensor_degrees(problem: MixedProblem, part: int) -> tuple[int, ...]:
    """Powers of two that stay in the scale-up domain of a part and that the framework admits."""
    cluster = problem.cluster.parts[part]
    rules = megatron_lm.RULES if problem.framework.rules == "megatron-lm" else universal.RULES_ALONE
    most, degrees = min(cluster.levels[-1].num_devices, cluster.num_devices), []
    for power in range(most.bit_length()):
        tp = 2**power
        sp = tp > 1 and problem.framework.sequence_parallel and problem.training.seq_len % tp == 0
        etp = tp if problem.model.moe else 1
        plan = ParallelPlan(global_batch=1, tp=tp, sp=sp, etp=etp, precision=problem.training.precision)
        setting = Setting(model=problem.model, training=problem.training, num_devices=tp)
        if cluster.num_devices % tp == 0 and not broken(rules, setting, plan):
            degrees.append(tp)
    return tuple(degrees)


def orders(problem: MixedProblem, parts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Orders in which a pipeline visits parts: most memory first, as early stages keep more, and of two the reverse."""
    memory = {part: problem.cluster.parts[part].device.visible_memory_bytes for part in parts}
    order = tuple(sorted(parts, key=lambda part: (-memory[part], part)))
    yield order
    if len(order) == 2:
        yield order[::-1]


def pipelines(problem: MixedProblem, parts: Sequence[int], most_replicas: int) -> tuple[Pipelines, ...]:
    """Ways to form equal pipelines from all the devices of `parts`, or nearly all."""
    degrees = {part: tensor_degrees(problem, part) for part in parts}
    size = {part: problem.cluster.parts[part].num_devices for part in parts}
    deepest = min(problem.model.num_layers, MAX_STAGES)
    found = []
    for order in orders(problem, parts):
        for tps in itertools.product(*(degrees[part] for part in order)):
            if len(order) > 2 and any(
                tp != min(max(tps), max(degrees[part])) for part, tp in zip(order, tps, strict=True)
            ):
                continue
            groups = [size[part] // tp for part, tp in zip(order, tps, strict=True)]
            for count in sorted({one for group in groups for one in divisors(group)}):
                depths = [group // count for group in groups]
                used = sum(count * depth * tp for depth, tp in zip(depths, tps, strict=True))
                if 0 in depths or sum(depths) > deepest or count > most_replicas:
                    continue
                if used >= LEAST_USED * sum(size.values()):
                    stages = [[(part, tp)] * depth for part, tp, depth in zip(order, tps, depths, strict=True)]
                    found.append(Pipelines(count=count, places=tuple(itertools.chain(*stages))))
    return tuple(dict.fromkeys(found))


def groupings(parts: Sequence[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put some of the parts into groups: those of one group form pipelines, others are idle."""
    if not parts:
        yield ()
        return
    first, rest = parts[0], parts[1:]
    for others in groupings(rest):
        yield others  # the first is idle
        yield ((first,), *others)
        for at, group in enumerate(others):
            yield (*others[:at], (first, *group), *others[at + 1 :])


# -- from a structure to its best plan --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """A structure whose layers, micro-batches and shares are being settled."""

    structure: Structure
    plan: MixedPlan | None
    most_layers: list[Ints]  # of every stage of every kind: more was seen not to fit
    cost: MixedCost | None = None  # of the best plan so far: the fastest that fits, else the one that is nearest to


Settled = tuple[Structure, MixedCost]


def _is_better(one: MixedCost, other: MixedCost | None) -> bool:
    if other is None:
        return True
    fits, other_fits = one.oom_z <= RISKY_Z, other.oom_z <= RISKY_Z
    if fits and other_fits:
        return one.sequences_per_s > other.sequences_per_s
    return fits or (not other_fits and one.oom_z < other.oom_z)


def _key(kind: ReplicaKind) -> tuple[Place, ...]:
    return tuple((stage.part, stage.tp) for stage in kind.stages)


class Settler:
    """Settles structures of one problem and batch, and counts the plans that it prices."""

    def __init__(self, problem: MixedProblem, global_batch: int) -> None:
        self.problem, self.global_batch = problem, global_batch
        self.num_priced = 0
        kinds = layer_kinds(problem.model)
        self._kind_of_layer = np.array([kinds.index(layer) for layer in problem.model.layers])

    def settle(self, structures: Iterable[Structure]) -> list[Settled]:
        """The structures that have a plan, each with its best, best first."""
        drafts = [
            _Draft(
                structure=one,
                plan=self._first_plan(one),
                most_layers=[np.full(len(kind.places), self.problem.model.num_layers) for kind in one.kinds],
            )
            for one in structures
        ]
        seen: set[tuple[int, MixedPlan]] = set()
        for _ in range(ROUNDS):
            open_ = [(at, draft) for at, draft in enumerate(drafts) if draft.plan and (at, draft.plan) not in seen]
            if not open_:
                break
            seen |= {(at, draft.plan) for at, draft in open_ if draft.plan}
            self.num_priced += len(open_)
            costs = estimate_mixed(self.problem, [draft.plan for _, draft in open_ if draft.plan])
            for (_, draft), cost in zip(open_, costs, strict=True):
                if cost.plan.global_batch == self.global_batch and _is_better(cost, draft.cost):
                    draft.cost = cost
                draft.plan = self._next_plan(draft, cost)
        done = [(draft.structure, draft.cost) for draft in drafts if draft.cost]
        return _ordered(done)

    def _first_plan(self, structure: Structure) -> MixedPlan | None:
        """Even layers, and micro-batches by the number of devices; the batch need not come out yet."""
        devices = [sum(tp for _, tp in kind.places) for kind in structure.kinds]
        total = sum(kind.count * size for kind, size in zip(structure.kinds, devices, strict=True))
        layers = [even_chunks(self.problem.model.num_layers, len(kind.places)) for kind in structure.kinds]
        shares = [self.global_batch * size / total for size in devices]
        counts = [
            max(round(share / micro), 1) * kind.count
            for kind, share, micro in zip(structure.kinds, shares, structure.micro_batches, strict=True)
        ]
        return self._plan(structure, layers, counts, None)

    def _plan(
        self,
        structure: Structure,
        layers: Sequence[tuple[int, ...]],
        num_microbatches: Sequence[int],
        shares: Sequence[float] | None,
    ) -> MixedPlan | None:
        """The plan in which all replicas of kind k have `num_microbatches[k]` together; None if it mixes vendors."""
        kinds = []
        for at, (one, cut, many) in enumerate(zip(structure.kinds, layers, num_microbatches, strict=True)):
            places = zip(one.places, cut, strict=True)
            stages = tuple(MixedStage(part=part, tp=tp, layers=held) for (part, tp), held in places)
            least, more = divmod(many, one.count)
            for count, each in ((one.count - more, least), (more, least + 1)):
                if count:
                    kinds.append(
                        ReplicaKind(
                            count=count,
                            micro_batch=structure.micro_batches[at],
                            num_microbatches=each,
                            stages=stages,
                            state_share=shares[at] if shares else None,
                        )
                    )
        plan = MixedPlan(
            kinds=tuple(kinds),
            sharding=structure.sharding if sum(kind.count for kind in kinds) > 1 else "none",
            recompute=structure.recompute,
            precision=self.problem.training.precision,
        )
        return None if mixes_vendors(self.problem, plan) else plan

    def _next_plan(self, draft: _Draft, cost: MixedCost) -> MixedPlan | None:
        """Share out anew by what the last plan was seen to cost."""
        kinds = list(zip(cost.plan.kinds, cost.kinds, strict=True))
        found = [next(price for kind, price in kinds if _key(kind) == one.places) for one in draft.structure.kinds]
        shares = self._shares(draft, cost, found)
        if shares is None and cost.oom_z > RISKY_Z:
            for most, price in zip(draft.most_layers, found, strict=True):
                self._tighten(most, price)
        layers, passes = [], []
        for most, price in zip(draft.most_layers, found, strict=True):
            layer_s = np.array([stage.layer_s for stage in price.stages])[:, self._kind_of_layer]
            extra_s, before = self._beside_layers(price, layer_s)
            cut = min_max_layers(layer_s, extra_s, most)
            if cut is None:
                return None
            after = extra_s + _held_s(layer_s, cut)
            layers.append(cut)
            passes.append(before * after / before.sum(axis=0))
        split = self._split(draft.structure, passes, found)
        return self._plan(draft.structure, layers, split, shares) if split else None

    def _split(
        self, structure: Structure, passes: Sequence[Floats], found: Sequence[MixedKindCost]
    ) -> tuple[int, ...] | None:
        """Micro-batches of all replicas of every kind."""
        if len(structure.kinds) == 1:
            many, rest = divmod(self.global_batch, structure.micro_batches[0])
            return (many,) if not rest and many >= structure.kinds[0].count else None
        counts = [one.count for one in structure.kinds]
        tables = [
            self._times(self.global_batch // micro // count + 1, one, price)
            for micro, count, one, price in zip(structure.micro_batches, counts, passes, found, strict=True)
        ]
        return split_microbatches(tables, counts, structure.micro_batches, self.global_batch)

    def _beside_layers(self, price: MixedKindCost, layer_s: Floats) -> tuple[Floats, Floats]:
        """(what every stage does beside its layers, forward and backward of every stage)."""
        passes = np.array([[stage.forward_s, stage.backward_s] for stage in price.stages]).T
        held = _held_s(layer_s, [stage.layers for stage in price.stages])
        return np.maximum(passes.sum(axis=0) - held, 0.0), passes

    def _times(self, most: int, passes: Floats, price: MixedKindCost) -> Floats:
        """The pipeline of one replica with 1 to `most` micro-batches."""
        forward, backward = (np.repeat(one[None, :], most, axis=0) for one in passes)
        sends = np.repeat(np.array([[stage.send_s for stage in price.stages[:-1]]]), most, axis=0)
        makespan, exposed, _ = pipeline_s(forward, backward, sends, np.arange(1, most + 1))
        return np.maximum.accumulate(makespan + exposed)

    def _allowed_bytes(self, stage: MixedStageCost) -> float:
        """Memory with which a stage is safe."""
        return stage.capacity_bytes * float(np.exp(RISKY_Z * self.problem.calibrations[stage.part].memory_spread))

    def _tighten(self, most: Ints, price: MixedKindCost) -> None:
        """Take layers from stages that do not fit; memory has a constant part, so that no fitting number is lost."""
        for at, stage in enumerate(price.stages):
            allowed = self._allowed_bytes(stage)
            if stage.memory_bytes > allowed:
                most[at] = min(most[at], stage.layers - 1, int(stage.layers * allowed / stage.memory_bytes))

    def _shares(self, draft: _Draft, cost: MixedCost, found: Sequence[MixedKindCost]) -> tuple[float, ...] | None:
        """Shares of states with which all stages fit; None where even ones do, or none."""
        if draft.structure.sharding == "none" or len(found) == 1 or cost.oom_z <= RISKY_Z:
            return None
        given = {_key(kind): kind.state_share for kind in cost.plan.kinds}
        most = []
        for one, price in zip(draft.structure.kinds, found, strict=True):
            share = given[one.places]
            share = 1 / cost.plan.num_replicas if share is None else share
            room = [
                (self._allowed_bytes(stage) - stage.memory_bytes + stage.sharded_bytes) / stage.sharded_bytes * share
                if stage.sharded_bytes > 0
                else float(stage.memory_bytes <= self._allowed_bytes(stage))
                for stage in price.stages
            ]
            most.append(min(*room, 1.0))
        return even_shares(most, [one.count for one in draft.structure.kinds])


def _held_s(layer_s: Floats, layers: Sequence[int]) -> Floats:
    """Time of the layers of every stage."""
    ends = np.cumsum([0, *layers])
    return np.array([layer_s[at, ends[at] : ends[at + 1]].sum() for at in range(len(layers))])


# -- the search -------------------------------------------------------------------------------------------------------


def _settle_plainly(
    settler: Settler, ways: Iterable[tuple[Pipelines, ...]], shardings: Sequence[Sharding]
) -> list[Settled]:
    """Structures with one sequence a micro-batch and sharded states; those that do not fit with recomputation too."""
    plain = [
        Structure(kinds=kinds, micro_batches=(1,) * len(kinds), sharding=sharding, recompute="none")
        for kinds in ways
        for sharding in _possible(kinds, shardings)
        if sharding != "none"
    ]
    found = settler.settle(plain)
    fitting = {one for one, cost in found if cost.oom_z <= RISKY_Z}
    return _ordered(found + settler.settle(replace(one, recompute="full") for one in plain if one not in fitting))


def _possible(kinds: tuple[Pipelines, ...], shardings: Sequence[Sharding]) -> list[Sharding]:
    """The shardings that are priced: over parts, weights and gradients travel between replicas of one stage only."""
    is_deep = any(len(kind.places) > 1 for kind in kinds)
    return [sharding for sharding in shardings if sharding in ("none", "zero1") or not is_deep]


def _others(
    kinds: tuple[Pipelines, ...], shardings: Sequence[Sharding], recomputes: Sequence[Recompute]
) -> Iterator[Structure]:
    """The other choices of a structure: micro-batches, alike on all kinds, sharding and recomputation."""
    for micro, sharding, recompute in itertools.product(MICRO_BATCHES, _possible(kinds, shardings), recomputes):
        yield Structure(kinds=kinds, micro_batches=(micro,) * len(kinds), sharding=sharding, recompute=recompute)


def _unlike(one: Structure) -> Iterator[Structure]:
    """The structure with another micro-batch on one of its kinds."""
    for at, micro in itertools.product(range(len(one.kinds)), MICRO_BATCHES):
        yield replace(one, micro_batches=(*one.micro_batches[:at], micro, *one.micro_batches[at + 1 :]))


def _subsets(parts: Sequence[int]) -> list[tuple[int, ...]]:
    return [group for size in range(1, len(parts) + 1) for group in itertools.combinations(parts, size)]


def alone(problem: MixedProblem, part: int, global_batch: int) -> RankedPlan | None:
    """The best plan of one part, of all schedules and degrees that a search on it looks at; None where none fits."""
    own: Problem = problem.as_if(part, frozenset((part,)))
    setting = Setting(model=own.model, training=own.training, num_devices=own.cluster.num_devices)
    space = Space(setting=setting, limits=default_limits(own, (global_batch,)), rules=megatron_lm.RULES)
    ranked = search_alone(own, space).ranked if space.cells() else ()
    return ranked[0] if ranked else None


def search_mixed(
    problem: MixedProblem, global_batch: int, shardings: Sequence[Sharding] = ("none", "zero1")
) -> MixedResult:
    """The best plans found, and how far they stay behind the sum of what the parts reach alone."""
    settler = Settler(problem, global_batch)
    parts = range(len(problem.cluster.parts))
    structures: set[tuple[Pipelines, ...]] = set()
    best_of: dict[tuple[int, ...], list[Pipelines]] = {}
    settled: list[Settled] = []
    for group in _subsets(parts):
        ways = pipelines(problem, group, global_batch)
        structures |= {(way,) for way in ways}
        found = _settle_plainly(settler, [(way,) for way in ways], shardings)
        best_of[group] = list(dict.fromkeys(one.kinds[0] for one, _ in found))[:KEPT_PIPELINES]
        settled += found
    combined = {
        kinds
        for grouping in groupings(parts)
        if len(grouping) > 1
        for kinds in itertools.product(*(best_of[group] for group in grouping))
    }
    structures |= combined
    settled += _settle_plainly(settler, sorted(combined, key=repr), shardings)

    # What was settled without other choices says which structures are worth them.  Every set of parts has its own, so
    # that one part more takes nothing away.
    shortlist = list(dict.fromkeys(one.kinds for one in _best_by_parts(settled, KEPT_STRUCTURES)))
    scores = stores_scores(problem.as_if(0, frozenset((0,))))
    recomputes: list[Recompute] = ["none", "selective", "full"] if scores else ["none", "full"]
    settled += settler.settle(one for kinds in shortlist for one in _others(kinds, shardings, recomputes))
    settled += settler.settle(other for one in _best_by_parts(settled, KEPT_CHOICES) for other in _unlike(one))
    return _result(problem, global_batch, settled, len(structures), settler.num_priced)


def _best_by_parts(settled: Iterable[Settled], most: int) -> list[Structure]:
    """Of every set of parts the structures with its best plans, as many as `most` ways to form pipelines."""
    kept: dict[frozenset[int], dict[tuple[Pipelines, ...], Structure]] = defaultdict(dict)
    for one, _ in _ordered(settled):
        here = kept[frozenset(part for kind in one.kinds for part, _ in kind.places)]
        if len(here) < most:
            here.setdefault(one.kinds, one)
    return [one for here in kept.values() for one in here.values()]


def _ordered(settled: Iterable[Settled]) -> list[Settled]:
    """Plans that fit by their rate, then those that do not by how far they are from it."""
    return sorted(
        settled,
        key=lambda item: (
            max(item[1].oom_z - RISKY_Z, 0.0),
            -item[1].sequences_per_s,
            len(item[1].plan.kinds),
            repr(item[1].plan),
        ),
    )


def _result(
    problem: MixedProblem, global_batch: int, settled: Sequence[Settled], num_structures: int, num_priced: int
) -> MixedResult:
    ordered = [cost for _, cost in _ordered(settled)]
    ranked = tuple({cost.plan: cost for cost in ordered if cost.oom_z <= RISKY_Z}.values())[:KEPT_PLANS]
    parts = range(len(problem.cluster.parts))
    plans_alone = tuple(alone(problem, part, global_batch) for part in parts)
    rates = []
    for part, plan in zip(parts, plans_alone, strict=True):
        mixed = [cost for cost in ordered if cost.plan.parts == {part}]
        # A part that cannot hold the model alone counts with what it would reach if it could.
        here = [cost.sequences_per_s for cost in mixed if cost.oom_z <= RISKY_Z]
        here = here or [cost.sequences_per_s for cost in mixed]
        rates.append(max([*here, global_batch / plan.step_s if plan else 0.0]))
    certificate = MixedCertificate(
        structures=num_structures,
        plans=num_priced,
        rates_alone=tuple(rates),
        gap=1 - ranked[0].sequences_per_s / sum(rates) if ranked else 1.0,
        limits=LIMITS,
    )
    closest = ordered[0] if ordered and not ranked else None
    return MixedResult(ranked=ranked, closest=closest, alone=plans_alone, certificate=certificate)
