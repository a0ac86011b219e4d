"""An engine's compiled steps, with what stays on the devices: parameters, cache, and the last token of each slot."""

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.progress import Say
from meshwright.runtime.cpu_turns import in_turn, put_in_turn
from meshwright.serving.engine.placement import Placement, of_parcel
from meshwright.serving.engine.stages import StagePart, cut, even_bounds
from meshwright.serving.models import Decoder, Draw, Kind, SlotCache, StepShape
from meshwright.serving.models.sampling import draw, draw_shaped
from meshwright.serving.models.shaping import Shape, begun, history
from meshwright.serving.requests import MOST_LOGPROBS
from meshwright.zoo.layers import PyTree

Compiled = Callable[..., Any]
_COPY, _TAKE, _PUT = "copy of a slot", "sequence taken out", "sequence put in"
_BEGIN = "counts of a slot"


@dataclass
class StageArrays:
    """What one group of devices has: of several, each has consecutive layers.

    Attributes:
        placement: Where.
        params: The parameters that it reads; of several stages a list of leaves.
        arrays: The cache of its layers.
    """

    placement: Placement
    params: PyTree
    arrays: PyTree


@dataclass(frozen=True)
class Parcel:
    """The keys and values of one sequence, on their way from one cache to another.

    Attributes:
        tokens: How many positions they are of.
        layers: Of each layer, (length, kv_heads, head_dim), where the length is at least as large.
    """

    tokens: int
    layers: Sequence[Any]


