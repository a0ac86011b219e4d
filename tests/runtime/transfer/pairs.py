"""Random arrays and pairs of shardings on eight devices, as the tests and `benchmarks/transfer.py` use them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64", "int32", "float16", "uint8")
SIZES = (1, 2, 3, 4, 6, 8, 12, 24)


@dataclass(frozen=True)
class Pair:
    """An array on the host, the sharding it has first, and the one it gets."""

    values: np.ndarray
    source: object
    target: object


def random_pair(rng):
    """Shapes that the shardings divide, on meshes of one to three axes, in any order of devices, that may overlap."""
    shape = tuple(int(size) for size in rng.choice(SIZES, rng.integers(0, 4)))
    dtype = jnp.dtype(DTYPES[rng.integers(len(DTYPES))])
    values = rng.integers(0, 2, shape) if dtype.kind == "b" else rng.integers(-7, 8, shape)
    return Pair(np.asarray(values).astype(dtype), random_sharding(rng, shape), random_sharding(rng, shape))


def random_sharding(rng, shape):
    devices = rng.permutation(np.array(jax.devices()))
    if rng.random() < 0.1:
        return SingleDeviceSharding(devices[0])
    sizes = [int(size) for size in rng.choice([1, 2, 3, 4], rng.integers(1, 4))]
    while np.prod(sizes) > len(devices):
        sizes.pop()
    names = tuple("xyz"[: len(sizes)])
    if rng.random() < 0.5:
        devices = sorted(devices[: np.prod(sizes)], key=lambda device: device.id)
    mesh = Mesh(np.array(devices[: np.prod(sizes)]).reshape(sizes), names)
    entries: list[list[str]] = [[] for _ in shape]
    for name, size in zip(names, sizes, strict=True):
        fitting = [i for i, n in enumerate(shape) if n % (size * np.prod([mesh.shape[a] for a in entries[i]])) == 0]
        if fitting and rng.random() < 0.8:
            entries[rng.choice(fitting)].append(name)
    return NamedSharding(mesh, PartitionSpec(*(tuple(entry) or None for entry in entries)))


def as_bytes(array):
    """The bytes of an array of any dtype."""
    return np.asarray(array).tobytes()
