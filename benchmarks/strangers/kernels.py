"""What the kernels of a compiled program take, as JAX's profiler sees them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


def kernels(run: Callable[[], Any], folder: Path) -> dict[str, tuple[int, float]]:
    """How often and how many seconds each operation of a compiled program ran on a GPU, by its name in HLO."""
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(run())
    times: dict[str, tuple[int, float]] = {}
    for _, op, kernel, duration_s in kernel_events(folder):
        key = f"{op} {kernel}"
        count, seconds = times.get(key, (0, 0.0))
        times[key] = (count + 1, seconds + duration_s)
    return times


def kernel_events(folder: Path) -> Iterator[tuple[str, str, str, float]]:
    """The module, operation, kernel and seconds of each run of a kernel in the latest trace, which is then removed."""
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    for plane in ProfileData.from_file(str(path)).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" in stats:
                        module = str(stats.get("hlo_module", ""))
                        yield module, stats["hlo_op"], event.name[:80], event.duration_ns * 1e-9
    path.unlink()
