"""Pipelined plans: every stage has a record that adds up to its price, and is explained, shown and dumped from it."""

import csv
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.explain.alternatives.step_effects import Effects
from meshwright.explain.alternatives.why import Explainer
from meshwright.explain.show.tensor_table import plan_rows
from meshwright.parallelism.subject.subject import Subjects
from meshwright.pipeline.step_time import seconds_of, step_s
from meshwright.plans.tensor import Tensor

pytestmark = pytest.mark.slow

MEGATRON = mw.ThreeD(data=1, tensor=2, pipeline=4, microbatch=2)
REPLICAS = mw.ThreeD(data=2, tensor=2, pipeline=2, microbatch=1, checkpoint="full")
CASES = {
    "megatron": ("gpt-tiny", {"layers": 4}, "2x4 h100", MEGATRON),
    "replicas": ("gpt-tiny", {"layers": 4}, "2x4 h100", REPLICAS),
    "interleaved": ("gpt-tiny", {"layers": 4}, "1x4 h100", mw.ThreeD(1, 2, 2, 1, interleave=2)),
    "scan": ("llama-tiny", {"layers": 4, "batch": 8, "scan": True}, "1x4 h100", mw.ThreeD(1, 2, 2, 2)),
    "zero bubble": ("llama-tiny", {"layers": 4, "batch": 16}, "1x4 h100", mw.ThreeD(2, 1, 2, 1, schedule="zb-h1")),
}
PLANS = {}


def planned(name):
    if name not in PLANS:
        model, options, cluster, method = CASES[name]
        example = zoo.build(model, **options)
        PLANS[name] = mw.plan(example.train_step, example.state, example.batch, cluster=cluster, method=method)
    return PLANS[name]


@pytest.fixture(params=CASES)
def plan(request):
    return planned(request.param)


def test_the_steps_formula_gives_the_plans_own_time(plan):
    total, busiest = step_s(plan.pipeline, [seconds_of(stage) for stage in plan.stages])
    assert total == pytest.approx(plan.cost.total, rel=1e-9)
    assert 0 <= busiest < len(plan.stages)


def test_records_of_stages_add_up_to_their_prices(plan):
    """The parts of a stage's problem under its choice are the seconds that it was priced at."""
    for subject in Subjects(plan):
        problem, stage = subject.record.problem, subject.stage
        now = Effects(subject)._now
        worked = stage.forward.total_s + stage.backward.total_s
        assert now[0] == pytest.approx(worked, rel=0.1)  # a group's operations may lie in two stages
        assert problem.cost_of(problem.choice) <= sum(now) * (1 + 1e-9)
        assert np.array_equal(
            problem.choice,
            [
                np.flatnonzero(n.allowed & (np.arange(len(n.codes)) == s))[0]
                for n, s in zip(problem.nodes, problem.choice, strict=True)
            ],
        )
    whole = [Effects(s)._now[0] for s in Subjects(plan)]
    assert sum(whole) == pytest.approx(sum(s.forward.total_s + s.backward.total_s for s in plan.stages), rel=0.03)


def test_every_operation_runs_in_one_stage(plan):
    """Trips of all stages together are those of the program; so are layers of a scan."""
    subjects = Subjects(plan)
    for view in set(plan.record.view):
        program = plan.record.views[view].record.program
        trips = sum(s.record.program.trips for s in subjects)
        if len(set(plan.record.view)) == 1:
            assert trips == pytest.approx(program.trips)
    tensors = [{t.path for t in stage.tensors} for stage in plan.stages]
    nodes = [{p for n in s.record.problem.nodes for p in n.paths} for s in subjects]
    for held, owned in zip(tensors, nodes, strict=True):
        assert {p for p in owned if not p.startswith("batch")} <= held | {"state/step"}


def test_the_choice_is_what_the_stages_tensors_show(plan):
    for subject in Subjects(plan):
        tensors, problem = {t.path: t for t in subject.stage.tensors}, subject.record.problem
        for node, choice in zip(problem.nodes, problem.choice, strict=True):
            for tensor in (tensors[path] for path in node.paths if path in tensors):
                dims = problem.axes.dims(int(node.codes[choice]), len(tensor.shape))
                inside = [tuple(axis for axis in axes if axis != "x") for axes in tensor.spec]
                assert inside == [tuple(subject.names[a] for a in axes) for axes in dims]


