"""Models of the Hugging Face hub: their config.json from the hub's cache on this machine, otherwise downloaded.

Variables of the environment are those of huggingface_hub: HF_HUB_CACHE, HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from autoplan.base.errors import InputError
from autoplan.base.files import MAX_BYTES, is_file, of_user, own_folder, refused_writes, write_text

HUB_NAME = re.compile(r"(?!\.+/)[\w.-]+/(?!\.+$)[\w.-]+", re.ASCII)  # no path such as ../x
_TIMEOUT_S = 10.0


def config_url(name: str) -> str:
    """Return the address of the config.json of ORG/NAME in its main revision."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return f"{endpoint}/{name}/resolve/main/config.json"


def cached_config(name: str) -> Path | None:
    """Return the config.json of ORG/NAME in the hub's cache, of its main revision or the newest, if any."""
    home = of_user(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / _folder_name(name)
    try:
        main = [(folder / "refs" / "main").read_text("utf-8").strip()]
    except (OSError, ValueError):
        main = []
    try:
        newest = sorted((folder / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        newest = []
    snapshots = (*(folder / "snapshots" / Path(revision).name for revision in main), *newest)
    return next((snapshot / "config.json" for snapshot in snapshots if is_file(snapshot / "config.json")), None)


def kept_config(name: str) -> Path:
    """Return the config.json of ORG/NAME, which is downloaded once and kept; raises InputError if it cannot be had."""
    path = own_folder("cache") / "hub" / _folder_name(name) / "config.json"
    if is_file(path):
        return path
    text = _download(name)
    with refused_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text, force=True)
    return path


def _folder_name(name: str) -> str:
    return f"models--{name.replace('/', '--')}"


def _download(name: str) -> str:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    url = config_url(name)
    remedy = "pass the path of its config.json"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise InputError(f"{name} is neither a preset nor in the cache of the hub, and HF_HUB_OFFLINE is set: {remedy}")
    if not url.startswith(("https://", "http://")):
        raise InputError(f"HF_ENDPOINT {url[:60]!r} is no address of the web: unset it, or {remedy}")
    request = Request(url, headers={"User-Agent": "autoplan"})
    if token := os.environ.get("HF_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")  # to this host alone
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            text: bytes = answer.read(MAX_BYTES + 1)
    except HTTPError as error:
        reasons = {401: "needs HF_TOKEN, or is not there", 403: "needs access, and HF_TOKEN", 404: "is not there"}
        raise InputError(f"{url} {reasons.get(error.code, f'answers {error.code}')}: {remedy}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = str(getattr(error, "reason", error))[:80]
        raise InputError(f"{name} is neither a preset nor in a cache, and {url} fails ({reason}): {remedy}") from None
    if len(text) > MAX_BYTES:
        raise InputError(f"{url} has more than {MAX_BYTES:,} bytes, which is no config.json: {remedy}")
    try:
        json.loads(text)
    except ValueError:  # such as the page of a proxy, which must not be kept
        raise InputError(f"{url} answers with no JSON, such as a proxy's page: {remedy}") from None
    return text.decode("utf-8", errors="replace")
