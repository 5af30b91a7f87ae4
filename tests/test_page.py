"""The HTML page of `autoplan report`, as Chromium shows it; without Chromium these tests are skipped."""

from __future__ import annotations

import json
import re
import shutil
from base64 import b64decode
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.base.files import decode, read_table
from autoplan.report.page.html import Markup, data, tag
from autoplan.spec.plan_file import PlanFile
from commands import run

if TYPE_CHECKING:  # takes long to load
    from playwright.sync_api import Browser, Page

SEARCHES = {
    "dense": "llama3-70b --cluster h100-sxm:8x8 --global-batch 256 --seq-len 8192 --why",
    "experts": "deepseek-v3 --cluster h100-sxm:256x8 --global-batch 8192 --seq-len 4096 "
    "--fix tp=1 --fix ep=8 --fix pp=16 --fix micro_batch=1 --fix recompute=full",
}
WIDTHS = (375, 768, 1440)
HOSTILE = '</script><img src=x onerror="window.stolen=1">\'&amp;'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One search leaves its plan file, from which the page is made afterwards; the other writes its page itself."""
    folder = tmp_path_factory.mktemp("pages")
    for name, asked in SEARCHES.items():
        page = ("--report", f"{name}.html") if name == "dense" else ()
        done = run(folder, "search", *asked.split(), "--out", f"{name}.json", *page, "--quiet")
        assert done.returncode == 0, done.stderr
    done = run(folder, "report", "experts.json", "--out", "experts.html")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "wrote experts.html\n"
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed here")
    from playwright.sync_api import sync_playwright

    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=arguments)


def shown(browser: Browser, path: Path, width: int = 1440, scheme: Any = "light") -> tuple[Page, list[str]]:
    """The page of a file, and what it complains of or asks of the network."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page, heard


def checked(page: Page) -> dict[str, Any]:
    """Words of axe on who cannot use the page."""
    from axe_playwright_python.sync_playwright import Axe

    return Axe().run(page, options={"resultTypes": ["violations"]}).response


# -- the writer of HTML -----------------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """Markup as a browser sees it: tags with their attributes, and text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


# A parser of HTML turns carriage returns into line feeds and refuses surrogates and null.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"))


@settings(max_examples=50)
@given(TEXT, TEXT)
def test_no_text_becomes_markup(text: str, attribute: str) -> None:
    seen = Seen(tag("p", text, tag("b", "bold"), data_tip=attribute))
    assert seen.tags == [("p", {"data-tip": attribute}), ("b", {})]
    assert seen.text == f"{text}bold"


@settings(max_examples=50)
@given(st.recursive(TEXT | st.integers() | st.booleans(), lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner)))
def test_data_survives_the_way_to_a_script(value: object) -> None:
    seen = Seen(data("content", value))
    assert [name for name, _ in seen.tags] == ["script"]
    assert json.loads(seen.text) == value


def test_attributes_are_left_out_or_bare() -> None:
    assert tag("a", "x", hidden=True, title=None, download=False) == "<a hidden>x</a>"
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert tag("p", Markup("<b>1</b>"), None, "<") == "<p><b>1</b>&lt;</p>"


# -- the page in a browser --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SEARCHES)
def test_a_page_needs_nothing_else(folder: Path, browser: Browser, name: str) -> None:
    path = folder / f"{name}.html"
    assert path.stat().st_size < 6e6
    page, heard = shown(browser, path)
    best = json.loads((folder / f"{name}.json").read_text())["best"]
    answer = page.locator("#answer").inner_text()
    assert f"{100 * best['mfu']:.1f} %" in answer
    assert "faster, under this model." in answer
    sections = [link.get_attribute("href") for link in page.locator("nav a").all()]
    assert sections == [f"#{section.get_attribute('id')}" for section in page.locator("main > section").all()][1:]
    assert len(sections) == 10
    assert page.locator(".canvas > svg, .canvas > canvas, .drawing > svg").count() == 4
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert heard == []
    page.close()


def drawn(page: Page, figure: str) -> str:
    """Look of a chart."""
    shot: str = page.eval_on_selector(
        f"{figure} .canvas", "frame => frame.querySelector('canvas')?.toDataURL() ?? frame.innerHTML"
    )
    return shot


