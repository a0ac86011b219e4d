"""Attacks on microbatches give the numbers of the whole batch, or are refused by the name of an operation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.runtime.microbatches.microbatches import CannotCut
from tests.runtime.microbatches.attacks import ATTACKS, BATCH, GROUPS, REFUSED, P
from tests.runtime.microbatches.cutting import in_parts

pytestmark = pytest.mark.devices


def assert_equal(one, many):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if np.issubdtype(a.dtype, np.inexact):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
        else:
            np.testing.assert_array_equal(a, b)


def cut(function, count):
    try:
        return in_parts(function, (P, BATCH), (1,), count)
    except CannotCut as reason:
        return reason


@pytest.mark.sweep(60)
@pytest.mark.parametrize(("group", "name"), ATTACKS, ids=lambda text: text)
def test_parts_give_the_numbers_of_the_whole_or_are_refused(group, name):
    function = GROUPS[group][name]
    found = [cut(function, 2), cut(function, 4)]
    ways = [way for way in found if not isinstance(way, CannotCut)]
    if name not in REFUSED.get(group, ()):
        assert ways == found
    if ways:
        one, *many = jax.jit(lambda p, b: [way(p, b) for way in (function, *ways)])(P, BATCH)
        for made in many:
            assert_equal(one, made)


def test_refused_attacks_are_known_by_name():
    for group, names in REFUSED.items():
        assert set(names) <= set(GROUPS[group])


NAMED = {
    "positions": {"update a row": "dynamic_update_slice", "set the first": "scatter", "rolled": "slice"},
    "scatters": {"multiply a parameter": "scatter-mul"},
    "conversions": {"to integers in a checkpoint": "convert_element_type", "to integers in a loop": "in a scan"},
    "nested": {"a branch": "scatter", "a while": "while"},
}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in NAMED for name in NAMED[group]])
def test_refusals_name_the_operation(group, name):
    assert NAMED[group][name] in str(cut(GROUPS[group][name], 2))


def test_steps_run_on_devices_in_parts_or_whole():
    chosen = [("positions", "weights by position"), ("parameters", "power by size"), ("parameters", "knows its size")]
    chosen += [("scatters", "add to zeros"), ("nested", "position weights in a loop"), ("not finite", "sums")]

    def safe(p, b):
        return {name: GROUPS[group][name](p, b) for group, name in chosen}

    def unsafe(p, b):
        return {**safe(p, b), "set": b["x"].at[0].set(0.0), "sum": jnp.tanh(b["x"] @ p["w"]).sum()}

    for step, remarks in ((safe, []), (unsafe, ["in 2 microbatches, which could change its numbers: scatter"])):
        many = mw.parallelize(step, cluster="1x2 cpu", mesh=(2,), method=mw.DataParallel(), microbatches=2)
        assert_equal(jax.jit(step)(P, BATCH), many(P, BATCH))
        assert len(many.last_plan.remarks) == len(remarks)
        for said, expected in zip(many.last_plan.remarks, remarks, strict=True):
            assert expected in said
