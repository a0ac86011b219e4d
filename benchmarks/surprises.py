"""Does XLA gather anything whole that the plan does not? Its involuntary full rematerialisations, counted.

Each program is planned and compiled for 8 virtual CPU devices, or with `--topology h200` for a host of 8 GPUs where one
of the kind is there, and XLA's warnings are counted: the zoo's small models on abstract meshes, which make every
contraction use all axes it can, under several methods; random programs under random plans, good or bad; and, on CPUs,
the examples, which run for a few steps.

    python benchmarks/surprises.py [--random 50] [--topology h200] [MODEL …]
"""

import argparse
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from tests.compiling import FLAGS

if "--topology" not in sys.argv:
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FLAGS}"
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ |= {"MESHWRIGHT_MEASURE": "never"}

import jax
import numpy as np
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.checking.compiled import frames_of
from meshwright.runtime.checking.rematerialized import Heard, Rematerialized, heard
from tests.generator import pairs

MODELS = [name for name in zoo.names() if name.endswith("-tiny") or name == "mlp"]
PLANS = [
    *((mw.Auto(), shape) for shape in ((8,), (2, 4), (2, 2, 2))),
    (mw.Zero(stage=3), (8,)),
    (mw.TensorParallel(), (2, 4)),
]

EXAMPLES = [
    ("equinox_mlp", "--steps", "3"),
    ("nnx_vit", "--steps", "3", "--batch", "16"),
    ("flax_gpt", "--steps", "3", "--batch", "8"),
    ("moe", "--steps", "3"),
    ("pipeline",),
]

Row = tuple[str, str, int, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--random", type=int, default=50, help="how many random programs to compile")
    parser.add_argument("--topology", help="a kind of GPU to compile for")
    options = parser.parse_args()
    devices = _devices(options.topology)
    sources = [_zoo(options.models, devices), _random(options.random, devices)]
    rows = []
    for row in itertools.chain(*sources, [] if options.topology else _examples()):
        print(*row[:3], file=sys.stderr, flush=True)  # all of them take long
        rows.append(row)
    found = sum(row[2] for row in rows)
    kind = "GPU" if options.topology else "CPU"
    header = ("program", "plan", "gathered whole", "where")
    shown = [row for row in rows if row[2]]
    table(
        f"Surprises {kind}", (__doc__ or "").split("\n")[0], header, [*shown, (f"{len(rows)} programs", "", found, "")]
    )


def _devices(topology: str | None) -> list[Any]:
    if topology is None:
        return list(jax.devices())
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology, "cuda", topology="1x1x8").devices)


def _zoo(models: list[str], devices: list[Any]) -> Iterator[Row]:
    for model in models:
        example = zoo.build(model, batch=16, dtype="float32")
        for method, shape in PLANS:
            mesh = mw.Mesh.abstract(shape, alpha=1, beta=(1, 0.1, 0.05)[: len(shape)])
            plan = mw.plan(example.train_step, example.state, example.batch, mesh=mesh, method=method)
            verified = plan.verify(devices=devices)
            yield _row(model, f"{method.name} {'×'.join(map(str, shape))}", verified.rematerialized or ())


def _random(count: int, devices: list[Any]) -> Iterator[Row]:
    for seed in range(count):
        program = pairs.Drawn(seed)
        rng = np.random.default_rng((seed, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            name, plan = pairs.plan_of(program, "random", rng)
            lowered = pairs.spmd(plan, program, devices).lower(*program.args)
            with heard() as listened:
                text = lowered.compile().as_text()
        yield _row(f"random {seed}", name, listened.found(frames_of(text)))


def _examples() -> Iterator[Row]:
    """Runs each example as a user would; its programs' warnings are on its standard error."""
    folder = Path(__file__).parents[1] / "examples"
    for name, *options in EXAMPLES:
        environment = os.environ | {"XLA_FLAGS": FLAGS}  # it counts its own devices
        command = [sys.executable, str(folder / f"{name}.py"), *options]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        yield _row(f"examples/{name}.py", "its own", Heard(done.stderr).found())


def _row(program: str, plan: str, found: tuple[Rematerialized, ...]) -> Row:
    return program, plan, len(found), "; ".join(dict.fromkeys(map(str, found)))


if __name__ == "__main__":
    main()
