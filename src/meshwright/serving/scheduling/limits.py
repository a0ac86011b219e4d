"""How much of everything a scheduler may use."""

from dataclasses import dataclass, fields

from meshwright.errors import ServingError

#: Steps are padded to the next rung. Up to 64 rows a product takes as long as its weights take to read, and rungs are
#: far apart; from there on every row counts, and they double. By the prices of eight models and chips a step takes 9%
#: longer than one of its own rows in the mean, and 17% where rungs are four times apart; a rung for each doubling below
#: 64 would save less than 1% more (`benchmarks/serving_rungs.py`).
_FEW, _FEW_APART, _MANY_APART = 64, 8, 2


def row_ladder(slots: int) -> tuple[int, ...]:
    """The numbers of rows that are compiled.

    >>> row_ladder(384), row_ladder(4)
    ((1, 8, 64, 128, 256, 384), (1, 4))
    """
    steps = [1]
    while (following := steps[-1] * (_FEW_APART if steps[-1] < _FEW else _MANY_APART)) < slots:
        steps.append(following)
    return (*steps, slots) if slots > 1 else (1,)


@dataclass(frozen=True)
class Limits:
    """What the requests of one engine share.

    A cache of contiguous slots is the case of one block per sequence: `block_size=max_len, blocks=slots`; prefixes are
    reused in pieces of `reuse` tokens then.

    Attributes:
        slots: The most sequences in one step.
        block_size: Tokens per block of the cache.
        blocks: Blocks of the cache.
        chunk: The most tokens of prompts in one step.
        token_budget: The most tokens in one step, of prompts and of sequences that generate.
        queue: The most requests that wait; one more is refused.
        max_len: The most tokens of one sequence, its prompt included.
        reuse: Tokens of a piece of a prefix that contiguous slots have in common; 0 where blocks are shared.
        groups: Groups of devices to which slots are dealt evenly, each of which attends to its own.
    """

    slots: int
    block_size: int
    blocks: int
    chunk: int
    token_budget: int
    queue: int
    max_len: int
    reuse: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), int(field.name != "reuse")
            if value < least:
                raise ServingError(f"{field.name} is {value}; give at least {least}")
        if self.slots % self.groups:
            raise ServingError(f"{self.slots} slots cannot be dealt to {self.groups} groups; give a multiple of them")
        if self.token_budget < self.slots:
            raise ServingError(
                f"token_budget is {self.token_budget}, less than one token for each of {self.slots} slots; "
                f"give at least {self.slots}"
            )

    @property
    def rungs(self) -> tuple[int, ...]:
        """The numbers of sequences that steps are compiled for."""
        return tuple(self.groups * rung for rung in row_ladder(self.slots // self.groups))

    @property
    def piece(self) -> int:
        """Tokens of a piece of a prompt that another prompt may share."""
        return self.reuse or self.block_size

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def most_tokens(self) -> int:
        """The longest sequence that can be served, by `max_len` and by the cache as a whole.

        The last token of a sequence is never in the cache, since nothing is computed from it.
        """
        return min(self.max_len, self.blocks * self.block_size + 1)
