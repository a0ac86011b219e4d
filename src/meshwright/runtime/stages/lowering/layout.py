"""The devices of each stage, and how values lie on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import Mesh as DeviceMesh

from meshwright.errors import ClusterError, ShardingError
from meshwright.plans.plan import PlanData, partition_spec
from meshwright.plans.stage import Stage
from meshwright.plans.tensor import Spec, Tensor
from meshwright.runtime.stages.cutting.assignment import Parts, layer_parts
from meshwright.runtime.stages.cutting.layer_stack import StackSharding

STAGES = "stages"  # the axis of arrays that are stacked over the layers of all stages
REPLICAS = "replicas"  # the axis of a stage's devices that splits the rows of a microbatch
_NAMES = {"x": REPLICAS, "y": "x", "z": "y"}  # axes of a stage in the plan, and of one replica


@dataclass(frozen=True)
class StageDevices:
    """The devices of one stage.

    Attributes:
        mesh: Its devices; the first axis is that of the replicas, the others have the names they have in one replica.
        num_replicas: How many replicas there are.
        num_microbatches: Into how many microbatches the batch is cut.
    """

    mesh: DeviceMesh
    num_replicas: int
    num_microbatches: int

    def sharding(self, *dims: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*dims))

    @property
    def everywhere(self) -> NamedSharding:
        """One copy on each device."""
        return self.sharding()

    def split(self, rank: int, dim: int, inner: Spec | None = None) -> NamedSharding:
        """A value whose rows, along a dim, are split over the replicas, and each part as one replica splits it."""
        spec = [list(axes) for axes in inner or ((),) * rank]
        if self.num_replicas > 1:
            spec[dim] = [REPLICAS, *spec[dim]]
        return NamedSharding(self.mesh, partition_spec(tuple(map(tuple, spec))))

    def inner(self, spec: Spec | None) -> NamedSharding:
        """A value that all replicas have, split inside of each."""
        return NamedSharding(self.mesh, partition_spec(spec or ()))


def stage_spec(spec: Spec) -> Spec:
    """A stage's sharding in the plan, in the names of its devices."""
    return tuple(tuple(_NAMES[axis] for axis in axes) for axes in spec)


def is_spread(spec: Spec) -> bool:
    """Whether a value is split over the replicas."""
    return any(REPLICAS in axes for axes in spec)


def without_replicas(spec: Spec) -> Spec:
    """A sharding inside of a replica that has a value whole."""
    return tuple(tuple(axis for axis in axes if axis != REPLICAS) for axes in spec)


def stage_devices(plan: PlanData, devices: Sequence[Any] | None = None) -> list[StageDevices]:
    """The devices of each stage.

    Raises:
        ClusterError: There are fewer than the plan is for.
    """
    assert plan.pipeline is not None and plan.mesh.cluster is not None
    found = list(jax.devices() if devices is None else devices)
    cluster = plan.mesh.cluster
    first, host = [], 0
    for group in cluster.groups:
        first += [host + i * group.devices_per_host for i in range(group.num_hosts)]
        host += group.num_hosts * group.devices_per_host
    if len(found) < host:
        raise ClusterError(
            f"the plan is a pipeline of {len(plan.stages)} stages on {host} devices, and there are {len(found)}; run "
            'it where there are enough, or plan for cluster="local"'
        )
    return [_devices(stage, first, found, plan.pipeline.num_microbatches) for stage in plan.stages]


def _devices(stage: Stage, first: Sequence[int], found: Sequence[Any], num_microbatches: int) -> StageDevices:
    place = stage.submesh
    numbers = [
        first[host] + place.first_device + i
        for host in range(place.first_host, place.first_host + place.num_hosts)
        for i in range(place.devices_per_host)
    ]
    names = (REPLICAS, *stage.mesh.names[: len(stage.mesh.sizes) - 1])
    if prod(stage.mesh.sizes) != len(numbers):
        raise ShardingError(f"a stage of {len(numbers)} devices cannot be seen as a mesh of {stage.mesh.sizes}")
    grid = np.array([found[n] for n in numbers], dtype=object).reshape(stage.mesh.sizes)
    mesh = DeviceMesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    return StageDevices(mesh, stage.mesh.sizes[0], num_microbatches)


