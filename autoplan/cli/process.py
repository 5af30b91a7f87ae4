"""Termination by signal of commands that start ranks or programs."""

from __future__ import annotations

import signal
from typing import NoReturn


def leave_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that started processes are ended and results are kept."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
