"""How much of everything a scheduler may use."""

from dataclasses import dataclass, fields

from meshwright.errors import ServingError


@dataclass(frozen=True)
class Limits:
    """What the requests of one engine share.

    A cache of contiguous slots is the case of one block per sequence: `block_size=max_len, blocks=slots`.

    Attributes:
        slots: The most sequences in one step.
        block_size: Tokens per block of the cache.
        blocks: Blocks of the cache.
        chunk: The most tokens of prompts in one step.
        token_budget: The most tokens in one step, of prompts and of sequences that generate.
        queue: The most requests that wait; one more is refused.
        max_len: The most tokens of one sequence, its prompt included.
    """

    slots: int
    block_size: int
    blocks: int
    chunk: int
    token_budget: int
    queue: int
    max_len: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ServingError(f"{field.name} is {value}; give at least 1")
        if self.token_budget < self.slots:
            raise ServingError(
                f"token_budget is {self.token_budget}, less than one token for each of {self.slots} slots; "
                f"give at least {self.slots}"
            )

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_size)

    def most_tokens(self) -> int:
        """The longest sequence that can be served, by `max_len` and by the cache as a whole.

        The last token of a sequence is never in the cache, since nothing is computed from it.
        """
        return min(self.max_len, self.blocks * self.block_size + 1)
