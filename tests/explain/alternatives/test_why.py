"""Explanations: every alternative costs what a plan with that sharding fixed costs; memory and methods are named."""

import math

import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.explain.alternatives.why import Explainer
from meshwright.parallelism.subject.subject import Subjects
from tests.explain.plans import found, plan_of, tensor_parallel

pytestmark = pytest.mark.slow

SECONDS = 600  # so that no clock is in the way: every solve ends within seconds, by its gap
PATHS = ["state/params/layers/0/up", "state/params/embed", "state/mu/layers/1/o", "batch/tokens"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("path", PATHS)
def test_alternatives_cost_what_planning_with_them_costs(path):
    explanation = found().explain(path, SECONDS)
    assert explanation.cost == found().cost.total and explanation.alternatives
    for alternative in explanation.alternatives[:2] + explanation.alternatives[-1:]:
        fix = {tied: P(*(axes or None for axes in spec)) for tied, spec in alternative.fix.items()}
        forced = plan_of("gpt-tiny", (4, 2), mw.Auto(fix=fix))
        assert alternative.is_exact
        assert alternative.cost == pytest.approx(forced.cost.total, rel=1e-6)
        assert alternative.difference == pytest.approx(alternative.cost - found().cost.total)
        assert sum(c.seconds for c in alternative.changes) == pytest.approx(alternative.difference, abs=1e-6)


def test_a_loaded_plan_explains_the_same(tmp_path):
    found().save(tmp_path / "plan.json")
    again = mw.Plan.load(tmp_path / "plan.json")
    path = "state/params/layers/0/up"
    assert str(again.explain(path, SECONDS)) == str(found().explain(path, SECONDS))


def test_what_the_method_lays_down_is_said_with_what_it_costs():
    plan = plan_of("mlp", (4,), mw.DataParallel(), batch=256, hidden=32)
    path = next(t.path for t in plan.arguments if t.role == "parameters" and len(t.shape) == 2)
    explanation = plan.explain(path, SECONDS)
    assert explanation.forced_by == "method"
    assert "DataParallel prescribes it; without that" in explanation.reason
    assert explanation.alternatives and not any(a.allowed for a in explanation.alternatives)
    assert "not allowed by DataParallel" in str(explanation)


def test_what_is_fixed_in_the_plan_that_auto_took_is_not_said_to_be_prescribed_by_auto():
    plan = plan_of("mlp", (4,), mw.Auto(fix={"state/params/*": P()}), batch=256, hidden=32)
    path = next(t.path for t in plan.arguments if t.role == "parameters" and len(t.shape) == 2)
    explanation = plan.explain(path, SECONDS)
    assert explanation.forced_by == "method"
    assert explanation.reason.startswith("Auto took a plan in which it is fixed; without that")
    assert "not allowed in the plan that Auto took" in " ".join(str(explanation).split())


def test_what_memory_forces_is_said_with_what_would_do_without():
    free = plan_of("gpt-tiny", (4, 2), mw.Auto())
    tight = plan_of("gpt-tiny", (4, 2), mw.Auto(), memory_bytes=int(0.75 * free.memory.peak_bytes))
    pairs = zip(tight.arguments, free.arguments, strict=True)
    moved = [a.path for a, b in pairs if a.spec != b.spec and a.role != "data" and len(a.shape) == 1][:2]
    reasons = [tight.explain(path, SECONDS) for path in moved]
    assert all(e.forced_by == "memory" and "without the limit" in e.reason for e in reasons)
    assert any(a.cost < math.inf for e in reasons for a in e.alternatives)
    hurried = [Explainer(Subjects(tight)[0]).explain(*tight.find(path), 0.01) for path in moved]
    for explanation in (*reasons, *hurried):  # a slow machine's say no less
        for alternative in explanation.alternatives:
            assert alternative.at_least >= tight.solution.lower_bound * (1 - 1e-6)
            assert alternative.cost >= alternative.at_least * (1 - 1e-9)
            if alternative.cost < math.inf:
                assert alternative.peak_bytes <= tight.memory.limit_bytes


@pytest.mark.sweep(1)
@pytest.mark.parametrize("fraction", [None, 0.75])
def test_bounds_hold_for_every_way_and_cost_no_solve(fraction):
    """What one dual says of every sharding is no more than the best plan with it costs, with memory and without."""
    plan = plan_of("gpt-tiny", (4, 2), mw.Auto())
    if fraction is not None:
        plan = plan_of("gpt-tiny", (4, 2), mw.Auto(), memory_bytes=int(fraction * plan.memory.peak_bytes))
    explainer, num_solved = Explainer(Subjects(plan)[0]), 0
    for path in PATHS if fraction is None else PATHS[::3]:  # solves under a limit take ten times as long
        (tensor,) = plan.find(path)
        bounded, solved = (explainer.explain(tensor, seconds) for seconds in (None, SECONDS))
        num_solved += sum(a.cost < math.inf for a in solved.alternatives)
        at_least = {a.spec: a.at_least for a in bounded.alternatives}
        assert all(a.cost == math.inf and not a.changes for a in bounded.alternatives)
        assert len(at_least) == len(solved.alternatives) + solved.num_left
        for a in solved.alternatives:
            assert at_least[a.spec] <= a.cost * (1 + 1e-9)
    assert num_solved


def test_scalars_and_results_are_explained():
    assert tensor_parallel().explain("state/step").forced_by == "shape"
    assert tensor_parallel().explain("out/1").forced_by == "shape"
    state = tensor_parallel().explain("out/0/params/layers/0/up")
    assert state.alternatives and state.kind == "tensor (column)"


def test_paths_that_match_nothing_or_too_much_are_refused():
    with pytest.raises(mw.ShardingError, match=r"matches no argument.*state/params/layers/0/up"):
        found().explain("state/params/layers/0/uo")
    with pytest.raises(mw.ShardingError, match="matches 2 tensors; explain one of them"):
        found().explain("state/params/layers/*/up")
