"""Exported plans: one file that runs without Meshwright, with the numbers of one device, and says what it is."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from tests.cli.test_app import run
from tests.runtime.steps import CPU, batch, params, train_step

TOKENS = jax.ShapeDtypeStruct((32, 9), jnp.int32)


def model_step():
    """The step and the state of `exported_run.py`, which a process without Meshwright runs."""
    source = (Path(__file__).with_name("exported_run.py")).read_text().replace("import sharding_plan as plan\n", "")
    source = source.replace('sys.modules["meshwright"] = None', "").replace("sys.path.insert(0, sys.argv[1])", "")
    names = {"__name__": "exported_run"}
    exec(compile(source, "exported_run.py", "exec"), names)
    return names["train_step"], names["state"]()


@pytest.mark.sweep(2)
@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "shard"),
    [
        (mw.Zero(3, microbatches=2), "(32, 16)"),
        (mw.Zero(1), "(32, 128)"),
        (mw.TensorParallel(microbatches=4), "(32, 16)"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_file_runs_without_meshwright(method, shard, tmp_path):
    step, state = model_step()
    plan = mw.plan(step, state, TOKENS, cluster=CPU, method=method)
    assert plan.export("jax", tmp_path / "sharding_plan.py") == tmp_path / "sharding_plan.py"
    script = [sys.executable, str(Path(__file__).with_name("exported_run.py")), str(tmp_path)]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(script, capture_output=True, text=True, env={**os.environ, **flags}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(f"8 {shard}") and "all-reduce" in done.stdout
    assert ("all-gather" in done.stdout) == isinstance(method, mw.Zero)


def test_the_file_says_the_plan(tmp_path):
    plan = mw.plan(train_step, params(), batch(64), cluster=CPU, method=mw.Zero(3, microbatches=2))
    text = plan.export(path=tmp_path / "plan.py").read_text()
    assert "import meshwright" not in text and "from meshwright" not in text
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.AnnAssign)]
    values = {ast.unparse(node.target): ast.unparse(node.value) for node in nodes if node.value is not None}
    assert values["AXES"] == str(plan.mesh.shape) and "MICROBATCHES = 2" in text
    assert values["ARGUMENTS"] == "('params', 'batch')"
    assert values["COMPILER_OPTIONS"] == str({"cpu": plan.compiler_options})
    assert values["param_specs"] == "{'params/in': P(None, 'x'), 'params/out': P('x')}"
    assert "('dot_general', (32,)): P(" in values["activation_specs"]


def test_the_file_says_what_it_leaves_on_the_device(tmp_path):
    from tests.step_search.test_recomputation import on_host

    text = on_host().export(path=tmp_path / "plan.py").read_text()
    assert "of each device on its host; this file does not." in text
    ast.parse(text)


def test_the_command_writes_it(tmp_path):
    plan = mw.plan(train_step, params(), batch(64), cluster=CPU, method="data")
    plan.save(tmp_path / "plan.json")
    run("export", str(tmp_path / "plan.json"), "-o", str(tmp_path / "mine.py"))
    assert (tmp_path / "mine.py").read_text() == plan.export(path=tmp_path / "other.py").read_text()


def test_what_cannot_be_exported_is_refused(tmp_path):
    from tests.plans.records.test_staged_record import planned

    with pytest.raises(mw.OutputError, match=r"pipeline of 4 stages, which are several programs .*pipeline=False"):
        planned("megatron").export("jax", tmp_path / "plan.py")
    plan = mw.plan(train_step, params(), batch(64), cluster=CPU, method="data")
    with pytest.raises(mw.OutputError, match="exported to 'jax', not to 'torch'"):
        plan.export("torch", tmp_path / "plan.py")
    with pytest.raises(mw.OutputError, match="it is a folder"):
        plan.export("jax", tmp_path)
