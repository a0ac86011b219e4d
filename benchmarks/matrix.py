"""Does what people combine work: precision × program × framework × mode?

Every cell trains a small program for two steps and is *equal* to one device, or *refused* with a sentence that names
the cause and the remedy, or *wrong*, or *crashed*. Each pair of members of different axes is in some cell; with
`--strength 3` each triple. What counts as equal is measured for each program on one device, by changing what it reads
by one unit of rounding (`tests/matrix/one_device.py`). Another seed gives other cells with other meshes and methods.

    python benchmarks/matrix.py [--jobs 2] [--seed 0] [--strength 2] [--cells 40]
    python benchmarks/matrix.py --only "bf16 compute/tied embedding/linen/1f1b/2"     # one cell, or several
    python benchmarks/matrix.py --only "*/scan/*/gpipe/*"                             # those of the array that match
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from tests.compiling import FLAGS

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ |= {"MESHWRIGHT_MEASURE": "never", "MESHWRIGHT_PROGRESS": "0"}

from children import told
from report import table

from tests.matrix.axes import FRAMEWORKS, MODES, PRECISIONS, PROGRAMS, Cell, covering, present_frameworks
from tests.matrix.cells import CRASHED, EQUAL, REFUSED, WRONG, Outcome, run

VERDICTS = (EQUAL, REFUSED, WRONG, CRASHED)
_AT_ONCE = 8  # cells of one process, so that what JAX keeps does not fill the memory
_HANGS_S = 600.0  # a cell that takes longer is given up
_TOLD = 160  # characters of an error in the table; all of it is printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seed", type=int, default=0, help="which cells cover all pairs, and their meshes and methods")
    parser.add_argument("--strength", type=int, default=2, choices=(2, 3), help="cover all pairs, or all triples")
    parser.add_argument("--cells", type=int, help="at most so many of them")
    parser.add_argument("--only", nargs="+", metavar="CELL", help="these cells, or those of the array that match")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _work(options.work)
        return
    present = present_frameworks()
    cells = _chosen(options, present)
    for name in FRAMEWORKS:
        if name not in present:
            print(f"NOT TRIED: {name}, which is not installed", flush=True)
    started = time.perf_counter()
    outcomes = _tried(cells, options.jobs)
    words = f"seed {options.seed}, strength {options.strength}, {time.perf_counter() - started:.0f} s"
    _tell(outcomes, words, [name for name in FRAMEWORKS if name not in present])
    sys.exit(any(o.verdict in (WRONG, CRASHED) for o in outcomes))


def _chosen(options: argparse.Namespace, present: tuple[str, ...]) -> list[Cell]:
    """The cells that the options ask for."""
    if options.only and not any("*" in text for text in options.only):
        return [Cell.of(text) for text in options.only]
    cells = covering(options.seed, options.strength, present)
    if options.only:
        cells = [cell for cell in cells if any(fnmatchcase(str(cell), pattern) for pattern in options.only)]
    return cells[: options.cells]


def _tried(cells: list[Cell], jobs: int) -> list[Outcome]:
    """The outcomes of all cells; neighbours share a process."""
    cached = [[cell] for cell in cells if cell.mode == "cache"]
    others = sorted(cell for cell in cells if cell.mode != "cache")
    size = max(1, min(_AT_ONCE, -(-len(others) // jobs)))
    groups = [*cached, *(others[i : i + size] for i in range(0, len(others), size))]
    with ThreadPoolExecutor(jobs) as pool:
        return [outcome for found in pool.map(_group, groups) for outcome in found]


def _group(cells: list[Cell]) -> list[Outcome]:
    if cells[0].mode == "cache":
        return [_told(_cold_and_warm(cells[0]))]
    outcomes: list[Outcome] = []
    while len(outcomes) < len(cells):
        for outcome in _process(cells[len(outcomes) :], {}):
            outcomes.append(_told(outcome))
        if len(outcomes) < len(cells):
            outcomes.append(_told(_ended(cells[len(outcomes)])))
    return outcomes


def _ended(cell: Cell) -> Outcome:
    return Outcome(str(cell), CRASHED, "ended the process, or hung")


def _cold_and_warm(cell: Cell) -> Outcome:
    """The same cell in two processes, of which the second one reads what the first one compiled."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for when in ("cold", "warm"):
            outcome = next(_process([cell], settings), _ended(cell))
            if outcome.verdict != EQUAL:
                return replace(outcome, words=f"with a {when} cache: {outcome.words}")
            if not any(Path(folder).iterdir()):
                return replace(outcome, verdict=CRASHED, words="nothing was kept in JAX's cache")
    return outcome


def _process(cells: list[Cell], settings: dict[str, str]) -> Iterator[Outcome]:
    """What one process tells of the cells that it finishes."""
    command = [sys.executable, __file__, "--work", *map(str, cells)]
    return (Outcome(**outcome) for outcome in told(command, _HANGS_S, os.environ | settings))


def _work(texts: list[str]) -> None:
    for text in texts:
        print(json.dumps(asdict(run(Cell.of(text)))), flush=True)
    os._exit(0)


def _told(outcome: Outcome) -> Outcome:
    """Prints a cell, and how to run it again where it went wrong."""
    print(f"{outcome.verdict:8} {outcome.seconds:5.1f} s {outcome.cell}", flush=True)
    if outcome.verdict != EQUAL:
        print(f"         {outcome.words}", flush=True)
    if outcome.verdict in (WRONG, CRASHED):
        print(f'         python benchmarks/matrix.py --only "{outcome.cell}"', flush=True)
    return outcome


def _tell(outcomes: list[Outcome], words: str, absent: list[str]) -> None:
    """The table: how many cells of each member came out how, and every cell that is not equal."""
    counts = partial(_counts, outcomes)
    rows: list[tuple[object, ...]] = []
    for axis, members in enumerate((PRECISIONS, PROGRAMS, FRAMEWORKS, MODES)):
        rows += [(name, *("not installed" if name in absent else n for n in counts(axis, name))) for name in members]
    rows.append(("in all", *counts(0, "*")))
    question = [
        (__doc__ or "").split("\n")[0],
        f"Each cell: one program trained for two steps; {words}; longest planning "
        f"{max((o.seconds for o in outcomes), default=0.0):.1f} s. Not equal to one device:",
        "\n".join(_not_equal(outcomes)) or "none",
    ]
    table("Matrix", "\n\n".join(question), ("", *VERDICTS), rows)


def _counts(outcomes: list[Outcome], axis: int, name: str) -> list[int]:
    counted = Counter(o.verdict for o in outcomes if fnmatchcase(o.cell.split("/")[axis], name))
    return [counted[verdict] for verdict in VERDICTS]


def _not_equal(outcomes: list[Outcome]) -> Iterator[str]:
    for outcome in sorted(outcomes, key=lambda o: (o.verdict, o.words)):
        if outcome.verdict != EQUAL:
            yield f"- {outcome.verdict}: `{outcome.cell}`: {outcome.words[:_TOLD]}"


if __name__ == "__main__":
    main()
