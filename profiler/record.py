"""Record of a measurement: what ran where, all samples, and how certain the result is.

A record is identified by its content: two stores with the same measurement agree on its `key`, so pushing, pulling and
importing again neither lose nor duplicate anything.  Author, host and time are stored next to the content and are not
part of the key, so they can be removed without creating another measurement.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Literal, get_args

from autoplan.base.errors import InputError
from autoplan.base.units import MAX_TEXT
from autoplan.spec.operations import Operation, check_shape

PROTOCOL = 1  # incremented when a change of the measurement method makes older samples incomparable

Mode = Literal["burst", "sustained", "imported"]
# `unstable`: the samples did not settle; `contaminated`: other load interfered; `failed`: `reason` says how.
Status = Literal["ok", "unstable", "contaminated", "failed"]
SLOWED = "device slowed down"  # beginning of the reason if no other load was the cause

MAX_SAMPLES = 10_000
MAX_DTYPE = 40  # maximum characters; the store indexes types
SETTINGS = ("power_cap_w", "clock_mhz")  # configurable properties of a device in a fingerprint
SAME_SETTING = 0.05  # settings of cards of the same model differ by up to this
LONGEST_S = 1e6  # maximum of a valid sample
NOT_CONTENT = ("measured_by", "host", "measured_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The properties of a machine that determine timings; stable across reboots.  Blank means unknown."""

    device: str  # autoplan's id if the device is shipped, otherwise the name reported by the driver
    memory_bytes: int = 0  # visible
    devices_per_node: int = 0
    num_hosts: int = 1
    driver: str = ""
    runtime: str = ""  # cuda 13.0, rocm 7.1, cpu
    torch: str = ""
    collectives: str = ""  # nccl 2.28.3, rccl 2.26.6, gloo
    cpu: str = ""
    nics: tuple[str, ...] = ()  # kind and rate of each, sorted
    topology: str = ""  # hash of the links between devices, sockets and NICs of a node
    clock_mhz: int = 0  # maximum clock
    power_cap_w: int = 0

    def __post_init__(self) -> None:
        if not self.device:
            raise InputError("a fingerprint needs the name of a device")
        for name in ("memory_bytes", "devices_per_node", "num_hosts", "clock_mhz", "power_cap_w"):
            if not 0 <= getattr(self, name) < 2**63:
                raise InputError(f"{name} must not be negative, got {getattr(self, name)}")
        for text in (self.device, self.driver, self.runtime, self.torch, self.collectives, self.cpu, self.topology):
            check_text("a fingerprint", text)
        for text in self.nics:
            check_text("a fingerprint", text)

    @property
    def of_one_device(self) -> Fingerprint:
        """Return the properties that determine the speed of a single device, without NICs, links and other hosts."""
        return replace(self, devices_per_node=0, num_hosts=1, collectives="", nics=(), topology="")

    @property
    def words(self) -> str:
        """Description of the device and the known software and power limit."""
        parts = (
            self.device,
            self.torch and f"torch {self.torch}",
            self.collectives,
            self.driver and f"driver {self.driver}",
            f"{self.power_cap_w} W" if self.power_cap_w else "",
        )
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Operation of one shape, measured on one machine; times in seconds, `shape` as in `operations.SHAPES`."""

    fingerprint: Fingerprint
    operation: Operation
    shape: tuple[int, ...]
    dtype: str
    samples_s: tuple[float, ...] = ()
    kernel: str = ""
    mode: Mode = "sustained"
    status: Status = "ok"
    reason: str = ""  # why a record is not ok
    # Other observations: clocks, power, algorithm and protocol of a collective, other load, concurrent GEMMs.
    conditions: Mapping[str, str] = field(default_factory=dict)
    source: str = ""  # of an imported record
    protocol: int = PROTOCOL
    measured_by: str = ""
    host: str = ""
    measured_at: str = ""  # ISO 8601, UTC

    def __post_init__(self) -> None:
        check_shape(self.operation, self.shape)
        for name, kinds in (("mode", get_args(Mode)), ("status", get_args(Status))):
            if getattr(self, name) not in kinds:
                raise InputError(f"{name} {getattr(self, name)!r} is unknown: known are {', '.join(kinds)}")
        if not 0 <= self.protocol < 2**31:
            raise InputError(f"protocol must be from 0 to {2**31 - 1}")
        if not (self.samples_s or self.status == "failed"):
            raise InputError(f"{self.operation} {self.shape} has no samples, and is not marked as failed")
        if len(self.samples_s) > MAX_SAMPLES:
            raise InputError(f"{self.operation} {self.shape} has {len(self.samples_s)} samples, at most {MAX_SAMPLES}")
        if not all(math.isfinite(sample) and 0 < sample < LONGEST_S for sample in self.samples_s):
            raise InputError(f"{self.operation} {self.shape} has a sample that is no time in seconds")
        texts = (self.dtype, self.kernel, self.reason, self.source, self.measured_by, self.host, self.measured_at)
        for text in (*texts, *self.conditions, *self.conditions.values()):
            check_text(f"{self.operation} {self.shape}", text)
        if not 0 < len(self.dtype) <= MAX_DTYPE:
            raise InputError(f"{self.operation} {self.shape} needs a dtype of at most {MAX_DTYPE} characters")
        if self.measured_at and not is_timestamp(self.measured_at):
            raise InputError(f"{self.operation} {self.shape} was measured at {self.measured_at!r}: not ISO 8601 in UTC")

    @property
    def key(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        content: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in NOT_CONTENT:
            del content[name]
        content["fingerprint"] = asdict(self.fingerprint)
        content["conditions"] = dict(self.conditions)
        content["samples_s"] = [float(sample) for sample in self.samples_s]
        return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    @property
    def seconds(self) -> float:
        """Median of the samples; NaN if the measurement failed."""
        return float(statistics.median(self.samples_s)) if self.samples_s else math.nan


def settings_differ(first: int, second: int) -> bool:
    """Return whether two known power caps or clocks are so different that the machines count as different."""
    return bool(first and second) and max(first, second) > (1 + SAME_SETTING) * min(first, second)


def check_text(where: str, text: str) -> None:
    """Raise an error for text that is too long or contains control characters."""
    if not isinstance(text, str):
        raise InputError(f"{where} holds bytes instead of text")
    if len(text) > MAX_TEXT or any(unicodedata.category(letter)[0] == "C" for letter in text):
        raise InputError(f"{where} holds text that is longer than {MAX_TEXT} characters or has control characters")


def is_timestamp(text: str) -> bool:
    """Return whether `text` is a time in UTC in ISO 8601 format."""
    try:
        return len(text) <= 40 and datetime.fromisoformat(text).utcoffset() == timedelta()
    except ValueError:
        return False
