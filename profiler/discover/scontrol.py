"""Switches above the nodes of the cluster, as Slurm's file says or `scontrol show topology` tells."""

from __future__ import annotations

import re

from autoplan.profiler.discover import slurm
from autoplan.profiler.discover.slurm import SwitchTree

_TOLD = re.compile(r"(?i)\s*\b(Level|BlockIndex|BlockSize)=\S*")
_NODES = re.compile(r"(?i)\s*\bNodes=\S*")


def parse(text: str) -> SwitchTree:
    """The tree of a `topology.conf`, a `topology.yaml`, or of what `scontrol show topology` prints.

    The latter has a level on each line, and under a switch of switches all nodes below once more.
    """
    return slurm.parse("\n".join(_as_file(line) for line in text.split("\n")))


def _as_file(line: str) -> str:
    if re.match(r"(?i)\s*AggregatedBlock=", line):
        return ""  # made of the blocks on other lines
    statement = _TOLD.sub("", line)
    return _NODES.sub("", statement) if statement != line and re.search(r"(?i)\bSwitches=\S", line) else statement
