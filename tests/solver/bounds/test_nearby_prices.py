"""Duals at several prices: each bounds the model, and those of other parts are among them."""

from itertools import product

import numpy as np
import pytest

from meshwright.solver.bounds.dual import Dual, ascend_prices
from meshwright.solver.bounds.nearby_prices import Fan
from meshwright.solver.deadline import NEVER
from meshwright.solver.model.model import State, from_problem
from meshwright.solver.tuning import TUNING
from meshwright.solver.warm import example


def _dual(seed, num_nodes=6):
    dual = Dual(from_problem(example(True, num_nodes=num_nodes, seed=seed)))
    dual.converge(10)
    ascend_prices(dual, 1.1 * dual.bound, 20)
    return dual


def _at(model, prices):
    other = Dual(model, prices=np.asarray(prices, float))
    other.converge(10)
    return other


@pytest.mark.parametrize("seed", [1, 2, 4, 5])
def test_no_dual_of_a_fan_rules_out_a_cheaper_choice(seed):
    dual, made = _dual(seed), Fan()
    rng = np.random.default_rng(seed)
    for _ in range(3):
        made.note(_at(dual.model, dual.prices + rng.random(len(dual.prices)) * dual.prices.max()))
    model, duals = dual.model, made.around(dual, NEVER)
    assert len(duals) > 3
    for choice in product(*map(range, np.diff(model.off))):
        state = State.of(model, np.array(choice))
        if state.fits(model):
            assert all(one.floor[model.off[:-1] + state.choice].max() <= state.cost + 1e-9 for one in duals)


@pytest.mark.parametrize(("worth", "expected"), [
    ([3.0, 0.0, 0.0, 0.0, 0.0], [[1.5], [2.4], [3.9], [6.0]]),
    ([3.0, 0.0, 1.0, 0.0, 0.0], [[4], [0, 0, 4], [1.5, 0, 2.5], [3.5, 0, 0.5]]),
    (
        [4.0, 1.0, 5.0, 2.0, 3.0],
        [
            [0, 0, 15], [15], [0, 0, 0, 0, 15], [0, 0, 0, 15],  # all at one of the four most expensive
            [9, 1, 0, 2, 3], [4, 1, 0, 2, 8], [0, 1, 9, 2, 3], [0, 1, 5, 2, 7], [4, 1, 8, 2, 0], [7, 1, 5, 2, 0],
            [4, 1, 7, 0, 3], [6, 1, 5, 0, 3], [4, 1, 5, 0, 5], [4, 1, 0, 7, 3], [0, 1, 5, 6, 3], [4, 1, 5, 5, 0],
        ],
    ),
])  # fmt: skip
def test_memory_is_worth_as_much_at_other_times(worth, expected):
    model = from_problem(example(True, num_nodes=20, seed=2))
    cap = np.array([1.0, 2.0, 4.0, 0.5, 3.0])
    model = model._replace(cap=np.resize(cap, len(model.cap)))
    size = len(model.cap)
    assert size >= len(cap)
    prices = np.zeros(size)
    prices[: len(cap)] = np.array(worth) / cap
    dual = Dual(model, prices=prices)
    dual.sweep()
    first, *others = Fan().around(dual, NEVER)
    assert first is dual
    got = sorted((one.prices * model.cap).round(9).tolist() for one in others)
    assert got == sorted(row + [0.0] * (size - len(row)) for row in expected)


def test_prices_that_were_best_elsewhere_are_tried_where_they_differ_most():
    dual, made = _dual(2, num_nodes=20), Fan()
    plain = len(made.around(dual, NEVER))
    far, near = dual.prices * 5.0 + dual.prices.max(), dual.prices * (1 + 1e-3)
    for prices in (near, far, far, np.zeros_like(far)):
        made.note(_at(dual.model, prices))
    assert len(made.seen) == 3  # no prices, no dual of its own
    first, second = made.around(dual, NEVER)[plain:]
    assert first.prices == pytest.approx(far) and second.prices == pytest.approx(near)


def test_no_more_than_a_few_of_them_are_tried():
    dual, made = _dual(1), Fan()
    plain = len(made.around(dual, NEVER))
    for scale in range(2, 20):
        made.note(_at(dual.model, dual.prices * scale + scale * dual.prices.max()))
    assert len(made.around(dual, NEVER)) == plain + TUNING.fan


def test_prices_are_carried_to_the_times_that_are_left():
    dual, made = _dual(2, num_nodes=20), Fan()
    elsewhere = _at(dual.model, 3.0 * dual.prices + dual.prices.max())
    elsewhere.model = dual.model._replace(when=dual.model.when + 1)  # a part that holds all but the first, and one more
    made.note(elsewhere)
    *_, last = made.around(dual, NEVER)
    assert (np.diff(dual.model.when) == 1).all()
    assert last.prices == pytest.approx([0.0, *elsewhere.prices[:-1]])
