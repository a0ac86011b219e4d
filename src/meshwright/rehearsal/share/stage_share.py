"""One device's share of the programs of a pipeline's stages, as functions of that device's shards.

The stages are lowered as the runtime lowers them, for devices that are only described: so the programs, the shardings
of their arguments and results, and how often each runs are the real ones. The functions here compute the same on one
device's shards; collectives, between replicas and inside one, are replaced by stand-ins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright import jax_compat
from meshwright.graph import Traced
from meshwright.plans.plan import PlanData
from meshwright.plans.tensor import Spec, Tensor
from meshwright.program.program import Operation
from meshwright.rehearsal.share import stand_ins
from meshwright.rehearsal.share.indices import Indices
from meshwright.rehearsal.share.local_equation import local_shape, run_local
from meshwright.rehearsal.share.one_share import OneShare
from meshwright.rehearsal.share.program import drawn, longest
from meshwright.runtime.checking.verify_stages import staged_program
from meshwright.runtime.microbatches.part import Key
from meshwright.runtime.program.evaluate import Entry, Evaluator
from meshwright.runtime.spmd import compiler_options
from meshwright.runtime.stages.cutting.packs import Packs
from meshwright.runtime.stages.engine import Engine
from meshwright.runtime.stages.lowering.layout import REPLICAS, without_replicas
from meshwright.runtime.stages.lowering.lowered import Lowered
from meshwright.runtime.stages.lowering.planned_pieces import PlannedPieces
from meshwright.runtime.stages.lowering.stage_lowering import StageLowering
from meshwright.schedules.instructions import UPDATE


@dataclass(frozen=True)
class DescribedDevice:
    """A device of a plan's cluster that need not be here."""

    id: int
    platform: str
    device_kind: str
    process_index: int = 0


def described_engine(plan: PlanData, traced: Traced) -> Engine:
    """The programs and instructions of a plan's stages on the devices of its cluster, which need not be here."""
    cluster = plan.mesh.cluster
    assert cluster is not None
    platform = "cpu" if plan.mesh.is_cpu else "gpu"
    devices = [DescribedDevice(number, platform, cluster.chip.name) for number in range(cluster.num_devices)]
    return staged_program(plan, traced, devices).engine