@pytest.mark.parametrize("name", SEARCHES)
def test_charts_respond_to_hover_and_zoom(folder: Path, browser: Browser, name: str) -> None:
    page, heard = shown(browser, folder / f"{name}.html")
    tip = page.locator("#tip")
    for figure in ("#schedule figure", "#front figure", "#scaling figure"):
        frame = page.locator(f"{figure} .canvas")
        frame.scroll_into_view_if_needed()
        whole = drawn(page, figure)
        page.locator(figure).get_by_role("button", name="Zoom in").click()
        closer = drawn(page, figure)
        frame.press("ArrowRight")
        moved = drawn(page, figure)
        box = frame.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
        page.keyboard.down("Control")
        page.mouse.wheel(0, -300)
        page.keyboard.up("Control")
        page.wait_for_function(
            "([figure, before]) => { const frame = document.querySelector(`${figure} .canvas`); return "
            "(frame.querySelector('canvas')?.toDataURL() ?? frame.innerHTML) !== before; }",
            arg=[figure, moved],
        )
        assert len({whole, closer, moved, drawn(page, figure)}) == 4
        frame.press("0")
        assert drawn(page, figure) == whole
    frame = page.locator("#schedule .canvas")
    frame.scroll_into_view_if_needed()
    frame.hover(position={"x": 500, "y": 30})
    assert "stage 0, ranks 0-" in tip.inner_text()
    dot = page.locator("#front circle").last
    dot.scroll_into_view_if_needed()
    dot.hover(force=True)
    assert "the answer" in tip.inner_text()
    page.locator("#memory .piece").first.hover()
    assert tip.inner_text().startswith("weights: ")
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    assert heard == []
    page.close()


