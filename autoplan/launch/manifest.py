"""Manifests as YAML, with scripts as readable blocks and a header of comments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """YAML writer with multi-line text as blocks where possible, and without aliases for repeated values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def manifest(comments: Sequence[str], documents: Sequence[dict[str, Any]]) -> str:
    """Return `documents` as YAML, preceded by `comments`."""
    body = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    return "\n".join(comments) + "\n" + body
