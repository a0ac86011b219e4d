"""Cases of Pallas kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..contract import Case
from . import Builder, Sizes


def blocked(x: Any, w: Any) -> Any:
    """Blocks of rows times columns of a matrix, added up over the inner dim by the last axis of the grid."""
    (batch, rows, inner), columns = x.shape, w.shape[1]

    def kernel(x_ref: Any, w_ref: Any, out_ref: Any, sum_ref: Any) -> None:
        @pl.when(pl.program_id(3) == 0)
        def _() -> None:
            out_ref[...] = jnp.zeros_like(out_ref)

        out_ref[...] += x_ref[...] @ w_ref[...]
        sum_ref[...] = x_ref[...].sum() + jnp.zeros_like(sum_ref)

    made = (
        jax.ShapeDtypeStruct((batch, rows, columns), x.dtype),
        jax.ShapeDtypeStruct((columns, inner // 2, batch, rows // 2), x.dtype),
    )
    return pl.pallas_call(
        kernel,
        grid=(batch, rows // 2, columns, inner // 2),
        in_specs=[
            pl.BlockSpec((None, 2, 2), lambda b, i, j, k: (b, i, k)),
            pl.BlockSpec((2, 1), lambda b, i, j, k: (k, j)),
        ],
        out_specs=[
            pl.BlockSpec((None, 2, 1), lambda b, i, j, k: (b, i, j)),
            pl.BlockSpec((1, 1, 1, 1), lambda b, i, j, k: (j, k, b, i)),
        ],
        out_shape=made,
        interpret=True,
    )(x, w)


def two_dims_and_blocks(size: Sizes) -> Case:
    return Case(lambda x, w: tuple(blocked(x, w)), [size.floats(2, 4, 4), size.floats(4, 2)])


def added_by_vmap(size: Sizes) -> Case:
    def reverse(x: Any) -> Any:
        """Blocks in reverse order: only the axis that `jax.vmap` adds can be split."""
        spec = pl.BlockSpec((2,), lambda i: (i,))
        turned = pl.BlockSpec((2,), lambda i: (1 - i,))

        def kernel(x_ref: Any, out_ref: Any) -> None:
            out_ref[...] = x_ref[...] + pl.program_id(0)

        made = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, made, grid=(2,), in_specs=[spec], out_specs=turned, interpret=True)(x)

    return Case(jax.vmap(reverse), [size.floats(4, 4)])


CASES: list[tuple[str, Builder]] = [("pallas_call", two_dims_and_blocks), ("pallas_call", added_by_vmap)]
