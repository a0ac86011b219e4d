"""Planned memory on H200s against kept tables of what XLA compiled for them, by `benchmarks/compiled.py --topology`."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.planner.budget import Budget
from meshwright.planner.planner import program_task

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


class Row(NamedTuple):
    """A program and a mesh with what was to be sent, and what XLA allocated for the plan, in megabytes."""

    hosts: int
    program: str
    mesh: str
    sent: float
    allocated: float


def kept(name, hosts):
    for line in (RESULTS / name).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith(tuple(zoo.names())):
            sent, allocated = float(cells[2].split("→")[0]), float(cells[6].split("→")[1])
            yield Row(hosts, cells[0], cells[1].removeprefix("Auto "), sent, allocated)


TABLE = [*kept("compiled-h200.md", 1), *kept("compiled-h200-8-hosts.md", 8)]
#: Some of the rows, since all of them take a minute.
QUICK = [TABLE[row] for row in (2, 6, 7, 9, 10, 14)]


def test_the_tables_are_read():
    assert len(TABLE) == 15
    assert {row.program.split()[0] for row in QUICK} == {"llama2-7b", "gpt3-1.3b", "mixtral-8x7b"}
    assert {row.hosts for row in QUICK} == {1, 8} and {row.mesh for row in QUICK} == {"8", "2×4", "8×8"}


@pytest.mark.parametrize("row", QUICK, ids=lambda row: f"{row.program} on {row.hosts}x8: {row.mesh}")
def test_planned_memory_is_within_a_tenth_of_what_was_compiled(row):
    options = {key: {"True": True}.get(value) or int(value) for key, value in re.findall(r"(\w+)=(\w+)", row.program)}
    example = zoo.build(row.program.split()[0], dtype="bfloat16", **options)
    cluster = mw.cluster(f"{row.hosts}x8 h200")
    traced = trace(example.train_step, example.state, example.batch, cluster=cluster)
    mesh = cluster.mesh(tuple(map(int, row.mesh.split("×"))))
    task, meshes = program_task(traced, [mesh], mw.Auto(recompute="as written"), None)
    plan = task.plan(meshes, lambda said: None, Budget(None))  # one search of the program as written, as the tables'
    sent = sum(item.bytes * item.trips for item in plan.collectives) / 1e6
    assert sent == pytest.approx(row.sent, abs=0.01), "another plan is chosen now: compile the tables anew for H200s"
    assert plan.memory.peak_bytes / 1e6 == pytest.approx(row.allocated, rel=0.1)


def test_planned_memory_with_fused_attention_is_within_a_tenth():
    """What XLA of JAX 0.11.2 allocated for a host of 8 H200s, compiled on one of them, in megabytes."""
    example = zoo.build("llama2-7b", dtype="bfloat16", batch=16, seq=4096, layers=2, loss_chunks=2)
    args = (example.train_step, example.state, example.batch)
    plan = mw.plan(*args, cluster="1x8 h200", mesh=(8,), method=mw.Zero(stage=3))
    assert any("dot_product_attention" in op.label for op in plan.ops)
    assert plan.memory.peak_bytes / 1e6 == pytest.approx(4669.7, rel=0.1)
