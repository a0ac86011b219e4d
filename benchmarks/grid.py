"""How long do operations take that no product or stream of bytes explains? A grid of them, alone on one device.

Convolutions with both gradients, scatters by how often their indices repeat, look-ups, sorts, running sums, Fourier
transforms, `ragged_dot`, reductions, transposes, random numbers, decompositions, small products, and loops whose steps
are small. Each is compiled by itself; what is kept is the time of one of many runs in a row, its kernels where JAX's
profiler sees them, and the temporary memory that the compiler gave it. The kinds take turns, some cases at a time, and
every case is a line of `grid.jsonl` once it was measured.

    python benchmarks/grid.py [--out FOLDER] [--seconds 100] [KIND …]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from operations import Case
from operations.kinds import KINDS
from report import RESULTS, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.time() + options.seconds
    # Kinds take turns, so that every one has rows when time is over.
    turns = zip_longest(*(KINDS[kind]() for kind in options.kinds))
    cases = [case for case in chain.from_iterable(turns) if case is not None]
    for number, case in enumerate(cases):
        case.name = f"case_{number}"
    threads = max((os.cpu_count() or 2) - 2, 1)
    rows: list[dict[str, Any]] = []
    with (
        (options.out / "grid.jsonl").open("w", encoding="utf-8") as file,
        ThreadPoolExecutor(threads) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        while len(rows) < len(cases) and time.time() < end:
            some = cases[len(rows) : len(rows) + 2 * threads]
            for case, failure in zip(some, pool.map(partial(_outcome, Case.compile), some), strict=True):
                failure = failure or _outcome(partial(Case.measure, folder=Path(folder)), case)
                if failure:
                    case.row = {"kind": case.kind, **case.size, "failure": failure}
                file.write(json.dumps(case.row) + "\n")
                file.flush()
                rows.append(case.row)
            print(f"{len(rows)} of {len(cases)} measured, {end - time.time():.0f} s left", flush=True)
    shown = [(row.pop("kind"), *_cells(row)) for row in rows]
    table("Grid", (__doc__ or "").split("\n")[0], ("operation", "size", "µs a run", "µs of kernels", "MiB"), shown)


def _outcome(function: Callable[[Case], None], case: Case) -> str | None:
    """What went wrong, so that the others are measured; None where nothing did."""
    try:
        function(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    size = {key: value for key, value in row.items() if key not in ("wall_s", "kernel_s", "kernels", "temp_bytes")}
    what = ", ".join(f"{key} {value}" for key, value in size.items())
    if "failure" in row:
        return (what, "", "", "")
    temporary = "" if row["temp_bytes"] is None else f"{row['temp_bytes'] / 2**20:.1f}"
    return (what, f"{1e6 * row['wall_s']:.0f}", f"{1e6 * row['kernel_s']:.0f}", temporary)


if __name__ == "__main__":
    main()
