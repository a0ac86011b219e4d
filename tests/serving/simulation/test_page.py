"""The page about a simulated load: its data hold what was simulated, and a browser draws them without an error.

The second needs Chromium (`make browser`) and Playwright; MESHWRIGHT_SCREENSHOTS may name a folder for screenshots.
"""

import json
import re
from functools import cache

import pytest

import meshwright as mw
from meshwright.errors import OutputError
from tests.report.test_browser import CHROMIUM, FLAGS, SIZES, shoot

LOAD = mw.Traffic(rate=20, tokens_in=(200, 800), tokens_out=30)


@cache
def planned():
    plan = mw.plan_serving("llama3-8b", "1x2 h200", LOAD, mw.Slo(ttft_s=0.5, tpot_s=0.03))
    return plan, plan.simulate(LOAD.at(plan.goodput), 400)


def data_of(path):
    text = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"))[1]
    return json.loads(text)["plans"][0]


def test_the_page_holds_what_was_simulated(tmp_path):
    plan, outcome = planned()
    plan.report(tmp_path / "page.html", outcome)
    data = data_of(tmp_path / "page.html")
    assert data["title"] == "llama3-8b on 1x2 h200" and data["promise"] == str(plan.slo)
    assert [row[0] for row in data["arrangements"]["rows"]] == [str(one) for one in (plan.chosen, *plan.alternatives)]
    first, later = data["latencies"]
    assert dict(map(tuple, first["points"]))[0.9] == outcome.ttft_s(0.9) and first["limit"] == 0.5
    assert dict(map(tuple, later["points"]))[1.0] == max(r.tpot_s for r in outcome.requests)
    timeline = data["timeline"]
    part_s = timeline["seconds"] / len(timeline["rows"][0]["lanes"][0]["values"])
    arrived = sum(timeline["rows"][0]["lanes"][0]["values"]) * part_s
    assert arrived == pytest.approx(len(outcome.requests), rel=1e-3)
    for row, replica, summary in zip(timeline["rows"][1:], outcome.replicas, data["replicas"], strict=True):
        lanes = {lane["name"]: lane["values"] for lane in row["lanes"]}
        assert sum(lanes["busy"]) * part_s == pytest.approx(replica.busy_s, rel=1e-3) and max(lanes["busy"]) <= 1.001
        assert max(lanes["running"]) == max(step.sequences for step in replica.steps)
        assert summary["busy"] == pytest.approx(replica.busy_s / outcome.duration_s)


def test_a_load_that_is_refused_and_several_models_have_pages_too(tmp_path):
    plan, _ = planned()
    plan.report(tmp_path / "page.html")
    assert ["kept the promise", "100.0%"] in data_of(tmp_path / "page.html")["facts"]
    bursts = [mw.Traffic(rate=1, tokens_in=256, tokens_out=4, burstiness=4, seed=seed) for seed in range(2)]
    joint = mw.place_models({"llama3-8b#1": bursts[0], "llama3-8b#2": bursts[1]}, "1x2 a100-40gb", mw.Slo(ttft_s=0.3))
    joint.report(tmp_path / "joint.html", joint.simulate(scale=1.0))
    data = data_of(tmp_path / "joint.html")
    assert [row["name"] for row in data["replicas"]] == [
        f"{one.number}: {one.model}" for one in joint.simulate(1.0).replicas
    ]
    with pytest.raises(OutputError):
        plan.report(tmp_path / "nowhere" / "page.html")


@pytest.mark.sweep(1)
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: run `make browser`")
@pytest.mark.parametrize("size", SIZES)
def test_a_browser_draws_all_of_it(tmp_path, size):
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    plan, outcome = planned()
    plan.report(tmp_path / "page.html", outcome)
    complaints = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport=dict(zip(("width", "height"), SIZES[size], strict=True)))
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto((tmp_path / "page.html").as_uri())
        names = page.locator("nav a").all_inner_texts()
        assert names == ["Overview", "Arrangements", "Latencies", "Replicas", "Timeline"]
        for number in range(1, 6):
            page.keyboard.press(str(number))
        page.keyboard.press("/")  # there is nothing to search
        page.locator("#timeline svg").scroll_into_view_if_needed()
        assert page.locator("#latencies svg").count() == 2
        assert page.locator("#timeline path").count() == 1 + 4 * len(outcome.replicas)
        page.locator("#timeline svg").hover()
        assert "running" in page.locator("#timeline .legend").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shoot(page, f"serving-{size}", full_page=True)
        browser.close()
    assert complaints == []
