"""Virtual values: those that cost nothing to make anywhere, so that each reader has them made as it needs them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from meshwright import jax_compat
from meshwright.graph.flatten import signature_of
from meshwright.planner.tensor import Spec
from meshwright.rules import loop_nest
from meshwright.strategy.candidates import follow, tensor_holders
from meshwright.strategy.sharding import Axes

Known = tuple[Any, Spec | None, str]  # a value, its sharding, the phase that made it


class Virtual:
    """Knows how each virtual value was made."""

    def __init__(self, axes: Axes, names: Sequence[str]) -> None:
        self._axes, self._names = axes, tuple(names)
        # By identity; the value is kept, lest another take its place.
        self._makers: dict[int, tuple[Any, Any, Sequence[Known], int]] = {}

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._makers

    def add(self, eqn: Any, operands: Sequence[Known], made: Sequence[Any]) -> None:
        """Notes what an equation made of its operands."""
        self._makers |= {id(value): (value, eqn, operands, i) for i, value in enumerate(made)}

    def again(self, value: Any) -> Any:
        """The same value, made anew from what is not virtual."""
        if value not in self:
            return value
        _, eqn, operands, result = self._makers[id(value)]
        return jax_compat.bind(eqn, [self.again(x) for x, _, _ in operands])[result]

    def moves(self, value: Any, target: Spec) -> bool:
        """Whether what a value is made from lies otherwise than it must to make the value in a sharding."""
        for (x, spec, _), need in self._needs(value, target):
            if need is not None and (self.moves(x, need) if x in self else spec not in (None, need)):
                return True
        return False

    def made_as(self, value: Any, target: Spec, bring: Callable[[tuple[Any, Spec, str], Spec], Any]) -> Any:
        """The same value, made anew in a sharding; `bring` brings what it is made from to another."""
        _, eqn, _, result = self._makers[id(value)]
        operands: list[Any] = []
        for (x, spec, phase), need in self._needs(value, target):
            if x in self and need is not None:
                operands.append(self.made_as(x, need, bring))
            elif need is None or spec is None or spec == need:
                operands.append(x)
            else:
                operands.append(bring((x, spec, phase), need))
        return jax_compat.bind(eqn, operands)[result]

    def _needs(self, value: Any, target: Spec) -> Iterator[tuple[Known, Spec | None]]:
        """What a value is made from, each with the sharding that it takes; None for scalars."""
        _, eqn, operands, result = self._makers[id(value)]
        nest, axes = loop_nest(signature_of(eqn)), self._axes
        held = axes.unpack(np.array([axes.code(tuple(tuple(map(self._names.index, dim)) for dim in target))]))
        loops = follow(nest, axes, nest.results[result], held)
        for entry, dims in zip(operands, nest.operands, strict=True):
            rank = np.ndim(entry[0])
            code = int(axes.pack(tensor_holders(dims, loops, len(nest.loops)))[0])
            yield entry, tuple(tuple(self._names[a] for a in dim) for dim in axes.dims(code, rank)) if rank else None
