"""The programs that are timed: products, streams and collectives, each looped on all devices at once.

All devices work at the same time, as they do under a plan: virtual CPU devices share their cores, and groups of a
collective share their wires. Each program is a loop whose number of trips is an argument, so that it is
compiled once, can run as long as a clock needs, and can run without a trip to show what starting it costs. On
accelerators a trip does its thing several times, since asking whether there is another trip takes microseconds there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.hardware.collectives import KINDS
from meshwright.profiler.survey import Machine

AXES = ("outer", "group", "inner")  # collectives run along the middle one


def looped(
    body: Callable[..., Any], arrays: Sequence[np.ndarray], view: tuple[int, int, int], unroll: int = 1
) -> Callable[[int], Any]:
    """A program that runs a body on every device's arrays again and again.

    Args:
        body: Takes and returns as many arrays as there are.
        arrays: The initial arrays of each device.
        view: Sizes of the device mesh along `AXES`.
        unroll: How often a trip runs the body.
    """
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(view), AXES)
    spec = PartitionSpec(AXES)
    spread = tuple(_spread(array, NamedSharding(mesh, spec)) for array in arrays)

    def trip(_: Any, kept: Any) -> tuple[jax.Array, ...]:
        for _ in range(unroll):
            kept = body(*kept)
        return kept

    def repeat(trips: Any, *kept: Any) -> tuple[jax.Array, ...]:
        return lax.fori_loop(0, trips, trip, kept)

    specs = (spec,) * len(spread)
    mapped = jax.shard_map(repeat, mesh=mesh, in_specs=(PartitionSpec(), *specs), out_specs=specs, check_vma=False)
    program = jax.jit(mapped)
    return lambda trips: program(np.int32(trips), *spread)


def _spread(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array of which every device has a copy as its part."""
    shape = (sharding.num_devices * array.shape[0], *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, lambda _: array)


_LAYOUT = ("NHWC", "HWIO", "NHWC")  # of convolutions


@dataclass(frozen=True)
class Probe:
    """One thing to time; its attributes are those of `Reading`.

    Attributes:
        view: Sizes of the device mesh; the middle axis holds the groups of a collective.
        body: What is done: it takes and returns as many arrays as there are.
        arrays: Makes the initial arrays of one device.
        unroll: How often it is done in one trip.
        flops: As in `Reading`: FLOPs beside the amount.
    """

    what: str
    amount: float
    dtype: str
    view: tuple[int, int, int]
    body: Callable[..., Any]
    arrays: Callable[[], tuple[np.ndarray, ...]]
    across: bool = False
    unroll: int = 1
    flops: float = 0.0

    @property
    def size(self) -> int:
        return self.view[1]

    def compile(self) -> Callable[[int], Any]:
        """The program: called with a number of trips, it starts running and returns a result to wait for."""
        return looped(self.body, self.arrays(), self.view, self.unroll)


def _matrices(length: int, dtype: str) -> tuple[np.ndarray, ...]:
    """Products of such matrices neither vanish nor overflow, however often they are repeated."""
    drawn = np.random.default_rng(0).normal(size=(2, length, length)) / math.sqrt(length)
    return tuple(drawn.astype(jnp.dtype(dtype)))


def _ones(length: int) -> tuple[np.ndarray, ...]:
    return (np.ones(length, np.float32),)


def _matmul(x: Any, w: Any) -> tuple[jax.Array, ...]:
    return jnp.matmul(x, w), w


def _stream(x: Any) -> tuple[jax.Array, ...]:
    return (x * jnp.asarray(0.5, x.dtype) + jnp.asarray(1, x.dtype),)


def _special(x: Any) -> tuple[jax.Array, ...]:
    return (x / (jnp.sqrt(x) + jnp.asarray(1, x.dtype)),)  # values that begin at 1 stay above 0 for any number of trips


def _all_reduce(x: Any) -> tuple[jax.Array, ...]:
    return (lax.psum(x, "group"),)


def _all_gather(x: Any) -> tuple[jax.Array, ...]:
    return (lax.all_gather(x, "group", tiled=True)[: x.shape[0]],)


def _reduce_scatter(x: Any) -> tuple[jax.Array, ...]:
    # Written as a plan's reduce-scatter reaches XLA: backends that have none of their own sum the whole and cut.
    part = x.shape[0] // lax.axis_size("group")
    mine = lax.dynamic_slice(lax.psum(x, "group"), (lax.axis_index("group") * part,), (part,))
    return (lax.dynamic_update_slice(x, mine[:1], (0,)),)


def _all_to_all(x: Any) -> tuple[jax.Array, ...]:
    return (lax.all_to_all(x, "group", 0, 0, tiled=True),)


def _permute(x: Any) -> tuple[jax.Array, ...]:
    count = lax.axis_size("group")
    return (lax.ppermute(x, "group", [(i, (i + 1) % count) for i in range(count)]),)


_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
}


@dataclass(frozen=True)
class Sizes:
    """How much work a probe does: enough to show a rate, little enough for many runs.

    Attributes:
        matmul: Rows of the operands of products.
        memory: Bytes that are streamed.
        collective: Bytes of collectives among all devices; those of smaller groups leave out the middle one.
        images: Number of images under a convolution, and pixels on each side of one.
        unroll: How often a trip repeats its work; elementwise work is done once, since repetitions would be fused.
    """

    matmul: tuple[int, ...]
    memory: tuple[int, ...]
    collective: tuple[int, ...]
    images: tuple[int, int]
    unroll: int


