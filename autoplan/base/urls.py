"""Database URLs as shown to people, without their password."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence

from autoplan.base.errors import InputError

# One reading only: no second '@', no '/', '?' or '#' in a password that is not percent-encoded.
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+]*)://"
    r"(?:(?P<user>[^:/?#@\s]*)(?::[^/?#@\s]*)?@)?"
    r"(?P<place>(?:\[[0-9A-Fa-f:.]+\]|[^@?#:/\s]*)(?::[0-9]*)?(?:/[^@?#\n]*)?)(?:\?[^@#\s]*)?"
)
_SECRET = re.compile(r"://|pass\w*\s*=|:[^/]*@", re.IGNORECASE)
_FLAG = re.compile(r"(?P<flag>--?[a-z-]+=)?(?P<value>.*)", re.DOTALL)


def is_url(text: str) -> bool:
    """Return whether `text` is a database URL that can be read in one way only."""
    return _URL.fullmatch(text) is not None


def redact_url(text: str) -> str:
    """`text` without password and options: scheme, user, host, port and database; of an unreadable URL nothing.

    What cannot hold a password, such as a path, stays as it is.
    """
    if not _SECRET.search(text):
        return text
    match = _URL.fullmatch(text)
    if match is None:
        return "an unreadable database URL"
    user = f"{match['user']}@" if match["user"] else ""
    return f"{match['scheme']}://{user}{match['place']}"


def redact_arguments(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(`arguments` with every URL redacted, what each redacted one stood for).

    So nothing behind the parsing of a command line, its own errors included, ever sees a password.
    """
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
    """Return what was typed, without passwords."""
    return shlex.join(["autoplan", *redact_arguments(sys.argv[1:])[0]])
