"""What is planned for strangers' train steps at their tiny sizes, and what do the CPU devices of this machine do?

    python benchmarks/strangers_on_cpus.py rank    # are steps ranked right by `mw.cluster("local")`, on one device?
    python benchmarks/strangers_on_cpus.py memory  # does what a rehearsal finds of memory hold in the next plan?
    python benchmarks/strangers_on_cpus.py split   # do all of them run split over 8 devices, with the loss of one?

`--only` names programs. Every program is one line of `--out`, from which the table is printed: a part of the corpus may
be run at a time, and what was run before is not run again.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
MODES = ("rank", "memory", "split")
RUNS, STEPS = 4, 10  # the quickest of some runs of so many steps
PART = 0.85  # of what a plan needs is the limit of the next one

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, help="the file of what was run; by default a new one")
    parser.add_argument("--only", nargs="*", help="names of programs")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after how long no program is begun")
    options = parser.parse_args()
    count = {"rank": 1, "memory": 4, "split": 8}[options.mode]
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count} {os.environ.get('XLA_FLAGS', '')}"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_MEASURE"] = "never" if options.mode == "split" else "once"
        if options.mode == "memory":
            os.environ["MESHWRIGHT_CACHE"] = folder  # nothing is known before
        out = options.out or Path(folder) / "rows.jsonl"
        run, told = {"rank": (ranked, ranks), "memory": (remembered, memories), "split": (split, losses)}[options.mode]
        _run(run, out, options.only, options.seconds)
        told([json.loads(line) for line in out.read_text().splitlines()])


def _run(run: Callable[[Any], Row], out: Path, only: list[str] | None, seconds: float) -> None:
    """Runs those programs that were not run before, and keeps a line of each."""
    from strangers import corpus

    end = time.time() + seconds
    known = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set()
    for name, stranger in corpus().items():
        if name in known or (only and name not in only) or time.time() > end:
            continue
        try:
            row = run(stranger.tiny())
        except Exception as error:
            traceback.print_exc(limit=-4)
            row = {"failure": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **row}) + "\n")
        print(name, row, flush=True)


def ranked(program: Any) -> Row:
    """A step planned with figures of the local machine, and as it is without a plan on one CPU device."""
    import jax

    import meshwright as mw

    state, batch = jax.jit(program.init)(jax.random.key(0)), jax.jit(program.sample)(jax.random.key(1))
    planned_s = mw.plan(program.step, state, batch, cluster="local", method=mw.Auto(recompute="as written")).step_s
    times = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        for _ in range(STEPS):
            state, _ = program.step(state, batch)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - started) / STEPS)
    return {"planned_s": planned_s, "measured_s": min(times[1:])}


def ranks(rows: list[Row]) -> None:
    """The table, with the correlation of ranks."""
    import numpy as np
    from report import table

    pairs = [(row["planned_s"], row["measured_s"]) for row in rows if "measured_s" in row]
    shown = []
    for row in rows:
        both = [f"{1e3 * row[key]:.3f} ms" if key in row else "" for key in ("planned_s", "measured_s")]
        ratio = f"{row['planned_s'] / row['measured_s']:.2f}" if "measured_s" in row else row["failure"]
        shown.append((row["name"], *both, ratio))
    order = [np.argsort(np.argsort(side)) for side in zip(*pairs, strict=True)]
    right = [a[0] > b[0] for a in pairs for b in pairs if a[1] > 1.5 * b[1]]
    shown.append((f"**{len(pairs)} programs**", "rank correlation", f"{np.corrcoef(*order)[0, 1]:.2f}", ""))
    shown.append(("", "pairs of which one takes half as long again, in the right order", f"{np.mean(right):.0%}", ""))
    header = ("program", "planned", "measured", "planned ÷ measured")
    table("Strangers local", "Are strangers' steps ranked right on the local machine?", header, shown)


def remembered(program: Any) -> Row:
    """A plan of four devices by ZeRO-1, its rehearsal, and the free plan within less memory than that needs."""
    import meshwright as mw

    plan = mw.plan(program.step, *program.args, cluster="local", method="zero1")
    needed = plan.rehearse(steps=0, segments=False).memory.compiled
    again = mw.plan(program.step, *program.args, cluster="local", method="zero1")
    limit = PART * needed
    row = {"modelled": plan.memory.peak_bytes, "needed": needed, "again": again.memory.peak_bytes, "limit": limit}
    assert plan.mesh.memory_bytes is not None
    method = mw.Auto(memory_fraction=limit / plan.mesh.memory_bytes)
    for number in range(1, 4):
        try:
            within = mw.plan(program.step, *program.args, cluster="local", method=method)
        except mw.DoesNotFit:
            return row | {"plans": number, "outcome": "none fits, and it says so"}
        found = within.rehearse(steps=0, segments=False).memory.compiled
        if found <= limit:
            break
    return row | {"plans": number, "outcome": f"{found / limit:.2f} of the limit"}


def memories(rows: list[Row]) -> None:
    """The table of what was modelled, needed, and planned again."""
    from report import table

    shown = []
    for row in rows:
        if "failure" in row:
            shown.append((row["name"], row["failure"], "", "", "", ""))
        else:
            sizes = [f"{row[key] / 1e3:.1f} kB" for key in ("needed", "limit")]
            errors = [f"{row[key] / row['needed'] - 1:+.1%}" for key in ("modelled", "again")]
            shown.append((row["name"], sizes[0], *errors, sizes[1], f"{row['outcome']}, plan {row['plans']}"))
    header = ("program", "rehearsed", "planned before", "planned after", "limit", "what a plan within it needs")
    table("Strangers memory", "Does what a rehearsal finds of memory hold in the next plan?", header, shown)


def split(program: Any) -> Row:
    """A step split over 8 virtual devices and verified, and its loss beside that of one."""
    import jax

    import meshwright as mw

    state, batch = program.init(jax.random.key(0)), program.sample(jax.random.key(1))
    alone = program.step(jax.tree.map(lambda x: x + 0, state), batch)[1]
    step = mw.parallelize(program.step, cluster="1x8 cpu")
    verified = step.plan(state, batch).verify()
    ratios = {"flops": verified.flops.ratio, "memory": verified.memory.ratio}
    return {"together": float(step(state, batch)[1]), "alone": float(alone), **ratios}


def losses(rows: list[Row]) -> None:
    """The table of losses, and of compiled ÷ planned work and memory."""
    from report import table

    keys = ("together", "alone", "flops", "memory")
    shown = [(row["name"], *(row.get(key, row.get("failure", "")) for key in keys)) for row in rows]
    header = ("program", "loss", "on one device", "compiled ÷ planned FLOPs", "compiled ÷ planned memory")
    table("Strangers tiny", "Does every program run split over 8 devices, and give the loss of one?", header, shown)


if __name__ == "__main__":
    main()
