"""Deferred sums over devices: each device's own contribution to them, and how contributions are added up in the end.

By default XLA adds up a sum where it is computed, over one axis after the other. Here contributions are held apart by
leading dims, one for each axis, so that operations can read them and they are added up once, as was priced.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh as DeviceMesh

from meshwright import jax_compat
from meshwright.graph.accumulation import contributes
from meshwright.graph.tracing.flatten import signature_of
from meshwright.plans.plan import OpPlan, partition_spec
from meshwright.plans.tensor import Spec
from meshwright.rules import loop_nest
from meshwright.runtime.program.meshes import constrain, on_each_device
from meshwright.runtime.program.per_device import CONVOLUTION, cut_first, in_groups, own_part


class Waiting(NamedTuple):
    """The sharding of a value that is yet to be added up over some axes; leading dims hold its contributions apart.

    Attributes:
        axes: The axes, one leading dim each.
        partial: Sharding of the other dims.
        settled: Sharding of the sum.
        plus: A value that is added to the sum afterwards, in that sharding; None for nothing.
    """

    axes: tuple[str, ...]
    partial: Spec
    settled: Spec
    plus: Any = None


def can_contribute(eqn: Any, op: OpPlan) -> bool:
    """Whether each device can compute its contribution to an operation's sums from its own operands."""
    if sums_over_pixels(eqn, op):
        nest = loop_nest(signature_of(eqn))
        pairs = zip(nest.operands[0], op.operands[0] or (), strict=True)
        if any(held and any(nest.loops[loop].halo for loop in dim) for dim, held in pairs):
            return False  # windows reach into neighbours' parts
    return contributes(eqn.primitive.name)


def sums_over_pixels(eqn: Any, op: OpPlan) -> bool:
    """Whether an operation is a convolution whose image is split by rows or columns, such as a gradient of weights."""
    if eqn.primitive.name != CONVOLUTION or not op.sums:
        return False
    image = op.operands[0] or ()
    return any(image[d] for d in eqn.params["dimension_numbers"].lhs_spec[2:])


def sums_by_hand(eqn: Any, op: OpPlan) -> bool:
    """Whether XLA would add up otherwise than was priced.

    XLA adds up over one axis after the other, or over all axes before it scatters over one. It gathers pixels that are
    only summed over, and the operands of convolutions of several groups.
    """
    return len(op.sums) > 1 or sums_over_pixels(eqn, op) or (bool(op.sums) and in_groups(eqn))


def scattered_sums(axes: Sequence[str], settled: Spec) -> list[tuple[int, tuple[str, ...]]]:
    """The reduce-scatters of a sum in the order of the price: for each, the dim it splits and its axes.

    Args:
        axes: The axes that the sum is over, in the order of the mesh.
        settled: Sharding of the sum.
    """
    found = [(d, tuple(axis for axis in axes if axis in held)) for d, held in enumerate(settled)]
    return sorted((item for item in found if item[1]), key=lambda item: -list(axes).index(item[1][-1]))


