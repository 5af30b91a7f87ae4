"""Records of operations that a training run timed by itself, whoever wrote down the times.

A kernel of a collective runs from when its own rank arrives: the rank that arrived last tells how long it takes, and
only where all ranks of the group were heard.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.profiler.imports.nccl_tests import rack_devices
from autoplan.profiler.record import MAX_SAMPLES, Fingerprint, Mode, Record, Status
from autoplan.profiler.store.plausible import MAX_SPREAD, sample_spread
from autoplan.spec.operations import Operation

NOT_ALL_RANKS = "not all ranks of its group have it in a trace: its time may include waiting for them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Operation that ran once, in the order of starts on its rank."""

    operation: Operation
    sizes: tuple[int, ...]  # for a collective: bytes of its buffer
    dtype: str
    seconds: float
    is_alone: bool
    kernel: str
    group: tuple[int, ...] = ()  # ranks of a collective


def run_records(
    timed: Iterable[tuple[Timed, str]],
    machine: Fingerprint,
    *,
    source: str,
    mode: Mode,
    conditions: Mapping[str, str],
    author: str,
    host: str,
    measured_at: str,
) -> list[Record]:
    """Return one record for every shape, of its clean times if there are any.

    Each item of `timed` has the reason why its time is not clean; blank if it is.  `machine` must know the devices of
    its nodes, or collectives are left out.
    """
    by_record: dict[tuple[Operation, tuple[int, ...], str], list[tuple[Timed, str]]] = defaultdict(list)
    for item, why_not in timed:
        if (layout := _layout(item.group, machine)) is not None:
            by_record[item.operation, (*layout, *item.sizes), item.dtype].append((item, why_not))
    records = []
    for (operation, shape, dtype), times in by_record.items():
        clean = [item for item, why_not in times if not why_not]
        samples = (clean or [item for item, _ in times])[:MAX_SAMPLES]
        samples_s = tuple(item.seconds for item in samples)
        status, reason = _status(samples_s, "" if clean else times[0][1])
        records.append(
            Record(
                fingerprint=machine,
                operation=operation,
                shape=shape,
                dtype=dtype,
                samples_s=samples_s,
                kernel=samples[0].kernel,
                mode=mode,
                status=status,
                reason=reason,
                conditions=conditions,
                source=source,
                measured_by=author,
                host=host,
                measured_at=measured_at,
            )
        )
    return records


def _status(samples_s: tuple[float, ...], why_not: str) -> tuple[Status, str]:
    if why_not:
        return "contaminated", why_not
    if (spread := sample_spread(samples_s)) > MAX_SPREAD:
        return "unstable", f"the times of the run spread by {100 * spread:.0f} %"
    return "ok", ""


def _layout(group: tuple[int, ...], machine: Fingerprint) -> tuple[int, ...] | None:
    """Return what stands before the bytes in a shape; nothing for one device alone, None where nodes are not known.

    Every rank runs the same program, so that all groups of these nodes work at once.
    """
    if not group:
        return ()
    if not machine.devices_per_node or len(group) < 2:
        return None
    fabric = max(machine.devices_per_node, rack_devices(machine.device))
    on_domain = Counter(rank // fabric for rank in group)
    if len(set(on_domain.values())) > 1:
        return None
    in_domain = next(iter(on_domain.values()))
    return (len(group), in_domain, max(fabric // in_domain, 1))
