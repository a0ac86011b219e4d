"""An engine's compiled steps, with what stays on the devices: parameters, cache, and the last token of each slot."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.progress import Say
from meshwright.serving.models import Decoder, Draw, Kind, SlotCache, StepShape
from meshwright.serving.models.sampling import draw
from meshwright.serving.requests import MOST_LOGPROBS
from meshwright.zoo.layers import PyTree

Compiled = Callable[..., Any]
_COPY = "copy of a slot"


@dataclass(frozen=True)
class Placement:
    """Where parameters and cache are, as shardings.

    Attributes:
        params: Of the parameters.
        arrays: Of the cache.
        rest: Of everything else, which every device has whole.
    """

    params: PyTree
    arrays: PyTree
    rest: jax.sharding.Sharding

    @classmethod
    def single(cls, decoder: Decoder, device: jax.Device | None = None) -> "Placement":
        """All on one device, by default the first."""
        here = jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0])
        params, arrays = (jax.tree.map(lambda _: here, tree) for tree in (decoder.params(), decoder.arrays()))
        return cls(params, arrays, here)


class Programs:
    """Compiles the given shapes, and runs them; what is donated is replaced here."""

    def __init__(self, decoder: Decoder, params: PyTree, slots: int, placement: Placement):
        self.decoder, self.params, self.slots, self.placement = decoder, params, slots, placement
        kinds = decoder.arrays()
        self.arrays = _zeros(kinds, placement.arrays)
        self.last = _zeros(jax.ShapeDtypeStruct((slots,), jnp.int32), placement.rest)
        self._compiled: dict[Hashable, Compiled] = {}

    def compile(self, shapes: Sequence[StepShape], draws: Iterable[int], say: Say) -> None:
        """Compiles steps, and all kinds of draws of so many tokens, several at a time."""
        work: list[tuple[Hashable, Callable[[], Compiled]]] = []
        work += [(shape, partial(self._compile_step, shape)) for shape in shapes]
        work += [((kind, rows), partial(self._compile_draw, kind, rows)) for rows in draws for kind in Kind]
        if isinstance(self.decoder.cache, SlotCache):
            work.append((_COPY, self._compile_copy))
        work = [(key, make) for key, make in work if key not in self._compiled]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, (key, compiled) in enumerate(
                zip((key for key, _ in work), pool.map(lambda one: one[1](), work), strict=True)
            ):
                self._compiled[key] = compiled
                say(f"compiling the steps: {number + 1} of {len(work)}")

    def step(self, shape: StepShape, packed: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Runs a step; the scores of its rows and of its prompts, still on the device."""
        self.arrays, rows, prompts = self._compiled[shape](self.params, self.arrays, self.last, packed)
        return rows, prompts

    def copy(self, source: int, target: int) -> None:
        """Copies what one slot of a contiguous cache holds to another."""
        self.arrays = self._compiled[_COPY](self.arrays, np.array([source, target], np.int32))

    def draw(self, kind: Kind, scores: jax.Array, packed: np.ndarray) -> jax.Array:
        """Draws tokens, for `Drawn.unpack`; they are on their way to the host, and known to the next step at once."""
        self.last, drawn = self._compiled[kind, len(packed)](scores, self.last, packed)
        drawn.copy_to_host_async()
        return drawn

    def _compile_step(self, shape: StepShape) -> Compiled:
        place = self.placement
        function = jax.jit(
            partial(self.decoder.step, shape),
            donate_argnums=1,
            in_shardings=(place.params, place.arrays, place.rest, place.rest),
            out_shardings=(place.arrays, place.rest, place.rest),
        )
        packed = jax.ShapeDtypeStruct((shape.size,), jnp.int32)
        return function.lower(self.params, _types(self.arrays), _types(self.last), packed).compile()

    def _compile_copy(self) -> Compiled:
        place = self.placement
        function = jax.jit(
            self.decoder.copied, donate_argnums=0, in_shardings=(place.arrays, place.rest), out_shardings=place.arrays
        )
        return function.lower(_types(self.arrays), jax.ShapeDtypeStruct((2,), jnp.int32)).compile()

    def _compile_draw(self, kind: Kind, rows: int) -> Compiled:
        config = self.decoder.config
        return _compiled_draw(kind, rows, self.slots, config.vocab, config.dtype, self.placement.rest)


@cache  # engines of several models may draw alike
def _compiled_draw(kind: Kind, rows: int, slots: int, vocab: int, dtype: str, rest: jax.sharding.Sharding) -> Compiled:
    function = jax.jit(partial(draw, kind, MOST_LOGPROBS), in_shardings=(rest, rest, rest), out_shardings=(rest, rest))
    scores = jax.ShapeDtypeStruct((rows, vocab), dtype)
    last, packed = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((slots,), Draw.blank(rows, slots).shape))
    return function.lower(scores, last, packed).compile()


def _types(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _zeros(kinds: PyTree, shardings: PyTree) -> PyTree:
    """Arrays of zeros, made where they stay."""
    make = jax.jit(lambda: jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds), out_shardings=shardings)
    return make()
