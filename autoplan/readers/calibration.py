"""Calibrations of a framework on a device: shipped ones and the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from autoplan.base.files import decode, read_table, shipped
from autoplan.spec.calibration import FACTORS, TIME_SPREADS, Calibration
from autoplan.spec.framework import Framework
from autoplan.topology.cluster import DeviceSpec

# For runs priced with the facts of a similar framework: 90 % of the 60 runs (six sources) that use more than 40 % of a
# device's memory are within .29, and 90 % of the 46 runs above 60 % within .18: .18 and .11.
SIMILAR_MEMORY_SPREAD = 0.15
ANOTHER_FRAMEWORK = "another framework"  # name of the calibration of such runs


@lru_cache(maxsize=1)
def shipped_calibrations() -> dict[str, Calibration]:
    """Return the shipped calibrations by framework and generation, such as "nemo-hopper"."""
    return {
        name: decode(Calibration, read_table(path), f"calibration {name}")
        for name, path in shipped("calibrations").items()
    }


def built_in_calibration(framework: Framework, device: DeviceSpec, *, is_similar: bool = False) -> Calibration:
    """Return the shipped calibration for `framework` on the generation of a device.

    If the device's own rates are not measured, the calibration counts as fitted to no run.  `is_similar`: the runs use
    another framework without facts, which is similar to `framework`.
    """
    calibration = calibration_among(
        shipped_calibrations(), framework.calibration_name, device.generation, is_similar=is_similar
    )
    return replace(calibration, sources=()) if device.rate_spread else calibration


def calibration_among(
    calibrations: Mapping[str, Calibration], framework: str, generation: str, *, is_similar: bool = False
) -> Calibration:
    """Return the calibration of a framework on a generation, chosen from `calibrations`.

    If none matches both, the result is based on runs of this framework on other generations, or of any framework.
    """
    exact = calibrations.get(f"{framework}-{generation}")
    if exact and exact.blocks and not is_similar:
        return exact
    names = {name: name.rpartition("-") for name, calibration in calibrations.items() if calibration.blocks}
    elsewhere = [calibrations[name] for name, (of_framework, _, _) in names.items() if of_framework == framework]
    similar = (elsewhere if elsewhere and not is_similar else [calibrations[name] for name in names]) or [Calibration()]
    base = (
        Calibration(name=ANOTHER_FRAMEWORK, memory_spread=SIMILAR_MEMORY_SPREAD)
        if is_similar
        else exact or Calibration()
    )
    return Calibration(
        name=base.name,
        blocks=tuple(sorted({block for calibration in similar for block in calibration.blocks})),
        precisions=tuple(sorted({precision for calibration in similar for precision in calibration.precisions})),
        most_devices=max(calibration.most_devices for calibration in similar),
        memory_spread=base.memory_spread,
        sources=base.sources,
    )


def load_calibration(path: Path) -> Calibration:
    """Return the calibration in a TOML file."""
    return decode(Calibration, read_table(path), str(path))


def calibration_text(calibration: Calibration) -> str:
    """Return a calibration as TOML, without factors of 1."""
    lines = [f"name = {_quoted(calibration.name)}"]
    lines += [f"{name} = {value:.4g}" for name in FACTORS if (value := getattr(calibration, name)) != 1.0]
    lines += [
        f"{name} = {value:.3g}"
        for name in (*TIME_SPREADS, "memory_spread")
        if (value := getattr(calibration, name)) is not None
    ]
    lines += [f"most_devices = {calibration.most_devices}"] if calibration.most_devices else []
    lines += [
        f"{name} = [{', '.join(map(_quoted, value))}]"
        for name in ("blocks", "precisions")
        if (value := getattr(calibration, name))
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
