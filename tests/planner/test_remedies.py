"""What would help where nothing fits: the cause, and about what each remedy would need."""

import re

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from tests.explain.plans import plan_of

SCALE = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def step(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - gradient, value


def size(text):
    number, unit = text.split()
    return float(number) * SCALE[unit]


def refused(plan, *args, **options):
    with pytest.raises(mw.DoesNotFit) as caught:
        plan(*args, **options)
    return str(caught.value), caught.value


def test_dims_that_devices_cannot_share_are_named_as_the_cause():
    args = (jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((7, 64), "float32"))
    tight = mw.Mesh.abstract((7,), 1, 1e-3, 50_000)
    message, _ = refused(mw.plan, step, *args, mesh=tight, method="zero3")
    assert "The cause: 7 devices cannot share w (64×64) evenly, since 7 does not divide its dims" in message
    message, _ = refused(mw.plan, step, *args, mesh=tight, method="data")
    assert "The cause" not in message  # data parallelism would not split it anyhow


@pytest.mark.slow
def test_microbatches_and_checkpoints_come_with_about_what_they_would_need():
    model = {"layers": 8, "batch": 64}
    again, least = refused(plan_of, "llama-tiny", (2,), mw.DataParallel(), 1000, checkpoint=True, **model)
    assert "jax.checkpoint" not in again
    peak = plan_of("llama-tiny", (2,), mw.DataParallel(), **model).memory.peak_bytes
    message, error = refused(plan_of, "llama-tiny", (2,), mw.DataParallel(), int(0.6 * peak), **model)
    count, cut, kept = re.search(
        r"With microbatches=(\d+) it would need about ([\d.]+ \w+)\. With jax.checkpoint around "
        r"each layer it would need about ([\d.]+ \w+)\. Or use",
        message,
    ).groups()
    assert int(count) == 4
    assert error.needed_bytes / 4 < size(cut) <= error.limit_bytes
    assert least.needed_bytes / 1.5 < size(kept) < 1.5 * least.needed_bytes
