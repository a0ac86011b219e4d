"""Functions that run on each device, or on each replica."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshwright.runtime.program.meshes import on_each_device, shard_map


def test_arrays_without_elements_do_not_enter_a_mapped_function():
    """XLA of JAX 0.11 crashes over them where some of a mesh's axes are mapped, as for replicas of a stage."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("replicas", "x"), axis_types=(AxisType.Auto,) * 2)
    seen = []

    def own(x, bias):
        seen.append(bias.shape)
        return x + bias.sum()

    def replica(x, bias):
        specs = PartitionSpec(None, "x"), PartitionSpec(None, "x")
        return on_each_device(own, mesh, specs, specs[0])(x, bias)

    given = PartitionSpec("replicas"), PartitionSpec()
    function = shard_map(replica, mesh, given, given[0], {"replicas"})
    x, bias = jnp.arange(16.0).reshape(4, 4), jnp.zeros((0, 6))
    np.testing.assert_array_equal(jax.jit(function)(x, bias), x)
    assert set(seen) == {(0, 3)}
    (outer,) = (eqn for eqn in jax.make_jaxpr(function)(x, bias).eqns if eqn.primitive.name == "shard_map")
    (inner,) = (eqn for eqn in outer.params["jaxpr"].eqns if eqn.primitive.name == "shard_map")
    assert all(v.aval.size for eqn in (outer, inner) for v in eqn.invars)
