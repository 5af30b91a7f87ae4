"""Pictures of the report page in the manual, taken by the Chromium that is installed: `python docs/pictures.py`."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import autoplan
from autoplan.api.page import page_of
from autoplan.api.plan_result import PlanResult
from autoplan.api.serving import PageServer

PICTURES = Path(__file__).parent / "pictures"
MAX_WAIT_MS = 180_000  # of a machine with other work
WIDE, PHONE = {"width": 1000, "height": 640}, {"width": 390, "height": 640}


def main() -> None:
    """Search the plan of the README, and take its page and the one that is served."""
    PICTURES.mkdir(exist_ok=True)
    take(autoplan.search("llama3-70b", cluster="h100-sxm:16x8", global_batch=512, seq_len=8192), PICTURES)


def take(result: PlanResult, pictures: Path) -> None:
    """Take the pictures of a plan into a folder."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright, PageServer(result) as server:
        report = Path(folder) / "report.html"
        report.write_text(page_of(result))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=WIDE)
        page.set_default_timeout(MAX_WAIT_MS)
        page.goto(report.as_uri())
        page.screenshot(path=pictures / "answer.png")
        show(page, "#schedule")
        page.screenshot(path=pictures / "schedule.png")
        page.goto(server.address)
        page.get_by_role("button", name="Pin this plan").click()
        page.locator("#pinned table").wait_for()
        page.get_by_label("tp", exact=True).fill("8")
        page.get_by_label("cp", exact=True).fill("1")
        page.locator("#moved", has_text="compared with the plan file").wait_for()
        page.locator("#pinned strong").first.wait_for()
        show(page, "#controls")
        page.screenshot(path=pictures / "change.png")
        phone = browser.new_page(viewport=PHONE, color_scheme="dark")
        phone.goto(report.as_uri())
        phone.screenshot(path=pictures / "phone.png")
        browser.close()
        server.shutdown()


def show(page: Page, section: str) -> None:
    """Bring a section to the top of the window."""
    page.locator(section).evaluate("section => section.scrollIntoView({ behavior: 'instant' })")
    page.wait_for_timeout(300)  # until charts are drawn


if __name__ == "__main__":
    main()
