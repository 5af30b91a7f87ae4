"""Errors that reading a damaged journal or study ends in, as an error of the user's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import MsgspecError

from autoplan.base.errors import InputError

DAMAGE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError, zlib.error, MsgspecError)


@contextmanager
def refusing_damage() -> Iterator[None]:
    """Refuse attributes of a study that do not hold what was written there."""
    try:
        yield
    except DAMAGE as error:
        raise InputError(f"the study is damaged ({type(error).__name__}): give another --study") from None
