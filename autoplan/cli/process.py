"""Termination by signal of commands that start ranks or programs."""

from __future__ import annotations

import signal
from typing import NoReturn


class Terminated(SystemExit):
    """End by SIGTERM, with the exit status that shells expect."""


def leave_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that started processes are ended and results are kept."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # `timeout` sends it twice: the second one must not disturb the end
    raise Terminated(128 + number)
