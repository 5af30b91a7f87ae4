"""The page that is served: what it prices, and whom it answers."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

import autoplan
from autoplan import PlanResult
from autoplan.api.serving import MAX_BYTES, PageServer
from autoplan.api.what_if import changed, controls_of
from autoplan.base.errors import AutoplanError, InputError, NoPlanError
from commands import run

DENSE = {"model": "llama3-8b", "cluster": "h100-sxm:2x8", "global_batch": 64, "seq_len": 4096}
EXPERTS = {"model": "mixtral-8x7b", "cluster": "h100-sxm:4x8", "global_batch": 128, "seq_len": 4096}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (DENSE, {}),
    "pipeline": (DENSE, {"tp": 2, "pp": 4, "vp": 2, "recompute": "full:2", "grad_dtype": "bf16"}),
    "uneven": (DENSE, {"pp": 4, "layers_per_chunk": "7,9,9,7", "recompute": "mlp+core_attn"}),
    "no sequence parallelism": (DENSE, {"tp": 4, "sp": False, "sharding": "none"}),
    "experts": (EXPERTS, {"tp": 2, "ep": 8, "etp": 1, "dispatcher": "deepep", "micro_batch": 2}),
    "fsdp": (DENSE | {"framework": "pytorch-fsdp"}, {"sharding": "zero3", "dp_replicate": 2, "recompute": "full"}),
    "deepspeed": (DENSE | {"framework": "deepspeed-zero"}, {"sharding": "zero2", "cp_kind": "all_to_all"}),
    "torchtitan": (DENSE | {"framework": "torchtitan"}, {"tp": 2, "sharding": "zero3", "reduce_dtype": "half"}),
}


def priced(name: str) -> PlanResult:
    asked, axes = PLANS[name]
    return autoplan.estimate(**asked, plan=axes)


def values_of(start: PlanResult) -> dict[str, str]:
    return {control.name: control.value for control in controls_of(start)}


# -- what is priced ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_values_that_are_not_changed_make_the_plan(name: str) -> None:
    start = priced(name)
    for control in controls_of(start):
        assert not control.choices or control.value in control.choices, control
    assert changed(start, values_of(start)) is start


def test_changed_values_have_the_price_of_an_estimate() -> None:
    start = priced("pipeline")
    values = values_of(start) | {"nodes": "4", "seq_len": "8k", "global_batch": "128", "tp": "4", "vp": "1"}
    result = changed(start, values)
    axes = {"tp": 4, "pp": 4, "recompute": "full:2", "grad_dtype": "bf16"}
    asked = DENSE | {"cluster": "h100-sxm:4x8", "seq_len": 8192, "global_batch": 128}
    assert result.file.best == autoplan.estimate(**asked, plan=axes).file.best  # type: ignore[arg-type]


def test_layers_of_another_number_of_chunks_are_spread_anew() -> None:
    start = priced("uneven")
    assert changed(start, values_of(start) | {"pp": "2"}).plan.layers_per_chunk is None
    with pytest.raises(InputError, match="layers_per_chunk has 3 entries, pp x vp is 2"):
        changed(start, values_of(start) | {"pp": "2", "layers_per_chunk": "8,12,12"})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tp", "3", "tp 3 x pp 4 does not divide the 16 devices"),
        ("tp", "many", "tp=many: must be a whole number"),
        ("vp", "99", "megatron-core does not support the plan: pp 4 x vp 99 chunks exceed the 32 layers"),
        ("sharding", "zero9", "must be one of none, zero1, zero2, zero3"),
        ("nodes", "0", "nodes 0: must be at least 1"),
        ("nodes", "9M", "nodes 9,437,184: must be at most"),
        ("seq_len", "", "sequence length '': write a whole number"),
        ("placement", "n1,n2", "placement cannot be changed here"),
    ],
)
def test_impossible_values_are_answered_with_the_rule(name: str, value: str, says: str) -> None:
    start = priced("pipeline")
    with pytest.raises((InputError, NoPlanError), match=re.escape(says)):
        changed(start, values_of(start) | {name: value})


def test_a_framework_is_offered_what_it_has() -> None:
    names = {control.name: control for control in controls_of(priced("fsdp"))}
    assert "cuda_graphs" not in names
    assert "ep" not in names
    for text in ("fsdp", "pipeline", "experts"):  # what is offered has a price
        offered = {control.name: control for control in controls_of(priced(text))}
        assert "offload" in offered
        assert "activations" not in offered["offload"].choices
    assert "ep" in {control.name for control in controls_of(priced("experts"))}


# -- whom it answers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer(priced("pipeline")) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: PageServer, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
    """The status and the text of an answer; `headers` have no dashes."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    given = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    connection.request(method, path, body, given)
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.headers["Cache-Control"] == "no-store" or answer.status >= 500
    connection.close()
    return answer.status, text


def test_the_page_is_given_to_who_knows_its_address(server: PageServer) -> None:
    status, text = asked(server, "GET", f"/{server.word}/")
    assert status == 200
    assert "connect-src" in text
    assert "<form" in text
    assert server.server_address[0] == "127.0.0.1"
    for path in (
        "/",
        f"/{server.word}",
        f"/{server.word}x/",
        f"/{server.word}/../",
    ):
        status, text = asked(server, "GET", path)
        assert (status, server.word in text) == (404, False), path


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1.evil.example:{port}", "[::1]:{port}", ""])
def test_a_page_of_another_name_is_refused(server: PageServer, host: str) -> None:
    for method, path in (("GET", ""), ("POST", "price"), ("POST", "page")):
        name = host.format(port=server.server_port)
        status, text = asked(server, method, f"/{server.word}/{path}", "{}" if path else None, Host=name)
        assert (status, server.word in text) == (403, False)


