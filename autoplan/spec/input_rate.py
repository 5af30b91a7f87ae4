"""Rates at which storage, tokenisation and loaders deliver samples."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from autoplan.base.errors import InputError
from autoplan.base.units import check_positive

_RATE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kKMGT]?)(samples|tokens|B)/s(/node)?")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRate:
    """Samples or tokens per second that one part of the input path delivers, to each node or to all together."""

    amount_per_s: float
    unit: Literal["samples", "tokens"]
    per_node: bool
    stated: str  # in the units of the user

    def __post_init__(self) -> None:
        check_positive("input rate", self.amount_per_s)

    def __str__(self) -> str:
        return f"{self.stated} per node" if self.per_node else self.stated


def parse_input_rate(text: str, sample_bytes: float | None) -> InputRate:
    """Return the rate in '5000samples/s', '400ktokens/s/node' or '2GB/s/node'; bytes need the size of a sample."""
    match = _RATE.fullmatch(text.strip())
    if not match or float(match[1]) <= 0:
        raise InputError(
            f"--input-rate {text!r}: write a number with a unit, such as 5000samples/s, 400ktokens/s/node or 2GB/s/node"
        )
    amount, unit, stated = float(match[1]) * _PREFIXES[match[2]], match[3], f"{match[1]} {match[2]}{match[3]}/s"
    if unit == "B":
        if sample_bytes is None:
            raise InputError(f"--input-rate {text!r}: bytes need the size of a sample: give --sample-size too")
        amount, unit = amount / sample_bytes, "samples"
    return InputRate(amount_per_s=amount, unit=unit, per_node=bool(match[4]), stated=stated)  # type: ignore[arg-type]
