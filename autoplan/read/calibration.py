"""How far may a prediction for a framework be off?  The shipped calibrations, by the name of the framework."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from pathlib import Path

from autoplan.files import decode, read_table
from autoplan.framework import Framework
from autoplan.timing import Calibration


@lru_cache(maxsize=64)
def _shipped(name: str) -> Calibration | None:
    folder = resources.files("autoplan.presets") / "calibrations"
    paths = {entry.name: Path(str(entry)) for entry in folder.iterdir()}
    path = paths.get(f"{name}.toml")
    return decode(Calibration, read_table(path), f"calibration {name}") if path else None


def built_in_calibration(framework: Framework) -> Calibration:
    """The calibration that ships for `framework`, or the reference with its wide spread where none does."""
    return _shipped(framework.name) or Calibration()
