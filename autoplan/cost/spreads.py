"""Spread of measured step times around predictions, from similar runs and from how hard a plan is to predict.

Intervals rest on first errors alone: those of published runs as they were predicted before anybody looked at their
source.  Wide dense models under Megatron-LM's layers have the narrowest interval (`plain`); five factors, each of a
property of the problem, widen it (`presets/spreads.toml`, fitted by `benchmarks/accuracy.py --ship`).  Plans similar to
the user's own runs have the spread of these runs instead.

What makes a run hard to predict makes it slower, not faster: all factors but `BOTH_SIDES` widen the upper side alone.
Whether a framework, generation, precision, block or size has been measured before changes these errors by too little to
be seen in 1,500 runs (`docs/accuracy.md`), so it decides only whether one's own runs speak for a plan.
"""

from __future__ import annotations

import math
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

FACTORS = ("other", "halving", "own_layers", "mixture", "own_tuning")  # of `GeneralSpreads`, in order
BOTH_SIDES = np.isin(FACTORS, ("other", "halving"))  # the others make no run faster than predicted
NORMAL_90 = 1.6448536269514722  # half width of a two-sided 90 % interval in standard deviations
WIDE = 8192  # hidden size, from which models count as wide
MOST_HALVINGS = 3.0  # of that: no run says how much harder smaller models are


