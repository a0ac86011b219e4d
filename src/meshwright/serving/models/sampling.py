"""Draws the next tokens on the device, each sequence with its own parameters and seed.

What a sequence draws depends on its seed and on how many tokens it has drawn, never on which others are in the batch.
Thresholds of top-k and top-p are found by bisection over the bits of the scores: that is exact, and takes 32 sums over
the vocabulary where a sort of it, on GPUs, takes longer than a step of the model.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.serving.models.shaping import shaped
from meshwright.zoo.layers import Array

#: How many tokens each sequence can keep from ending its text early; a few numbers for each row of each step.
MOST_STOPS = 8
#: No model knows as many; a larger number would not fit where the device reads it.
MOST_TOKENS = 2**31 - 1
#: The column that says whether stops are held back, and how many columns there are before theirs.
HELD, _COLUMNS = 7, 9


class Kind(IntEnum):
    """What a batch asks for, each kind with all that the ones before it do; each is compiled by itself."""

    GREEDY = 0
    DRAWN = 1  # at a temperature
    FILTERED = 2  # from the likeliest tokens only
    LISTED = 3  # with the likeliest tokens and their probabilities
    SHAPED = 4  # from scores that the requests change


class Draw(NamedTuple):
    """How the next token of each sequence is drawn, one number for each; packed into one array for the transfer.

    Attributes:
        slots: Where the drawn token is kept for the next step; past the last slot to keep it nowhere.
        drawn: How many tokens the sequence has drawn before.
        seed: 64 bits, as two numbers.
        temperature: 0 for the likeliest token.
        top_k: Of how many of the likeliest tokens to draw; 0 for all.
        top_p: How much probability these must have together.
        held: Whether no token of `stops` may be drawn yet.
        min_p: How likely a token must be, as a part of the likeliest one's probability.
        stops: Tokens that would end the text, -1 for none.
    """

    slots: Array
    drawn: Array
    seed: Array
    temperature: Array
    top_k: Array
    top_p: Array
    held: Array
    min_p: Array
    stops: Array

    @staticmethod
    def blank(rows: int, slots: int) -> np.ndarray:
        """A packed array of rows that draw for nobody."""
        packed = np.zeros((rows, _COLUMNS + MOST_STOPS), np.int32)
        packed[:, 0], packed[:, _COLUMNS:] = slots, -1
        return packed

    @staticmethod
    def row(
        index: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float, stops: tuple[int, ...]
    ) -> list[int]:
        """The numbers of one sequence after its slot; `stops` are those that must not be drawn yet."""
        bits = np.array([temperature, top_p, min_p], np.float32).view(np.int32)
        low, high = np.array([seed % 2**64], np.uint64).view(np.int32)
        padded = [*stops, *[-1] * (MOST_STOPS - len(stops))]
        return [index, int(low), int(high), int(bits[0]), top_k, int(bits[1]), bool(stops), int(bits[2]), *padded]

    @classmethod
    def unpack(cls, packed: Array) -> "Draw":
        """The reverse of `row`, for all rows."""
        seed = jax.lax.bitcast_convert_type(packed[:, 2:4], jnp.uint32)
        temperature, top_p, min_p = (jax.lax.bitcast_convert_type(packed[:, at], jnp.float32) for at in (4, 6, 8))
        held, stops = packed[:, HELD] > 0, packed[:, _COLUMNS:]
        return cls(packed[:, 0], packed[:, 1], seed, temperature, packed[:, 5], top_p, held, min_p, stops)


@dataclass(frozen=True)
class Drawn:
    """What was drawn, on the host.

    Attributes:
        tokens: The token of each row.
        logprobs: The logarithm of its probability, before temperature and filters.
        top_tokens: The likeliest tokens of each row, the likeliest first; empty unless they were listed.
        top_logprobs: Theirs.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def unpack(cls, packed: np.ndarray) -> "Drawn":
        """What `draw` returns, as an array of the host."""
        top = (packed.shape[1] - 2) // 2
        floats = packed.view(np.float32)
        return cls(packed[:, 0], floats[:, 1], packed[:, 2 : 2 + top], floats[:, 2 + top :])


