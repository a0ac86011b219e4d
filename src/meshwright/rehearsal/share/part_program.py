"""One part of a plan as a program of its own: on one device's shards, or whole on all devices of the mesh.

The operations run in the order of the flat graph. What they read from outside is drawn; what others read of them is
returned, so that all of it is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding

from meshwright import jax_compat
from meshwright.graph.graph import Op
from meshwright.graph.tracing.trace import Traced
from meshwright.plans.plan import OpPlan, PlanData, partition_spec
from meshwright.plans.tensor import Spec, Tensor
from meshwright.rehearsal.share.indices import Indices, looked_up
from meshwright.rehearsal.share.local_equation import local_shape
from meshwright.rehearsal.share.one_share import OneShare, Placeholder
from meshwright.rehearsal.share.program import drawn, longest
from meshwright.runtime.checking.verify import allocated_bytes
from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.program.backend import Backend, OnDevices
from meshwright.runtime.program.contributions import Waiting
from meshwright.runtime.program.evaluate import Entry, Evaluator
from meshwright.runtime.spmd import compiler_options
from meshwright.units import format_bytes


@dataclass(frozen=True)
class PartProgram:
    """A compiled part.

    Attributes:
        compiled: The program.
        draw: Draws the arguments; they are on the device from the first run on, as long as the program is kept.
        call: The program as it is called: in turn on several CPU devices; by default as it was compiled.
        laps: How often a run computes the part, one time after another.
    """

    compiled: Any
    draw: Callable[[], list[Any]]
    call: Callable[..., Any] | None = None
    laps: int = 1

    @cached_property
    def values(self) -> list[Any]:
        """The arguments."""
        return self.draw()

    def run(self) -> list[jax.Array]:
        """Starts one run."""
        return (self.call or self.compiled)(*self.values)


class TooLarge(Exception):
    """A program that needs more memory than is allowed."""

    def __init__(self, needed: float, limit: float):
        self.needed = needed
        super().__init__(f"it needs {format_bytes(needed)}, and {format_bytes(limit)} are allowed")


def refuse_large(compiled: Any, limit_bytes: float | None) -> None:
    """Raises `TooLarge` where a compiled program needs more memory than the limit."""
    if limit_bytes is not None and allocated_bytes(compiled) > limit_bytes:
        raise TooLarge(allocated_bytes(compiled), limit_bytes)


class PartFunction:
    """Some operations of a plan as a function of what they read from outside.

    Attributes:
        inputs: The values read from outside; `types` and `specs` have their types and shardings.
    """

    def __init__(self, plan: PlanData, traced: Traced, operations: Sequence[int], mesh: DeviceMesh | None = None):
        """Without a mesh of devices it is one device's share."""
        self.platform: str | None = None  # that it is compiled for
        self.plan, self.graph, self.mesh = plan, traced.graph, mesh
        self.program, self.indices = traced.call.program, Indices.of(traced)
        self.plans: dict[int, OpPlan] = {op.serial: op for op in plan.ops}
        arrays = [t for t in plan.arguments if t.role != "static"]
        self.arguments: dict[int, Tensor] = dict(zip(self.graph.inputs, arrays, strict=True))
        self.operations = self._closed(operations)
        made = {v for i in self.operations for v in self.graph.ops[i].outputs}
        read = dict.fromkeys(v for i in self.operations for v in self.graph.ops[i].inputs)
        self.inputs = [v for v in read if v not in made and v not in self.graph.constants]
        self.outputs = self._read_outside({v for i in self._real(operations) for v in self.graph.ops[i].outputs})

    def _real(self, operations: Sequence[int]) -> list[int]:
        return [i for i in operations if self.graph.ops[i].serial in self.plans]

    def _closed(self, operations: Sequence[int]) -> list[int]:
        """The operations, with the virtual ones that they read: every reader computes those for itself."""
        found, waiting, producer = set(operations), list(operations), self.graph.columns.producer
        while waiting:
            for value in self.graph.ops[waiting.pop()].inputs:
                index = int(producer[value])
                if index >= 0 and index not in found and self.graph.ops[index].serial not in self.plans:
                    found.add(index)
                    waiting.append(index)
        return sorted(found)

    def _read_outside(self, made: set[int]) -> list[int]:
        """The values that others read; any reader may compute a virtual operation, so what that reads is among them."""
        own, columns = set(self._real(self.operations)), self.graph.columns
        outside = {v for i, v in zip(columns.reader.tolist(), columns.reads.tolist(), strict=True) if i not in own}
        tied = {tie.made for tie in self.graph.ties}
        return sorted(made & (outside | tied | set(self.graph.outputs)))

    def spec(self, value: int) -> Spec | Waiting:
        """The sharding of a value that is read from outside."""
        if value in self.arguments:
            return self.arguments[value].spec
        op = self.graph.ops[int(self.graph.columns.producer[value])]
        plan = self.plans[op.serial]
        place = op.outputs.index(value)
        if plan.waits:
            return Waiting(plan.waits, plan.partial[0] or (), plan.results[0] or ())
        return plan.results[place] or ()

    def kind(self, value: int) -> Tensor:
        """The type of a value that is read from outside, with its sharding before sums are settled.

        On a mesh of devices contributions to a sum are held apart by leading dims.
        """
        kind, spec = self.graph.types[value], self.spec(value)
        role = self.arguments[value].role if value in self.arguments else "data"
        if not isinstance(spec, Waiting):
            return Tensor(f"value {value}", kind.shape, kind.dtype, spec, role)
        apart = () if self.mesh is None else spec.axes
        shape = (*(self.plan.mesh.shape[axis] for axis in apart), *kind.shape)
        return Tensor(f"value {value}", shape, kind.dtype, (*((axis,) for axis in apart), *spec.partial), role)

    def __call__(self, *values: Any) -> list[Any]:
        evaluator = Evaluator(self.plan, self._backend())
        entries: dict[int, Entry] = {}
        for v, x in zip(self.inputs, values, strict=True):
            spec = self.spec(v)
            entries[v] = (x, spec if self.graph.types[v].shape else None, self._phase(v))
        walk = _PartWalk(self, evaluator, entries)
        walk.run()
        found = [entries[v] if v in entries else walk.stacked[v] for v in self.outputs]
        return [evaluator.settled(entry)[0] for entry in found]

    def _backend(self) -> Backend:
        if self.mesh is not None:
            return OnDevices(self.plan, self.mesh)
        device = OneShare(self.plan)
        device.platform = self.platform
        return device

    def _phase(self, value: int) -> str:
        index = int(self.graph.columns.producer[value])
        return self.graph.ops[index].phase if index >= 0 else "forward"

    def compile(self, device: Any, limit_bytes: float | None = None, laps: int = 1) -> PartProgram:
        """Compiles for a device or for the mesh.

        Args:
            device: The device that rehearses; any of the mesh.
            limit_bytes: Bytes that the program may need on a device; None for no limit.
            laps: How often a run computes the part.

        Raises:
            TooLarge: The program needs more memory than the limit.
        """
        self.platform = device.platform
        tensors = [self.kind(v) for v in self.inputs]
        shapes = [
            t.shape if self.mesh is not None else local_shape(t.shape, t.spec, self.plan.mesh.shape) for t in tensors
        ]
        types = [jax.ShapeDtypeStruct(shape, self.dtype(v)) for v, shape in zip(self.inputs, shapes, strict=True)]
        if self.mesh is None:
            places: list[Any] = [jax.sharding.SingleDeviceSharding(device)] * len(types)
        else:
            places = [NamedSharding(self.mesh, partition_spec(t.spec)) for t in tensors]
        function = self if laps == 1 else partial(self._laps, laps)
        jitted = jax.jit(function, in_shardings=tuple(places), compiler_options=compiler_options(device.platform))
        compiled = jitted.lower(*types).compile()
        refuse_large(compiled, limit_bytes)
        devices = [device] if self.mesh is None else list(self.mesh.devices.flat)
        return PartProgram(compiled, partial(self._draw, tensors, types, places), in_turn(compiled, devices), laps)

    def _draw(self, tensors: Sequence[Tensor], types: Sequence[Any], places: Sequence[Any]) -> list[Any]:
        rows, highest = looked_up(self.graph), longest(tensors)
        values: list[Any] = []
        for seed, (value, tensor, kind) in enumerate(zip(self.inputs, tensors, types, strict=True)):
            own = self._own_integers(value) if jnp.issubdtype(kind.dtype, jnp.integer) else None
            if own is not None:
                values.append(own[tuple(map(slice, kind.shape))].astype(kind.dtype))
            else:
                values.append(drawn(tensor, kind, seed, rows.get(value, highest)))
        return jax.block_until_ready([jax.device_put(x, place) for x, place in zip(values, places, strict=True)])

    def _own_integers(self, value: int) -> np.ndarray | None:
        """What a value is by the user's own integers; None inside of loops, and where it follows from anything else."""
        if value in self.graph.inputs:
            return self.indices.given.get(self.graph.inputs.index(value))
        maker = self.graph.ops[int(self.graph.columns.producer[value])]
        for operation in self.program.operations:
            if operation.id == maker.serial and operation.name == maker.primitive:
                return self.indices.follow(self.program, operation.outputs[maker.outputs.index(value)])
        return None

    def _laps(self, laps: int, *values: Any) -> list[Any]:
        """The part several times in one program: each lap takes its operands only when the lap before is done."""
        kinds = jax.eval_shape(self, *values)

        def lap(_: Any, made: list[Any]) -> list[Any]:
            own, _ = lax.optimization_barrier((values, made))
            return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in self(*own)]

        return lax.fori_loop(0, laps, lap, [_zeros(kind) for kind in kinds])

    def dtype(self, value: int) -> np.dtype:
        """JAX's own dtype of a value: those of random keys have no name that numpy knows."""
        name = self.graph.types[value].dtype
        for op in self.graph.ops if name.startswith("key<") else ():
            for var in () if op.equation is None else (*op.equation.invars, *op.equation.outvars):
                if str(var.aval.dtype) == name:
                    return var.aval.dtype
        return jnp.dtype(name)