class Contributions:
    """Makes contributions on some devices, and adds them up."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    def make(
        self, eqn: Any, op: OpPlan, axes: tuple[str, ...], operands: Sequence[Any], waits: Sequence[bool]
    ) -> tuple[Any, Waiting]:
        """Each device's contribution to a sum, or the result of an operation that is applied to contributions.

        Args:
            eqn: The operation.
            op: The operation's entry in the plan.
            axes: The axes that the sum is over.
            operands: The operands in the plan's shardings, or contributions themselves.
            waits: Which operands are contributions.
        """
        if eqn.primitive.name == CONVOLUTION:
            return self._apart(eqn, op, axes, operands)
        ready, exposed = [], []
        for i, (value, spec) in enumerate(zip(operands, op.operands, strict=True)):
            held = [axis for axis in axes if spec is not None and any(axis in dim for dim in spec)]
            if waits[i]:
                held = list(axes)
            elif held:
                value = self._expose(value, spec or (), held)
            elif eqn.primitive.name == "scatter-add" and i == 0:
                value, held = self.counted_once(value, axes), list(axes)
            ready.append(value)
            exposed.append(held)

        def function(*xs: Any) -> jax.Array:
            return jax_compat.bind(eqn, xs)[0]

        for axis in reversed(axes):
            function = jax.vmap(function, in_axes=tuple(0 if axis in held else None for held in exposed))
        return self.waiting(function(*ready), op, axes)

    def _apart(self, eqn: Any, op: OpPlan, axes: tuple[str, ...], operands: Sequence[Any]) -> tuple[Any, Waiting]:
        """`make` in a shard_map: XLA would gather a convolution's operands if their parts were exposed as dims."""
        own = own_part(eqn, op.operands, self.mesh)

        def contribution(*xs: Any) -> jax.Array:
            convolution, parts = cut_first(own, op.operands[0], xs)
            return jnp.expand_dims(jax_compat.bind(convolution, parts)[0], range(len(axes)))

        function = on_each_device(
            contribution,
            self.mesh,
            tuple(partition_spec(spec or ()) for spec in op.operands),
            partition_spec((*((axis,) for axis in axes), *(op.partial[0] or ()))),
        )
        return self.waiting(function(*operands), op, axes)

    def _expose(self, value: Any, spec: Spec, axes: Sequence[str]) -> jax.Array:
        """Splits the dims that some axes shard, and moves the dims that count devices to the front."""
        shape: list[int] = []
        names: list[str | None] = []
        rest: list[tuple[str, ...]] = []
        for size, dim in zip(value.shape, spec, strict=True):
            own = [axis for axis in dim if axis in axes]
            for axis in own:
                shape.append(self.mesh.shape[axis])
                names.append(axis)
                size //= self.mesh.shape[axis]
            shape.append(size)
            names.append(None)
            rest.append(tuple(axis for axis in dim if axis not in axes))
        order = [names.index(axis) for axis in axes] + [i for i, name in enumerate(names) if name is None]
        exposed = jnp.transpose(value.reshape(shape), order)
        return self._constrain(exposed, (*((axis,) for axis in axes), *rest))

    def counted_once(self, value: Any, axes: Sequence[str]) -> jax.Array:
        """A value as the contribution of the first device, with nothing from the others."""
        sizes = [self.mesh.shape[axis] for axis in axes]
        first = jnp.zeros(sizes, bool).at[(0,) * len(sizes)].set(True).reshape(*sizes, *(1,) * value.ndim)
        return jnp.where(first, value, jnp.zeros((), value.dtype))

    def waiting(self, value: Any, op: OpPlan, axes: tuple[str, ...]) -> tuple[Any, Waiting]:
        """Contributions constrained to the devices that compute them."""
        partial, settled = op.partial[0] or (), op.results[0] or ()
        return self._constrain(value, (*((axis,) for axis in axes), *partial)), Waiting(axes, partial, settled)

    def stacked(self, values: Any, op: OpPlan) -> jax.Array:
        """Contributions of a loop's trips, stacked in their first dim: their own leading dims come before it."""
        return jnp.moveaxis(values, 0, len(op.waits))

    def add_up(self, value: Any, spec: Waiting) -> jax.Array:
        """Adds contributions up as was priced: dim by dim where the sum is left scattered, then over all other axes."""
        axes, partial = spec.axes, spec.partial
        for dim, together in scattered_sums(spec.axes, spec.settled):
            value, axes = self._summed(value, axes, together, partial)
            value = self._constrain(value, (*((a,) for a in axes), *partial))
            partial = (*partial[:dim], (*partial[dim], *together), *partial[dim + 1 :])
            value = self._constrain(value, (*((a,) for a in axes), *partial))
        if axes:
            value, axes = self._summed(value, axes, axes, partial)
        value = self._constrain(value, spec.settled)
        return value if spec.plus is None else value + spec.plus

    def _summed(
        self, value: Any, axes: tuple[str, ...], together: tuple[str, ...], partial: Spec
    ) -> tuple[Any, tuple[str, ...]]:
        """The sum over some of the leading dims, as one sum over one dim; and the axes of those that are left."""
        left = tuple(axis for axis in axes if axis not in together)
        first = jnp.moveaxis(value, [axes.index(axis) for axis in together], range(len(together)))
        merged = lax.collapse(first, 0, len(together))
        merged = self._constrain(merged, (together, *((axis,) for axis in left), *partial))
        return merged.sum(axis=0, dtype=value.dtype), left

    def _constrain(self, value: Any, spec: Spec) -> jax.Array:
        return constrain(value, self.mesh, spec)
