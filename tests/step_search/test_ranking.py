"""Which of several plans is taken: the quickest as simulated, unless a simpler one is nearly as quick."""

from types import SimpleNamespace

import pytest

from meshwright.step_search import ranking


def plan(seconds, splits=1, stages=0, microbatches=1):
    tensors = [SimpleNamespace(role="parameters", spec=((f"x{n}",),)) for n in range(splits)]
    return SimpleNamespace(
        mesh=SimpleNamespace(is_abstract=True),
        step_s=seconds,
        arguments=tensors,
        stages=(None,) * stages,
        pipeline=None,
        microbatches=microbatches,
    )


@pytest.mark.parametrize(
    ("plans", "chosen"),
    [
        ([plan(1.0, splits=4), plan(1.009)], 1),
        ([plan(1.0, splits=4), plan(1.011)], 0),
        ([plan(1.0, stages=2), plan(1.005, microbatches=8)], 1),
        ([plan(1.0, microbatches=4), plan(1.009, microbatches=2)], 1),
        ([plan(1.009), plan(1.0)], 1),
    ],
)
def test_a_simpler_plan_is_taken_where_it_is_nearly_as_quick(plans, chosen):
    assert ranking.simplest(plans) is plans[chosen]