def test_a_loaded_plan_is_the_same(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    assert again == plan and again.judgement == plan.judgement
    assert again.stage_verdicts == plan.stage_verdicts and len(plan.stage_verdicts) == len(plan.stages)
    path = next(t.path for t in plan.stages[-1].tensors if t.role == "parameters" and len(t.shape) > 1)
    assert str(again.explain(path, 30)) == str(plan.explain(path, 30))


def test_verdicts_kinds_and_letters_come_from_the_program():
    plan = planned("megatron")
    assert [str(v) for v in plan.stage_verdicts] == [
        "Megatron tensor parallel ×2 over y, vocabulary over y",
        "Megatron tensor parallel ×2 over y",
        "Megatron tensor parallel ×2 over y",
        "tensor parallel ×2 over y (columns and rows)",  # a quarter of its work is the head, split along its rows
    ]
    assert "stages 1–2: Megatron" in str(plan.verdict)
    assert plan.kind("state/params/layers/2/up") == "tensor (column)"
    assert "D F_y" in str(plan.show("state/params/layers/*/up"))
    plan = planned("replicas")
    assert all("data parallel ×2 over x" in str(v) and "(ZeRO-1)" in str(v) for v in plan.stage_verdicts)
    assert plan.kind("state/mu/layers/0/up") == "tensor (column) + zero (sharded over data)"
    assert plan.kind("batch/tokens") == "data (split over x)"
    assert "B_x S" in str(plan.show("batch/tokens"))


def test_alternatives_are_stages_best_and_their_effect_follows_the_formula():
    plan = planned("replicas")
    for path in ("state/params/layers/3/up", "state/params/layers/0/up"):
        found = plan.explain(path, 30)
        subject = Subjects(plan)[found.stage]
        explainer, stage = Explainer(subject), plan.stages[found.stage]
        assert path in {t.path for t in stage.tensors} and found.alternatives
        for a in found.alternatives:
            assert a.is_exact and math.isclose(a.cost, plan.cost.total + a.effect.step_s)
            times = [seconds_of(s) for s in plan.stages]
            now = times[found.stage]
            times[found.stage] = now._replace(own=now.own + a.effect.microbatch_s, once=now.once + a.effect.once_s)
            assert a.effect.step_s == pytest.approx(step_s(plan.pipeline, times)[0] - plan.cost.total, abs=1e-12)
        busiest = explainer.effects.busiest == found.stage
        assert ("the busiest stage" in str(found)) == busiest
        each = [a.effect.step_s / a.effect.microbatch_s for a in found.alternatives if abs(a.effect.once_s) < 1e-12]
        many = plan.pipeline.num_microbatches
        assert all(ratio == pytest.approx(many if busiest else 1, rel=0.01) for ratio in each)


def test_a_stage_that_memory_binds_says_so():
    example = zoo.build("gpt-tiny", layers=4, batch=64)
    args = (example.train_step, example.state, example.batch)
    method = mw.Auto(pipeline=True, memory_fraction=2.2e-5)
    plan = mw.plan(*args, cluster="1x4 h100", method=method)
    assert plan.stages
    limit = plan.memory.limit_bytes
    for tensor in [t for t in plan.stages[0].tensors if t.role == "parameters" and len(t.shape) > 1][:3]:
        found = plan.explain(tensor.path, 1)
        for a in found.alternatives:
            assert a.cost == math.inf or a.peak_bytes <= limit * 1.001


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_dump_has_a_folder_for_each_stage(tmp_path):
    plan = planned("replicas")
    plan.save(tmp_path / "plan.json")
    mw.Plan.load(tmp_path / "plan.json").dump(tmp_path / "folder")
    stages = rows(tmp_path / "folder" / "stages.csv")
    assert [row["verdict"] for row in stages] == [str(v) for v in plan.stage_verdicts]
    assert "stage 1: " in (tmp_path / "folder" / "solver.txt").read_text()
    memory = rows(tmp_path / "folder" / "stages-memory.csv")
    assert {row["stage"] for row in memory} == {"0", "1"}
    for subject in Subjects(plan):
        folder = tmp_path / "folder" / f"stage-{subject.number}"
        operations = rows(folder / "operations.csv")
        assert [int(row["operation"]) for row in operations] == subject.record.program.running
        assert any("B_x" in row["strategy"] and "_y" in row["strategy"] for row in operations)
        problem = mw.ChoiceProblem.load(folder / "problem.json.gz")
        assert problem.num_nodes == len(subject.record.problem.nodes)
        ours = subject.record.problem
        assert mw.solve(problem, seconds=5, workers=1).cost <= ours.cost_of(ours.choice) * (1 + 1e-6)
        sent = sum(float(row["seconds"]) for row in rows(folder / "collectives.csv") if row["axes"] == "y")
        many = plan.pipeline.num_microbatches
        inside = many * (subject.stage.forward.communication_s + subject.stage.backward.communication_s)
        assert sent >= inside * 0.9
        program = (folder / "program.txt").read_text()
        assert f"state/params/layers/{2 * subject.number}/up" in program
        assert f"state/params/layers/{2 - 2 * subject.number}/up" not in program


def test_a_file_of_the_second_version_has_stages_without_a_record(tmp_path):
    plan = planned("megatron")
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text()) | {"version": 2, "record": None}
    del data["judgement"]["stages"]
    for view in data["considered"]:
        del view["rounds"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    again = mw.Plan.load(tmp_path / "old.json")
    assert again.stages == plan.stages and "model parallel" in str(again.verdict)
    assert again.kind("state/params/layers/2/up") == "tensor (column)"
    again.report(tmp_path / "page.html", seconds=0.5)
    again.dump(tmp_path / "folder")
    with pytest.raises(mw.ShardingError, match="keeps no record of its search"):
        again.explain("state/params/layers/2/up")


def test_plans_in_stages_are_told_apart(tmp_path):
    one, other = planned("megatron"), planned("replicas")
    found = one.diff(other)
    assert not found.is_same and found.moved and found.sent
    assert one.diff(one).is_same
    assert "communication that differs" in str(found)


def tied():
    """A train step in which the first and the last layer read one table, and its arguments."""

    def loss(params, x):
        h = params["table"][x]
        for w in params["layers"]:
            h = h + jax.nn.gelu(h @ w)
        return -jnp.mean(jax.nn.log_softmax(h @ params["table"].T)[..., 0])

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))

    kind = partial(jax.ShapeDtypeStruct, dtype="float32")
    params = {"table": kind((1024, 256)), "layers": [kind((256, 256))] * 6}
    return step, (params, jax.ShapeDtypeStruct((2, 64), "int32"))


