"""Choices carried from one mesh view to another: everything is split alike, and takes as much memory."""

import doctest

import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.planner import Task
from meshwright.planner.solving import carry_over
from meshwright.planner.solving.carry_over import made_up, translated
from meshwright.planner.solving.fit_memory import View, ViewState
from tests.planner.examples import mesh, mlp_step, traced_zoo


def test_examples_run():
    assert doctest.testmod(carry_over).failed == 0


def solved(task, shape):
    state = ViewState(View(task.formulate(mesh(shape)), None)).step()
    assert state.fits
    return state


@pytest.mark.parametrize("model", ["mlp", "llama-tiny"])
@pytest.mark.parametrize(
    ("source", "target", "parts"),
    [((8,), (2, 4), (0, 0)), ((4, 2), (2, 4), (1, 0)), ((2, 4), (2, 2, 2), (0, 1, 1)), ((4, 2), (1, 4, 2), (0, 0, 1))],
)
def test_a_choice_splits_everything_alike_on_axes_that_make_up_its_own(model, source, target, parts):
    step, args = mlp_step(64, 64)
    task = Task(trace(step, *args) if model == "mlp" else traced_zoo("llama-tiny", layers=2, batch=8), mw.Auto())
    view, other = solved(task, source), task.formulate(mesh(target))
    assert made_up(source, target) == parts
    choice = translated(view.latest.choice, view.formulation, other)
    split = 0
    for which, table in enumerate(other.tables):
        before = view.formulation.tables[which]
        for made, codes in zip(before.codes, table.codes, strict=True):
            held = view.formulation.axes.unpack(made[view.latest.choice[which]])
            expected = np.where(np.array(target) > 1, held[list(parts)], -1)
            assert expected.tolist() == other.axes.unpack(codes[choice[which]]).tolist()
            split += (held >= 0).any()
        alike = np.ones(len(other.costs[which]), bool)
        for codes in (*table.codes, *table.needs):
            alike &= codes == codes[choice[which]]
        assert other.costs[which][choice[which]] == other.costs[which][alike].min()
    assert split
    assert other.memory.profile(choice, other.copies_made(choice)).peak_bytes == view.peak_bytes


def test_what_has_no_likeness_is_split_as_nearly_alike_as_can_be():
    """Fixed on one view, an argument cannot be split there as the choice on another has it; all the rest is."""
    step, args = mlp_step(64, 64)
    traced = trace(step, *args)
    free = solved(Task(traced, mw.DataParallel()), (8,))
    fixed = Task(traced, mw.Auto(fix={"x": PartitionSpec()})).formulate(mesh((2, 4)))
    choice = translated(free.latest.choice, free.formulation, fixed)
    apart, alike = set(), 0
    for which, (table, members) in enumerate(zip(fixed.tables, fixed.folded.members, strict=True)):
        before, argument = free.formulation.tables[which], fixed.grouping.groups[members[0]].argument
        for made, codes in zip(before.codes, table.codes, strict=True):
            held = free.formulation.axes.unpack(made[free.latest.choice[which]])
            if held[[0, 0]].tolist() == fixed.axes.unpack(codes[choice[which]]).tolist():
                alike += 1
            else:
                apart.add(argument)
    graph = traced.graph
    assert graph.inputs[graph.input_paths.index("x")] in apart and len(apart) <= 2 and alike > 10


@pytest.mark.parametrize(("source", "target"), [((2, 4), (8,)), ((8,), (2, 3)), ((4, 3), (2, 6))])
def test_axes_that_do_not_make_up_others_are_told(source, target):
    assert made_up(source, target) is None


def test_nothing_is_carried_to_a_view_with_fewer_axes():
    step, args = mlp_step(64, 64)
    task = Task(trace(step, *args), mw.Auto())
    view = solved(task, (2, 4))
    assert translated(np.array(view.latest.choice), view.formulation, task.formulate(mesh((8,)))) is None
