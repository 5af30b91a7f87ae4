"""Section of next steps: commands that start the plan, measure the cluster and refine the answer."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.report.page.content import Content
from autoplan.report.page.elements import section
from autoplan.report.page.html import Markup, tag


def commands(content: Content) -> Markup:
    """Return commands with their purposes, for copying."""
    refused = content.missing.get("start")
    sentence = f"No launch files for this plan: {refused}." if refused else None
    return section("next", "What to do next", sentence, tag("ol", *_items(content), class_="steps"))


def _items(content: Content) -> Iterator[Markup]:
    for step in content.steps:
        copy = tag("button", "Copy", type="button", class_="copy", aria_label=f"Copy the command: {step.purpose}")
        yield tag("li", tag("p", step.purpose), tag("div", tag("code", step.command), copy, class_="command"))
