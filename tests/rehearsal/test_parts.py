"""Parts of a plan cover all its compute, each distinct one once, and run by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.cost.rates import cluster_rates
from meshwright.rehearsal.parts import parts_of
from meshwright.rehearsal.share.local_equation import local_shape
from meshwright.rehearsal.share.part_program import PartFunction, TooLarge
from meshwright.runtime.spmd import device_mesh
from tests.rehearsal.share.test_program import step, traced_flops, weights

CASES = [
    ("gpt-tiny", (8,), "zero3", {"layers": 6}),
    ("llama-tiny", (2, 4), "zero3", {"scan": True, "checkpoint": True}),
    ("llama-tiny", (2, 4), mw.Auto(recompute="as written"), {"checkpoint": True}),
    ("moe-tiny", (8,), "tensor", {}),
    ("wide-resnet-tiny", (8,), "data", {}),
]


def compute_s(plan, num_devices):
    """A plan's compute where so many devices work: its parts are measured on one that works alone."""
    rates = cluster_rates(plan.mesh.cluster, num_devices)
    return sum(op.load.trips * rates.load_s(op.load) for op in plan.ops if op.load is not None)


@pytest.mark.sweep(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "method", "options"), CASES)
def test_parts_cover_the_work_of_a_plan(name, mesh, method, options):
    example = zoo.build(name, **options)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x8 h100", mesh=mesh, method=method)
    parts = parts_of(plan, plan.origin.graph)
    assert sum(p.count * p.modelled_s for p in parts) == pytest.approx(compute_s(plan, num_devices=1), rel=1e-3)
    assert compute_s(plan, num_devices=8) == pytest.approx(plan.cost.compute, rel=1e-3)
    assert sum(p.count * p.communication_s for p in parts) == pytest.approx(plan.cost.communication, rel=1e-3)
    assert sum(p.count * p.flops for p in parts) == pytest.approx(plan.flops)
    if options.get("layers"):
        layer = max(parts, key=lambda p: p.count)
        assert layer.count >= options["layers"] - 1 and len(parts) < 8  # the last layer may be split otherwise
    for part in parts:
        function = PartFunction(plan, plan.origin, part.operations)
        types = [
            jax.ShapeDtypeStruct(local_shape(t.shape, t.spec, plan.mesh.shape), function.dtype(v))
            for v, t in ((v, function.kind(v)) for v in function.inputs)
        ]
        assert traced_flops(function, types) == pytest.approx(part.flops, rel=1e-6)


@pytest.fixture(scope="module")
def plan():
    args = jax.eval_shape(weights), jax.ShapeDtypeStruct((64, 16), "float32")
    return mw.plan(step, *args, cluster="local", mesh=(8,), method="zero3")


@pytest.mark.devices
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "together"])
def test_laps_compute_what_one_run_does(plan, is_alone):
    part = max(parts_of(plan, plan.origin.graph), key=lambda part: part.flops)
    function = PartFunction(plan, plan.origin, part.operations, None if is_alone else device_mesh(plan))
    once, laps = (function.compile(jax.devices()[0], laps=count) for count in (1, 3))
    assert laps.laps == 3 and " while(" in laps.compiled.as_text() and " while(" not in once.compiled.as_text()
    for mine, other in zip(laps.run(), once.run(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


def test_parts_of_loops_that_carry_random_keys_run():
    def loss(w, key, x):
        def layer(carried, w):
            x, key = carried
            key, own = jax.random.split(key)
            return (jnp.where(jax.random.bernoulli(own, 0.9, x.shape), jnp.tanh(x @ w), 0.0), key), None

        return jnp.sum(jax.lax.scan(layer, (x, key), w)[0][0])

    args = jnp.ones((3, 8, 8)), jax.random.key(0), jnp.ones((4, 8))
    plan = mw.plan(jax.grad(loss), *args, cluster="1x1 cpu", mesh=(1,))
    for part in parts_of(plan, plan.origin.graph):
        assert PartFunction(plan, plan.origin, part.operations).compile(jax.devices()[0]).run() is not None


def test_laps_carry_random_keys():
    def draw(key, x):
        return jax.random.split(key), x @ x

    plan = mw.plan(draw, jax.random.key(0), jnp.ones((4, 4)), cluster="1x1 cpu", mesh=(1,))
    function = PartFunction(plan, plan.origin, range(len(plan.origin.graph.ops)))
    keys, _ = function.compile(jax.devices()[0], laps=2).run()
    again, _ = function.compile(jax.devices()[0]).run()
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(again))


@pytest.mark.devices
def test_a_part_runs_on_one_device_or_on_all(plan):
    parts = parts_of(plan, plan.origin.graph)
    for part in parts:
        alone = PartFunction(plan, plan.origin, part.operations).compile(jax.devices()[3])
        together = PartFunction(plan, plan.origin, part.operations, device_mesh(plan)).compile(jax.devices()[0])
        mine, whole = alone.run(), together.run()
        assert len(mine) == len(whole) > 0
        for one, other in zip(mine, whole, strict=True):
            assert one.dtype == other.dtype and one.devices() == {jax.devices()[3]}
            assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in (one, other))
            assert one.shape == other.sharding.shard_shape(other.shape)
        assert "all-gather" not in alone.compiled.as_text()
    assert any(
        "all-gather"
        in PartFunction(plan, plan.origin, p.operations, device_mesh(plan)).compile(jax.devices()[0]).compiled.as_text()
        for p in parts
    )


def test_different_work_is_never_taken_for_the_same():
    """What was measured of one program would be used for the other."""
    x, w = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((32, 32), "float32")

    def sgd(w, x):
        return w - 0.1 * jax.grad(lambda w: (x @ w).sum())(w)

    def slower(w, x):
        return w - 0.1 * jnp.tanh(jnp.exp(jax.grad(lambda w: (x @ w).sum())(w)))

    programs = [
        (lambda x: x + 1, x),
        (lambda x: x * 2, x),
        (lambda x: jnp.sort(x, axis=1), x),
        (lambda x: jnp.sort(x, axis=0), x),
        (sgd, w, x),
        (slower, w, x),
    ]
    known = set()
    for program in programs:
        plan = mw.plan(*program, cluster="1x8 h100", mesh=(8,), method="data")
        parts = {(part.fingerprint, part.shardings) for part in parts_of(plan, plan.origin.graph)}
        assert parts and not parts & known
        known |= parts


@pytest.mark.devices
def test_a_part_that_needs_too_much_memory_is_refused(plan):
    part = parts_of(plan, plan.origin.graph)[0]
    with pytest.raises(TooLarge, match="and 10 B are allowed"):
        PartFunction(plan, plan.origin, part.operations).compile(jax.devices()[0], limit_bytes=10)