class StageShare:
    """One device's share of one program of a stage: a pass over a microbatch, or a round of the update.

    Args:
        plan: The plan.
        own: The lowering of the stage, after all its programs were lowered.
        lowered: The program.
        packs: The packed scalars of the update.
        indices: The integers among the arguments of the step.

    Attributes:
        types, results: The types of the shards of its arguments and results.
        whole: Names of operations that could not be computed on shards, once it was traced.
    """

    def __init__(self, plan: PlanData, own: StageLowering, lowered: Lowered, packs: Packs, indices: Indices):
        self.plan, self.own, self.lowered, self.program, self.packs = plan, own, lowered, lowered.program, packs
        self.indices = indices
        self.whole: set[str] = set()
        self.platform: str | None = None
        self.types = _shards(lowered.types, lowered.places)
        self.results = _shards(lowered.results, lowered.shardings)

    def lower(self, device: Any) -> jax.stages.Lowered:
        """JAX's lowering for a device.

        Raises:
            ShardingError: The plan runs a fused kernel that the device does not have.
        """
        self.platform = device.platform
        where = jax.sharding.SingleDeviceSharding(device)
        jitted = jax.jit(
            self._update if self.program.work == UPDATE else self._pass,
            in_shardings=where,
            out_shardings=where,
            donate_argnums=tuple(self.lowered.donated),
            keep_unused=True,
            compiler_options=compiler_options(device.platform),
        )
        return jitted.lower(*self.types)

    def draw(self, device: Any) -> list[Any]:
        """Values to run it on: the first microbatch, and the rest as in `Share.draw`."""
        names, program = self._names(), self.own.step.program
        tensors = [self._tensor(name, kind) for name, kind in zip(names, self.types, strict=True)]
        values, highest = list[Any](), longest(tensors)
        for seed, (name, tensor, kind) in enumerate(zip(names, tensors, self.types, strict=True)):
            whole = None
            if name is not None and tensor.role == "data" and jnp.issubdtype(kind.dtype, jnp.integer):
                whole = self.indices.follow(program, name)
            if whole is not None:
                values.append(first_parts(whole, kind.shape).astype(kind.dtype))
            else:
                values.append(drawn(tensor, kind, seed, self.indices.rows_of(program, name, highest)))
        return [jax.device_put(value, device, may_alias=False) for value in values]

    def _names(self) -> list[int | None]:
        """The number of the value that each argument is; None for numbers of microbatches, totals and packs."""
        own, program = self.own, self.program
        if program.work != UPDATE:
            found = [None, *(v for v, _ in program.inputs)]
        else:
            found = [v for v, _ in self.packs.single(program) for _ in own.parts(v, program)]
        return found + [None] * (len(self.types) - len(found))

    def _tensor(self, value: int | None, kind: Any) -> Tensor:
        """What a value is drawn as; totals, numbers and the optimizer's state begin at zero."""
        role, inputs = "data", self.own.step.program.inputs
        if value is None:
            role = "optimizer" if jnp.issubdtype(kind.dtype, jnp.inexact) else "static"
        elif value in inputs and not self.own.programs.is_batch(value):
            path = self.own.programs.assignment.paths[value]
            role = next((t.role for t in self.plan.arguments if t.path == path), "optimizer")
        return Tensor(f"value {value}", tuple(kind.shape), str(kind.dtype), (), role)

    def _pass(self, index: Any, *args: Any) -> list[Any]:
        """A pass over one replica's rows of a microbatch."""
        own, program = self.own, self.program
        given = {key: self._enter(key, x, index) for key, x in zip(program.inputs, args, strict=False)}
        specs = own.specs | {key: self._leaf_spec(key[0]) for key in program.inputs if key[0] in own.leaf_specs}
        values = _Pieces(self).run(program, given, index * own.devices.num_replicas, specs, {}, {})
        sums = zip(program.totals, args[len(program.inputs) :], strict=True)
        return [*(values[key] for key in program.outputs), *(self._add(v, x, values[v, None]) for v, x in sums)]

    def _add(self, value: int, total: Any, mine: Any) -> jax.Array:
        """A total with the contribution of one more microbatch, scattered over the replicas where each has a part."""
        held, mine = self.own.totals[value], mine.astype(total.dtype)
        if held.part is not None:
            mine = stand_ins.reduce_scatter(mine, held.part, self.own.devices.num_replicas)
        return held.combined(total, mine.reshape(total.shape))

    def _enter(self, key: Key, x: Any, index: Any) -> jax.Array:
        """An input as a part sees it, as `StageLowering` has it: its own rows, and parameters whole."""
        own = self.own
        if own.is_batch(key) or (key in own.step.sliced and key[1] is not None):
            return lax.dynamic_index_in_dim(x, index, keepdims=False)
        if key[0] in own.step.program.inputs:
            for dim, axes in enumerate(own.leaf_specs.get(key[0], ())):
                if REPLICAS in axes:
                    x = stand_ins.all_gather(x, dim, own.devices.num_replicas)
        return x

    def _leaf_spec(self, leaf: int) -> Spec:
        """How a replica splits an argument's leaf, once it has it whole."""
        return without_replicas(self.own.leaf_specs[leaf])

    def _update(self, *args: Any) -> list[Any]:
        """A round of the update: every value is split as state that it is connected with."""
        own, program, given = self.own, self.program, iter(args)
        env = dict(own.step.program.constants)
        for key in self.packs.single(program):
            env[key[0]] = self._total(key[0], [next(given) for _ in own.parts(key[0], program)])
        for pack in self.packs.read(program):
            values = next(given)
            env |= {v: values[i].reshape(own.types[v].shape) for i, v in enumerate(self.packs.values[pack])}
        for piece in program.pieces:
            self._locally(piece.unit, env)
        packs = self.packs.sent(own.stage, program.place)
        packed = [jnp.stack([env[v].reshape(()) for v in self.packs.values[pack]]) for pack in packs]
        made = [fitted(env[v], kind.shape) for (v, _), kind in zip(program.outputs, self.results, strict=False)]
        return [*made, *packed]

    def _total(self, value: int, parts: Sequence[Any]) -> jax.Array:
        """A value of the update: the stand-in of the sum over replicas is the own total, scattered where state is."""
        own = self.own
        if value in self.program.totals and value in own.totals:
            held = parts[0].shape[parts[0].ndim - len(own.types[value].shape) :]
            mine = stand_ins.unchanged(parts[0].reshape(held))
            return fitted(mine, self._local(value)).astype(own.types[value].dtype)
        if value in self.program.totals:
            return jnp.concatenate(parts, own.dim(value, None)) if len(parts) > 1 else parts[0]
        if value in own.step.program.inputs and own.programs.is_batch(value):
            return lax.collapse(parts[0], 0, 2)
        return fitted(parts[0], self._local(value))

    def _local(self, value: int) -> tuple[int, ...]:
        """The shape of one device's part of a value of the update."""
        return local_shape(self.own.types[value].shape, self.own.update_spec(value), dict(self.own.devices.mesh.shape))

    def _locally(self, unit: Operation, env: dict[int, Any]) -> None:
        """One operation on shards; whole, with a note, where that is not possible."""
        eqn, operands = unit.equation, [env[v] for v in unit.inputs]
        expected = [self._local(v) for v in unit.outputs]
        made = run_local(eqn, operands, expected)
        if made is None:
            self.whole.add(eqn.primitive.name)
            wide = [fitted(x, v.aval.shape) for x, v in zip(operands, eqn.invars, strict=True)]
            made = [fitted(x, shape) for x, shape in zip(jax_compat.bind(eqn, wide), expected, strict=True)]
        env.update(zip(unit.outputs, made, strict=True))