CPU = Sizes((64, 192), (2**18, 2**21), (2**12, 2**20), (2, 32), 1)
ACCELERATOR = Sizes((512, 4096), (2**29,), (2**16, 2**22, 2**26), (32, 128), 8)


def probes(machine: Machine, sizes: Sizes | None = None) -> list[Probe]:
    """All probes of a machine, the most important first."""
    sizes = sizes or (CPU if machine.platform == "cpu" else ACCELERATOR)
    compute = list(_compute((machine.num_devices, 1, 1), sizes))
    return [*compute, *_windows(machine.num_devices, sizes), *_collectives(machine, sizes)]


def _compute(view: tuple[int, int, int], sizes: Sizes) -> Iterator[Probe]:
    yield Probe("launch", 0.0, "float32", view, _matmul, partial(_matrices, 8, "float32"), unroll=sizes.unroll)
    for length in sizes.memory:
        yield Probe("memory", 2.0 * length, "float32", view, _stream, partial(_ones, length // 4))
    length = sizes.memory[0] // 4  # reads and writes a number, which takes a root and a division
    yield Probe("special", 2.0 * length, "float32", view, _special, partial(_ones, length))
    for dtype in ("float32", "bfloat16"):
        for length in sizes.matmul:
            matrices = partial(_matrices, length, dtype)
            yield Probe("matmul", 2.0 * length**3, dtype, view, _matmul, matrices, unroll=sizes.unroll)


def _windows(num_devices: int, sizes: Sizes) -> Iterator[Probe]:
    """The first convolution of a network for images, and a part of a further one whose features are split."""
    for inputs, outputs, window, stride in ((3, 8, 7, 2), (16, 8, 3, 1)):
        yield window_probe(num_devices, *sizes.images, inputs, outputs, window, stride, sizes.unroll)


def window_probe(
    num_devices: int, batch: int, side: int, inputs: int, outputs: int, window: int, stride: int, unroll: int = 1
) -> Probe:
    """One convolution to time, of few features: fetching the numbers under the windows takes most of its time.

    Only forward convolutions are timed: inside a loop, where probes run, XLA's CPU backend leaves those of gradients in
    a layout that it has no quick kernel for, and outside of loops, where programs have them, all kinds take about as
    long.

    Args:
        num_devices: How many devices do it.
        batch: Images on one device.
        side: Pixels on each side of an image.
        inputs: Features of a pixel.
        outputs: Features of a pixel of the result.
        window: Pixels on each side of the window.
        stride: Pixels from one position of the window to the next.
        unroll: How often one trip repeats it.
    """
    positions = -(-side // stride)
    amount = float(batch * positions**2 * window)  # positions of the window times rows of pixels under it

    def arrays() -> tuple[np.ndarray, ...]:
        draw = np.random.default_rng(0).normal
        image, kernel = draw(size=(batch, side, side, inputs)), draw(size=(window, window, inputs, outputs))
        result = np.zeros((batch, positions, positions, outputs))
        return tuple(array.astype(np.float32) for array in (image, kernel, result))

    def body(image: Any, kernel: Any, made: Any) -> tuple[jax.Array, ...]:
        made = lax.conv_general_dilated(image, kernel, (stride,) * 2, "SAME", dimension_numbers=_LAYOUT)
        first = (0, 0, 0, 0)
        return lax.dynamic_update_slice(image, made[:1, :1, :1, :1], first), kernel, made  # so that trips differ

    flops = 2.0 * amount * window * inputs * outputs
    return Probe("window", amount, "float32", (num_devices, 1, 1), body, arrays, unroll=unroll, flops=flops)


def _collectives(machine: Machine, sizes: Sizes) -> Iterator[Probe]:
    whole, small = sizes.collective, (sizes.collective[0], sizes.collective[-1])
    for index, (view, across) in enumerate(views(machine.num_processes, machine.devices_per_process)):
        for kind in KINDS:
            for num_bytes in whole if index == 0 else small:
                yield collective_probe(kind, num_bytes, view, across, sizes.unroll)


def collective_probe(
    kind: str, num_bytes: int, view: tuple[int, int, int], across: bool = False, unroll: int = 1
) -> Probe:
    """A collective of about ``num_bytes`` bytes along the middle axis of a view."""
    size = view[1]
    shared = kind in ("all_gather", "all_to_all")  # their bytes are those of a group, not of a device
    length = -(-num_bytes // 4 // (size if shared else 1) // size) * size  # all-to-alls and scatters cut it evenly
    amount = 4.0 * length * (size if shared else 1)
    return Probe(kind, amount, "float32", view, _COLLECTIVES[kind], partial(_ones, length), across, unroll)


def views(num_processes: int, devices: int) -> list[tuple[tuple[int, int, int], bool]]:
    """The groups to time collectives in, and whether they reach over processes: the largest and the smallest.

    >>> views(1, 8)
    [((1, 8, 1), False), ((4, 2, 1), False)]
    >>> views(2, 4)
    [((1, 8, 1), True), ((2, 4, 1), False), ((1, 2, 4), True), ((4, 2, 1), False)]
    """
    total, pair, few = num_processes * devices, _least_factor(devices), _least_factor(num_processes)
    candidates = [
        ((1, total, 1), num_processes > 1),
        ((num_processes, devices, 1), False),
        ((num_processes // few, few, devices), num_processes > 1),
        ((total // pair, pair, 1), False),
    ]
    return [(view, across) for view, across in dict.fromkeys(candidates) if view[1] > 1]


def _least_factor(number: int) -> int:
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)
