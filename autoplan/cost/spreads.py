"""Spread of measured step times around predictions, from similar runs and from the novelties of a plan.

The variance of log(measured / predicted) has a few stated parts (`presets/spreads.toml`, fitted by
`benchmarks/accuracy.py --ship` to runs as they were predicted before anybody looked at their source): one for any step,
one for each component that is harder to predict than kernels, by its share of the step, one for steps shorter than a
second, one for each of `KINDS`, and one for each property of the plan that no run of its calibration had.  Plans
similar to the user's own runs have the spread of these runs instead.  Published runs do not set such a spread:
intervals from the parts contain as many runs of a left-out source as the spread of other publishers' runs, and are
narrower (`benchmarks/results`, accuracy).

What makes a run hard to predict makes it slower more often than faster, so all parts but the `SYMMETRIC` ones count
less below the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Bools, Floats, Ints, Rows, add_up
from autoplan.base.files import decode, read_table, shipped
from autoplan.base.units import check_positive
from autoplan.spec.calibration import TIME_SPREADS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import COMPONENTS, LAST_WAITS, TRAFFIC_TERMS

# Terms other than exposed traffic, launches and end of the step: kernels, and waiting in a pipeline.
UNEXPOSED = (*COMPONENTS["kernels"], "pipeline_bubble", *LAST_WAITS)

HARD = tuple(name for name in COMPONENTS if name != "kernels")
# Harder to predict however many runs a calibration has of them.
KINDS = ("narrow", "power", "mixture", "own_layers", "own_tuning")
NOVELTIES = ("framework", "generation", "device", "model", "precision", "size")
ABOUT_PROBLEM = ("framework", "generation", "device")  # novelties that `Calibration.unseen` names
GENERAL_PARTS = ("any_step", *HARD, "short", *KINDS, *NOVELTIES)
SYMMETRIC = np.isin(GENERAL_PARTS, ("any_step", "narrow", "power"))  # as many runs are faster than predicted as slower
NORMAL_90 = 1.6448536269514722  # half width of a two-sided 90 % interval in standard deviations
SHORT_S = 1.0  # shorter steps count as short
NARROW_BELOW = 8192  # hidden size, below which models count as narrow


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralSpreads:
    """Standard deviations of log(measured / predicted), added in quadrature.

    Those of components apply per share of the step; the variance of `short` is added for every halving of a step below
    a second, that of `size` for every doubling of the devices beyond the measured runs.
    """

    any_step: float
    host: float
    tensor: float
    experts: float
    states: float
    pipeline: float
    short: float  # fixed times per step, independent of its work: loader, host, clocks
    narrow: float  # narrow models under Megatron-LM's layers: small kernels are further from the rates of large ones
    power: float  # 16-bit products on Blackwell, whose rates differ between nodes with the power that these allow
    mixture: float  # mixtures of experts, which every model sizes, routes and launches differently
    own_layers: float  # layers of other code than Megatron-LM's, of whose kernels and settings fewer people publish
    own_tuning: float  # fine-tuning by such code, beside `own_layers`: loops, loaders and kernels differ most there
    framework: float  # priced like another, similar framework
    generation: float  # new device generation under this framework, or under any framework if the framework is new, too
    device: float  # a generation that is new under every framework
    model: float  # one of `special_parts`
    precision: float
    size: float
    below: float  # factor on all these but the `SYMMETRIC` ones for runs that are faster than predicted
    evidence: dict[str, str]  # evidence for each value

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "evidence":
                check_positive(field.name, getattr(self, field.name), at_most=5.0)

    @property
    def squares(self) -> Floats:
        """Variances of runs that are slower than predicted, in the order of `GENERAL_PARTS`."""
        return np.array([getattr(self, name) for name in GENERAL_PARTS]) ** 2


def faster_squares(squares: Floats, below: float) -> Floats:
    """Return the variances of runs that are faster than predicted, from those of slower ones."""
    return squares * np.where(SYMMETRIC, 1.0, below**2)


@lru_cache(maxsize=1)
def general_spreads() -> GeneralSpreads:
    """Return the shipped spreads."""
    return decode(GeneralSpreads, read_table(shipped()["spreads"]), "spreads.toml")


def component_shares(terms_s: Mapping[str, Floats]) -> Floats:
    """Share of each of `COMPONENTS` in every step, without stragglers: shape (plans, components)."""
    parts = np.stack([sum(terms_s[name] for name in names) for names in COMPONENTS.values()], axis=-1)
    return np.asarray(parts / parts.sum(axis=-1, keepdims=True))


def exposed_shares(terms_s: Mapping[str, Floats], step_s: Floats) -> Floats:
    """Return the share of every step outside of kernels and pipeline waits."""
    return np.asarray(1.0 - add_up(terms_s[name] for name in UNEXPOSED) / step_s)


def _traffic_shares(terms_s: Mapping[str, Floats], step_s: Floats) -> Floats:
    """Return the share of every step spent waiting for links."""
    return np.asarray(add_up(terms_s[name] for name in TRAFFIC_TERMS) / step_s)


def special_parts(problem: Problem) -> frozenset[str]:
    """Return the parts of a problem with separate formulas, beyond fully trained dense layers with full attention."""
    model, training = problem.model, problem.training
    parts = {
        "experts": model.moe,
        "latent": model.mla,
        "recurrent": model.mamba or model.linear_attention,
        "sinks": model.attention_sinks,
        "windows": model.window,
        "images": model.encoder,
        "adapters": training.finetuning,
        "preferences": training.preference,
    }
    return frozenset(name for name, part in parts.items() if part)


def width_of(precision: str) -> str:
    """Return the precision, with both 16-bit types as one, as their rates and traffic are equal."""
    return "bf16" if precision == "fp16" else precision


def kinds_of(problem: Problem) -> Floats:
    """Return 1 for each of `KINDS` that a problem is; with measured kernels only a mixture of experts counts."""
    is_predicted, is_own = not problem.timings.has_kernels, not problem.framework.megatron_layers
    is_kind = {
        "narrow": is_predicted and not is_own and problem.model.hidden_size < NARROW_BELOW,
        "power": is_predicted
        and problem.cluster.device.generation == "blackwell"
        and width_of(problem.training.precision) == "bf16",
        "mixture": problem.model.moe is not None,
        "own_layers": is_predicted and is_own,
        "own_tuning": is_predicted and is_own and problem.training.finetuning is not None,
    }
    return np.array([is_kind[name] for name in KINDS], dtype=np.float64)


def spread_kinds(problem: Problem, batch: PlanBatch, *, experts_apart: bool = True) -> Ints:
    """Return the index into `TIME_SPREADS` of every plan; plans that wait for the same things have similar errors.

    In order of precedence: experts, if they are a separate kind; plans beyond one leaf switch, which vary most;
    pipelines, which wait at every message; layers that wait for the network.
    """
    cluster = problem.cluster
    leaf_nodes = cluster.network.tiers[0].num_nodes if cluster.network.tiers else cluster.num_nodes
    beyond_leaf = batch.num_devices > leaf_nodes * cluster.devices_per_node
    leaves_domain = batch.tp * batch.cp > cluster.levels[-1].num_devices
    has_experts = np.full(len(batch), experts_apart and problem.model.moe is not None)
    names = ("experts_time_spread", "spine_time_spread", "pipeline_time_spread", "tensor_time_spread")
    return np.select(
        [has_experts, beyond_leaf, batch.pp > 1, leaves_domain], [TIME_SPREADS.index(name) for name in names], 0
    )


class Sides(NamedTuple):
    """Standard deviations of log(measured / predicted) of runs that are faster than predicted, and of slower ones."""

    below: Floats
    above: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Familiarity(Rows):
    """Familiarity of plans before their times are known: arrays have one element per plan."""

    kind_variance: Floats  # variance of runs of their kind
    weight: Floats  # weight of that against the general variance: 1, or 0 if something is new or there are no runs
    kinds: Floats  # 1 for each of `KINDS` that it is: shape (plans, kinds)
    novelty: Floats  # degree of each of `NOVELTIES`: shape (plans, novelties)
    machine: Floats  # variance of timings and devices that represent different ones
    links: Floats  # variance of link rates, for the share of a step spent waiting for links
    exposed_share: Floats  # largest exposed share at which a plan is similar to the runs

    @classmethod
    def of(cls, problem: Problem, batch: PlanBatch) -> Familiarity:
        """Compare plans with the runs of the problem's calibration."""
        calibration, size = problem.calibration, len(batch)
        apart = calibration.experts_time_spread is not None
        kind_spreads = calibration.time_spreads[spread_kinds(problem, batch, experts_apart=apart)]
        # A device with measured kernels is not of an unknown generation, and its layers are timed.
        is_measured = problem.timings.has_kernels
        degrees: dict[str, Floats | float] = {
            name: float(name in calibration.unseen and not (is_measured and name != "framework"))
            for name in ABOUT_PROBLEM
        }
        if calibration.blocks:
            degrees["model"] = float(not special_parts(problem) <= set(calibration.blocks))
        if calibration.precisions:
            degrees["precision"] = float(width_of(problem.training.precision) not in calibration.precisions)
        if calibration.most_devices:
            degrees["size"] = np.sqrt(np.maximum(np.log2(batch.num_devices / calibration.most_devices), 0.0))
        novelty = np.column_stack([np.broadcast_to(degrees.get(name, 0.0), size) for name in NOVELTIES])
        return cls(
            kind_variance=np.nan_to_num(kind_spreads) ** 2,
            weight=np.where(np.isnan(kind_spreads) | novelty.any(axis=1), 0.0, 1.0),
            kinds=np.tile(kinds_of(problem), (size, 1)),
            novelty=novelty,
            machine=np.full(size, problem.machine_spread**2),
            links=np.full(size, problem.link_spread**2),
            exposed_share=np.full(size, calibration.exposed_share),
        )

    @classmethod
    def full(cls, size: int) -> Familiarity:
        """Return the familiarity of fully known plans, as a start for `lessen`."""
        none = np.zeros(size)
        novelty = np.zeros((size, len(NOVELTIES)))
        return cls(
            kind_variance=none.copy(),
            weight=none + 1.0,
            kinds=np.zeros((size, len(KINDS))),
            novelty=novelty,
            machine=none.copy(),
            links=none.copy(),
            exposed_share=none + 1.0,
        )

    def lessen(self, rows: Ints, parts: Familiarity) -> None:
        """Limit the familiarity of the plans at `rows` to that of their `parts`."""
        for name in ("kind_variance", "kinds", "novelty", "machine", "links"):
            np.maximum.at(getattr(self, name), rows, getattr(parts, name))
        for name in ("weight", "exposed_share"):
            np.minimum.at(getattr(self, name), rows, getattr(parts, name))

    def is_less_than(self, known: Familiarity) -> bool:
        """Return whether a machine is less known here than to `known`, about the same plans."""
        names = ("kinds", "novelty", "machine", "links")
        return any(bool((getattr(self, name) > getattr(known, name)).any()) for name in names)

    def without_measurements(self, unknown: Familiarity, of_kernels: Bools, of_links: Bools) -> Familiarity:
        """Return the familiarity as `unknown` where nothing that was measured serves the kernels, or the links."""
        return replace(
            self,
            weight=np.where(of_kernels, unknown.weight, self.weight),
            kinds=np.where(of_kernels[:, None], unknown.kinds, self.kinds),
            novelty=np.where(of_kernels[:, None], unknown.novelty, self.novelty),
            machine=np.where(of_kernels, np.maximum(unknown.machine, self.machine), self.machine),
            links=np.where(of_links, unknown.links, self.links),
        )

    def own_parts(self, terms_s: Mapping[str, Floats], step_s: Floats) -> tuple[Floats, Floats]:
        """Return (weight of the runs' variance, coefficients of `squares`): shapes (plans), (plans, parts)."""
        weight = np.where(exposed_shares(terms_s, step_s) <= self.exposed_share, self.weight, 0.0)
        shares = component_shares(terms_s)[:, [list(COMPONENTS).index(name) for name in HARD]]
        short = np.sqrt(np.maximum(np.log2(SHORT_S / step_s), 0.0))
        general = np.column_stack([np.ones(len(weight)), shares, short, self.kinds, self.novelty]) ** 2
        return weight, general * (1.0 - weight)[:, None]

    def sides(self, terms_s: Mapping[str, Floats], step_s: Floats) -> Sides:
        """Return the spreads of every plan, given its times."""
        weight, parts = self.own_parts(terms_s, step_s)
        squares = general_spreads().squares
        by_runs, equipment = weight * self.kind_variance, self.equipment(terms_s, step_s)
        general = Sides(faster_squares(squares, general_spreads().below), squares)
        below, above = (
            np.sqrt(by_runs + own + add_up(parts[:, at] * square for at, square in enumerate(side)))
            for own, side in zip(equipment, general, strict=True)
        )
        return Sides(below, above)

    def equipment(self, terms_s: Mapping[str, Floats], step_s: Floats) -> Sides:
        """Variances of devices and links on both sides: a slow link costs more of a step than a fast one saves."""
        shares, reach = _traffic_shares(terms_s, step_s), NORMAL_90 * np.sqrt(self.links)
        faster, slower = (np.log1p(shares * np.expm1(sign * reach)) / NORMAL_90 for sign in (-1.0, 1.0))
        return Sides(self.machine + faster**2, self.machine + slower**2)

    @property
    def least(self) -> Floats:
        """Lower bound on every plan's spread on the side of slower runs, for any times."""
        squares = general_spreads().squares
        always = np.column_stack([np.ones(len(self.kind_variance)), self.kinds, self.novelty])
        general = always**2 @ squares[[GENERAL_PARTS.index(name) for name in ("any_step", *KINDS, *NOVELTIES)]]
        by_runs = self.weight * self.kind_variance + (1.0 - self.weight) * general
        return np.sqrt(np.where(self.exposed_share < 1, np.minimum(by_runs, general), by_runs) + self.machine)


