"""Implausible records: beyond what a device or link can do, never settled, or modified."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import Row

from autoplan.base.errors import InputError
from autoplan.profiler.record import Fingerprint, Record
from autoplan.profiler.run_record import RunRecord
from autoplan.readers.cluster import load_cluster, preset_clusters
from autoplan.readers.device import load_device
from autoplan.spec.operations import COLLECTIVES, PRODUCTS, RATE_TYPES
from autoplan.topology.cluster import DeviceSpec

MAX_OVER_PEAK = 1.1  # devices may boost slightly above their datasheet clock
MAX_SPREAD = 0.5  # maximum interquartile range of settled samples over their median
MIN_S = 1e-7  # shorter than the launch of any kernel
# Minimum share of the datasheet rate (compute and memory) for a long GEMM on a healthy device: the slowest libraries
# reach a third, and half the power costs a fifth.  Below it, other units did the work, or the device was not free.
MIN_SHARE = 0.1
LONG_S = 1.5e-4  # datasheet time above which launches and half-filled tiles hardly matter

# Each device must send or receive at least its whole buffer (in-network reduction halves the traffic of a ring), or all
# of it except its own part.
_SEND_ALL = ("all_reduce", "broadcast", "send_recv")


def implausible(record: Record) -> str:
    """Describe why `record` is implausible; empty if nothing is wrong, or the device is unknown."""
    if record.measured_at and datetime.fromisoformat(record.measured_at) > datetime.now(UTC) + timedelta(days=1):
        return f"measured at {record.measured_at}, in the future"
    if record.operation in COLLECTIVES and record.shape[1] > record.shape[0]:
        return f"{record.shape[1]} devices in a domain, in a group of {record.shape[0]}"
    if not record.samples_s:
        return ""
    if record.seconds < MIN_S:
        return f"took {record.seconds:.1e} s, less than the launch of a kernel"
    if record.status == "ok" and (spread := sample_spread(record.samples_s)) > MAX_SPREAD:
        return f"marked as settled, but its samples spread by {100 * spread:.0f} %"
    return _too_fast(record) or _too_slow(record)


def sample_spread(samples_s: tuple[float, ...]) -> float:
    """Return the interquartile range over the median."""
    if len(samples_s) < 5:
        return 0.0
    low, middle, high = statistics.quantiles(samples_s, n=4)
    return (high - low) / middle


def _too_fast(record: Record) -> str:
    name = record.fingerprint.device
    device = _device(name)
    if device is None or device.vendor == "cpu":
        return ""
    if record.operation in PRODUCTS:
        m, n, k = record.shape
        rate, peak = 2 * m * n * k / record.seconds, _peak_flops_per_s(device, record.dtype)
        if rate > MAX_OVER_PEAK * peak:
            return f"{rate / 1e12:,.0f} TFLOP/s, {name} has {peak / 1e12:,.0f}"
    if record.operation in COLLECTIVES and record.shape[0] > 1:
        num_devices, _, _, buffer_bytes = record.shape
        share = 1.0 if record.operation in _SEND_ALL else (num_devices - 1) / num_devices
        rate, link = share * buffer_bytes / record.seconds, _fastest_link_bytes_per_s(name)
        if link and rate > MAX_OVER_PEAK * link:
            return f"{rate / 1e9:,.0f} GB/s through each device, its links carry {link / 1e9:,.0f}"
    return ""


def _too_slow(record: Record) -> str:
    """Describe why a GEMM is too slow; disturbed records and types without a datasheet rate are exempt."""
    device = _device(record.fingerprint.device)
    if device is None or device.vendor == "cpu" or record.operation not in PRODUCTS or record.status != "ok":
        return ""
    peak = device.peaks.get(RATE_TYPES.get(record.dtype, record.dtype))
    if peak is None:
        return ""
    m, n, k = record.shape
    moved_bytes = _WIDTHS.get(record.dtype, 2.0) * (m * n + n * k + m * k)
    least_s = max(2 * m * n * k / peak, moved_bytes / device.memory_bandwidth_bytes_per_s)
    if least_s < LONG_S or MIN_SHARE * record.seconds < least_s:
        return ""
    rate = 2 * m * n * k / record.seconds
    return (
        f"{rate / 1e12:,.0f} TFLOP/s, {device.name} has {peak / 1e12:,.0f} in {record.dtype}: "
        f"{record.seconds / least_s:,.0f} times as long as its datasheet allows"
    )


_WIDTHS = {"fp32": 4.0, "fp8": 1.0, "mxfp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5}  # bytes of a number


def _peak_flops_per_s(device: DeviceSpec, dtype: str) -> float:
    """Return the datasheet rate of a type; fp32 may run as tf32, and a type without a rate may have four bits."""
    peaks = device.peaks
    of_four_bits = 4 * max(peaks.get("bf16", 0.0), peaks.get("fp16", 0.0))
    if dtype == "fp32":
        return max(peaks.get("tf32", 0.0), peaks.get("fp32", 0.0)) or of_four_bits
    return peaks.get(RATE_TYPES.get(dtype, dtype), of_four_bits)


_device = lru_cache(maxsize=64)(load_device)


@lru_cache(maxsize=64)
def _fastest_link_bytes_per_s(device: str) -> float:
    """Return the rate of the fastest link in shipped clusters with that device, per direction; 0 without one."""
    clusters = [load_cluster(name) for name in preset_clusters()]
    rates = [
        level.bandwidth_bytes_per_s for cluster in clusters if cluster.device.name == device for level in cluster.levels
    ]
    return max(rates, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An implausible record, with the reason."""

    key: str
    what: str
    reason: str


def findings_in(
    row: Row[Any], machine: Fingerprint, read: Callable[[Row[Any], Fingerprint], Record | RunRecord], what: str
) -> Iterator[Finding]:
    """Yield the problems of a row: it is unreadable, does not match its key, or is implausible."""
    try:
        entry = read(row, machine)
    except InputError as error:
        yield Finding(key=row.key, what=what, reason=str(error))
        return
    if entry.key != row.key:
        yield Finding(key=row.key, what=what, reason="was changed in the database: its content has another key")
    elif isinstance(entry, Record) and (finding := finding_of(row.key, entry)):
        yield finding


def finding_of(key: str, record: Record) -> Finding | None:
    """Return the finding for an implausible record, otherwise None."""
    reason = implausible(record)
    words = f"{record.operation} {'x'.join(map(str, record.shape))} {record.dtype}"
    return Finding(key=key, what=words, reason=reason) if reason else None
