"""What one step computes, as arrays: the running sequences and the chunks of prompts, packed for one transfer.

Everything a step is told travels as one vector of whole numbers: a transfer costs the host the same for four bytes as
for forty thousand.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshwright.zoo.layers import Array


class Running(NamedTuple):
    """Running sequences, each with one token.

    Attributes:
        given: The token, or -1 for the one that the last step drew for the slot.
        at: Its position; -1 for a row without a sequence, which computes and is dropped.
        slots: The slot of the sequence.
        tables: Its blocks, (rows, blocks of the longest sequence).
    """

    given: Array
    at: Array
    slots: Array
    tables: Array

    @property
    def active(self) -> Array:
        return self.at >= 0

    @property
    def positions(self) -> Array:
        """Positions that exist, for rows without sequences as well."""
        return jnp.maximum(self.at, 0)


class Prompts(NamedTuple):
    """Chunks of prompts, padded to one length.

    Attributes:
        tokens: The tokens, (sequences, tokens).
        starts: The position of each chunk's first token.
        counts: How many tokens it has; 0 for none.
        slots: The slot of the sequence.
        tables: Its blocks.
        fresh: Whether all chunks begin their sequences.
    """

    tokens: Array
    starts: Array
    counts: Array
    slots: Array
    tables: Array
    fresh: bool

    @property
    def positions(self) -> Array:
        """The position of each token, (sequences, tokens)."""
        return self.starts[:, None] + jnp.arange(self.tokens.shape[1])

    @property
    def active(self) -> Array:
        """Which tokens are no padding."""
        return jnp.arange(self.tokens.shape[1]) < self.counts[:, None]


@dataclass(frozen=True, order=True)
class StepShape:
    """The sizes that a step is compiled for.

    Attributes:
        rows: Running sequences.
        prompts: Chunks of prompts; 0 for none.
        tokens: Tokens of each.
        fresh: Whether all chunks begin their sequences.
        width: Blocks in the tables of sequences.
    """

    rows: int
    prompts: int
    tokens: int
    fresh: bool
    width: int

    @property
    def size(self) -> int:
        """Numbers in the packed vector."""
        return self.rows * (3 + self.width) + self.prompts * (3 + self.width + self.tokens)

    def packed(self, fill_table: int) -> np.ndarray:
        """A vector of rows and prompts without sequences, to be filled through `unpack`."""
        vector = np.full(self.size, -1, np.int32)
        rows, prompts = self.unpack(vector)
        rows.slots[:], rows.tables[:] = np.arange(self.rows), fill_table
        prompts.tokens[:], prompts.starts[:], prompts.counts[:] = 0, 0, 0
        prompts.slots[:], prompts.tables[:] = 0, fill_table
        return vector

    def unpack(self, vector: Any) -> tuple[Running, Prompts]:
        """The parts of a packed vector, views of it where it is NumPy's."""
        columns = vector[: self.rows * (3 + self.width)].reshape(3 + self.width, self.rows)
        rows = Running(columns[0], columns[1], columns[2], columns[3:].T)
        rest = vector[self.rows * (3 + self.width) :].reshape(3 + self.width + self.tokens, self.prompts)
        tables = rest[3 : 3 + self.width].T
        return rows, Prompts(rest[3 + self.width :].T, rest[0], rest[1], rest[2], tables, self.fresh)
