"""Long calls say on stderr what they are doing: late, on one line, once, and only where it is wanted."""

import io
import sys
import time

import pytest

from meshwright import progress as shown
from meshwright.progress import progress


class Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def wait_for(self, text: str) -> None:
        """Returns when the text was written; a test that hangs here has failed."""
        while text not in self.getvalue():
            time.sleep(0.001)


@pytest.fixture
def screen(monkeypatch):
    def make(terminal: bool = True, after_s: float = 0.0) -> Screen:
        made = Screen(terminal)
        monkeypatch.setattr(sys, "stderr", made)
        monkeypatch.setenv("MESHWRIGHT_PROGRESS", "1")
        monkeypatch.setattr(shown, "_AFTER_S", after_s)
        monkeypatch.setattr(shown, "_EVERY_S", 0.001)
        return made

    return make


def test_a_long_call_has_one_line_that_is_gone_afterwards(screen):
    terminal = screen()
    with progress() as say:
        say("tracing")
        terminal.wait_for("tracing")
        say("solving")
        terminal.wait_for("solving, 0 s so far")
    lines = terminal.getvalue().split("\r")
    assert "\n" not in terminal.getvalue()
    assert lines[-1] == "" and lines[-2].strip() == "" and len(lines[-2]) >= len(lines[-3].rstrip())


def test_elsewhere_each_stage_has_a_line(screen):
    file = screen(terminal=False)
    with progress() as say:
        say("tracing")
        file.wait_for("tracing")
        say("solving")
        file.wait_for("solving")
    assert [line.split("s  ")[1] for line in file.getvalue().splitlines()] == ["tracing", "solving"]


def test_a_call_inside_another_shares_its_line(screen):
    terminal = screen()
    with progress() as say:
        say("outside")
        with progress() as inner:
            inner("inside")
            terminal.wait_for("inside")
        assert len(shown._shown) == 1
    assert not shown._shown


@pytest.mark.parametrize("off", ["0", "short", "told"])
def test_nothing_is_shown_of_short_calls_or_where_it_is_not_wanted(off, screen, monkeypatch):
    terminal = screen(after_s=60.0 if off == "short" else 0.0)
    if off == "0":
        monkeypatch.setenv("MESHWRIGHT_PROGRESS", "0")
    told: list[str] = []
    with progress(told.append if off == "told" else None) as say:
        say("tracing")
        assert bool(shown._shown) == (off == "short")
    assert terminal.getvalue() == ""
    assert told == (["tracing"] if off == "told" else [])
