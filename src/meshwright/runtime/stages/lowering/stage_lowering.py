"""Makes JAX programs of a stage's programs: on its devices, its replicas side by side, each split as the plan says."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.parallelism.subject.subject import spread_of
from meshwright.plans.operations import OpPlan
from meshwright.plans.plan import PlanData, partition_spec
from meshwright.plans.tensor import Spec
from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.microbatches.cut_operations import Cut, is_half
from meshwright.runtime.microbatches.part import Key
from meshwright.runtime.program.contributions import Waiting
from meshwright.runtime.program.meshes import shard_map
from meshwright.runtime.stages.cutting.packs import Packs
from meshwright.runtime.stages.cutting.stage_programs import StageProgram, StagePrograms
from meshwright.runtime.stages.lowering.comparing import run_once
from meshwright.runtime.stages.lowering.layout import (
    REPLICAS,
    StageDevices,
    fitted,
    is_spread,
    stage_spec,
    without_replicas,
)
from meshwright.runtime.stages.lowering.lowered import Lowered, jitted
from meshwright.runtime.stages.lowering.planned_pieces import PlannedPieces
from meshwright.runtime.stages.lowering.totals import Total
from meshwright.runtime.stages.lowering.update_shardings import specs_of_update


class StageLowering:
    """Lowers the programs of one stage.

    Args:
        programs: All programs.
        stage: The number of the stage.
        devices: Its devices.
        plan: The plan.
        ops: How the operations of one replica are split, by number; none where a replica is one device.

    Attributes:
        step: The step cut into parts, as this stage cuts it.
        pieces: Runs the pieces of its passes.
        specs: How values are split inside a replica, once the program that computes them is lowered.
        totals: The totals over all microbatches, likewise.
        spreads_gradients: Whether each replica holds a part of the gradients, as ZeRO does from its second stage on.
        leaf_specs: How the leaves of the arguments that the stage has are split over its devices.
    """

    def __init__(
        self,
        programs: StagePrograms,
        stage: int,
        devices: StageDevices,
        plan: PlanData,
        ops: Mapping[int, OpPlan],
    ):
        self.programs, self.stage, self.devices = programs, stage, devices
        self.step = programs.steps[stage]
        self.pieces = PlannedPieces(plan, plan.stages[stage], devices, ops, self.step)
        self.specs: dict[Key, Spec | None] = {}
        self.totals: dict[int, Total] = {}
        self.spreads_gradients = devices.num_replicas > 1 and spread_of(plan.stages[stage]) > 1
        held = {t.path: stage_spec(t.spec) for t in plan.stages[stage].tensors}
        self.leaf_specs = {
            leaf: fitted(held[path], self.types[leaf].shape, devices.mesh)
            for leaf, path in enumerate(programs.assignment.paths)
            if path in held
        }

    @property
    def types(self) -> Sequence[Any]:
        return self.step.program.types

    def leaf(self, leaf: int) -> NamedSharding:
        """The sharding of an argument's leaf that this stage has."""
        return NamedSharding(self.devices.mesh, partition_spec(self.leaf_specs.get(leaf, ())))

    def batch(self, leaf: int) -> NamedSharding:
        """The sharding of a stack of examples, as a stack of microbatches."""
        return self.devices.split(len(self.types[leaf].shape) + 1, 1)

    def value(self, key: Key) -> NamedSharding:
        """The sharding of a value that passes compute or receive."""
        rank = len(self.types[key[0]].shape)
        return self.devices.split(rank, self.dim(*key), self.specs.get(key))

    def value_type(self, key: Key) -> jax.ShapeDtypeStruct:
        """The type of a microbatch of such a value."""
        aval = self.types[key[0]]
        return jax.ShapeDtypeStruct(Cut(self.devices.num_microbatches, 1).shape(aval.shape, self.dim(*key)), aval.dtype)

    def prepare(self, program: StageProgram) -> Lowered:
        """What is computed once a step."""
        cut = Cut(self.devices.num_microbatches, 1)

        def run(*args: Any) -> list[Any]:
            values = dict(self.step.program.constants)
            for key, x in zip(program.inputs, args, strict=True):
                values[key[0]] = lax.collapse(x, 0, 2) if self.is_batch(key) else x
            for piece in program.pieces:
                run_once(piece.unit, values)
            return [
                cut.parts(jnp.asarray(values[v]), self.dim(v, d)) if (v, d) in self.step.sliced else values[v]
                for v, d in program.outputs
            ]

        shardings: list[NamedSharding] = []
        for key in program.outputs:
            value, dim = key
            if key in self.step.sliced:
                shardings.append(self.devices.split(len(self.types[value].shape) + 1, self.dim(value, dim) + 1))
            else:
                self.specs[key] = self.pieces.spec(program, key)
                shardings.append(self.devices.inner(self.specs[key]))
        types, places = self._inputs(program)
        return self._lower(program, run, types, places, shardings)

    def one_pass(self, program: StageProgram) -> Lowered:
        """A pass over a microbatch: of its number, the inputs and the totals, to the outputs and the totals."""
        made: dict[Key, Spec | None] = {}
        waiting: dict[int, Waiting] = {}
        replicas, count = self.devices.num_replicas, len(program.inputs)

        def run(index: Any, *args: Any) -> list[Any]:
            number = index * replicas + (lax.axis_index(REPLICAS) if replicas > 1 else 0)
            given = {key: self._enter(key, x, index) for key, x in zip(program.inputs, args, strict=True)}
            values = self.pieces.run(program, given, number, self.specs, made, waiting)
            sums = (values[v, None][None].astype(self._wide(v)) for v in program.totals)
            return [*(values[key] for key in program.outputs), *sums]

        types, places = self._inputs(program)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        closed = jax.make_jaxpr(self._on_replicas(program, run, places))(number, *types)
        self.specs |= made
        totals = [self._total(v, waiting.get(v, Waiting((), (), ()))) for v in program.totals]
        self.totals |= dict(zip(program.totals, totals, strict=True))
        body, kept = jaxpr_as_fun(closed), len(program.outputs)

        def add(index: Any, *args: Any) -> list[Any]:
            found = body(index, *args[:count])
            sums = zip(totals, args[count:], found[kept:], strict=True)
            return [*found[:kept], *(total.add(before, mine) for total, before, mine in sums)]

        held, lying = [total.type for total in totals], [total.sharding for total in totals]
        results = [*closed.out_avals[:kept], *held]
        shardings = [*(self.value(key) for key in program.outputs), *lying]
        places = [self.devices.everywhere, *places, *lying]
        donated = range(1 + count, 1 + count + len(totals))
        return jitted(program, add, [number, *types, *held], results, places, shardings, donated)

    def _on_replicas(
        self, program: StageProgram, run: Callable[..., list[Any]], places: Sequence[NamedSharding]
    ) -> Callable[..., list[Any]]:
        """A pass that each replica runs on its own rows of a microbatch, with parameters whole."""
        if self.devices.num_replicas == 1:
            return run
        inner = [self._gathered(key, place) for key, place in zip(program.inputs, places, strict=True)]
        out = [_manual(self.devices.split(len(self.types[v].shape), self.dim(v, d))) for v, d in program.outputs]
        goals = (PartitionSpec(), *map(_manual, inner)), [*out, *(PartitionSpec(REPLICAS) for _ in program.totals)]
        mapped = shard_map(run, self.devices.mesh, *goals, {REPLICAS})

        def gather(index: Any, *args: Any) -> list[Any]:
            whole = [
                x if goal is place else lax.with_sharding_constraint(x, goal)
                for x, place, goal in zip(args, places, inner, strict=True)
            ]
            return mapped(index, *whole)  # type: ignore[no-any-return]

        return gather

    def _gathered(self, key: Key, place: NamedSharding) -> NamedSharding:
        """The sharding of an input in which each replica has a parameter whole."""
        spec = self.leaf_specs.get(key[0], ()) if key[0] in self.step.program.inputs else ()
        return self.devices.inner(without_replicas(spec)) if is_spread(spec) else place

    def _total(self, value: int, own: Waiting) -> Total:
        """How the stage holds a total; of gradients that the plan spreads over the replicas, each has its part."""
        shape, kind = tuple(self.types[value].shape), str(self.step.analysis.status[value])
        whole = Total(kind, shape, self._wide(value), own, self.devices.mesh)
        spec = self.update_spec(value)
        if kind != "sum" or not (self.spreads_gradients and is_spread(spec)):
            return whole
        dim = next(d for d, axes in enumerate(spec) if REPLICAS in axes)
        over = (*(own.partial[dim] if own.partial else ()), REPLICAS)
        is_even = shape[dim] % prod(self.devices.mesh.shape[axis] for axis in over) == 0
        return replace(whole, part=dim) if is_even else whole

    def zeros(self, program: StageProgram) -> Callable[[], Sequence[Any]]:
        """The totals of a pass before the first microbatch."""
        totals = [self.totals[v] for v in program.totals]
        make = jax.jit(lambda: [total.start() for total in totals], out_shardings=[t.sharding for t in totals])
        return in_turn(make, self._devices)

    def update(self, program: StageProgram, packs: Packs) -> Lowered:
        """A round of the update: of its inputs and of what other stages packed, to its outputs and its own packs."""
        own, coming = packs.sent(self.stage, program.place), packs.read(program)
        single = packs.single(program)

        def run(*args: Any) -> list[Any]:
            env, given = dict(self.step.program.constants), iter(args)
            for key in single:
                env[key[0]] = self._whole(key[0], [next(given) for _ in self.parts(key[0], program)], program)
            for pack in coming:
                values = next(given)
                for i, v in enumerate(packs.values[pack]):
                    env[v] = values[i].reshape(self.types[v].shape)
            for piece in program.pieces:
                run_once(piece.unit, env)
            packed = [jnp.stack([env[v].reshape(()) for v in packs.values[pack]]) for pack in own]
            return [*(env[v] for v, _ in program.outputs), *packed]

        types = [t for key in single for t in self.parts(key[0], program)]
        places = [self.update_place(key[0], program) for key in single for _ in self.parts(key[0], program)]
        types += [jax.ShapeDtypeStruct((len(packs.values[pack]),), pack[2]) for pack in coming]
        places += [self.devices.everywhere] * len(coming)
        shardings = [self._result(key[0]) for key in program.outputs]
        shardings += [self.devices.everywhere] * len(own)
        donated = self._donated(program, single)
        made = [self.types[v] for v, _ in program.outputs]
        free = Counter(map(_local_type, made, shardings)) - Counter(_local_type(types[i], places[i]) for i in donated)
        for i, value in enumerate(key[0] for key in single for _ in self.parts(key[0], program)):
            if value in program.totals and value in self.totals and free[kind := _local_type(types[i], places[i])]:
                donated.append(i)  # of which nobody reads more than the sum, which takes its place
                free[kind] -= 1
        return self._lower(program, run, types, places, shardings, donated)

    def parts(self, value: int, program: StageProgram) -> list[Any]:
        """The types of the arrays that an update is given for a value: a total, one for each microbatch, or itself."""
        aval, count = self.types[value], self.devices.num_microbatches
        if value in program.totals and value in self.totals:
            return [self.totals[value].type]
        if value in program.totals:
            return [jax.ShapeDtypeStruct(Cut(count, 1).shape(aval.shape, self.dim(value, None)), aval.dtype)] * count
        shape = tuple(aval.shape)
        if value in self.step.program.inputs and self.programs.is_batch(value):
            shape = (count, shape[0] // count, *shape[1:])
        return [jax.ShapeDtypeStruct(shape, aval.dtype)]

    def _whole(self, value: int, parts: Sequence[Any], program: StageProgram) -> jax.Array:
        """A value for the update, from the arrays that it is given for it."""
        if value in program.totals and value in self.totals:
            total = self.totals[value].added_up(parts[0], self.update_spec(value))
            return total.astype(self.types[value].dtype)
        if value in program.totals:
            return jnp.concatenate(parts, self.dim(value, None)) if len(parts) > 1 else parts[0]
        if value in self.step.program.inputs and self.programs.is_batch(value):
            return lax.collapse(parts[0], 0, 2)
        return parts[0]

    def update_spec(self, value: int) -> Spec:
        """How an update splits a value: as state that it is computed from or becomes, or as the passes split it."""
        return self._update_specs.get(value) or self.specs.get((value, None)) or ()

    @cached_property
    def _update_specs(self) -> dict[int, Spec]:
        return specs_of_update(self.programs, self.stage, self.leaf_specs, self.devices.mesh.shape)

    def update_place(self, value: int, program: StageProgram | None = None) -> NamedSharding:
        """The sharding of a value that an update reads; with the update, of the arrays that it is given for it."""
        if program is not None and value in program.totals:
            return self.totals[value].sharding if value in self.totals else self.value((value, None))
        if value in self.step.program.inputs:
            if self.programs.is_batch(value):
                return self.batch(value)
            return self.devices.everywhere if self.programs.is_everywhere(value) else self.leaf(value)
        return self._result(value)

    def _result(self, value: int) -> NamedSharding:
        """The sharding of a value of the update: that of the state that it becomes, or of state connected with it."""
        state = self.programs.assignment.state
        leaves = [state[i] for i, v in enumerate(self.step.program.outputs) if v == value and i in state]
        mine = [leaf for leaf in leaves if not self.programs.is_everywhere(leaf)]
        if mine and not self.programs.is_batch(mine[0]):
            return self.leaf(mine[0])
        return NamedSharding(self.devices.mesh, partition_spec(self.update_spec(value)))

    def _donated(self, program: StageProgram, single: Sequence[Key]) -> list[int]:
        """The arguments of a round of the update that nobody reads afterwards."""
        later = {
            key
            for (stage, turn), other in self.programs.updates.items()
            if stage == self.stage and turn > program.place
            for key in other.inputs
        }
        places = [key for key in single for _ in self.parts(key[0], program)]
        return [i for i, key in enumerate(places) if key not in later and self._gives_away(key[0])]

    def _gives_away(self, value: int) -> bool:
        """Whether a value is a donated argument of which this stage has the only copy."""
        programs, program = self.programs, self.step.program
        if value not in program.inputs or value in program.outputs or programs.is_everywhere(value):
            return False
        if any((value, self.stage) == one[:2] for sent in programs.rounds.sent.values() for one in sent):
            return False  # another stage may fetch it only after this stage's next round
        return value in programs.assignment.donated and programs.assignment.argument[value] == self.stage

    def _inputs(self, program: StageProgram) -> tuple[list[Any], list[NamedSharding]]:
        """Types and shardings of a program's inputs."""
        types, places = [], []
        count = self.devices.num_microbatches
        for key in program.inputs:
            value, dim = key
            aval = self.types[value]
            shape, status = tuple(aval.shape), self.step.analysis.status[value]
            if self.is_batch(key):
                shape, place = (count, shape[0] // count, *shape[1:]), self.batch(value)
            elif key in self.step.sliced and dim is not None:
                shape = (count, *Cut(count, 1).shape(shape, dim))
                place = self.devices.split(len(shape), dim + 1)
            elif isinstance(status, int) or dim is not None:
                shape, place = Cut(count, 1).shape(shape, self.dim(*key)), self.value(key)
            elif value in self.step.program.inputs:
                place = self.devices.everywhere if self.programs.is_everywhere(value) else self.leaf(value)
            else:
                place = self.devices.inner(self.specs.get(key))
            types.append(jax.ShapeDtypeStruct(shape, aval.dtype))
            places.append(place)
        return types, places

    def _enter(self, key: Key, x: Any, index: Any) -> jax.Array:
        """An input as a part sees it: its own rows."""
        if self.is_batch(key) or (key in self.step.sliced and key[1] is not None):
            return lax.dynamic_index_in_dim(x, index, keepdims=False)
        return x

    def is_batch(self, key: Key) -> bool:
        """Whether a value is an argument's leaf that is a stack of examples."""
        return key[0] in self.step.program.inputs and self.programs.is_batch(key[0])

    def dim(self, value: int, dim: int | None) -> int:
        """The dim along which a value is cut into parts, given the second half of its key."""
        found = self.step.analysis.status[value] if dim is None else dim
        assert isinstance(found, int)
        return found

    def _wide(self, value: int) -> np.dtype:
        """The dtype of a total: half-precision sums are added up in float32."""
        dtype = self.types[value].dtype
        adds = self.step.analysis.status[value] == "sum" and is_half(dtype)
        return jnp.dtype(jnp.float32) if adds else dtype

    @property
    def _devices(self) -> np.ndarray:
        return self.devices.mesh.devices.ravel()

    def _lower(
        self,
        program: StageProgram,
        function: Callable[..., Any],
        types: Sequence[Any],
        places: Sequence[NamedSharding],
        shardings: Sequence[NamedSharding],
        donated: Sequence[int] = (),
    ) -> Lowered:
        closed = jax.make_jaxpr(function)(*types)
        return jitted(program, jaxpr_as_fun(closed), types, closed.out_avals, places, shardings, donated)


def _local_type(aval: Any, sharding: NamedSharding) -> tuple[tuple[int, ...], Any]:
    """The type of one device's part of an array: JAX lets a result take the place of an argument of the same."""
    return sharding.shard_shape(tuple(aval.shape)), aval.dtype


def _manual(sharding: NamedSharding) -> PartitionSpec:
    """The part of a sharding that is the replicas'."""
    dims = []
    for axes in sharding.spec:
        held = axes if isinstance(axes, tuple) else (axes,)
        dims.append(REPLICAS if REPLICAS in held else None)
    return PartitionSpec(*dims)
