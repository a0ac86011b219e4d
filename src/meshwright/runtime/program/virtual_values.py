"""Virtual values cost nothing to compute, so each is computed anew in the sharding that its reader needs.

XLA's propagation may split their elementwise operations as it likes. An operation that is not fusible, such as a
gather, a scatter or a convolution, has its operands and its result constrained to the shardings that its rule allows
for the reader's sharding: propagation also arrives at splits that no rule allows, and for those the partitioner gives
wrong numbers, fails or ends the process (docs/compiler-faults.md).
"""

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh as DeviceMesh

from meshwright.graph.tracing.flatten import signature_of
from meshwright.plans.tensor import Spec
from meshwright.rules import loop_nest
from meshwright.rules.base import Dims
from meshwright.runtime.program import corrected
from meshwright.strategy.candidates import follow, tensor_holders
from meshwright.strategy.sharding import Axes

Known = tuple[Any, Spec | None, str]  # a value, its sharding, the phase that made it
Wanted = tuple[int, Spec]  # a virtual value, by identity, and the sharding in which it is needed


class Making(NamedTuple):
    """How a virtual value is computed in a sharding.

    Attributes:
        needs: Its operands, each with the sharding in which it is read; None for scalars.
        made: The shardings of its operation's results: as wanted, as far as the rule allows.
        fusible: Whether XLA may split its operation as it likes.
    """

    needs: list[tuple[Known, Spec | None]]
    made: list[Spec]
    fusible: bool


class Virtual:
    """Records how each virtual value was computed.

    A value may be computed from other virtual values, through long chains and along many paths. Each is visited once,
    and computed once for all readers that need it in the same sharding, without recursion.
    """

    def __init__(self, axes: Axes, mesh: DeviceMesh | None, names: tuple[str, ...]) -> None:
        self._axes, self._mesh, self._names = axes, mesh, names
        # Keyed by identity; the value is kept alive so that no other object gets its identity.
        self._makers: dict[int, tuple[Any, Any, Sequence[Known], int]] = {}
        self._rooted: set[int] = set()  # values that depend on more than constants
        self._makings: dict[Wanted, Making] = {}
        self._moves: dict[Wanted, bool] = {}
        self._made: dict[Hashable, dict[Wanted, Any]] = {}  # by purpose, within one body of a loop or branch

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._makers

    def add(self, eqn: Any, operands: Sequence[Known], made: Sequence[Any]) -> None:
        """Records the results that an equation computed from its operands."""
        self._makers |= {id(value): (value, eqn, operands, i) for i, value in enumerate(made)}
        if any(spec is not None or id(x) in self._rooted for x, spec, _ in operands):
            self._rooted |= set(map(id, made))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The context of a loop's body or a branch: values computed there are not available outside."""
        before, self._made = self._made, {}
        try:
            yield
        finally:
            self._made = before

    def moves(self, value: Any, target: Spec) -> bool:
        """Whether some operand of a value must be resharded to compute the value in a sharding."""
        if id(value) not in self._rooted:
            return False
        for wanted in self._order((id(value), target), self._moves):
            self._moves[wanted] = any(
                need is not None and (self._moves[id(x), need] if x in self else spec not in (None, need))
                for (x, spec, _), need in self._making(wanted).needs
            )
        return self._moves[id(value), target]

    def made_as(
        self, value: Any, target: Spec, bring: Callable[[tuple[Any, Spec, str], Spec], Any], purpose: Hashable = None
    ) -> jax.Array:
        """The same value, computed anew in a sharding.

        Args:
            value: The value.
            target: The sharding.
            bring: Reshards an operand.
            purpose: Values computed for one purpose are not used for another.
        """
        done = self._made.setdefault(purpose, {})
        for wanted in self._order((id(value), target), done):
            _, eqn, _, result = self._makers[wanted[0]]
            making, operands = self._making(wanted), []
            for (x, spec, phase), need in making.needs:
                if x in self and need is not None:
                    x = done[id(x), need]
                elif need is not None and spec is not None and spec != need:
                    x = bring((x, spec, phase), need)
                operands.append(x)
            done[wanted] = self._make(eqn, making, operands)[result]
        return done[id(value), target]

    def _make(self, eqn: Any, making: Making, operands: Sequence[Any]) -> list[Any]:
        """The results of an operation, from operands in the shardings that it needs."""
        if making.fusible:
            return corrected.bind(eqn, operands)
        assert self._mesh is not None
        read = [need for _, need in making.needs]
        return corrected.make_virtual(eqn, read, making.made, self._mesh, operands)

    def _order(self, last: Wanted, done: Container[Wanted]) -> Iterator[Wanted]:
        """The values still to be computed for a value in a sharding, without those ``done``; operands come first."""
        stack, entered = [last], set[Wanted]()
        while stack:
            wanted = stack[-1]
            if wanted in done:
                stack.pop()
            elif wanted in entered:
                yield stack.pop()
            else:
                entered.add(wanted)
                stack += [
                    (id(x), need) for (x, _, _), need in self._making(wanted).needs if x in self and need is not None
                ]

    def _making(self, wanted: Wanted) -> Making:
        if wanted not in self._makings:
            self._makings[wanted] = self._find_making(*wanted)
        return self._makings[wanted]

    def _find_making(self, value: int, target: Spec) -> Making:
        _, eqn, operands, result = self._makers[value]
        nest, axes = loop_nest(signature_of(eqn)), self._axes
        held = axes.unpack(np.array([axes.code(tuple(tuple(map(self._names.index, dim)) for dim in target))]))
        loops = follow(nest, axes, nest.results[result], held)

        def spec(dims: Dims, rank: int) -> Spec:
            code = int(axes.pack(tensor_holders(dims, loops, len(nest.loops)))[0])
            return tuple(tuple(self._names[a] for a in dim) for dim in axes.dims(code, rank))

        pairs = [(entry, dims, np.ndim(entry[0])) for entry, dims in zip(operands, nest.operands, strict=True)]
        needs = [(entry, spec(dims, rank) if rank else None) for entry, dims, rank in pairs]
        made = [spec(dims, len(v.aval.shape)) for dims, v in zip(nest.results, eqn.outvars, strict=True)]
        return Making(needs, made, nest.fusible)
