"""Products that are computed as one: fewer of them, and the same scores."""

from functools import partial

import jax
import numpy as np
import pytest

from meshwright import zoo
from meshwright.serving.models import Decoder, PagedCache, StepShape, join_products
from tests.draws import normal

#: Models, and how many products fewer each layer has.
MODELS = [("llama-tiny", 3), ("gpt-tiny", 2), ("gemma-tiny", 3), ("mixtral-tiny", 2), ("gpt-oss-tiny", 2)]


@pytest.mark.parametrize(("name", "fewer"), MODELS)
def test_joined_products_are_fewer_and_score_the_same(name, fewer):
    layers = 2
    decoder = Decoder.of(zoo.build(name, layers=layers, dtype="float32").config, PagedCache(4, 8, "float32"))
    shape = StepShape(2, 1, 4, False, 2)
    packed = shape.packed(0)
    rows, prompts = shape.unpack(packed)
    rows.given[:], rows.at[:] = 3, 0
    prompts.counts[:] = 4
    arrays = jax.tree.map(lambda kind: np.zeros(kind.shape, kind.dtype), decoder.arrays())
    leaves, tree = jax.tree.flatten(decoder.params())
    drawn = [0.1 * normal(*leaf.shape, seed=number) for number, leaf in enumerate(leaves)]
    steps, scores = {}, {}
    for form, change in (("single", lambda params: params), ("joined", join_products)):
        given = change(jax.tree.unflatten(tree, drawn)), arrays, np.zeros(4, np.int32), packed
        step = partial(decoder.step, shape)
        steps[form] = str(jax.make_jaxpr(step)(*given)).count("dot_general[")
        scores[form] = jax.jit(step)(*given)[1:]
    assert steps["single"] - steps["joined"] == fewer * layers
    for one, other in zip(*scores.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
