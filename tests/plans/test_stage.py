"""Stages as plain data: saved with their plan and read back, each on its own machines."""

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.plan_files.storage import SavedDetails, plan_from_json, plan_to_json
from meshwright.plan_files.stored_operations import ops_to_json
from meshwright.plans.stage import Pipeline, Stage, StageTime, Submesh
from meshwright.plans.tensor import Tensor
from tests.planner.examples import mesh, mlp_step


def staged(cluster):
    """A plan with two stages, the second on the last host."""
    step, args = mlp_step(16, 16, layers=2)
    plain = mw.plan(step, *args, mesh=mesh((2,)))
    last = cluster.num_hosts - 1
    found = []
    for first, host in ((0, 0), (1, last)):
        group = cluster.groups[-1 if host else 0]
        submesh = Submesh(host, 1, 0, group.devices_per_host, group.chip.name)
        view = submesh.machines(cluster).mesh((2, group.devices_per_host // 2))
        times = [StageTime(float(i), 0.5) for i in range(5)]
        path = next(tensor.path for tensor in plain.arguments if tensor.shape == (16, 16))
        tensors = (Tensor(path, (16, 16), "float32", ((), ("y",)), "parameters"),)
        layers, sizes = (first, first + 1), (64.0, 1e-3, 10, 20, 30, 60)
        found.append(Stage(layers, submesh, view, "words", *times, 0.5, *sizes, (layers,), tensors))
    whole = mw.Mesh((cluster.num_devices,), cluster)
    lists = {"collectives": [], "ops": ops_to_json(()), "record": None}
    paths = tuple(tensor.path for tensor in plain.arguments)
    details = SavedDetails(lists, whole.names, len(found), paths)
    pipeline = Pipeline("1f1b", 4, 1, "none")
    return replace(plain, mesh=whole, details=details, pipeline=pipeline, stages=tuple(found))


@pytest.mark.parametrize("machines", ["2x4 h100", "1x8 h100 + 2x4 a100"])
def test_stages_come_back_equal(machines, tmp_path):
    plan = staged(mw.cluster(machines))
    plan.save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.stages == plan.stages
    assert again.pipeline == plan.pipeline
    assert [s.mesh.chip.name for s in again.stages] == [g.chip.name for g in (plan.mesh.cluster.groups * 2)[:2]]


def test_a_plan_without_stages_has_none():
    step, args = mlp_step(16, 16, layers=2)
    data = plan_to_json(mw.plan(step, *args, mesh=mesh((2,))))
    assert "stages" not in data
    assert plan_from_json(data).stages == ()


def test_stages_of_the_fourth_version_are_read():
    """They do not say what their times are made of: compute is taken to be products, as most of it is."""
    data = plan_to_json(staged(mw.cluster("2x4 h100"))) | {"version": 4}
    for stage in data["stages"]:
        del stage["flops"], stage["dtype"]
        for name in ("forward", "backward", "recompute", "gradients", "update"):
            stage[name] = {key: stage[name][key] for key in ("compute_s", "communication_s")}
    for stage in plan_from_json(data).stages:
        assert stage.backward.product_s == stage.backward.compute_s and stage.backward.moving_s == 0
        assert stage.backward.inside_s == stage.backward.communication_s