# Largest share of a step in the component that is hardest to predict, for candidates for the surest plan.
_HARD_SHARE = 0.25


def spread_range(problem: Problem) -> tuple[float, float]:
    """Return (smallest spread of any plan, largest one expected of a candidate for the fastest), for slower runs."""
    calibration, general, squares = problem.calibration, general_spreads(), general_spreads().squares
    usual = general.any_step**2 + kinds_of(problem) @ squares[[GENERAL_PARTS.index(name) for name in KINDS]]
    hardest = usual + _HARD_SHARE**2 * squares[1 : 1 + len(HARD)].max()
    apart = calibration.experts_time_spread is not None and problem.model.moe is not None
    variances = calibration.time_spreads[[(name == "experts_time_spread") == apart for name in TIME_SPREADS]] ** 2
    variances = variances[~np.isnan(variances)]
    is_limited = bool(calibration.blocks or calibration.precisions or calibration.most_devices)
    least, largest = (float(variances.min()), float(variances.max())) if len(variances) else (usual, hardest)
    if calibration.exposed_share < 1 or is_limited:
        least, largest = min(least, usual), max(largest, usual)
    machine, links = problem.machine_spread**2, (_HARD_SHARE * problem.link_spread) ** 2
    return float(np.sqrt(least + machine)), float(np.sqrt(largest + machine + links))
