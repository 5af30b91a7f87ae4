"""Assembly of the self-contained HTML page from its sections."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import TypeVar

from autoplan.report.page import mixed_sections
from autoplan.report.page.answer import answer, headline
from autoplan.report.page.commands import commands
from autoplan.report.page.content import Content, MixedContent, PlanContent
from autoplan.report.page.controls import controls, pinned
from autoplan.report.page.html import Markup, tag
from autoplan.report.page.importance import importance
from autoplan.report.page.memory import memory
from autoplan.report.page.network import network
from autoplan.report.page.plans import front, plans
from autoplan.report.page.scaling import scaling
from autoplan.report.page.schedule import schedule
from autoplan.report.page.sources import mixed_sources, sources
from autoplan.report.page.times import times
from autoplan.report.page.today import today

# Sections by their link name, with the link's text; None: no link.
SECTIONS: dict[str, tuple[str | None, Callable[[PlanContent], Markup | None]]] = {
    "answer": (None, answer),
    "controls": ("change it", controls),
    "pinned": (None, pinned),
    "today": ("today", today),
    "time": ("time", times),
    "schedule": ("schedule", schedule),
    "memory": ("memory", memory),
    "plans": ("other plans", plans),
    "front": ("time against memory", front),
    "scaling": ("scaling", scaling),
    "importance": ("sensitivity", importance),
    "network": ("links", network),
    "sources": ("sources", sources),
    "next": ("next steps", commands),
}
MIXED_SECTIONS: dict[str, tuple[str | None, Callable[[MixedContent], Markup | None]]] = {
    "answer": (None, mixed_sections.answer),
    "time": ("time", times),
    "schedule": ("schedule", schedule),
    "memory": ("memory", memory),
    "plans": ("other plans", mixed_sections.plans),
    "parts": ("the cluster", mixed_sections.parts),
    "sources": ("sources", mixed_sources),
    "next": ("next steps", commands),
}
SEARCHED = ("today", "plans", "front", "scaling", "importance", "next")  # only for the answer of a search
STANDING = "controls"  # not replaced by a change
C = TypeVar("C", bound=Content)

STYLES = ("page.css",)
SCRIPTS = ("view.js", "plot.js", "gantt.js", "page.js")
LIVE_SCRIPT = "play.js"
OWN_SERVER = "; connect-src 'self'"


def page(content: PlanContent | MixedContent) -> str:
    """Return the page as the text of a file."""
    name = f"{content.file.model.name} on {content.file.cluster.num_devices:,} devices: autoplan report"
    if isinstance(content, MixedContent):
        return page_text(name, mixed_sections.headline(content), _drawn(MIXED_SECTIONS, content))
    return page_text(name, headline(content), _sections(content), is_live=bool(content.controls))


def parts(content: PlanContent) -> Iterator[tuple[str, Markup]]:
    """Yield the parts of the page that change with the plan, by name."""
    yield "masthead", headline(content)
    yield from ((name, drawn) for name, (_, drawn) in _sections(content).items() if name != STANDING)


def _sections(content: PlanContent) -> dict[str, tuple[str | None, Markup]]:
    return _drawn(
        {name: row for name, row in SECTIONS.items() if content.was_searched or name not in SEARCHED}, content
    )


def _drawn(
    sections: Mapping[str, tuple[str | None, Callable[[C], Markup | None]]], content: C
) -> dict[str, tuple[str | None, Markup]]:
    """Return the existing sections with the texts of their links."""
    return {name: (link, drawn) for name, (link, make) in sections.items() if (drawn := make(content))}


def page_text(
    name: str,
    title: Markup,
    shown: Mapping[str, tuple[str | None, Markup]],
    *,
    start: str = "the plan",
    is_live: bool = False,
) -> str:
    """Return a page: its head, then sections from `start`; a live one may send requests to its server."""
    style, script = (_text(names) for names in (STYLES, (*SCRIPTS, LIVE_SCRIPT) if is_live else SCRIPTS))
    # Only this script runs, and nothing is loaded, even if a name got past the escaping.
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        f"form-action 'none'{OWN_SERVER if is_live else ''}"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", name),
        tag("style", Markup(style)),
    )
    skip = tag("a", f"Skip to {start}", href=f"#{next(iter(shown))}", class_="skip")
    body = tag(
        "body",
        tag("header", skip, title, _theme(), class_="top"),
        _contents(shown),
        tag("main", *(drawn for _, drawn in shown.values())),
        tag("div", id="tip", role="presentation"),
        tag("script", Markup(script), type="module"),
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _text(names: tuple[str, ...]) -> str:
    folder = files(__package__)
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _theme() -> Markup:
    names = (("auto", "Auto"), ("light", "Light"), ("dark", "Dark"))
    buttons = (tag("button", text, type="button", data_sets=name, aria_pressed="false") for name, text in names)
    return tag("div", *buttons, class_="theme", role="group", aria_label="Colours of the page")


def _contents(shown: Mapping[str, tuple[str | None, Markup]]) -> Markup:
    links = (tag("a", text, href=f"#{name}") for name, (text, _) in shown.items() if text)
    return tag("nav", *links, aria_label="Sections")
