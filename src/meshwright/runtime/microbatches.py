"""Cuts a step into microbatches: the parts of a batch run one after the other, with the numbers of the whole.

The function is traced with the whole batch and with a part of it; `batch_parts` says what becomes of the batch. What is
split runs inside a loop over the parts, on the second program with the numbers (such as one over the batch size) of the
first; contributions are added up from part to part; and what reads their sums runs once, afterwards. So gradients of a
mean loss, metrics and a clipped update come out as they would for the whole batch. Where an operation on examples needs
what only the whole batch can tell (batch norm), the step cannot be cut; unless that is cheap to have beforehand (how
many tokens are no padding).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_leaves, tree_map

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph.call import Call, call_abstractly
from meshwright.graph.flatten import signature_of
from meshwright.rules import loop_nest
from meshwright.rules.base import REDUCING
from meshwright.runtime.batch_parts import (
    ALIKE,
    LOOPS,
    WHOLE,
    Analysis,
    CannotCut,
    Constant,
    Cut,
    SideBySide,
    Status,
    TooLate,
    Unit,
)

_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "and": jnp.all,
    "or": jnp.any,
}


def accumulated(
    function: Callable[..., Any], args: tuple[Any, ...], batch: Sequence[int], count: int
) -> Callable[..., Any]:
    """The function with its batch cut into parts that run one after the other.

    Args:
        function: A step.
        args: Arguments to trace it with: arrays or types.
        batch: Positions of the arguments whose leaves are examples stacked along their first dim.
        count: The number of parts.

    Returns:
        A function of like arguments and results.

    Raises:
        ShardingError: The batch does not divide into so many parts.
        CannotCut: The numbers would change.
    """
    size = _batch_size(args, batch, count)
    whole = call_abstractly(function, args)
    parts = [tree_map(lambda x: _part_type(x, count), arg) if i in batch else arg for i, arg in enumerate(args)]
    part = call_abstractly(function, tuple(parts))
    is_batch = [i in batch for i, arg in enumerate(args) for _ in tree_leaves(arg)]
    pairs = zip(is_batch, whole.arguments.positions, strict=True)
    examples = [given for given, position in pairs if position is not None]
    try:
        step = _Step(whole, part, examples, Cut(count, size // count))
    except CannotCut:  # examples may be grouped in some way that parts of neighbours respect
        step = _Step(whole, part, examples, Cut(count, 1))

    def cut(*args: Any) -> Any:
        if any(isinstance(x, jax.core.Tracer) for x in whole.arguments.rest(args)):
            raise TypeError("the step's Python code reads numbers that are arrays here")  # so that they are kept
        return whole.results.fill(step.run(whole.arguments.pick(args)))

    return cut


def _batch_size(args: Sequence[Any], batch: Sequence[int], count: int) -> int:
    leaves = [x for i in batch if i < len(args) for x in tree_leaves(args[i]) if getattr(x, "shape", ())]
    sizes = sorted({x.shape[0] for x in leaves})
    if not sizes:
        raise ShardingError(
            f"there is no batch to cut into {count} microbatches: batch_argnums {tuple(batch)} hold no arrays"
        )
    if len(sizes) > 1:
        raise ShardingError(
            f"the batch has first dims of {' and '.join(map(str, sizes))}; all its leaves must be stacks of the same "
            "examples to be cut into microbatches (batch_argnums says which arguments are the batch)"
        )
    if sizes[0] % count:
        raise ShardingError(
            f"a batch of {sizes[0]} does not divide into {count} microbatches; give a batch of a multiple of {count}, "
            "or another number of microbatches"
        )
    return int(sizes[0])


def _part_type(leaf: Any, count: int) -> Any:
    if not getattr(leaf, "shape", ()):
        return leaf
    kind = jax_compat.abstract(leaf)
    return jax.ShapeDtypeStruct((kind.shape[0] // count, *kind.shape[1:]), kind.dtype)


class _Step:
    """A step cut into parts: what runs before them, for each, and after."""

    def __init__(self, whole: Call, part: Call, examples: Sequence[bool], cut: Cut):
        part_jaxpr = jax_compat.with_literals_of(part.jaxpr, whole.jaxpr)
        if part_jaxpr is None:
            raise CannotCut("the function does something else for a smaller batch")
        self.program = SideBySide.of(whole.jaxpr, part_jaxpr)
        self.cut = cut
        avals = whole.jaxpr.in_avals
        self.inputs: list[Status] = [
            0 if given and aval.shape else ALIKE for given, aval in zip(examples, avals, strict=True)
        ]
        self.early: set[int] = set()
        self.analysis = self._analyse()
        self._sort_units()

    def _analyse(self) -> Analysis:
        """Repeated until no operation on examples waits for what can be had beforehand."""
        while True:
            try:
                return Analysis(self.program, self.inputs, self.cut, early=self.early)
            except TooLate as error:
                wanted = {ref for ref in error.values if not isinstance(ref, Constant)}
                if not wanted - self.early or any(self._is_dear(n) for n in self.program.ancestors(wanted)[0]):
                    raise CannotCut(f"{error.unit} needs what only the whole batch can tell") from None
                self.early |= wanted

    def _is_dear(self, number: int) -> bool:
        unit = self.program.units[number]
        inner = unit.name in LOOPS or jax_compat.called_jaxpr(unit.whole) is not None
        return inner or loop_nest(signature_of(unit.whole)).flops > 0

    def _sort_units(self) -> None:
        """Which units run before, for each part, and after; and what they hand on."""
        units, status = self.program.units, self.analysis.status
        outputs = [ref for ref in self.program.outputs if not isinstance(ref, Constant)]
        self.after = [n for n in self.program.ancestors(outputs)[0] if WHOLE in (status[o] for o in units[n].outs)]
        read_after = {r for n in self.after for r in units[n].ins if not isinstance(r, Constant)} | set(outputs)
        self.contributions = sorted(r for r in read_after if status[r] in REDUCING)
        self.stacked = sorted(r for r in set(outputs) if isinstance(status[r], int))
        needed, _ = self.program.ancestors([*self.contributions, *self.stacked])
        self.inside = [n for n in needed if n not in self.analysis.outside and self._runs_inside(units[n])]
        read_inside = {r for n in self.inside for r in units[n].ins if not isinstance(r, Constant)}
        made_inside = {o for n in self.inside for o in units[n].outs} - self.early
        entering = {*read_inside, *self.contributions, *self.stacked} - made_inside
        self.sliced = sorted(r for r in entering if isinstance(status[r], int))
        whole = {r for r in read_inside | read_after if status[r] == ALIKE} | set(self.sliced)
        self.before, _ = self.program.ancestors(whole)

    def _runs_inside(self, unit: Unit) -> bool:
        return any(self.analysis.status[o] != ALIKE for o in unit.outs if o not in self.early)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        env: dict[int, Any] = dict(zip(self.program.inputs, leaves, strict=True))
        units = self.program.units
        for number in self.before:
            unit = units[number]
            env.update(zip(unit.outs, _bind(unit, unit.whole, [_whole(ref, env) for ref in unit.ins]), strict=True))
        sums, stacks = self._loop(env)
        later = dict(env) | sums | stacks
        for number in self.after:
            unit = units[number]
            later.update(zip(unit.outs, _bind(unit, unit.whole, [_whole(ref, later) for ref in unit.ins]), strict=True))
        return [_whole(ref, later) for ref in self.program.outputs]

    def _loop(self, env: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Runs the parts; gives the combined contributions, and what is split put together again."""
        status, units = self.analysis.status, self.program.units
        sums = [v for v in self.contributions if status[v] == "sum"]
        others = [v for v in self.contributions if status[v] != "sum"]
        slices = [self.cut.parts(env[v], _dim(status[v])) for v in self.sliced]

        def part(index: Any, slices: Sequence[Any]) -> dict[int, Any]:
            here = dict(env) | dict(zip(self.sliced, slices, strict=True))
            for number in self.inside:
                unit = units[number]
                operands = [self._part(ref, here, index) for ref in unit.ins]
                for place in self.analysis.draws.get(number, ()):
                    operands[place] = _fold_in(operands[place], index)
                made = _bind(unit, unit.part, operands)
                here.update((o, x) for o, x in zip(unit.outs, made, strict=True) if o not in self.early)
            return here

        def step(totals: list[Any], x: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            here = part(*x)
            added = [total + here[v].astype(total.dtype) for total, v in zip(totals, sums, strict=True)]
            return added, [here[v] for v in (*others, *self.stacked)]

        indices = jnp.arange(self.cut.count)
        zeros = [jnp.zeros(t.shape, _wide(t.dtype)) for t in self._types(sums)]
        with jax.named_scope("microbatches"):
            totals, stacked = lax.scan(step, zeros, (indices, slices))
        pairs = zip(totals, self._types(sums), strict=True)
        combined = {v: total.astype(t.dtype) for v, (total, t) in zip(sums, pairs, strict=True)}
        combined |= {v: _COMBINE[str(status[v])](x, axis=0) for v, x in zip(others, stacked, strict=False)}
        joined = stacked[len(others) :]
        return combined, {v: self.cut.join(x, _dim(status[v])) for v, x in zip(self.stacked, joined, strict=True)}

    def _types(self, values: Sequence[int]) -> list[Any]:
        made = {o: v.aval for unit in self.program.units for o, v in zip(unit.outs, unit.whole.outvars, strict=True)}
        return [made[v] for v in values]

    def _part(self, ref: Any, env: dict[int, Any], index: Any) -> Any:
        if not isinstance(ref, Constant):
            return env[ref]
        status = self.analysis.of(ref)
        return ref.whole if status == ALIKE else self.cut.parts(jnp.asarray(ref.whole), _dim(status))[index]


def _whole(ref: Any, env: dict[int, Any]) -> Any:
    return ref.whole if isinstance(ref, Constant) else env[ref]


def _bind(unit: Unit, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    return jax_compat.bind(eqn, operands, unit.stack)


def _dim(status: Status) -> int:
    assert isinstance(status, int)
    return status


def _wide(dtype: Any) -> Any:
    """The dtype in which contributions are added up: many small numbers are lost in half precision."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def _fold_in(keys: Any, index: Any) -> Any:
    """Keys of one part of the batch."""
    if jax_compat.is_key_dtype(keys.dtype):
        flat = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys.reshape(-1))
        return flat.reshape(keys.shape)
    kind = {2: "threefry2x32", 4: "rbg"}[keys.shape[-1]]
    return jax.random.key_data(_fold_in(jax.random.wrap_key_data(keys, impl=kind), index))
