"""`mw.reshard` in one process: equal to the byte between any two shardings, and clear about what it cannot move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import meshwright as mw
from meshwright import jax_devices
from meshwright.runtime.transfer.reshard import Transfer
from tests.runtime.transfer.pairs import as_bytes, random_pair

pytestmark = pytest.mark.devices


def named(devices, *spec, shape=None, names="xyz"):
    devices = np.array(jax.devices())[list(devices)]
    devices = devices if shape is None else devices.reshape(shape)
    return NamedSharding(Mesh(devices, tuple(names[: devices.ndim])), PartitionSpec(*spec))


def check(values, source, target, **options):
    """Moves an array and looks at every shard."""
    array = jax.device_put(values, source)
    moved = Transfer(array.shape, array.dtype, source, target, **options)(array)
    assert (moved.shape, moved.dtype, moved.sharding) == (array.shape, array.dtype, target)
    whole = np.asarray(values)
    for shard in moved.addressable_shards:
        assert as_bytes(shard.data) == as_bytes(whole[shard.index]), f"{shard.index} on {shard.device}"
    assert as_bytes(array) == as_bytes(whole), "the source is as it was"


@pytest.mark.parametrize("seed", range(30))
def test_random_pairs_are_equal_to_the_byte(seed):
    pair = random_pair(np.random.default_rng(seed))
    per_group = (1, 2, 8)[seed % 3]
    check(pair.values, pair.source, pair.target, group_of=lambda device: device.id // per_group)


def test_parts_that_are_fetched_and_shared_are_equal_to_the_byte():
    values = np.random.default_rng(0).normal(size=(1024, 1026)).astype(np.float32)
    check(values, named(range(4)), named(range(4, 8)), group_of=lambda device: device.id // 4)


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 8)])
def test_arrays_without_elements(shape):
    check(np.zeros(shape, np.float32), named(range(4)), named(range(4, 8)))


@pytest.mark.parametrize("source", [named(range(4), "x"), named(range(4))])
@pytest.mark.parametrize(
    "target", [named(range(4, 8), "x"), named((6, 3), "x"), SingleDeviceSharding(jax.devices()[7])]
)
def test_typed_keys(source, target):
    keys = jax.device_put(jax.random.split(jax.random.key(3), 8), source)
    moved = mw.reshard(keys, target)
    assert moved.dtype == keys.dtype and moved.sharding.is_equivalent_to(target, 1)
    np.testing.assert_array_equal(jax.random.key_data(moved), jax.random.key_data(keys))


def test_numbers_of_two_bits():
    """XLA's CPU backend ends the process when it concatenates them."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    values = (np.arange(16).reshape(4, 4) % 4 - 2).astype(jnp.int2)
    array = jax.device_put(values, NamedSharding(mesh, PartitionSpec("x")))
    moved = mw.reshard(array, NamedSharding(mesh, PartitionSpec(None, "x")))
    assert moved.dtype == jnp.int2
    np.testing.assert_array_equal(np.asarray(moved), values)


def test_wide_numbers_stay_wide():
    """The setting belongs to the thread, and programs are compiled in others."""
    with jax.enable_x64(True):
        values = np.arange(32, dtype=np.float64).reshape(8, 4) / 3
        check(values, named(range(4), "x"), named(range(4, 8), None, "x"))


def test_weak_types_stay_weak():
    weak = jax.device_put(jax.jit(lambda: 3)(), named(range(4)))
    for target in (named(range(4, 8)), named(range(6)), SingleDeviceSharding(jax.devices()[5])):
        assert mw.reshard(weak, target).weak_type
        assert not mw.reshard(weak.astype("float32"), target).weak_type


@pytest.mark.parametrize("value", [3, 2.5, True, np.float64(2.0), np.arange(8), np.ones((8, 2), jnp.bfloat16)])
def test_values_of_the_host(value):
    target = named(range(4), *("x",) * bool(np.ndim(value)))
    moved = mw.reshard(value, target)
    assert moved.sharding == target and moved.weak_type == (type(value) in (int, float))
    np.testing.assert_array_equal(moved, value)


def test_an_array_that_is_there_shares_its_memory():
    array = jax.device_put(np.arange(8.0), named(range(4), "x"))
    moved = mw.reshard(array, named((0, 1), "x"))
    again = mw.reshard(array, named(range(4), "x"))
    for other in (array, again):
        assert other.addressable_data(0).unsafe_buffer_pointer() == again.addressable_data(0).unsafe_buffer_pointer()
    np.testing.assert_array_equal(moved, array)


def test_an_array_may_be_deleted_once_it_is_on_its_way():
    values = np.arange(2**20, dtype=np.float32).reshape(2**10, 2**10)
    for spec in (("x",), (None, "x")):
        array = jax.device_put(values, named(range(4), "x"))
        moved = mw.reshard(array, named(range(4, 8), *spec))
        array.delete()
        np.testing.assert_array_equal(moved, values)


