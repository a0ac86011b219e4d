"""Groups: operations that share one choice, so that a choice problem has hundreds of nodes instead of thousands.

Contractions, summing gathers and scatters, arguments and loop carries lead a group; every other operation follows its
largest operand into that operand's group. Values that cost nothing to make anywhere (broadcasts, iotas, masks, random
bits) are *virtual*: they belong to no group and are made by each reader in the sharding it needs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.graph import BACKWARD, UPDATE, Graph, Op
from meshwright.rules import LoopNest, loop_nest

_EXPANDING = 2  # a result this many times its operands' size is cheaper to make again than to move


@dataclass(slots=True)
class Slot:
    """One place where a group reads a value of another group.

    Attributes:
        value: The value read.
        member: Index within the group's `ops` of the reading operation; -1 for the value an argument or carry takes on.
        operand: Position of the operand, or the operand through which virtual values lead to the value; for a value
            that is taken on, the position within the group's `values` of the argument or carry.
        trips: How often it is read in one step.
    """

    value: int
    member: int
    operand: int
    trips: float


@dataclass(slots=True)
class Group:
    """Operations that share one choice.

    Attributes:
        leader: Index of the leading operation, or None where an argument leads.
        argument: Value id of the leading argument, or None.
        ops: Indices of the operations, in order.
        follows: For each of them the operand position it follows; -1 for the leader.
        values: Ids of the values that belong to the group, in the order they are made.
        slots: The values it reads from elsewhere.
    """

    leader: int | None
    argument: int | None
    ops: list[int] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


class Grouping:
    """The groups of a graph; nothing here depends on a mesh.

    Attributes:
        groups: All groups; arguments first, then in the order their leaders run.
        home: Group index of each real value.
        place: Position of each real value within its group's `values`.
        virtual: Values that belong to no group.
        nests: Loop nest of each operation.
        gradients: Values of the backward pass that the update reads, or that only change shape on the way to it.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.groups: list[Group] = []
        self.home: dict[int, int] = {}
        self.place: dict[int, int] = {}
        self.virtual: set[int] = set(graph.constants)
        self.nests: list[LoopNest] = []
        self._rooted: set[int] = set()  # virtual values that are made from real ones
        self._pulls: dict[int, list[int]] = {}
        self._outputs = set(graph.outputs) | {t.made for t in graph.ties}
        self._state_of = {graph.outputs[o]: graph.inputs[i] for o, i in graph.state.items()}
        self._read_forward = {v for op in graph.ops if op.phase != UPDATE for v in op.inputs}
        for value in graph.inputs:
            self._open(Group(None, value), (value,))
        nests: dict[int, LoopNest] = {}
        for index, op in enumerate(graph.ops):
            nest = nests.get(id(op.signature))
            if nest is None:
                nest = nests[id(op.signature)] = loop_nest(op.signature)
            self.nests.append(nest)
            self._place(index, op, nest)
        self._find_slots()
        self.gradients = _gradients(graph)

    def is_real(self, value: int) -> bool:
        """Whether the value belongs to a group."""
        return value in self.home

    def pulled(self, value: int) -> list[int]:
        """Operations that make a virtual value from real ones, last first."""
        found = self._pulls.get(value)
        if found is None:
            seen: set[int] = set()
            stack = [value]
            while stack:
                v = stack.pop()
                index = self.graph.producer.get(v)
                if v in self._rooted and index is not None and index not in seen:
                    seen.add(index)
                    stack.extend(self.graph.ops[index].inputs)
            found = self._pulls[value] = sorted(seen, reverse=True)
        return found

    def _open(self, group: Group, values: Iterable[int]) -> None:
        self.groups.append(group)
        self._join(len(self.groups) - 1, values)

    def _join(self, group: int, values: Iterable[int]) -> None:
        for value in values:
            if self.graph.types[value].shape:
                self.home[value] = group
                self.place[value] = len(self.groups[group].values)
                self.groups[group].values.append(value)

    def _place(self, index: int, op: Op, nest: LoopNest) -> None:
        types, home, sizes = self.graph.types, self.home, self.graph.sizes
        real = [p for p, v in enumerate(op.inputs) if v in home]
        if real and not nest.leads and sizes[op.outputs[0]] < _EXPANDING * sizes[op.inputs[real[0]]]:
            self._follow(index, op, real)  # by far the commonest
            return
        rooted = bool(real) or not self._rooted.isdisjoint(op.inputs)
        if self._is_virtual(op, nest, real, rooted):
            self.virtual.update(op.outputs)
            if rooted:
                self._rooted.update(v for v in op.outputs if types[v].shape)
            return
        if nest.leads or not real:
            if any(types[v].shape for v in (*op.outputs, *op.inputs)):
                group = Group(index, None, [index], [-1])
                self._open(group, op.outputs)
            return
        self._follow(index, op, real)

    def _follow(self, index: int, op: Op, real: list[int]) -> None:
        position = real[0] if len(real) == 1 else self._followed(op, real)
        group_id = self.home[op.inputs[position]]
        group = self.groups[group_id]
        group.ops.append(index)
        group.follows.append(position)
        self._join(group_id, op.outputs)

    def _is_virtual(self, op: Op, nest: LoopNest, real: list[int], rooted: bool) -> bool:
        types, sizes = self.graph.types, self.graph.sizes
        if not self._outputs.isdisjoint(op.outputs) or op.primitive == "loop_carry":
            return False
        if not rooted:  # made of constants and scalars alone
            scalars = [v for v in op.inputs if v not in self.virtual and not types[v].shape]
            return not scalars or not nest.leads
        if any(loop.kind != "parallel" for loop in nest.loops):
            return False
        if not real:
            return True
        return sum(sizes[v] for v in op.outputs) >= _EXPANDING * sum(sizes[v] for v in op.inputs)

    def _followed(self, op: Op, real: list[int]) -> int:
        """The operand to follow: the largest, and among equals the one whose group should own the result."""
        sizes = self.graph.sizes
        largest = max([sizes[op.inputs[p]] for p in real])
        equals = [p for p in real if sizes[op.inputs[p]] == largest]
        if len(equals) == 1:
            return equals[0]
        state = [self._state_of[v] for v in op.outputs if v in self._state_of]
        own = [p for p in equals if state and self.home[op.inputs[p]] == self.home[state[0]]]
        if own:
            return own[0]
        if op.phase == UPDATE:
            # Optimizer state before parameters, both before gradients: so each keeps a choice of its own.
            shape = self.graph.types[op.outputs[0]].shape
            led = [p for p in equals if self._led_by(op.inputs[p], shape)]
            if led:
                return min(led, key=lambda p: self.groups[self.home[op.inputs[p]]].argument in self._read_forward)
        return max(equals, key=lambda p: (self.groups[self.home[op.inputs[p]]].leader or -1, -p))

    def _led_by(self, value: int, shape: tuple[int, ...]) -> bool:
        argument = self.groups[self.home[value]].argument
        return argument is not None and self.graph.types[argument].shape == shape

    def _find_slots(self) -> None:
        graph = self.graph
        for group_id, group in enumerate(self.groups):
            for member, index in enumerate(group.ops):
                for operand, value in enumerate(graph.ops[index].inputs):
                    for root in self.roots(value):
                        if self.home[root] != group_id:
                            group.slots.append(Slot(root, member, operand, graph.ops[index].trips))
        for tie in graph.ties:
            self._take_on(tie.made, tie.carry, tie.trips)
        for output, argument in graph.state.items():
            self._take_on(graph.outputs[output], graph.inputs[argument], 1.0)

    def _take_on(self, made: int, taken: int, trips: float) -> None:
        group_id = self.home.get(taken)
        if group_id is not None and made in self.home and self.home[made] != group_id:
            self.groups[group_id].slots.append(Slot(made, -1, self.place[taken], trips))

    def roots(self, value: int) -> list[int]:
        """The real values that must be read to have this one."""
        if value in self.home:
            return [value]
        if value not in self._rooted:
            return []
        inputs = (v for index in self.pulled(value) for v in self.graph.ops[index].inputs)
        return list(dict.fromkeys(v for v in inputs if v in self.home))


def _gradients(graph: Graph) -> set[int]:
    found: set[int] = set()
    for op in reversed(graph.ops):
        if op.phase == UPDATE:
            found.update(op.inputs)
        elif op.phase == BACKWARD and not found.isdisjoint(op.outputs):
            size = graph.sizes[op.outputs[0]]
            found.update(v for v in op.inputs if graph.sizes[v] == size)
    made = {v for op in graph.ops if op.phase == BACKWARD for v in op.outputs}
    return found & made
