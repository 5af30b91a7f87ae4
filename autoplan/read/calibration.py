"""Calibration of a framework on a device: shipped ones and the user's own."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from autoplan.base.files import decode, read_table, shipped
from autoplan.spec.framework import Framework
from autoplan.spec.timing import FACTORS, TIME_SPREADS, Calibration
from autoplan.topology.cluster import DeviceSpec

# Of runs under a framework that no preset describes: known ones priced with the traits of Megatron-Core are off by
# .2 to .36 where they fill more than half of a device.
UNKNOWN_FRAMEWORK = Calibration(name="unknown framework", memory_spread=0.25)


@lru_cache(maxsize=64)
def _shipped(name: str) -> Calibration | None:
    path = shipped("calibrations").get(name)
    return decode(Calibration, read_table(path), f"calibration {name}") if path else None


def built_in_calibration(framework: Framework, device: DeviceSpec) -> Calibration:
    """Return the calibration that ships for `framework` on the generation of a device.

    The reference with its wide spread where that was not measured: factors of one framework do not hold for another.
    On a device whose own rates nobody measured it counts as fitted to no run.
    """
    found = _shipped(f"{framework.calibration_name}-{device.generation}") or Calibration()
    return replace(found, sources=()) if device.rate_spread else found


def load_calibration(path: Path) -> Calibration:
    """The calibration in a TOML file."""
    return decode(Calibration, read_table(path), str(path))


def calibration_text(calibration: Calibration) -> str:
    """A calibration as TOML; factors of 1 are left out."""
    lines = [f"name = {_quoted(calibration.name)}"]
    lines += [f"{name} = {value:.4g}" for name in FACTORS if (value := getattr(calibration, name)) != 1.0]
    lines += [
        f"{name} = {value:.3g}"
        for name in (*TIME_SPREADS, "memory_spread")
        if (value := getattr(calibration, name)) is not None
    ]
    if calibration.exposed_share < 1:
        lines.append(f"exposed_share = {calibration.exposed_share:.3g}")
    lines += ["sources = [", *(f"    {_quoted(source)}," for source in calibration.sources), "]"]
    if fitted := calibration.fitted_with:
        lines += ["", "[fitted_with]", f"device = {_quoted(fitted.device)}", f"autoplan = {_quoted(fitted.autoplan)}"]
        lines += [f"timings = {_quoted(fitted.timings)}"] if fitted.timings else []
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
