"""Strategies of one operation, against every assignment of axes to loops checked by index sets."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.rules.base import Signature, TensorType, nest
from meshwright.strategy.candidates import (
    enumerate_candidates,
    follow,
    most_scattered,
    most_split,
    reducing_axes,
    result_holders,
    settlements,
    tensor_holders,
    uniform,
)
from meshwright.strategy.sharding import Axes
from tests.strategy.layouts import block, devices

meshes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).map(tuple)
loop_sizes = st.sampled_from([1, 2, 3, 4, 6, 8])


def signature(operands, results):
    def types(shapes):
        return tuple(TensorType(tuple(s), "float32") for s in shapes)

    return Signature("op", {}, types(operands), types(results))


def product_nest(b, m, k, n):
    op = signature([(b, m, k), (b, k, n)], [(b, m, n)])
    return nest("b m k, b k n -> b m n", op, reduce={"k": "sum"}, leads=True)


def merge_nest(a, b, c):
    return nest("a b c -> (a b) c", signature([(a, b, c)], [(a * b, c)]))


def loop_range(loop, assignment, size, sizes, device):
    return block(size, [a for a, given in enumerate(assignment) if given == loop], sizes, device)


def is_legal(loop_nest, assignment, sizes):
    """Whether every device's part of every tensor is the block that the axes on its dims say, in the mesh's order."""
    for axis, loop in enumerate(assignment):
        if loop >= 0 and (sizes[axis] == 1 or loop_nest.loops[loop].kind == "unsplittable"):
            return False
    for i, loop in enumerate(loop_nest.loops):
        parts = np.prod([n for n, given in zip(sizes, assignment, strict=True) if given == i], dtype=int)
        if loop.size % parts:
            return False
    for dims in (*loop_nest.operands, *loop_nest.results):
        for dim in dims:
            axes = [a for a, loop in enumerate(assignment) if loop in dim]
            shape = [loop_nest.loops[loop].size for loop in dim]
            places = np.arange(np.prod(shape, dtype=int)).reshape(shape)
            for device in devices(sizes):
                ranges = [loop_range(loop, assignment, loop_nest.loops[loop].size, sizes, device) for loop in dim]
                touched = places[tuple(slice(a, b) for a, b in ranges)].ravel()
                first, last = block(places.size, axes, sizes, device)
                if touched.tolist() != list(range(first, last)):
                    return False
    return True


def legal_by_hand(loop_nest, sizes):
    options = range(-1, len(loop_nest.loops))
    return {
        assignment
        for assignment in product(options, repeat=len(sizes))
        if all(i < 0 or loop_nest.loops[i].size > 1 for i in assignment) and is_legal(loop_nest, assignment, sizes)
    }


@settings(deadline=None, max_examples=40)
@given(meshes, loop_sizes, loop_sizes, loop_sizes, loop_sizes)
def test_a_product_has_every_even_split_and_no_other(sizes, b, m, k, n):
    loop_nest = product_nest(b, m, k, n)
    found = enumerate_candidates(loop_nest, Axes(sizes), scatter=False)
    assert {tuple(row) for row in found.loops.tolist()} == legal_by_hand(loop_nest, sizes)
    assert len({tuple(row) for row in found.loops.tolist()}) == len(found.loops)
    assert (found.scatter == -1).all()


@settings(deadline=None, max_examples=60)
@given(meshes, loop_sizes, loop_sizes, loop_sizes)
def test_a_merged_dim_is_split_only_into_blocks(sizes, a, b, c):
    loop_nest = merge_nest(a, b, c)
    found = {tuple(row) for row in enumerate_candidates(loop_nest, Axes(sizes)).loops.tolist()}
    assert found == legal_by_hand(loop_nest, sizes)


def test_a_merged_dims_minor_loop_is_split_once_the_major_one_is_used_up():
    axes = Axes((2, 3))
    found = {tuple(row) for row in enumerate_candidates(merge_nest(2, 3, 1), axes).loops.tolist()}
    assert (0, 1) in found  # x takes the major loop to single iterations, y goes on with the minor one
    assert (-1, 1) not in found
    assert (1, 0) not in found


def test_unsplittable_loops_stay_whole():
    loop_nest = nest("a . -> a .", signature([(8, 8)], [(8, 8)]))
    found = enumerate_candidates(loop_nest, Axes((4,)))
    split = {loop_nest.loops[i].kind for i in found.loops.ravel().tolist() if i >= 0}
    assert split == {"parallel"}


@settings(deadline=None, max_examples=40)
@given(meshes, loop_sizes, loop_sizes, loop_sizes)
def test_reduce_scatters_are_those_that_keep_each_part_where_it_is(sizes, m, k, n):
    loop_nest = nest("m k, k n -> m n", signature([(m, k), (k, n)], [(m, n)]), reduce={"k": "sum"}, leads=True)
    found = enumerate_candidates(loop_nest, Axes(sizes))
    pairs = {(tuple(a), tuple(s)) for a, s in zip(found.loops.tolist(), found.scatter.tolist(), strict=True)}
    assert len(pairs) == len(found.loops)
    expected = set()
    for assignment in legal_by_hand(loop_nest, sizes):
        choices = [(-1, 0, 1) if loop == 1 else (-1,) for loop in assignment]  # loop 1 is k
        expected |= {
            (assignment, scatter)
            for scatter in product(*choices)
            if scatters_within(assignment, scatter, (m, n), sizes)
        }
    assert pairs == expected


def scatters_within(assignment, scatter, shape, sizes):
    """Whether each device's part after the scatter is an even piece of what it held before."""
    dim_of_loop = {0: 0, 2: 1}
    before = [[a for a, loop in enumerate(assignment) if dim_of_loop.get(loop) == d] for d in (0, 1)]
    after = [
        [a for a in range(len(sizes)) if scatter[a] == d or (scatter[a] < 0 and dim_of_loop.get(assignment[a]) == d)]
        for d in (0, 1)
    ]
    for d in (0, 1):
        if shape[d] % np.prod([sizes[a] for a in after[d]], dtype=int):
            return False
        for device in devices(sizes):
            wide, narrow = block(shape[d], before[d], sizes, device), block(shape[d], after[d], sizes, device)
            if not (wide[0] <= narrow[0] and narrow[1] <= wide[1]):
                return False
    return True


