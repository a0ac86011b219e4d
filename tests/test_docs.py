"""The documents: examples run as printed, and links lead somewhere."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_readme_example_runs_as_printed(tmp_path, monkeypatch, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)  # it saves its plan
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert (tmp_path / "plan.json").exists()
    # What the README shows is what is printed, but for its notes, the columns' widths and the solver's time.
    shown = re.search(r"The example prints this.*?```\n(.*?)```", text, re.DOTALL)[1]
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in shown.splitlines():
        words = " ".join(re.sub("↳.*|; solved in.*|…", "", line).split())
        assert any(known.startswith(words) for known in printed), words


def test_the_walk_of_one_matrix_product_is_true():
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testfile(str(ROOT / "docs/one-matrix-product.md"), module_relative=False, optionflags=options)
    assert result.attempted > 20 and result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
