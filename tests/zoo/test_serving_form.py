"""Every family computes a sequence in pieces as it does at once, given positions and what keeps keys and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import zoo
from meshwright.zoo import gemma, gpt, gpt_oss, llama, mixtral, qwen
from meshwright.zoo.attention import attend_cached

pytestmark = [pytest.mark.slow]
FAMILIES = {
    "llama-tiny": llama,
    "qwen-tiny": qwen,
    "qwen-moe-tiny": qwen,
    "gemma-tiny": gemma,
    "mixtral-tiny": mixtral,
    "gpt-oss-tiny": gpt_oss,
    "gpt-tiny": gpt,
}
LENGTH = 24


class Cache:
    """The plainest cache there is: each layer's keys and values of all positions so far, joined."""

    def __init__(self, layers):
        self.layers, self.turn, self.positions = layers, 0, None

    def __call__(self, q, k, v, *, causal, kind=None, window=None, scale=None, sinks=None, cap=None):
        assert causal
        before = self.layers[self.turn]
        kept = [jnp.concatenate([*earlier, new], axis=1) for earlier, new in zip(before, (k, v), strict=True)]
        self.layers[self.turn] = [[one] for one in kept]
        self.turn = (self.turn + 1) % len(self.layers)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        places = jnp.broadcast_to(self.positions, q.shape[:2])
        return attend_cached(q, *kept, places, window=window, scale=scale, sinks=sinks, cap=cap)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_of_a_sequence_give_the_logits_of_the_whole(name):
    options = {"group_size": 1} if "group_size" in dir(zoo.build(name, seq=LENGTH).config) else {}
    example = zoo.build(name, seq=LENGTH, batch=8, layers=3, dtype="float32", **options)
    params, family, config = example.init(0)["params"], FAMILIES[name], example.config
    tokens = np.random.default_rng(0).integers(0, config.vocab, (2, LENGTH), np.int32)
    expected = jax.jit(lambda params, tokens: family.logits(config, params, tokens))(params, tokens)
    cache = Cache([[[], []] for _ in range(3)])
    for start, end in ((0, 9), (9, 10), (10, LENGTH)):
        cache.positions = jnp.arange(start, end)
        last = jnp.asarray([end - start - 1])
        piece = family.logits(config, params, tokens[:, start:end], cache.positions, cache, last)
        np.testing.assert_allclose(piece[:, 0], expected[:, end - 1], rtol=0, atol=2e-5)
