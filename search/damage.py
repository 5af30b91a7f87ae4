"""Conversion of errors from a damaged journal or study into user errors."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import MsgspecError

from autoplan.base.errors import InputError

DAMAGE = (
    *(ArithmeticError, ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError),
    *(zlib.error, MsgspecError),
)


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Raise a user error if the attributes of a study are damaged."""
    try:
        yield
    except DAMAGE as error:
        raise InputError(f"the study is damaged ({type(error).__name__}): give another --study") from None
