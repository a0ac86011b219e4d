"""Microbatches as a decision: as few as fit, the numbers of the whole batch, and clear words where none help."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.hardware import Cluster
from meshwright.parallelism.sentence import plain_sentence
from tests.draws import normal

BATCH, WIDTH, LAYERS = 4096, 16, 6


def loss(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(jnp.square(x))


def step(state, x):
    value, gradients = jax.value_and_grad(loss)(state["w"], x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], gradients)
    return {"w": jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], momentum), "m": momentum}, value


def arguments():
    weights = [normal(WIDTH, WIDTH, seed=seed) for seed in range(LAYERS)]
    return {"w": weights, "m": [np.zeros_like(w) for w in weights]}, normal(BATCH, WIDTH, seed=99)


@cache
def whole():
    return mw.plan(step, *arguments(), cluster="1x8 cpu", method=mw.Auto(microbatches=1))


def small_cluster(share: float) -> Cluster:
    """A cluster with a share of the memory that the plan of the whole batch takes."""
    machine = mw.cluster("1x8 cpu")
    return replace(machine, chip=replace(machine.chip, memory_bytes=int(share * whole().memory.peak_bytes)))


@cache
def tight():
    return mw.plan(step, *arguments(), cluster=small_cluster(0.6), method=mw.Auto(memory_fraction=1.0))


def test_the_whole_batch_runs_at_once_where_it_fits():
    plan = mw.plan(step, *arguments(), cluster="1x8 cpu")
    assert plan.microbatches == 1 and plan.batch_argnums == ()
    assert "microbatches" not in plain_sentence(plan)


def test_a_step_that_does_not_fit_whole_is_cut_into_as_many_microbatches_as_it_needs():
    plan = tight()
    assert plan.microbatches > 1 and plan.batch_argnums == (1,)
    assert plan.memory.peak_bytes <= 0.6 * whole().memory.peak_bytes
    assert plain_sentence(plan).endswith(f", {plan.microbatches} microbatches")


def test_more_microbatches_take_less_memory_and_no_less_time():
    plans = [mw.plan(step, *arguments(), cluster="1x8 cpu", method=mw.Zero(3, microbatches=n)) for n in (1, 2, 4)]
    assert [plan.microbatches for plan in plans] == [1, 2, 4]
    peaks, times = [plan.memory.peak_bytes for plan in plans], [plan.simulate().step_s for plan in plans]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]
    assert times == sorted(times)


@pytest.mark.devices
def test_a_planned_number_of_microbatches_has_the_numbers_of_one_device(tmp_path):
    state, x = arguments()
    expected = jax.jit(step)(state, x)
    planned = mw.parallelize(step, cluster=small_cluster(0.6), method=mw.Auto(memory_fraction=1.0))
    assert planned.plan(state, x).microbatches > 1
    tight().save(tmp_path / "plan.json")
    loaded = mw.Plan.load(tmp_path / "plan.json")
    assert loaded == tight() and loaded.microbatches == tight().microbatches
    for function in (planned, mw.parallelize(step, method=loaded)):
        found = function(*arguments())
        for one, many in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(one, many, rtol=2e-5, atol=2e-6)


@pytest.mark.devices
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_plan_with_microbatches_is_verified_as_it_runs(tmp_path, is_loaded):
    plan = tight()
    if is_loaded:
        plan.save(tmp_path / "plan.json")
        found = mw.Plan.load(tmp_path / "plan.json").verify(step, *arguments())
    else:
        found = plan.verify()
    assert f'"known_trip_count":{{"n":"{plan.microbatches}"}}' in found.text.replace(" ", "")
    assert found.flops.planned == found.flops.compiled


def test_arguments_that_are_stacks_of_the_same_examples_are_cut_together():
    def paired(state, x, y):
        return step(state, x + y)

    state, x = arguments()
    plan = mw.plan(paired, state, x, x, cluster=small_cluster(0.6), method=mw.Auto(memory_fraction=1.0))
    assert plan.batch_argnums == (1, 2) and plan.microbatches > 1


def test_where_no_number_of_microbatches_fits_the_message_says_what_would():
    with pytest.raises(mw.DoesNotFit) as error:
        mw.plan(step, *arguments(), cluster=small_cluster(0.001), method=mw.Auto(memory_fraction=1.0, pipeline=False))
    assert error.value.needed_bytes > error.value.limit_bytes
    assert "per device; the least for which a plan was found is" in str(error.value)


def test_a_step_that_cannot_be_cut_says_so_where_it_does_not_fit():
    def normalised(state, x):
        def own(weights, x):
            for weight in weights:
                x = jnp.tanh(x @ weight)
                x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
            return jnp.mean(jnp.square(x))

        value, gradients = jax.value_and_grad(own)(state["w"], x)
        return {"w": jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], gradients), "m": state["m"]}, value

    with pytest.raises(
        mw.DoesNotFit, match="Its batch cannot be cut into microbatches, which could change its numbers"
    ):
        mw.plan(normalised, *arguments(), cluster=small_cluster(0.5), method=mw.Auto(memory_fraction=1.0))


@pytest.mark.parametrize("given", [0, -1, 2.0, True, "many", None])
def test_an_unknown_number_of_microbatches_is_refused(given):
    with pytest.raises(mw.ShardingError, match=r"microbatches is .*; give a whole number, 1 or more, or 'auto'"):
        mw.Zero(3, microbatches=given)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(mw.ShardingError, match="a batch of 4096 does not divide into 3 microbatches"):
        mw.plan(step, *arguments(), cluster="1x8 cpu", method=mw.Auto(microbatches=3))


@pytest.mark.parametrize("given", [7, (1, -3), "x"])
def test_positions_of_the_batch_that_are_none_are_refused(given):
    with pytest.raises(mw.ShardingError, match="batch_argnums is"):
        mw.plan(step, *arguments(), cluster="1x8 cpu", batch_argnums=given)


@cache
def narrow():
    """A step on one long example, and two devices with less memory than one program of it takes."""
    example = zoo.build("llama-tiny", batch=1, seq=1024, layers=4)
    machine = mw.cluster("1x2 h100")
    tiny = replace(machine, chip=replace(machine.chip, memory_bytes=1000))
    method = mw.Auto(memory_fraction=1.0, pipeline=False, recompute="as written")
    with pytest.raises(mw.DoesNotFit) as error:
        mw.plan(example.train_step, example.state, example.batch, cluster=tiny, method=method)
    return example, replace(machine, chip=replace(machine.chip, memory_bytes=int(0.9 * error.value.needed_bytes)))


def test_stages_are_looked_for_where_no_plan_of_one_program_fits():
    example, machine = narrow()
    step, args = example.train_step, (example.state, example.batch)
    fraction = {"memory_fraction": 1.0, "recompute": "as written"}
    plan = mw.plan(step, *args, cluster=machine, method=mw.Auto(**fraction))
    assert plan.stages and plan.microbatches == plan.pipeline.num_microbatches
    assert "It runs in stages, since no plan of one program fits." in plan.remarks
    with pytest.raises(mw.DoesNotFit):
        mw.plan(step, *args, cluster=machine, method=mw.Auto(pipeline=False, **fraction))


def test_an_unknown_word_for_pipelines_is_refused():
    with pytest.raises(mw.ShardingError, match="pipeline is 'perhaps'; give True, False or 'auto'"):
        mw.Auto(pipeline="perhaps")


def test_a_function_without_a_batch_is_not_cut():
    x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
    with pytest.raises(mw.ShardingError, match=r"no batch to cut into 2 .*: the function returns no next state, or no"):
        mw.plan(lambda x, w: x @ w, x, w, cluster="1x2 h100", method=mw.Auto(microbatches=2))