class _Pieces(PlannedPieces):
    """The pieces of a pass, on one device's shards."""

    def __init__(self, share: StageShare):
        own = share.own
        super().__init__(share.plan, share.plan.stages[own.stage], own.devices, own.pieces.ops, own.step)
        self.waits = own.pieces.waits
        self.share = share

    def evaluator(self) -> Evaluator:
        device = OneShare(self.plan)
        device.whole, device.platform = self.share.whole, self.share.platform
        return Evaluator(self.plan, device)

    def given(self, evaluator: Evaluator, entry: Entry) -> tuple[Any, Spec | None]:
        value, spec = super().given(evaluator, entry)
        return evaluator.plain((value, spec, "forward")), spec


def fitted(value: Any, shape: Sequence[int]) -> jax.Array:
    """A value of some shape: of dims that are longer the first part, and dims that are shorter repeated."""
    for dim, (size, wanted) in enumerate(zip(value.shape, shape, strict=True)):
        if size > wanted:
            value = lax.slice_in_dim(value, 0, wanted, axis=dim)
        elif size < wanted:
            value = stand_ins.repeated(value, dim, wanted // size)
    return value


def first_parts(whole: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The first part of an array; an argument's microbatches are apart, those of one device before all others."""
    if whole.ndim < len(shape):
        whole = whole[: shape[0] * shape[1]].reshape(shape[0], shape[1], *whole.shape[1:])
    return whole[tuple(map(slice, shape))]


def _shards(types: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    return [
        jax.ShapeDtypeStruct(sharding.shard_shape(tuple(kind.shape)), kind.dtype)
        for kind, sharding in zip(types, shardings, strict=True)
    ]
