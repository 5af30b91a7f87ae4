"""Where does each number come from?  Measured, interpolated, fitted to published runs, or a datasheet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autoplan.report.page.content import Content
from autoplan.report.page.html import Child, Markup, tag
from autoplan.report.page.parts import Segment, bar, bars, folded, key, pairs, section
from autoplan.report.terminal import LEAST_SHOWN_S, term_name
from autoplan.result import Certificate
from autoplan.timing import Provenance
from autoplan.units import format_percent, format_seconds

MEANS: dict[Provenance, str] = {
    "measured": "timed on this machine or one with its fingerprint, at these shapes",
    "disturbed": "timed there at these shapes, but beside other load or not settled",
    "interpolated": "between shapes that were timed",
    "reference": "curves fitted to published measurements of this device and framework",
    "datasheet": "the maker's figures with an assumed efficiency",
}
TIMED: tuple[Provenance, ...] = ("measured", "disturbed", "interpolated")


def sources(content: Content) -> Markup:
    """The shares of the step that rest on each kind of source, and what the sources are."""
    file = content.file
    return section(
        "sources",
        "Where the numbers come from",
        _says(content),
        pairs((name, means) for name, means in MEANS.items()),
        tag("h3", "What each part of the step rests on"),
        key((f"s-{name}", name) for name in MEANS),
        bars("What each term of the step rests on", ("term", "rests on", "time"), _terms(content), "total"),
        tag("h3", "What they were taken from"),
        pairs(_facts(content)),
        folded("Published sources", _cited(content)),
        folded("What was searched, and what was not", _limits(file.certificate)) if file.certificate else None,
    )


def _says(content: Content) -> str:
    file = content.file
    own = sum(file.rests_on.get(kind, 0.0) for kind in TIMED)
    if own == 0:
        return (
            "Nothing was measured on this cluster: the step time rests on published measurements. "
            "A profile of the cluster replaces them: the commands stand below."
        )
    return f"{format_percent(own)} of the step rests on times that were measured ({file.timings})."


def _terms(content: Content) -> Iterator[tuple[str, Markup, str]]:
    best = content.file.best
    for name, shares in content.rests_on.items():
        if (seconds := best.terms_s.get(name, 0.0)) >= LEAST_SHOWN_S:
            yield (
                term_name(name),
                _stacked({kind: float(one[0]) for kind, one in shares.items()}),
                format_seconds(seconds),
            )
    yield "all", _stacked(content.file.rests_on), format_seconds(best.step_s)


def _stacked(shares: Mapping[Provenance, float]) -> Markup:
    return bar(
        Segment(name=name, colour=f"s-{name}", share=shares.get(name, 0.0), text=format_percent(shares.get(name, 0.0)))
        for name in MEANS
    )


def _facts(content: Content) -> Iterator[tuple[str, Child]]:
    file = content.file
    calibration = file.calibration
    yield "calibration", f"{calibration.name}, {_count(len(calibration.sources), 'source')}"
    yield "framework", file.framework.name
    yield "device", f"{file.cluster.device.name}, {_count(len(file.cluster.device.sources), 'source')}"
    yield "cluster", f"{file.cluster.name}, {_count(len(file.cluster.sources), 'source')}"
    yield "timings", file.timings or "none: no measured times were asked for"
    yield "made by", ", ".join(f"{name} {version}" for name, version in file.versions.items())
    yield "with", tag("code", file.command)


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'} named"


def _cited(content: Content) -> Markup:
    file = content.file
    cited = (*file.calibration.sources, *file.cluster.device.sources, *file.cluster.sources)
    return tag("ul", *(tag("li", one) for one in dict.fromkeys(cited)), class_="reasons")


def _limits(certificate: Certificate) -> Markup:
    return tag("ul", *(tag("li", one) for one in certificate.limits), class_="reasons")
