"""Can a search be watched?  The server of optuna-dashboard on the storage of a search."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from urllib.request import urlopen
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from optuna_dashboard import wsgi
from optuna_dashboard._storage_url import get_storage

from commands import run

ASKED = ("llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096", "--fix", "pp=1")


class Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("storage", ["sqlite:///{}/study.db", "{}/study.journal"])
def test_the_dashboard_shows_the_study_of_a_search(tmp_path: Path, storage: str) -> None:
    where = storage.format(tmp_path)
    answer = run(tmp_path, "search", *ASKED, "--storage", where, "--json")
    assert answer.returncode == 0
    assert f"watch it: optuna-dashboard {where}" in answer.stderr
    best = json.loads(answer.stdout)["best"]
    with make_server("127.0.0.1", 0, wsgi(get_storage(where)), handler_class=Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}/api/studies"
        try:
            with urlopen(at, timeout=30) as page:
                (study,) = json.load(page)["study_summaries"]
            with urlopen(f"{at}/{study['study_id']}", timeout=30) as page:
                shown = json.load(page)
        finally:
            server.shutdown()
    assert shown["name"].startswith("llama3-8b-")
    values = [trial["values"][0] for trial in shown["trials"] if trial["state"] == "Complete" and trial.get("values")]
    assert min(values) == pytest.approx(best["step_s"] / best["plan"]["global_batch"])
