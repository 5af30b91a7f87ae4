"""Fields of a plan that follow from others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from autoplan.base.errors import InputError
from autoplan.spec.axes import PARTLY_MEANT
from autoplan.spec.enums import Precision, Schedule, Sharding


def derived_values(
    *,
    num_devices: int | None = None,
    has_experts: bool = False,
    has_latents: bool = False,
    hint: str = "",
    **values: Any,
) -> dict[str, Any]:
    """Return the fields of a plan: `values`, and those that follow from them where they are missing or None.

    Data parallelism takes what the other degrees leave of the devices, and all replicas that are no copies share their
    states; chunks of a rank are interleaved; experts are split like other matrices.  Sequence parallelism needs tp > 1,
    and where nothing is sharded no parameters are gathered; what means something with other precisions or models alone
    is left out.  `hint` ends the refusal of degrees that do not divide.
    """
    tp = values.get("tp", 1)
    if num_devices is not None:
        dp = _data_parallel(num_devices, {axis: values.get(axis, 1) for axis in ("tp", "cp", "pp")}, hint)
        if (group := values.get("dp_shard")) and dp % group:
            raise InputError(f"dp {dp} is not a multiple of the {group} ranks that states are sharded over")
        copies = values.get("dp_replicate", dp // group if group else 1)
        if dp % copies:
            raise InputError(f"dp_replicate {copies} does not divide dp {dp}{hint}")
        values |= {"dp_replicate": copies, "dp_shard": dp // copies}
    if values.get("schedule") is None:
        values["schedule"] = Schedule.INTERLEAVED if values.get("vp", 1) > 1 else Schedule.ONE_F_ONE_B
    if values.get("etp") is None:
        values["etp"] = tp if has_experts else 1
    gathers = values.get("param_gather_overlap", True) and values.get("sharding") != Sharding.NONE
    precision = values.get("precision") or Precision.BF16
    for axis in PARTLY_MEANT:
        matters = axis.can_matter(precision, has_experts=has_experts, has_latents=has_latents)
        if values.get(axis.name) is None or not matters:
            values[axis.name] = axis.default
    return values | {"sp": bool(values.get("sp")) and tp > 1, "param_gather_overlap": gathers}


def _data_parallel(num_devices: int, degrees: Mapping[str, int], hint: str) -> int:
    """The replicas that other degrees leave of the devices."""
    for axis, degree in degrees.items():
        if degree < 1:
            raise InputError(f"{axis} must be at least 1, got {degree}")
    dp, remainder = divmod(num_devices, math.prod(degrees.values()))
    if remainder or not dp:
        shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
        raise InputError(f"{shown} does not divide the {num_devices} devices{hint}")
    return dp
