"""Which of several plans is taken: the quickest as simulated, unless a simpler one is nearly as quick."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

import meshwright as mw
from meshwright.plans.plan import Compared
from meshwright.plans.tensor import Tensor
from meshwright.step_search import ranking


@dataclass(frozen=True)
class Told:
    """What is compared of a plan."""

    step_s: float
    splits: int = 1
    stages: tuple[None, ...] = ()
    microbatches: int = 1
    pipeline: None = None
    method: str = "Auto"
    recompute: str = "none"
    mesh: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(sizes=(4,)))
    memory: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(peak_bytes=1))
    compared: tuple[Compared, ...] = ()
    remarks: tuple[str, ...] = field(default=())

    @property
    def arguments(self):
        return [Tensor("abcdefgh"[n], (8,), "float32", ((f"x{n}",),), "parameters") for n in range(self.splits)]


CASES = [
    ((Told(1.0, splits=4), Told(1.009)), 1),
    ((Told(1.0, splits=4), Told(1.011)), 0),
    ((Told(1.0, stages=(None, None)), Told(1.005, microbatches=8)), 1),
    ((Told(1.0, microbatches=4), Told(1.009, microbatches=2)), 1),
    ((Told(1.009), Told(1.0)), 1),
]


@pytest.mark.parametrize(("plans", "chosen"), CASES)
def test_a_simpler_plan_is_taken_where_it_is_nearly_as_quick(plans, chosen):
    assert ranking.simplest(plans).step_s == plans[chosen].step_s


def test_layers_of_one_kind_that_are_split_apart_make_a_plan_harder_to_understand():
    class Alternating(Told):
        @property
        def arguments(self):
            return [Tensor(f"layers/{n}/w", (8,), "float32", ((f"x{n % 2}",),), "parameters") for n in range(4)]

    assert ranking.complexity(Alternating(1.0)) == (3, 0, 1, 1) and ranking.complexity(Told(1.0, splits=2))[0] > 1


def test_what_the_last_percent_would_have_cost_is_said():
    found = ranking.simplest([Told(1.0, splits=4, microbatches=2), Told(1.008)])
    assert found.remarks == (
        "A plan with 4 different splits of the state, 2 microbatches would be 0.8% quicker as simulated; "
        "this one is simpler.",
    )
    again = ranking.simplest([found, Told(1.0, splits=4, microbatches=2)])  # as a search does that has several parts
    assert again.remarks == found.remarks
    whole = ranking.simplest([Told(1.0, splits=4), Told(1.008)])
    assert whole.remarks[0].startswith("A plan with 4 different splits of the state would be 0.8% quicker")


def test_a_plan_keeps_what_it_was_compared_with_the_quickest_first_and_each_decision_once():
    zero = ranking.simplest([Told(2.0, method="Zero-3", microbatches=4), Told(3.0, method="Zero-3", microbatches=8)])
    same = Told(1.0, method="Zero-1")  # the same plan by another name
    chosen = ranking.simplest([Told(4.0), zero, Told(1.0), same, Told(2.5, method="Zero-3", microbatches=4)])
    assert [(one.method, one.microbatches, one.step_s) for one in chosen.compared] == [
        ("Zero-3", 4, 2.0),
        ("Zero-3", 8, 3.0),
        ("Auto", 1, 4.0),
    ]


def test_rounding_of_the_simulated_step_makes_no_wait_of_less_than_nothing(tmp_path):
    plan = mw.plan(lambda x: x * 2, np.ones(8, np.float32), cluster="1x2 cpu")
    busy_s = float(np.nextafter(plan.step_s, 1))
    plan = ranking.with_step(
        replace(plan, cost=replace(plan.cost, step=0.0)), SimpleNamespace(step_s=plan.step_s, busy_s=busy_s)
    )
    plan.save(tmp_path / "plan.json")
    assert mw.Plan.load(tmp_path / "plan.json").cost.waiting == 0