def _zeros(kind: Any) -> jax.Array:
    if jax_compat.is_key_dtype(kind.dtype):
        bits = jnp.zeros((*kind.shape, *jax_compat.key_shape(kind.dtype)), "uint32")
        return jax_compat.keys_of_bits(bits, kind.dtype)
    return jnp.zeros(kind.shape, kind.dtype)


class _PartWalk:
    """One pass over the operations of a part."""

    def __init__(self, part: PartFunction, evaluator: Evaluator, entries: dict[int, Entry]):
        self.part, self.evaluator, self.entries = part, evaluator, entries
        self.stacked: dict[int, Entry] = {}  # what one trip of a loop adds to a stack, by the stack's value
        self.apart: dict[int, Entry] = {}  # values that recomputed operations read
        self.recomputed: set[int] = set()  # values that recomputed operations made

    def run(self) -> None:
        for index in self.part.operations:
            op = self.part.graph.ops[index]
            plan = self.part.plans.get(op.serial)
            if op.equation is None:
                self._pseudo(op, plan)
                continue
            made = self.evaluator.operation(op.equation, plan, [self._read(op, i) for i in range(len(op.inputs))])
            self.entries.update(zip(op.outputs, made, strict=True))
            if op.recomputed:
                self.recomputed |= set(op.outputs)

    def _read(self, op: Op, position: int) -> Entry:
        value = op.inputs[position]
        var = op.equation.invars[position] if op.equation is not None else None
        if isinstance(var, jax_compat.Literal):
            return var.val, None, "forward"
        if value in self.stacked and value not in self.entries:
            self.entries[value] = self._stack(op, position)
        if value not in self.entries:  # a constant, whose contents a traced program does not keep
            return np.zeros(self.part.graph.types[value].shape, self.part.dtype(value)), None, "forward"
        if op.recomputed and value not in self.recomputed:
            return self._kept_apart(value)
        return self.entries[value]

    def _kept_apart(self, value: int) -> Entry:
        """A value behind a barrier: XLA would merge the recomputation with the first computation."""
        found = self.entries[value]
        if isinstance(found[0], Placeholder):
            return found
        if value not in self.apart:
            self.apart[value] = (lax.optimization_barrier(found[0]), *found[1:])
        return self.apart[value]

    def _pseudo(self, op: Op, plan: OpPlan | None) -> None:
        """The tracer's own operations: one trip of a loop, and the first of several branches."""
        if op.primitive == "loop_stack":
            self.stacked[op.outputs[0]] = self._read(op, 0)
            return
        if op.primitive == "loop_slice" and op.inputs[0] in self.stacked:
            entry = self.stacked[op.inputs[0]]
        elif op.primitive == "loop_slice":
            value, spec, phase = self._read(op, 0)
            entry = _first(value, spec, phase, self.evaluator)
        else:
            entry = self._read(op, 0)
        target = None if plan is None else plan.results[0]
        if plan is not None and not isinstance(entry[1], Waiting) and target is not None:
            entry = (self.evaluator.to(entry, target), target, plan.phase)
        self.entries[op.outputs[0]] = entry

    def _stack(self, op: Op, position: int) -> Entry:
        value, spec, phase = self.evaluator.settled(self.stacked[op.inputs[position]])
        length = op.signature.operands[position].shape[0]
        made = self.evaluator.plain((value, spec, phase))
        return jnp.broadcast_to(made, (length, *made.shape)), ((), *(spec or ((),) * made.ndim)), phase


def _first(value: Any, spec: Any, phase: str, evaluator: Evaluator) -> Entry:
    """One trip's slice of a stack."""
    known, held, phase = evaluator.settled((value, spec, phase))
    whole = evaluator.plain((known, held, phase))
    return whole[0], None if held is None else held[1:], phase
