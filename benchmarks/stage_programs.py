"""Do the programs of stages, compiled for clusters of H200s, send, compute and hold what was planned?

It takes one H200, which compiles for clusters that are not there. Each row is a stage, with what was compiled over what
was planned; bytes are those of its collectives and those that it sends to other stages. Every program is compiled in a
process of its own, several side by side, so that a crash of XLA costs the row of one stage: it then names the file that
says which program was being compiled, and where it crashed. A program that cannot be compiled for its stage's part of
the whole cluster is compiled for a cluster of just as many devices; `alone` counts those programs. The table is written
after every plan.

    python benchmarks/stage_programs.py [--processes 14]
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

FOLDER = Path(__file__).parent / "results" / "stage-programs"
TIMEOUT_S = 120  # of one program: what hangs is a row as well
WHOLE, ALONE = "whole", "alone"  # a stage as a part of its cluster, or as a cluster of its own


@dataclass(frozen=True)
class Row:
    """A plan whose programs are compiled.

    Attributes:
        model, shape: A model of the zoo and its options.
        cluster: The cluster that it is planned for.
        recipe: Options of `mw.ThreeD`.
        topology: Devices to compile for, as `jax.experimental.topologies` names them; this process's own if empty.
    """

    model: str
    cluster: str
    recipe: Mapping[str, int]
    topology: str
    shape: Mapping[str, Any] = field(default_factory=lambda: {"batch": 16, "seq": 2048, "layers": 4})

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}, {self.recipe}"


ROWS = (
    Row("llama2-7b", "1x8 h200", {"data": 2, "tensor": 2, "pipeline": 2, "microbatch": 2}, "1x1x8"),
    Row("llama2-7b", "2x8 h200", {"tensor": 8, "pipeline": 2, "microbatch": 2}, "1x2x8"),
    Row("gpt3-6.7b", "2x8 h200", {"data": 2, "tensor": 4, "pipeline": 2, "microbatch": 2}, "1x2x8"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--compile", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        row, plan, cluster, work, stage, place = options.compile
        compile_one(Row(**json.loads(row)), Path(plan), cluster, (work, int(stage), int(place)))
        return
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # each process takes the memory that it needs of one GPU
    import jax

    if jax.default_backend() != "gpu":
        print("SKIPPED: this machine has no GPU, which compiles for others")
        return
    from report import table

    FOLDER.mkdir(parents=True, exist_ok=True)
    header = ("model", "cluster", "recipe", "stage", "bytes", "memory", "flops", "alone")
    lines: list[tuple[object, ...]] = []
    for row in ROWS:
        lines += compared(row, FOLDER, options.processes)
        table("Stage programs", (__doc__ or "").split("\n    python")[0], header, lines)


def compared(row: Row, folder: Path, processes: int) -> Iterator[tuple[object, ...]]:
    """A line for each stage: compiled ÷ planned, or why there is nothing to compare."""
    import meshwright as mw
    from meshwright import zoo
    from meshwright.rehearsal.share.stage_share import described_engine
    from meshwright.runtime.checking.verify_stages import compare_stages

    print(f"{row}: planning", flush=True)
    example, recipe = zoo.build(row.model, **row.shape), mw.ThreeD(**row.recipe)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster=row.cluster, method=recipe)
    engine = described_engine(plan, plan.origin)
    with tempfile.TemporaryDirectory() as kept:
        path = Path(kept) / "plan.json"
        plan.save(path)
        print(f"{row}: compiling {len(engine.lowered)} programs", flush=True)
        with ThreadPoolExecutor(processes) as pool:
            made = pool.map(lambda key: compiled(row, path, key, folder), engine.lowered)
            found = dict(zip(engine.lowered, made, strict=True))
    programs = {key: Program.of(one) for key, (_, one) in found.items()}
    for number, stage in enumerate(compare_stages(plan, engine, programs)):
        own = [outcome for key, outcome in found.items() if key[1] == number]
        failed = [one for _, one in own if isinstance(one, str)]
        alone = sum(cluster == ALONE for cluster, _ in own)
        figures = [
            *(f"{pair.ratio:.3f}" for pair in (stage.bytes, stage.memory, stage.flops)),
            f"{alone} of {len(own)}",
        ]
        yield (row.model, row.cluster, recipe.name, number, *([failed[0], "", "", ""] if failed else figures))


def compiled(row: Row, plan: Path, key: tuple[str, int, int], folder: Path) -> tuple[str, dict[str, Any] | str]:
    """The cluster for which a program was compiled, and what is known of it; else why there is nothing."""
    began = time.perf_counter()
    for cluster in (WHOLE, ALONE):
        found = outcome(command(row, plan, cluster, key), name_of(row, (*key, cluster), folder))
        said = found if isinstance(found, str) else "compiled"
        print(f"{row}: {key}, {cluster}, {time.perf_counter() - began:.0f} s: {said}", flush=True)
        if not isinstance(found, str):
            break
    return cluster, found


@dataclass(frozen=True)
class Program:
    """What a process says of the program that it compiled, as `jax.stages.Compiled` does."""

    text: str = ""
    temp_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0

    @classmethod
    def of(cls, found: Mapping[str, Any] | str) -> "Program":
        return cls() if isinstance(found, str) else cls(**found)

    def as_text(self) -> str:
        return self.text

    def memory_analysis(self) -> "Program":
        return self


def name_of(row: Row, key: Sequence[object], folder: Path) -> Path:
    """The path of a program's files, without their endings."""
    words = (row.model, row.cluster, *key)
    return folder / "-".join(str(word).replace(" ", "-").replace(".", "_") for word in words)