def leaf_shardings(plan: PlanData, stages: Sequence[StageDevices]) -> list[NamedSharding | StackSharding | None]:
    """The sharding of each leaf of the arguments: on the stage that owns it; None for data, which stages take in parts.

    A single number, such as a count of steps, is on all devices. An array that is stacked over the layers of several
    stages is split by layers first.
    """
    record = plan.staged_record
    chunk_of = {layer: s for s, stage in enumerate(plan.stages) for a, b in stage.chunks for layer in range(a, b)}
    units = iter(record.argument_unit.tolist())
    found: list[NamedSharding | StackSharding | None] = []
    for tensor in plan.arguments:
        unit = -1 if tensor.role == "static" else next(units)
        if tensor.role in ("static", "data"):
            found.append(None)
        elif prod(tensor.shape) == 1:
            found.append(everywhere(stages))
        elif parts := layer_parts(plan, unit, tensor.shape):
            found.append(_stack_sharding(plan, stages, tensor, parts))
        else:
            owner = chunk_of[int(record.first[unit])]
            found.append(_held(plan, stages, owner, tensor.path, tensor.shape))
    return found


def _held(plan: PlanData, stages: Sequence[StageDevices], stage: int, path: str, shape: Sequence[int]) -> NamedSharding:
    """The sharding of a stage's tensor, or of some of its layers."""
    spec = stage_spec(next(t.spec for t in plan.stages[stage].tensors if t.path == path))
    return NamedSharding(stages[stage].mesh, partition_spec(fitted(spec, shape, stages[stage].mesh)))


def _stack_sharding(
    plan: PlanData, stages: Sequence[StageDevices], tensor: Tensor, parts: Parts
) -> NamedSharding | StackSharding:
    """The sharding of a stack: one of JAX, if the stages have equal parts of it, side by side."""
    rest, count = tensor.shape[1:], len(stages)
    pieces = tuple(_held(plan, stages, v % count, tensor.path, (end - begin, *rest)) for v, begin, end in parts)
    is_even = len({end - begin for _, begin, end in parts}) == 1 and [v for v, _, _ in parts] == list(range(count))
    devices = [device for stage in stages for device in stage.mesh.devices.flat]
    is_alike = len({(piece.spec, piece.mesh.devices.shape) for piece in pieces}) == 1
    if not (is_even and is_alike and len(set(devices)) == len(devices)):
        return StackSharding(tuple((begin, end) for _, begin, end in parts), pieces)
    spec = pieces[0].spec or (None,)
    inner = spec[0] if isinstance(spec[0], tuple) else () if spec[0] is None else (spec[0],)
    names = PartitionSpec((STAGES, *inner) if inner else STAGES, *spec[1:])
    return NamedSharding(_stacked_mesh(stages), names)


def fitted(spec: Spec, shape: Sequence[int], mesh: DeviceMesh) -> Spec:
    """The sharding of some layers of a stack: axes that do not divide the layers split another dim, or none."""
    if not spec or shape[0] % prod(mesh.shape[axis] for axis in spec[0]) == 0:
        return spec
    for dim in range(1, len(spec)):
        if shape[dim] % prod(mesh.shape[axis] for axis in (*spec[0], *spec[dim])) == 0:
            return ((), *spec[1:dim], (*spec[dim], *spec[0]), *spec[dim + 1 :])
    return ((), *spec[1:])


def _stacked_mesh(stages: Sequence[StageDevices]) -> DeviceMesh:
    """The devices of all stages, the stages being the first axis."""
    names = (STAGES, *stages[0].mesh.axis_names)
    devices = np.stack([stage.mesh.devices for stage in stages])
    return DeviceMesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def in_pieces(array: Any, stages: Sequence[StageDevices]) -> list[Any]:
    """The part of each stage of an array that is split by stages along its first dim; nothing is copied."""
    spec = array.sharding.spec
    first = tuple(axis for axis in (spec[0] if isinstance(spec[0], tuple) else (spec[0],)) if axis != STAGES)
    shape = (array.shape[0] // len(stages), *array.shape[1:])
    held = {shard.device: shard.data for shard in array.addressable_shards}
    found = []
    for stage in stages:
        sharding = NamedSharding(stage.mesh, PartitionSpec(first or None, *spec[1:]))
        data = [held[device] for device in stage.mesh.devices.ravel() if device in held]
        found.append(jax.make_array_from_single_device_arrays(shape, sharding, data, dtype=array.dtype))
    return found


def of_pieces(pieces: Sequence[Any], sharding: NamedSharding) -> jax.Array:
    """The inverse of `in_pieces`."""
    shape = (pieces[0].shape[0] * len(pieces), *pieces[0].shape[1:])
    data = [shard.data for piece in pieces for shard in piece.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, data, dtype=pieces[0].dtype)


def everywhere(stages: Sequence[StageDevices]) -> NamedSharding:
    """One copy on each device of all stages, which may share devices."""
    devices = dict.fromkeys(device for stage in stages for device in stage.mesh.devices.ravel())
    return NamedSharding(
        DeviceMesh(np.array(list(devices), dtype=object), ("devices",), axis_types=(AxisType.Auto,)), PartitionSpec()
    )
