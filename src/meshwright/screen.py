"""What every printed answer shares: text by `str`, colours on a console, tables without lines."""

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table

_WIDTH = 118


class Printed(ABC):
    """Something that a rich console shows, and that `str` gives as plain text."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """What a console shows."""

    def __str__(self) -> str:
        return plain_text(self)

    def __repr__(self) -> str:
        return str(self)


def plain_text(view: RenderableType, width: int = _WIDTH) -> str:
    """A view as plain text."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, no_color=True).print(view)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def plain_table(title: str, columns: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """A table without lines: text columns, then columns of numbers."""
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
