"""Recomputation as a decision: as little as memory allows, none where it suffices, and the numbers of one device."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.cost.rates import cluster_rates
from meshwright.errors import ShardingError
from meshwright.hardware import Cluster
from meshwright.parallelism.sentence import plain_sentence
from meshwright.step_search.microbatches import divisors
from meshwright.step_search.recomputation import spread_alike
from tests.draws import normal

BATCH, WIDTH, LAYERS = 512, 16, 4


def layer(x, weights):
    hidden = jnp.tanh(x @ weights["up"])
    for _ in range(3):  # values that each device keeps for its backward pass
        hidden = jnp.tanh(hidden) * jnp.log1p(hidden**2)
    return x + hidden @ weights["down"]


def step(state, batch, one=layer):
    def loss(params):
        x = batch @ params["inlet"]
        for weights in params["layers"]:
            x = one(x, weights)
        return jnp.mean(jnp.square(x))

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


def checkpointed(state, batch):
    return step(state, batch, jax.checkpoint(layer))


@cache
def arguments():
    layers = [{"up": normal(WIDTH, 64, seed=n), "down": normal(64, WIDTH, seed=9 + n)} for n in range(LAYERS)]
    return {"inlet": normal(WIDTH, WIDTH, seed=5), "layers": layers}, normal(BATCH, WIDTH, seed=99)


@cache
def whole(word):
    method = mw.Auto(microbatches=1, recompute=word, memory_fraction=1.0)
    return mw.plan(step, *arguments(), cluster="1x8 cpu", method=method)


def small_cluster() -> Cluster:
    """A cluster with room for recomputed layers, and not for all that they keep otherwise."""
    least, most = (whole(word).memory.peak_bytes for word in ("full", "none"))
    machine = mw.cluster("1x8 cpu")
    return replace(machine, chip=replace(machine.chip, memory_bytes=(2 * least + most) // 3))


@cache
def tight():
    method = mw.Auto(memory_fraction=1.0, microbatches=1)
    return mw.plan(step, *arguments(), cluster=small_cluster(), method=method)


def test_more_recomputation_takes_less_memory_and_more_time():
    plans = [whole(word) for word in ("none", "full")]
    assert plans[1].memory.peak_bytes < 0.9 * plans[0].memory.peak_bytes
    assert plans[1].cost.compute > plans[0].cost.compute


def test_nothing_is_recomputed_where_memory_suffices():
    plan = mw.plan(checkpointed, *arguments(), cluster="1x8 h100")
    assert plan.recompute == "none" and "recomputed" not in plain_sentence(plan)
    assert not any(op.load.recomputed for op in plan.ops if op.load is not None)
    written = mw.plan(checkpointed, *arguments(), cluster="1x8 h100", method=mw.Auto(recompute="as written"))
    assert any(op.load.recomputed for op in written.ops if op.load is not None)


def test_what_does_not_fit_is_recomputed_and_said():
    plan = tight()
    assert plan.microbatches == 1 and plan.memory.peak_bytes <= plan.memory.limit_bytes
    assert plan.recompute not in ("as written", "none") and plain_sentence(plan).endswith("recomputed")
    assert any("ecomput" in remark for remark in plan.remarks)


@pytest.mark.devices
def test_it_runs_with_the_numbers_of_one_device_and_is_saved(tmp_path):
    expected = jax.jit(step)(*arguments())
    tight().save(tmp_path / "plan.json")
    plan = mw.Plan.load(tmp_path / "plan.json")
    assert plan.recompute == tight().recompute
    found = mw.parallelize(step, method=plan, donate_argnums=())(*arguments())
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@cache
def on_host(microbatches=1):
    method = mw.DataParallel(recompute="offload", microbatches=microbatches)
    return mw.plan(step, *arguments(), cluster="1x8 h100", method=method)


def test_what_is_on_the_host_takes_none_of_the_device_and_the_time_of_its_copies():
    full = mw.plan(step, *arguments(), cluster="1x8 h100", method=mw.DataParallel(recompute="full", microbatches=1))
    plan = on_host()
    copies = [op.load for op in plan.ops if op.load is not None and op.load.over_host_link]
    assert len(copies) == 2 * (LAYERS - 1)  # not of the first layer, which reads what is in none
    each = BATCH * WIDTH * 4 // copies[0].num_parts
    assert {load.num_bytes for load in copies} == {each}
    assert plan.memory.host_bytes == (LAYERS - 1) * each and full.memory.host_bytes == 0
    assert plan.memory.peak_bytes < full.memory.peak_bytes
    rates, chip = cluster_rates(plan.mesh.cluster), plan.mesh.chip
    assert rates.load_s(copies[0]) == chip.launch_s + each / chip.host_bandwidth
    assert "inputs that are kept on the host" in plain_sentence(plan) and "on its host" in str(plan)


def scanned(state, batch):
    def loss(params):
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), batch @ params["inlet"], params["layers"])
        return jnp.mean(jnp.square(x))

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


@cache
def stacked():
    state, batch = arguments()
    return {**state, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *state["layers"])}, batch


@pytest.mark.parametrize(("train_step", "given"), [(step, arguments), (scanned, stacked)])
def test_the_host_is_used_where_nothing_else_fits_and_only_there(train_step, given):
    def planned(word, room=None):
        machine = mw.cluster("1x1 h100")
        cluster = machine if room is None else replace(machine, chip=replace(machine.chip, memory_bytes=room))
        method = mw.Auto(memory_fraction=1.0, microbatches=1, recompute=word)
        return mw.plan(train_step, *given(), cluster=cluster, method=method)

    most, least = (planned(word).memory.peak_bytes for word in ("full", "offload"))
    assert least < most
    assert not planned("auto", most).memory.host_bytes
    plan = planned("auto", (least + most) // 2)
    assert plan.memory.host_bytes and plan.memory.peak_bytes <= (least + most) // 2
    with pytest.raises(mw.DoesNotFit):
        planned("auto", 9 * least // 10)


@pytest.mark.devices
@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_comes_back_from_the_host_has_the_numbers_of_one_device(microbatches):
    expected = jax.jit(step)(*arguments())
    found = mw.parallelize(step, method=on_host(microbatches), donate_argnums=())(*arguments())
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_cpus_have_no_other_host():
    with pytest.raises(ShardingError, match=r"compute in the memory of their host.*give 'full'"):
        mw.plan(step, *arguments(), cluster="1x8 cpu", method=mw.Zero(recompute="offload"))


def test_hosts_hold_no_more_than_the_cluster_says(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text('hosts = 1\ndevices_per_host = 8\nchip = "h100"\n[chip_overrides]\nhost_memory = "8KiB"\n')
    with pytest.raises(mw.DoesNotFit, match=r"keeps .* of each device on its host, which has 8\.00 KiB"):
        mw.plan(step, *arguments(), cluster=file, method=mw.DataParallel(recompute="offload", microbatches=1))


@pytest.mark.parametrize("method", [mw.Zero, mw.DataParallel, mw.Auto])
def test_a_policy_that_is_none_is_refused(method):
    with pytest.raises(ShardingError, match="did you mean 'full'"):
        method(recompute="ful")


def test_stages_choose_their_own():
    with pytest.raises(ShardingError, match="chooses what each stage recomputes"):
        mw.Auto(pipeline=True, recompute="full")


def test_a_part_of_the_layers_of_a_loop_is_refused():
    def scanned(weights, x):
        def loss(weights):
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0])

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    with pytest.raises(ShardingError, match="all trips of a loop are alike; give 'full'"):
        mw.plan(scanned, normal(3, 8, 8), normal(4, 8), cluster="1x4 h100", method=mw.Zero(recompute="full:1/2"))


def test_other_splits_are_not_looked_for_where_devices_compute_all_the_time():
    width = 2048
    layers = [{"up": bfloat16(width, 4 * width), "down": bfloat16(4 * width, width)} for _ in range(2)]
    arguments = {"inlet": bfloat16(width, width), "layers": layers}, bfloat16(2**18, width)
    whole = mw.plan(step, *arguments, cluster="2x4 h100", method=mw.Zero(3, microbatches=1, recompute="none"))
    machine = mw.cluster("2x4 h100")
    machine = replace(machine, chip=replace(machine.chip, memory_bytes=int(0.8 * whole.memory.peak_bytes)))
    said: list[str] = []
    plan = mw.plan(step, *arguments, cluster=machine, on_progress=said.append)
    assert plan.cost.waiting <= 0.01 * plan.step_s and plan.memory.peak_bytes <= plan.memory.limit_bytes
    assert any(remark.startswith("Not all splits were looked for: devices wait for") for remark in plan.remarks)
    assert {line for line in said if line.startswith("pricing")} == {"pricing mesh 8"}


@pytest.mark.parametrize(
    ("size", "devices", "expected"),
    [(1536, 1024, [1, 3]), (64, 8, [1, 2, 4, 8]), (800, 200, [1, 2, 4]), (6, 8, [1, 3]), (7, 8, [1, 7])],
)
def test_microbatches_that_fewer_devices_share_are_left_out(size, devices, expected):
    assert spread_alike(divisors(size), size, devices) == expected


def bfloat16(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")
