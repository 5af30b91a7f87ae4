"""Parsers of human-readable sizes, times and numbers: '4GiB', '30d', '15T', '8k', '1,2,4'."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autoplan.base.errors import InputError
from autoplan.base.units import TOKEN_UNITS

_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?P<unit>[kmgt]i?b|b)?", re.IGNORECASE)
_SIZE_UNITS = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_SIZE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str) -> float:
    """Return the bytes of a size such as '4GiB', '500MB' or '0'."""
    match = _SIZE.fullmatch(text.strip())
    if not match or (match["unit"] is None and float(match["number"]) != 0):
        raise InputError(f"memory size {text!r}: write a number with a unit, such as 4GiB")
    return float(match["number"]) * _SIZE_UNITS[(match["unit"] or "b").lower()]


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
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", part) for part in parts):
        raise InputError(f"{flag} {text!r}: write whole numbers from 1, such as 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in parts))


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
    """Return the number of tokens in '15T', '445B', '2e12' or '1000000'."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)([TBM]?)", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise InputError(f"--tokens {text!r}: write a number of tokens, such as 15T or 300B")
    return float(match[1]) * next((size for size, unit in TOKEN_UNITS if unit == match[2].upper()), 1.0)


def parse_positive(text: str, flag: str) -> float:
    """Return a positive decimal number."""
    if not re.fullmatch(r"[0-9]{1,12}(?:\.[0-9]{1,12})?", text.strip()) or float(text) <= 0:
        raise InputError(f"{flag} {text!r}: write a number above 0, such as 2.5")
    return float(text)
