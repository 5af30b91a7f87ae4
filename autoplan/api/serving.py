"""Server of the interactive page: it listens only on this machine and answers only the page that it served.

The address contains a random word that other pages cannot know, and requests must name this machine as their host.
So a page from elsewhere can neither read nor control this one, whatever its own name resolves to.
"""

from __future__ import annotations

import json
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from autoplan.api.plan_result import PlanResult
from autoplan.api.results import MixedPlanResult
from autoplan.api.what_if import Changes, live_page, moved, pinned_page
from autoplan.base.errors import AutoplanError, InputError
from autoplan.base.files import decode

LOOPBACK = "127.0.0.1"
MAX_BYTES = 64 * 1024  # of a request
MAX_PINNED = 8
LONGEST_WAIT_S = 30.0  # for what a browser has begun to send
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
PAGE, TEXT, JSON = ("text/html; charset=utf-8", "text/plain; charset=utf-8", "application/json")


class PageServer(ThreadingHTTPServer):
    """The page of one plan, on a free port of this machine; `serve_forever` answers until it is interrupted."""

    daemon_threads = True
    block_on_close = False
    start: PlanResult
    word: str  # in the address, which only the browser that was told it knows
    page: str

    def __init__(self, result: PlanResult | MixedPlanResult) -> None:
        if isinstance(result, MixedPlanResult):
            raise InputError("--serve needs a plan of equal nodes: leave it out to write the page as a file")
        self.start, self.word = result, secrets.token_urlsafe(16)
        self.page = live_page(result)
        super().__init__((LOOPBACK, 0), _Handler)

    @property
    def hosts(self) -> tuple[str, str]:
        """Names that a browser of this machine may call it."""
        return f"{LOOPBACK}:{self.server_port}", f"localhost:{self.server_port}"

    @property
    def address(self) -> str:
        """Address of the page."""
        return f"http://{self.hosts[0]}/{self.word}/"


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    server: PageServer
    timeout = LONGEST_WAIT_S
    server_version, sys_version = "autoplan", ""

    def do_GET(self) -> None:
        """Give out the page."""
        if self._is_known(""):
            self._answer(HTTPStatus.OK, PAGE, self.server.page)

    def do_POST(self) -> None:
        """Price the values of the controls, or write them as a separate page."""
        answer = _saved if self.path.endswith("/page") else _priced
        if not self._is_known("page" if answer is _saved else "price"):
            return
        try:
            kind, text = answer(self.server.start, self._changes())
        except AutoplanError as error:
            self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, " ".join(str(error).split()))
        else:
            self._answer(HTTPStatus.OK, kind, text)

    def _is_known(self, name: str) -> bool:
        """Return whether a request is for this machine and has the page's secret address; refuse it otherwise."""
        if self.headers.get("Host", "") not in self.server.hosts:
            self._refuse(HTTPStatus.FORBIDDEN, f"the page is served to {self.server.hosts[0]} alone")
        elif not secrets.compare_digest(self.path.encode(), f"/{self.server.word}/{name}".encode()):
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page here: open the address that autoplan printed")
        else:
            return True
        return False

    def _changes(self) -> Changes:
        if self.headers.get_content_type() != JSON:
            raise InputError(f"the request is {self.headers.get_content_type()}: send {JSON}")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and len(length) < 10 and int(length) <= MAX_BYTES):
            raise InputError(f"the request has no length, or is longer than {MAX_BYTES:,} bytes: send a shorter one")
        try:
            table: Any = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise InputError("the request is no JSON: reload the page") from None
        if not isinstance(table, dict):
            raise InputError("the request is no table of values: reload the page")
        changes = decode(Changes, table, "the request")
        if len(changes.pinned) > MAX_PINNED:
            raise InputError(f"{len(changes.pinned)} plans are pinned: unpin one, {MAX_PINNED} are compared at most")
        return changes

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._answer(status, TEXT, f"{reason}\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal clear of requests."""


def _priced(start: PlanResult, changes: Changes) -> tuple[str, str]:
    status, parts = moved(start, changes)
    return JSON, json.dumps({"status": status, "parts": parts})


def _saved(start: PlanResult, changes: Changes) -> tuple[str, str]:
    return PAGE, pinned_page(start, changes)
