"""The largest and least numbers of several devices are those of one device, also where NaN is among them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.program.program import Program
from meshwright.runtime.stages.lowering.comparing import reduced, run_once

pytestmark = pytest.mark.devices

SPLIT = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize(
    "numbers", [[1, 2, np.nan, 4], [-1, -np.inf, -3, -0.0], [1, np.inf, 0.0, -2]], ids=["NaN", "negative", "infinite"]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_the_largest_and_least_of_several_devices(kind, numbers, dtype):
    values = np.nan_to_num(numbers, posinf=9, neginf=-9) if dtype == jnp.int32 else numbers
    array = jnp.asarray(values, dtype)
    expected = getattr(jnp, kind)(array)
    program = Program.of(jax.make_jaxpr(lambda x: getattr(jnp, kind)(x, 0))(array))

    def once(x):
        values = {0: x}
        for unit in program.operations:
            run_once(unit, values)
        return values[program.outputs[0]]

    split = jax.device_put(array, SPLIT)
    for found in (jax.jit(lambda x: reduced(kind, x, (0,)))(split), jax.jit(once)(split)):
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))
