"""What does a command need that starts ranks or programs, and how is it asked to end?"""

from __future__ import annotations

import importlib.util
import signal
from typing import NoReturn

from autoplan.base.errors import InputError


def check_torch() -> None:
    """Refuse a machine without what ranks run on."""
    if missing := [name for name in ("torch", "psutil") if importlib.util.find_spec(name) is None]:
        raise InputError(f"this needs {' and '.join(missing)}: pip install 'autoplan[profile]'")


def leave_on_sigterm() -> None:
    """Let SIGTERM end the program as an exception does: what it started is ended, what it holds is kept."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)