def test_changes_come_back_as_sections(server: PageServer) -> None:
    values = values_of(server.start) | {"micro_batch": "2"}
    status, text = asked(server, "POST", f"/{server.word}/price", json.dumps({"values": values, "pinned": [values]}))
    assert status == 200
    answer = json.loads(text)
    assert answer["parts"].keys() == {
        *("masthead", "answer", "pinned", "time", "schedule", "memory", "network", "sources")
    }
    for name, part in answer["parts"].items():
        assert f'id="{name}"' in part
    assert "per step" in answer["status"]


def test_a_saved_page_asks_nobody(server: PageServer) -> None:
    values = values_of(server.start)
    body = json.dumps({"values": values, "pinned": [values | {"micro_batch": "2"}]})
    status, text = asked(server, "POST", f"/{server.word}/page", body)
    assert status == 200
    assert "connect-src" not in text
    assert "fetch(" not in text
    assert "Pinned plans" in text
    assert server.word not in text


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "no JSON"),
        ("[" * 10_000, "no JSON"),
        ("[]", "no table"),
        ('{"values": {"tp": 3}}', "Expected `str`"),
        ('{"values": {}, "more": 1}', "more"),
        ('{"values": {}}', "nodes"),
        (json.dumps({"values": {}, "pinned": [{}] * 9}), "9 plans are pinned"),
    ],
)
def test_bad_requests_get_one_line(server: PageServer, body: str, says: str) -> None:
    status, text = asked(server, "POST", f"/{server.word}/price", body)
    assert status == 422
    assert text.count("\n") == 1
    assert says in text


def test_requests_of_other_kinds_are_refused(server: PageServer) -> None:
    path, body = f"/{server.word}/price", json.dumps({"values": values_of(server.start)})
    assert asked(server, "POST", path, body, Content_Type="text/plain")[0] == 422
    assert asked(server, "POST", path, body, Content_Length=str(MAX_BYTES + 1))[0] == 422
    assert asked(server, "POST", path, body, Content_Length="-1")[0] == 422


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "plan.json"
    priced("pipeline").save(path)
    return path


# Shells let what runs in the background ignore Ctrl-C, and tests may run there.
INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from autoplan.cli import main; main()"
)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_command_says_its_address_and_ends(plan: Path, number: signal.Signals, status: int) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "report", str(plan), "--serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    line = program.stdout.readline()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/ shows the plan until Ctrl-C\n", line)
    program.send_signal(number)
    _, errors = program.communicate(timeout=30)
    assert program.returncode == status
    assert errors.count("\n") == (number == signal.SIGTERM)


def test_serve_writes_no_file_and_takes_equal_nodes(plan: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "report", str(plan), "--serve", "--out", "page.html")
    assert done.returncode == 1
    assert "--out" in done.stderr
    mixed = autoplan.search_mixed("llama3-8b", cluster="h100-sxm:1x8+a100-sxm:1x8", global_batch=64, seq_len=4096)
    with pytest.raises(AutoplanError, match="a plan of equal nodes"):
        PageServer(mixed)


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (375, "dark")])
def test_a_person_changes_pins_and_saves(server: PageServer, tmp_path: Path, width: int, scheme: Any) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed here")
    from axe_playwright_python.sync_playwright import Axe
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith((server.address, "blob:")) or faults.append(request.url)
        )
        page.goto(server.address)
        before, schedule = page.locator("#answer").inner_text(), page.locator("#schedule").inner_text()
        field = page.get_by_label("micro-batch", exact=True)
        field.focus()
        page.keyboard.press("Control+A")
        page.keyboard.type("2")
        page.locator("#moved:not(:empty)").wait_for()
        assert page.locator("#answer").inner_text() != before
        assert page.locator("#schedule").inner_text() != schedule
        assert page.evaluate("document.activeElement.name") == "micro_batch"
        page.get_by_role("button", name="Pin this plan").click()
        page.locator("#pinned table").wait_for()
        page.get_by_label("tp", exact=True).fill("3")
        page.locator("#refused:not(:empty)").wait_for()
        assert "does not divide the 16 devices" in page.locator("#refused").inner_text()
        page.get_by_label("tp", exact=True).fill("4")
        page.locator("#refused:empty").wait_for(state="attached")
        page.get_by_text("Options").click()
        found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
        assert [f"{fault['id']}: {fault['nodes'][0]['html'][:200]}" for fault in found] == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save as one file").click()
        download.value.save_as(tmp_path / "saved.html")
        page.goto((tmp_path / "saved.html").as_uri())
        assert page.locator("#pinned th").first.inner_text() == "axis or term"
        assert page.locator("form").count() == 0
        browser.close()
    assert [fault for fault in faults if not fault.startswith("file:")] == []


def test_the_script_takes_all_pictures_of_the_manual(tmp_path: Path) -> None:
    if shutil.which("chromium") is None and shutil.which("google-chrome") is None:
        pytest.skip("no Chromium is installed here")
    from docs.pictures import PICTURES, take

    take(priced("plain"), tmp_path)
    assert {picture.name for picture in tmp_path.iterdir()} == {picture.name for picture in PICTURES.iterdir()}
