"""Shell completion of names, read only from the preset folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from autoplan.frameworks.registry import TARGETS, facts_files, names_of

PRESETS = Path(__file__).parent.parent / "presets"


def words(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Complete one of a few words; without a match the shell offers files."""
    names = tuple(choices)

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def clusters(incomplete: str) -> list[str]:
    """Complete the clusters that a flag accepts."""
    return [*words(["local"])(incomplete), *presets("clusters")(incomplete)]


def frameworks(incomplete: str) -> list[str]:
    """Complete the frameworks that a flag accepts."""
    return words(sorted({name for facts in facts_files() for name in names_of(facts)}))(incomplete)


def targets(incomplete: str) -> list[str]:
    """Complete the targets that a flag accepts, and their versions once the name is complete."""
    name = incomplete.partition("@")[0]
    return words(TARGETS[name].spellings if name in TARGETS else TARGETS)(incomplete)


def presets(kind: str) -> Callable[[str], list[str]]:
    """Return a completion of the presets of a kind: models, clusters or job templates."""

    def complete(incomplete: str) -> list[str]:
        return words(sorted(path.stem for path in (PRESETS / kind).glob("*.toml")))(incomplete)

    return complete