class Sides(NamedTuple):
    """Standard deviations of log(measured / predicted) of runs that are faster than predicted, and of slower ones."""

    below: Floats
    above: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralSpreads:
    """Spread of runs of wide dense models under Megatron-LM's layers, and the factors on it of all others."""

    plain: float
    other: float  # every other run
    halving: float  # every halving of the hidden size below `WIDE`: small kernels are further from the usual rates
    own_layers: float  # layers of other code than Megatron-LM's, of whose kernels and settings fewer people publish
    mixture: float  # mixtures of experts, which every model sizes, routes and launches differently
    own_tuning: float  # fine-tuning by such other code, beside `own_layers`: loops, loaders and kernels differ most
    evidence: dict[str, str]  # evidence for each value

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "evidence":
                check_positive(field.name, getattr(self, field.name), at_most=10.0)

    def sides(self, kinds: Floats) -> Sides:
        """Return the spreads of plans, of which `kinds` has the exponents of `FACTORS`: shape (plans, factors)."""
        logs = np.log([getattr(self, name) for name in FACTORS])
        below = self.plain * np.exp(kinds[:, BOTH_SIDES] @ logs[BOTH_SIDES])
        return Sides(below, below * np.exp(kinds[:, ~BOTH_SIDES] @ logs[~BOTH_SIDES]))


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
    """Return the exponents of `FACTORS` for a problem; with measured kernels only a mixture of experts counts."""
    is_mixture, is_own = problem.model.moe is not None, not problem.framework.megatron_layers
    halvings = min(max(math.log2(WIDE / problem.model.hidden_size), 0.0), MOST_HALVINGS)
    if problem.timings.has_kernels:
        is_own, halvings = False, 0.0
    exponents = {
        "other": not problem.timings.has_kernels and (is_own or is_mixture or halvings > 0),
        "halving": halvings,
        "own_layers": is_own,
        "mixture": is_mixture,
        "own_tuning": is_own and problem.training.finetuning is not None,
    }
    return np.array([exponents[name] for name in FACTORS], dtype=np.float64)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Familiarity(Rows):
    """Familiarity of plans before their times are known: arrays have one element per plan."""

    kind_variance: Floats  # variance of runs of their kind
    weight: Floats  # weight of that against the general variance: 1, or 0 if something is new or there are no runs
    kinds: Floats  # exponents of `FACTORS`: shape (plans, factors)
    machine: Floats  # variance of timings and devices that represent different ones
    links: Floats  # variance of link rates, for the share of a step spent waiting for links
    exposed_share: Floats  # largest exposed share at which a plan is similar to the runs

    @classmethod
    def of(cls, problem: Problem, batch: PlanBatch) -> Familiarity:
        """Compare plans with the runs of the problem's calibration."""
        calibration, size = problem.calibration, len(batch)
        apart = calibration.experts_time_spread is not None
        kind_spreads = calibration.time_spreads[spread_kinds(problem, batch, experts_apart=apart)]
        is_new = np.isnan(kind_spreads)
        if calibration.blocks:
            is_new |= not special_parts(problem) <= set(calibration.blocks)
        if calibration.precisions:
            is_new |= width_of(problem.training.precision) not in calibration.precisions
        if calibration.most_devices:
            is_new |= batch.num_devices > calibration.most_devices
        return cls(
            kind_variance=np.nan_to_num(kind_spreads) ** 2,
            weight=np.where(is_new, 0.0, 1.0),
            kinds=np.tile(kinds_of(problem), (size, 1)),
            machine=np.full(size, problem.machine_spread**2),
            links=np.full(size, problem.link_spread**2),
            exposed_share=np.full(size, calibration.exposed_share),
        )

    @classmethod
    def full(cls, size: int) -> Familiarity:
        """Return the familiarity of fully known plans, as a start for `lessen`."""
        none = np.zeros(size)
        return cls(
            kind_variance=none.copy(),
            weight=none + 1.0,
            kinds=np.zeros((size, len(FACTORS))),
            machine=none.copy(),
            links=none.copy(),
            exposed_share=none + 1.0,
        )

    def lessen(self, rows: Ints, parts: Familiarity) -> None:
        """Limit the familiarity of the plans at `rows` to that of their `parts`."""
        for name in ("kind_variance", "kinds", "machine", "links"):
            np.maximum.at(getattr(self, name), rows, getattr(parts, name))
        for name in ("weight", "exposed_share"):
            np.minimum.at(getattr(self, name), rows, getattr(parts, name))

    def is_less_than(self, known: Familiarity) -> bool:
        """Return whether a machine is less known here than to `known`, about the same plans."""
        names = ("kinds", "machine", "links")
        return any(bool((getattr(self, name) > getattr(known, name)).any()) for name in names)

    def without_measurements(self, unknown: Familiarity, of_kernels: Bools, of_links: Bools) -> Familiarity:
        """Return the familiarity as `unknown` where nothing that was measured serves the kernels, or the links."""
        return replace(
            self,
            weight=np.where(of_kernels, unknown.weight, self.weight),
            kinds=np.where(of_kernels[:, None], unknown.kinds, self.kinds),
            machine=np.where(of_kernels, np.maximum(unknown.machine, self.machine), self.machine),
            links=np.where(of_links, unknown.links, self.links),
        )

    def sides(self, terms_s: Mapping[str, Floats], step_s: Floats) -> Sides:
        """Return the spreads of every plan, given its times."""
        weight = np.where(exposed_shares(terms_s, step_s) <= self.exposed_share, self.weight, 0.0)
        general, equipment = general_spreads().sides(self.kinds), self.equipment(terms_s, step_s)
        below, above = (
            np.sqrt(weight * self.kind_variance + (1.0 - weight) * spread**2 + own)
            for spread, own in zip(general, equipment, strict=True)
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
        general = general_spreads().sides(self.kinds).above ** 2
        by_runs = self.weight * self.kind_variance + (1.0 - self.weight) * general
        return np.sqrt(np.where(self.exposed_share < 1, np.minimum(by_runs, general), by_runs) + self.machine)


# Largest share of a step that waits for links, for candidates for the surest plan.
_LINK_SHARE = 0.25


def spread_range(problem: Problem) -> tuple[float, float]:
    """Return (smallest spread of any plan, largest one expected of a candidate for the fastest), for slower runs."""
    calibration = problem.calibration
    usual = float(general_spreads().sides(kinds_of(problem)[None]).above[0]) ** 2
    apart = calibration.experts_time_spread is not None and problem.model.moe is not None
    variances = calibration.time_spreads[[(name == "experts_time_spread") == apart for name in TIME_SPREADS]] ** 2
    variances = variances[~np.isnan(variances)]
    is_limited = bool(calibration.blocks or calibration.precisions or calibration.most_devices)
    least, largest = (float(variances.min()), float(variances.max())) if len(variances) else (usual, usual)
    if calibration.exposed_share < 1 or is_limited:
        least, largest = min(least, usual), max(largest, usual)
    machine, links = problem.machine_spread**2, (_LINK_SHARE * problem.link_spread) ** 2
    return float(np.sqrt(least + machine)), float(np.sqrt(largest + machine + links))
