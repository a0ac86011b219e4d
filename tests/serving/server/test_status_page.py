"""The status page in a real browser: it shows what the server does, and asks for a key where one is needed.

Needs Chromium (`make browser`) and Playwright; MESHWRIGHT_SCREENSHOTS may name a folder for screenshots.
"""

import re

import pytest

from tests.report.test_browser import CHROMIUM, FLAGS, shoot
from tests.serving.server.running import running

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: run `make browser`"),
]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Opens a page; when the test is over, there must have been no error and no request to elsewhere."""
    complaints, contexts = [], []

    def open_page(url, locked=False):
        context = browser.new_context(viewport={"width": 1000, "height": 800})
        contexts.append(context)
        page = context.new_page()
        ours = ("Failed to load resource",) if locked else ()  # the browser notes each 401 by itself
        page.on(
            "console", lambda m: complaints.append(m.text) if m.type == "error" and not m.text.startswith(ours) else 0
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith((url, "data:")) else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def shown(page, selector, text):
    playwright.expect(page.locator(selector)).to_have_text(text, timeout=20_000)


def test_the_page_shows_what_the_server_does(tmp_path, visit):
    with running(tmp_path, engine={"step_s": 0.02}, name="tiny <b>") as server, server.stream(max_tokens=250) as events:
        page = visit(server.url)
        shown(page, "#model", "tiny <b>")
        shown(page, "#state", "ready")
        next(events)
        shown(page, "#running", "1")
        shown(page, "#slots", "8")
        playwright.expect(page.locator("#tokens_out")).to_have_text(re.compile(r"^[1-9]"), timeout=20_000)
        assert page.locator("[data-figure=tokens_out] path").get_attribute("d").startswith("M")
        shoot(page, "server-status")
        list(events)
        shown(page, "#running", "0")
        assert page.locator("#token_50").inner_text().endswith("ms")
        assert page.locator("#first_99").inner_text() != "–"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_asks_for_the_key(tmp_path, visit):
    with running(tmp_path, api_key="secret") as server:
        page = visit(server.url, locked=True)
        shown(page, "#state", "locked")
        page.fill("#key", "secret")
        page.click("#lock button")
        shown(page, "#state", "ready")
        playwright.expect(page.locator("#lock")).to_be_hidden()
