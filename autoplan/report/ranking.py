"""Ranked plans of an answer, and why the first is better than the second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import NormalDist

from rich.console import Console

from autoplan.base.units import format_bytes, format_percent, format_seconds
from autoplan.cost.spreads import NORMAL_90
from autoplan.report.terminal import END_OF_STEP, MIN_GAP, WAITS, print_table, term_name
from autoplan.spec.mixed_result import MixedCost
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.search_result import Confidence, Flip, ObviousPlan, Plan, RankedPlan, Sensitivity

SHOWN_PLANS = 10
SHOWN_REASONS = 3
MIN_REASON = 0.02  # relative to the largest
MIN_OFF = 0.001  # less would show as 0.0 %
SHOWN_FLIPS = 3
LESS_SIMPLE = ", but less simple"  # of a plan that is faster than the simplest one that is about as fast


def slower(behind: float, *, but: str = "") -> str:
    """Return the share by which a step is slower or, for a negative `behind`, faster, with `but` added then."""
    if abs(behind) < MIN_GAP:
        return "as fast"
    return f"{format_percent(abs(behind))} {'slower' if behind > 0 else f'faster{but}'}"


def print_ranking(console: Console, plans: Sequence[RankedPlan], quantile: float | None) -> None:
    """Print the plans in order, with the quantile of the step if they are sorted by one."""
    has_batches = len({plan.plan.global_batch for plan in plans}) > 1
    columns = [("#", True), ("plan", False), ("step", True), ("tokens/s", True), ("MFU", True), ("memory", True)]
    if quantile is not None:
        columns.insert(3, (f"{quantile:g} quantile", True))
    rows = []
    for at, plan in enumerate(plans, 1):
        cells = [
            str(at),
            plan.plan.describe(),
            format_seconds(plan.step_s),
            f"{plan.tokens_per_s_per_device:,.0f}",
            format_percent(plan.mfu),
            format_bytes(plan.memory_bytes),
        ]
        if quantile is not None:
            spreads = NormalDist().inv_cdf(quantile) / NORMAL_90
            cells.insert(3, format_seconds(plan.step_s * (plan.high_s / plan.step_s) ** spreads))
        rows.append([*cells, f"{plan.plan.global_batch:,}"] if has_batches else cells)
    print_table(console, [*columns, ("batch", True)] if has_batches else columns, rows, keep=3)


def why_first(best: RankedPlan, second: RankedPlan, *, keeps_today: bool = False) -> str:
    """Explain why the winner beats the next best plan: the terms in which their times per sequence differ most."""
    behind = second.s_per_sequence / best.s_per_sequence - 1.0
    if abs(behind) < MIN_GAP:
        reason = "the plan with the fewest changes" if keeps_today else "the simpler plan"
        return f"the next best is as fast; {reason} wins"
    return f"the next best priced plan is {slower(behind, but=LESS_SIMPLE)}: {reasons(second, best)}"


def why_lost(plan: RankedPlan | MixedCost, best: RankedPlan | MixedCost) -> str:
    """Explain why a plan lost: the terms that make it slower, or that it is as fast or less simple."""
    behind = plan.s_per_sequence / best.s_per_sequence - 1.0
    if abs(behind) < MIN_GAP:
        return "as fast"
    return reasons(plan, best) if behind > 0 else f"{slower(behind, but=LESS_SIMPLE)}: {reasons(plan, best)}"


def reasons(plan: RankedPlan | MixedCost, second: RankedPlan | MixedCost) -> str:
    """Describe the terms in which two plans' times per sequence differ most, from the view of the first."""
    gained = _gained(plan, second)
    largest = sorted(gained, key=lambda name: -abs(gained[name]))[:SHOWN_REASONS]
    least = MIN_REASON * max(abs(gained[largest[0]]), abs(sum(gained.values())))
    return ", ".join(
        f"{format_seconds(abs(gained[name]))} {'less' if gained[name] > 0 else 'more'} {term_name(name)}"
        for name in largest
        if abs(gained[name]) > least
    )


def _summed(terms_s: dict[str, float]) -> dict[str, float]:
    """Sum the work of the busiest stage into one term, and the end of the step into another."""
    work = sum(value for name, value in terms_s.items() if name not in (*WAITS, *END_OF_STEP))
    waits = {name: terms_s.get(name, 0.0) for name in WAITS}
    return {"work": work, **waits, "end_of_step": sum(terms_s.get(name, 0.0) for name in END_OF_STEP)}


def _gained(best: RankedPlan | MixedCost, second: RankedPlan | MixedCost) -> dict[str, float]:
    """Time by which every term of the second plan is longer, for the number of sequences in the best plan's step."""
    scale = best.plan.global_batch / second.plan.global_batch
    terms, second_terms = best.terms_s, second.terms_s
    if (terms.get("head", 0.0) > 0) != (second_terms.get("head", 0.0) > 0):
        # Terms of work are those of the busiest stage, which may have the head in one plan and more layers in the
        # other, so only their sums are comparable.
        terms, second_terms = _summed(terms), _summed(second_terms)
    return {name: second_terms.get(name, 0.0) * scale - value for name, value in terms.items()}


def choice_lines(best: RankedPlan, choice: Confidence) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for what would change the answer, and why the obvious alternatives lost."""
    if choice.sensitivity:
        yield from flip_lines(choice.sensitivity, ParallelPlan.describe)
    for at, rival in enumerate(choice.obvious):
        yield "" if at else "not", f"{rival.family}: {_lost(best, rival)}"


def flip_lines(sensitivity: Sensitivity[Plan], described: Callable[[Plan], str]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for the nearest changes of hardware figures that make another plan win."""
    for at, flip in enumerate(sensitivity.flips[:SHOWN_FLIPS]):
        at_most = "" if flip.is_proven else "at most "
        check = f"; check with autoplan profile --only {','.join(flip.measure)}" if flip.measure else ""
        yield "" if at else "unless", f"{flip.quantity} {at_most}{change_of(flip)}: then {described(flip.plan)}{check}"
    if not sensitivity.flips:
        yield "unless", "no single hardware figure, halved or doubled, makes another plan win"


def change_of(flip: Flip[Plan]) -> str:
    """Return the change of a hardware figure that makes another plan win."""
    return f"{format_percent(abs(flip.factor - 1.0))} {'higher' if flip.factor > 1 else 'lower'}"


def _lost(best: RankedPlan, rival: ObviousPlan) -> str:
    """Explain why an alternative lost: memory, or time in the terms that grow most."""
    if rival.excess_bytes > 0:
        return f"does not fit by {format_bytes(rival.excess_bytes)} ({rival.plan.plan.describe()})"
    lost = _gained(best, rival.plan)
    largest = sorted(lost, key=lambda name: -lost[name])[:SHOWN_REASONS]
    parts = [
        f"{format_seconds(lost[name])} more {term_name(name)}"
        for name in largest
        if lost[name] > MIN_REASON * abs(sum(lost.values()))
    ]
    risk = "" if rival.plan.verdict == "fits" else "may run out of memory, "
    return f"{risk}{slower(rival.ratio - 1.0)} ({rival.plan.plan.describe()}): {', '.join(parts)}"