CLIPPED = """() => {
  const found = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push(`page: ${document.documentElement.scrollWidth}`);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const inside = node.parentElement;
    if (!node.data.trim() || !inside.checkVisibility() || inside.closest("script, style, .unseen, .skip")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const { left, right, width, height } of range.getClientRects()) {
      for (let around = inside; around; around = around.parentElement) {
        const style = getComputedStyle(around), box = around.getBoundingClientRect();
        if (style.overflowX === "auto") break; // people can scroll there
        const cuts = style.overflowX !== "visible" || around === document.body;
        if (cuts && (left < box.left - 1 || right > box.right + 1)) found.push(`${node.data} in ${around.className}`);
        if (around.clientHeight && style.overflowY === "hidden" && height > box.height + 1) found.push(node.data);
      }
      if (width && right < 0) found.push(node.data);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("name", SEARCHES)
def test_no_text_is_clipped(folder: Path, browser: Browser, name: str) -> None:
    page, _ = shown(browser, folder / f"{name}.html")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for is_open in (True, False):
            page.evaluate(
                f"document.querySelectorAll('details').forEach(one => {{ one.open = {str(is_open).lower()}; }})"
            )
            assert page.evaluate(CLIPPED) == [], (width, is_open)
    page.close()


@pytest.mark.parametrize(("name", "width", "scheme"), [("dense", 1440, "light"), ("experts", 375, "dark")])
def test_nobody_is_kept_out(folder: Path, browser: Browser, name: str, width: int, scheme: str) -> None:
    page, _ = shown(browser, folder / f"{name}.html", width, scheme)
    found = checked(page)
    assert len(found["passes"]) > 20
    assert [f"{violation['id']}: {violation['nodes'][0]['html'][:200]}" for violation in found["violations"]] == []
    page.close()


def test_light_and_dark(folder: Path, browser: Browser) -> None:
    def ground(page: Page) -> str:
        colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return colour

    page, _ = shown(browser, folder / "dense.html", scheme="dark")
    dark, chart = ground(page), drawn(page, "#schedule figure")
    page.get_by_role("button", name="Light").click()
    light = ground(page)
    assert (dark, light) == ("rgb(18, 20, 23)", "rgb(255, 255, 255)")
    assert drawn(page, "#schedule figure") != chart
    page.get_by_role("button", name="Auto").click()
    assert (ground(page), drawn(page, "#schedule figure")) == (dark, chart)
    page.close()


def test_the_keyboard_reaches_everything(folder: Path, browser: Browser) -> None:
    page, _ = shown(browser, folder / "dense.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the plan"
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.className || document.activeElement.localName"))
    assert {"button", "a", "summary", "canvas", "scrolling", "copy"} <= reached
    page.close()


def test_unlike_devices_have_a_page_with_stages_on_their_parts(folder: Path, browser: Browser) -> None:
    cluster = ("--cluster", "h100-sxm:1x8+a100-sxm:1x8", "--global-batch", "64", "--seq-len", "4096")
    done = run(folder, "search", "llama3-8b", *cluster, "--out", "mixed.json", "--report", "mixed.html", "--quiet")
    assert done.returncode == 0, done.stderr
    page, heard = shown(browser, folder / "mixed.html")
    links = [link.get_attribute("href") for link in page.locator("nav a").all()]
    assert links == ["#time", "#schedule", "#memory", "#plans", "#parts", "#sources", "#next"]
    assert page.locator(".drawing > svg").count() == 2
    frame = page.locator("#schedule .canvas")
    frame.scroll_into_view_if_needed()
    frame.hover(position={"x": 500, "y": 30})
    tip = page.locator("#tip").inner_text()
    assert re.search(r"stage A?0 on (h100|a100)-sxm, ranks \d+-\d+", tip), tip
    page.keyboard.press("Escape")
    found = checked(page)
    assert [f"{violation['id']}: {violation['nodes'][0]['html'][:200]}" for violation in found["violations"]] == []
    page.reload()  # without the tip
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert page.evaluate(CLIPPED) == [], width
    assert heard == []
    page.close()


def test_what_leads_from_a_launch_file_to_the_plan_is_on_the_page(folder: Path, browser: Browser) -> None:
    script = Path(__file__).parent.parent / "examples" / "train.sh"
    asked = (
        "--from",
        str(script),
        "--cluster",
        "h100-sxm:2x8",
        "--out",
        "from.json",
        "--report",
        "from.html",
        "--quiet",
    )
    done = run(folder, "search", *asked)
    assert done.returncode == 0, done.stderr
    page, heard = shown(browser, folder / "from.html", 375)
    current = json.loads((folder / "from.json").read_text())["today"]
    section = page.locator("#today")
    assert section.locator("tbody").first.locator("tr").count() == len(current["changes"]) > 0
    options = section.locator("tbody").nth(1).inner_text()
    assert len(current["options"]) > 0
    for option in current["options"]:
        assert option["option"] in options
    assert "% slower than the best plan" in section.inner_text()
    assert page.evaluate(CLIPPED) == []
    assert checked(page)["violations"] == []
    assert heard == []
    page.close()


# -- what the schedule says -------------------------------------------------------------------------------------------


def unpacked(text: str, kind: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(b64decode(text), dtype=kind)


@pytest.mark.parametrize("name", SEARCHES)
def test_the_schedule_is_as_long_as_the_step(folder: Path, name: str) -> None:
    """Passes, waits and what ends the step fill it on every stage, without a gap and without an overlap."""
    text = (folder / f"{name}.html").read_text()
    best = decode(PlanFile, read_table(folder / f"{name}.json"), name).best
    content = json.loads(
        text.partition('<figure class="chart gantt">')[2].partition('class="content">')[2].partition("</")[0]
    )
    assert content["step_s"] == best.step_s
    assert len(content["rows"]) == best.plan.pp
    for row in content["rows"]:
        codes, seconds = unpacked(row["codes"], "<u2"), np.array([kind["seconds"] for kind in row["kinds"]])
        assert len(codes) == 2 * best.plan.vp * best.plan.num_microbatches
        ends = [other for other in row["others"] if not other[4]]
        starts = np.concatenate(
            [unpacked(row["starts"], "<f4"), unpacked(row["waits"]["starts"], "<f4"), [end[2] for end in ends]]
        )
        lengths = np.concatenate([seconds[codes], unpacked(row["waits"]["seconds"], "<f4"), [end[3] for end in ends]])
        order = np.argsort(starts, kind="stable")
        begins, over = starts[order], (starts + lengths)[order]
        assert begins[0] == 0
        assert np.abs(begins[1:] - over[:-1]).max() < 1e-6 * best.step_s
        assert over[-1] == pytest.approx(best.step_s, rel=1e-6)


# -- names that mean harm, and files that hold less -------------------------------------------------------------------


def poisoned(value: Any, path: str = "") -> Any:
    """A plan file with every text replaced that may be any text."""
    free = ("model.name", "cluster.name", "device.name", "calibration.name", "framework.name", "command", "nvlink.name")
    if isinstance(value, dict):
        return {key: poisoned(child, f"{path}.{key}") for key, child in value.items()}
    if isinstance(value, list):
        return [poisoned(child, path) for child in value]
    if isinstance(value, str) and (
        path.endswith(free)
        or any(f".{part}" in path for part in ("sources", "limits", "family", "quantity", "versions"))
    ):
        return HOSTILE
    return value


def test_names_that_mean_harm_are_text(folder: Path, browser: Browser) -> None:
    table = poisoned(json.loads((folder / "dense.json").read_text()))
    (folder / "harm.json").write_text(json.dumps(table))
    done = run(folder, "report", "harm.json", "--out", "harm.html", "--quiet")
    assert done.returncode == 0, done.stderr
    page, heard = shown(browser, folder / "harm.html")
    assert page.locator("h1").inner_text().startswith(HOSTILE)
    assert page.title().startswith(HOSTILE)
    assert page.locator("img").count() == 0
    assert page.evaluate("window.stolen") is None
    assert heard == []
    page.close()


def test_a_plan_that_was_only_priced_has_a_page_too(folder: Path, browser: Browser) -> None:
    asked = ["llama3-8b", "--cluster", "h100-sxm:1x8", "--global-batch", "16", "--seq-len", "4096", "--tp", "8"]
    assert run(folder, "estimate", *asked, "--out", "priced.json").returncode == 0
    done = run(folder, "report", "priced.json", "--out", "priced.html")
    assert done.returncode == 0, done.stderr
    page, heard = shown(browser, folder / "priced.html")
    for part in ("front", "scaling", "importance"):
        assert "Not shown: the plan file contains one priced plan" in page.locator(f"#{part}").inner_text()
    assert page.locator("#plans").count() == 0
    assert heard == []
    page.close()


def test_what_cannot_be_shown_is_refused_in_one_line(folder: Path) -> None:
    taken = run(folder, "report", "dense.json", "--out", "dense.html")
    assert taken.returncode == 1
    assert "--force" in taken.stderr
    missing = run(folder, "report", "none.json")
    assert missing.returncode == 1
    assert missing.stderr.startswith("autoplan: none.json: cannot be read")
