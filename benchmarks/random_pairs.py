"""Runs many random pairs of `equality.py`, each process restarted where one is ended by what it runs, or hangs."""

import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock

from children import told
from report import table

PER_PROGRAM = 5  # plans of each program
_PROGRAMS = 10  # programs of one process at most, so that what JAX keeps does not fill the memory
_HANGS_S = 300.0  # a pair that takes longer is given up
_SLOW_S = 20.0  # no planning may take longer


def main(kind: str, first: int, count: int, jobs: int, kept: Path | None = None) -> None:
    """Tries `count` pairs of a kind, `pairs` or `pipelines`, and prints those that went wrong and a summary.

    With a file, every pair's outcome is kept there as it is found, and pairs that it holds are not tried again. The
    process ends with 1 if anything went wrong, or was planned too slowly.
    """
    num_programs = -(-count // PER_PROGRAM)
    size = min(_PROGRAMS, -(-num_programs // jobs))
    starts = range(first, first + num_programs, size)
    ranges = [(start, min(start + size, first + num_programs)) for start in starts]
    started, known = time.perf_counter(), _kept(kept, kind)
    with ThreadPoolExecutor(jobs) as pool:
        tried = partial(_tried, kind, known, partial(_keep, kept, kind, Lock()))
        rows = [row for found in pool.map(tried, ranges) for row in found]
    wrong = [row for row in rows if row["trouble"]]
    slow = [row for row in rows if row["seconds"] > _SLOW_S]
    slowest = max(rows, key=lambda row: row["seconds"])
    kinds = Counter(_kind(row["trouble"]) for row in wrong)
    summary = [
        ("pairs", len(rows)),
        ("of which in microbatches", sum("microbatches" in row["pair"] for row in rows)),
        ("of which were refused, with a reason", sum(": refused, " in row["pair"] for row in rows)),
        *kinds.most_common(),
        ("in all that went wrong", len(wrong)),
        (f"planned in more than {_SLOW_S:.0f} s", len(slow)),
        ("longest planning", f"{slowest['seconds']:.1f} s, {slowest['pair'].split()[0]}"),
        ("programs", f"{first} to {first + num_programs - 1}"),
        ("time in all", f"{time.perf_counter() - started:.0f} s by {jobs} processes"),
    ]
    program, plan = ("program", "plan") if kind == "pairs" else ("train step", "pipeline")
    question = f"Does a random {program} under a random {plan} compute what one device does?"
    table(f"Random {kind}", question, ("", ""), summary)
    sys.exit(bool(wrong or slow))


def _kept(path: Path | None, kind: str) -> dict[int, dict]:
    """The outcomes that a file holds of pairs of a kind, by their number."""
    if path is None or not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may have been cut short
    return {row["at"]: row for row in rows if row["kind"] == kind}


def _keep(path: Path | None, kind: str, lock: Lock, at: int, row: dict) -> dict:
    if path is not None:
        with lock, path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "kind": kind, "at": at}) + "\n")
    return row


def _kind(trouble: str) -> str:
    return "differs" if trouble.startswith("result") else trouble.split(":")[0]


def _tried(
    kind: str, known: dict[int, dict], keep: Callable[[int, dict], dict], programs: tuple[int, int]
) -> list[dict]:
    """The outcomes of some programs, from as many processes as it takes."""
    rows: list[dict] = []
    first, last = programs
    at, end = first * PER_PROGRAM, last * PER_PROGRAM
    while at < end:
        if at in known:
            rows.append(_told(known[at]))
            at += 1
            continue
        stop = next((n for n in range(at, end) if n in known), end)
        for row in _process(kind, at, stop):
            rows.append(keep(at, _told(row)))
            at += 1
        if at < stop:
            pair = f"{at // PER_PROGRAM}.{at % PER_PROGRAM}"
            rows.append(keep(at, _told({"pair": pair, "seconds": 0.0, "trouble": "ended the process, or hung"})))
            at += 1
    print(f"programs {first} to {last - 1}: {len(rows)} pairs", flush=True)
    return rows


def _told(row: dict) -> dict:
    """Prints what went wrong, as it is found."""
    if row["trouble"] or row["seconds"] > _SLOW_S:
        print(f"{row['pair']}\n    planned in {row['seconds']:.1f} s: {row['trouble'] or 'slow'}", flush=True)
    return row


def _process(kind: str, first: int, last: int) -> Iterator[dict]:
    """What one process tells of the pairs that it finishes."""
    command = [sys.executable, __file__, kind, str(first), str(last)]
    return told(command, _HANGS_S)


def _work(kind: str, first: int, last: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.generator.pairs import Outcome

    outcome = import_module(f"tests.generator.{kind}").outcome

    logging.getLogger("meshwright").setLevel(logging.ERROR)  # many programs cannot be cut, and each says so
    for at in range(first, last):
        seed, number = divmod(at, PER_PROGRAM)
        try:
            found = outcome(seed, number)
        except Exception as error:  # JAX on one device does not take it: a fault of the generator
            found = Outcome(f"{seed}.{number}", 0.0, f"one device: {type(error).__name__}: {error}"[:300])
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    _work(sys.argv[1], *map(int, sys.argv[2:]))
    os._exit(0)
