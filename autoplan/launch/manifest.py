"""Manifests as YAML, with scripts as blocks that can be read and a header of comments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as blocks, where YAML can hold them so; the same value twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def manifest(comments: Sequence[str], documents: Sequence[dict[str, Any]]) -> str:
    """The text of `documents`, below `comments`."""
    body = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return "\n".join(comments) + "\n" + body
