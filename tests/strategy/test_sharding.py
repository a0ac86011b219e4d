"""Sharding codes: packing loses nothing, and the legal ones are those with even shards."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.strategy.sharding import MAX_RANK, Axes
from tests.strategy.layouts import all_dims, is_even, numbered, shard

meshes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
shapes = st.lists(st.integers(1, 12), max_size=3).map(tuple)


@given(meshes, st.data())
def test_packing_and_unpacking_are_inverse(sizes, data):
    axes = Axes(sizes)
    holders = np.array(data.draw(st.lists(st.integers(-1, MAX_RANK - 1), min_size=len(sizes), max_size=len(sizes))))
    assert axes.unpack(axes.pack(holders)).tolist() == holders.tolist()
    table = np.stack([holders, holders[::-1]])
    assert axes.unpack(axes.pack(table)).tolist() == table.tolist()


@given(meshes, st.integers(0, 4))
def test_codes_and_dims_are_inverse(sizes, rank):
    axes = Axes(sizes)
    codes = set()
    for dims in all_dims(rank, len(sizes)):
        code = axes.code(dims)
        assert axes.dims(code, rank) == dims
        codes.add(code)
    assert len(codes) == (rank + 1) ** len(sizes)


def test_code_zero_is_replicated():
    assert Axes((2, 4)).dims(0, 3) == ((), (), ())


@given(meshes, shapes)
def test_legal_codes_are_the_even_ones(sizes, shape):
    axes = Axes(sizes)
    expected = sorted(axes.code(d) for d in all_dims(len(shape), len(sizes)) if is_even(shape, d, sizes))
    assert axes.legal_codes(shape).tolist() == expected


@given(meshes, shapes.filter(lambda s: prod(s) <= 600))
def test_parts_count_the_different_shards(sizes, shape):
    axes = Axes(sizes)
    whole = numbered(shape)
    for code in axes.legal_codes(shape).tolist():
        dims = axes.dims(code, len(shape))
        seen = {shard(whole, dims, sizes, device).tobytes() for device in np.ndindex(*sizes)}
        assert axes.num_parts(code) == len(seen)


def test_a_tensor_of_too_many_dims_stays_whole():
    assert Axes((2,)).legal_codes((2,) * (MAX_RANK + 1)).tolist() == [0]
    assert len(Axes((2,)).legal_codes((2,) * MAX_RANK)) == MAX_RANK + 1
