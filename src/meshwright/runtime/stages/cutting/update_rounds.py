"""Splits the update over the stages, in rounds: between two rounds stages exchange what they need of each other.

An operation on tensors belongs to the stage of its tensors. An operation on scalars alone is repeated by each stage
that needs its result; so a norm over all gradients costs one exchange, of each stage's own sums.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from meshwright.program.program import Program


@dataclass
class Rounds:
    """The units that each stage runs in each round, and what it sends and receives afterwards.

    Attributes:
        units: By stage and round, numbers of units in order.
        sent: By round, ``(value, stage that has it, stage that needs it)``.
        num_rounds: How many rounds there are.
        needed: By stage, the values of arguments and of parts that its rounds read.
    """

    units: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    sent: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    num_rounds: int = 1
    needed: dict[int, set[int]] = field(default_factory=dict)


class UpdateRounds:
    """Finds the rounds of an update.

    Args:
        program: The step.
        units: The units that run once a step, in order, apart from those that parts need.
        home: The stage of each large argument and of each value that parts compute.
        wanted: For each stage, the values that it must have in the end.
    """

    def __init__(
        self,
        program: Program,
        units: Sequence[int],
        home: Mapping[int, int],
        wanted: Mapping[int, Iterable[int]],
    ):
        self.program, self.units = program, units
        self.home: dict[int, int] = dict(home)
        self.given = frozenset(home)
        self.maker = {o: n for n in units for o in program.operations[n].outputs}
        self.at: dict[int, int] = {}  # the stage of each unit on tensors
        self.wanted = {stage: list(values) for stage, values in wanted.items()}
        self._place()
        self._known: dict[tuple[int, int], int] = {}
        for number in units:  # in order: a chain of thousands, as the norm of all gradients, is no deep recursion
            for value in program.operations[number].outputs:
                for stage in self.wanted:
                    self.round(value, stage)
        self.found = self._collect()

    def _place(self) -> None:
        wishes = self._wishes
        for number in self.units:
            unit = self.program.operations[number]
            large = [v for v in unit.inputs if v in self.home and self._size(v) > 1]
            if not large:
                continue
            wish = next((wishes[o] for o in unit.outputs if o in wishes), None)
            self.at[number] = self.home[max(large, key=self._size)] if wish is None else wish
            self.home.update(dict.fromkeys(unit.outputs, self.at[number]))

    @cached_property
    def _wishes(self) -> dict[int, int]:
        """The stage at which each tensor is wanted, as far as it leads to only one."""
        found: dict[int, int] = {}
        for stage, values in self.wanted.items():
            for v in values:
                if self._size(v) > 1:
                    found.setdefault(v, stage)
        for number in reversed(self.units):
            unit = self.program.operations[number]
            wish = next((found[o] for o in unit.outputs if o in found), None)
            if wish is not None:
                for v in unit.inputs:
                    if self._size(v) > 1:
                        found.setdefault(v, wish)
        return found

    def _size(self, value: int) -> int:
        return prod(self.program.types[value].shape)

    def round(self, value: int, stage: int) -> int:
        """The round in which a stage has a value; for one that it receives, the round after it was sent."""
        key = (value, stage)
        if key not in self._known:
            self._known[key] = self._round(value, stage)
        return self._known[key]

    def _round(self, value: int, stage: int) -> int:
        number = self.maker.get(value)
        if number is None:
            return int(value in self.given and self.home[value] != stage)
        at = self.at.get(number, stage)
        if at != stage:
            return self.round(value, at) + 1
        return max((self.round(v, stage) for v in self.program.operations[number].inputs), default=0)

    def _collect(self) -> Rounds:
        """The units that are needed, from the wanted values back."""
        found, runs = Rounds(), set[tuple[int, int]]()
        asked: set[tuple[int, int]] = set()
        stack = [(v, stage) for stage, values in self.wanted.items() for v in values]
        while stack:
            value, stage = stack.pop()
            if (value, stage) in asked:
                continue
            asked.add((value, stage))
            number = self.maker.get(value)
            at = self._at(value, stage)
            if at != stage:
                found.sent.setdefault(self.round(value, at), []).append((value, at, stage))
                stack.append((value, at))
            elif number is None:
                found.needed.setdefault(stage, set()).add(value)
            elif (number, stage) not in runs:
                runs.add((number, stage))
                stack += [(v, stage) for v in self.program.operations[number].inputs]
        last = max([0, *(self._earliest(number, stage) for number, stage in runs), *(turn + 1 for turn in found.sent)])
        found.num_rounds = last + 1
        for (number, stage), turn in self._latest(sorted(runs, reverse=True), found).items():
            found.units.setdefault((stage, turn), []).append(number)
        for numbers in found.units.values():
            numbers.sort()
        for sent in found.sent.values():
            sent.sort()
        return found

    def _earliest(self, number: int, stage: int) -> int:
        return max((self.round(v, stage) for v in self.program.operations[number].inputs), default=0)

    def _latest(self, runs: Sequence[tuple[int, int]], found: Rounds) -> dict[tuple[int, int], int]:
        """The round of each unit: as late as its readers allow, so that what it computes is not held from round to
        round."""
        due = {(v, at): turn for turn, sent in found.sent.items() for v, at, _ in sent}
        turns: dict[tuple[int, int], int] = {}
        for number, stage in runs:
            unit = self.program.operations[number]
            turn = min((due[o, stage] for o in unit.outputs if (o, stage) in due), default=found.num_rounds - 1)
            turns[number, stage] = turn
            for v in unit.inputs:
                due[v, stage] = min(turn, due.get((v, stage), turn))
        return turns

    def _at(self, value: int, stage: int) -> int:
        """The stage from which a stage has a value: itself, if it can compute it or is given it."""
        number = self.maker.get(value)
        if number is None:
            return self.home.get(value, stage)
        return self.at.get(number, stage)
