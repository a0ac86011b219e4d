"""The page in a real browser: clicks through it, holds what it shows against the plan, and finds no error.

Needs Chromium (`make browser`) and Playwright; MESHWRIGHT_SCREENSHOTS may name a folder for screenshots.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.parallelism.sentence import plain_sentence
from meshwright.parallelism.subject.subject import Subjects
from meshwright.report.page import page as build_page
from meshwright.units import format_bytes
from tests.explain.plans import plan_of, tensor_parallel
from tests.plans.records.test_staged_record import planned
from tests.step_search.test_microbatches import tight

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: run `make browser`"),
]

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
SIZES = {"wide": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def shoot(target, name, **options):
    """Keeps a screenshot of a page or a part of it, where a folder for them is given."""
    if folder := os.environ.get("MESHWRIGHT_SCREENSHOTS"):
        target.screenshot(path=Path(folder, f"{name}.png"), **options)


@pytest.fixture
def visit(browser, tmp_path):
    """Opens the report of a plan; when the test is over, there must have been no error and no request."""
    complaints, contexts = [], []

    def open_page(plan, other=None, size="wide", scheme="light"):
        path = tmp_path / "report.html"
        path.write_text(_text(plan, other), encoding="utf-8")
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto(path.as_uri())
        page.wait_for_selector("#sentence")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


PAGES = {}  # texts by plan, since several tests look at the same one


def _text(plan, other):
    key = (id(plan), id(other))
    if key not in PAGES:
        # Alternatives in stages are all solved in a second or two; those of one program would take half a minute, and
        # are bounded instead, which needs no time.
        seconds = 0 if other is not None else 30 if plan.stages else 1e-3
        PAGES[key] = plan, other, build_page(plan, other, seconds)
    return PAGES[key][2]


def everything(page):
    """Draws every section, also those far below the screen."""
    page.evaluate("document.querySelectorAll('section').forEach(MW.draw)")


def opened(page, plan):
    """Clicks on the layers' up-projection, split by columns: what is explained of it, and its alternatives' table."""
    leaf = page.locator('.leaf[data-path="state/params/layers/*/up"]')
    assert leaf.locator(".symbols").get_attribute("data-text") == "D F_y"
    assert leaf.locator(".tag").inner_text() == plan.kind("state/params/layers/0/up")
    leaf.click()
    return plan.explain("state/params/layers/0/up", seconds=30), page.locator("table.alternatives").first


def test_a_plan_of_one_program(visit):
    plan = tensor_parallel()
    page = visit(plan)
    assert page.evaluate("document.documentElement.dataset.ready")  # `benchmarks/seeing.py` times it
    assert page.inner_text("#sentence") == plain_sentence(plan)
    assert page.inner_text("#verdict") == str(plan.verdict)
    assert page.inner_text("#peak") == format_bytes(plan.memory.peak_bytes)
    explained, table = opened(page, plan)
    assert table.locator("tbody tr").count() == len(explained.alternatives)
    shown = [cell.get_attribute("data-text") for cell in table.locator("tbody .symbols").all()]
    assert set(shown) == {a.symbols for a in explained.alternatives}
    shoot(page, "spmd")
    page.keyboard.press("/")
    page.keyboard.type("layers down")
    paths = [leaf.get_attribute("data-path") for leaf in page.locator(".leaf:visible").all()]
    assert paths and all("down" in path for path in paths)
    everything(page)
    shoot(page, "spmd-whole", full_page=True)


def test_decisions_and_memory_of_a_step_in_microbatches(visit):
    plan = tight()
    page = visit(plan)
    everything(page)
    assert page.locator("#decisions table").first.locator("tbody tr").count() == 4
    assert "does not fit" in page.inner_text("#decisions")
    assert "microbatch 1" in page.locator("#memory svg").text_content()


def test_communication_sorts_and_searches(visit):
    plan = tensor_parallel()
    page = visit(plan)
    everything(page)
    rows = page.locator("table.collectives tbody tr")
    kinds = {c.kind for c in plan.collectives}
    assert rows.count() == 8 and page.locator("table.collectives").bounding_box()["height"] < 400
    page.get_by_role("button", name="number").click()
    page.get_by_role("button", name=re.compile("Show all")).click()
    numbers = [int(row.locator("td").nth(5).inner_text().replace(",", "")) for row in rows.all()]
    assert {row.locator("td").first.inner_text() for row in rows.all()} == kinds
    assert numbers == sorted(numbers, reverse=True) and sum(numbers) == sum(c.trips for c in plan.collectives)
    page.get_by_label("kind, operation or source").fill("all_reduce backward")
    assert {row.locator("td").first.inner_text() for row in rows.all()} == {"all_reduce"}


def test_layers_memory_and_operations(visit):
    plan = tensor_parallel()
    page = visit(plan)
    everything(page)
    page.locator("#layer select").select_option(index=0)
    assert page.locator(".gnode").count() > 3
    page.locator(".gnode").first.click()
    assert "→" in page.locator("#layer .card").last.inner_text()
    assert page.locator("#memory svg path").count() >= 3
    page.get_by_label("Search operations").fill("dot_general forward")
    page.wait_for_function("document.querySelector('#operations .label').textContent.includes(' of ')")
    found = int(re.match(r"[\d,]+", page.locator("#operations .row .label").inner_text())[0].replace(",", ""))
    assert found == sum(op.label.endswith("dot_general") and op.phase == "forward" for op in plan.ops)
    shoot(page.locator("#layer"), "layer")


@pytest.mark.parametrize(("size", "scheme"), [("wide", "dark"), ("phone", "light")])
def test_dark_and_small_screens(visit, size, scheme):
    page = visit(tensor_parallel(), size=size, scheme=scheme)
    everything(page)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
    shoot(page, f"{size}-{scheme}")
    page.emulate_media(media="print")
    assert not page.locator("header.top").is_visible()


def test_a_plan_in_stages(visit):
    plan = planned("megatron")
    page = visit(plan)
    assert page.inner_text("#verdict") == str(plan.verdict)
    assert str(plan.verdict).startswith("pipeline of 4 stages (1f1b, 4 microbatches), ")
    everything(page)
    assert page.locator("table.stages tbody tr").count() == 4
    for work in ("forward", "backward"):
        assert page.locator(f".timeline .step.{work}").count() == 4 * 4
    names = ["Overview", "Stages", "Memory of stages", "Timeline", "Instructions"]
    assert page.locator("nav a").all_inner_texts()[:5] == names
    assert page.locator("#instructions rect.run").count() == 4 * 4 * 2
    page.locator("#instructions select").select_option(index=2)
    assert page.locator("#instructions li").all_inner_texts() == [str(one) for one in plan.instructions(2)]
    row = page.locator("table.stages tbody tr").first
    assert format_bytes(plan.stages[0].peak_bytes) in row.inner_text()
    assert str(plan.stage_verdicts[0]) in row.inner_text()
    shoot(page.locator("#stages"), "stages")
    page.locator("#stage-memory select").select_option(index=1)
    assert page.locator("#stage-memory svg path").count() == 1
    assert format_bytes(plan.memory.limit_bytes) in page.locator("#stage-memory .limit-text").text_content()
    assert format_bytes(plan.memory.limit_bytes) in row.locator(".full").inner_text()


def test_layers_and_alternatives_of_a_plan_in_stages(visit):
    plan = planned("replicas")
    page = visit(plan)
    explained, table = opened(page, plan)
    shown = [cell.get_attribute("data-text") for cell in table.locator("tbody .symbols").all()]
    assert shown == [a.symbols for a in explained.alternatives]
    assert [cell.inner_text() for cell in table.locator("th").all()][2:4] == ["a microbatch", "once"]
    assert "On stage 0; stage 1 is busier" in page.locator(".detail").inner_text()
    shoot(page, "stage-alternatives")
    everything(page)
    names = [option.inner_text() for option in page.locator("#layer option").all()]
    assert names and all(name.startswith("stages 0–1: ") for name in names)
    page.locator("#layer select").select_option(index=0)
    assert page.locator(".gnode").count() > 3
    page.locator(".gnode").first.click()
    assert "B_x" in page.locator("#layer .card").last.locator(".symbols").get_attribute("data-text")
    found = int(page.locator("#operations .row .label").inner_text().split()[0].replace(",", ""))
    assert found == plan.record.views[0].record.program.num_ops
    sent, more = page.locator("table.collectives tbody tr"), page.get_by_role("button", name=re.compile("Show all"))
    if more.count():
        more.click()
    kinds = {c.kind for subject in Subjects(plan) for c in subject.collectives}
    assert {row.locator("td").nth(1).inner_text() for row in sent.all()} == kinds
    shoot(page.locator("#layer"), "stage-layer")


def test_two_plans_side_by_side(visit):
    one, other = tensor_parallel(), plan_of("gpt-tiny", (4, 2), mw.DataParallel())
    page = visit(one, other)
    page.evaluate("MW.draw(document.getElementById('difference'))")
    assert page.locator("table.moved tbody tr").count() == len(one.diff(other).moved)
    shoot(page, "difference")
    page.locator("#switch button").nth(1).click()
    assert page.inner_text("#verdict") == str(other.verdict)
    assert page.locator("#switch button").all_inner_texts() == ["TensorParallel", "DataParallel"]
    shoot(page, "compared", full_page=True)


def test_a_comparison_begins_with_the_difference(visit):
    one, other = tensor_parallel(), plan_of("gpt-tiny", (4, 2), mw.DataParallel())
    page = visit(one, other)
    page.evaluate("MW.draw(document.getElementById('difference'))")
    assert page.locator("#overview .card").count() == 0
    change, cards = page.locator("#change"), page.locator("#difference .card").first
    assert change.bounding_box()["y"] < cards.bounding_box()["y"]
    page.locator("#switch button").nth(1).click()
    assert page.inner_text("#peak") == format_bytes(other.memory.peak_bytes)


def test_figures_keep_their_digits(visit):
    page = visit(tensor_parallel())
    for seconds, text in ((1.0, "1 s"), (1.004, "1.00 s"), (999.6e-6, "1.00 ms"), (4321.4, "4,321 s"), (0.0, "0 s")):
        assert page.evaluate(f"MW.cost({seconds!r}, {{ abstract: false }})") == text
    assert page.evaluate("MW.cost(1e-15, { abstract: false })") == "under 0.01 ns"


def test_a_stage_that_waits_is_said(visit):
    plan = planned("megatron")
    page = visit(plan)
    everything(page)
    shares = [stage["idle"] for stage in page.evaluate("MW.data.plans[0].stages")]
    assert all(0 < share < 1 for share in shares)
    waits = [i for i, share in enumerate(shares) if share >= 0.5]
    assert page.locator("#idle").count() == (1 if waits else 0)
    page.evaluate("MW.data.plans[0].stages[2].idle = 0.62; MW.render()")
    everything(page)
    assert "stage 2 62%" in page.inner_text("#idle")


def test_instructions_are_whole(visit):
    page = visit(planned("megatron"))
    everything(page)
    over = "(list) => list.scrollWidth - list.clientWidth"
    assert page.locator(".instruction-list").evaluate(over) <= 1


def test_on_a_phone_stages_and_layers_are_seen_whole(visit):
    page = visit(planned("replicas"), size="phone")
    everything(page)
    for part in ("table.stages", "#layer svg", "table.stages td"):
        box = page.locator(part).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= SIZES["phone"][0]
    over = "(node) => node.scrollWidth - node.clientWidth"
    assert page.locator(".graph").evaluate(over) <= 1 and page.locator("[aria-label=stages]").evaluate(over) <= 1


def test_the_first_screen_says_what_it_is_about(visit):
    plan = planned("megatron")
    page = visit(plan)
    assert page.title() == "gpt-tiny on 2x4 h100 · Meshwright"
    about = page.inner_text(".about")
    simulated = plan.simulate()
    for fact in ("gpt-tiny", "batch 8", "sequence 32", "2x4 h100 (8 devices)", page.evaluate("MW.data.date")):
        assert fact in about
    assert f"{simulated.tokens_per_s:,.0f} tokens/s" == page.inner_text("#rate")
    assert f"MFU {simulated.mfu:.1%}" in page.inner_text("#overview")
    assert page.inner_text("#simulated") == page.evaluate(f"MW.cost({simulated.step_s!r})")


def test_the_timeline_zooms(visit):
    page = visit(planned("megatron"))
    everything(page)
    line = page.locator("svg.timeline")
    before = line.locator(".step").count()
    for _ in range(3):
        page.get_by_label("Zoom in").click()
    assert line.get_attribute("data-zoom") == "8.00" and 0 < line.locator(".step").count() < before
    line.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("-")
    assert line.get_attribute("data-zoom") == "4.00"
    page.get_by_label("Show the whole step").click()
    assert line.get_attribute("data-zoom") == "1.00" and line.locator(".step").count() == before


BEHIND = """() => {
  const boxes = [...document.querySelectorAll('#layer .gnode')].map((g) => g.transform.baseVal[0].matrix);
  const inside = (p) => boxes.some((m) => p.x > m.e + 1 && p.x < m.e + 267 && p.y > m.f + 1 && p.y < m.f + 61);
  return [...document.querySelectorAll('#layer .gedge')].filter((path) => {
    for (let at = 0; at < path.getTotalLength(); at += 3) if (inside(path.getPointAtLength(at))) return true;
    return false;
  }).length;
}"""


@pytest.mark.nightly
def test_no_edge_runs_behind_a_box(visit):
    page = visit(tensor_parallel())
    everything(page)
    for i in range(page.locator("#layer option").count()):
        page.locator("#layer select").select_option(index=i)
        assert page.locator("#layer .gedge").count() > 0
        assert page.evaluate(BEHIND) == 0


OUT_OF_REACH = """() => [...document.querySelectorAll('th, td, .leaf > *, .branch > .num')].filter((cell) => {
  const box = cell.getBoundingClientRect();
  if (!box.width) return !cell.closest('.branch, [hidden]');
  for (let up = cell.parentElement; up; up = up.parentElement) {
    if (/auto|scroll/.test(getComputedStyle(up).overflowX)) return false;
    const edge = up.getBoundingClientRect();
    if (getComputedStyle(up).overflowX === 'hidden' && box.right > edge.right + 1) return true;
  }
  return box.right > innerWidth + 1;
}).length"""


@pytest.mark.parametrize("name", ["program", "stages"])
def test_on_a_phone_no_column_is_out_of_reach(visit, name):
    page = visit(tensor_parallel() if name == "program" else planned("replicas"), size="phone")
    everything(page)
    page.locator(".leaf:visible").first.click()
    assert page.locator("th").count() > 5 and page.evaluate(OUT_OF_REACH) == 0
    shoot(page, f"phone-{name}", full_page=True)


def test_ticks_are_round(visit):
    page = visit(tensor_parallel())
    texts = page.evaluate("(most) => MW.ticks(most, MW.byteUnits).map((tick) => tick.text)", 71.64 * 2**30)
    assert texts == ["0", "20 GiB", "40 GiB", "60 GiB"]
    assert page.evaluate("MW.round(0.83, 4)") == [0, 0.5]
    everything(page)
    shown = page.locator("#memory .tick").all_text_contents()
    assert len(shown) >= 3 and all(re.fullmatch(r"[\d,.]{1,5} \w?i?B|0", text) for text in shown)


BOUNDS = [
    (-1.27, "at least", "unknown", "num bound"),
    (1.27, "at least", "≥ +1.27", "num bound"),
    (-1.27, "at most", "≤ −1.27", "num less"),
    (1.27, "exact", "+1.27", "num more"),
]


def test_bounds_are_no_prices(visit):
    page = visit(tensor_parallel())
    for difference, sure, text, style in BOUNDS:
        given = {"difference": difference, "sure": sure, "peak": 0}
        assert page.evaluate("(a) => [MW.price(a).textContent, MW.price(a).className]", given) == [text, style]
        said = page.evaluate("(a) => MW.unsure(a).join('; ')", given)
        assert ("not cheaper by more than 1.27" in said) == (text == "unknown")
