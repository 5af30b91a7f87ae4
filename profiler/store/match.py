"""Likeness of two machines, so that what was measured on one may be used on the other."""

from __future__ import annotations

from autoplan.profiler.record import Fingerprint
from autoplan.spec.timing import Match

SAME_SETTING = 0.05  # power caps and clocks of cards that are sold as the same differ by as much


def match(measured: Fingerprint, wanted: Fingerprint) -> Match | None:
    """Rate how well measurements of the machine `measured` serve `wanted`; None where the device differs.

    Blank is unknown, and what is unknown on either side is no match beyond the device.  Drivers and hosts do not count:
    an update must not orphan what was measured before it.  A power cap or highest clock that differs does, where both
    are known: it makes another machine of the same device.
    """
    if measured.device != wanted.device:
        return None
    if any(_differs(getattr(measured, name), getattr(wanted, name)) for name in ("power_cap_w", "clock_mhz")):
        return Match.POWER
    parts = ("torch", "collectives", "topology")
    if measured.torch and all(getattr(measured, part) == getattr(wanted, part) for part in parts):
        return Match.EXACT
    if _major(measured.runtime) and _major(measured.runtime) == _major(wanted.runtime):
        return Match.RUNTIME
    return Match.DEVICE


def _differs(first: int, second: int) -> bool:
    """Return whether two settings differ, where both are known."""
    return bool(first and second) and max(first, second) > (1 + SAME_SETTING) * min(first, second)


def _major(runtime: str) -> str:
    """Return 'cuda 13' of 'cuda 13.0'."""
    return runtime.partition(".")[0]
