"""Planned memory against what XLA's CPU backend allocates, over the zoo."""

import pytest

import meshwright as mw
from meshwright import zoo
from tests.compiling import QUICK

# Every model once, with methods and meshes in turn: all of them together take minutes (see benchmarks/compiled.py).
CASES = [
    ("mlp", {"batch": 32}, mw.Auto(), (4, 2)),
    ("gpt-tiny", {"batch": 16}, mw.TensorParallel(), (2, 4)),
    ("bert-tiny", {"batch": 16}, mw.TensorParallel(), (2, 4)),
    ("llama-tiny", {"batch": 32}, mw.TensorParallel(), (2, 4)),
    ("llama-tiny", {}, mw.Auto(), (2, 4)),
    ("llama-tiny", {"batch": 16, "checkpoint": True}, mw.Auto(), (2, 4)),
    ("llama-tiny", {"batch": 32, "scan": True}, mw.DataParallel(), (8,)),
    ("llama-tiny", {"batch": 8, "checkpoint": True}, mw.Auto(), (4, 2)),
    ("llama-tiny", {"batch": 16, "scan": True, "checkpoint": True}, mw.Zero(stage=3), (8,)),
    ("moe-tiny", {}, mw.Auto(), (2, 4)),
    ("mixtral-tiny", {"batch": 32}, mw.Auto(), (4, 2)),
    ("vit-tiny", {"batch": 32}, mw.TensorParallel(), (2, 4)),
    ("wide-resnet-tiny", {"batch": 8}, mw.Zero(stage=3), (8,)),
]


@pytest.mark.parametrize(("name", "options", "method", "mesh"), CASES, ids=str)
def test_planned_memory_is_what_the_cpu_backend_allocates(name, options, method, mesh):
    example = zoo.build(name, dtype="float32", **options)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x8 cpu", mesh=mesh, method=method)
    found = plan.verify(compiler_options=QUICK).memory
    assert 0.85 < found.planned / found.compiled < 1.15


def test_an_abstract_mesh_is_planned_as_accelerators_are():
    example = zoo.build("mlp", dtype="float32", batch=16)
    args = (example.train_step, example.state, example.batch)
    plans = [
        mw.plan(*args, mesh=mw.Mesh.abstract((8,), 1.0, 1e-3), method=mw.Zero(stage=3)),
        mw.plan(*args, cluster="1x8 h200", mesh=(8,), method=mw.Zero(stage=3)),
        mw.plan(*args, cluster="1x8 cpu", mesh=(8,), method=mw.Zero(stage=3)),
    ]
    assert [plan.mesh.is_cpu for plan in plans] == [False, False, True]
