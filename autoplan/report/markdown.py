"""Plan as a block of Markdown, for a pull request or a page that proposes a run."""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.base.units import format_percent, format_seconds
from autoplan.report.answer import answer_lines, detail_lines, headline
from autoplan.report.terminal import MIN_SHOWN_S, term_name
from autoplan.spec.plan_file import PlanFile


def markdown(file: PlanFile, steps: Iterable[str] = ()) -> str:
    """Return plan, figures, times and commands as Markdown, with tables and collapsed sections of GitHub and GitLab."""
    best = file.best
    terms = [
        (term_name(name), format_seconds(value), format_percent(value / best.step_s))
        for name, value in sorted(best.terms_s.items(), key=lambda term: -term[1])
        if value >= MIN_SHOWN_S
    ]
    return "\n".join(
        [
            f"### {headline(file)}",
            "",
            *_table(("", ""), answer_lines(file)),
            "",
            "<details><summary>Where the time of a step goes</summary>",
            "",
            *_table(("term", "time", "share"), terms),
            "",
            "</details>",
            "",
            "<details><summary>Details</summary>",
            "",
            *_table(("", ""), detail_lines(file)),
            "",
            "</details>",
            "",
            "```bash",
            file.command,
            *steps,
            "```",
            "",
        ]
    )


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [heads, tuple("---" for _ in heads), *rows]
    return [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in cells]


def _cell(text: str) -> str:
    """Escape text that could end a cell or open a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")
