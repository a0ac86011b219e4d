"""Barriers of a plan: values that pass one together, so that what reads one of them runs after all are there.

A plan says for an operation how many places after its own its result passes a barrier. All results that pass at one
place pass together; whatever is evaluated later reads them from beyond the barrier.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import lax

from meshwright.plans.plan import OpPlan

Entry = tuple[Any, Any, str]  # a value, its sharding, the phase that made it
Copies = list[tuple[Any, Any]]  # shardings that a value was brought to, its own first, with its copy in each


class Barriers:
    """The barriers of one evaluation.

    Args:
        ops: The operations of the plan.
        copies: Finds a value in all shardings that it was brought to so far.
        adopt: Makes a value of the same copies beyond a barrier.
    """

    def __init__(self, ops: Iterable[OpPlan], copies: Callable[[Entry], Copies], adopt: Callable[[Entry, Copies], Any]):
        self._copies, self._adopt = copies, adopt
        self._passing: dict[int, list[int]] = defaultdict(list)  # by place, the operations whose results pass there
        for op in ops:
            if op.barrier:
                self._passing[op.serial + op.barrier].append(op.serial)
        self._recorded = {serial for passing in self._passing.values() for serial in passing}
        self._made: dict[int, Entry] = {}
        self._beyond: dict[int, tuple[Any, Any]] = {}  # values by identity, each with itself beyond its barrier

    def record(self, serial: int, results: Sequence[Entry]) -> None:
        """Keeps the result of an operation if it is to pass a barrier."""
        if serial in self._recorded:
            (self._made[serial],) = results

    def reach(self, serial: int) -> None:
        """Lets the values pass whose barrier is before an operation."""
        passing = [self._made.pop(made) for made in self._passing.get(serial, ()) if made in self._made]
        if passing:
            shardings, values = [], []
            for entry in passing:
                needs, copies = zip(*self._copies(entry), strict=True)
                shardings.append(needs)
                values.append(copies)
            for entry, needs, copies in zip(passing, shardings, lax.optimization_barrier(values), strict=True):
                self._beyond[id(entry[0])] = entry[0], self._adopt(entry, list(zip(needs, copies, strict=True)))

    def beyond(self, entry: Entry) -> Entry:
        """A value as what is evaluated from now on reads it."""
        value, spec, phase = entry
        return self._beyond.get(id(value), (value, value))[1], spec, phase
