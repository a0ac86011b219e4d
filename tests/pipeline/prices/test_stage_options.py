"""Options: what spreading the state over replicas spares and costs, and that nothing is left out that could win."""

from dataclasses import replace

import optax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.pipeline.planner import start_search
from meshwright.pipeline.prices.kernels import GRADIENTS, MICROBATCH, ONCE
from meshwright.pipeline.prices.layer_prices import Item
from meshwright.pipeline.prices.stage_options import Options, find_options
from tests.pipeline.models import mlp


def catalogue_of(step, args, machines, fraction=0.9):
    method = mw.Auto(pipeline=True, memory_fraction=fraction)
    return start_search(trace(step, *args), mw.cluster(machines), method, lambda _: None).catalogue


@pytest.fixture(scope="module")
def spread():
    """One option with all that ZeRO can spread, by its stages."""
    step, args = mlp(512, layers=4, rows=32, optimizer=optax.adam(1e-3))
    catalogue = catalogue_of(step, args, "2x4 h100")
    plain = find_options(catalogue, 0, 8, 16, "none").options[0]
    return catalogue, [replace(plain, zero=stage) for stage in range(4)]


def test_each_stage_of_zero_spreads_more(spread):
    _, options = spread
    items = options[0].prices.items.sum(axis=1)
    weights, moments = items[Item.PARAMETER_BYTES], items[Item.OPTIMIZER_BYTES]
    assert moments == pytest.approx(2 * weights, rel=1e-3)
    spared = [options[0].state_bytes(items) - option.state_bytes(items) for option in options]
    share = 1 - 1 / options[0].data
    assert spared == pytest.approx([0, share * moments, share * (moments + weights), share * (moments + 2 * weights)])
    assert (options[3].transient > options[2].transient).all() and (options[2].transient > options[1].transient).all()


def test_spreading_gradients_or_parameters_is_never_quicker(spread):
    catalogue, options = spread
    priced = Options(catalogue, 0, options, catalogue.rows.batch)
    for first in range(4):
        for last in range(first + 1, 5):
            part = priced.sums[:, :, last] - priced.sums[:, :, first]
            steps = (priced.ways[..., 0] + priced.ways[..., 1] * part[:, GRADIENTS, None, None]).min(axis=2)
            once, own = part[:, ONCE] + steps.sum(axis=1), part[:, MICROBATCH]
            assert (own[2:] - own[1] >= (once[1] - once[2:]) * (1 - 1e-9)).all()
            assert once[3] < once[2] < once[1]


@pytest.mark.parametrize("machines", ["1x4 h100", "2x2 a100-40gb"])
def test_a_model_that_is_too_large_for_each_replica_is_spread(machines):
    step, args = mlp(1024, layers=4, rows=8, optimizer=optax.adam(1e-3))
    whole = 4 * 4 * 4 * 1024**2  # parameters, gradients and two moments of four layers
    fraction = 0.45 * whole / mw.cluster(machines).memory_bytes
    recipe = mw.ThreeD(data=4, microbatch=2, memory_fraction=fraction)
    plan = mw.plan(step, *args, cluster=machines, method=recipe)
    (stage,) = plan.stages
    assert stage.method == "x: batch, x: all state"
    assert all(("x",) in t.spec for t in stage.tensors if len(t.shape) == 2)
    assert stage.forward.communication_s > 0 and stage.gradients.communication_s == 0
    assert plan.memory.peak_bytes <= plan.memory.limit_bytes
    roomy = mw.plan(step, *args, cluster=machines, method=replace(recipe, memory_fraction=0.9))
    assert roomy.step_s < plan.step_s and roomy.stages[0].method in ("x: batch", "x: batch, x: optimizer")


def test_what_takes_no_gradient_holds_none():
    example = zoo.build("llama-tiny", batch=8, layers=4)
    args = (example.loss, example.state["params"], example.batch)
    recipe = mw.ThreeD(data=2, pipeline=1, microbatch=2, schedule="inference")
    (stage,) = mw.plan(*args, cluster="1x2 h100", method=recipe).stages
    held = sum(4 * _size(t.shape) for t in stage.tensors)
    assert stage.state_bytes == pytest.approx(held, rel=0.02)
    assert stage.once_s == 0


def _size(shape):
    number = 1
    for n in shape:
        number *= n
    return number
