"""Models by their names on the Hugging Face hub: from its cache, else from a server, once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import autoplan
from autoplan.base.errors import InputError
from autoplan.readers.hub import HUB_NAME
from autoplan.readers.model import hub_name, load_model

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}
NAME = "some-lab/tiny-7"
PROXIED = "some-lab/proxied"  # a proxy answers with a page of its own


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without any cache, and no network."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.fixture
def asked(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str | None]]]:
    """Requests to a server that stands for the hub: (path, authorization)."""
    requests: list[tuple[str, str | None]] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers.get("Authorization")))
            body = b"<html>Log in</html>" if PROXIED in self.path else json.dumps(CONFIG).encode()
            self.send_response(200 if NAME in self.path or PROXIED in self.path else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
    yield requests
    server.shutdown()
    server.server_close()


def test_a_model_is_read_from_the_cache_of_the_hub_in_its_main_revision(nowhere: Path) -> None:
    folder = nowhere / ".cache/huggingface/hub/models--some-lab--tiny-7"
    for revision, layers in (("old", 2), ("new", 4)):
        (folder / "snapshots" / revision).mkdir(parents=True)
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    assert load_model(NAME).num_layers == 4  # the newest
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("old")
    model = load_model(NAME)
    assert (model.name, model.num_layers, hub_name(model)) == ("tiny-7", 2, NAME)


def test_a_model_is_downloaded_once_and_says_from_where(
    asked: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    about = {"cluster": "h100-sxm:1x8", "global_batch": 8, "seq_len": 1024}
    result = autoplan.estimate(NAME, **about, plan={"micro_batch": 1})  # type: ignore[arg-type]
    assert asked == [("/some-lab/tiny-7/resolve/main/config.json", "Bearer secret")]
    assert any("tiny-7 is read from http://127.0.0.1" in warning for warning in result.warnings)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_model(NAME) == result.file.model
    assert len(asked) == 1


@pytest.mark.usefixtures("asked")
def test_what_the_hub_does_not_give_is_said() -> None:
    with pytest.raises(InputError, match=r"no-lab/none/resolve/main/config\.json needs HF_TOKEN, or is not there"):
        load_model("no-lab/none")


@pytest.mark.usefixtures("asked")
def test_a_page_of_a_proxy_is_refused_and_not_kept(nowhere: Path) -> None:
    with pytest.raises(InputError, match="answers with no JSON, such as a proxy's page: pass the path"):
        load_model(PROXIED)
    assert not list(nowhere.rglob("config.json"))


def test_no_connection_is_one_line(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set: pass the path"):
        load_model(NAME)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match="neither a preset nor in a cache, and http://127"):
        load_model(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(InputError, match="no address of the web"):
        load_model(NAME)
    assert not list(nowhere.rglob("config.json"))


def test_a_path_is_no_name_of_a_hub() -> None:
    names = ("org/name", "a.b/c.d", "../x", "./x", "org/..", "org/.")
    assert [bool(HUB_NAME.fullmatch(name)) for name in names] == [True, True, False, False, False, False]