def command(row: Row, plan: Path, cluster: str, key: tuple[str, int, int]) -> list[str]:
    """The command of the process that compiles one program."""
    return [sys.executable, __file__, "--compile", json.dumps(asdict(row)), str(plan), cluster, *map(str, key)]


def outcome(arguments: Sequence[str], name: Path, timeout_s: float = TIMEOUT_S) -> dict[str, Any] | str:
    """What a process found, or why it did not: what it writes to standard error is kept beside."""
    trace, result = name.with_suffix(".txt"), name.with_suffix(".json")
    result.unlink(missing_ok=True)
    names = os.environ | {"STAGE_PROGRAM": str(name)}
    with trace.open("w") as stderr:
        try:
            code = subprocess.run(arguments, env=names, stderr=stderr, stdout=stderr, timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            return f"not compiled in {timeout_s:.0f} s: {trace}"
    if code < 0:
        return f"crashed in XLA with signal {-code}: {trace}"
    if code:
        return f"failed: {trace}"
    found: dict[str, Any] = json.loads(result.read_text())
    result.unlink()
    trace.unlink()
    return found


def compile_one(row: Row, path: Path, cluster: str, key: tuple[str, int, int]) -> None:
    """Compiles one program of a saved plan, and writes what is known of it beside the name that is given."""
    faulthandler.enable()  # to standard error, which is kept
    print(f"{row}: compiling {key[0]} {key[2]} of stage {key[1]}", file=sys.stderr, flush=True)
    import meshwright as mw
    from meshwright import zoo
    from meshwright.graph import trace
    from meshwright.runtime.checking.verify_stages import staged_program

    example, plan = zoo.build(row.model, **row.shape), mw.Plan.load(path)
    traced = trace(example.train_step, example.state, example.batch, cluster=plan.mesh.cluster)
    program = staged_program(plan, traced, devices_of(row, plan, key[1] if cluster == ALONE else None))
    lowered = program.engine.lowered[key]
    compiled = lowered.jitted.lower(*lowered.types).compile()
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, name) for name in Program.__dataclass_fields__ if name != "text"}
    name = Path(os.environ["STAGE_PROGRAM"])
    name.with_suffix(".json").write_text(json.dumps({"text": compiled.as_text(), **sizes}))


def devices_of(row: Row, plan: Any, alone: int | None) -> list[Any]:
    """The devices to compile for: all of a cluster, or those of one stage by themselves and descriptions of others."""
    import jax
    from jax.experimental import topologies

    from meshwright.rehearsal.share.stage_share import DescribedDevice

    def described(topology: str) -> list[Any]:
        if not row.topology:
            return list(jax.devices())
        return list(topologies.get_topology_desc(row.cluster.split()[-1], "cuda", topology=topology).devices)

    if alone is None:
        return described(row.topology)
    cluster, submesh = plan.mesh.cluster, plan.stages[alone].submesh
    own = described(f"1x{submesh.num_hosts}x{submesh.devices_per_host}")[: submesh.num_devices]
    first = submesh.first_host * cluster.devices_per_host + submesh.first_device
    devices: list[Any] = [DescribedDevice(i, own[0].platform, own[0].device_kind) for i in range(cluster.num_devices)]
    devices[first : first + len(own)] = own
    return devices


if __name__ == "__main__":
    main()
