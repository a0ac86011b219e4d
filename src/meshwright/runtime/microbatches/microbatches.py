"""Cuts a step into microbatches: the parts of a batch run one after the other, with the numbers of the whole.

The step is traced once, with the whole batch; `batch_parts` finds how its values depend on the batch, and
`part_program` builds the program for a part, which runs inside a loop over the parts. Contributions are added up from
part to part; operations that read their sums run once, afterwards. So gradients of a mean loss, metrics and a clipped
update are those of the whole batch. Where an operation on examples needs a value that is known only after the whole
batch has run (batch norm), the step cannot be cut, unless that value is cheap to compute beforehand (the number of
tokens that are not padding).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_leaves

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph.tracing.batched_conditions import with_single_conditions
from meshwright.graph.tracing.call import Call
from meshwright.graph.tracing.counted_indices import pair_counted_indices
from meshwright.graph.tracing.planned_devices import traced_for
from meshwright.hardware import Cluster
from meshwright.program.program import Program
from meshwright.rules.base import REDUCING
from meshwright.runtime.microbatches.batch_parts import ALIKE, WHOLE, Analysis, TooLate
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut, Status, is_expensive, is_half
from meshwright.runtime.microbatches.part import INDEX, BatchPart, Key, Writing
from meshwright.runtime.microbatches.part_program import PartProgram

__all__ = ["CannotCut", "CutStep", "cut_call"]

_COMBINE: dict[str, Callable[..., Any]] = {
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "prod": lax.reduce_prod,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
}


def cut_call(call: Call, batch: Sequence[int], count: int, cluster: Cluster | None = None) -> Call:
    """A call with its batch cut into parts that run one after the other; its arguments and results stay as they are.

    Args:
        call: A step as JAX sees it.
        batch: Positions of the arguments whose leaves are examples stacked along their first dim.
        count: The number of parts.
        cluster: The cluster that it was traced for; the devices at hand by default.

    Raises:
        ShardingError: The batch does not divide into so many parts.
        CannotCut: The numbers would change.
    """
    args = call.arguments.fill(call.types)
    size = _batch_size(args, batch, count)
    is_batch = [i in batch for i, arg in enumerate(args) for _ in tree_leaves(arg)]
    pairs = zip(is_batch, call.arguments.positions, strict=True)
    examples = [given for given, position in pairs if position is not None]
    with traced_for(cluster):
        try:
            step = CutStep(call.program, examples, Cut(count, size // count))
        except CannotCut:  # examples may come in groups, which parts of neighbours keep together
            step = CutStep(call.program, examples, Cut(count, 1))
    return replace(call, jaxpr=pair_counted_indices(with_single_conditions(step.jaxpr)))  # as in every traced call


def _batch_size(args: Sequence[Any], batch: Sequence[int], count: int) -> int:
    leaves = [x for i in batch if i < len(args) for x in tree_leaves(args[i]) if getattr(x, "shape", ())]
    sizes = sorted({x.shape[0] for x in leaves})
    if not sizes:
        why = f"batch_argnums {tuple(batch)} hold no arrays"
        if not batch:
            why = "the function returns no next state, or no other argument is a stack of examples; give batch_argnums"
        raise ShardingError(f"there is no batch to cut into {count} microbatches: {why}")
    if len(sizes) > 1:
        raise ShardingError(
            f"the batch has first dims of {' and '.join(map(str, sizes))}; all its leaves must be stacks of the same "
            "examples to be cut into microbatches (batch_argnums says which arguments are the batch)"
        )
    if not sizes[0]:
        raise CannotCut("the batch has no examples")
    if sizes[0] % count:
        raise ShardingError(
            f"a batch of {sizes[0]} does not divide into {count} microbatches; give a batch of a multiple of {count}, "
            "or another number of microbatches"
        )
    return int(sizes[0])


class CutStep:
    """A step cut into parts: the operations that run before the parts, for each part, and after them.

    Attributes:
        program: The step's operations.
        cut: How the batch is cut.
        inputs: For each input, 0 where it is cut along its first dim.
        analysis: How the values depend on the batch.
        part: The program of one part.
        shared, sliced: The values that it is given: alike for all parts, and cut.
        made: The values that it is asked for.
        before, after: Operations that run once, before and after the parts.
        contributions, stacked: The values that the parts compute for those after them: to be combined, or joined.
        jaxpr: What `run` computes, as JAX sees it.
    """

    def __init__(self, program: Program, examples: Sequence[bool], cut: Cut):
        self.program, self.cut = program, cut
        taken = [program.types[v] for v in program.inputs]
        self.inputs: list[Status] = [
            0 if given and aval.shape else ALIKE for given, aval in zip(examples, taken, strict=True)
        ]
        self.analysis = analyse(self.program, self.inputs, cut)
        self._sort_units()
        self._sort_parts()
        types = [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in taken]
        self.jaxpr = jax_compat.trace(self.run, [types])  # checks that every operation runs on parts, too

    def _sort_units(self) -> None:
        """Finds the units that run after all parts, and the values they need."""
        units, status, outputs = self.program.operations, self.analysis.status, self.program.outputs
        printing = [n for n, unit in enumerate(units) if unit.equation.effects]
        found = self.program.ancestors([*outputs, *(v for n in printing for v in units[n].inputs)])
        self.after = sorted({*printing, *(n for n in found if WHOLE in (status[o] for o in units[n].outputs))})
        self.read_after = {v for n in self.after for v in units[n].inputs} | set(outputs)
        self.contributions = sorted(v for v in self.read_after if status[v] in REDUCING)
        made = self.read_after - set(self.program.inputs)
        self.stacked = sorted(v for v in made if isinstance(status[v], int))

    def _sort_parts(self) -> None:
        """Finds the units that run for each part and before."""
        status, inputs = self.analysis.status, self.program.inputs
        given = {v for v, s in status.items() if s == ALIKE} | set(inputs)
        self.made: list[Key] = [(v, None) for v in (*self.contributions, *self.stacked)]
        derived = PartProgram(self.analysis, self.made, outside=given)
        self.sliced = [(v, d) for v, d in derived.keys if d is not None or isinstance(status[v], int)]
        self.shared = [key for key in derived.keys if key not in self.sliced]
        writing = Writing(self.analysis, [INDEX, *self.shared, *self.sliced])
        self.part = BatchPart(self.program, writing.program, writing.numbers, derived.pieces(writing))
        needed = {v for v, _ in derived.keys} | {v for v in self.read_after if status[v] == ALIKE}
        self.before = self.program.needed(needed)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        env: dict[int, Any] = dict(self.program.constants)
        env.update(zip(self.program.inputs, leaves, strict=True))
        self.program.run_some(self.before, env)
        if self.contributions or self.stacked:
            env.update(self._loop(env))
        self.program.run_some([self.program.operations[n] for n in self.after], env)
        return [env[v] for v in self.program.outputs]

    def _loop(self, env: dict[int, Any]) -> dict[int, Any]:
        """Runs the parts; returns the combined contributions, and the split values joined again."""
        status, types = self.analysis.status, self.program.types
        sums = [v for v in self.contributions if status[v] == "sum"]
        others = [v for v in self.contributions if status[v] != "sum"]
        part = self.part.region(self.part.pieces, [*self.shared, *self.sliced], self.made)
        fixed = [env[value] for value, _ in self.shared]
        slices = [self.cut.parts(jnp.asarray(env[v]), self._dim(v) if d is None else d) for v, d in self.sliced]

        def step(totals: list[Any], x: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            here = dict(zip(self.made, part.run([x[0], *fixed, *x[1]]), strict=True))
            added = [total + here[v, None].astype(total.dtype) for total, v in zip(totals, sums, strict=True)]
            return added, [here[v, None] for v in (*others, *self.stacked)]

        wide = [jnp.float32 if is_half(types[v].dtype) else types[v].dtype for v in sums]
        zeros = [jnp.zeros(types[v].shape, dtype) for v, dtype in zip(sums, wide, strict=True)]
        with jax.named_scope("microbatches"):
            totals, stacked = lax.scan(step, zeros, (jnp.arange(self.cut.count), slices))
        made = {v: total.astype(types[v].dtype) for v, total in zip(sums, totals, strict=True)}
        made |= {v: _COMBINE[str(status[v])](x, (0,)) for v, x in zip(others, stacked, strict=False)}
        joined = zip(self.stacked, stacked[len(others) :], strict=True)
        return made | {v: self.cut.join(x, self._dim(v)) for v, x in joined}

    def _dim(self, value: int) -> int:
        dim = self.analysis.status[value]
        assert isinstance(dim, int)
        return dim


def analyse(program: Program, inputs: Sequence[Status], cut: Cut) -> Analysis:
    """Analyses again until every operation on examples that reads a value of the whole batch can do so: the value is
    computed beforehand, or the operation waits.

    Raises:
        CannotCut: An operation needs a value that is expensive and known only after the whole batch has run.
    """
    units, early, waiting = program.operations, set[int](), set[int]()
    last = [n for n, unit in enumerate(units) if unit.equation.effects or is_expensive(unit)]
    cheap = set(range(len(units))) - program.leading_to(last)
    while True:
        try:
            return Analysis(program, inputs, cut, early=early, waiting=waiting)
        except TooLate as error:
            wanted = set(error.values)
            if wanted - early and not any(is_expensive(units[n]) for n in program.ancestors(wanted)):
                early |= wanted
            elif error.number in cheap:
                waiting |= program.depending_on(error.number)
            else:
                message = f"{error.unit} needs a value that is known only after the whole batch has run"
                raise CannotCut(message) from None
