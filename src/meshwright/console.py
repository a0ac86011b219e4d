"""The common form of printed results: text by `str`, colours on a console, tables without lines.

Names come from users and from files, and any text may be a name: none is read as rich's markup (`[bold]`, `:smile:`),
and no control character reaches the terminal.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich import console as rich_console
from rich import table as rich_table
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from meshwright.names import one_line, printable

_WIDTH = 118
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


class Console(rich_console.Console):
    """A console that shows text as it is."""

    def __init__(self, **options: Any):
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            yield segment if segment.control or text.isprintable() else Segment(printable(text), segment.style)


class Table(rich_table.Table):
    """A table whose title and cells are shown as they are on any console."""

    def __init__(self, *headers: Any, title: str | None = None, **options: Any):
        style = options.get("title_style") or "table.title"
        super().__init__(*headers, title=None if title is None else Text(printable(title), style=style), **options)

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(one_line(cell)) if isinstance(cell, str) else cell for cell in cells), **options)


class Printed(ABC):
    """Something that a rich console shows, and that `str` gives as plain text."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """What a console shows."""

    def __str__(self) -> str:
        return plain_text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_text(self)

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        cls.__repr__ = cls.__dict__.get("__repr__", Printed.__repr__)  # type: ignore[method-assign]  # not a dataclass's


def plain_text(view: RenderableType, width: int = _WIDTH) -> str:
    """A view as plain text."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, no_color=True).print(view)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def html_text(view: RenderableType) -> str:
    """A view as HTML, in the colours of the page that it stands on."""
    console = Console(file=io.StringIO(), width=_WIDTH, record=True, force_jupyter=False)
    console.print(view)
    return console.export_html(inline_styles=True, code_format=_HTML)


def bare_table(*columns: str, right: Collection[str] = ()) -> Table:
    """A table without lines and title, of which some columns are numbers."""
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def plain_table(title: str, columns: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table without lines: text columns, then columns of numbers."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
