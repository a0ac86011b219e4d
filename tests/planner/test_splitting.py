"""ZeRO and data parallelism on numbers of devices that do not divide the tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.planner.splitting import _factorings


def step(state, x):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradient)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


def state_of(width, hidden):
    key = jax.random.key(0)
    params = {"in": jax.random.normal(key, (width, hidden)), "out": jax.random.normal(key, (hidden, width))}
    return {"params": params, "momentum": jax.tree.map(jnp.ones_like, params)}


def shards(plan, prefix):
    sizes = plan.mesh.shape
    found = {}
    for tensor in plan.arguments:
        if tensor.path.startswith(prefix):
            found[tensor.path] = int(np.prod([sizes[axis] for axes in tensor.spec for axis in axes]))
    return found


def test_a_tensor_that_the_devices_do_not_divide_is_split_over_the_largest_part_that_does():
    plan = mw.plan(step, state_of(8, 20), jnp.ones((12, 8)), cluster="3x2 h100", method=mw.Zero(3))
    assert set(shards(plan, "state").values()) == {2} and plan.mesh.sizes == (3, 2)
    assert shards(plan, "x") == {"x": 6}
    assert "4 (" in plan.remarks[0] and "2 ways" in plan.remarks[0] and "6 devices" in plan.remarks[0]


def test_dims_share_the_devices_that_neither_can_take_alone():
    plan = mw.plan(step, state_of(10, 15), jnp.ones((12, 10)), cluster="3x2 h100", method=mw.Zero(3))
    assert set(shards(plan, "state").values()) == {6} and not plan.remarks  # 10 by 2 and 15 by 3


def test_tensors_that_divide_are_planned_on_one_axis_as_ever():
    plan = mw.plan(step, state_of(12, 24), jnp.ones((12, 12)), cluster="3x2 h100", method=mw.Zero(3))
    assert plan.mesh.sizes == (6,) and not plan.remarks


@pytest.mark.parametrize("method", [mw.DataParallel(), mw.Zero(1)])
def test_a_batch_that_the_devices_do_not_divide_is_shared_by_the_most_that_do(method):
    plan = mw.plan(step, state_of(12, 24), jnp.ones((8, 12)), cluster="3x2 h100", method=method)
    assert shards(plan, "x") == {"x": 2}
    assert any("8 rows, which 2 of 6 devices share" in r and "multiple of 6" in r for r in plan.remarks)


def test_a_batch_that_no_part_divides_is_refused():
    with pytest.raises(mw.ShardingError, match="use a batch that is a multiple of 6"):
        mw.plan(step, state_of(12, 24), jnp.ones((7, 12)), cluster="3x2 h100", method=mw.DataParallel())


def test_a_mesh_that_the_user_gives_stays():
    plan = mw.plan(step, state_of(8, 20), jnp.ones((12, 8)), cluster="3x2 h100", mesh=(6,), method=mw.Zero(3))
    assert plan.mesh.sizes == (6,) and "not at all" in plan.remarks[0]


def test_state_that_a_method_keeps_whole_is_no_matter_of_how_many_devices_there_are():
    for method, count in ((mw.DataParallel(), None), (mw.Zero(1), 2)):
        plan = mw.plan(step, state_of(8, 20), jnp.ones((12, 8)), cluster="1x3 h100", method=method)
        assert [f"state's {count} tensors" in remark for remark in plan.remarks] == ([] if count is None else [True])


def test_auto_gets_a_view_on_which_the_arguments_can_be_split_further():
    # The usual views of 5 hosts of 6 have 30, 2×15, 3×10 and 5×6 devices: none splits both arguments 30 ways.
    plan = mw.plan(lambda a, b: a.sum() + b.sum(), jnp.ones((10, 9)), jnp.ones((4, 15)), cluster="5x6 h100")
    assert (2, 3, 5) in {tuple(sorted(view.shape)) for view in plan.considered}
    plan = mw.plan(lambda a, b: a.sum() + b.sum(), jnp.ones((30, 9)), jnp.ones((4, 30)), cluster="5x6 h100")
    assert (2, 3, 5) not in {tuple(sorted(view.shape)) for view in plan.considered}


@pytest.mark.devices
def test_the_numbers_are_those_of_one_device():
    state, x = state_of(8, 20), jax.random.normal(jax.random.key(1), (12, 8))
    run = mw.parallelize(step, cluster="1x6 cpu", method=mw.Zero(3), donate_argnums=())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), run(state, x), step(state, x))


@pytest.mark.devices
@pytest.mark.parametrize(
    ("widths", "sums"),
    [
        ((64, 128), {("reduce_scatter", ("x", "y"))}),
        ((12, 20), {("reduce_scatter", ("y",)), ("reduce_scatter", ("x",))}),  # no dim has all eight
        ((10, 14), {("reduce_scatter", ("x",)), ("all_reduce", ("y",))}),  # no dim has the four of y
    ],
    ids=["one dim", "two dims", "in part"],
)
def test_zero_2_scatters_gradients_over_both_axes_as_far_as_they_divide(widths, sums):
    args = state_of(*widths), jax.random.normal(jax.random.key(1), (512, widths[0]))
    plan = mw.plan(step, *args, cluster="2x4 h100", mesh=(2, 4), method=mw.Zero(2))
    assert {(c.kind, c.axes) for c in plan.collectives if c.purpose == "gradient"} == sums
    over = "x and y" if ("all_reduce", ("y",)) not in sums else "x"
    assert f"gradients and optimizer state sharded over {over} (ZeRO-2)" in str(plan.verdict)
    found = plan.verify()
    assert all(pair.compiled == pytest.approx(pair.planned, abs=8) for pair in found.collectives.values())
    made = mw.parallelize(step, method=plan, donate_argnums=())(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), made, step(*args))


def test_copies_of_the_state_are_not_scattered_over():
    plan = mw.plan(step, state_of(64, 128), jnp.ones((512, 64)), cluster="2x4 h100", method=mw.Zero(2, group=4))
    sums = {(c.kind, c.axes) for c in plan.collectives if c.purpose == "gradient"}
    assert sums == {("reduce_scatter", ("y",)), ("all_reduce", ("x",))}


def test_every_way_to_factor_is_tried_once():
    assert _factorings(12) == [(12,), (2, 6), (2, 2, 3), (3, 4)]
