"""The sizes that an engine has when nobody says: what steps compute has room beside parameters and cache."""

from functools import partial

import jax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.serving.models import Decoder, StepShape
from meshwright.serving.sizes import Sizes, chosen

pytestmark = pytest.mark.slow
WIDE = {"layers": 1, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000}


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny", "gpt-oss-tiny"])
@pytest.mark.parametrize("cache, dtype", [("paged", None), ("slots", "int8")])
def test_steps_fit_by_their_plans_where_nothing_is_left_over(name, cache, dtype):
    config = zoo.build(name, **WIDE).config
    sizes = Sizes(max_len=2048, slots=8, chunk=256, blocks=None if cache == "slots" else 128, cache=cache)
    with pytest.raises(mw.DoesNotFit, match="what steps compute need") as caught:
        chosen(config, sizes, None, 1, device_bytes=1)
    memory = caught.value.needed_bytes + 1
    limits, kept = chosen(config, sizes, None, 1, device_bytes=memory / 0.9)
    decoder, width = Decoder.of(config, kept), kept.width(limits.max_len)
    for shape in (StepShape(limits.slots, 0, 0, False, width), StepShape(0, 1, limits.chunk, False, width)):
        step = jax.jit(partial(decoder.step, shape), donate_argnums=1)
        numbers = (jax.ShapeDtypeStruct((size,), "int32") for size in (limits.slots, shape.size))
        plan = mw.plan(step, decoder.params(), decoder.arrays(), *numbers, cluster="1x1 cpu")
        assert plan.memory.peak_bytes <= memory


def test_blocks_that_are_asked_for_must_fit():
    config = zoo.build("llama-tiny").config
    with pytest.raises(mw.DoesNotFit, match="a cache for 100000000 blocks of 16 tokens"):
        chosen(config, Sizes(blocks=100_000_000, cache="paged"), None, 1)
