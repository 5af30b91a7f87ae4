"""Section of sensitivities: hardware figures that determine the step, and those that would change the plan."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.report.page.content import PlanContent
from autoplan.report.page.elements import Segment, bar, bars, key, section, table
from autoplan.report.page.html import Markup, tag
from autoplan.report.ranking import change_of
from autoplan.spec.plan import ParallelPlan
from autoplan.spec.search_result import Sensitivity

SHOWN_FLIPS = 5
MIN_SHOWN = 0.005  # per cent of the step per one per cent of a figure


def importance(content: PlanContent) -> Markup:
    """Return elasticities of the step, and the nearest figures at which another plan wins."""
    sensitivity = content.sensitivity
    title = "What the answer depends on"
    if sensitivity is None:
        return section("importance", title, content.why_not("sensitivity"))
    return section(
        "importance",
        title,
        _summary(sensitivity),
        key([("faster", "shortens the step"), ("slower", "lengthens it")]),
        bars(
            "Change of the step time when a figure grows by 1 %",
            ("1 % more", "changes the step", "by"),
            _slopes(sensitivity),
        ),
        tag("h3", "What would make another plan win") if sensitivity.flips else None,
        _flips(sensitivity) if sensitivity.flips else None,
    )


def _summary(sensitivity: Sensitivity[ParallelPlan]) -> str:
    if not sensitivity.flips:
        return "No single hardware figure, halved or doubled, makes another plan win."
    flip = sensitivity.flips[0]
    return f"The smallest change that would change the answer: {flip.quantity} {change_of(flip)} than assumed."


def _slopes(sensitivity: Sensitivity[ParallelPlan]) -> Iterator[tuple[str, Markup, str]]:
    ordered = sorted(sensitivity.elasticities.items(), key=lambda item: -abs(item[1]))
    steepest = max((abs(value) for _, value in ordered), default=0.0) or 1.0
    for name, slope in ordered:
        text = f"{'+' if slope > 0 else '−'}{abs(slope):.2f} %" if abs(slope) >= MIN_SHOWN else "0"
        colour = "slower" if slope > 0 else "faster"
        share = abs(slope) / steepest if abs(slope) >= MIN_SHOWN else 0.0
        yield name, bar([Segment(name=name, colour=colour, share=share, text=text)]), text


def _flips(sensitivity: Sensitivity[ParallelPlan]) -> Markup:
    columns = [("number", False), ("would need to be", False), ("then wins", False), ("autoplan profile", False)]
    rows = (
        (
            flip.quantity,
            f"{change_of(flip)}{'' if flip.is_proven else ' at the latest'}",
            flip.plan.describe(),
            tag("code", f"--only {','.join(flip.measure)}") if flip.measure else "",
        )
        for flip in sensitivity.flips[:SHOWN_FLIPS]
    )
    return table("Changes that make another plan win", columns, rows)
