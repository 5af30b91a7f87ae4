"""Who is at work here?"""

from __future__ import annotations

import getpass


def user_name() -> str:
    """The name of the user; blank where there is none, as in a container that runs as a mere number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
