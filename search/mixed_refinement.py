"""Refinement of a mixed structure to its best plan: layers, micro-batches and shares of states.

These follow from prices, which in turn depend on them, so a few rounds of pricing and distribution are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoplan.base.arrays import Floats, Ints
from autoplan.base.errors import AutoplanError
from autoplan.cost.mixed.estimate import estimate_mixed
from autoplan.cost.pipeline.closed_forms import pipeline_s
from autoplan.frameworks.registry import book_of
from autoplan.search.balance import even_shares, min_max_layers, split_microbatches
from autoplan.search.structures import NOTHING_EQUAL, Equal, Layout, StageKind, Structure, first_layers
from autoplan.spec.axes import SEARCHED
from autoplan.spec.enums import Schedule, Sharding
from autoplan.spec.estimate import RISKY_Z
from autoplan.spec.mixed_problem import MixedPlan, MixedProblem, MixedStage, ReplicaKind, check_mixed
from autoplan.spec.mixed_result import MixedCost, MixedKindCost, MixedStageCost
from autoplan.spec.plan import even_chunks

ROUNDS = 6
ROUNDING = 1e-9  # of a stage's memory, relative

Accepts = Callable[[Sequence[MixedPlan]], Sequence[bool]]


@dataclass(slots=True)
class _Draft:
    """A structure whose layers, micro-batches and shares are being refined."""

    structure: Structure
    plan: MixedPlan | None
    most_layers: list[Ints]  # per stage of every kind; more layers were found not to fit
    cost: MixedCost | None = None  # of the best plan so far: the fastest that fits, else the one nearest to fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class RefinedStructure:
    """A structure and the cost of its best plan."""

    structure: Structure
    cost: MixedCost


def _places_of(kind: ReplicaKind) -> tuple[StageKind, ...]:
    return tuple((stage.part, stage.tp) for stage in kind.stages)


def accept_all(plans: Sequence[MixedPlan]) -> Sequence[bool]:
    """Accept all plans as answers."""
    return [True] * len(plans)


class Refiner:
    """Refines structures of one problem and batch to plans accepted by `accepts`, and counts priced plans.

    Plans whose `oom_z` is at most `most_z` fit.
    """

    problem: MixedProblem
    global_batch: int
    accepts: Accepts
    most_z: float
    num_priced: int

    def __init__(
        self,
        problem: MixedProblem,
        global_batch: int,
        accepts: Accepts = accept_all,
        most_z: float = RISKY_Z,
        equal: Equal = NOTHING_EQUAL,
    ) -> None:
        self.problem, self.global_batch, self.accepts, self.most_z = problem, global_batch, accepts, most_z
        self.equal = equal
        self.num_priced = 0
        self._is_cut = book_of(problem.framework).split is not None
        # Cached by the work and memory of stages, as structures often differ only in their states.
        self._shared_out: dict[object, tuple[list[tuple[int, ...]], tuple[int, ...]] | None] = {}
        kinds = problem.model.layer_kinds
        self._kind_of_layer = np.array([kinds.index(layer) for layer in problem.model.layers])

    def refine(self, structures: Iterable[Structure]) -> list[RefinedStructure]:
        """Return the structures with a plan, best first."""
        drafts = [
            _Draft(
                structure=structure,
                plan=self._first_plan(structure),
                most_layers=[self._most_layers(len(kind.places)) for kind in structure.kinds],
            )
            for structure in structures
        ]
        priced: set[tuple[int, MixedPlan]] = set()
        for _ in range(ROUNDS):
            open_ = [(at, draft) for at, draft in enumerate(drafts) if draft.plan and (at, draft.plan) not in priced]
            if not open_:
                break
            priced |= {(at, draft.plan) for at, draft in open_ if draft.plan}
            self.num_priced += len(open_)
            plans = [draft.plan for _, draft in open_ if draft.plan]
            better = []
            for (_, draft), cost in zip(open_, estimate_mixed(self.problem, plans), strict=True):
                is_better = draft.cost is None or _rank(self.most_z, cost) < _rank(self.most_z, draft.cost)
                if is_better and cost.plan.global_batch == self.global_batch:
                    better.append((draft, cost))
                draft.plan = self._next_plan(draft, cost)
            for (draft, cost), is_answer in zip(better, self.accepts([cost.plan for _, cost in better]), strict=True):
                draft.cost = cost if is_answer else draft.cost
        return self.ordered(
            RefinedStructure(structure=draft.structure, cost=draft.cost) for draft in drafts if draft.cost
        )

    def priced(self, layouts: Iterable[Layout], within_s: float = np.inf) -> list[MixedCost]:
        """Return the costs of answers below `within_s` among layouts, in which all replicas have the same layers."""
        plans = [
            plan
            for structure, layers, rounds in layouts
            if (plan := self._plan(structure, [layers] * len(structure.kinds), rounds, None))
        ]
        self.num_priced += len(plans)
        costs = [cost for cost in estimate_mixed(self.problem, plans) if cost.step_s < within_s]
        return list(itertools.compress(costs, self.accepts([cost.plan for cost in costs])))

    def ordered(self, refined: Iterable[RefinedStructure]) -> list[RefinedStructure]:
        """Return structures in the order of their best plans."""
        return sorted(refined, key=lambda structure: order_of(self.most_z, structure.cost))

    def _most_layers(self, pp: int) -> Ints:
        num_layers = self.problem.model.num_layers
        return np.array(first_layers(self.problem, pp)) if self._is_cut else np.full(pp, num_layers)

    def _first_plan(self, structure: Structure) -> MixedPlan | None:
        """Draft even layers, and micro-batches by number of devices, which need not add up to the batch yet."""
        layers = [first_layers(self.problem, len(kind.places)) for kind in structure.kinds]
        if structure.is_in_step(self.equal):
            in_step = structure.rounds_in_step(self.global_batch)
            return self._plan(structure, layers, in_step, None) if in_step else None
        devices = [sum(tp for _, tp in kind.places) for kind in structure.kinds]
        total = sum(kind.count * size for kind, size in zip(structure.kinds, devices, strict=True))
        shares = [self.global_batch * size / total for size in devices]
        counts = [
            max(round(share / micro / kind.round), 1) * kind.count
            for kind, share, micro in zip(structure.kinds, shares, structure.micro_batches, strict=True)
        ]
        return self._plan(structure, layers, counts, None)

    def _plan(
        self,
        structure: Structure,
        layers: Sequence[tuple[int, ...]],
        rounds: Sequence[int],
        shares: Sequence[float] | None,
    ) -> MixedPlan | None:
        """Return the plan where replicas of kind k share `rounds[k]` of micro-batches; None if it cannot be priced."""
        kinds = []
        for at, (kind, cut, total) in enumerate(zip(structure.kinds, layers, rounds, strict=True)):
            if min(cut) < kind.vp:  # every chunk has a layer
                return None
            stages = tuple(
                MixedStage(part=part, tp=tp, layers=num, chunks=even_chunks(num, kind.vp) if kind.vp > 1 else ())
                for (part, tp), num in zip(kind.places, cut, strict=True)
            )
            least, more = divmod(total, kind.count)
            for count, num_rounds in ((kind.count - more, least), (more, least + 1)):
                if count:
                    kinds.append(
                        ReplicaKind(
                            count=count,
                            micro_batch=structure.micro_batches[at],
                            num_microbatches=num_rounds * kind.round,
                            stages=stages,
                            state_share=shares[at] if shares else None,
                        )
                    )
        common = structure.common
        if sum(kind.count for kind in kinds) * common.cp == 1:
            common = replace(common, sharding=Sharding.NONE)
        plan = MixedPlan(kinds=tuple(kinds), common=common, schedule=structure.schedule)
        try:
            check_mixed(self.problem, plan)
        except AutoplanError:
            return None
        return plan

    def _next_plan(self, draft: _Draft, cost: MixedCost) -> MixedPlan | None:
        """Redistribute layers, micro-batches and states by the costs of the last plan."""
        kinds = list(zip(cost.plan.kinds, cost.kinds, strict=True))
        prices = [
            next(price for kind, price in kinds if _places_of(kind) == pipelines.places)
            for pipelines in draft.structure.kinds
        ]
        shares = self._shares(draft, cost, prices)
        if shares is None and cost.oom_z > self.most_z:
            for most_layers, price in zip(draft.most_layers, prices, strict=True):
                self._tighten(most_layers, price)
        stages = [stage for price in prices for stage in price.stages]
        work = tuple((stage.layers, stage.layer_s, stage.forward_s, stage.backward_s, stage.send_s) for stage in stages)
        structure, most = draft.structure, tuple(most_layers.tobytes() for most_layers in draft.most_layers)
        key = structure.kinds, structure.micro_batches, structure.is_in_step(self.equal), most, work
        if key not in self._shared_out:
            self._shared_out[key] = self._share_out(draft, prices)
        if (shared_out := self._shared_out[key]) is None:
            return None
        layers, split = shared_out
        return self._plan(structure, layers, split, shares)

    def _share_out(
        self, draft: _Draft, prices: Sequence[MixedKindCost]
    ) -> tuple[list[tuple[int, ...]], tuple[int, ...]] | None:
        """Return layers and total micro-batches of every kind; None if they do not add up."""
        times = [np.array([stage.layer_s for stage in price.stages])[:, self._kind_of_layer] for price in prices]
        beside = [self._beside_layers(price, layer_s) for price, layer_s in zip(prices, times, strict=True)]
        if self.equal.replicas and len(prices) > 1:  # the slowest replica decides
            slowest = np.max(times, axis=0), np.max([extra_s for extra_s, _ in beside], axis=0)
            cuts = [min_max_layers(*slowest, np.min(draft.most_layers, axis=0))] * len(prices)
        else:
            cuts = [
                min_max_layers(layer_s, extra_s, most_layers)
                for layer_s, (extra_s, _), most_layers in zip(times, beside, draft.most_layers, strict=True)
            ]
        layers, passes = [cut for cut in cuts if cut is not None], []
        if len(layers) < len(cuts):
            return None
        for layer_s, (extra_s, before), cut in zip(times, beside, layers, strict=True):
            after = extra_s + _layers_s(layer_s, cut)
            passes.append(before * after / before.sum(axis=0))
        split = self._split(draft.structure, passes, prices)
        return (layers, split) if split else None

    def _split(
        self, structure: Structure, passes: Sequence[Floats], prices: Sequence[MixedKindCost]
    ) -> tuple[int, ...] | None:
        """Return the total rounds of micro-batches of every kind over all its replicas."""
        if structure.is_in_step(self.equal):
            return structure.rounds_in_step(self.global_batch)
        sizes = structure.sizes
        if len(structure.kinds) == 1:
            total, remainder = divmod(self.global_batch, sizes[0])
            return (total,) if not remainder and total >= structure.kinds[0].count else None
        counts = [kind.count for kind in structure.kinds]
        tables, overlaps = [], self.problem.framework.overlap.p2p_overlap
        for size, kind, times, price in zip(sizes, structure.kinds, passes, prices, strict=True):
            numbers = kind.round * np.arange(1, self.global_batch // size // kind.count + 2)
            forward_s, backward_s = times[:, None, :]
            send_s = np.array([[stage.send_s for stage in price.stages]])
            vp = np.full_like(numbers, kind.vp)
            makespan, exposed, _ = pipeline_s(forward_s, backward_s, send_s, numbers, vp, overlaps=overlaps)
            tables.append(np.maximum.accumulate(makespan + exposed))
        return split_microbatches(tables, counts, sizes, self.global_batch)

    def _beside_layers(self, price: MixedKindCost, layer_s: Floats) -> tuple[Floats, Floats]:
        """Return every stage's time besides its layers, and its forward and backward pass."""
        passes = np.array([[stage.forward_s, stage.backward_s] for stage in price.stages]).T
        layers_s = _layers_s(layer_s, [stage.layers for stage in price.stages])
        return np.maximum(passes.sum(axis=0) - layers_s, 0.0), passes

    def _allowed_bytes(self, stage: MixedStageCost) -> float:
        """Return the memory up to which a stage is safe, also where states fill all of it and prices are rounded."""
        safe = float(np.exp(self.most_z * self.problem.calibrations[stage.part].memory_spread))
        return stage.capacity_bytes * safe * (1 - ROUNDING)

    def _tighten(self, most_layers: Ints, price: MixedKindCost) -> None:
        """Reduce layers on stages that do not fit; memory has a constant part, so no fitting number is skipped."""
        for at, stage in enumerate(price.stages):
            allowed = self._allowed_bytes(stage)
            if stage.memory_bytes > allowed:
                most_layers[at] = min(
                    most_layers[at], stage.layers - 1, int(stage.layers * allowed / stage.memory_bytes)
                )

    def _shares(self, draft: _Draft, cost: MixedCost, prices: Sequence[MixedKindCost]) -> tuple[float, ...] | None:
        """Return shares of states with which all stages fit; None if even shares do, or no shares do."""
        if draft.structure.common.sharding == "none" or len(prices) == 1 or cost.oom_z <= self.most_z:
            return None
        state_shares = {_places_of(kind): kind.state_share for kind in cost.plan.kinds}
        max_shares = []
        for pipelines, price in zip(draft.structure.kinds, prices, strict=True):
            share = state_shares[pipelines.places]
            share = 1 / cost.plan.num_replicas if share is None else share
            room = [
                (self._allowed_bytes(stage) - stage.memory_bytes + stage.sharded_bytes) / stage.sharded_bytes * share
                if stage.sharded_bytes > 0
                else float(stage.memory_bytes <= self._allowed_bytes(stage))
                for stage in price.stages
            ]
            max_shares.append(min(*room, 1.0))
        return even_shares(max_shares, [kind.count for kind in draft.structure.kinds])


