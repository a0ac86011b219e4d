"""Scores that a request changes before a token is drawn: penalties for tokens that were there, and tokens it favours.

What was there is counted on the device, one number for each slot and token, since the host does not know the last token
when the next one is drawn. As in vLLM, favours come first, then penalties; a repetition counts in the prompt as well.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.serving.requests import MOST_FAVOURS, Sampling
from meshwright.zoo.layers import Array

#: Added to a token's count where the prompt has it.
_IN_PROMPT = 1 << 24
_PENALTIES = 3


class Shape(NamedTuple):
    """How the scores of each sequence are changed, one row of numbers for each.

    Attributes:
        presence: Taken from the score of a token that was generated.
        frequency: Taken from it for each time.
        repetition: By which the score of a token that was there is divided, or multiplied where it is negative.
        tokens: Those that are favoured, -1 for none.
        favours: What is added to their scores.
    """

    presence: Array
    frequency: Array
    repetition: Array
    tokens: Array
    favours: Array

    @staticmethod
    def blank(rows: int) -> np.ndarray:
        """A packed array of rows that change nothing."""
        packed = np.zeros((rows, _PENALTIES + 2 * MOST_FAVOURS), np.int32)
        packed[:, 2] = np.float32(1).view(np.int32)
        packed[:, _PENALTIES : _PENALTIES + MOST_FAVOURS] = -1
        return packed

    @classmethod
    def row(cls, asked: Sampling) -> np.ndarray:
        """The row of one sequence."""
        row = cls.blank(1)[0]
        floats, favours = row.view(np.float32), asked.logit_bias
        floats[:_PENALTIES] = asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty
        row[_PENALTIES : _PENALTIES + len(favours)] = [token for token, _ in favours]
        at = _PENALTIES + MOST_FAVOURS
        floats[at : at + len(favours)] = [favour for _, favour in favours]
        return row

    @classmethod
    def unpack(cls, packed: Array) -> "Shape":
        """The reverse, for all rows."""
        floats, at = jax.lax.bitcast_convert_type(packed, jnp.float32), _PENALTIES + MOST_FAVOURS
        return cls(floats[:, 0], floats[:, 1], floats[:, 2], packed[:, _PENALTIES:at], floats[:, at:])


def shaped(scores: Array, seen: Array, packed: Array) -> Array:
    """Scores as their requests change them, in float32.

    Args:
        scores: (rows, vocab).
        seen: How often each token was there, likewise, as `begun` counts.
        packed: What `Shape.unpack` reads.
    """
    how = Shape.unpack(packed)
    lines, past = jnp.arange(len(scores))[:, None], scores.shape[1]
    tokens = jnp.where(how.tokens >= 0, how.tokens, past)
    scores = scores.astype(jnp.float32).at[lines, tokens].add(how.favours, mode="drop")
    factor = jnp.where(seen > 0, how.repetition[:, None], 1)
    scores = jnp.where(scores > 0, scores / factor, scores * factor)
    count = seen % _IN_PROMPT
    return scores - how.frequency[:, None] * count - how.presence[:, None] * (count > 0)


def history(length: int, slot: int, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
    """What `begun` is told: the slot, how long the prompt is, and all tokens, filled up to a length."""
    line = np.full(2 + length, -1, np.int32)
    line[:2] = slot, len(prompt)
    line[2 : 2 + len(prompt) + len(generated)] = [*prompt, *generated]
    return line


def begun(seen: Array, line: Array) -> Array:
    """The counts of all slots, with those of one slot begun anew from what its sequence holds."""
    slot, length, tokens = line[0], line[1], line[2:]
    places = jnp.where(tokens >= 0, tokens, seen.shape[1])
    of_prompt = jnp.arange(len(tokens)) < length
    row = jnp.zeros(seen.shape[1], seen.dtype)
    row = row.at[jnp.where(of_prompt, places, seen.shape[1])].set(_IN_PROMPT, mode="drop")
    row = row.at[jnp.where(of_prompt, seen.shape[1], places)].add(1, mode="drop")
    return seen.at[slot].set(row)