@pytest.mark.parametrize("kind", ["max", "min", "prod", "and", "or"])
def test_only_sums_are_scattered(kind):
    loop_nest = nest("m k -> m", signature([(8, 8)], [(8,)]), reduce={"k": kind}, leads=True)
    assert (enumerate_candidates(loop_nest, Axes((2, 2))).scatter == -1).all()


def test_results_are_partial_over_the_axes_of_reducing_loops_alone():
    loop_nest = product_nest(1, 4, 4, 4)
    loops = np.array([[1, 2], [2, 2], [3, -1]])  # m and k; k twice; n
    partial = reducing_axes(loop_nest, loops, loop_nest.results[0])
    assert partial.tolist() == [[False, True], [True, True], [False, False]]


def test_a_loop_that_indexes_a_result_leaves_it_whole():
    loop_nest = nest("k -> k, .", signature([(8,)], [(8,), (1,)]), reduce={"k": "sum"})
    loops = np.array([[0]])
    assert not reducing_axes(loop_nest, loops, loop_nest.results[0]).any()
    assert reducing_axes(loop_nest, loops, loop_nest.results[1]).all()


def test_holders_say_which_dim_each_axis_splits():
    loop_nest = product_nest(2, 4, 4, 4)
    loops = np.array([[0, 1, 2], [3, -1, 0]])
    assert tensor_holders(loop_nest.operands[0], loops, 4).tolist() == [[0, 1, 2], [-1, -1, 0]]
    assert tensor_holders(loop_nest.operands[1], loops, 4).tolist() == [[0, -1, 1], [2, -1, 0]]
    scatter = np.array([[-1, -1, 2], [-1, -1, -1]])
    assert result_holders(loop_nest, loops, scatter, 0).tolist() == [[0, 1, 2], [2, -1, 0]]