class Programs:
    """Compiles the given shapes, and runs them; what is donated is replaced here.

    Args:
        decoder: The model with its cache.
        params: The parameters.
        slots: Sequences at once.
        placements: Where they are; several for stages of layers, whose parameters `placement.dealt` places.
    """

    def __init__(self, decoder: Decoder, params: PyTree, slots: int, placements: Sequence[Placement]):
        self.decoder, self.slots = decoder, slots
        self.turn = Lock()  # held by whoever sends a step: twins share devices, which must see all in one order
        self._bounds = even_bounds(decoder.config.layers, len(placements))
        self._stages = [StageArrays(placement, params, []) for placement in placements]
        self._compiled: dict[Hashable, Any] = {}
        self._params = params
        self._lengths: tuple[int, ...] = ()  # of parcels
        self._parts_of_params: list[tuple[int, ...]] = []
        self._new_arrays()

    def twin(self) -> "Programs":
        """The same programs and parameters with a cache of their own, for another engine on the same devices."""
        other = object.__new__(Programs)
        vars(other).update(vars(self))
        other._stages = [replace(stage) for stage in self._stages]
        other._new_arrays()
        return other

    def _new_arrays(self) -> None:
        kinds = self.decoder.arrays()
        for stage, (first, end) in zip(self._stages, pairwise(self._bounds), strict=True):
            stage.arrays = _zeros(kinds[first:end], stage.placement.arrays[first:end])
        rest = self._stages[-1].placement.rest
        self.last = _zeros(jax.ShapeDtypeStruct((self.slots,), jnp.int32), rest)
        self._seen = _zeros(jax.ShapeDtypeStruct((self.slots, self.decoder.config.vocab), jnp.int32), rest)

    def compile(self, shapes: Sequence[StepShape], draws: Iterable[int], longest: int, say: Say) -> None:
        """Compiles steps of sequences of up to `longest` tokens, and all kinds of draws of so many tokens."""
        self._longest = longest
        self._deal(shapes[0])
        work: list[tuple[Hashable, Callable[[], Any]]] = []
        work += [(shape, partial(self._compile_step, shape)) for shape in shapes]
        work += [((kind, rows), partial(self._compile_draw, kind, rows)) for rows in draws for kind in Kind]
        work.append((_BEGIN, self._compile_begin))
        if isinstance(self.decoder.cache, SlotCache):
            work.append((_COPY, self._compile_copy))
        self._compile_all(work, say)

    def compile_parcels(self, lengths: Iterable[int], say: Say) -> None:
        """Compiles what takes sequences of up to so many tokens out of the cache, and puts them into it."""
        self._lengths = tuple(sorted(lengths))
        work: list[tuple[Hashable, Callable[[], Any]]] = []
        work += [((_TAKE, length), partial(self._compile_take, length)) for length in self._lengths]
        work += [((_PUT, length), partial(self._compile_put, length)) for length in self._lengths]
        self._compile_all(work, say)

    def _compile_all(self, work: Sequence[tuple[Hashable, Callable[[], Any]]], say: Say) -> None:
        work = [(key, make) for key, make in work if key not in self._compiled]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, (key, compiled) in enumerate(
                zip((key for key, _ in work), pool.map(lambda one: one[1](), work), strict=True)
            ):
                self._compiled[key] = compiled
                say(f"compiling the steps: {number + 1} of {len(work)}")

    def step(self, shape: StepShape, packed: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Runs a step; the scores of its rows and of its prompts, still on the device."""
        first, *others = zip(self._stages, self._compiled[shape], strict=True)
        last = put_in_turn([self.last], [first[0].placement.rest])[0] if others else self.last
        first[0].arrays, *values = first[1](first[0].params, first[0].arrays, last, packed)
        for stage, compiled in others:
            sent = put_in_turn(values, [stage.placement.rest] * len(values))
            stage.arrays, *values = compiled(stage.params, stage.arrays, packed, *sent)
        rows, prompts = values
        return rows, prompts

    def copy(self, source: int, target: int) -> None:
        """Copies what one slot of a contiguous cache holds to another."""
        pair = np.array([source, target], np.int32)
        for stage, compiled in zip(self._stages, self._compiled[_COPY], strict=True):
            stage.arrays = compiled(stage.arrays, pair)

    def take(self, tokens: int, slot: int, table: Sequence[int]) -> Parcel:
        """The keys and values of a sequence's first tokens, as of the steps that have been sent."""
        length, place = self._place(tokens, slot, table)
        stages = zip(self._stages, self._compiled[_TAKE, length], strict=True)
        return Parcel(tokens, [layer for stage, compiled in stages for layer in compiled(stage.arrays, place)])

    def put(self, parcel: Parcel, slot: int, table: Sequence[int]) -> None:
        """Writes what another cache had to this one, split as this one is."""
        length, place = self._place(parcel.tokens, slot, table)
        for number, (stage, compiled) in enumerate(zip(self._stages, self._compiled[_PUT, length], strict=True)):
            own, shardings = self._of_stage(number, parcel.layers), self._of_parcel(number)
            leaves = put_in_turn(jax.tree.leaves(own), jax.tree.leaves(shardings))
            stage.arrays = compiled(stage.arrays, jax.tree.unflatten(jax.tree.structure(shardings), leaves), place)

    def begin(self, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Counts the tokens of a slot's sequence, for draws that look at what was there."""
        self._seen = self._compiled[_BEGIN](self._seen, history(self._longest, slot, prompt, generated))

    def draw(self, kind: Kind, scores: jax.Array, packed: np.ndarray, shapes: np.ndarray | None = None) -> jax.Array:
        """Draws tokens, for `Drawn.unpack`; they are on their way to the host, and known to the next step at once."""
        compiled = self._compiled[kind, len(packed)]
        if kind is Kind.SHAPED:
            self.last, self._seen, drawn = compiled(scores, self.last, self._seen, packed, shapes)
        else:
            self.last, drawn = compiled(scores, self.last, packed)
        drawn.copy_to_host_async()
        return drawn

    def _compile_step(self, shape: StepShape) -> list[Compiled]:
        packed = jax.ShapeDtypeStruct((shape.size,), jnp.int32)
        received: list[Any] = [_types(self.last), packed]
        compiled_parts = []
        for number, (stage, part) in enumerate(zip(self._stages, self._parts(shape), strict=True)):
            assert part.params == self._parts_of_params[number], "every step of a stage reads the same parameters"
            place, arrays = stage.placement, self._of_stage(number, stage.placement.arrays)
            function = jax.jit(
                part.run,
                donate_argnums=1,
                in_shardings=(_shardings(stage.params), arrays, *[place.rest] * len(received)),
                out_shardings=(arrays, *[place.rest] * part.sends),
            )
            lowered = function.lower(_types(stage.params), _types(stage.arrays), *received)
            sent = jax.tree.leaves(lowered.out_info[1:])
            received = [packed, *(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in sent)]
            compiled_parts.append(in_turn(lowered.compile(), place.rest.device_set))
        return compiled_parts

    def _parts(self, shape: StepShape) -> list[StagePart]:
        step = partial(self.decoder.step, shape)
        if len(self._stages) == 1:
            return [StagePart(tuple(range(len(jax.tree.leaves(self._params)))), 2, step)]
        packed = jax.ShapeDtypeStruct((shape.size,), jnp.int32)
        return cut(step, self.decoder.params(), self.decoder.arrays(), _types(self.last), packed, self._bounds)

    def _deal(self, shape: StepShape) -> None:
        """Brings to each of several stages the parameters that it reads, which are the same in every step."""
        parts = self._parts(shape)
        self._parts_of_params = [part.params for part in parts]
        if len(parts) > 1:
            for stage, part in zip(self._stages, parts, strict=True):
                leaves, shardings = jax.tree.leaves(self._params), jax.tree.leaves(stage.placement.params)
                stage.params = [jax.device_put(leaves[n], shardings[n]) for n in part.params]
            self._params = None  # what each stage has is all there is

    def _compile_copy(self) -> list[Compiled]:
        pair = jax.ShapeDtypeStruct((2,), jnp.int32)
        return [self._compile_on(number, self.decoder.copied, [pair]) for number in range(len(self._stages))]

    def _compile_take(self, length: int) -> list[Compiled]:
        take, place = partial(self.decoder.take, length), self._place_type(length)
        return [self._compile_on(number, take, [place], taken=True) for number in range(len(self._stages))]

    def _compile_put(self, length: int) -> list[Compiled]:
        one = jax.ShapeDtypeStruct((length, self.decoder.kv_heads, self.decoder.head_dim), self.decoder.config.dtype)
        parcels = [jax.tree.map(lambda _: one, self._of_parcel(number)) for number in range(len(self._stages))]
        place = self._place_type(length)
        return [self._compile_on(number, self.decoder.put, [parcel, place]) for number, parcel in enumerate(parcels)]

    def _compile_on(self, number: int, function: Compiled, given: Sequence[Any], taken: bool = False) -> Compiled:
        """Compiles what changes the cache of a stage, or what is taken out of it; a parcel may come before numbers."""
        stage = self._stages[number]
        arrays, rest = self._of_stage(number, stage.placement.arrays), stage.placement.rest
        jitted = jax.jit(
            function,
            donate_argnums=() if taken else 0,
            in_shardings=(arrays, *[self._of_parcel(number)] * (len(given) - 1), rest),
            out_shardings=self._of_parcel(number) if taken else arrays,
        )
        return in_turn(jitted.lower(_types(stage.arrays), *given).compile(), rest.device_set)

    def _of_stage(self, number: int, layers: PyTree) -> PyTree:
        return layers[self._bounds[number] : self._bounds[number + 1]]

    def _of_parcel(self, number: int) -> list[Any]:
        """The shardings of a stage's part of a parcel: a pair for each layer."""
        layers = self._of_stage(number, self._stages[number].placement.arrays)
        pairs = [jax.tree.leaves(layer)[:2] for layer in layers]
        return [(of_parcel(pair[0]), of_parcel(pair[-1])) for pair in pairs]

    def _place_type(self, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2 + self.decoder.cache.width(length),), jnp.int32)

    def _place(self, tokens: int, slot: int, table: Sequence[int]) -> tuple[int, np.ndarray]:
        """The compiled length for so many tokens, and the numbers that say where they are."""
        length = next(length for length in self._lengths if length >= tokens)
        place = np.zeros(2 + self.decoder.cache.width(length), np.int32)
        place[:2], blocks = (tokens, slot), table[: len(place) - 2]
        place[2 : 2 + len(blocks)] = blocks
        return length, place

    def _compile_begin(self) -> Compiled:
        rest, line = self._stages[-1].placement.rest, jax.ShapeDtypeStruct((2 + self._longest,), jnp.int32)
        function = jax.jit(begun, donate_argnums=0, in_shardings=(rest, rest), out_shardings=rest)
        return in_turn(function.lower(_types(self._seen), line).compile(), rest.device_set)

    def _compile_draw(self, kind: Kind, rows: int) -> Compiled:
        config, rest = self.decoder.config, self._stages[-1].placement.rest
        compiled = _compiled_draw(kind, rows, self.slots, config.vocab, config.dtype, rest)
        return in_turn(compiled, rest.device_set)


@cache  # engines of several models may draw alike
def _compiled_draw(kind: Kind, rows: int, slots: int, vocab: int, dtype: str, rest: jax.sharding.Sharding) -> Compiled:
    scores = jax.ShapeDtypeStruct((rows, vocab), dtype)
    last, packed = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((slots,), Draw.blank(rows, slots).shape))
    if kind is not Kind.SHAPED:
        function = jax.jit(partial(draw, kind, MOST_LOGPROBS), in_shardings=(rest,) * 3, out_shardings=(rest,) * 2)
        return function.lower(scores, last, packed).compile()
    function = jax.jit(
        partial(draw_shaped, MOST_LOGPROBS), donate_argnums=2, in_shardings=(rest,) * 5, out_shardings=(rest,) * 3
    )
    seen, shapes = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((slots, vocab), Shape.blank(rows).shape))
    return function.lower(scores, last, seen, packed, shapes).compile()


def _types(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _shardings(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _zeros(kinds: PyTree, shardings: PyTree) -> PyTree:
    """Arrays of zeros, made where they stay."""
    make = jax.jit(lambda: jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds), out_shardings=shardings)
    return make()
