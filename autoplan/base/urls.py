"""Display of database URLs without their password."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

from autoplan.base.errors import InputError

# Unambiguous URLs only: no second '@', and no '/', '?' or '#' in a password unless percent-encoded.
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+]*)://"
    r"(?:(?P<user>[^:/?#@\s]*)(?::[^/?#@\s]*)?@)?"
    r"(?P<place>(?:\[[0-9A-Fa-f:.]+\]|[^@?#:/\s]*)(?::[0-9]*)?(?:/[^@?#\n]*)?)(?:\?[^@#\s]*)?"
)
_SECRET = re.compile(r"://|pass\w*\s*=|:[^/]*@", re.IGNORECASE)
_FLAG = re.compile(r"(?P<flag>--?[a-z-]+=)?(?P<value>.*)", re.DOTALL)


def is_url(text: str) -> bool:
    """Return whether `text` is an unambiguous database URL."""
    return _URL.fullmatch(text) is not None


def redact_url(text: str) -> str:
    """Return a URL's scheme, user, host, port and database; nothing of an invalid URL; a path is unchanged."""
    if not _SECRET.search(text):
        return text
    match = _URL.fullmatch(text)
    if match is None:
        return "an unreadable database URL"
    user = f"{match['user']}@" if match["user"] else ""
    return f"{match['scheme']}://{user}{match['place']}"


def redact_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return (`arguments` with redacted URLs, before any parsing; the original of each redacted one)."""
    shown: list[str] = []
    urls: dict[str, str] = {}
    for argument in arguments:
        match = _FLAG.fullmatch(argument)
        assert match is not None
        value = redact_url(match["value"])
        if value != match["value"] and urls.setdefault(value, match["value"]) != match["value"]:
            raise InputError(f"{value} is given with two passwords or options: give one of them as AUTOPLAN_DB")
        shown.append(f"{match['flag'] or ''}{value}")
    return shown, urls


def command_line() -> str:
    """Return the command line without passwords; bytes that are no text, as in the names of some files, are escaped."""
    line = shlex.join(["autoplan", *redact_arguments(sys.argv[1:])[0]])
    return line.encode("utf-8", "backslashreplace").decode()
