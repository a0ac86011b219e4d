"""The program of one part of a batch, on random train steps: operations with the ids of the step's."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwright.graph.tracing.call import call_abstractly
from meshwright.program.program import UNPLANNED
from meshwright.runtime.microbatches.cut_operations import Cut
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.microbatches.part_loop import in_loop
from tests.generator.train_steps import draw_train_step


def cut(function, args, batch, count):
    """A step cut into parts; the arguments at these positions are its batch."""
    call = call_abstractly(function, args)
    examples = [number in batch for number, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    return CutStep(call.program, examples, Cut(count, 1))


def named(program):
    """The ids of a program's operations, and of what enters and leaves its loops and branches, with their names."""
    found = set()
    for one in program.walk():
        found.add((one.id, one.name))
        found |= {(number, "of a region") for ids in (one.carry_ids, one.slice_ids, one.result_ids) for number in ids}
    return {(number, name) for number, name in found if number < UNPLANNED}


@pytest.mark.parametrize("seed", range(8))
def test_operations_of_a_part_have_the_ids_of_those_of_the_step(seed):
    drawn = draw_train_step(seed)
    state = jax.eval_shape(drawn.init, jax.random.key(0))
    step = cut(drawn.step, (state, drawn.batch), (1,), 2)
    part = step.part.region(step.part.pieces, [*step.shared, *step.sliced], step.made)
    assert named(part) <= named(step.program)
    products = [one for one in part.walk() if one.name == "dot_general"]
    assert products and all(one.id < UNPLANNED for one in products)


def test_a_region_is_that_of_a_part_in_loops_branches_and_checkpoints():
    def layers(x, keys, w, flag):
        def layer(carry, w):
            total, x = carry
            drop = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)  # rows of the whole batch's bits
            x = jax.checkpoint(lambda x: jnp.where(drop, jnp.tanh(x @ w), x))(x)
            x = lax.cond(flag, lambda x: x * 2, lambda x: x + jnp.arange(1.0, 5.0), x)
            return (total + x.sum(), x), w.sum()

        (total, x), sums = lax.scan(layer, (0.0, x), w)
        return total, x, sums

    x, w = jnp.ones((6, 4)), jnp.ones((3, 4, 4))
    step = cut(layers, (x, x, w, True), (0,), 3)
    (loop,) = (one for piece in step.part.pieces for one in piece.operations if one.name == "scan")
    (original,) = (one for one in step.program.operations if one.name == "scan")
    assert (loop.id, loop.num_ids, loop.carry_ids) == (original.id, original.num_ids, original.carry_ids)
    assert [tuple(loop.regions[0].types[value].shape) for value in loop.regions[0].outputs] == [(), (2, 4)]
    assert named(loop.regions[0]) <= named(original.regions[0])
    assert {"cond", "tanh", "select_n"} <= {name for _, name in named(loop.regions[0])}
    leaves = jax.tree.leaves((x, x, w, True))
    for one, expected in zip(jax.jit(in_loop(step).program.run)(leaves), jax.jit(layers)(x, x, w, True), strict=True):
        assert jnp.allclose(one, expected, atol=1e-5)
