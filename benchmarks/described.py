"""What does XLA allocate for strangers' train steps on a GPU that is not here, and what is planned?

XLA compiles for a GPU that is described to it: JAX with its CUDA plugin and NVIDIA's libraries suffices, without a
driver. The description is the text of a `GpuTargetConfigProto`, of which XLA's repository has one for each GPU under
`xla/backends/gpu/target_config/specs`. Kernels are then not chosen by timing them, which changes little: of 21 programs
that were compiled on an H200 as well, 16 took the same bytes within 0.7%, four 3 to 5% less (scatters, convolutions).
One took far more: JAX does not offer cuDNN's attention where no device is, and wrote it out.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu,cuda python benchmarks/described.py h200.txtpb [PROGRAM …]
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from report import table
from strangers import Program, corpus

import meshwright as mw
from meshwright.runtime.checking.verify import allocated_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the description of the GPU")
    parser.add_argument("programs", nargs="*", help="by default those that prices may be mended by looking at")
    options = parser.parse_args()
    described = topologies.get_topology_desc(
        "1x1x1", "cuda", target_config=options.target.read_text(), topology="1x1x1"
    ).devices[0]
    shown = []
    for name, stranger in corpus().items():
        if name in options.programs or (stranger.is_told and not options.programs):
            program = stranger.full()
            compiled = compiled_bytes(program, described)
            plan = mw.plan(program.step, *program.args, cluster="1x1 h200", method=mw.Auto(recompute="as written"))
            sizes = [f"{size / 2**30:.2f} GiB" for size in (compiled, plan.memory.peak_bytes)]
            shown.append((name, *sizes, f"{plan.memory.peak_bytes / compiled - 1:+.0%}"))
            print(*shown[-1], flush=True)
    table("Described", (__doc__ or "").split("\n")[0], ("program", "compiled", "planned", "error"), shown)


def compiled_bytes(program: Program, device: Any) -> int:
    """What XLA allocates for a train step on a device that is only described."""
    place = SingleDeviceSharding(device)
    args = jax.tree.map(lambda kind: jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=place), program.args)
    return allocated_bytes(program.step.lower(*args).compile())


if __name__ == "__main__":
    main()
