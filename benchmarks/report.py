"""What every benchmark prints around its table: the question, the machine, the versions, the date."""

import argparse
import datetime
import multiprocessing
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A model that fails is an error here, not a remark on the plan whose figures are kept.
os.environ.setdefault("MESHWRIGHT_STRICT", "1")
RESULTS = Path(__file__).parent / "results"


def table(title: str, question: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a Markdown table and keeps it under `results/`."""
    import jax
    import numba
    import numpy as np

    versions = (
        f"Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}, numba {numba.__version__}"
    )
    lines = [
        f"# {title}",
        "",
        question,
        "",
        f"{datetime.date.today()}, {os.cpu_count()} cores of {platform.machine()}, {versions}",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
        "",
    ]
    text = "\n".join(lines)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{title.lower().replace(' ', '-')}.md").write_text(text, encoding="utf-8")


def kept(title: str) -> dict[str, list[str]]:
    """Rows of a table that was kept by an earlier run, by their first cell: large tables are made in slices."""
    path = RESULTS / f"{title.lower().replace(' ', '-')}.md"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row for row in rows[1:]}


Row = Sequence[object]


def sliced_table(
    title: str,
    question: str,
    header: Sequence[str],
    function: Callable[..., Row],
    cases: Mapping[str, tuple[Any, ...]],
    last: Callable[[list[Row]], Row] | None = None,
) -> None:
    """Makes the rows that the command line asks for, and keeps the table with those of earlier runs after each.

    Args:
        title: The title.
        question: What the table answers.
        header: The names of its columns.
        function: Makes a row of a case.
        cases: The arguments of `function` by the name of the case, which is the first cell of its row.
        last: Makes a last row of the others.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="make the rows of cases with all of these words; others are kept")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=3600, help="leave out what is not ready by then")
    asked = parser.parse_args()
    wanted = {name: case for name, case in cases.items() if all(word in name for word in asked.words)}
    if not wanted:
        parser.error(f"no case has the words {' '.join(asked.words)}; one is {next(iter(cases))!r}")
    rows: dict[str, Row] = {**kept(title)}
    for name, row in rows_of(function, wanted, asked.jobs, asked.seconds):
        rows[name] = row
        known = [rows[one] for one in cases if one in rows]
        table(title, question, header, [*known, *([last(known)] if last else [])])


def rows_of(
    function: Callable[..., Row], cases: Mapping[str, tuple[Any, ...]], jobs: int, seconds: float
) -> Iterator[tuple[str, Row]]:
    """The rows that a function makes of some cases, each in a process of its own, as they become ready.

    Args:
        function: Makes a row of a case.
        cases: The arguments by the name of the case.
        jobs: How many run at once.
        seconds: Those that are not ready by then are left out, and named on stderr.
    """
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(jobs) as threads:
        running = {threads.submit(_row, function, case, end): name for name, case in cases.items()}
        for future in as_completed(running):
            if (row := future.result()) is None:
                print(f"{running[future]}: no row in {seconds:.0f} s", file=sys.stderr, flush=True)
            else:
                yield running[future], row


def _row(function: Callable[..., Row], case: tuple[Any, ...], end: float) -> Row | None:
    """A row made by a process; None where it ends before, or takes longer than until `end`."""
    left = end - time.monotonic()
    if left <= 0:
        return None
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, function, case))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(min(left, threading.TIMEOUT_MAX)) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def _send(there: Connection, function: Callable[..., Row], case: tuple[Any, ...]) -> None:
    there.send(function(*case))
