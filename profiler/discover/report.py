"""Report of a node about itself, stored in a file or sent to rank 0, and the formats of saved sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from autoplan.base.errors import InputError
from autoplan.base.files import MAX_BYTES, read_text
from autoplan.base.units import cleaned
from autoplan.profiler.discover import hwloc, infiniband, nccl_xml, nvidia_smi, rocm_smi, slurm
from autoplan.profiler.discover.observed import ObservedNode
from autoplan.profiler.discover.slurm import SwitchTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Observations of one node by its sources, in their order of precedence."""

    host: str = ""
    switches: tuple[str, ...] = ()  # switches above the node, innermost first
    seen: tuple[ObservedNode, ...]
    troubles: tuple[str, ...] = ()  # tools that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFile:
    """Output of `autoplan discover --json`."""

    autoplan_discover: int = 1  # version of the format
    nodes: tuple[Report, ...]


Parsed = ObservedNode | SwitchTree | ReportFile


def encode(reports: ReportFile) -> str:
    """Return the text of a report file."""
    return msgspec.json.format(msgspec.json.encode(reports), indent=1).decode() + "\n"


def decode(text: str) -> ReportFile:
    """Parse the text of a report file."""
    try:
        report = msgspec.json.decode(text, type=ReportFile)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InputError(f"is no report of autoplan discover: {cleaned(str(error))}") from None
    if any(not text.isprintable() for text in _texts(msgspec.to_builtins(report))):
        raise InputError("is no report of autoplan discover: it holds control characters")
    return report


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


# Detection and parser of each format by name, in the order of precedence of sources on a node.
FORMATS: Mapping[str, tuple[str, Callable[[str], Parsed]]] = {
    "autoplan": (r'\A\s*\{\s*"autoplan_discover"', decode),
    "nccl-xml": (r"<system\b", nccl_xml.parse),
    "rocm-smi": (r"Weight between two GPUs|ROCm System Management Interface", rocm_smi.parse),
    "nvidia-smi": (r"(?m)^\W*(\x1b?\[\d*m)*\s*GPU0\s", nvidia_smi.parse),
    "hwloc": (r"<topology\b", hwloc.parse),
    "adapters": (
        r"(?m)^\s*(CA '|Infiniband device '|hca_id:|Device:\s*cxi\d|provider:\s*(efa|cxi))",
        infiniband.parse,
    ),
    "slurm": (r"(?im)^\s*(SwitchName|BlockName)\s*=|^\s*-\s*topology\s*:", slurm.parse),
}


def read_source(path: Path, kind: str = "auto") -> tuple[str, Parsed]:
    """Return (format, content of a saved file); the format is recognised by the content."""
    if kind != "auto" and kind not in FORMATS:
        raise InputError(f"--format {kind!r} is unknown: known are auto, {', '.join(FORMATS)}")
    text = read_text(path, most_bytes=MAX_BYTES)
    kind_of_text = recognise(text) if kind == "auto" else kind
    if not kind_of_text:
        raise InputError(f"{path}: of no format that is known: pass --format with one of {', '.join(FORMATS)}")
    try:
        return kind_of_text, FORMATS[kind_of_text][1](text)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def recognise(text: str) -> str:
    """Return the format of `text`; blank if it is unknown."""
    return next((name for name, (pattern, _) in FORMATS.items() if re.search(pattern, text)), "")