def test_most_split_keeps_what_uses_the_most_devices():
    axes = Axes((2, 3))
    found = most_split(enumerate_candidates(product_nest(1, 4, 1, 4), axes), axes)
    # 3 divides nothing here, so only x can be used.
    assert sorted(found.loops.tolist()) == [[1, -1], [3, -1]]
    found = most_split(enumerate_candidates(product_nest(1, 6, 1, 6), axes), axes)
    assert sorted(found.loops.tolist()) == [[1, 1], [1, 3], [3, 1], [3, 3]]


@settings(deadline=None, max_examples=60)
@given(meshes, loop_sizes, loop_sizes, loop_sizes)
def test_following_a_tensor_gives_a_legal_split_that_agrees_with_it(sizes, a, b, c):
    axes, loop_nest = Axes(sizes), merge_nest(a, b, c)
    for dims, shape in ((loop_nest.operands[0], (a, b, c)), (loop_nest.results[0], (a * b, c))):
        codes = axes.legal_codes(shape)
        held = axes.unpack(codes)
        loops = follow(loop_nest, axes, dims, held)
        again = tensor_holders(dims, loops, len(loop_nest.loops))
        assert ((again == held) | (again == -1)).all()  # an axis is followed, or dropped; never moved
        legal = legal_by_hand(loop_nest, sizes)
        assert {tuple(row) for row in loops.tolist()} <= legal


def test_following_keeps_every_axis_where_that_is_legal():
    axes, loop_nest = Axes((2, 2)), merge_nest(2, 4, 8)
    codes = axes.legal_codes((8, 8))
    loops = follow(loop_nest, axes, loop_nest.results[0], axes.unpack(codes))
    kept = tensor_holders(loop_nest.results[0], loops, 3)
    np.testing.assert_array_equal(kept, axes.unpack(codes))


def test_uniform_strategies_are_those_of_a_mesh_of_fewer_axes():
    nest = product_nest(8, 8, 8, 8)
    found, fewer = enumerate_candidates(nest, Axes((2, 2, 2))), enumerate_candidates(nest, Axes((2, 4)))
    kept = uniform(found)
    held = {
        (*loops, *into) for loops, into in zip(found.loops[kept].tolist(), found.scatter[kept].tolist(), strict=True)
    }
    for (x, y), (into_x, into_y) in zip(fewer.loops.tolist(), fewer.scatter.tolist(), strict=True):
        assert (x, y, y, into_x, into_y, into_y) in held
    assert 0 < kept.sum() < len(kept)


def test_sums_into_one_dim_are_scattered_at_once_and_inner_axes_come_first():
    partial = np.array([[True, True, True], [True, True, True], [True, True, False], [False, True, True]])
    scatter = np.array([[0, 0, 1], [1, -1, 1], [0, 1, -1], [-1, -1, -1]])
    found = [(kind, axes, on.tolist()) for kind, axes, on in settlements(partial, scatter)]
    assert found == [
        ("reduce_scatter", (2,), [True, False, False, False]),
        ("reduce_scatter", (0, 2), [False, True, False, False]),
        ("reduce_scatter", (1,), [False, False, True, False]),
        ("reduce_scatter", (0, 1), [True, False, False, False]),
        ("reduce_scatter", (0,), [False, False, True, False]),
        ("all_reduce", (1,), [False, True, False, False]),
        ("all_reduce", (1, 2), [False, False, False, True]),
    ]
    assert [item[:2] for item in settlements(partial[:1], None)] == [("all_reduce", (0, 1, 2))]


def test_most_scattered_is_by_loops_and_within_the_axes():
    axes = Axes((2, 4))
    found = enumerate_candidates(product_nest(1, 4, 8, 8), axes)
    for over, most in (((0, 1), {(True, True)}), ((1,), {(False, True)})):
        kept = most_scattered(found, axes, over)
        both = (found.loops == 1 + 1).all(axis=1)  # both axes on the summed loop
        assert {tuple(row) for row in (found.scatter[kept & both] >= 0).tolist()} == most
        assert {tuple(row) for row in found.loops[kept].tolist()} == {tuple(row) for row in found.loops.tolist()}