def draw(
    kind: Kind, listed: int, scores: Array, last: Array, packed: Array, changed: Array | None = None
) -> tuple[Array, Array]:
    """Draws one token for each row.

    Args:
        kind: What the batch asks for.
        listed: How many of the likeliest tokens `Kind.LISTED` gives.
        scores: The scores of the next token, (rows, vocab).
        last: The last token of each slot.
        packed: What `Draw.unpack` reads.
        changed: The scores as their requests change them, from which is drawn; probabilities are of `scores`.

    Returns:
        The last token of each slot, and what `Drawn.unpack` reads.
    """
    how = Draw.unpack(packed)
    past = scores.shape[1]
    total = jax.nn.logsumexp(scores.astype(jnp.float32), axis=-1, keepdims=True)
    allowed = jnp.where(_held_back(how, past), -jnp.inf, (scores if changed is None else changed).astype(jnp.float32))
    tokens = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    if kind >= Kind.DRAWN:
        scaled = allowed / jnp.where(how.temperature > 0, how.temperature, 1)[:, None]
        if kind >= Kind.FILTERED:
            scaled = _filtered(scaled, how.top_k, how.top_p, how.min_p)
        noise = jax.vmap(lambda seed, index: _gumbel(seed, index, past))(how.seed, how.drawn)
        random = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
        tokens = jnp.where(how.temperature > 0, random, tokens)
    taken = jnp.take_along_axis(scores, tokens[:, None], axis=1).astype(jnp.float32) - total
    columns = [tokens[:, None], _bits(taken)]
    if kind >= Kind.LISTED:
        top, which = jax.lax.top_k(scores.astype(jnp.float32) - total, min(listed, past))
        columns += [which.astype(jnp.int32), _bits(top)]
    return last.at[how.slots].set(tokens, mode="drop"), jnp.concatenate(columns, axis=1)


def draw_shaped(
    listed: int, scores: Array, last: Array, seen: Array, packed: Array, shapes: Array
) -> tuple[Array, Array, Array]:
    """The same of scores that requests change; returns what was there by then as well.

    Args:
        listed: As in `draw`, and so are `scores`, `last` and `packed`.
        scores: The scores of the next token.
        last: The last token of each slot.
        seen: How often each token was there in each slot, as `shaping.begun` counts.
        packed: How is drawn.
        shapes: What `Shape.unpack` reads.
    """
    slots = packed[:, 0]
    changed = shaped(scores, seen.at[slots].get(mode="fill", fill_value=0), shapes)
    last, drawn = draw(Kind.SHAPED, listed, scores, last, packed, changed)
    return last, seen.at[slots, drawn[:, 0]].add(1, mode="drop"), drawn


def _held_back(how: Draw, vocab: int) -> Array:
    """Which tokens no row may draw yet; compared one by one, since a scatter would copy the scores of all tokens."""
    tokens = jnp.arange(vocab)
    stops = jnp.where(how.held[:, None], how.stops, -1)
    found = jnp.zeros((len(stops), vocab), bool)
    for number in range(MOST_STOPS):
        found |= stops[:, number, None] == tokens
    return found


def _gumbel(seed: Array, index: Array, vocab: int) -> Array:
    key = jax.random.wrap_key_data(seed[::-1], impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, index), (vocab,))


def _bits(values: Array) -> Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _filtered(scores: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Scores of which only the likeliest are left.

    First those of which each is likely enough, then by their number and by the probability that they have together.
    """
    vocab = scores.shape[1]
    chances = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    scores = jnp.where(chances >= min_p[:, None], scores, -jnp.inf)
    ordered = _ordered(scores)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    kept = ordered >= _threshold(ordered, jnp.ones_like(scores), wanted.astype(jnp.float32))
    chances = jnp.where(kept & (chances >= min_p[:, None]), chances, 0)
    enough = jnp.where(top_p < 1, top_p * jnp.sum(chances, axis=1), 0)
    nucleus = ordered >= _threshold(ordered, chances, enough)
    kept &= nucleus | (top_p >= 1)[:, None]
    return jnp.where(kept, scores, -jnp.inf)


def _ordered(scores: Array) -> Array:
    """Whole numbers in the order of the scores."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(ordered: Array, weights: Array, enough: Array) -> Array:
    """The largest number of each row for which what lies at or above it weighs enough, (rows, 1)."""

    def narrow(step: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        weight = jnp.sum(jnp.where(ordered >= candidate[:, None], weights, 0), axis=1)
        return jnp.where(weight >= enough, candidate, threshold)

    start = jnp.zeros(ordered.shape[0], jnp.uint32)
    return jax.lax.fori_loop(0, 32, narrow, start)[:, None]
