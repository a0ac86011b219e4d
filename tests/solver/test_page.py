"""The page on the solver names functions that exist, and its pseudo-code fits on a page."""

import re
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "solver.md"
_NAME = re.compile(r"\b(?:[a-z_]+\.)+[A-Za-z_.]*[A-Za-z_]\b")


def _algorithm() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return text.split("```text\n")[1].split("```")[0].splitlines()


def _resolve(name: str) -> object:
    """What a dotted name stands for: below `meshwright`, where it begins with `contest`; else below the solver."""
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        above = [] if parts[0] == "contest" else ["solver"]
        try:
            found: object = import_module(".".join(["meshwright", *above, *parts[:size]]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"docs/solver.md names {name}, which is no module of the solver")


def test_every_function_that_the_page_names_exists():
    lines = _algorithm()
    assert len(lines) <= 60  # one page
    named = [name for line in lines for name in _NAME.findall(line[70:])]
    assert len(named) > 25
    assert all(callable(_resolve(name)) for name in named)
