"""Runs pipelines over several processes, and compares with one device; `test_processes` starts it."""

import sys

import jax
import numpy as np

import meshwright as mw
from meshwright.runtime.stages.cutting import layer_stack
from meshwright.runtime.stages.cutting.layer_stack import LayerStack
from meshwright.training.saving import spread
from tests.runtime.stages.models import build


def difference(found, expected) -> float:
    """The largest difference of the parts that this process has."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        for piece, rows in pieces(a, np.asarray(b, float)):
            for shard in piece.addressable_shards:
                worst = max(worst, float(np.abs(np.asarray(shard.data, float) - rows[shard.index]).max()))
    return worst


def pieces(array, expected):
    """The arrays of JAX that an array consists of, each with what is expected of it."""
    if not isinstance(array, LayerStack):
        return [(array, expected)]
    return [(piece, expected[a:b]) for piece, (a, b) in zip(array.pieces, array.sharding.bounds, strict=True)]


def _save_and_restore_in_place(folder, step, state):
    """Each process writes and reads what it has: nothing of the state is moved."""

    def moved(array, sharding):
        raise AssertionError(f"an array of {array.shape} is moved to {sharding}")

    before = spread.reshard, layer_stack.reshard
    spread.reshard = layer_stack.reshard = moved
    mw.save(folder, 2, state)
    mw.save(folder, 3, state, wait=False).wait()
    again = mw.restore(folder, like=step)
    spread.reshard, layer_stack.reshard = before
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert one.sharding == other.sharding
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data))


def main(folder: str) -> None:
    mw.initialize()
    jax.config.update("jax_enable_x64", True)
    here = jax.process_index()
    for recipe, layers in (
        (mw.ThreeD(pipeline=4, microbatch=8, schedule="zb-h1"), 4),
        (mw.ThreeD(pipeline=2, data=2, microbatch=4, interleave=2), 5),
    ):
        init, train_step, batch = build(layers, scan=recipe.interleave > 1)
        one = jax.jit(train_step)
        step = mw.parallelize(train_step, cluster="2x2 cpu", method=recipe)
        state = mw.create_state(init, jax.random.key(0), like=step, example=(batch,))
        alone = jax.jit(init)(jax.random.key(0))
        for _ in range(2):
            alone, expected = one(alone, batch)
            state, metrics = step(state, batch)
            assert float(metrics["loss"]) > 0  # every process has it
        worst = max(difference(state, alone), difference(metrics, expected))
        parameters = [x for x in jax.tree.leaves(state["params"]) if not isinstance(x, LayerStack)]
        owned = sum(bool(x.addressable_shards) for x in parameters)
        print(f"{here}: {recipe.name} {recipe.schedule}: {worst:.1e}, has {owned} parameters", flush=True)
        assert worst < 1e-12
        if recipe.interleave == 1:
            _save_and_restore_in_place(f"{folder}/in-place", step, state)
        rows = {name: x[8 * here : 8 * here + 8] for name, x in batch.items()}
        for part in mw.batches([rows], step):
            state, metrics = step(state, part)
        alone, expected = one(alone, batch)
        assert difference((state, metrics), (alone, expected)) < 1e-12
    assert isinstance(state["params"]["blocks"]["w"], LayerStack)
    mw.save(folder, 4, state)
    again = mw.restore(folder, like=step)
    assert difference(again, alone) < 1e-12
    assert [x.sharding for x in jax.tree.leaves(again)] == [x.sharding for x in jax.tree.leaves(state)]
    print(f"{here}: done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
