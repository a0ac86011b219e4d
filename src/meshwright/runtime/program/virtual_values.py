"""Virtual values: those that cost nothing to make anywhere, so that each reader has them made as it needs them.

XLA's propagation may split the elementwise part of their making as it likes. An operation that is not fusible, such as
a gather, a scatter or a convolution, is made with its operands and its result constrained to what its rule allows for
the reader's sharding: propagation also arrives at splits that no rule allows, and for those the partitioner gives wrong
numbers, fails or ends the process (docs/compiler-faults.md).
"""

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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
    """How a virtual value is made for a sharding.

    Attributes:
        needs: What it is made from, each with the sharding that it takes; None for scalars.
        made: The shardings in which its operation makes its results: as wanted, as far as the rule allows.
        fusible: Whether XLA may split its operation as it likes.
    """

    needs: list[tuple[Known, Spec | None]]
    made: list[Spec]
    fusible: bool


class Virtual:
    """Knows how each virtual value was made.

    A value may be made from others that are virtual, in long chains and along many ways: each is looked at once, and
    made once for all readers that need it in the same sharding, without recursion.
    """

    def __init__(self, axes: Axes, mesh: DeviceMesh) -> None:
        self._axes, self._mesh, self._names = axes, mesh, tuple(mesh.axis_names)
        # By identity; the value is kept, lest another take its place.
        self._makers: dict[int, tuple[Any, Any, Sequence[Known], int]] = {}
        self._rooted: set[int] = set()  # those that are made from others than constants, at whatever remove
        self._makings: dict[Wanted, Making] = {}
        self._moves: dict[Wanted, bool] = {}
        self._made: dict[Hashable, dict[Wanted, Any]] = {}  # by purpose, within one body of a loop or branch

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._makers

    def add(self, eqn: Any, operands: Sequence[Known], made: Sequence[Any]) -> None:
        """Notes what an equation made of its operands."""
        self._makers |= {id(value): (value, eqn, operands, i) for i, value in enumerate(made)}
        if any(spec is not None or id(x) in self._rooted for x, spec, _ in operands):
            self._rooted |= set(map(id, made))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within a loop's body or a branch: what is made there is not known outside."""
        before, self._made = self._made, {}
        try:
            yield
        finally:
            self._made = before

    def moves(self, value: Any, target: Spec) -> bool:
        """Whether what a value is made from lies otherwise than it must to make the value in a sharding."""
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
    ) -> Any:
        """The same value, made anew in a sharding.

        Args:
            value: The value.
            target: The sharding.
            bring: Brings what it is made from to another sharding.
            purpose: What is made for one purpose is not used for another.
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
            if making.fusible:
                made = corrected.bind(eqn, operands)
            else:
                read = [need for _, need in making.needs]
                made = corrected.make_virtual(eqn, read, making.made, self._mesh, operands)
            done[wanted] = made[result]
        return done[id(value), target]

    def _order(self, last: Wanted, done: Container[Wanted]) -> Iterator[Wanted]:
        """What is left to do to have a value in a sharding beside what is ``done``; each after what it is made from."""
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
