"""Spread of the step time around its prediction, from runs like a plan and from what is new about it.

The logarithm of measured over predicted step has a variance of a few stated parts (`presets/spreads.toml`, fitted by
`benchmarks/accuracy.py --ship` to runs whose whole source is left out): one of any step, one for each component that
is harder to predict than kernels, by the share of the step that it takes, one for steps of less than a second, one for
mixtures of experts, and one for each property of the plan that no run of its calibration had.  Plans like runs of
one's own have the spread of these runs instead.  Published runs have none: the parts hold as many runs of a source left
out as the spread of other publishers' runs did, at a lesser width (`benchmarks/results`, accuracy).

What is not known of a run makes it slower more often than faster, so that these parts count less below the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autoplan.base.arrays import Floats, Ints, Rows, add_up
from autoplan.base.files import decode, read_table, shipped
from autoplan.base.units import check_positive
from autoplan.spec.calibration import TIME_SPREADS
from autoplan.spec.plan import PlanBatch
from autoplan.spec.problem import Problem
from autoplan.spec.terms import COMPONENTS, OTHER_RANKS, TRAFFIC_TERMS

# Terms of a step that are no exposed traffic, launches or end of the step: kernels, and waiting in a pipeline.
UNEXPOSED = (*COMPONENTS["kernels"], "pipeline_bubble", *OTHER_RANKS)

HARD = tuple(name for name in COMPONENTS if name != "kernels")
NOVELTIES = ("framework", "generation", "model", "precision", "size")
GENERAL_PARTS = ("any_step", *HARD, "short", "mixture", *NOVELTIES)
NORMAL_90 = 1.6448536269514722  # half width of a two-sided 90 % interval in standard deviations
SHORT_S = 1.0  # below it a step counts as short


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneralSpreads:
    """Standard deviations of log(measured / predicted), added in quadrature.

    Those of components are by the share of the step that they take; the variance of `short` comes with every halving
    of a step below a second, that of `size` with every doubling of the devices beyond those of measured runs.
    """

    any_step: float
    host: float
    tensor: float
    experts: float
    states: float
    pipeline: float
    short: float  # what takes the same time in every step, whatever its work: loader, host, clocks
    mixture: float  # of experts: every model's are sized, routed and launched in a way of their own
    framework: float  # priced as another one that works like it
    generation: float  # of devices, under this framework; under any, for a framework that is new itself
    model: float  # one of `special_parts`
    precision: float
    size: float
    below: float  # of all these, what counts for runs that are faster than predicted
    evidence: dict[str, str]  # what each rests on

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "evidence":
                check_positive(field.name, getattr(self, field.name), at_most=5.0)

    @property
    def squares(self) -> Floats:
        """Variances in the order of the columns of `general_parts`."""
        return np.array([getattr(self, name) for name in GENERAL_PARTS]) ** 2


@lru_cache(maxsize=1)
def general_spreads() -> GeneralSpreads:
    """Return the shipped spreads."""
    return decode(GeneralSpreads, read_table(shipped()["spreads"]), "spreads.toml")


def component_shares(terms_s: Mapping[str, Floats]) -> Floats:
    """Share of every step that each of `COMPONENTS` takes, stragglers aside: shape (plans, components)."""
    parts = np.stack([sum(terms_s[name] for name in names) for names in COMPONENTS.values()], axis=-1)
    return np.asarray(parts / parts.sum(axis=-1, keepdims=True))


def exposed_shares(terms_s: Mapping[str, Floats], step_s: Floats) -> Floats:
    """Return the share of every step that is neither kernels nor waiting in a pipeline."""
    return np.asarray(1.0 - add_up(terms_s[name] for name in UNEXPOSED) / step_s)


def traffic_shares(terms_s: Mapping[str, Floats], step_s: Floats) -> Floats:
    """Return the share of every step in which links are waited for."""
    return np.asarray(add_up(terms_s[name] for name in TRAFFIC_TERMS) / step_s)


def special_parts(problem: Problem) -> frozenset[str]:
    """Return what has formulas of its own beside dense layers with full attention that are trained as a whole."""
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
    """Return the precision, both of 16 bits as one: their rates and traffic are alike."""
    return "bf16" if precision == "fp16" else precision


def spread_kinds(problem: Problem, batch: PlanBatch, *, experts_apart: bool = True) -> Ints:
    """Return the index into `TIME_SPREADS` of every plan: errors are alike where plans wait for the same things.

    Experts come first, unless they are no kind of their own; then, beyond one leaf switch everything varies most; then
    come pipelines, which wait at every message, and layers that wait for the network.
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
    """Knowledge of plans before their times are known: arrays have one element per plan."""

    own: Floats  # variance of the runs of their kind
    weight: Floats  # of that, beside the general one: 1, or 0 where something is new or no run tells it
    mixture: Floats  # 1 where the model has experts
    news: Floats  # how much of each of `NOVELTIES` is new: shape (plans, novelties)
    machine: Floats  # variance of timings and devices that stand for unlike ones
    links: Floats  # variance of the rates of links, for the share of a step in which they are waited for
    exposed_share: Floats  # up to which a plan is like the runs

    @classmethod
    def of(cls, problem: Problem, batch: PlanBatch) -> Familiarity:
        """Compare plans with the runs of the problem's calibration."""
        calibration, size = problem.calibration, len(batch)
        apart = calibration.experts_time_spread is not None
        own = calibration.time_spreads[spread_kinds(problem, batch, experts_apart=apart)]
        news = np.zeros((size, len(NOVELTIES)))
        # Kernels that were measured on the device itself are none of an unknown generation.
        measured_here = ("generation",) if problem.timings.has_kernels else ()
        for at, name in enumerate(NOVELTIES[:2]):
            news[:, at] = name in calibration.unseen and name not in measured_here
        if calibration.blocks:
            news[:, 2] = not special_parts(problem) <= set(calibration.blocks)
        if calibration.precisions:
            news[:, 3] = width_of(problem.training.precision) not in calibration.precisions
        if calibration.most_devices:
            news[:, 4] = np.sqrt(np.maximum(np.log2(batch.num_devices / calibration.most_devices), 0.0))
        return cls(
            own=np.nan_to_num(own) ** 2,
            weight=np.where(np.isnan(own) | news.any(axis=1), 0.0, 1.0),
            mixture=np.full(size, float(problem.model.moe is not None)),
            news=news,
            machine=np.full(size, problem.machine_spread**2),
            links=np.full(size, problem.link_spread**2),
            exposed_share=np.full(size, calibration.exposed_share),
        )

    @classmethod
    def full(cls, size: int) -> Familiarity:
        """Return that of this many plans of which all is known, for `lessen`."""
        none = np.zeros(size)
        news = np.zeros((size, len(NOVELTIES)))
        return cls(
            own=none.copy(),
            weight=none + 1.0,
            mixture=none.copy(),
            news=news,
            machine=none.copy(),
            links=none.copy(),
            exposed_share=none + 1.0,
        )

    def lessen(self, rows: Ints, parts: Familiarity) -> None:
        """Make the plans at `rows` no better known than those of `parts` are, which stand for parts of them."""
        for name in ("own", "mixture", "news", "machine", "links"):
            np.maximum.at(getattr(self, name), rows, getattr(parts, name))
        for name in ("weight", "exposed_share"):
            np.minimum.at(getattr(self, name), rows, getattr(parts, name))

    def own_parts(self, terms_s: Mapping[str, Floats], step_s: Floats) -> tuple[Floats, Floats]:
        """(weight of the plans' own spread, general parts of the variance, for `squares`): (plans), (plans, parts)."""
        weight = np.where(exposed_shares(terms_s, step_s) <= self.exposed_share, self.weight, 0.0)
        shares = component_shares(terms_s)[:, [list(COMPONENTS).index(name) for name in HARD]]
        short = np.sqrt(np.maximum(np.log2(SHORT_S / step_s), 0.0))
        general = np.column_stack([np.ones(len(weight)), shares, short, self.mixture, self.news]) ** 2
        return weight, general * (1.0 - weight)[:, None]

    def sides(self, terms_s: Mapping[str, Floats], step_s: Floats) -> Sides:
        """Spreads of every plan, whose times are these."""
        weight, parts = self.own_parts(terms_s, step_s)
        general = add_up(parts[:, at] * square for at, square in enumerate(general_spreads().squares))
        faster, slower = self.equipment(terms_s, step_s)
        below = weight * self.own + faster + general_spreads().below ** 2 * general
        return Sides(np.sqrt(below), np.sqrt(weight * self.own + slower + general))

    def equipment(self, terms_s: Mapping[str, Floats], step_s: Floats) -> Sides:
        """Variances of devices and links, on both sides: a slow link takes more of a step than a fast one spares."""
        shares, reach = traffic_shares(terms_s, step_s), NORMAL_90 * np.sqrt(self.links)
        faster, slower = (np.log1p(shares * np.expm1(sign * reach)) / NORMAL_90 for sign in (-1.0, 1.0))
        return Sides(self.machine + faster**2, self.machine + slower**2)

    @property
    def least(self) -> Floats:
        """The least spread that every plan may have on the side of slower runs, whatever its times are."""
        squares = general_spreads().squares
        always = np.column_stack([np.ones(len(self.own)), self.mixture, self.news])
        general = always**2 @ squares[[GENERAL_PARTS.index(name) for name in ("any_step", "mixture", *NOVELTIES)]]
        by_runs = self.weight * self.own + (1.0 - self.weight) * general
        return np.sqrt(np.where(self.exposed_share < 1, np.minimum(by_runs, general), by_runs) + self.machine)


# Of a step in the component that is hardest to predict: beyond it a plan is no candidate for the surest one.
_HARD_SHARE = 0.25


def spread_range(problem: Problem) -> tuple[float, float]:
    """(least spread of any plan, the most that a plan which may be the fastest is expected to have), of slower runs."""
    calibration, general, squares = problem.calibration, general_spreads(), general_spreads().squares
    usual = general.any_step**2 + (general.mixture**2 if problem.model.moe else 0.0)
    hardest = usual + _HARD_SHARE**2 * squares[1 : 1 + len(HARD)].max()
    apart = calibration.experts_time_spread is not None and problem.model.moe is not None
    own = calibration.time_spreads[[(name == "experts_time_spread") == apart for name in TIME_SPREADS]] ** 2
    own = own[~np.isnan(own)]
    is_limited = bool(calibration.blocks or calibration.precisions or calibration.most_devices)
    least, largest = (float(own.min()), float(own.max())) if len(own) else (usual, hardest)
    if calibration.exposed_share < 1 or is_limited:
        least, largest = min(least, usual), max(largest, usual)
    machine, links = problem.machine_spread**2, (_HARD_SHARE * problem.link_spread) ** 2
    return float(np.sqrt(least + machine)), float(np.sqrt(largest + machine + links))
