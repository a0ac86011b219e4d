"""Compiles every kernel, side by side on all cores, so that later processes load it: `python -m meshwright.warm`.

Small problems, and plans, that between them reach every kernel are solved with all kernels interpreted, which reveals
the types that each is called with. Then the kernels are distributed over processes.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from meshwright.jit import Needed, noting
from meshwright.scratch import claimed
from meshwright.solver.warm import reach_kernels


def warm(processes: int, plans: bool = True, say: Callable[[str], None] = lambda _: None) -> int:
    """Compiles the kernels that are neither on disk nor being compiled by others; returns the number of kernels.

    Args:
        processes: The number of processes.
        plans: Whether those of the planner are compiled as well as those of the solver.
        say: Called with the progress.
    """
    kernels = needed(plans)
    names = sorted(kernels, key=lambda name: _order(kernels[name], plans))
    if processes == 1:
        for done, name in enumerate(names):
            say(f"compiled {done} of {len(names)} kernels")
            kernels[name].compile()
        return len(names)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        compiled = as_completed([pool.submit(_compile, name, plans) for name in names])
        for done, future in enumerate(compiled):
            future.result()
            say(f"compiled {done + 1} of {len(names)} kernels")
    return len(names)


@cache
def needed(plans: bool) -> dict[str, Needed]:
    """The kernels that are called from Python, each with the types of its arguments."""
    with noting() as noted:
        reach_kernels()
        if plans:
            _reach_planner()
            _reach_contest()
    return noted


def _reach_planner() -> None:
    import meshwright as mw
    from meshwright import zoo

    model = zoo.build("mlp", batch=64)  # sums over so many examples have kernels of their own
    for method in (mw.Auto(), mw.Auto(pipeline=True)):
        mw.plan(model.train_step, model.state, model.batch, cluster="2x1 h100", method=method, on_progress=_ignore)


def _reach_contest() -> None:
    from meshwright.contest.warm import reach_kernels

    reach_kernels()


def _order(needed: Needed, all_at_once: bool) -> float:
    """The longest first, so that no process ends late; beside a solve those that it waits for, as it comes to them."""
    return -needed.kernel.patience_s if all_at_once else needed.kernel.interpretable


def _compile(name: str, plans: bool) -> None:
    needed(plans)[name].compile()


def _ignore(_: str) -> None:
    pass


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text}", end="", file=sys.stderr, flush=True)


def _beside() -> None:
    """The body of the process that compiles beside another one, and leaves that one a core."""
    os.nice(5)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    os.setpgid(0, 0)
    with claimed(Path(tempfile.gettempdir(), f"meshwright-compiling-{os.getuid()}"), patient=False) as alone:
        if alone:
            warm((os.cpu_count() or 2) - 1, plans=False)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # no kernel needs a GPU, and each process would take its memory
    if "--beside" in sys.argv:
        _beside()
    elif sys.argv[1:]:  # --help, or what it does not know
        argparse.ArgumentParser(
            "python -m meshwright.warm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        ).parse_args()
    else:
        begin = time.perf_counter()
        number = warm(os.cpu_count() or 1, say=_show)
        print(f"{number} kernels ready in {time.perf_counter() - begin:.1f} s")
