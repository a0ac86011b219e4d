"""Shardings that the user wrote into the function: which axes of which mesh split the result of an operation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ShardingError
from meshwright.rules.base import Signature

#: Operations that only say how their operand is split.
ANNOTATIONS = frozenset(("sharding_constraint", "reshard", "mesh_cast"))

_OF_AUTOMATIC_AXES = ("sharding_constraint", "device_put")
_PARAMS = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}


@dataclass(frozen=True, slots=True)
class Written:
    """The sharding that an operation's first result must have.

    Attributes:
        dims: For each dim the axes that split it, major first; None leaves it to the planner.
        mesh: Sizes of the axes of the user's mesh.
        open: Axes that the sharding does not speak of: they may split any dim.
    """

    dims: tuple[tuple[str, ...] | None, ...]
    mesh: Mapping[str, int]
    open: frozenset[str] = frozenset()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split the result."""
        return tuple(axis for dim in self.dims for axis in dim or ())

    def __str__(self) -> str:
        words = ("UNCONSTRAINED" if d is None else repr(d[0] if len(d) == 1 else d or None) for d in self.dims)
        return f"P({', '.join(words)})"


def written(op: Signature) -> Written | None:
    """The sharding that the user wrote for an operation's first result; None if there is none.

    In JAX a constraint and `jax.device_put` speak of axes of the automatic type, and every other sharding
    (`jax.sharding.reshard`, ``out_sharding=``) of explicit axes.
    """
    name = op.primitive
    sharding = op.params.get(_PARAMS.get(name, "")) or op.params.get("out_sharding") or op.params.get("sharding")
    if name == "device_put" and len(op.results) == 1:  # inside of a function it is a constraint
        sharding = next(iter(op.params.get("devices", ())), None)
        sharding = sharding if hasattr(sharding, "spec") else None
    if sharding is None or not op.results or not op.results[0].shape:
        return None
    rank = len(op.results[0].shape)
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        if getattr(sharding, "is_fully_replicated", False):
            return Written(((),) * rank, {})
        raise ShardingError(
            f"{name} asks for {sharding!r:.80}, which has no named axes; write jax.sharding.NamedSharding(mesh, spec) "
            "or a jax.sharding.PartitionSpec"
        )
    is_explicit = {axis: kind.name == "Explicit" for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)}
    open_axes = frozenset(a for a, explicit in is_explicit.items() if explicit == (name in _OF_AUTOMATIC_AXES))
    if len(open_axes) == len(is_explicit):
        return None
    return Written(spec_dims(spec, rank), dict(mesh.shape), open_axes)


def spec_dims(spec: Any, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    """For each dim of a tensor the axes that a `PartitionSpec` splits it by; None where it leaves the dim open."""
    return tuple(map(_dim, (*spec, *(None,) * (rank - len(spec)))))


def _dim(entry: Any) -> tuple[str, ...] | None:
    if entry is None or isinstance(entry, str):
        return (entry,) if entry else ()
    return tuple(entry) if isinstance(entry, tuple) else None  # the remaining value is P.UNCONSTRAINED
