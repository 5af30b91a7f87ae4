"""Likeness of two machines, so that what was measured on one may be used on the other."""

from __future__ import annotations

from autoplan.profiler.record import SETTINGS, Fingerprint, settings_differ
from autoplan.spec.measurement import Match


def match(measured: Fingerprint, target: Fingerprint) -> Match | None:
    """Rate how well measurements of the machine `measured` serve `target`; None where the device differs.

    Blank is unknown, and what is unknown on either side is no match beyond the device.  Drivers and hosts do not count:
    an update must not orphan what was measured before it.  A power cap or highest clock that differs does, where both
    are known: it makes another machine of the same device.
    """
    if measured.device != target.device:
        return None
    if any(settings_differ(getattr(measured, name), getattr(target, name)) for name in SETTINGS):
        return Match.POWER
    parts = ("torch", "collectives", "topology")
    if measured.torch and all(getattr(measured, part) == getattr(target, part) for part in parts):
        return Match.EXACT
    if _major(measured.runtime) and _major(measured.runtime) == _major(target.runtime):
        return Match.RUNTIME
    return Match.DEVICE


def _major(runtime: str) -> str:
    """Return 'cuda 13' of 'cuda 13.0'."""
    return runtime.partition(".")[0]