def _layers_s(layer_s: Floats, layers: Sequence[int]) -> Floats:
    ends = np.cumsum([0, *layers])
    return np.array([layer_s[at, ends[at] : ends[at + 1]].sum() for at in range(len(layers))])


def num_parts_of(plan: MixedPlan) -> tuple[int, int]:
    """Return what a colleague has to understand of a plan: kinds of replicas, and options with contexts and degrees."""
    options = sum(getattr(plan.common, axis.name) != axis.default for axis in SEARCHED)
    stages = [stage for kind in plan.kinds for stage in kind.stages]
    is_deep = any(kind.vp > 1 for kind in plan.kinds) or plan.schedule != Schedule.ONE_F_ONE_B
    return len(plan.kinds), options + (plan.common.cp > 1) + is_deep + len({stage.tp for stage in stages}) - 1


def order_of(most_z: float, cost: MixedCost) -> tuple[float, float, tuple[int, int], str]:
    """Sort key: plans that fit by their rate, then others by their distance from fitting; of equals the simplest."""
    return *_rank(most_z, cost), num_parts_of(cost.plan), repr(cost.plan)


def _rank(most_z: float, cost: MixedCost) -> tuple[float, float]:
    return max(cost.oom_z - most_z, 0.0), -cost.sequences_per_s
