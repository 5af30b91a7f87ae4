"""Confidence in the choice: plans that the model cannot distinguish from the best, and the choice at a quantile.

Errors of two plans on one cluster, model and framework are strongly correlated: a wrong rate of matrix products shifts
all of them.  The interval of the *ratio* of two plans is therefore decisive.  Components have independent errors: to
the extent that two plans spend their steps on different components, their errors are independent and the variances from
the calibration add up.  An error of every pair is added, fitted to measured runs (`benchmarks/choice.py`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from autoplan.base.arrays import Floats
from autoplan.cost.spreads import NORMAL_90, Familiarity, component_shares, spread_range
from autoplan.search.findings import KEPT_WINNERS
from autoplan.search.ranking import TIE
from autoplan.spec.axes import SEARCHED
from autoplan.spec.axis import Kind
from autoplan.spec.estimate import VERDICTS
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.problem import Problem
from autoplan.spec.search_result import Confidence, Contender, RankedPlan, SearchResult

# Standard deviation of the logarithm of any ratio, in addition to the calibration's part: fitted to 30,000 pairs of
# runs from 19 published sources.  Fits without one of them give .040 to .070, with which the 90 % interval contains .90
# of the pairs of the one left out, averaged over sources (benchmarks/results, choice).
OWN_SPREAD = 0.055

_SEARCHED_FLAGS = tuple(axis.name for axis in SEARCHED if axis.kind is Kind.FLAG)
MAX_CONTENDERS = 20  # whose plans are kept in the answer


def apart(parts: Floats, other_parts: Floats) -> Floats:
    """Return the share of the step (0 to 1) that two plans spend on different components, from `component_shares`."""
    return np.asarray(np.abs(parts - other_parts).sum(axis=-1) / 2)


def ratio_spreads(differing: Floats, variances: Floats, same_plan: float = OWN_SPREAD) -> Floats:
    """Spread of log ratios of plans by the share `differing`; `variances` are sums of both plans' variances."""
    return np.asarray(np.sqrt(same_plan**2 + differing * variances))


def spread_of(candidate: RankedPlan) -> float:
    """Standard deviation of log(measured / predicted) of a plan's step, the mean of both sides."""
    return math.log(candidate.high_s / candidate.low_s) / (2 * NORMAL_90)


def is_as_safe(candidate: RankedPlan, reference: RankedPlan) -> bool:
    """Return whether a plan is at least as likely to fit as another one."""
    return VERDICTS.index(candidate.verdict) <= VERDICTS.index(reference.verdict)


def kind_of(plan: ParallelPlan) -> Hashable:
    """Return the choices that define a kind; plans of a kind differ only in layout, split of states or interleaving."""
    return (
        (plan.pp, plan.tp, plan.cp, plan.ep, plan.etp, plan.dp, plan.micro_batch, plan.schedule),
        (plan.recompute, plan.recompute_modules, plan.recompute_num_layers),
        (plan.sharding in ("zero2", "zero3"), plan.offload, *(getattr(plan, name) for name in _SEARCHED_FLAGS)),
    )


def distinct(result: SearchResult) -> tuple[RankedPlan, ...]:
    """Return the best kept plan of each kind, best first."""
    z = normal_z(result.certificate.quantile)
    plans = sorted((*result.ranked, *result.rivals), key=lambda candidate: at_quantile(candidate, z))
    return first_of_kinds((result.rivals[0], *plans))


def first_of_kinds(plans: Iterable[RankedPlan]) -> tuple[RankedPlan, ...]:
    """Return the first plan of each kind."""
    first: dict[Hashable, RankedPlan] = {}
    for candidate in plans:
        first.setdefault(kind_of(candidate.plan), candidate)
    return tuple(first.values())


