"""Plans are simulated: fresh and loaded, here and elsewhere, and what cannot be is refused in words."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.simulator.spmd import num_tokens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example():
    return zoo.build("gpt2-125m", batch=32, seq=256, layers=2)


@pytest.fixture(scope="module")
def plan(example):
    return mw.plan(example.train_step, example.state, example.batch, cluster="2x4 a100-40gb")


def test_a_plan_takes_at_least_its_compute(plan):
    found = plan.simulate()
    assert found.step_s > 0
    assert found.timeline[0].seconds("compute") <= found.step_s + 1e-9
    assert found.timeline[0].num_devices == 8
    assert found.tokens_per_s == pytest.approx(32 * 256 / found.step_s)
    assert 0 < found.mfu < 1
    assert found.peak_bytes == pytest.approx(plan.memory.peak_bytes, rel=1e-6)
    assert found.bubble_fraction == 0.0


def test_every_operation_and_collective_is_there_once(plan):
    names = [i.kind for i in plan.simulate().timeline[0].intervals]
    assert names.count("compute") == sum(op.load is not None for op in plan.ops)
    assert names.count("collective") == sum(c.seconds > 0 for c in plan.collectives)


def test_a_loaded_plan_is_simulated_alike_without_jax(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    code = (
        f"import sys, meshwright as mw; found = mw.Plan.load({str(path)!r}).simulate(); str(found); "
        "print(repr(found.step_s), 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [repr(plan.simulate().step_s), "False"]


def test_work_does_not_depend_on_the_chip(plan):
    faster = mw.simulate(plan, cluster="2x4 h100")
    assert faster.step_s < plan.simulate().step_s
    assert faster.work.model_flops == plan.simulate().work.model_flops


def test_a_faster_network_never_hurts(example):
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="4x2 a100-40gb", method=mw.Zero(stage=3))
    slow, fast = (mw.simulate(plan, cluster=c).step_s for c in ("4x2 a100-40gb", "1x8 a100-40gb"))
    assert fast < slow


def test_gradients_are_summed_beside_the_backward_pass(example):
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="8x1 a100-40gb", method=mw.DataParallel())
    found = plan.simulate()
    line = found.timeline[0]
    assert line.seconds("collective") > 0
    assert found.step_s < line.seconds("compute") + line.seconds("collective")


def test_a_function_without_gradients_is_simulated():
    plan = mw.plan(lambda x, w: jax.nn.relu(x @ w), jnp.ones((64, 32)), jnp.ones((32, 32)), cluster="1x4 cpu")
    assert plan.simulate().step_s > 0


def test_recomputation_does_not_count_as_the_models_work():
    as_written = mw.DataParallel(recompute="as written")
    plain, again = (
        mw.plan(e.train_step, e.state, e.batch, cluster="1x8 h100", method=as_written).simulate()
        for e in (zoo.build("gpt2-125m", batch=8, seq=128, layers=2, checkpoint=c) for c in (False, True))
    )
    assert again.work.model_flops <= plain.work.model_flops
    assert again.step_s > plain.step_s


def test_rows_count_where_there_are_no_tokens():
    mlp = zoo.build("mlp", batch=64, hidden=32, layers=2)
    assert num_tokens(mw.plan(mlp.train_step, mlp.state, mlp.batch, cluster="1x4 h100")) == 64


def test_an_abstract_mesh_has_no_seconds():
    mesh = mw.Mesh.abstract((4,), alpha=1, beta=1)
    plan = mw.plan(lambda x, w: x @ w, jnp.ones((8, 4)), jnp.ones((4, 4)), mesh=mesh)
    with pytest.raises(mw.SimulationError, match=r"abstract mesh .* not seconds"):
        plan.simulate()


def test_a_cluster_of_another_size_is_refused(plan):
    with pytest.raises(mw.SimulationError, match="for 8 devices, and cluster '4x8 h100' has 32"):
        mw.simulate(plan, cluster="4x8 h100")


def test_something_else_than_a_plan_is_refused():
    with pytest.raises(mw.SimulationError, match=r"give what mw\.plan returns"):
        mw.simulate("plan.json")


def test_a_plan_of_an_earlier_version_says_so(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text())
    data["ops"] = [row[:9] for row in data["ops"]]
    path.write_text(json.dumps(data))
    with pytest.raises(mw.SimulationError, match="make it again"):
        mw.Plan.load(path).simulate()


def test_memory_is_that_of_every_operation(plan):
    series = plan.simulate().memory[0]
    sizes = [size for _, size in series]
    assert [when for when, _ in series] == sorted(when for when, _ in series)
    assert max(sizes) == pytest.approx(plan.memory.peak_bytes, rel=1e-6)
    assert len(set(sizes)) > 50
