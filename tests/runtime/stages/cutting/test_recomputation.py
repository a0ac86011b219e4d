"""What a stage keeps for its backward pass is what the plan holds."""

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.parallelism.subject.subject import Subjects
from meshwright.runtime.checking.stage_memory import _slot_bytes
from meshwright.runtime.stages.cutting.recomputation import _must_gather
from meshwright.runtime.stages.pipeline_program import PipelineProgram
from meshwright.schedules.base import FORWARD

pytestmark = pytest.mark.devices


def planned(**recipe):
    model = zoo.build("gpt-tiny", batch=8, layers=2, seq=32, dtype="float32")
    method = mw.ThreeD(pipeline=2, microbatch=2, **recipe)
    devices = 2 * method.data * method.tensor
    return mw.plan(model.train_step, model.state, model.batch, cluster=f"1x{devices} cpu", method=method)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_stage_keeps_what_the_plan_holds_for_each_microbatch(tensor):
    plan = planned(tensor=tensor)
    engine = PipelineProgram(plan, plan.origin, [1], is_whole=True).engine
    sizes = _slot_bytes(engine)
    for number, stage in enumerate(plan.stages):
        read = {slot for one in engine.bound if one.stage == number and one.work == "backward" for slot in one.reads}
        names = {name: slot for name, slot in engine.slots.items() if name[:2] == ("value", number) and name[3] == 0}
        made = {slot for one in engine.bound if one.work == FORWARD for slot in one.fills}
        kept = sum(sizes[slot] for slot in names.values() if slot in read & made)
        assert 0.9 * stage.activation_bytes < kept < 1.1 * stage.activation_bytes


def test_sums_of_backward_passes_are_counted_for_each_microbatch():
    plan = planned(tensor=2)
    sums = [c for c in Subjects(plan)[1].collectives if (c.phase, c.purpose) == ("backward", "activation")]
    assert sums and all(c.trips == plan.pipeline.num_microbatches for c in sums)


def test_what_must_be_sent_again_is_kept():
    assert _must_gather((("y",), ()), ((), ()))
    assert _must_gather((("y",), ()), ((), ("y",)))
    assert not _must_gather(((), ()), (("y",), ()))
    assert not _must_gather((("y",), ()), (("y", "z"), ()))
    assert not _must_gather(None, ((), ()))
