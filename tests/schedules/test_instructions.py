"""Instructions of stages: every message that is received was sent, in an order that never waits for ever."""

from collections import Counter

import jax
import pytest

import meshwright as mw
from meshwright.runtime.stages.pipeline_program import PipelineProgram
from meshwright.schedules import table
from meshwright.schedules.instructions import RECEIVE, RUN, SEND, chain, instruct
from meshwright.schedules.order import in_order
from tests.runtime.stages.models import build

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1)]


@pytest.mark.parametrize(("schedule", "interleave"), SCHEDULES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_that_is_received_was_sent_and_all_work_is_done_once(schedule, interleave, count):
    rows = table(schedule, count, 8, interleave)
    lists = instruct(rows, chain(count * interleave), [(0, s) for s in range(1, count)], num_rounds=2)
    order = in_order(lists)
    assert Counter(order) == Counter((s, one) for s, own in enumerate(lists) for one in own)
    there: Counter = Counter()
    for stage, one in order:
        if one.do == SEND:
            there[stage, one.peer, one.work, one.microbatch, one.chunk] += 1
        elif one.do == RECEIVE:
            there[one.peer, stage, one.work, one.microbatch, one.chunk] -= 1
        assert min(there.values(), default=0) >= 0
    assert not any(there.values())
    passes = [(one.work, one.microbatch, one.chunk) for _, one in order if one.do == RUN]
    assert len(set(passes)) == len(passes) == sum(map(len, rows))


@pytest.mark.devices
@pytest.mark.parametrize(
    "recipe",
    [mw.ThreeD(pipeline=4, microbatch=4, schedule="zb-h1"), mw.ThreeD(pipeline=2, microbatch=4, interleave=2)],
    ids=lambda recipe: recipe.schedule,
)
def test_the_simulator_plays_the_list_that_the_runtime_carries_out(recipe):
    init, step, batch = build(tied=False)
    cluster = f"1x{recipe.pipeline} cpu"
    plan = mw.plan(step, jax.eval_shape(init, jax.random.key(0)), batch, cluster=cluster, method=recipe)
    program = PipelineProgram(plan, plan.origin, [1])
    played = plan.simulate()
    assert played.work.instructions == program.engine.instructions
    for own, run in zip(program.engine.instructions, played.stages, strict=True):
        passes = [(one.work, one.microbatch) for one in own if one.do == RUN]
        assert passes == [(p.step.work, p.step.microbatch) for p in run.passes]
        assert [one for one in own if one.do == SEND] == [sent.instruction for sent in run.sends]


def test_a_plan_lists_them_for_people():
    init, step, batch = build()
    recipe = mw.ThreeD(pipeline=2, microbatch=8)
    plan = mw.plan(step, jax.eval_shape(init, jax.random.key(0)), batch, cluster="1x2 cpu", method=recipe)
    said = [str(one) for one in plan.instructions(1)]
    assert said[:3] == [
        "receive shared parameters from stage 0",
        "receive forward 0 of chunk 0 from stage 0",
        "run forward 0 of chunk 1",
    ]
    assert said[-3:] == ["update 0", "exchange 0", "update 1"]
    with pytest.raises(mw.ShardingError, match="stages 0 to 1"):
        plan.instructions(2)
