"""Pipelined plans are simulated: schedules, memory, saved plans, other machines."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.pipeline.prices.transfer import transfer_s
from meshwright.simulator.engine import simulate_work
from meshwright.simulator.staged import staged_work
from tests.pipeline.models import mlp

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def example():
    return zoo.build("gpt2-125m", batch=32, seq=128, layers=4)


def planned(example, **options):
    settings = {"data": 2, "tensor": 1, "pipeline": 4, "microbatch": 2} | options
    return mw.plan(
        example.train_step, example.state, example.batch, cluster="2x4 a100-40gb", method=mw.ThreeD(**settings)
    )


@pytest.fixture(scope="module")
def plan(example):
    return planned(example)


def test_stages_are_classes_of_devices(plan):
    found = plan.simulate()
    assert [line.name for line in found.timeline] == [f"stage {i}" for i in range(4)]
    assert sum(line.num_devices for line in found.timeline) == 8
    assert 0 < found.bubble_fraction < 1
    assert any(item.kind == "transfer" for item in found.timeline[0].intervals)


def test_a_step_takes_no_less_than_its_slowest_stage(plan):
    slowest = max(s.microbatch_s for s in plan.stages) * plan.pipeline.num_microbatches
    assert plan.simulate().step_s > slowest


def test_memory_follows_the_schedule(plan):
    found = plan.simulate()
    for stage, series in zip(plan.stages, found.memory, strict=True):
        assert max(size for _, size in series) == pytest.approx(stage.peak_bytes, rel=0.1)


def test_zero_bubble_fills_what_1f1b_leaves(example, plan):
    assert planned(example, schedule="zb-h1").simulate().bubble_fraction < plan.simulate().bubble_fraction


def test_a_loaded_plan_is_simulated_alike(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert mw.Plan.load(tmp_path / "plan.json").simulate().step_s == plan.simulate().step_s


def test_stages_move_to_machines_of_the_same_sizes(plan):
    assert mw.simulate(plan, cluster="2x4 h100").step_s < plan.simulate().step_s
    with pytest.raises(mw.SimulationError, match="not as many or as large"):
        mw.simulate(plan, cluster="1x8 h100")


def test_a_moved_plan_is_near_one_that_was_made_there():
    """Every part of a stage's time is scaled by what it depends on; data parallel, so that all have the same split."""
    step, args = mlp(4096, layers=4, rows=2**14)
    recipe = mw.ThreeD(data=4, pipeline=2, microbatch=2**11)
    places = ("2x4 a100-40gb", "2x4 h100", "2x4 l40s")
    made = [mw.plan(step, *args, cluster=where, method=recipe) for where in places]
    for there, own in zip(places[1:], made[1:], strict=True):
        assert mw.simulate(made[0], cluster=there).step_s == pytest.approx(own.simulate().step_s, rel=0.1), there


def test_one_stage_on_one_device_takes_as_long_as_one_program():
    step, args = mlp(2048, layers=3, rows=2**13)
    one = mw.plan(step, *args, cluster="1x1 h100", method=mw.ThreeD(microbatch=2**13))
    same = mw.plan(step, *args, cluster="1x1 h100")
    assert one.simulate().step_s == pytest.approx(same.simulate().step_s, rel=0.01)


def test_sends_move_with_the_wires_that_they_use(plan):
    """Stages 0 and 1 share a host, 1 and 2 do not; the other machines differ in what joins hosts alone."""
    other = mw.cluster("2x4 a100-40gb")
    slower = replace(other, host=replace(other.host, inter=replace(other.inter, bandwidth=other.inter.bandwidth / 2)))
    before, after = (staged_work(plan, where).chunks for where in (other, slower))
    size = plan.stages[1].send_bytes
    ratio = transfer_s(slower, size) / transfer_s(other, size)
    assert [b.send_s / a.send_s for a, b in zip(before[:2], after[:2], strict=True)] == pytest.approx([1, ratio])
    assert 1 < ratio <= 2


def test_few_devices_that_send_have_a_shared_adapter_to_themselves(plan):
    """Stages of one device send from hosts of four: over an adapter that the host shares, four times as quickly."""
    wires = mw.cluster("2x4 a100-40gb")
    shared = replace(wires, host=replace(wires.host, inter=replace(wires.inter, kind="ethernet")))
    apart, beside = (staged_work(plan, where).chunks[1].send_s for where in (wires, shared))
    share = plan.stages[1].submesh.num_devices / 4
    assert share < 1 and beside / apart == pytest.approx(share)


def test_rates_are_those_of_the_type_that_products_are_done_in():
    """V100 has float16 alone: what is done in bfloat16 runs at an eighth of it, in plans and simulations alike."""
    recipe, found, plans = mw.ThreeD(data=2, pipeline=2, microbatch=2**11), [], []
    for dtype in (jnp.float16, jnp.bfloat16):
        step, args = mlp(2048, layers=4, rows=2**13, dtype=dtype)
        plans = [mw.plan(step, *args, cluster="1x4 v100-16gb", method=m) for m in (mw.DataParallel(), recipe)]
        found.append([plan.simulate() for plan in plans])
        assert plans[1].stages[0].dtype == jnp.dtype(dtype).name
        assert [sim.step_s for sim in found[-1]] == pytest.approx([plan.step_s for plan in plans], rel=0.25)
        assert all(0.1 < sim.mfu < 1 for sim in found[-1])
    for fast, slow in zip(*found, strict=True):
        assert (fast.work.peak_flops, slow.work.peak_flops) == (125e12, 15.7e12)


def test_what_is_repeated_is_no_work_of_the_model():
    """Neither by checkpoints nor by devices that all do the same, as is quickest in small models."""

    def repeated(_, w, x):
        return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)

    flops = []
    for body in (None, repeated):
        step, args = mlp(64, layers=4, rows=16, body=body)
        for method in (mw.DataParallel(), mw.ThreeD(data=2, pipeline=2, microbatch=2)):
            flops.append(mw.plan(step, *args, cluster="1x4 h100", method=method).simulate().work.model_flops)
    assert flops == pytest.approx([flops[0]] * 4)


def test_every_kind_of_host_has_its_own_memory_and_rate():
    step, args = mlp(1024, layers=8, rows=64)
    method = mw.Auto(pipeline=True, memory_fraction=7e-4)  # less than the model needs on the larger alone
    plan = mw.plan(step, *args, cluster="1x1 h100 + 1x1 v100-16gb", method=method)
    found = plan.simulate()
    memory = {"h100-sxm-80gb": mw.cluster("1x1 h100").memory_bytes, "v100-16gb": mw.cluster("1x1 v100").memory_bytes}
    assert found.work.limit_bytes == tuple(memory[stage.submesh.chip] for stage in plan.stages)
    rates = [mw.cluster(f"1x1 {stage.submesh.chip}").chip.peak_flops("float32") for stage in plan.stages]
    assert found.work.peak_flops == pytest.approx(sum(rates) / 2)
    assert [line["limit_bytes"] for line in found.to_json()["devices"]] == list(found.work.limit_bytes)
    most, least = sorted(found.work.limit_bytes, reverse=True)
    between = replace(found.work, state_bytes=tuple((most + least) / 2 * (m == most) for m in found.work.limit_bytes))
    assert simulate_work(between).fits  # on the larger of the two
