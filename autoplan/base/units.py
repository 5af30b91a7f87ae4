"""Quantities in SI units, and as text in human units for files and the screen."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby

from autoplan.base.errors import InputError, OutOfRangeError

MIB, GIB = 2**20, 2**30
TOKEN_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))

# A key in a file may have a human unit; internally there is one SI unit per quantity.  Bandwidth is decimal and per
# direction; memory is binary.  (suffix of the key in a file, suffix of the field, factor)
FILE_UNITS: tuple[tuple[str, str, float], ...] = (
    ("_gb_per_s", "_bytes_per_s", 1e9),
    ("_gib", "_bytes", float(GIB)),
    ("_mib", "_bytes", float(MIB)),
    ("_tflops", "_flops_per_s", 1e12),
    ("_us", "_s", 1e-6),
    ("_ms", "_s", 1e-3),
)

_VOLUMES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def file_keys(field: str) -> tuple[str, ...]:
    """Return the possible keys of `field` in a file: `memory_gib`, `memory_mib`, `memory` or `memory_bytes`."""
    units, bare = file_units(field), bare_key(field)
    return (*(field[: -len(inside)] + human for human, inside, _ in units), *((bare,) if bare else ()), field)


def bare_key(field: str) -> str | None:
    """Return the key without a unit, whose values have one: `memory` for `memory_bytes`; None if there is no unit."""
    units = file_units(field)
    return field[: -len(units[0][1])] if units else None


@lru_cache(maxsize=1024)
def file_units(field: str) -> tuple[tuple[str, str, float], ...]:
    """Return the rows of `FILE_UNITS` for a field; the suffix of a rate is not that of a time."""
    rows = [row for row in FILE_UNITS if field.endswith(row[1])]
    longest = max((len(inside) for _, inside, _ in rows), default=0)
    return tuple(row for row in rows if len(row[1]) == longest)


def check_count(name: str, value: int, *, at_least: int = 1, at_most: int = 10**9) -> None:
    """Raise an error for a count outside [at_least, at_most]."""
    if not at_least <= value <= at_most:
        raise InputError(f"{name} must be between {at_least} and {at_most}, got {value}")


MOST = 1e30  # maximum of any quantity; the minimum is its inverse: products of a few neither overflow nor vanish


def check_positive(name: str, value: float, *, at_most: float = MOST) -> None:
    """Raise an error for a quantity that is zero, negative, not a number or absurdly large or small."""
    if not (math.isfinite(value) and value > 0):
        raise OutOfRangeError(name, value, "must be a positive finite number")
    if not 1 / MOST <= value <= at_most:
        raise OutOfRangeError(name, value, f"must be in [{1 / MOST:g}, {at_most:g}]")


def check_fraction(name: str, value: float) -> None:
    """Raise an error for a share outside (0, 1], or an absurdly small one."""
    if not (math.isfinite(value) and 0 < value <= 1):
        raise OutOfRangeError(name, value, "must be above 0 and at most 1")
    check_positive(name, value)


def check_not_negative(name: str, value: float) -> None:
    """Raise an error for a quantity that is negative, not a number or absurdly large."""
    if not (math.isfinite(value) and value >= 0):
        raise OutOfRangeError(name, value, "must be finite and not negative")
    if value > MOST:
        raise OutOfRangeError(name, value, f"must be at most {MOST:g}")


def check_name(name: str, value: str) -> None:
    """Raise an error for a name that is empty or not printable on one line of a terminal or script."""
    if not value.strip() or not value.isprintable():
        raise InputError(f"{name} must be printable text and not empty, got {value[:40]!r}")


def format_bytes(value: float) -> str:
    """Return `value` bytes in GiB: '71.3 GiB'."""
    return f"{value / GIB:,.1f} GiB"


def format_rate(value: float) -> str:
    """Return `value` bytes/s with three digits, decimal: '47.0 GB/s', '3.01 TB/s'."""
    scaled, unit = (value / 1e12, "TB/s") if value >= 999.5e9 else (value / 1e9, "GB/s")
    return f"{_three_figures(scaled)} {unit}"


def format_flops(value: float) -> str:
    """Return `value` operations per second with three digits or more: '989 TFLOP/s', '160 GFLOP/s'."""
    scaled, unit = (value / 1e12, "TFLOP/s") if value >= 0.9995e12 else (value / 1e9, "GFLOP/s")
    return f"{_three_figures(scaled)} {unit}"


def format_volume(value: float) -> str:
    """Return `value` bytes of traffic with three digits, decimal like rates: '47.0 GB', '3.01 MB'."""
    scale, unit = next(((scale, unit) for scale, unit in _VOLUMES if value >= 0.9995 * scale), _VOLUMES[-1])
    return f"{value / scale:.{0 if value >= 99.95 * scale else 1 if value >= 9.995 * scale else 2}f} {unit}"


def format_seconds(value: float) -> str:
    """Return `value` seconds with three or four digits in a readable unit: '7.31 s', '412 ms'."""
    if not math.isfinite(value):
        return "-"
    if value >= 100:
        return f"{value:,.1f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.1f} us"


def format_percent(fraction: float) -> str:
    """Return `fraction` in percent with one decimal."""
    return f"{100 * fraction:.1f} %"


def format_days(value: float) -> str:
    """Return `value` seconds of a run with three digits: '31.6 d', '9.28 h', '25.0 min'."""
    for unit_s, unit in ((86400, "d"), (3600, "h")):
        if value >= unit_s:
            return f"{_three_figures(value / unit_s)} {unit}"
    return f"{_three_figures(value / 60)} min"


def format_tokens(value: float) -> str:
    """Return `value` tokens with three digits: '15.6T', '445B'."""
    scaled, unit = next(((value / size, sign) for size, sign in TOKEN_UNITS if value >= 0.9995 * size), (value, ""))
    return f"{_three_figures(scaled)}{unit}"


def _three_figures(value: float) -> str:
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}"


def format_two_figures(value: float) -> str:
    """Return `value` with at least two significant digits, and all integer digits: '0.042', '87', '1,234'."""
    return f"{value:.2g}" if value < 9.95 else f"{value:,.0f}"


MAX_TEXT, MAX_LISTED = 1_000, 8  # maximum characters of a name or a reason; words of a list


def cleaned(text: str) -> str:
    """Return external `text` without control characters, truncated to `MAX_TEXT`."""
    return "".join(letter for letter in text if unicodedata.category(letter)[0] != "C")[:MAX_TEXT]


def listed(words: Iterable[str]) -> str:
    """Return words of a file for a message: the first few, without control characters and truncated."""
    all_words = list(words)
    more = f" and {len(all_words) - MAX_LISTED} more" if len(all_words) > MAX_LISTED else ""
    return ", ".join(cleaned(word)[:60] for word in all_words[:MAX_LISTED]) + more


def first_faults(faults: Sequence[str]) -> str:
    """Return the first faults of a file in one message of at most about `MAX_TEXT` characters, and count the others."""
    num_shown = max(sum(length <= MAX_TEXT for length in accumulate(map(len, faults))), 1)
    more = f"; and {counted(len(faults) - num_shown, 'fault')} more" if len(faults) > num_shown else ""
    return "; ".join(faults[:num_shown]) + more


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: '1 node', '8 nodes'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def repetitions(counts: Iterable[object]) -> str:
    """Return counts with repetitions merged: '7, 14 x 8, 7'."""
    runs = ((count, len(list(same))) for count, same in groupby(counts))
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for count, times in runs)
