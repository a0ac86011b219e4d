"""Where an engine's parameters and cache are: on one device, split over several, or dealt to stages of layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.tree_util import tree_map_with_path

from meshwright.serving.engine.stages import layer_of
from meshwright.serving.models import Decoder
from meshwright.zoo.layers import PyTree


@dataclass(frozen=True)
class Placement:
    """Where parameters and cache are, as shardings.

    Attributes:
        params: Of the parameters.
        arrays: Of the cache, a list with one entry for each layer.
        rest: Of everything else, which every device has whole.
    """

    params: PyTree
    arrays: PyTree
    rest: Sharding

    @classmethod
    def single(cls, decoder: Decoder, device: jax.Device | None = None) -> "Placement":
        """All on one device, by default the first."""
        here = SingleDeviceSharding(device or jax.local_devices()[0])
        params, arrays = (jax.tree.map(lambda _: here, tree) for tree in (decoder.params(), decoder.arrays()))
        return cls(params, arrays, here)

    def on(self, devices: Sequence[jax.Device]) -> "Placement":
        """The same on other devices, as many as there are here."""

        def moved(sharding: Sharding) -> Sharding:
            if not isinstance(sharding, NamedSharding):
                return SingleDeviceSharding(devices[0])
            mesh = sharding.mesh
            assert isinstance(mesh, jax.sharding.Mesh)
            own = jax.make_mesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, devices=tuple(devices))
            return NamedSharding(own, sharding.spec)

        return Placement(*(jax.tree.map(moved, tree) for tree in (self.params, self.arrays, self.rest)))


def dealt(placements: Sequence[Placement], bounds: Sequence[int]) -> PyTree:
    """The sharding of each parameter where it is read: that of its layer's stage, for others of the first one."""

    def of(path: Sequence[Any], *shardings: Sharding) -> Sharding:
        layer = layer_of(path)
        stage = next((n for n, (a, b) in enumerate(pairwise(bounds)) if layer is not None and a <= layer < b), 0)
        return shardings[stage]

    return tree_map_with_path(of, *(placement.params for placement in placements))


def of_parcel(sharding: Sharding) -> Sharding:
    """How one sequence's keys or values are split, where those of all are split so: dims are (…, …, kv head, width)."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, None, None, None, None)
    return NamedSharding(sharding.mesh, PartitionSpec(None, spec[2], spec[3]))
