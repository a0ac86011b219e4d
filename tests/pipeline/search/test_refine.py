"""Stages that are split for themselves: never slower, and told by the plan as they are."""

from functools import cache

import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.explain.alternatives.step_effects import Effects
from meshwright.graph import trace
from meshwright.parallelism.subject.subject import Subjects
from meshwright.pipeline.planner import start_search
from meshwright.pipeline.prices.stage_problem import Own
from meshwright.pipeline.search.refine import refine
from meshwright.pipeline.to_plan import describe
from tests.pipeline.search.test_search import _peak, repriced

pytestmark = pytest.mark.slow

TIGHT = {  # so that memory binds, where attention is written out
    "llama": ("llama-tiny", {"layers": 4, "batch": 16, "attention": "plain"}, "1x4 l40s", 2.963e-5),
    "mixtral": ("mixtral-tiny", {"batch": 8, "attention": "plain"}, "1x4 l40s", 4.993e-5),
}


def searched(name):
    model, options, machines, fraction = TIGHT[name]
    example = zoo.build(model, **options)
    method = mw.Auto(pipeline=True, memory_fraction=fraction)
    args = (example.train_step, example.state, example.batch)
    traced = trace(*args)
    search = start_search(traced, mw.cluster(machines), method, lambda _: None)
    search.all_recipes()
    search.all_programmes()
    return search, traced, method


@cache
def refined(name):
    """The search, refined, what it had found before, with its numbers of solves and pipelines, and what was planned."""
    search, traced, method = searched(name)
    before = search.best, search.catalogue.num_solves, search.tried
    refine(search)
    return search, before, traced, method


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", TIGHT)
def test_where_memory_binds_stages_split_for_themselves_are_quicker(name):
    search, (before, solves, tried), *_ = refined(name)
    assert search.best_s < 0.995 * before.total_s
    assert search.catalogue.num_solves > solves and search.tried > tried
    assert any(isinstance(stage.option.way, Own) for stage in search.best.stages)
    for number, stage in enumerate(search.best.stages):
        peak = _peak(search.best, number)
        held = stage.in_flight * (1 - 1 / search.best.pipeline.interleave)
        items = sum(stage.option.prices.items[:, a:b].sum(axis=1) for a, b in stage.chunks)
        assert peak - held * stage.option.held(items) <= search.catalogue.limits[0]
    assert search.bound_s <= search.best_s * (1 + 1e-9)
    again = search.best_s
    refine(search)
    assert search.best_s <= again


def test_a_plan_tells_the_splits_of_its_own_stages(tmp_path):
    """That `mw.plan` finds what such a search finds, `test_search.py` checks."""
    search, _, traced, method = refined("llama")
    plan = mw.Plan.of(describe(search, traced, method, 0.0))
    assert plan.step_s == pytest.approx(search.best_s) == pytest.approx(repriced(plan))
    assert any("less memory" in stage.method for stage in plan.stages)
    for subject in Subjects(plan):
        stage, problem = subject.stage, subject.record.problem
        worked = stage.forward.total_s + stage.backward.total_s
        assert Effects(subject)._now[0] == pytest.approx(worked, rel=0.1)
        tensors = {t.path: t for t in stage.tensors}
        for node, choice in zip(problem.nodes, problem.choice, strict=True):
            for tensor in (tensors[path] for path in node.paths if path in tensors):
                dims = problem.axes.dims(int(node.codes[choice]), len(tensor.shape))
                assert [tuple(a for a in axes if a != "x") for axes in tensor.spec] == [
                    tuple(subject.names[a] for a in axes) for axes in dims
                ]
    plan.save(tmp_path / "plan.json")
    assert mw.Plan.load(tmp_path / "plan.json") == plan
    assert plan.simulate().step_s > 0
