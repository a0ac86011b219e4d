"""What the kernels of a compiled program take, as JAX's profiler sees them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData


def kernels(run: Callable[[], Any], folder: Path) -> dict[str, tuple[int, float]]:
    """How often and how many seconds each operation of a compiled program ran on a GPU, by its name in HLO."""
    with jax.profiler.trace(str(folder)):
        jax.block_until_ready(run())
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    found: dict[str, tuple[int, float]] = {}
    for plane in ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" not in stats:
                    continue
                key = f"{stats['hlo_op']} {event.name[:80]}"
                count, seconds = found.get(key, (0, 0.0))
                found[key] = (count + 1, seconds + event.duration_ns * 1e-9)
    path.unlink()
    return found
