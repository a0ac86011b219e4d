"""Is a named method ever faster than Auto where memory is tight? The zoo at full size on eight clusters.

Plans are made as `mw.plan` makes them, with microbatches and recomputation, and compared by their simulated steps.
Limits are shares of what the best plan needs where memory is ample and nothing is computed again. Each limit is a job
of its own, whose row is printed once it is found; a file keeps rows, so that later runs go on with the others.

    python benchmarks/tight_memory.py --jobs 16                             # all; hours on two cores
    python benchmarks/tight_memory.py bert vit --kept rows.jsonl [--jobs 2] # models whose names contain one of these
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock

sys.path.insert(0, str(Path(__file__).parent))
os.environ |= {"MESHWRIGHT_MEASURE": "never", "MESHWRIGHT_PROGRESS": "0", "JAX_PLATFORMS": "cpu"}

from children import told
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.hardware import Cluster
from meshwright.hardware.load import cluster
from meshwright.planner.methods import NAMED, Method

SHARES = (1.0, 0.85, 0.7, 0.5, 0.3)
AMPLE = 64.0  # times a chip's memory: so much that every model fits as it is
FRACTION = 0.9  # the part of a device's memory that methods use
JOBS = [
    # model, options, cluster
    ("bert-large", {"batch": 512, "seq": 512}, "4x4 a100-40gb"),
    ("vit-l16", {"batch": 1024}, "1x8 h100"),
    ("gpt3-1.3b", {"batch": 256, "seq": 1024}, "2x8 v100-32gb"),
    ("llama2-7b", {"batch": 256, "seq": 2048, "checkpoint": True}, "8x8 h100"),
    ("llama3-8b", {"batch": 512, "seq": 8192, "checkpoint": "full"}, "16x8 h100"),
    ("wide-resnet-250m", {"batch": 1024}, "1x16 v100-32gb"),
    ("gshard-moe-2.4b", {"batch": 256, "seq": 1024}, "2x4 a100-80gb"),
    ("llama3-70b", {"batch": 64, "seq": 4096, "checkpoint": True}, "4x8 h200"),
]
HEADER = ("model", "cluster", "limit", "GiB", "Auto", "gap", "microbatches", "recomputed", "best named", "it takes")
_HANGS_S = 3000.0  # a row that takes longer is given up


def compared(job: int, share: float) -> tuple[str, ...]:
    """The row of one model under one limit."""
    model, options, description = JOBS[job]
    example, machines = zoo.build(model, **options), cluster(description)
    arguments = (example.train_step, example.state, example.batch)
    as_it_is = mw.Auto(pipeline=False, microbatches=1, recompute="as written", memory_fraction=FRACTION)
    ample = mw.plan(*arguments, cluster=_with_memory(machines, AMPLE * machines.chip.memory_bytes), method=as_it_is)
    limit = share * ample.memory.peak_bytes
    tight = _with_memory(machines, limit / FRACTION)
    auto = _planned(arguments, tight, mw.Auto(pipeline=False, memory_fraction=FRACTION))
    named = {method.name: _planned(arguments, tight, replace(method, memory_fraction=FRACTION)) for method in NAMED}
    steps = {name: plan.step_s for name, plan in named.items() if plan is not None}
    best = min(steps, key=steps.__getitem__, default="–")
    words = ("does not fit", "–", "–", "–")
    if auto is not None:
        words = (
            f"{auto.step_s:.4g} s",
            f"{100 * auto.solution.gap:.1f}%",
            str(auto.microbatches),
            _worded(auto.recompute),
        )
    ratio = "does not fit" if not steps else "alone fits" if auto is None else f"{steps[best] / auto.step_s:.3f}×"
    return (model, description, f"{share:.2f}", f"{limit / 2**30:.2f}", *words, best, ratio)


def _with_memory(machines: Cluster, num_bytes: float) -> Cluster:
    return replace(machines, chip=replace(machines.chip, memory_bytes=num_bytes))


def _planned(arguments: tuple, machines: Cluster, method: Method) -> mw.Plan | None:
    """The plan; None where nothing fits, or the shapes do not suit the method."""
    try:
        return mw.plan(*arguments, cluster=machines, method=method)
    except (mw.DoesNotFit, mw.ShardingError):
        return None


def _worded(recompute: str) -> str:
    """What is computed again, short: places of operations fill a line."""
    return " | ".join(
        ", ".join("some" + part[part.rfind(":") :] if "keep" in part else part for part in kind.split(", "))
        for kind in recompute.split(" | ")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="parts of the names of the models that are tried; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="the limits that are tried")
    parser.add_argument("--kept", type=Path, help="a file that keeps rows as they are found, so that runs continue")
    parser.add_argument("--row", type=float, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps({"row": compared(int(options.row[0]), options.row[1])}), flush=True)
        return
    wanted = [
        job for job, (name, *_) in enumerate(JOBS) if not options.models or any(m in name for m in options.models)
    ]
    rows = dict(_kept(options.kept))
    left = [(job, share) for share in options.shares for job in wanted if (job, share) not in rows]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows |= dict(zip(left, pool.map(partial(_row, partial(_keep, options.kept, Lock())), left), strict=True))
    found = [rows[at] for at in sorted(rows, key=lambda at: (at[0], -at[1]))]
    worse = sum(_is_worse(row) for row in found)
    question = f"{(__doc__ or '').splitlines()[0]}\n\nRows in which one is: {worse} of {len(found)}."
    table("Tight memory", question, HEADER, found)


def _is_worse(row: tuple[str, ...]) -> bool:
    ratio = row[-1]
    return ratio == "alone fits" or (ratio.endswith("×") and float(ratio[:-1]) < 1.0)


def _row(keep: Callable[[tuple[int, float], tuple[str, ...]], None], at: tuple[int, float]) -> tuple[str, ...]:
    """A row from a process of its own."""
    lines = told([sys.executable, __file__, "--row", *map(str, at)], _HANGS_S)
    row = next((tuple(line["row"]) for line in lines), None)
    if row is None:
        job, share = at
        row = (JOBS[job][0], JOBS[job][2], f"{share:.2f}", *("–",) * (len(HEADER) - 4), "ended without a row")
    keep(at, row)
    print(*row, flush=True)
    return row


def _kept(path: Path | None) -> Iterator[tuple[tuple[int, float], tuple[str, ...]]]:
    """The rows that a file holds, by job and limit."""
    if path is not None and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):  # the last one may have been cut short
                at, row = json.loads(line)["at"], json.loads(line)["row"]
                yield (at[0], at[1]), tuple(row)


def _keep(path: Path | None, lock: Lock, at: tuple[int, float], row: tuple[str, ...]) -> None:
    if path is not None:
        with lock, path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": at, "row": row}) + "\n")


if __name__ == "__main__":
    main()
