"""Contractions, blocks and segments as plain data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

_DERIVATIVE = re.compile(r"(?:transpose\()?jvp\(([^()]*)\)\)?")


@dataclass(frozen=True, slots=True)
class Contraction:
    """One contraction or look-up of a block.

    Attributes:
        operation: Its index in the graph.
        label: Its scopes and primitive.
        phase: ``forward``, ``backward`` or ``update``.
        enters: Whether its operands come from outside of the block, so that its split is the block's choice.
        data: The position of the operand that is not the weights.
        loops: For each type the indices of its loops that can be split: ``rows`` index the data and the result,
            ``columns`` the weights and the result, ``batch`` all three, and ``contracted`` both operands.
        sizes: The sizes of these loops.
    """

    operation: int
    label: str
    phase: str
    enters: bool
    data: int
    loops: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        """Its label without the words that differentiation adds."""
        scopes = _DERIVATIVE.sub(r"\1", self.label).split("/")
        return "/".join(part for part in scopes if part)

    @property
    def choices(self) -> tuple[str, ...]:
        """The types of loops that can be split."""
        return tuple(self.loops)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        names = ("operation", "label", "phase", "enters")
        return {name: getattr(self, name) for name in names} | {
            "loops": {name: list(sizes) for name, sizes in self.sizes.items()}
        }


@dataclass(frozen=True, slots=True)
class Block:
    """Operations whose split follows from the split of the contractions that enter the block.

    Attributes:
        number: Its position in the program.
        operations: Indices of its forward and backward operations, in program order.
        updates: Indices of the operations that update its parameters.
        contractions: All its contractions, forward ones first.
        fingerprint: Equal for blocks that do the same work.
        trips: How often it runs in one step: more than once inside a loop.
    """

    number: int
    operations: tuple[int, ...]
    updates: tuple[int, ...]
    contractions: tuple[Contraction, ...]
    fingerprint: str
    trips: float

    @property
    def entries(self) -> tuple[Contraction, ...]:
        """The contractions whose split is chosen."""
        return tuple(c for c in self.contractions if c.enters)

    @property
    def choices(self) -> tuple[str, ...]:
        """The types of loops that all entries can split."""
        return tuple(name for name in self.entries[0].choices if all(name in e.choices for e in self.entries))

    @property
    def label(self) -> str:
        """The name of its first entry."""
        return self.entries[0].label

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "number": self.number,
            "fingerprint": self.fingerprint,
            "choices": list(self.choices),
            "trips": self.trips,
            "operations": list(self.operations),
            "updates": list(self.updates),
            "contractions": [c.to_json() for c in self.contractions],
        }


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of blocks that the program repeats, or a single block.

    Attributes:
        fingerprint: Equal for segments that do the same work, in this program and in others.
        blocks: The numbers of the blocks of one occurrence, the one in the middle: its neighbours are typical.
        operations: Indices of that occurrence's operations, in program order.
        occurrences: For every occurrence, in order, its operations.
        block_numbers: For every occurrence, the numbers of its blocks.
        choices: How many choices each block has.
        trips: How often each occurrence runs in one step.
    """

    fingerprint: str
    blocks: tuple[int, ...]
    operations: tuple[int, ...]
    occurrences: tuple[tuple[int, ...], ...]
    block_numbers: tuple[tuple[int, ...], ...]
    choices: tuple[int, ...]
    trips: float

    @property
    def count(self) -> float:
        """How often the segment runs in one step."""
        return len(self.occurrences) * self.trips

    @property
    def num_combinations(self) -> int:
        """The size of its search space: one choice for each block."""
        return prod(self.choices)

    @property
    def space(self) -> str:
        """The search space as a product, such as ``3·3·3·4``."""
        return "·".join(map(str, self.choices))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "fingerprint": self.fingerprint,
            "blocks": list(self.blocks),
            "occurrences": [list(numbers) for numbers in self.block_numbers],
            "trips": self.trips,
            "space": self.space,
            "operations": list(self.operations),
        }
