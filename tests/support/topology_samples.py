"""Samples of real machines, and questions to what a parser made of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from autoplan.profiler.discover.observed import ObservedNode

FOLDER = Path(__file__).parents[1] / "data" / "topology"


def sample(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def fabric(node: ObservedNode) -> dict[tuple[int, int], int]:
    """NVLinks or xGMI links by pair of devices."""
    return {(link.a, link.b): link.num_links for link in node.links if link.b is not None and link.path == "fabric"}


def paths(node: ObservedNode) -> Counter[str]:
    """How many pairs of devices reach each other how."""
    return Counter(link.path for link in node.links if link.b is not None)


def path(node: ObservedNode, a: int, b: int) -> str:
    return next(link.path for link in node.links if (link.a, link.b) == (a, b))


def near(node: ObservedNode, device: int) -> dict[str, str]:
    """The NICs of a device that share a PCIe switch with it."""
    return {
        link.nic: link.path
        for link in node.links
        if link.a == device and link.b is None and link.path in ("switch", "switches")
    }
