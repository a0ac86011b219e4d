"""What XLA cannot split is done by each device on its own parts: only what was planned is sent for it."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.runtime.spmd import spmd
from tests.draws import normal
from tests.generator.pairs import outcome
from tests.runtime.test_spmd import run_once

pytestmark = pytest.mark.devices

FUNCTIONS = {
    "fft": jnp.fft.fft,
    "rfft": jnp.fft.rfft,
    "irfft": lambda x: jnp.fft.irfft(x.astype(jnp.complex64)),
    "top_k": lambda x: jax.lax.top_k(x, 3),
    "in a loop": lambda x: jax.lax.scan(lambda c, y: (c + jnp.fft.fft(y).real, None), x[0], x)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_sent_along_batch_dims(name):
    x, function = normal(8, 4, 16), FUNCTIONS[name]
    mesh = mw.Mesh.abstract((2, 4), alpha=0.0, beta=1e-9)
    spec = P(None, ("y",)) if name == "in a loop" else P("x", "y")
    plan = mw.plan(function, x, mesh=mesh, method=mw.Manual({"[ax]*": spec}))
    results, sent = run_once(plan, function, x)
    assert not sent
    for expected, found in zip(jax.tree.leaves(function(x)), jax.tree.leaves(results), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", [mw.Auto(), mw.DataParallel(), mw.TensorParallel()], ids=lambda m: m.name)
@pytest.mark.parametrize("groups", [2, 8])
def test_groups_of_a_convolution_are_split_and_summed_as_planned(groups, method):
    def step(kernel, x):
        names = ("NHWC", "HWIO", "NHWC")

        def loss(kernel):
            made = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", feature_group_count=groups, dimension_numbers=names
            )
            return jnp.mean(made**2)

        return kernel - jax.grad(loss)(kernel)

    args = normal(3, 3, 8 // groups, 16, seed=1), normal(8, 8, 8, 8, seed=2)
    plan = mw.plan(step, *args, mesh=mw.Mesh.abstract((2, 4), alpha=0.0, beta=1e-9), method=method)
    found, sent = run_once(plan, step, *args)
    assert all(pair.ratio == 1 for pair in sent)
    np.testing.assert_allclose(np.asarray(found), np.asarray(jax.jit(step)(*args)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("number", [1, 2])
def test_an_fft_of_a_gathered_operand_runs(number):
    """XLA's FFT refused the layout of an operand of this program; none smaller was found that shows it."""
    assert not outcome(100982, number).trouble


def _convolved(image: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A convolution that cuts off below and pads above, and the gradient by its kernel, which does so, too."""
    groups = image.shape[1] // kernel.shape[1]
    convolve = partial(jax.lax.conv_general_dilated, window_strides=(1,), padding=[(-2, 2)], feature_group_count=groups)
    made, back = jax.vjp(convolve, image, kernel)
    return made, back(made)[1]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, None, "x")], ids=["whole", "examples", "pixels"])
def test_a_convolution_that_cuts_off_below_and_pads_above_reads_nothing_beyond_its_image(spec, groups):
    image, kernel = np.arange(64 * groups).reshape(4, 2 * groups, 8) % 7, np.arange(32 * groups).reshape(-1, 2, 8) % 3
    args = image.astype(np.float32), kernel.astype(np.float32)
    cut = np.pad(image, ((0, 0), (0, 0), (0, 2)))[:, :, 2:].reshape(4, groups, 2, 8)
    made = np.einsum("ngcw,gocw->ngo", cut, kernel.reshape(groups, -1, 2, 8)).reshape(4, -1, 1)
    by_kernel = np.einsum("ngcw,ngo->gocw", cut, made.reshape(4, groups, -1)).reshape(kernel.shape)
    plan = mw.plan(
        _convolved, *args, mesh=mw.Mesh.abstract((2,), alpha=0.0, beta=1e-9), method=mw.Manual({"image": spec})
    )
    for found, expected in zip(spmd(plan, _convolved)(*args), (made, by_kernel), strict=True):
        np.testing.assert_array_equal(found, expected)
    # What lies behind an image may happen to be zero; so no such convolution may be left.
    text = spmd(plan, _convolved).lower(*args).compile().as_text()
    assert "convolution(" in text and not re.findall(r"pad=-\d+_[1-9]", text)
