"""Rehearsals look up what the user's batch looks up, whatever is measured: a step, its stages or its parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.rehearsal.parts import parts_of
from meshwright.rehearsal.share.indices import Indices, looked_up
from meshwright.rehearsal.share.part_program import PartFunction
from meshwright.rehearsal.share.program import Share
from meshwright.rehearsal.share.stage_share import StageShare, described_engine
from meshwright.runtime.microbatches.planned_parts import traced_as_planned

STATE = {"table": jnp.zeros((40, 16)), "layers": [jnp.zeros((16, 16)) for _ in range(4)]}
BATCH = {"ids": np.full((16, 3), 7, np.int32), "kinds": np.full((16, 3), 2, np.int32)}


def step(state, batch):
    def loss(state):
        x = state["table"][jnp.sort(batch["ids"], axis=-1)]
        for layer in state["layers"]:
            x = jnp.tanh(x @ layer)
        return ((x**2).sum(-1) * (batch["kinds"] == 2)).mean()

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def integers(values):
    """The different integers of each array of them."""
    kept = [x for x in values if x.ndim and jnp.issubdtype(x.dtype, jnp.integer)]
    return [sorted({*np.asarray(x).ravel().tolist()}) for x in kept]


def test_indices_are_those_of_the_batch_or_reach_over_the_table():
    def looks_up(table, ids, bags):
        rows = table[ids]
        return jax.ops.segment_sum(rows, bags, 5)

    table = jnp.zeros((40, 3))
    shapes = jax.ShapeDtypeStruct((8,), "int32"), jax.ShapeDtypeStruct((8,), "int32")
    graph = trace(looks_up, table, *shapes).graph
    assert [looked_up(graph).get(value) for value in graph.inputs] == [None, 40, 5]
    ids, bags = np.full(8, 7, np.int32), np.arange(8, dtype=np.int32) % 2
    plan = mw.plan(looks_up, table, ids, bags, cluster="1x1 h100", mesh=(1,))
    values = Share.of(plan, plan.origin).draw(jax.devices()[0])
    assert values[1].tolist() == ids.tolist() and values[2].tolist() == bags.tolist()


@pytest.mark.parametrize("changed", [{"recompute": "full"}, {"microbatches": 2}], ids=str)
def test_a_program_that_a_plan_changes_has_the_batch_of_the_user(changed):
    plan = mw.plan(step, STATE, BATCH, cluster="1x2 h100", mesh=(2,), method=mw.Auto(**changed))
    share = Share.of(plan, traced_as_planned(plan, plan.origin))
    assert integers(share.draw(jax.devices()[0])) == [[7], [2]]


def test_each_stage_reads_the_rows_of_the_batch_and_what_follows_from_them():
    method = mw.ThreeD(data=2, pipeline=2, microbatch=4)
    plan = mw.plan(step, STATE, BATCH, cluster="1x4 cpu", method=method)
    engine, indices = described_engine(plan, plan.origin), Indices.of(plan.origin)
    passes = {k: one for k, one in engine.lowered.items() if one.program.work in ("forward", "backward")}
    found = {}
    for key, one in passes.items():
        share = StageShare(plan, engine.stages[one.program.stage], one, engine.packs, indices)
        found[key] = integers(share.draw(jax.devices()[0]))
    assert [[7]] in found.values() and [[2]] in found.values()
    assert all(each in ([7], [2]) for some in found.values() for each in some)
    backward = [some for key, some in found.items() if key[0] == "backward"]
    assert [[7]] in backward, "the gradient of the look-up adds to the rows that were looked up"


def test_parts_of_a_step_read_what_follows_from_the_batch():
    plan = mw.plan(step, STATE, BATCH, cluster="1x1 h100", mesh=(1,))
    own = [PartFunction(plan, plan.origin, part.operations) for part in parts_of(plan, plan.origin.graph)]
    found = [each for part in own for each in integers(part.compile(jax.devices()[0]).draw())]
    assert [7] in found and all(each in ([7], [2]) for each in found)
    drawn = mw.plan(step, STATE, jax.eval_shape(lambda: BATCH), cluster="1x1 h100", mesh=(1,))
    other = [PartFunction(drawn, drawn.origin, part.operations) for part in parts_of(drawn, drawn.origin.graph)]
    spread = [each for part in other for each in integers(part.compile(jax.devices()[0]).draw())]
    assert len(spread) == len(found) and max(map(len, spread)) > 10
