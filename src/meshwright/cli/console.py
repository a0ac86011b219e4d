"""Output of the commands: results on stdout, progress and errors on stderr, JSON for programs."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwright.console import Console
from meshwright.errors import MeshwrightError
from meshwright.output import ESCAPED, write_whole

_WIDTH = 118  # columns of tables where there is no terminal


class CommandError(MeshwrightError):
    """An option or argument of the command that cannot be used."""


def show(view: RenderableType) -> None:
    """Prints a result."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=_WIDTH)
    console.print(view)


def note(text: str) -> None:
    """Prints a remark on stderr."""
    _stderr().print(Text(text), soft_wrap=True)


def fail(command: str | None, message: str) -> None:
    """Prints an error as one red line on stderr."""
    line = " ".join(message.split())
    _stderr().print(
        Text(f"{'meshwright ' + command if command else 'meshwright'}: {line}", style="red"), soft_wrap=True
    )


def give(json_path: Path | None, data: Any, *views: RenderableType) -> None:
    """Writes a result as JSON where a path asks for it, and prints views of it unless the JSON is all that is asked."""
    if json_path is not None:
        write_json(json_path, data)
    for view in () if str(json_path) == "-" else views:
        show(view)


def write_json(path: Path, data: Any) -> None:
    """Writes data as JSON; ``-`` is stdout."""
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text; ``-`` is stdout."""
    if str(path) == "-":
        sys.stdout.write(text.encode("utf-8", ESCAPED).decode("utf-8"))
        return
    write_whole(path, text)
    note(f"wrote {path}")


class Stages:
    """Shows the progress: a spinner with a clock on a terminal, one line per stage elsewhere."""

    def __init__(self) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._console = _stderr()
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._live.add_task("starting")
        self._started = time.perf_counter()

    def __enter__(self) -> "Stages":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def say(self, stage: str) -> None:
        """Enters a stage."""
        if self._console.is_terminal:
            self._live.update(self._task, description=stage)
        else:
            self.remark(f"{time.perf_counter() - self._started:6.1f} s  {stage}")

    def remark(self, text: str) -> None:
        """Prints a remark that stays on the screen."""
        self._console.print(Text(text), soft_wrap=True)


def _stderr() -> Console:
    return Console(file=sys.stderr, highlight=False)
