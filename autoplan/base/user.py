"""Name of the user, as schedulers show it."""

from __future__ import annotations

import getpass
import os

from autoplan.base.units import cleaned


def user_name() -> str:
    """Return the user's name, or the user id, because a container may run as a user without a name."""
    try:
        return cleaned(getpass.getuser())
    except (KeyError, OSError):
        return str(os.getuid())
