"""Checksums: any change is seen, and how an array is split is not."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.training.saving.checksums import checksums

pytestmark = pytest.mark.devices

TYPES = ("bool", "int4", "uint8", "int16", "uint32", "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn")
TYPES = (*TYPES, "bfloat16", "float16", "float32", "complex64")


def checksum(array):
    return checksums({"it": array})["it"]


def drawn(dtype, shape=(4, 6)):
    bits = np.random.default_rng(0).integers(0, 256, 8 * 24, dtype=np.uint8)
    if dtype == "bool":
        return (bits[:24] % 2 == 0).reshape(shape)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if dtype in ("int4", "float4_e2m1fn"):
        return (bits[:24] % 4).astype(np.int8).reshape(shape).astype(kind)
    return np.frombuffer(bits[: 24 * kind.itemsize].tobytes(), kind).reshape(shape)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_single_number_counts(dtype):
    array = drawn(dtype)
    sums = {checksum(array)}
    for place in ((0, 0), (1, 5), (3, 5)):
        raw = bytearray(array.tobytes())
        raw[(place[0] * 6 + place[1]) * array.dtype.itemsize] ^= 1
        sums.add(checksum(np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)))
    assert len(sums) == 4


def test_every_bit_counts_and_so_do_places_and_shape():
    array = np.zeros((2, 3), np.float32)
    flipped = []
    for place in range(8 * array.nbytes):
        raw = bytearray(array.tobytes())
        raw[place // 8] ^= 1 << place % 8
        flipped.append(np.frombuffer(bytes(raw), np.float32).reshape(2, 3))
    found = [checksum(a) for a in (array, *flipped)]
    assert len(set(found)) == len(found)
    ramp = np.arange(6, dtype=np.float32).reshape(2, 3)
    others = (ramp, ramp[::-1], ramp[:, ::-1], ramp.reshape(3, 2), ramp.ravel())
    assert len({checksum(a) for a in others}) == len(others)


def test_not_a_numbers_and_signs_of_zero_are_told_apart():
    bits = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x80000000, 0], np.uint32)
    assert len({checksum(bits[i : i + 1].view(np.float32)) for i in range(5)}) == 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_how_it_is_split_does_not_matter(dtype):
    array = jnp.asarray(drawn(dtype, (4, 6)))
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    expected = checksum(np.asarray(array))
    for spec in (PartitionSpec(), PartitionSpec("x"), PartitionSpec("y", "x"), PartitionSpec(("x", "y"))):
        assert checksum(jax.device_put(array, NamedSharding(mesh, spec))) == expected, spec


def mixed(word):
    word = (word ^ word >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    word = (word ^ word >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return word ^ word >> 16


def written_out(words):
    """The same by hand, for an array of 32-bit words."""
    first = second = 0
    for place, word in np.ndenumerate(words):
        salt = mixed(0)
        for index in place:
            salt = mixed(salt ^ index)
        first += mixed(int(word) ^ salt)
        second += mixed((int(word) + mixed(salt ^ 0x9E3779B9)) & 0xFFFFFFFF)
    return f"{first & 0xFFFFFFFF:08x}{second & 0xFFFFFFFF:08x}"


def test_the_sums_are_what_the_page_says():
    """They must stay so: checkpoints of earlier releases hold them."""
    ramp = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert checksum(ramp) == written_out(ramp.view(np.uint32)) == "954e9ef73f5a6b59"
    assert checksum(np.uint32(7)) == written_out(np.uint32(7))


def test_numbers_of_64_bits_are_two_words_each():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        array = np.random.default_rng(0).normal(size=5)
        assert checksum(jnp.asarray(array)) == written_out(array.view(np.uint32).reshape(5, 2))
    finally:
        jax.config.update("jax_enable_x64", before)
