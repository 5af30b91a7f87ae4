"""Name of the user, as schedulers know it."""

from __future__ import annotations

import getpass
import os

from autoplan.base.units import cleaned


def user_name() -> str:
    """The name of whoever runs this, or its number: a container may run as one that has no name."""
    try:
        return cleaned(getpass.getuser())
    except (KeyError, OSError):
        return str(os.getuid())
