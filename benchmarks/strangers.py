"""Is what is planned for programs that nobody showed us what a device does? The corpus of `strangers/`.

    python benchmarks/strangers.py device   # on one H200: planned, compiled, rehearsed, measured; kernels of the told
    python benchmarks/strangers.py table    # the table of what was measured, planned anew, and `plans/trust.toml`

`--out` is the folder of measurements, `--only` some names, `--jobs` how many processes compile, before anything is
timed; `--seconds` after how long nothing more is begun. Every program is one line of `rows-N.jsonl` once it was timed.
`strangers_on_cpus.py` runs them, tiny, on this machine.
"""

import argparse
import gzip
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from threading import BrokenBarrierError
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
SIDES = ("told", "set aside", "fresh")
MODES = ("device", "table")
RESULTS = Path(__file__).parent / "results" / "strangers"
RUN_S, RUNS = 0.4, 3
TIMING = 0.4  # the part of the time that is kept for timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--plain", action="store_true", help="no rehearsals: half of the compilations")
    parser.add_argument("--profile", type=float, metavar="S", help="plan anew by profiles of so many seconds each")
    parser.add_argument("--dump", action="store_true", help="HLO, buffers and kernels of all, not only of the told")
    parser.add_argument("--small", action="store_true", help="the tiny sizes, to try this file where there is no GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    {"device": device, "table": print_table}[options.mode](options)


def as_written() -> Any:
    """The method: what a user's `jax.jit` runs is the program as it is written, whatever a plan would recompute."""
    import meshwright as mw

    return mw.Auto(recompute="as written")


def device(options: argparse.Namespace) -> None:
    """Compiles in several processes, then times in one after the other: nothing is timed while anything compiles."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["MESHWRIGHT_MEASURE"] = "never"  # until programs are profiled
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_CACHE"] = folder  # no measurements of earlier runs
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder  # with which XLA remembers the kernels that it chose
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "3600"
        _work_in_turns(options)


def _work_in_turns(options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    compiled, turn = context.Barrier(options.jobs), context.Lock()
    end = time.time() + options.seconds
    workers = [
        context.Process(target=_work, args=(number, options, end, compiled, turn)) for number in range(options.jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _work(number: int, options: argparse.Namespace, end: float, compiled: Any, turn: Any) -> None:
    dump = Path(tempfile.mkdtemp()) if options.dump else None
    if dump is not None:
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=jit_step"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    from strangers import corpus

    strangers = corpus()
    order = sorted(options.only or strangers, key=lambda name: (SIDES.index(strangers[name].side), name[::-1]))
    ready = []
    for name in order[number :: options.jobs]:  # those that are told come first, if time runs out
        if time.time() > end - options.seconds * TIMING:
            break
        try:
            ready.append(_Compiled(name, options.out, options.small, not options.plain, dump))
            _keep(options.out, number, ready[-1].row)
        except Exception as error:  # the others are measured
            traceback.print_exc()
            _keep(options.out, number, {"name": name, "failure": f"{type(error).__name__}: {error}"[:500]})
    with suppress(BrokenBarrierError):  # where another process did not come this far
        compiled.wait(max(end - options.seconds * TIMING / 3 - time.time(), 1.0))
    for one in ready:
        with turn:
            if time.time() > end:
                break
            try:
                one.measure(options.out, options.profile)
            except Exception as error:
                traceback.print_exc()
                one.row["failure"] = f"{type(error).__name__}: {error}"[:500]
            _keep(options.out, number, one.row)


def _buffers(dump: Path | None, most: int = 2_000_000) -> str:
    """What the compiler says of the largest buffers of the program that it compiled last, whose files are removed."""
    if dump is None:
        return ""
    endings = ("memory-usage-report.txt", "buffer-assignment.txt")
    told = [path for ending in endings for path in sorted(dump.glob(f"*{ending}"))[-1:]]
    text = "\n".join(path.read_text()[:most] for path in told)
    shutil.rmtree(dump)
    return text


def _keep(out: Path, number: int, row: dict[str, Any]) -> None:
    with (out / f"rows-{number}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(time.strftime("%X"), {key: value for key, value in row.items() if key != "kernels"}, flush=True)


def _rows(out: Path) -> dict[str, dict[str, Any]]:
    """What was measured last of each program."""
    lines = [line for path in sorted(out.glob("rows-*.jsonl")) for line in path.read_text().splitlines()]
    return {row["name"]: row for row in map(json.loads, lines)}


class _Compiled:
    """A program planned for one device, compiled as it is and as its share of the plan."""

    def __init__(self, name: str, out: Path, small: bool, rehearses: bool, dump: Path | None) -> None:
        import jax
        from strangers import corpus

        import meshwright as mw
        from meshwright.rehearsal.share.program import Share
        from meshwright.runtime.checking.verify import allocated_bytes

        self.stranger = corpus()[name]
        self.program, started = (self.stranger.tiny if small else self.stranger.full)(), time.perf_counter()
        state, batch = self.program.args
        plan = mw.plan(self.program.step, state, batch, cluster="1x1 h200", method=as_written())
        planned = time.perf_counter()
        self.step = self.program.step.lower(state, batch).compile()
        ended = time.perf_counter()
        self._keep_compiled(_buffers(dump), out)
        self.share = Share.of(plan, plan.origin)
        self.rehearsed = self.share.compile(jax.devices()[0]) if rehearses else None
        sizes = self.step.memory_analysis()
        self.row: dict[str, Any] = {
            "name": name,
            "told": self.stranger.is_told,
            "planned_s": plan.step_s,
            "planned_bytes": plan.memory.peak_bytes,
            "compiled_bytes": allocated_bytes(self.step),
            "rehearsed_bytes": allocated_bytes(self.rehearsed) if rehearses else None,
            "arguments": sizes.argument_size_in_bytes,
            "results": sizes.output_size_in_bytes,
            "aliased": sizes.alias_size_in_bytes,
            "temporary": sizes.temp_size_in_bytes,
            "planning_s": planned - started,
            "compile_s": ended - planned,
        }

    def _keep_compiled(self, buffers: str, out: Path) -> None:
        """Keeps the compiled program of the told, and of all where their buffers are kept too."""
        self.is_read = self.stranger.is_told or bool(buffers)
        if self.is_read:
            text = re.sub(r", (metadata|frontend_attributes)=\{[^{}]*\}", "", self.step.as_text() or "")
            (out / f"{self.stranger.name}.hlo.gz").write_bytes(gzip.compress(text.encode()))
        if buffers:
            (out / f"{self.stranger.name}.buffers.gz").write_bytes(gzip.compress(buffers.encode()))

    def measure(self, out: Path, profile_seconds: float | None) -> None:
        import jax
        from strangers.kernels import kernels

        from meshwright.rehearsal.rehearsal import time_share

        device, batch = jax.devices()[0], self.program.sample(jax.random.key(1))
        drawn = self.share.draw(device, [*jax.tree.leaves(self.program.args[0]), *jax.tree.leaves(batch)])
        state, batch = jax.tree.unflatten(jax.tree.structure(self.program.args), drawn)
        times = []
        for number in range(RUNS + 2):
            started = time.perf_counter()
            for _ in range(steps := 1 if number < 2 else int(min(max(RUN_S / times[-1], 5), 100))):
                state, _ = self.step(state, batch)
            jax.block_until_ready(state)
            times.append((time.perf_counter() - started) / steps)
        self.row["measured_s"] = median(times[2:])
        if self.rehearsed is not None:
            values = self.share.draw(device, jax.tree.leaves((state, batch)))
            self.row["rehearsed_s"] = time_share(self.share, self.rehearsed, values, 10)
            del values
        if self.is_read:

            def run() -> Any:
                nonlocal state
                state, _ = self.step(state, batch)  # which takes over what it is given
                return state

            self.row["kernels"] = kernels(run, out / "trace")
        self.step = self.share = self.rehearsed = None  # what they hold on the device is let go
        if profile_seconds:
            self._profile((state, batch), profile_seconds)

    def _profile(self, args: tuple[Any, Any], seconds: float) -> None:
        """Plans with a profile, and once more without one: then by what the profile found."""
        import meshwright as mw

        os.environ.pop("MESHWRIGHT_MEASURE", None)
        method = mw.Auto(recompute="as written", profile=True, profile_seconds=seconds)
        started = time.perf_counter()
        profiled = mw.plan(self.program.step, *args, cluster="1x1 h200", method=method)
        self.row |= {"profiled_s": profiled.step_s, "profiled_bytes": profiled.memory.peak_bytes}
        self.row["profile_remarks"] = list(profiled.remarks)
        again = mw.plan(self.program.step, *args, cluster="1x1 h200", method=as_written())
        self.row |= {"again_s": again.step_s, "again_bytes": again.memory.peak_bytes}
        self.row["profiling_s"] = time.perf_counter() - started
        os.environ["MESHWRIGHT_MEASURE"] = "never"


def print_table(options: argparse.Namespace) -> None:
    """What was measured beside what is planned now; and how far prices of each kind of work are from it."""
    from report import table
    from strangers import corpus

    from meshwright.plans.trust import bound_of

    rows, shown, told = _rows(options.out), [], []
    errors: dict[str, list[tuple[float, float, float]]] = {side: [] for side in SIDES}
    for name, stranger in corpus().items():
        row = rows.get(name, {})
        if "measured_s" not in row or (options.only and name not in options.only):
            continue
        planned = _planned(stranger, options.out / "planned.jsonl")
        step_s, peak, bound = planned["step_s"], planned["peak_bytes"], bound_of(planned["shares"])
        low, high = planned["least"] * step_s / bound, step_s * bound  # down to one trip of loops that may end early
        time_error, memory_error = step_s / true_s(row) - 1, peak / row["compiled_bytes"] - 1
        rehearsed = row["rehearsed_s"] / row["measured_s"] - 1 if "rehearsed_s" in row else float("nan")
        errors[stranger.side].append((time_error, memory_error, rehearsed))
        told.append((stranger.side, true_s(row) / step_s, planned["shares"]))
        shown.append(
            (
                name,
                stranger.side,
                f"{1e3 * true_s(row):.2f} ms",
                f"{1e3 * step_s:.2f} ms ({time_error:+.0%})",
                f"{1e3 * low:.2f}–{1e3 * high:.2f} ms{'' if low <= true_s(row) <= high else ' (outside)'}",
                f"{rehearsed:+.1%}" if rehearsed == rehearsed else "",
                f"{row['compiled_bytes'] / 2**30:.2f} GiB",
                f"{peak / 2**30:.2f} GiB ({memory_error:+.0%})",
                _after_profile(row),
            )
        )
    for word, some in errors.items():
        if some:
            sides = [[error for error in side if error == error] for side in zip(*some, strict=True)]
            cells = [f"{mean(map(abs, side)):.1%}, {max(side, key=abs):+.0%}" if side else "" for side in sides]
            low = f"too low {min(0.0, *sides[1]):+.0%}"
            shown.append((f"**mean, worst of {len(some)}**", word, "", cells[0], "", cells[2], low, cells[1], ""))
    header = ("program", "", "measured", "planned", "interval", "rehearsed", "compiled", "planned memory", "profiled")
    table("Strangers", (__doc__ or "").split("\n")[0], header, shown)
    print_spreads(told)


def _after_profile(row: dict[str, Any]) -> str:
    """How far the time and memory of a plan with a profile are off."""
    if "profiled_s" not in row:
        return ""
    return f"{row['profiled_s'] / true_s(row) - 1:+.1%}, {row['profiled_bytes'] / row['compiled_bytes'] - 1:+.1%}"


def _planned(stranger: Any, kept: Path) -> dict[str, Any]:
    """What is planned for a program, of this file of lines if it is there: remove it after a change of prices."""
    import meshwright as mw
    from meshwright.plans.trust import bound_of

    lines = map(json.loads, kept.read_text().splitlines()) if kept.exists() else ()
    for line in lines:
        if line["name"] == stranger.name:
            return dict(line)
    program = stranger.full()
    plan = mw.plan(program.step, program.args[0], _as_given(program), cluster="1x1 h200", method=as_written())
    trust = plan.trust
    figures = {"step_s": plan.step_s, "peak_bytes": plan.memory.peak_bytes, "shares": trust.shares}
    figures["least"] = trust.low_s / plan.step_s * bound_of(trust.shares)
    found = {"name": stranger.name, **figures}
    with kept.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    print(found, flush=True)
    return found


def _as_given(program: Any) -> Any:
    """The batch that was measured, as a user gives it: integers, which may say how often loops run, as arrays."""
    import jax
    from jax.numpy import integer, issubdtype

    kinds, structure = jax.tree.flatten(program.args[1])
    known = [place for place, kind in enumerate(kinds) if issubdtype(kind.dtype, integer)]
    drawn = jax.jit(lambda key: [jax.tree.leaves(program.sample(key))[place] for place in known])(jax.random.key(1))
    return structure.unflatten([dict(zip(known, drawn, strict=True)).get(n, kind) for n, kind in enumerate(kinds)])


def true_s(row: dict[str, Any]) -> float:
    """The step as it was measured: the quicker of the program and of its rehearsal, which is the same program."""
    return float(min(row["measured_s"], row.get("rehearsed_s", row["measured_s"])))


def print_spreads(told: Sequence[tuple[str, float, dict[str, float]]]) -> None:
    """The spreads under which what was measured is most likely, near those that ship, and how wide intervals must be.

    A corpus of sixty programs has few of each kind, so that all of them are used. Each is left out once, and the spread
    of the others is held against it: nine of ten lie within the width that is printed.

    Args:
        told: For each program its side, measured ÷ planned time, and the parts of its step by kind of work.
    """
    import numpy as np
    from scipy.optimize import minimize

    from meshwright.plans.trust import spreads_of_kinds

    shipped = spreads_of_kinds()
    kinds, start = list(shipped)[:-1], np.log(list(shipped.values()))
    shares = np.array([[parts.get(kind, 0.0) for kind in kinds] for _, _, parts in told]) ** 2
    error = np.log([ratio for _, ratio, _ in told])

    def variance(spreads: Any) -> Any:
        return shares @ np.exp(2 * spreads[:-1]) + np.exp(2 * spreads[-1])

    def fitted(used: Any) -> Any:
        def unlikely(spreads: Any) -> float:
            of_rows = variance(spreads)[used]
            return float((np.log(of_rows) + error[used] ** 2 / of_rows).sum() + ((spreads - start) ** 2 / 0.5).sum())

        return minimize(unlikely, start, method="L-BFGS-B").x

    count = len(error)
    for kind, spread in zip(shipped, np.exp(fitted(np.ones(count, bool))), strict=True):
        print(f'"{kind}" = {spread:.2f}')
    off = np.array([abs(error[n]) / np.sqrt(variance(fitted(np.arange(count) != n))[n]) for n in range(count)])
    width = float(np.sort(off)[min(int(np.ceil(0.9 * (count + 1))), count) - 1])
    print(f"width = {width:.2f}: {np.mean(off <= width):.0%} of {count} lie inside where they were left out")
    for side in dict.fromkeys(side for side, _, _ in told):
        of_side = np.array([word == side for word, _, _ in told])
        print(f"  {(off <= width)[of_side].sum()} of {of_side.sum()} {side}")


if __name__ == "__main__":
    main()
