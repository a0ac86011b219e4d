"""Names are data: whatever they hold, everything that is printed shows them as they are and obeys none of it."""

import html.parser
import json
import re

import jax.numpy as jnp
import pytest
from rich.console import Console

import meshwright as mw
from meshwright.cli.console import fail, note, show
from meshwright.console import Table
from meshwright.names import one_line, printable

MARKUP = ("[/x]", "w[bias]", "[red]", ":smile:", "[link=file:///etc/passwd]")
ESCAPES = ("\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r", "\b", "\u202e", "\ud800", "a\nb")
HTML = ("<!--<script>", "</script>", "<script>alert(1)</script>", "{{script}}", "<img src=x onerror=alert(1)>")
UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


@pytest.fixture(scope="module")
def plan():
    def step(weights, x):
        return sum(jnp.sum(x @ w) for w in weights.values())

    weights = {name: jnp.ones((8, 4)) for name in (*MARKUP, *ESCAPES, *HTML)}
    return mw.plan(step, weights, jnp.ones((8, 8)), mesh=mw.Mesh.abstract((2,), alpha=1, beta=1))


def everything_printed(plan, tmp_path):
    plan.dump(tmp_path / "dump")
    yield "plan", str(plan)
    yield "show", str(plan.show("weights/*"))
    for tensor in plan.arguments[:-1]:
        yield f"explain {tensor.path!r}", str(plan.explain(re.sub(r"([\[?*])", r"[\1]", tensor.path), seconds=0.01))
    yield "diff", str(plan.diff(plan))
    for path in (tmp_path / "dump").rglob("*.txt"):
        yield path.name, path.read_text()


def test_no_control_character_reaches_what_is_printed(plan, tmp_path):
    for what, text in everything_printed(plan, tmp_path):
        assert not UNFIT.search(text), what


def test_every_name_is_shown_whole(plan):
    shown = str(plan.show("weights/*"))
    for name in (*MARKUP, *HTML):
        assert f"weights/{name} " in shown
    assert r"weights/\x1b[2J" in shown and r"weights/a\nb" in shown


def test_a_users_own_console_shows_names_as_they_are(plan):
    console = Console(width=200, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(plan.show("weights/*"))
    assert "weights/w[bias]" in captured.get() and "weights/:smile:" in captured.get()
    assert "\x1b[2J" not in captured.get()


def test_a_plan_with_such_names_is_saved_and_read(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert mw.Plan.load(tmp_path / "plan.json") == plan


class Scripts(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.data, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag == "script" and ("id", "data") in attrs

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.data.append(data)


def test_no_name_changes_what_the_page_is_made_of(plan, tmp_path):
    """Python's parser does not know that ``<!--<script>`` hides an end tag, so no ``<`` may be in the data at all."""
    plan.report(tmp_path / "page.html", seconds=0.5)
    found = Scripts()
    found.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert found.tags.count("script") == 2 and "img" not in found.tags
    assert "<" not in "".join(found.data)
    assert any(row["path"] == "weights/<!--<script>" for row in json.loads("".join(found.data))["plans"][0]["tensors"])


@pytest.mark.parametrize("name", ESCAPES[:-1])
def test_messages_and_remarks_are_fit_for_a_terminal(name, capsys):
    assert not UNFIT.search(str(mw.ShardingError(f"{name} matches nothing")))
    assert not UNFIT.search(str(mw.OutputError(f"cannot write {name}")))
    fail("show", f"{name} is no plan")
    note(f"wrote {name}")
    table = Table(title=f"of {name}")
    table.add_column("name")
    table.add_row(name)
    show(table)
    found = capsys.readouterr()
    assert not UNFIT.search(found.out + found.err)


def test_what_is_fit_stays_as_it_is():
    for text in ("state/params/layers/3/up", "α × β → γ", "two\nlines\tand a tab", "日本語"):
        assert printable(text) == text
    assert one_line("two\nlines") == r"two\nlines"
