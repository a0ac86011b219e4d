"""A run that continues on other devices is planned from its last plan, and a recipe for other devices is replaced."""

import jax
import pytest

import meshwright as mw
from meshwright import planning, zoo
from meshwright.graph import trace

pytestmark = pytest.mark.devices


def traced(batch=24):
    example = zoo.build("mlp", batch=batch, layers=4, hidden=32)
    return trace(example.train_step, example.state, example.batch, cluster=mw.cluster("2x4 h100"))


def test_the_state_is_split_as_before_on_the_view_that_is_most_like_the_last_one(monkeypatch):
    program = traced()
    last = planning.plan_traced(program, "2x4 h100", None, mw.Zero(3))
    asked = []
    decided = planning._decided
    monkeypatch.setattr(planning, "_decided", lambda *given: asked.append(given[3]) or decided(*given))
    plan = planning.plan_traced(program, "1x4 h100", None, mw.Auto(), last=last)
    assert plan.remarks[0].startswith("It starts from the plan for 8 devices (8)"), plan.remarks
    [method] = asked
    assert method.mesh_shapes == [(4,)] and method.recompute == last.recompute
    specs = {tensor.path: tensor.spec for tensor in last.arguments if tensor.role in ("parameters", "optimizer")}
    assert {t.path: t.spec for t in plan.arguments if t.path in specs} == specs
    assert plan.mesh.num_devices == 4


def test_all_is_searched_where_what_was_decided_gives_a_slow_plan(monkeypatch):
    program = traced()
    last = planning.plan_traced(program, "2x4 h100", None, mw.Auto())
    monkeypatch.setattr("meshwright.step_search.last_plan.SLOWER", 0.0)
    plan = planning.plan_traced(program, "1x4 h100", None, mw.Auto(), last=last)
    assert plan.remarks == planning.plan_traced(program, "1x4 h100", None, mw.Auto()).remarks


def test_a_recipe_for_more_devices_is_replaced_by_stages_for_those_that_are_left_with_a_remark():
    program, recipe = traced(), mw.ThreeD(data=2, tensor=1, pipeline=2, microbatch=3)
    last = planning.plan_traced(program, "1x4 cpu", None, recipe)
    with pytest.raises(mw.ShardingError, match="is 4 devices, but cluster '1x3 cpu' has 3"):
        planning.plan_traced(program, "1x3 cpu", None, recipe)
    plan = planning.plan_traced(program, "1x3 cpu", None, recipe, last=last)
    assert plan.remarks[0].startswith("ThreeD(2×1×2) is for 4 devices and there are 3 now: it runs as "), plan.remarks
    assert sum(stage.mesh.num_devices for stage in plan.stages) in (0, 3)
    back = planning.plan_traced(program, "1x4 cpu", None, recipe, last=plan)
    assert [stage.mesh.sizes for stage in back.stages] == [stage.mesh.sizes for stage in last.stages]


def test_a_recipe_is_replaced_in_a_run_that_keeps_its_plans_and_computes_the_same(tmp_path):
    example = zoo.build("mlp", batch=12, layers=4, hidden=16)
    method = mw.ThreeD(data=2, pipeline=2, microbatch=3)
    losses = []
    for devices in (4, 3, 4):
        step = mw.parallelize(example.train_step, cluster=f"1x{devices} cpu", method=method, plans=tmp_path)
        state = mw.create_state(example.init, jax.random.key(0), like=step, example=(example.batch,))
        _, loss = step(state, example.sample(0))
        losses.append(float(loss))
        assert any("is for 4 devices" in remark for remark in step.last_plan.remarks) == (devices == 3)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
