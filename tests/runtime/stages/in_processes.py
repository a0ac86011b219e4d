"""Runs pipelines over several processes, and compares with one device; `test_processes` starts it."""

import sys

import jax
import numpy as np

import meshwright as mw
from meshwright.runtime.stages.cutting.layer_stack import LayerStack
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
