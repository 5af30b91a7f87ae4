"""Machines in the timing database: their row numbers, and the similarity of two machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict

import msgspec
from sqlalchemy import Connection, select

from autoplan.base.errors import StoreError
from autoplan.profiler.record import SETTINGS, Fingerprint, settings_differ
from autoplan.profiler.store.schema import DAMAGED, fingerprints, insert_new
from autoplan.spec.measurement import Match


class Machines(dict[int, Fingerprint]):
    """Machines by their row numbers, in the database `name`."""

    def __init__(self, machines: dict[int, Fingerprint], name: str) -> None:
        super().__init__(machines)
        self._name = name

    def __missing__(self, number: int) -> Fingerprint:
        raise StoreError(f"{self._name} {DAMAGED} (it has no machine {number!r})")


def read_machines(connection: Connection, name: str, device: str | None = None) -> Machines:
    """Return the machines in the database `name`, optionally only those with a device."""
    query = select(fingerprints.c.id, fingerprints.c.content)
    if device is not None:
        query = query.where(fingerprints.c.device == device)
    rows = connection.execute(query).all()
    try:
        return Machines({number: msgspec.json.decode(text, type=Fingerprint) for number, text in rows}, name)
    except (msgspec.MsgspecError, TypeError) as error:  # a damaged file: a blank instead of text
        raise StoreError(f"{name} holds a fingerprint that cannot be read: {error}") from None


def numbers_of(
    connection: Connection, machines: Collection[Fingerprint], stored: Mapping[Fingerprint, int]
) -> dict[Fingerprint, int]:
    """Return the row numbers of machines, and add machines that are not in `stored`."""
    new = {_hash(machine): machine for machine in machines if machine not in stored}
    numbers = {machine: stored[machine] for machine in machines if machine in stored}
    if new:
        rows = [{"hash": key, "device": new[key].device, "content": _json(new[key])} for key in sorted(new)]
        insert_new(connection, fingerprints, rows)
        query = select(fingerprints.c.hash, fingerprints.c.id).where(fingerprints.c.hash.in_(new))
        numbers |= {new[key]: number for key, number in connection.execute(query)}
    return numbers


def _json(fingerprint: Fingerprint) -> str:
    return json.dumps(asdict(fingerprint), sort_keys=True, ensure_ascii=False)


def _hash(fingerprint: Fingerprint) -> str:
    return hashlib.sha256(_json(fingerprint).encode()).hexdigest()


def match(measured: Fingerprint, target: Fingerprint) -> Match | None:
    """Rate the similarity of the machine `measured` to `target`; None for different devices.

    Blank means unknown, and an unknown property on either side only matches by device.  Drivers and hosts do not count,
    so that an update does not invalidate older measurements.  Different power caps or maximum clocks do count if both
    are known: they make a different machine of the same device.
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
    """Return 'cuda 13' for 'cuda 13.0'."""
    return runtime.partition(".")[0]
