"""Numbers what a pass has made: ids that are given once, and the map from them to those of the program before.

A pass may run one operation twice (before the parts of a batch and for each of them), and the plan of what it makes
decides about each by itself. So ids are given anew, in the order in which a jaxpr's are, and the map says which
operation of the program before each one is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from meshwright import jax_compat
from meshwright.program.parts import Moving
from meshwright.program.program import UNPLANNED, Operation, Program


@dataclass(frozen=True)
class Changed:
    """What a pass has made of a program.

    Attributes:
        program: The new program.
        former: The id that each id of the new program stood for in the program before; what a pass added has none.
    """

    program: Program
    former: Mapping[int, int]

    def after(self, earlier: "Changed") -> "Changed":
        """The same as one change of the program that an earlier pass was given."""
        former = {new: earlier.former[old] for new, old in self.former.items() if old in earlier.former}
        return Changed(self.program, former)


def unchanged(program: Program) -> Changed:
    """A program that a pass leaves as it is."""
    return Changed(program, {number: number for number in range(program.num_ids)})


def numbered(program: Program) -> Changed:
    """A program whose ids and values are numbered as those of a jaxpr are, and whose scopes follow from where its
    operations stand.

    Args:
        program: The program that a pass has made, whose operations have the ids of the program before or none.
    """
    numbering = _Numbering()
    made = numbering.region(program, "")
    return Changed(made, {new: old for new, old in numbering.former.items() if old < UNPLANNED})


class _Numbering:
    def __init__(self) -> None:
        self.next_id = 0
        self.former: dict[int, int] = {}
        self.scopes: dict[tuple[str, Any], str] = {}

    def region(self, old: Program, scope: str) -> Program:
        """A region with values numbered in the order in which they are met: inputs, arrays, then the others."""
        new = Program([old.types[value] for value in old.inputs], range(len(old.inputs)))
        new.donated.update(old.donated)
        new.sharded_calls.extend(old.sharded_calls)
        numbers = dict(zip(old.inputs, new.inputs, strict=True))
        read = {value for operation in old.operations for value in operation.inputs} | set(old.outputs)
        for value in sorted(read & old.constants.keys()):
            if not jax_compat.is_literal(old.constants[value], old.types[value]):
                numbers[value] = new.add_constant(old.constants[value], old.types[value])

        moving = Moving(old, new, numbers)
        for operation in old.operations:
            moved = moving.operation(operation)
            new.operations.append(self._with_ids(moved._replace(scope=self._scope(scope, operation))))
        new.outputs.extend(map(moving.number, old.outputs))
        return new

    def _with_ids(self, operation: Operation) -> Operation:
        """An operation with the next ids, and its regions with those that follow."""
        first = self.next_id
        if not operation.regions:
            self._give([operation.id])
            return operation._replace(id=first)
        for ids in (operation.carry_ids, operation.slice_ids):
            self._give(ids)
        regions = tuple(self.region(region, operation.scope) for region in operation.regions)
        self._give(operation.result_ids)
        return operation._replace(id=first, regions=regions, num_ids=self.next_id - first, kept_ids=None)

    def _give(self, ids: Sequence[int]) -> None:
        """Gives the next ids to what had these."""
        self.former.update(enumerate(ids, self.next_id))
        self.next_id += len(ids)

    def _scope(self, outer: str, operation: Operation) -> str:
        return reduce(self._inner, (*operation.stack, jax_compat.name_stack(operation.equation)), outer)

    def _inner(self, outer: str, stack: Any) -> str:
        scope = self.scopes.get((outer, stack))
        if scope is None:
            scope = self.scopes[outer, stack] = "/".join(part for part in (outer, str(stack)) if part)
        return scope
