"""Low-rank adapters: beside every weight of a layer, they compute what the merged weights do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import zoo
from meshwright.zoo.low_rank import adapted, adapter_shapes, init_adapters, merged, weight_names

MODELS = [("llama-tiny", {}), ("llama-tiny", {"scan": True, "checkpoint": "full"}), ("mixtral-tiny", {})]


@pytest.mark.sweep(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), MODELS, ids=["layers", "scanned", "experts"])
def test_adapters_compute_what_merged_weights_do(name, options):
    example = zoo.build(name, batch=2, seq=16, dtype="float32", **options)
    params, batch = example.init(0)["params"], example.sample(1)
    shapes = adapter_shapes(example.loss, example.state["params"], example.batch, 3, ())
    assert {path.rsplit("/", 1)[-1] for path in shapes} == {"q", "k", "v", "o", "gate", "up", "down"}
    fresh = init_adapters(shapes, jax.random.key(0))
    random = np.random.default_rng(0)
    drawn = jax.tree.map(lambda s: jnp.asarray(random.normal(size=s.shape, scale=0.3), jnp.float32), shapes)
    loss = jax.jit(lambda adapters: example.loss(adapted(params, adapters, 2.0), batch))
    plain = jax.jit(lambda params: example.loss(params, batch))
    assert float(loss(fresh)) == pytest.approx(float(plain(params)), rel=1e-6)
    assert float(loss(drawn)) == pytest.approx(float(plain(merged(params, drawn, 2.0))), rel=1e-5)
    assert abs(float(loss(drawn)) - float(plain(params))) > 1e-3


def test_only_the_targets_get_one():
    example = zoo.build("llama-tiny", batch=2, seq=16)
    shapes = adapter_shapes(example.loss, example.state["params"], example.batch, 4, ("q", "o"))
    assert sorted(shapes) == ["layers/0/o", "layers/0/q", "layers/1/o", "layers/1/q"]
    assert shapes["layers/0/q"]["down"].shape == (64, 4) and shapes["layers/0/q"]["up"].shape == (4, 4, 16)
    assert shapes["layers/0/o"]["down"].shape == (4, 16, 4) and shapes["layers/0/o"]["up"].shape == (4, 64)
    names = weight_names(example.loss, example.state["params"], example.batch)
    assert names == ["down", "gate", "k", "o", "q", "up", "v"]
