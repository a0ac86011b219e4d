"""What pages say that they are about, what tells two plans apart, and how fast a plan is said to be."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.report.about import about_data, plan_names, speed_data, title
from tests.explain.plans import tensor_parallel
from tests.plans.records.test_staged_record import planned

MESH = mw.Mesh.abstract((2,), 1, 1)


def step(x, w):
    return x @ w


def test_a_page_is_about_a_model_on_a_cluster():
    plan = planned("megatron")
    batch, sequence = next(t.shape for t in plan.arguments if t.path == "batch/tokens")
    known = {"model": "gpt-tiny", "batch": batch, "sequence": sequence, "cluster": "2x4 h100", "devices": 8}
    assert about_data(plan) == known
    assert title(plan) == "gpt-tiny on 2x4 h100"


@pytest.mark.parametrize(
    ("function", "name"),
    [(step, "step"), (partial(step), "step"), (lambda x, w: x @ w, "")],
    ids=["function", "partial", "lambda"],
)
def test_functions_give_plans_their_names(function, name):
    plan = mw.plan(function, jnp.ones((8, 4)), jnp.ones((4, 4)), mesh=MESH)
    assert plan.provenance["model"] == name
    assert title(plan) == f"{name or 'Auto'} on abstract mesh 2"
    assert plan == replace(plan, provenance={**plan.provenance, "model": "another"})


def test_two_plans_are_named_by_what_differs():
    one = tensor_parallel()
    assert plan_names(one, replace(one, method="Auto")) == ["TensorParallel", "Auto"]
    longer = [replace(t, shape=(t.shape[0], 99)) if t.role == "data" and t.shape else t for t in one.arguments]
    assert plan_names(one, replace(one, arguments=tuple(longer)))[1].endswith(" × 99")
    assert plan_names(one, one) == ["first plan", "second plan"]


def test_speed_is_the_simulations_and_abstract_meshes_have_none():
    plan = planned("replicas")
    simulated = plan.simulate()
    found = speed_data(plan, simulated)
    assert found["step"] == simulated.step_s and found["unit"] == "tokens"
    assert found["rate"] == simulated.work.tokens / simulated.step_s and found["mfu"] == simulated.mfu > 0
    assert speed_data(tensor_parallel(), None) is None


def test_without_a_sequence_examples_are_counted():
    plan = mw.plan(step, jnp.ones((64, 32)), jnp.ones((32, 32)), cluster="1x4 h100")
    assert about_data(plan)["sequence"] is None
    assert speed_data(plan, plan.simulate())["unit"] == "examples"
