"""HTML as text: everything is escaped except markup from this module."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

VOID = ("input", "meta")  # elements without an end tag


class Markup(str):
    """Text that already is HTML."""

    __slots__ = ()


Child = str | None  # a str that is not Markup is text
Attribute = str | int | bool | None


def joined(children: Iterable[Child]) -> Markup:
    """Join children, escaping text."""
    parts = (child if isinstance(child, Markup) else escape(child) for child in children if child)
    return Markup("".join(parts))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element: class_ and aria_label lose underscores, None and False are omitted, True is a bare name."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))
    if name in VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{joined(children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def data(name: str, value: Any) -> Markup:
    """Return a script element with `value` as JSON, for the scripts of the page."""
    # JSON without < cannot end the element; U+2028 and U+2029 are already escaped by `json`.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" class="{escape(name)}">{text}</script>')