def test_next_values_lie_on_the_mesh_of_the_stage_that_has_the_argument():
    """The first and the last stage split their weights, the one between them its batch."""
    step, args = tied()
    method = mw.Auto(pipeline=True, memory_fraction=4.6e-5)
    plan = mw.plan(step, *args, cluster="3x2 h100", method=method)
    assert len({tuple(stage.mesh.sizes) for stage in plan.stages}) > 1
    meshes = {path: dict(row.mesh) for row in plan_rows(plan, plan.find("*")) for path in row.paths}
    for number, stage in enumerate(plan.stages):
        for path in (t.path for t in stage.tensors):
            first = next(i for i, other in enumerate(plan.stages) if path in {t.path for t in other.tensors})
            own = plan.stages[first].mesh.shape
            assert meshes[path] == meshes[path.replace("params", "out", 1)] == own, (number, path)


def test_a_tied_tensor_is_shown_on_the_first_stage_that_has_it():
    """Which may have axes that another one lacks."""
    first, other = ({"x": 1, "y": 2, "z": 4}, {"x": 1, "y": 4})
    table = Tensor("table", (64, 8), "float32", (("z",), ()), "parameters")
    copied = replace(table, spec=(("y",), ()))
    stages = [
        SimpleNamespace(mesh=SimpleNamespace(shape=m), tensors=(t,)) for m, t in ((first, table), (other, copied))
    ]
    judgement = SimpleNamespace(kinds={"table": "vocabulary"}, letters={"table": ("V", "D")})
    (row,) = plan_rows(SimpleNamespace(stages=stages, judgement=judgement, record=None), [table])
    assert dict(row.mesh) == first
    assert row.bytes_on_device == 64 * 8 * 4 // 4
