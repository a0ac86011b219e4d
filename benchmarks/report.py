"""What every benchmark prints around its table: the question, the machine, the versions, the date."""

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

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
