"""The blocks of the cache: which are free, which are used by how many requests, and which hold a prefix worth keeping.

A block that is full and computed may get a *name*, the digest of all tokens up to its end (`Request.names`), so that
another request that begins with the same tokens shares it. A shared block is only ever read: whoever shares it has its
own next block to write to. A named block that nobody uses any more is kept until its room is needed; the one that was
used least recently goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """All blocks of a cache, by number from 0."""

    def __init__(self, blocks: int):
        self._blocks = blocks
        self._free = list(range(blocks - 1, -1, -1))  # taken from the end, so low numbers first
        self._users = [0] * blocks
        self._name_of: list[bytes | None] = [None] * blocks
        self._block_named: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # named blocks without users, least recently used first

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return self._blocks

    @property
    def available(self) -> int:
        """How many blocks can be allocated now: free ones, and named ones without users."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """How many blocks have users."""
        return self._blocks - self.available

    def users(self, block: int) -> int:
        """How many requests use a block."""
        return self._users[block]

    def allocate(self, count: int) -> list[int]:
        """Takes blocks for writing, each with one user; there must be as many `available`."""
        assert count <= self.available, f"{count} blocks asked for, {self.available} available"
        fresh = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            self._users[block] = 1
            fresh.append(block)
        return fresh

    def prefix(self, names: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest prefix known of these names; they are not taken yet (`share`)."""
        blocks = []
        for name in names:
            block = self._block_named.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of some blocks have no users, so that sharing them takes from what is available."""
        return sum(1 for block in blocks if not self._users[block])

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a user to each of some blocks of `prefix`, which may only read them."""
        for block in blocks:
            if not self._users[block]:
                del self._idle[block]
            self._users[block] += 1

    def name(self, block: int, name: bytes) -> None:
        """Says what a block holds that is full and computed.

        If another block holds the same, that one keeps the name, and this one is free when its user leaves.
        """
        assert self._users[block], f"block {block} has no user"
        if self._name_of[block] is None and name not in self._block_named:
            self._name_of[block] = name
            self._block_named[name] = block

    def free(self, blocks: Sequence[int]) -> None:
        """Takes one user from each of a request's blocks, given in the order of its tokens.

        The last ones are to be used again first: a prefix without its end is of use, an end without its beginning not.
        """
        for block in reversed(blocks):
            assert self._users[block], f"block {block} is freed twice"
            self._users[block] -= 1
            if not self._users[block]:
                if self._name_of[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def _forget(self, block: int) -> None:
        name = self._name_of[block]
        assert name is not None
        del self._block_named[name]
        self._name_of[block] = None
