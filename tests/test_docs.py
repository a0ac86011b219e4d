"""The documents: every command and example runs, in the order of the page, and links lead somewhere.

What takes long is run by `make docs-check`, which sets MESHWRIGHT_DOCS=all.
"""

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshwright as mw
from meshwright.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
ALL = os.environ.get("MESHWRIGHT_DOCS") == "all"
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SLOW = re.compile(r"meshwright (plan|simulate|explore|compare) (llama2|alpa-gpt|gpt2)|meshwright measure")
ELSEWHERE = {  # what no test of this file runs, and why
    "make ": "it runs this very test, or trains",
    "pip install": "it installs",
    "python first_run.py": "the block before it is this file, and runs",
    "python -m pytest": "it names the reader's own model, or runs other tests",
    'python -c "': "it names the reader's own chip or model",
    "meshwright launch": "it takes several processes: tests/cli/test_launch.py has them",
    "meshwright serve": "it serves until it is ended: tests/serving/server/ has it",
    "mw.get_model(": "it names the reader's own model: tests/serving/test_api.py has one",
    "from openai import": "it asks a server: tests/serving/server/ has one",
    "import ray.train": "it takes a cluster: tests/training/test_ray.py has one",
    "mw.initialize()": "it takes several processes: tests/runtime/processes/ has them",
}
MEASURING = {"MESHWRIGHT_MEASURE": "once", "MESHWRIGHT_CACHE": "measured"}  # here, not in the user's own folder
OWN_TESTS = {
    "docs/one-matrix-product.md": "below",
    "docs/compiler-faults.md": "tests/runtime/program/test_compiler_faults.py",
}


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """The language and text of each block of a page, in order."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(kind, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)) for indent, kind, text in found]


def is_elsewhere(text):
    return any(start in text for start in ELSEWHERE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the examples in it; no figure hangs on this machine, and none is kept on it."""
    for path in (ROOT / "examples").glob("*.*"):
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("MESHWRIGHT_DATA", raising=False)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.sweep(10)
@pytest.mark.slow
@pytest.mark.devices
@pytest.mark.parametrize("page", [p for p in PAGES if name(p) not in OWN_TESTS and blocks(p)], ids=name)
def test_every_block_of_a_page_runs_in_its_order(page, folder, capsys):
    names = {"__name__": page.stem}
    for kind, text in blocks(page):
        if kind == "python" and not is_elsewhere(text):
            if "@mw.rule" in text:  # it would stay in the registry
                subprocess.run([sys.executable, "-c", text], check=True, timeout=300)
            else:
                exec(compile(text, name(page), "exec"), names)
        if kind == "sh":
            for line in text.splitlines():
                run_line(line)
    if name(page) == "docs/guides/plan.md":
        check_printed(page.read_text(encoding="utf-8"), capsys.readouterr().out)


def run_line(line):
    words = shlex.split(line, comments=True)
    if not words or is_elsewhere(line) or (SLOW.match(line) and not ALL):
        return
    assert words[0] == "meshwright", line
    result = CliRunner().invoke(app, words[1:], env=MEASURING if words[1] == "measure" else None)
    assert result.exit_code == 0, (line, result.exception, result.output)
    if words[1] == "compare":  # a method that has a plan at all has a time
        assert re.search(r"\d [mµ]?s ", result.stdout), result.stdout


def check_printed(text, out):
    """What the page shows is what is printed, but for its notes, the columns' widths and the solver's time."""
    shown = re.search(r"The example prints this.*?```text\n(.*?)```", text, re.DOTALL)[1]
    printed = [" ".join(line.split()) for line in out.splitlines()]
    for line in shown.splitlines():
        words = " ".join(re.sub("↳.*|; solved in.*|…", "", line).split())
        assert any(known.startswith(words) for known in printed), words


def test_every_block_says_what_it_is_and_nothing_is_left_out_in_vain():
    kinds, text = set(), ""
    for page in PAGES:
        for kind, block in blocks(page):
            assert kind in ("python", "pycon", "sh", "bash", "yaml", "text", "toml"), (name(page), block[:60])
            kinds, text = {*kinds, kind}, text + block
            if kind != "sh":
                assert not re.search(r"^meshwright (?![\w-]+:)", block, re.MULTILINE), (name(page), block[:60])
    assert all(start in text for start in ELSEWHERE) and SLOW.search(text) and {"python", "sh"} <= kinds


def test_the_walk_of_one_matrix_product_is_true():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testfile(str(ROOT / "docs/one-matrix-product.md"), module_relative=False, optionflags=options)
    assert result.attempted > 20 and result.failed == 0


def test_links_lead_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        assert not [link for link in links if "://" not in link and not (page.parent / link).exists()], name(page)


def test_every_page_is_in_the_site():
    """`make docs` is strict about what the navigation names; this is about what it leaves out."""
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {name(page).removeprefix("docs/") for page in PAGES if page.is_relative_to(ROOT / "docs")}


def test_the_reference_has_every_public_name_once():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES if "reference" in page.parts)
    assert sorted(re.findall(r"^::: mw\.(\w+)$", pages, re.MULTILINE)) == sorted(mw.__all__)


def test_troubleshooting_has_every_error():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    errors = {kind for kind in mw.__all__ if kind.endswith("Error") or kind in ("DoesNotFit", "DeviceOutOfMemory")}
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == errors - {"MeshwrightError"}


def test_troubleshooting_quotes_messages_as_they_are():
    """Each part of a quoted message, between the dots that stand for values, is in a string of the source."""
    source = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("src/meshwright/**/*.py"))
    known = re.sub(r"""["']\s*\n\s*f?["']""", "", source)  # strings that go on in the next line
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    quoted = [quote for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for quote in re.findall("`(.+?)`", row)]
    parts = [part.strip() for quote in quoted for part in quote.split("…")]
    assert len(parts) > 40 and [part for part in parts if part not in known] == []


def test_the_map_names_every_folder_and_nothing_that_is_gone():
    text, source = (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), ROOT / "src/meshwright"
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py))`", text))
    assert {f"{path.parent.name}/" for path in source.glob("*/__init__.py")} <= named
    assert [path for path in named if not [*source.glob(f"**/{path}"), *ROOT.glob(path)]] == []
