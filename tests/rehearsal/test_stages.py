"""Rehearsals of pipelines: one device's share of each stage's programs, against the programs on all devices."""

import jax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.rehearsal.share.stage_share import fitted

EXAMPLE = zoo.build("mlp", batch=64)
ARGS = EXAMPLE.train_step, EXAMPLE.state, EXAMPLE.batch
RECIPES = {
    "data": mw.ThreeD(data=2, pipeline=2, microbatch=8),
    "tensor": mw.ThreeD(tensor=2, pipeline=2, microbatch=8),
}


@pytest.mark.devices
@pytest.mark.parametrize("name", RECIPES)
def test_a_stages_share_has_the_flops_and_the_memory_of_the_real_programs(name):
    plan = mw.plan(*ARGS, cluster="1x4 cpu", method=RECIPES[name])
    found, real = plan.rehearse(steps=0), plan.verify()
    for mine, compiled in zip(found.stages, real.stages, strict=True):
        assert mine.flops.compiled == compiled.flops.compiled
        assert mine.memory.compiled == pytest.approx(compiled.memory.compiled, rel=0.1)
        assert mine.forward_s is None and mine.update_s is None
    assert found.step_s == plan.simulate().step_s and found.num_programs >= 5


@pytest.mark.slow
def test_a_measured_pipeline_is_simulated_with_what_was_measured(tmp_path):
    plan = mw.plan(*ARGS, cluster="1x4 cpu", method=RECIPES["data"])
    plan.save(tmp_path / "plan.json")
    found = mw.Plan.load(tmp_path / "plan.json").rehearse(*ARGS, steps=1)
    many = plan.pipeline.num_microbatches
    assert all(stage.forward_s > 0 and stage.backward_s > 0 and stage.update_s > 0 for stage in found.stages)
    busiest = max(many * (stage.forward_s + stage.backward_s) + stage.update_s for stage in found.stages)
    assert busiest <= found.step_s <= len(found.stages) * busiest + plan.simulate().step_s
    text, data = str(found), found.to_json()
    assert "2 stages, 1f1b" in text and "by simulation" in text
    assert data["step_s"] == found.step_s and len(data["stages"]) == 2


def test_a_loaded_pipeline_asks_for_its_function(tmp_path):
    mw.plan(*ARGS, cluster="1x4 cpu", method=RECIPES["data"]).save(tmp_path / "plan.json")
    with pytest.raises(mw.ShardingError, match="does not know its function: call plan"):
        mw.Plan.load(tmp_path / "plan.json").rehearse()


def test_values_are_fitted_to_shards_and_back():
    value = jax.numpy.arange(8).reshape(4, 2)
    assert fitted(value, (2, 2)).tolist() == [[0, 1], [2, 3]]
    assert fitted(value[:1], (2, 2)).tolist() == [[0, 1], [0, 1]]
