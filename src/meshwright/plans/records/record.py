"""The record of a plan: the traced program and the problem that was solved, as plain arrays with names.

A fresh plan's record is made from its graph; a saved plan carries it, so that its decisions can be explained, priced
again and drawn without the function and without JAX.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Floats, Ints
from meshwright.plans.records.traced_program import Kept, Nest, RecordedProgram
from meshwright.solver import ChoiceProblem
from meshwright.solver.problem.copies import Copied, EdgeKey, Lifetimes, Route, Spans, copies_made
from meshwright.solver.problem.priced import Usage, choice_problem, joined_s
from meshwright.strategy.sharding import Axes

MEMORY_ROLES = ("parameters", "optimizer", "data", "gradients", "activations", "temporaries", "copies")


@dataclass(frozen=True)
class Node(Kept):
    """One node of the problem: tied groups of operations, arguments, or shared copies of a value.

    Attributes:
        label: An argument's path with ``*`` for the parts that differ, an operation's label, or the value copied.
        phase: Number of its phase, as in `RecordedProgram`; -1 for arguments.
        num: How many are tied; a stage may have a part of one, where a loop's trips are layers.
        paths: The arguments' paths; none for operations.
        type: Number of the type of its first result.
        codes: That value's sharding, for each strategy.
        compute: Seconds of one of them, for each strategy.
        sent: ``(kind, axes, seconds)`` of its collectives, seconds for each strategy.
        allowed: Which strategies the method allows.
    """

    label: str
    phase: int
    num: float
    paths: Sequence[str]
    type: int
    codes: Ints
    compute: Floats
    sent: Sequence[tuple[str, Sequence[int], Floats]]
    allowed: NDArray[np.bool_]


@dataclass(frozen=True)
class Edge(Kept):
    """A value that one node reads from another.

    Attributes:
        source, place, reader, slot: As in `Folded.edges`.
        num: How often it occurs.
        value: A name of the value.
        type: Number of its type.
        num_bytes: Its size, not split.
        made: Its sharding for each strategy of the source.
        needed: The sharding that each strategy of the reader needs.
        free: Where the reader has already paid for the resharding.
        table: Costs, over distinct shardings made and distinct pairs of sharding needed and free.
        start, stop: When each occurrence's copy is live.
        ahead: The start of that interval if the copy needs communication; empty for `start`.
        cut: Whether readers slice their part out of the value themselves without communication; empty for no.
        offers, settling, takes: Where the source's partial sum may be reduced together with the reader's, as in
        `joined_s`; empty where not.
    """

    source: int
    place: int
    reader: int
    slot: int
    num: float
    value: str
    type: int
    num_bytes: int
    made: Ints
    needed: Ints
    free: NDArray[np.bool_]
    table: Floats
    start: Ints
    stop: Ints
    ahead: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    cut: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))
    offers: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    settling: Floats = field(default_factory=lambda: np.zeros(0))
    takes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @cached_property
    def matrix(self) -> Floats:
        """Seconds of resharding minus the savings, by strategies of both."""
        return self.resharding if not len(self.offers) else self.resharding - self.joined

    @cached_property
    def joined(self) -> Floats:
        """Seconds saved where the source's partial sum is reduced together with the reader's."""
        return joined_s(self.offers, self.settling, self.takes) if len(self.offers) else np.zeros((1, 1))

    @cached_property
    def resharding(self) -> Floats:
        rows = np.unique(self.made, return_inverse=True)[1]
        columns = np.unique(2 * self.needed + self.free, return_inverse=True)[1]
        return self.table[rows[:, None], columns[None, :]]


@dataclass(frozen=True)
class Problem(Kept):
    """The folded choice problem with its names and its memory; a `Priced` one.

    Attributes:
        sizes: Sizes of the mesh's axes.
        nodes, edges: See there.
        extra: Costs that results with a fixed sharding add to a node: ``(node, seconds for each strategy)``.
        num_steps, column_class, column_bytes, column, start, stop, share: As in `Usage`.
        role: The role of each column: an index of `MEMORY_ROLES`.
        choice: The strategy that was chosen for each node.
        limit: Bytes allowed on each device; None for no limit.
        unlimited: The strategy of each node in the best plan without that limit; empty where it is not known.
        once: Of a stage's nodes, the seconds that are spent once a step, not with every microbatch:
            ``(node, seconds for each strategy)``.
    """

    sizes: Sequence[int]
    nodes: Sequence[Node]
    edges: Sequence[Edge]
    extra: Sequence[tuple[int, Floats]]
    num_steps: int
    column_class: Sequence[int]
    column_bytes: Sequence[Floats]
    role: Sequence[int]
    column: Ints
    start: Ints
    stop: Ints
    share: Floats
    choice: Ints
    limit: float | None
    unlimited: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    once: Sequence[tuple[int, Floats]] = ()

    @cached_property
    def axes(self) -> Axes:
        return Axes(tuple(self.sizes))

    @cached_property
    def copies(self) -> list[float]:
        return [node.num for node in self.nodes]

    @cached_property
    def costs(self) -> list[Floats]:
        """Costs of one of each node's groups, whatever the method allows."""
        costs = [node.compute + sum((s for *_, s in node.sent), np.zeros(len(node.codes))) for node in self.nodes]
        for which, seconds in self.extra:
            costs[which] = costs[which] + seconds
        return costs

    @cached_property
    def matrices(self) -> dict[EdgeKey, tuple[float, Floats]]:
        return {(e.source, e.place, e.reader, e.slot): (e.num, e.matrix) for e in self.edges}

    @cached_property
    def memory(self) -> Usage:
        usage = Usage(self.num_steps)
        usage.column_class, usage.column_bytes = list(self.column_class), list(self.column_bytes)
        usage.take(self.column, self.start, self.stop, self.share)
        return usage

    @cached_property
    def copied(self) -> dict[EdgeKey, Copied]:
        """The copies along each edge."""
        copies = {}
        for e in self.edges:
            saved = e.joined if len(e.offers) else None
            about = (e.made, e.needed, e.free, e.resharding, saved, e.num_bytes)
            ahead, cut = (e.ahead, e.cut) if len(e.ahead) else (e.start, np.zeros(len(e.start), bool))
            live = Lifetimes(e.start, e.stop, ahead, cut)
            copies[e.source, e.place, e.reader, e.slot] = Copied(self.axes, *about, live)
        return copies

    def problem(
        self,
        times: Mapping[int, float],
        limit: float | None,
        routes: Mapping[EdgeKey, Route] = MappingProxyType({}),
        byte_prices: Mapping[int, float] = MappingProxyType({}),
    ) -> ChoiceProblem:
        """As `Formulation.problem`; strategies that the method forbids are infeasible."""
        costs = [np.where(n.allowed, cost, np.inf) for n, cost in zip(self.nodes, self.costs, strict=True)]
        memory, copied = self.memory, self.copied if byte_prices else {}
        return choice_problem(self.copies, costs, self.matrices, memory, times, limit, routes, byte_prices, copied)

    def forced(self, node: int, allowed: NDArray[np.bool_]) -> "Problem":
        """The same problem with other strategies allowed at one node, even if the method forbids them."""
        nodes = list(self.nodes)
        nodes[node] = replace(nodes[node], allowed=allowed)
        return replace(self, nodes=nodes)

    def cost_of(self, choice: Ints) -> float:
        """Seconds of a choice."""
        nodes = sum(n * float(cost[s]) for n, cost, s in zip(self.copies, self.costs, choice, strict=True))
        return nodes + sum(e.num * float(e.matrix[choice[e.source], choice[e.reader]]) for e in self.edges)

    def copies_made(self, choice: Ints) -> Spans:
        """The copies that resharding makes under a choice."""
        return copies_made(self.copied, choice)


@dataclass(frozen=True)
class Record(Kept):
    """A plan's record of its program and of the search."""

    program: RecordedProgram
    problem: Problem

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Record":
        """The inverse of `to_data`."""
        program, problem = dict(data["program"]), dict(data["problem"])
        program["nests"] = [Nest(**nest) for nest in program["nests"]]
        problem["nodes"] = [Node(**node) for node in problem["nodes"]]
        problem["edges"] = [Edge(**edge) for edge in problem["edges"]]
        return cls(RecordedProgram(**program), Problem(**problem))