def test_copies_need_no_private_function_of_jax(monkeypatch):
    monkeypatch.setattr(jax_devices, "_copy_arrays", None)
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    for spec in (("x",), (None, "x")):
        check(values, named(range(4), "x"), named(range(4, 8), *spec))


def test_one_transfer_is_made_for_equal_calls():
    from meshwright.runtime.transfer import reshard

    reshard._transfer.cache_clear()
    for i in range(3):
        array = jax.device_put(np.arange(8.0) + i, named(range(4), "x"))
        np.testing.assert_array_equal(mw.reshard(array, named(range(4, 8), "x")), array)
    assert reshard._transfer.cache_info().misses == 1


def test_transfers_may_be_begun_before_they_are_awaited():
    array = jax.device_put(np.arange(24.0).reshape(6, 4), named(range(2), "x"))
    transfer = Transfer(array.shape, array.dtype, array.sharding, named((5, 6, 7), None, shape=(3,)))
    waits = [transfer.start(array) for _ in range(3)]
    for wait in waits:
        np.testing.assert_array_equal(wait(), array)


def test_arrays_in_the_memory_of_the_host_are_moved_by_jax():
    kinds = [memory.kind for memory in jax.devices()[0].addressable_memories()]
    usual = jax.devices()[0].default_memory().kind
    other = next(kind for kind in kinds if kind != usual)
    target = named(range(4, 8), "x").with_memory_kind(other)
    array = jax.device_put(np.arange(8.0), named(range(4), "x"))
    moved = mw.reshard(array, target)
    assert moved.sharding.memory_kind == other
    np.testing.assert_array_equal(moved, array)


def deleted():
    array = jnp.ones(8)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("array", "sharding", "words"),
    [
        (deleted, named(range(4), "x"), "float32[8] was deleted or donated"),
        (lambda: jnp.ones(6), named(range(4), "x"), "an array of shape [6] cannot have the sharding"),
        (lambda: np.ones(6), named(range(4), "x"), "an array of shape [6] cannot have the sharding"),
        (lambda: 1.0, named(range(4), "x"), "an array of shape [] cannot have the sharding"),
        (lambda: jnp.ones(8), PartitionSpec("x"), "sharding is P"),
        (lambda: jnp.ones(8), None, "sharding is None; give a sharding of JAX"),
        (lambda: {"w": jnp.ones(8)}, named(range(4)), "array is dict, which JAX has no type for"),
        (lambda: "eight", named(range(4)), "array is str, which JAX has no type for"),
        (lambda: jnp.ones(8), NamedSharding(AbstractMesh((4,), ("x",)), PartitionSpec("x")), "no devices"),
    ],
)
def test_what_cannot_be_moved_is_refused(array, sharding, words):
    with pytest.raises(mw.ShardingError) as caught:
        mw.reshard(array(), sharding)
    assert words in str(caught.value)


def test_a_traced_array_is_refused():
    with pytest.raises(mw.ShardingError, match=r"being traced.*with_sharding_constraint"):
        jax.jit(lambda x: mw.reshard(x, named(range(4))))(jnp.ones(8))


def test_a_transfer_refuses_arrays_of_another_type():
    transfer = Transfer((8,), jnp.dtype("float32"), named(range(4), "x"), named(range(4, 8), "x"))
    with pytest.raises(mw.ShardingError, match=r"the array is int32\[8\].*this transfer is for float32\[8\]"):
        transfer(jax.device_put(np.arange(8, dtype=np.int32), named(range(4), "x")))
    with pytest.raises(mw.ShardingError, match="make another Transfer"):
        transfer(jnp.ones(8))


def test_what_was_moved_to_one_device_stays_there():
    """XLA copies an array that is not committed, as all arrays are by default, to one that is not."""
    here, there, last = jax.devices()[0], jax.devices()[1], jax.devices()[2]
    with jax.default_device(here):
        array = jnp.arange(4.0)
    assert not array.committed
    moved = mw.reshard(array, SingleDeviceSharding(there))
    assert moved.committed and (moved + 1).devices() == {there}
    assert (mw.reshard(moved, last) + 1).devices() == {last}, "a device says the same"
    halves = mw.reshard(moved, named((3, 4), "x"))
    np.testing.assert_array_equal(np.asarray(halves), np.arange(4.0))


@pytest.mark.parametrize(
    ("value", "reason"),
    [(jax.ShapeDtypeStruct((4,), jnp.float32), "a type without values"), (2**40, "too large")],
)
def test_values_that_cannot_be_moved_are_named(value, reason):
    with pytest.raises(mw.ShardingError, match=reason):
        mw.reshard(value, jax.devices()[1])
