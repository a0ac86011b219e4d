"""Convolutions by shape, and transposed ones, with both gradients."""

from collections.abc import Iterator
from typing import Any

import jax

from operations import BF16, F32, Case

CHANNELS = (
    (56, 64, 64, 1),
    (56, 64, 64, 3),
    (28, 128, 128, 3),
    (14, 256, 256, 3),
    (7, 512, 512, 3),
    (14, 1024, 256, 1),
    (64, 128, 128, 3),
    (16, 512, 512, 3),
    (56, 256, 64, 1),
    (64, 16, 16, 3),
)


def convolutions() -> Iterator[Case]:
    """2-D (depthwise too), 1-D and 3-D, each forward and its gradients by the input and by the window."""
    shapes = [  # batch, space, in, out, window, stride, groups, dtype
        *((32, (s, s), i, o, (k, k), (1, 1), 1, BF16) for s, i, o, k in CHANNELS),
        (128, (224, 224), 3, 64, (7, 7), (2, 2), 1, BF16),
        (128, (56, 56), 128, 128, (3, 3), (2, 2), 1, BF16),
        (64, (56, 56), 96, 96, (7, 7), (1, 1), 96, BF16),
        (64, (14, 14), 384, 384, (7, 7), (1, 1), 384, BF16),
        (128, (56, 56), 144, 144, (3, 3), (1, 1), 144, BF16),
        (128, (14, 14), 480, 480, (5, 5), (2, 2), 480, BF16),
        (32, (64, 64), 64, 64, (3, 3), (1, 1), 1, F32),
        (32, (32, 32), 256, 256, (3, 3), (1, 1), 1, F32),
        (8, (16384,), 128, 256, (2,), (1,), 1, F32),
        (8, (3000,), 80, 768, (3,), (1,), 1, BF16),
        (4, (1024,), 2048, 2048, (4,), (1,), 2048, BF16),
        (2, (64, 64, 64), 32, 32, (3, 3, 3), (1, 1, 1), 1, F32),
        (8, (16, 56, 56), 64, 64, (3, 3, 3), (1, 1, 1), 1, BF16),
    ]
    for batch, space, inputs, outputs, window, stride, groups, dtype in shapes:
        names = "DHW"[-len(space) :]
        numbers = (f"N{names}C", f"{names}IO", f"N{names}C")

        def forward(x: Any, w: Any, stride: Any = stride, numbers: Any = numbers, groups: int = groups) -> Any:
            return jax.lax.conv_general_dilated(
                x, w, stride, "SAME", dimension_numbers=numbers, feature_group_count=groups
            )

        x, w = ((batch, *space, inputs), dtype), ((*window, inputs // groups, outputs), dtype)
        made = ((batch, *(-(-s // t) for s, t in zip(space, stride, strict=True)), outputs), dtype)
        size = {"batch": batch, "space": space, "in": inputs, "out": outputs, "window": window, "stride": stride}
        size |= {"groups": groups, "dtype": dtype}
        yield from _three_ways("conv", size, forward, (x, w, made))


def transposed() -> Iterator[Case]:
    """Transposed convolutions of stride 2, as decoders have them, with both gradients."""
    for batch, side, inputs, outputs, window, dtype in (
        (128, 16, 256, 128, 4, F32),
        (128, 32, 128, 64, 4, F32),
        (128, 64, 64, 3, 4, F32),
        (32, 32, 256, 256, 2, F32),
        (32, 64, 128, 64, 2, BF16),
        (32, 32, 512, 256, 4, BF16),
    ):
        numbers = ("NHWC", "HWIO", "NHWC")
        up = lambda x, w, n=numbers: jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=n)
        x, w = ((batch, side // 2, side // 2, inputs), dtype), ((window, window, inputs, outputs), dtype)
        yield from _three_ways(
            "transposed conv",
            {"batch": batch, "side": side, "in": inputs, "out": outputs, "window": window, "dtype": dtype},
            up,
            (x, w, ((batch, side, side, outputs), dtype)),
        )


def _three_ways(kind: str, size: dict[str, Any], forward: Any, shapes: tuple[Any, Any, Any]) -> Iterator[Case]:
    """A convolution, and its gradients by the input and by the window."""
    yield Case(kind, {**size, "pass": "forward"}, forward, shapes[:2])
    by_input = lambda x, w, d, f=forward: jax.vjp(lambda x: f(x, w), x)[1](d)[0]
    yield Case(kind, {**size, "pass": "input"}, by_input, shapes)
    by_window = lambda x, w, d, f=forward: jax.vjp(lambda w: f(x, w), w)[1](d)[0]
    yield Case(kind, {**size, "pass": "window"}, by_window, shapes)
