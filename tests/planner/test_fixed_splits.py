"""Fixed splits of operations: kept, priced like any other plan, and refused where no axis divides the loop."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.blocks import find_blocks
from meshwright.planner.fixed_splits import FixedSplits


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def layer(x, up, down):
    return jax.nn.relu(x @ up) @ down


TYPES = array(64, 32), array(32, 128), array(128, 32)
DATA = {"rows": ("x", None), "columns": (None, None), "contracted": (None, "x")}
WEIGHTS = {"rows": (None, None), "columns": (None, "x"), "contracted": ("x", None)}


def plan(choices, mesh=(8,), function=layer, types=TYPES):
    blocks = find_blocks(function, *types).blocks
    splits = {e.operation: e.loops[name] for b, name in zip(blocks, choices, strict=True) for e in b.entries}
    return mw.plan(function, *types, cluster="1x8 h100", mesh=mesh, method=FixedSplits(splits=splits))


def test_operations_are_split_as_asked_for_and_the_best_split_is_the_best_plan():
    costs = []
    for choices in itertools.product(DATA, repeat=2):
        found = plan(choices)
        costs.append(found.cost.total)
        products = [op for op in found.ops if op.label.endswith("dot_general")]
        for op, name in zip(products, choices, strict=True):
            data, weights = (tuple(dim[0] if dim else None for dim in spec) for spec in op.operands)
            assert (data, weights) == (DATA[name], WEIGHTS[name])
    free = mw.plan(layer, *TYPES, cluster="1x8 h100", mesh=(8,))
    assert min(costs) == pytest.approx(free.cost.total)
    assert max(costs) > 1.01 * min(costs)


def test_like_operations_may_be_split_differently():
    def twice(x, one, other):
        return jnp.tanh(x @ one) @ other

    types = array(64, 64), array(64, 64), array(64, 64)
    found = plan(("columns", "rows"), function=twice, types=types)
    products = [op for op in found.ops if op.label.endswith("dot_general")]
    assert products[0].operands != products[1].operands


def test_a_loop_that_the_mesh_does_not_divide_is_refused():
    with pytest.raises(mw.ShardingError, match="cannot be split as asked for on mesh"):
        plan(("columns", "rows"), types=(array(64, 32), array(32, 12), array(12, 32)))