def choice_of(result: SearchResult) -> Confidence:
    """Return the plans that the model cannot distinguish from the best: the 90 % interval of their ratio includes 1."""
    best, *slower_plans = distinct(result)
    if not slower_plans:
        return Confidence(runner_up=None, ratio=None, width=None, num_contenders=0, contenders=())
    terms = {name: np.array([candidate.terms_s[name] for candidate in (best, *slower_plans)]) for name in best.terms_s}
    parts, spreads = component_shares(terms), np.array([spread_of(candidate) for candidate in (best, *slower_plans)])
    ratio = np.array([candidate.s_per_sequence for candidate in slower_plans]) / best.s_per_sequence
    variances = spreads[1:] ** 2 + spreads[0] ** 2
    width = np.exp(NORMAL_90 * ratio_spreads(apart(parts[1:], parts[0]), variances))
    inside = np.flatnonzero(ratio <= width)
    contenders = tuple(
        Contender(
            plan=slower_plans[at].plan,
            ratio=float(ratio[at]),
            low=float(ratio[at] / width[at]),
            high=float(ratio[at] * width[at]),
        )
        for at in inside[:MAX_CONTENDERS]
    )
    return Confidence(
        runner_up=slower_plans[0],
        ratio=float(ratio[0]),
        width=float(width[0]),
        num_contenders=len(inside),
        contenders=contenders,
    )


def compared(candidate: RankedPlan, best: RankedPlan) -> Contender:
    """Compare the time of a plan with the best one's; it may be faster if 1 is inside the interval."""
    terms = {name: np.array([candidate.terms_s[name], best.terms_s[name]]) for name in best.terms_s}
    differing = apart(*component_shares(terms))
    variances = np.asarray(spread_of(candidate) ** 2 + spread_of(best) ** 2)
    width = float(np.exp(NORMAL_90 * ratio_spreads(differing, variances)))
    ratio = candidate.s_per_sequence / best.s_per_sequence
    return Contender(plan=candidate.plan, ratio=ratio, low=ratio / width, high=ratio * width)


# -- the choice at a quantile -----------------------------------------------------------------------------------------


def normal_z(quantile: float | None) -> float:
    """Return the quantile in standard deviations; None is the median, which an estimate predicts."""
    return 0.0 if quantile is None else NormalDist().inv_cdf(quantile)


def at_quantile(candidate: RankedPlan, z: float) -> float:
    """Seconds per sequence of a plan, `z` standard deviations (of slower runs) above the prediction."""
    return candidate.s_per_sequence * (candidate.high_s / candidate.step_s) ** (z / NORMAL_90)


def robust_margin(problem: Problem, quantile: float) -> float:
    """Relative margin above the fastest plan's time that contains the plan with the smallest `quantile`.

    A slower plan is also slower at the quantile, even with the narrowest possible interval against the widest.
    """
    return math.expm1(normal_z(quantile) * float(np.ptp(spread_range(problem))))


def robust_order(problem: Problem, result: SearchResult, quantile: float) -> SearchResult:
    """Return `result` with plans ordered by that quantile of their step times.

    No plan of a cell is faster than the cell's best, nor has a smaller spread than the minimum of its kind.  The choice
    is therefore proven if all cells within `robust_margin`, which the search must have used, are among the rivals, and
    none of these would be better even with the minimum spread.
    """
    z, margin, fastest = normal_z(quantile), robust_margin(problem, quantile), result.rivals[0].s_per_sequence
    rivals = tuple(sorted(result.rivals, key=lambda candidate: at_quantile(candidate, z)))
    old, least = result.certificate, at_quantile(rivals[0], z) * (1 - TIE)
    batch = problem.batch([candidate.plan for candidate in rivals])
    floors = np.exp(z * Familiarity.of(problem, batch).least) * [candidate.s_per_sequence for candidate in rivals]
    reach = fastest * (1 + margin) * math.exp(z * spread_range(problem)[0])
    # If there are more plans than a search keeps, it drops only plans slower than all kept ones.
    is_complete = old.priced <= KEPT_WINNERS or max(rival.s_per_sequence for rival in rivals) >= fastest * (1 + margin)
    is_complete = is_complete and bool((floors >= least).all()) and reach >= least
    certificate = replace(
        old, quantile=quantile, best_step_s=rivals[0].step_s, proven=old.proven and is_complete, margin=margin
    )
    ranked = tuple(sorted(result.ranked, key=lambda candidate: at_quantile(candidate, z)))
    return replace(result, ranked=ranked, rivals=rivals, certificate=certificate)
