"""Parsers of human-readable sizes, times and numbers: '80GB', '400Gb/s', '30d', '15T', '8k', '1,2,4'."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autoplan.base.errors import InputError
from autoplan.base.units import TOKEN_UNITS

_AMOUNT = re.compile(r"([+-]?[0-9]{1,18}(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?)\s*([^\s0-9.]\S{0,9})?")
_LETTERS = ("", "k", "M", "G", "T", "P")


def _prefixed(unit: str, base: float = 1e3, worth: float = 1.0) -> dict[str, float]:
    """Return the value of a unit with each prefix, by its name in lower case."""
    return {f"{letter}{unit}".lower(): worth * base**power for power, letter in enumerate(_LETTERS)}


# Memory is sold in powers of two: the 80GB of a datasheet are 80GiB.  Data on a disk is counted in decimal units.
_MEMORY = _prefixed("B", 1024) | _prefixed("iB", 1024) | {name: _prefixed("", 1024)[name] for name in "kmgtp"}
_DATA = _prefixed("B") | {f"{name[0]}ib": worth for name, worth in _prefixed("B", 1024).items() if name != "b"}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
# Units by the suffix of a field, with an example.  Rates in bits have a small b, so that they are recognised before the
# case is dropped.
_UNITS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("_bytes_per_s", "900GB/s or 400Gb/s", _prefixed("B/s") | _prefixed("bit/s", worth=1 / 8)),
    ("_flops_per_s", "989TFLOPS", _prefixed("FLOPS") | _prefixed("FLOP/s")),
    ("_bytes", "80GB", _MEMORY),
    ("_s", "14us", _TIMES),
    ("_w", "700W", _prefixed("W")),
)
_BITS = re.compile(r"(?<=[kMGTP])b(?:/s|ps)$")
_BITS_OR_BYTES = re.compile(r"([mgtp])b(?:/s|ps)")


def has_unit(field: str) -> bool:
    """Return whether amounts of a field have a unit, by its suffix."""
    return bool(_units_of(field)[1])


def _units_of(field: str) -> tuple[str, dict[str, float]]:
    """Return an example of an amount of a field, and what its units are worth in SI; none for plain numbers."""
    for suffix, example, units in _UNITS:
        if field.endswith(suffix):
            return example, units
    return "0.5", {}


def parse_amount(text: str, key: str, field: str, bare_unit: float | None) -> float:
    """Return the amount of a field, in SI, typed with a unit: '80GB', '400Gb/s', '14us'.

    A bare number is in `bare_unit`; without one it is an error, which names the `key` of the file.
    """
    example, units = _units_of(field)
    match = _AMOUNT.fullmatch(text.strip())
    if match and match[2] and (prefix := _BITS_OR_BYTES.fullmatch(match[2])):
        bytes_, bits = f"{match[1]}{prefix[1].upper()}B/s", f"{match[1]}{prefix[1].upper()}b/s"
        raise InputError(f"{key} {text[:40]!r}: write {bytes_} for bytes or {bits} for bits")
    unit = (_BITS.sub("bit/s", match[2]) if match and match[2] else "").lower()
    worth = units.get(unit) if unit else bare_unit
    if not match or worth is None:
        raise InputError(f"{key} {text[:40]!r}: write a number{' with its unit' if units else ''}, such as {example}")
    return float(match[1]) * worth


def parse_memory(text: str, flag: str) -> float:
    """Return the bytes of a part of a memory such as '4GB', '4GiB' or '0'."""
    return 0.0 if text.strip() == "0" else parse_amount(text, flag, "memory_bytes", None)


def parse_size(text: str, flag: str) -> float:
    """Return the bytes of data such as '150kB' or '2MiB'."""
    match = _AMOUNT.fullmatch(text.strip())
    worth = _DATA.get((match[2] or "").lower()) if match else None
    if not match or worth is None:
        raise InputError(f"{flag} {text!r}: write a number with its unit, such as 150kB")
    return float(match[1]) * worth


def parse_duration(text: str) -> float:
    """Return the seconds of a time such as '90s', '10m', '1.5h' or '30d'."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(s|m|h|d)", text.strip())
    if not match or float(match[1]) <= 0:
        raise InputError(f"time {text!r}: write a number above 0 with a unit, such as 90s, 10m, 1h or 30d")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def parse_count(text: str, flag: str) -> int:
    """Return a count of tokens, sequences or ranks: '8192', '8k' (8,192) or '1M' (1,048,576), in powers of two."""
    match = re.fullmatch(r"([+-]?[0-9]{1,18})([kKmM]?)", text.strip())
    if not match:
        raise InputError(f"{flag} {text!r}: write a whole number of at most 18 digits, or one such as 8k for 8,192")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Return the distinct numbers in '1,2,4'."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}[kKmM]?", part) for part in parts):
        raise InputError(f"{flag} {text!r}: write whole numbers from 1, such as 1,2,4")
    return tuple(dict.fromkeys(parse_count(part, flag) for part in parts))


def parse_words(text: str, flag: str, known_words: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct words in 'a,b', all of which must be known."""
    words = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [word for word in words if word not in known_words]:
        raise InputError(f"{flag} {unknown[0]!r} is unknown; known are {', '.join(known_words)}")
    return words


def parse_batches(text: str) -> tuple[int, int]:
    """Return (least, most) global batch for 'NUMBER' or 'LOW:HIGH'."""
    low, sign, high = text.partition(":")
    numbers = []
    for part in (low, high) if sign else (low,):
        match = re.fullmatch(r"[0-9]{1,9}[kKmM]?", part.strip())
        number = parse_count(part, "global batch") if match else 0
        if not 1 <= number < 10**9:
            raise InputError(
                f"global batch {text!r}: write a whole number of sequences from 1 to 999999999, or LOW:HIGH"
            )
        numbers.append(number)
    if numbers[0] > numbers[-1]:
        raise InputError(f"global batch {text!r}: LOW must not exceed HIGH")
    return numbers[0], numbers[-1]


def parse_tokens(text: str) -> float:
    """Return the number of tokens in '15T', '445B', '500k', '2e12' or '1000000', in decimal units."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)([TBMK]?)", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise InputError(f"--tokens {text!r}: write a number of tokens, such as 15T or 300B")
    sizes = {unit: size for size, unit in TOKEN_UNITS} | {"K": 1e3, "": 1.0}
    return float(match[1]) * sizes[match[2].upper()]


def parse_positive(text: str, flag: str) -> float:
    """Return a positive number such as '2.5', or '10k' for 10,000."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)([kKM]?)", text.strip())
    if not match or float(match[1]) <= 0:
        raise InputError(f"{flag} {text!r}: write a number above 0, such as 2.5")
    return float(match[1]) * {"": 1.0, "k": 1e3, "m": 1e6}[match[2].lower()]
