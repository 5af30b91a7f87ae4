"""HTML as text: everything is escaped but markup made by this module."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

VOID = ("input", "meta")  # elements without an end tag


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | None  # a str that is no Markup is text
Attribute = str | int | bool | None


def joined(children: Iterable[Child]) -> Markup:
    """Children one after another, escaped where they are text."""
    parts = (child if isinstance(child, Markup) else escape(child) for child in children if child)
    return Markup("".join(parts))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element: class_ and aria_label lose underscores, None and False are left out, True is a bare name."""
    shown = "".join(_attribute(key, value) for key, value in attributes.items() if value not in (None, False))
    if name in VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{joined(children)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def data(name: str, value: Any) -> Markup:
    """A script element that holds `value` as JSON, for the scripts of the page."""
    # No text of JSON ends the element if it has no <; U+2028 and U+2029 are escaped by `json` already.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" class="{escape(name)}">{text}</script>')
