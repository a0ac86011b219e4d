"""Probes of convolutions: of few features, so that fetching the numbers under the windows takes most of the time.

Only forward convolutions are timed: inside a loop, where probes run, XLA's CPU backend leaves those of gradients in a
layout that it has no quick kernel for, and outside of loops, where programs have them, all kinds take about as long.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from meshwright.profiler.looping import looped

_LAYOUT = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class WindowProbe:
    """One convolution to time; further attributes are those of `Reading`.

    Attributes:
        view: Sizes of the device mesh, as in `Probe`.
        batch: Images on one device.
        side: Pixels on each side of an image.
        inputs: Features of a pixel.
        outputs: Features of a pixel of the result.
        window: Pixels on each side of the window.
        stride: Pixels from one position of the window to the next.
        unroll: How often one trip repeats it.
    """

    view: tuple[int, int, int]
    batch: int
    side: int
    inputs: int
    outputs: int
    window: int
    stride: int
    unroll: int = 1
    what: str = "window"
    dtype: str = "float32"
    size: int = 1
    across: bool = False

    @property
    def amount(self) -> float:
        """Positions of the window times rows of pixels under it."""
        return float(self.batch * self._positions**2 * self.window)

    @property
    def _positions(self) -> int:
        return -(-self.side // self.stride)

    @property
    def flops(self) -> float:
        return 2.0 * self.amount * self.window * self.inputs * self.outputs

    def compile(self) -> Callable[[int], Any]:
        """The program, as `Probe.compile` makes it."""
        return looped(self.body, self.arrays(), self.view, self.unroll)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Images, kernel and result of one device."""
        draw = np.random.default_rng(0).normal
        image = draw(size=(self.batch, self.side, self.side, self.inputs))
        kernel = draw(size=(self.window, self.window, self.inputs, self.outputs))
        result = np.zeros((self.batch, self._positions, self._positions, self.outputs))
        return tuple(array.astype(self.dtype) for array in (image, kernel, result))

    def body(self, image: Any, kernel: Any, made: Any) -> tuple[jax.Array, ...]:
        """The body of the loop."""
        made = lax.conv_general_dilated(image, kernel, (self.stride,) * 2, "SAME", dimension_numbers=_LAYOUT)
        first = (0, 0, 0, 0)
        return lax.dynamic_update_slice(image, made[:1, :1, :1, :1], first), kernel, made  # so that trips differ
