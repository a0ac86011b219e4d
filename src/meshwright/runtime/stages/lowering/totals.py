"""Totals over all microbatches: how a stage holds them, adds one more, and adds up what its devices hold in the end.

Sums over devices are deferred: a total holds the contribution of each of several replicas, and of each device along an
axis that a sum in a replica is over, in leading dims of its own. They are added up once, before the update, as the plan
prices it. Replicas alone are part of the first dim instead: then one device's part of the total has the shape of its
part of the sum, which takes its place.
Where the plan spreads gradients over the replicas (ZeRO), each replica holds its part of the sum instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding

from meshwright.plans.plan import partition_spec
from meshwright.plans.tensor import Spec
from meshwright.runtime.microbatches.cut_operations import COMBINE
from meshwright.runtime.program.contributions import Contributions, Waiting
from meshwright.runtime.program.meshes import constrain
from meshwright.runtime.stages.lowering.comparing import reduced
from meshwright.runtime.stages.lowering.layout import REPLICAS, is_spread, without_replicas


@dataclass(frozen=True)
class Total:
    """A total as the devices of a stage hold it.

    Attributes:
        kind: How contributions are combined.
        shape, dtype: Those of the sum.
        own: How a replica splits a contribution and the sum, and the axes over which it is yet to be added up.
        mesh: The stage's devices.
        part: The dim of which each replica holds a part, added up already; None where each holds its own total. The
            sum over a replica's devices is then split as the contributions are.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: Any
    own: Waiting
    mesh: DeviceMesh
    part: int | None = None

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        """The type of the array: replicas, then axes over which it is yet to be added up, then the value's own dims."""
        sizes = self.mesh.shape
        lead = [sizes[REPLICAS]] * self._has_replicas + [sizes[axis] for axis in self.own.axes]
        shape = (lead[0] * self.shape[0], *self.shape[1:]) if self._is_merged else (*lead, *self.shape)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    @property
    def spec(self) -> Spec:
        """The sharding of the array."""
        apart, dims = tuple((axis,) for axis in self.own.axes), list(self.own.partial or ((),) * len(self.shape))
        if self._is_merged:
            return ((REPLICAS, *dims[0]), *dims[1:])
        if self.part is not None:
            dims[self.part] = (*dims[self.part], REPLICAS)
        return (*self._lead, *apart, *dims)

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(self.spec))

    @property
    def _has_replicas(self) -> bool:
        """Whether each of several replicas holds a total of its own, in a leading dim."""
        return self.part is None and self.mesh.shape[REPLICAS] > 1

    @property
    def _is_merged(self) -> bool:
        """Whether the replicas are part of the first dim."""
        return self._has_replicas and bool(self.shape) and not self.own.axes

    @property
    def _lead(self) -> Spec:
        return ((REPLICAS,),) * self._has_replicas

    def start(self) -> jax.Array:
        """The total before the first microbatch."""
        return jnp.full(self.type.shape, start(self.kind, self.dtype), self.dtype)

    def add(self, total: Any, mine: Any) -> jax.Array:
        """The total with the contributions of one more microbatch, which replicas hold in a leading dim."""
        if self.part is not None:
            mine = constrain(mine.sum(0, dtype=self.dtype), self.mesh, self.spec)
        elif not self._has_replicas:
            mine = lax.squeeze(mine, [0])
        elif self._is_merged:
            mine = mine.reshape(self.type.shape)
        return self.combined(total, mine)

    def combined(self, total: Any, more: Any) -> jax.Array:
        """Two totals as one."""
        return COMBINE[self.kind](total, more)

    def added_up(self, total: Any, target: Spec) -> jax.Array:
        """The total of all devices, split over the replicas where an update splits it so."""
        lead = self._lead
        if self.own.axes:
            dims = (*lead, *self.spec[len(lead) + len(self.own.axes) :])
            total = jnp.moveaxis(total, 0, len(self.own.axes)) if lead else total
            waiting = Waiting(self.own.axes, dims, (*lead, *self.own.settled) if self.part is None else dims)
            total = Contributions(self.mesh).add_up(total, waiting)
        if self._is_merged:
            apart = total.reshape(self.mesh.shape[REPLICAS], *self.shape)
            total = constrain(apart, self.mesh, (*lead, self.spec[0][1:], *self.spec[1:]))
        if lead:
            total = self._over_replicas(total, target)
        return constrain(total, self.mesh, target) if is_spread(target) else total

    def _over_replicas(self, totals: Any, target: Spec) -> jax.Array:
        if self.kind != "sum":
            return reduced(self.kind, totals, (0,))
        inner = without_replicas(target)
        if is_spread(target) and _refines(inner, self.own.settled):  # each device has its part already
            totals = constrain(totals, self.mesh, (*self._lead, *inner))
        return totals.sum(0, dtype=totals.dtype)


def _refines(spec: Spec, other: Sequence[tuple[str, ...]]) -> bool:
    """Whether a sharding splits what another one splits, and more."""
    known = other or ((),) * len(spec)
    return all(axes[: len(held)] == held for axes, held in zip(spec, known, strict=True))


def start(kind: str, dtype: Any) -> bool | int | float:
    """What a total starts with, so that it changes nothing."""
    if kind in ("sum", "or"):
        return False if dtype == jnp.bool_ else 0
    if kind == "prod":
        return 1
    if kind == "and":
        return True if dtype == jnp.bool_ else -1
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf if kind == "max" else jnp.inf
    if dtype == jnp.bool_:
        return kind == "min"
    return jnp.iinfo(dtype).min if kind == "max" else jnp.iinfo(dtype).max
