"""Fused attention of tokens that are split over devices: by blocks of queries and keys, whose results are merged.

A block's kernel gives the mixed values of its keys alone, and the logarithm of the softmax's normaliser; two blocks of
the same queries are merged by these (arXiv:2310.01889). The backward pass of a block, given the normaliser of all keys,
gives its part of each gradient. Under a causal mask device i of n has the i-th and the last but i-th of 2n parts of the
queries, so that with the keys of any other device it has two full blocks to compute: late queries with early keys, and
either its early queries with these, too, or its late queries with late keys (arXiv:2406.18485, llama 3).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import jax_compat
from meshwright.rules.base import Mixing
from meshwright.rules.families.attention import HEADS_BEFORE_TOKENS

_NUM_INPUTS = 10  # of the forward pass; the backward pass has three more
_LENGTHS = slice(4, 6)
_STATISTICS_TOKENS = 2  # the dim of the tokens in the normaliser

Arrays = tuple[jax.Array, ...]


class Block(NamedTuple):
    """Queries that meet keys.

    Attributes:
        arrays: Queries, keys and values; in the backward pass also normaliser, output and its cotangent.
        queries: The positions at which equal parts of the queries begin.
        keys: The same of the keys.
    """

    arrays: Arrays
    queries: Arrays
    keys: Arrays


def run(eqn: Any, mixing: Mixing, in_ring: bool, axes: tuple[str, ...], count: int, operands: Sequence[Any]) -> Arrays:
    """One device's parts of the results, given its parts of the operands.

    Args:
        eqn: The call.
        mixing: How the rule says that it is computed.
        in_ring: Whether keys are split and passed around; otherwise the device has all of them.
        axes: The mesh axes that split the tokens.
        count: How many devices that are.
        operands: The parts.
    """
    call = _Call(eqn, mixing.balanced, axes, count, operands)
    if not in_ring and eqn.params.get("sliding_window_length"):
        return call.windowed()
    if not in_ring and not mixing.balanced:
        return call.alone()
    results = call.backward(in_ring) if call.is_backward else call.forward(in_ring)
    kinds = [v.aval.dtype for v in eqn.outvars]
    return tuple(x.astype(kind) for x, kind in zip(results, kinds, strict=False))


def _halves(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    early, late = jnp.split(x, 2, dim)
    return early, late


class _Call:
    """One call on one device."""

    def __init__(self, eqn: Any, balanced: bool, axes: tuple[str, ...], count: int, operands: Sequence[Any]):
        self.eqn, self.balanced, self.axes, self.count = eqn, balanced, axes, count
        self.tokens = 2 if eqn.params["layout"] == HEADS_BEFORE_TOKENS else 1
        self.is_backward = len(operands) > _NUM_INPUTS
        self.operands = tuple(operands)
        # In the backward pass everything goes the other way round: XLA would take equal permutes for one, and keep what
        # was sent in the forward pass until then.
        self.is_mirrored = self.is_backward and balanced
        self.forth = -1 if self.is_backward and not balanced else 1
        self.index = self._mirrored(lax.axis_index(axes))
        lengths = operands[_LENGTHS]
        self.lengths = lengths if lengths[0].size else None
        self.is_causal = "CAUSAL" in str(eqn.params["mask_type"])

    # What a device computes.

    def forward(self, in_ring: bool) -> Arrays:
        """Mixed values and their normaliser, with keys passed around or at hand."""
        query, *own = map(self._exchanged, self.operands[:3]) if in_ring else self._mine()

        def step(state: Arrays, other: jax.Array, keys: Arrays) -> Arrays:
            return self._merge(state, self._met(query, other, keys))

        state = self._kernel([self._own_block((query, *own))], self.is_causal)[0]
        moving: Any = self._pass_on(tuple(own)) if in_ring else ()

        def trip(carry: Any, turn: jax.Array) -> tuple[Any, None]:
            moving, state = carry
            following = self._pass_on(moving) if in_ring else ()
            other = (self.index - self.forth * turn) % self.count
            return (following, step(state, other, moving if in_ring else self._keys_of(other))), None

        last = self.count - 1
        (moving, state), _ = lax.scan(trip, (moving, state), jnp.arange(1, last))
        other = (self.index - self.forth * last) % self.count
        mixed, statistics = step(state, other, moving if in_ring else self._keys_of(other))
        return self._returned(mixed), self._returned(statistics, _STATISTICS_TOKENS)

    def backward(self, in_ring: bool) -> Arrays:
        """Gradients of queries, keys and values; sums for keys and values go around with them, and then home."""
        query, key, value, *given = self.operands[:3] + self.operands[_NUM_INPUTS:]
        dims = (self.tokens, self.tokens, _STATISTICS_TOKENS, self.tokens, self.tokens)
        query, *about = (self._exchanged(x, d) for x, d in zip((query, *given), (dims[0], *dims[2:]), strict=True))
        own = (self._exchanged(key), self._exchanged(value)) if in_ring else self._mine()[1:]
        of_query, *sums = self._kernel([self._own_block((query, *own, *about))], self.is_causal)[0]
        moving: Any = self._pass_on(own) if in_ring else ()
        if not in_ring:
            zeros = [jnp.zeros(x.shape, jnp.float32) for x in (key, value)]
            sums = [self._add_keys(x, self.index, part) for x, part in zip(zeros, sums, strict=True)]

        def step(of_query: jax.Array, sums: Any, other: jax.Array, keys: Arrays) -> tuple[jax.Array, Any]:
            arrived = self._pass_on(tuple(sums)) if in_ring else sums
            more, *parts = self._met_back(query, other, keys, tuple(about))
            pairs = zip(arrived, parts, strict=True)
            added = [x + part if in_ring else self._add_keys(x, other, part) for x, part in pairs]
            return of_query + more, added

        def trip(carry: Any, turn: jax.Array) -> tuple[Any, None]:
            moving, of_query, sums = carry
            following = self._pass_on(moving) if in_ring else ()
            other = (self.index - self.forth * turn) % self.count
            return (following, *step(of_query, sums, other, moving if in_ring else self._keys_of(other))), None

        last = self.count - 1
        (moving, of_query, sums), _ = lax.scan(trip, (moving, of_query, sums), jnp.arange(1, last))
        other = (self.index - self.forth * last) % self.count
        of_query, sums = step(of_query, sums, other, moving if in_ring else self._keys_of(other))
        home = map(self._returned, self._pass_on(tuple(sums))) if in_ring else sums
        return self._returned(of_query), *home

    def alone(self) -> Arrays:
        """A part of the queries with all keys, under lengths of sequences alone."""
        begins = self.index * self.operands[0].shape[self.tokens]
        arrays = self.operands[:3] + self.operands[_NUM_INPUTS:]
        made = self._kernel([Block(arrays, (begins,), (jnp.zeros_like(begins),))], causal=False)[0]
        return self._in_their_types(made)

    def windowed(self) -> Arrays:
        """A part of the queries with the keys that its windows reach, behind rows that count for nothing.

        The first device has such rows at the end, since no keys lie before its own.
        """
        part, all_keys = (self.operands[n].shape[self.tokens] for n in (0, 1))
        reach = self.eqn.params["sliding_window_length"]
        reach = min(reach + reach % 2, all_keys - part)
        start = jnp.clip(self.index * part - reach, 0, all_keys - part - reach)
        offset = self.index * part - start

        def placed(x: jax.Array, dim: int) -> jax.Array:
            shape = list(x.shape)
            shape[dim] = part + reach
            return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, offset, dim)

        cut = partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=part + reach, axis=self.tokens)
        query, key, value, *given = self.operands[:3] + self.operands[_NUM_INPUTS:]
        dims = (_STATISTICS_TOKENS, self.tokens, self.tokens)
        about = (placed(x, d) for x, d in zip(given, dims, strict=False))
        arrays = (placed(query, self.tokens), cut(key), cut(value), *about)
        made = self._kernel([Block(arrays, (start,), (start,))], causal=True)[0]
        own = partial(lax.dynamic_slice_in_dim, start_index=offset, slice_size=part)
        if not self.is_backward:
            return self._in_their_types((own(made[0], axis=self.tokens), own(made[1], axis=_STATISTICS_TOKENS)))
        whole = (jnp.zeros(x.shape, jnp.float32) for x in (key, value))
        sums = (lax.dynamic_update_slice_in_dim(x, d, start, self.tokens) for x, d in zip(whole, made[1:], strict=True))
        return self._in_their_types((own(made[0], axis=self.tokens), *sums))

    # Blocks.

    def _own_block(self, arrays: Arrays) -> Block:
        """A device's queries with its own keys."""
        begins = self._begins(self.index, arrays[0].shape[self.tokens])
        return Block(arrays, begins, begins)

    def _begins(self, device: jax.Array, size: int) -> Arrays:
        """The positions at which the parts of a device begin, which has so many tokens."""
        if not self.balanced:
            return (device * size,)
        half = size // 2
        return device * half, (2 * self.count - 1 - device) * half

    def _pair(self, query: jax.Array, other: jax.Array, keys: Arrays, about: Arrays) -> tuple[jax.Array, list[Block]]:
        """The two full blocks of a device's queries with another's keys, and whether the second has early queries."""
        is_later = other < self.index
        own_at, other_at = (self._begins(n, query.shape[self.tokens]) for n in (self.index, other))
        dims = (self.tokens,) * 3 + (_STATISTICS_TOKENS, self.tokens, self.tokens)
        halves = [_halves(x, d) for x, d in zip((query, *keys, *about), dims, strict=False)]
        of_keys = (False, True, True, False, False, False)
        first = tuple(half[0] if is_key else half[1] for half, is_key in zip(halves, of_keys, strict=False))
        second = tuple(jnp.where(is_later, early, late) for early, late in halves)
        at = ((jnp.where(is_later, early, late),) for early, late in (own_at, other_at))
        return is_later, [Block(first, own_at[1:], other_at[:1]), Block(second, *at)]

    def _met(self, query: jax.Array, other: jax.Array, keys: Arrays) -> Arrays:
        """What a device's queries take from the keys of another: the mixed values and their normaliser."""
        if not self.balanced:
            own_at, other_at = (self._begins(n, query.shape[self.tokens]) for n in (self.index, other))
            return self._kernel([Block((query, *keys), own_at, other_at)], causal=False)[0]
        is_later, blocks = self._pair(query, other, keys, ())
        first, (mixed, statistics) = self._kernel(blocks, causal=False)
        early = mixed, jnp.where(is_later, statistics, -jnp.inf)
        late = self._merge(first, (mixed, jnp.where(is_later, -jnp.inf, statistics)))
        dims = (self.tokens, _STATISTICS_TOKENS)
        return tuple(jnp.concatenate(halves, dim) for *halves, dim in zip(early, late, dims, strict=True))

    def _met_back(self, query: jax.Array, other: jax.Array, keys: Arrays, about: Arrays) -> Arrays:
        """The parts of the gradients of a device's queries, and of another's keys and values, from their meeting."""
        if not self.balanced:
            own_at, other_at = (self._begins(n, query.shape[self.tokens]) for n in (self.index, other))
            return self._kernel([Block((query, *keys, *about), own_at, other_at)], causal=False)[0]
        is_later, blocks = self._pair(query, other, keys, about)
        first, second = self._kernel(blocks, causal=False)
        early = [jnp.where(is_later, x, 0) for x in second]
        late = [jnp.where(is_later, 0, x) for x in second]
        join = partial(jnp.concatenate, axis=self.tokens)
        of_query = join([early[0], first[0] + late[0]])
        return of_query, *(join([x + a, b]) for x, a, b in zip(first[1:], early[1:], late[1:], strict=True))

    def _merge(self, one: Arrays, other: Arrays) -> Arrays:
        """Mixed values of the same queries with some keys and with others, and the normaliser of all."""
        total = jnp.logaddexp(one[1], other[1])

        def weighted(mixed: jax.Array, statistics: jax.Array) -> jax.Array:
            weight = jnp.where(statistics == -jnp.inf, 0, jnp.exp(statistics - total))
            return mixed * self._along(weight)

        return weighted(*one) + weighted(*other), total

    def _along(self, statistics: jax.Array) -> jax.Array:
        """An array ``[batch, head, token]`` as it is multiplied with mixed values."""
        return (statistics if self.tokens == _STATISTICS_TOKENS else jnp.swapaxes(statistics, 1, 2))[..., None]

    # The kernel.

    def _kernel(self, blocks: Sequence[Block], causal: bool) -> list[Arrays]:
        """The results of blocks of equal shapes, as float32: one call, in which they are further examples."""
        arrays = [
            jnp.concatenate(same) if len(same) > 1 else same[0]
            for same in zip(*(b.arrays for b in blocks), strict=True)
        ]
        masks, rest = type(self.eqn.params["mask_type"]), list(self.operands[3:_NUM_INPUTS])
        mask = masks.CAUSAL if causal else masks.NO_MASK
        if self.lengths is not None:
            mask = masks.PADDING_CAUSAL if causal else masks.PADDING
            seen = self._seen(blocks)
            rest[1:3] = (jnp.maximum(count, 1) for count in seen)  # no kernel promises what it does for none
            rows, columns = (self._is_within(n, arrays[k].shape[self.tokens]) for k, n in enumerate(seen))
            sees = (seen[1] > 0)[:, None, None]
        params = self.eqn.params | {"mask_type": mask} | ({} if self.is_backward else {"is_training": True})
        if self.is_backward:
            if self.lengths is not None:
                arrays[5] = jnp.where(self._along(rows), arrays[5], 0)
            operands = (*arrays[:3], *rest, *arrays[3:])
        else:
            operands = (*arrays, *rest)
        made = [x.astype(jnp.float32) for x in jax_compat.bind(self.eqn.replace(params=params), operands)]
        if self.lengths is not None and self.is_backward:
            made[0] = jnp.where(self._along(rows & sees), made[0], 0)
            made[1:] = (jnp.where(self._along(columns), x, 0) for x in made[1:])
        elif self.lengths is not None:
            made = [jnp.where(self._along(rows), made[0], 0), jnp.where(sees, jnp.where(rows, made[1], 0), -jnp.inf)]
        return list(zip(*(jnp.split(x, len(blocks)) for x in made), strict=True))

    def _seen(self, blocks: Sequence[Block]) -> list[jax.Array]:
        """How many queries and keys of each example in blocks lie within its lengths; these are always the first."""
        assert self.lengths is not None
        found = []
        for which, lengths in enumerate(self.lengths):
            counts = []
            for block in blocks:
                begins = block.keys if which else block.queries
                size = block.arrays[which].shape[self.tokens] // len(begins)
                counts.append(sum(jnp.clip(lengths - at, 0, size) for at in begins))
            found.append(jnp.concatenate(counts).astype(lengths[0].dtype))
        return found

    def _is_within(self, counts: jax.Array, size: int) -> jax.Array:
        """Which of so many tokens of each example are among the first, as ``[batch, 1, token]``."""
        return (jnp.arange(size) < counts[:, None])[:, None, :]

    def _in_their_types(self, made: Arrays) -> Arrays:
        return tuple(x.astype(v.aval.dtype) for x, v in zip(made, self.eqn.outvars, strict=False))

    # What devices send each other.

    def _mirrored(self, index: Any) -> Any:
        """The number of a device in the ring, or the other way about."""
        return self.count - 1 - index if self.is_mirrored else index

    def _pass_on(self, arrays: Arrays) -> Arrays:
        ring = [(self._mirrored(i), self._mirrored((i + self.forth) % self.count)) for i in range(self.count)]
        return tuple(lax.ppermute(x, self.axes, ring) for x in arrays)

    def _exchanged(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """A device's neighbouring parts exchanged for an early and a late one, if masks ask for that."""
        return self._exchange(x, self.tokens if dim is None else dim, away=True) if self.balanced else x

    def _returned(self, x: jax.Array, dim: int | None = None) -> jax.Array:
        """An early and a late part exchanged for the device's own."""
        return self._exchange(x, self.tokens if dim is None else dim, away=False) if self.balanced else x

    def _exchange(self, x: jax.Array, dim: int, away: bool) -> jax.Array:
        """Device i has the parts 2i and 2i+1 of 2n, or i and 2n−1−i: of these, one is even and one is odd."""
        ways: list[Callable[[int], int]] = [lambda i: 2 * i, lambda i: 2 * i + 1]
        last = 2 * self.count - 1
        goals = [[self._mirrored(min(part(i), last - part(i))) for i in range(self.count)] for part in ways]
        pairs = [[(i, goal) if away else (goal, i) for i, goal in enumerate(goals_)] for goals_ in goals]
        is_even = self.index % 2 == 0
        one, other = jnp.split(x, 2, dim)
        if not away:
            one, other = jnp.where(is_even, one, other), jnp.where(is_even, other, one)
        one, other = (lax.ppermute(half, self.axes, pair) for half, pair in zip((one, other), pairs, strict=True))
        if away:
            one, other = jnp.where(is_even, one, other), jnp.where(is_even, other, one)
        return jnp.concatenate([one, other], dim)

    def _mine(self) -> Arrays:
        """A device's queries, with their own keys and values out of all."""
        return self._exchanged(self.operands[0]), *self._keys_of(self.index)

    def _keys_of(self, device: jax.Array) -> Arrays:
        """The keys and values of a device, out of all."""
        size = self.operands[1].shape[self.tokens] // self.count
        begins = self._begins(device, size)
        part = partial(lax.dynamic_slice_in_dim, slice_size=size // len(begins), axis=self.tokens)
        return tuple(jnp.concatenate([part(x, at) for at in begins], self.tokens) for x in self.operands[1:3])

    def _add_keys(self, total: jax.Array, device: jax.Array, parts: jax.Array) -> jax.Array:
        """Gradients of all keys, with those of a device's keys added."""
        begins = self._begins(device, parts.shape[self.tokens])
        for at, part in zip(begins, jnp.split(parts, len(begins), self.tokens), strict=True):
            known = lax.dynamic_slice_in_dim(total, at, part.shape[self.tokens], self.tokens)
            total = lax.dynamic_update_slice_in_dim(total, known + part, at, self.tokens)
        return total
