"""End of a command that starts ranks or programs, by a signal."""

from __future__ import annotations

import signal
from typing import NoReturn


def leave_on_sigterm() -> None:
    """Let SIGTERM end the program as an exception does: what it started is ended, what it holds is kept."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
