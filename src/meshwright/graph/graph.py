"""The Graph: a traced function as one flat list of operations on values, with where each of them comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from meshwright.rules.base import Signature, TensorType

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Op(NamedTuple):
    """One operation.

    Attributes:
        signature: Primitive, parameters and types; shared by equal operations.
        inputs: Ids of the values it reads.
        outputs: Ids of the values it makes.
        scope: Name scopes around it, outermost first.
        phase: ``forward``, ``backward`` or ``update``.
        trips: How often it runs in one step: more than once inside loops.
        recomputed: Whether it repeats forward work because of `jax.checkpoint`.
        serial: Its place in the order in which the traced program is walked; stable while nothing is removed.
        equation: The JAX equation it was made from, None for the tracer's own operations.
    """

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: str
    phase: str
    trips: float
    recomputed: bool
    serial: int
    equation: Any

    @property
    def primitive(self) -> str:
        return self.signature.primitive

    @property
    def label(self) -> str:
        """A name for people: scopes and primitive."""
        return f"{self.scope}/{self.primitive}" if self.scope else self.primitive

    @property
    def source(self) -> str:
        """The user's source line."""
        from meshwright import jax_compat

        return jax_compat.source_line(self.equation) if self.equation is not None else ""


@dataclass(frozen=True, slots=True)
class Tie:
    """A loop's carry: the value made by one trip takes the place of the value read by the next."""

    made: int
    carry: int
    trips: float


@dataclass(frozen=True)
class Graph:
    """A traced function.

    Attributes:
        types: Type of each value, by value id.
        ops: Operations in the order they run.
        inputs: Value ids of the arguments' leaves, with `input_paths` beside them.
        outputs: Value ids of the results' leaves, with `output_paths` beside them.
        constants: Values that are known without running anything.
        donated: Ids of the inputs whose memory the results may take over.
        ties: Loop carries.
        loops: Index ranges ``[start, stop)`` of operations that repeat, outer loops too.
        state: For each output position, the input position whose next value it is.
    """

    types: tuple[TensorType, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    input_paths: tuple[str, ...]
    outputs: tuple[int, ...]
    output_paths: tuple[str, ...]
    constants: frozenset[int]
    donated: frozenset[int]
    ties: tuple[Tie, ...]
    loops: tuple[tuple[int, int], ...]
    state: Mapping[int, int]

    @cached_property
    def sizes(self) -> list[int]:
        """Number of elements of each value."""
        known = {kind: prod(kind.shape) for kind in set(self.types)}
        return [known[kind] for kind in self.types]

    @cached_property
    def producer(self) -> dict[int, int]:
        """Index of the operation that makes each value; inputs and constants have none."""
        return {value: i for i, op in enumerate(self.ops) for value in op.outputs}

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """Indices of the operations that read each value."""
        found: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            for value in dict.fromkeys(op.inputs):
                found.setdefault(value, []).append(i)
        return found
