"""Section of sources: which numbers were measured, interpolated, fitted to published runs, or come from a datasheet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autoplan.base.units import format_percent, format_seconds
from autoplan.report.page.content import MixedContent, PlanContent
from autoplan.report.page.elements import Segment, bar, bars, folded, key, note, pairs, section, table
from autoplan.report.page.html import Child, Markup, tag
from autoplan.report.terminal import MIN_SHOWN_S, term_name
from autoplan.report.timing_sources import NEED_COLUMNS, RECORD_COLUMNS, need_rows, record_rows, remarks
from autoplan.spec.calibration import Calibration
from autoplan.spec.plan_file import MixedPlanFile, PlanFile
from autoplan.spec.timing import Provenance
from autoplan.topology.cluster import ClusterSpec

MEANS: dict[Provenance, str] = {
    "measured": "timed on this machine, or one with the same fingerprint, at exactly these shapes",
    "disturbed": "timed at these shapes, but under other load or not settled",
    "interpolated": "interpolated between timed shapes",
    "scaled": "scaled from timed groups of other sizes",
    "reference": "curves fitted to published measurements of this device and framework",
    "datasheet": "vendor figures with an assumed efficiency, or that of a similar device",
}
TIMED: tuple[Provenance, ...] = ("measured", "disturbed", "interpolated", "scaled")


def sources(content: PlanContent) -> Markup:
    """Return the shares of the step by kind of source, and the sources."""
    file = content.file
    return _sources_section(
        file,
        [("", file.cluster, file.calibration)],
        _summary(content),
        pairs((name, means) for name, means in MEANS.items()),
        tag("h3", "What each part of the step is based on"),
        key((f"s-{name}", name) for name in MEANS),
        bars("What each term of the step is based on", ("term", "rests on", "time"), _terms(content), "total"),
        *_records(content),
    )


def mixed_sources(content: MixedContent) -> Markup:
    """Return the sources of each part of a mixed cluster, without shares of the step."""
    file = content.file
    parts = zip(file.cluster.part_names, file.cluster.parts, file.calibrations, strict=True)
    summary = "Nothing was measured on this cluster: the step time is based on published measurements of its parts."
    return _sources_section(file, [*parts], summary)


def _sources_section(
    file: PlanFile | MixedPlanFile, parts: Sequence[tuple[str, ClusterSpec, Calibration]], summary: str, *shares: Child
) -> Markup:
    """Return the section: shares of the step, then the sources of every part (name, cluster, calibration)."""
    return section(
        "sources",
        "Where the numbers come from",
        summary,
        *shares,
        tag("h3", "Sources of the numbers"),
        pairs(_facts(file, parts)),
        folded("Published sources", _cited(parts)),
        folded("What was searched and what was not", _limits(file.certificate.limits)) if file.certificate else None,
    )


def _summary(content: PlanContent) -> str:
    file = content.file
    measured_share = sum(file.rests_on.get(kind, 0.0) for kind in TIMED)
    if measured_share == 0:
        return (
            "Nothing was measured on this cluster: the step time rests on published measurements. "
            "A profile of the cluster replaces them: the commands stand below."
        )
    return f"{format_percent(measured_share)} of the step rests on times that were measured ({file.timings})."


def _records(content: PlanContent) -> Iterator[Markup]:
    """Yield the records behind each term, collapsed, with remarks."""
    if content.records is not None:
        caption = "Records behind each term of the step"
        rows = [(*row, *[""] * (len(NEED_COLUMNS) - len(row))) for row in need_rows(content.records)]
        origins = table("Who measured them, where and when", RECORD_COLUMNS, record_rows(content.records))
        yield folded(caption, table(caption, NEED_COLUMNS, rows), origins, *map(note, remarks(content.records)))


def _terms(content: PlanContent) -> Iterator[tuple[str, Markup, str]]:
    best = content.file.best
    for name, shares in content.rests_on.items():
        if (seconds := best.terms_s.get(name, 0.0)) >= MIN_SHOWN_S:
            yield (
                term_name(name),
                _stacked({kind: float(share[0]) for kind, share in shares.items()}),
                format_seconds(seconds),
            )
    yield "all", _stacked(content.file.rests_on), format_seconds(best.step_s)


def _stacked(shares: Mapping[Provenance, float]) -> Markup:
    return bar(
        Segment(name=name, colour=f"s-{name}", share=shares.get(name, 0.0), text=format_percent(shares.get(name, 0.0)))
        for name in MEANS
    )


def _facts(
    file: PlanFile | MixedPlanFile, parts: Sequence[tuple[str, ClusterSpec, Calibration]]
) -> Iterator[tuple[str, Child]]:
    yield "framework", file.framework.name
    for name, cluster, calibration in parts:
        of = f" of {name}" if name else ""
        yield f"calibration{of}", f"{calibration.name}, {_count(len(calibration.sources), 'source')}"
        yield f"device{of}", f"{cluster.device.name}, {_count(len(cluster.device.sources), 'source')}"
        yield f"cluster{of}", f"{cluster.name}, {_count(len(cluster.sources), 'source')}"
    if isinstance(file, PlanFile):
        yield "timings", _timings(file)
    yield "made by", ", ".join(f"{name} {version}" for name, version in file.versions.items())
    yield "with", tag("code", file.command)


def _timings(file: PlanFile) -> str:
    if not file.timings:
        return "none: --timings was not used"
    if (pinned := file.pinned) is None:
        return file.timings
    of = f" for {pinned.machine}" if pinned.machine else ""
    return f"{file.timings}{of}, {pinned.num_times:,} times, digest {pinned.digest}"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'} named"


def _cited(parts: Sequence[tuple[str, ClusterSpec, Calibration]]) -> Markup:
    cited = (
        source
        for _, cluster, calibration in parts
        for source in (*calibration.sources, *cluster.device.sources, *cluster.sources)
    )
    return tag("ul", *(tag("li", source) for source in dict.fromkeys(cited)), class_="reasons")


def _limits(limits: Sequence[str]) -> Markup:
    return tag("ul", *(tag("li", limit) for limit in limits), class_="reasons")
